"""What outlives a rollback, a crash and a restart: counters, budgets, excluded data (BR-44, BR-46, BR-50).

Rewinding any of this would let a fault reset its own budget, or train again on data that was just condemned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resilient.checkpoint.files import write_json


@dataclass
class Outer:
    """Cumulative over the whole run. attempts == applied + skipped + retried; applied - steps_lost == the step in force.

    skipped: refused attempts, whatever followed (skip, overflow, rollback, stop). retried: refused ones whose window was
    run again as the next attempt.
    """

    attempts: int = 0
    applied: int = 0
    skipped: int = 0
    retried: int = 0
    nonfinite_loss: int = 0  # summed over ranks and micro-steps
    nonfinite_grad: int = 0  # attempts whose gradient was not finite on some rank although its loss was
    rollbacks: int = 0
    steps_lost: int = 0  # applied steps taken back by rollbacks or restarts
    excluded: list[list[int]] = field(default_factory=list)  # data windows [first, last)
    window_samples: int = (
        0  # in one that lies ahead, over all ranks (other_world.py: samples_per_window); 0: nobody has said
    )
    policy: dict[str, Any] = field(default_factory=dict)
    interval: dict[str, Any] = field(default_factory=dict)  # of checkpoints, where it adapts: what it has learned
    lr_factor: float = 1.0  # asked for from outside, in force until it is asked for anew

    def problem(self, step: int) -> str | None:
        """What does not add up in the bookkeeping when `step` is the step in force (BR-44)."""
        if self.attempts != self.applied + self.skipped + self.retried:
            return (
                f"{self.attempts} attempts are not {self.applied} applied, {self.skipped} skipped and "
                f"{self.retried} retried ones"
            )
        if self.applied - self.steps_lost != step:
            return f"{self.applied} applied and {self.steps_lost} lost steps do not make step {step}"
        return None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outer:
        return cls(**values)

    def write(self, path: Path) -> None:
        """Rank 0. Raises OSError."""
        write_json(path, self.as_dict())

    @classmethod
    def read(cls, path: Path) -> Outer | None:
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except FileNotFoundError:
            return None


def newest(path: Path | None, saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """What outlives a rollback, from the last incident (`path`) or the checkpoint (`saved`), whichever has seen more attempts."""
    found = [Outer.from_dict(dict(saved))] if saved else []
    written = Outer.read(path) if path is not None else None
    if written is not None:
        found.append(written)
    return max(found, key=lambda outer: outer.attempts, default=Outer()).as_dict()
