"""What outlives a rollback, a crash and a restart: counters, budgets, excluded data (BR-44, BR-46, BR-50).

Rewinding any of this would let a fault reset its own budget, or train again on data that was just condemned.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Outer:
    """Cumulative over the whole run. attempts == applied + skipped; applied - steps_lost == the step in force.

    skipped: refused attempts, whatever followed (skip, overflow, rollback, stop).
    """

    attempts: int = 0
    applied: int = 0
    skipped: int = 0
    nonfinite_loss: int = 0  # summed over ranks and micro-steps
    nonfinite_grad: int = 0  # attempts whose gradient was not finite on some rank although its loss was
    rollbacks: int = 0
    steps_lost: int = 0  # applied steps taken back by rollbacks or restarts
    excluded: list[list[int]] = field(default_factory=list)  # data windows [first, last)
    policy: dict[str, Any] = field(default_factory=dict)

    def check(self, step: int) -> None:
        """The counters add up, or the bookkeeping is broken (BR-44)."""
        assert self.attempts == self.applied + self.skipped, f"attempts do not add up: {self}"
        assert self.applied - self.steps_lost == step, f"applied steps do not add up to step {step}: {self}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outer:
        return cls(**values)

    def write(self, path: Path) -> None:
        """Rank 0: write, fsync, rename."""
        part = path.with_suffix(".tmp")
        with open(part, "w") as file:
            json.dump(self.as_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    @classmethod
    def read(cls, path: Path) -> Outer | None:
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except FileNotFoundError:
            return None
