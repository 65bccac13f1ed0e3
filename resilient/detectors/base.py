"""The Detector protocol: a function of (state, observation) that runs in training, over a log, or in a simulation alike.

Two calls per attempt keep the windows clean: `observe` judges the attempt against the past and changes nothing;
`absorb` lets it into the past afterwards, told whether it was flagged and whether the step was applied. A flagged,
refused or non-finite value never enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from resilient.signals import Finding, Observation


class Detector(Protocol):
    """Same inputs, same outputs, on every rank: no clock, no randomness, no I/O."""

    name: str

    def observe(self, observation: Observation) -> list[Finding]:
        """Findings on this attempt, judged against the past only. Does not change state."""

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        """Let the attempt into the reference, unless its own findings or its refusal keep it out.

        applied: the optimizer took this step (a log row without the word: it did)."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and numpy arrays, independent of later changes."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
