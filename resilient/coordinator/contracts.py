"""What must hold at every gate whatever the numbers say: schedule, counters, agreement, and a monitor that sees.

Each rank checks its own bookkeeping and tells the others in its row; all ranks then raise the same error from the same table
(BR-09, BR-10, BR-18, BR-47).
"""

from __future__ import annotations

import math

import numpy as np

from resilient.engines.base import Engine
from resilient.errors import CounterMismatch, MonitorBlind, RankDisagreement, ScheduleMismatch
from resilient.signals import Flag, StepTable


class Contracts:
    """One per coordinator. `anchor` once at the start, `remember_lr` after everything that may move the LR."""

    def __init__(self, engine: Engine, world_size: int, blind_after: int) -> None:
        self._engine = engine
        self._blind_after = blind_after
        self._seen = np.zeros(world_size, dtype=bool)  # ranks whose taps have reported
        self._lr = engine.lr()
        self._step_offset = engine.counters().steps  # steps taken before the guard came
        self._schedule_offset = 0

    def anchor(self, step: int | None = None) -> None:
        """From here on the engine's steps and schedule must move with the guard's. step: of a restored state."""
        counters = self._engine.counters()
        if step is not None:
            self._step_offset = counters.steps - step
        self._schedule_offset = (counters.schedule or 0) - (counters.steps - self._step_offset)
        self.remember_lr()

    def remember_lr(self) -> None:
        self._lr = self._engine.lr()

    def engine_steps(self) -> int:
        """Steps the engine has taken since the run began, by its own count."""
        return self._engine.counters().steps - self._step_offset

    def flags(self, applied: int) -> int:
        """What this rank finds wrong with its own bookkeeping when `applied` steps are in force."""
        counters, steps = self._engine.counters(), self.engine_steps()
        flags = 0
        if counters.schedule is not None:
            moved = not math.isclose(self._engine.lr(), self._lr, rel_tol=1e-9, abs_tol=0.0)
            if moved or counters.schedule - self._schedule_offset != steps:
                flags |= Flag.SCHEDULE
        if steps != applied:
            flags |= Flag.COUNTERS
        return flags

    def check(self, table: StepTable, applied: int, attempts: int) -> None:
        """Raise what any rank reported, on all ranks. attempts: this one included."""
        digests = table.column("digest")
        if not (digests == digests[0]).all():
            raise RankDisagreement(
                f"ranks decided differently at the attempt before {table.attempt}: digests {digests.tolist()}"
            )
        ranks = table.ranks_flagged(Flag.SCHEDULE)
        if ranks:
            raise ScheduleMismatch(
                f"on rank {_list(ranks)} the LR schedule is not where {applied} optimizer steps put it: position "
                f"{self._engine.counters().schedule} (expected {applied + self._schedule_offset}), LR "
                f"{self._engine.lr():.8g} (expected {self._lr:.8g}). Something besides the guard steps the scheduler"
            )
        ranks = table.ranks_flagged(Flag.COUNTERS)
        if ranks:
            raise CounterMismatch(
                f"on rank {_list(ranks)} the engine counts {self.engine_steps()} steps, the guard {applied}: something "
                "besides the guard steps the optimizer"
            )
        self._check_sight(table, attempts)

    def _check_sight(self, table: StepTable, attempts: int) -> None:
        norms = table.column("local_grad_norm")
        self._seen |= (norms != 0) | (table.column("nonfinite_backward") > 0)  # NaN != 0: a NaN was received, too
        if table.tokens > 0:
            self._seen |= table.column("tokens") == 0  # a rank without tokens has no gradient
        if attempts >= self._blind_after and not self._seen.all():
            raise MonitorBlind(
                f"monitor blind: no gradient reached the guard on rank {_list(table.ranks_where(~self._seen))} in {attempts} "
                "steps. Is the wrapped model the one that is trained, and is guard.backward called?"
            )


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
