"""A snapshot: everything one rank needs to replay from a quiescent point, bit for bit.

Taken only when optimizer, schedule, counters and data position have all moved (BR-19). What must outlive a rollback
(budget, skipped data, counters of attempts) is *not* in here: see coordinator/outer.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from resilient.checkpoint.digest import state_digest

PARTS = ("engine", "rng", "data", "judge")
"""Required parts. A snapshot or checkpoint that lacks one is refused (BR-09)."""


@dataclass(frozen=True)
class Snapshot:
    """State of one rank after optimizer step `step` was committed.

    parts: one entry per name in PARTS, nested dicts of tensors and plain values.
    position: data windows consumed since the run began (trained and skipped alike).
    lr, schedule: what the next step would use, for the proof after a restore.
    digests: 64-bit digest per part, taken when the snapshot was.
    """

    step: int
    attempt: int
    position: int
    lr: float
    schedule: int | None
    parts: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def digest_parts(parts: dict[str, Any]) -> dict[str, str]:
        return {name: state_digest(parts[name]) for name in PARTS}
