"""What must hold at every gate whatever the numbers say: schedule, counters, agreement, empty gradient
buffers, and a monitor that sees.

Each rank checks its own bookkeeping and tells the others in its row; all ranks then raise the same error from the same table
(BR-04, BR-09, BR-10, BR-18, BR-47).
"""

from __future__ import annotations

import math

from resilient.engines.base import Engine
from resilient.errors import CounterMismatch, GradientsLeft, MonitorBlind, RankDisagreement, ScheduleMismatch
from resilient.signals import Exchanged, Flag


class Contracts:
    """One per coordinator. `anchor` once at the start, `remember_lr` after everything that may move the LR."""

    def __init__(self, engine: Engine, blind_after: int) -> None:
        self._engine = engine
        self._blind_after = blind_after
        self._seen = False  # a gradient of this rank
        self._reduced_seen = False  # a gradient after reduction
        self._output_seen = False  # an output of this rank's model
        self._remarked = False
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
        """What this rank finds wrong with its own bookkeeping when `applied` steps are in force, and what it has not seen
        yet."""
        counters, steps = self._engine.counters(), self.engine_steps()
        flags = 0
        if counters.schedule is not None:
            moved = not math.isclose(self._engine.lr(), self._lr, rel_tol=1e-9, abs_tol=0.0)
            if moved or counters.schedule - self._schedule_offset != steps:
                flags |= Flag.SCHEDULE
        if steps != applied:
            flags |= Flag.COUNTERS
        if not self._seen:
            flags |= Flag.BLIND
        if not self._output_seen:
            flags |= Flag.NO_OUTPUT
        return flags

    def check(self, table: Exchanged, applied: int, attempts: int) -> None:
        """Raise what any rank reported, on all ranks. attempts: this one included."""
        low, high = table.ends("digest")
        if low != high:
            raise RankDisagreement(
                f"ranks decided differently at the attempt before {table.attempt}: digests from {low:.0f} to {high:.0f}"
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
        self._check_cleared(table)
        self._check_sight(table, attempts)

    def remark(self, table: Exchanged, attempts: int) -> str | None:
        """Once: what is not measured although it could be, and harms nothing else (BR-47)."""
        self._output_seen = self._output_seen or not math.isnan(table.own("logit_max"))
        if self._remarked or attempts < self._blind_after:
            return None
        self._remarked = True
        ranks = table.ranks_that("no output")
        if not ranks:
            return None
        return (
            f"no output of the model has reached the guard on rank {_list(ranks)} in {attempts} steps: logit_max and "
            "non-finite outputs are not measured. Call the model itself, not one of its methods, and have it return logits"
        )

    def _check_cleared(self, table: Exchanged) -> None:
        ranks = table.ranks_that("leftover")
        if ranks:
            norm = math.sqrt(table.total("leftover_sq"))
            raise GradientsLeft(
                f"on rank {_list(ranks)} gradients from before were still in the buffers when step {table.step} began "
                f"(norm {norm:.4g}): they would add up with its own. Is there a backward that the guard does not know of, or "
                "a wrapper that keeps the gradients from being cleared?"
            )

    def _check_sight(self, table: Exchanged, attempts: int) -> None:
        blind = table.ranks_that("blind")
        excused = table.tokens > 0 and table.own("tokens") == 0  # a rank without tokens has no gradient
        if not table.tokens > 0:  # nobody counts them
            blind = tuple(sorted({*blind, *table.ranks_that("blind, no tokens")}))
        # NaN != 0: a NaN was received, too.
        seen = table.own("local_grad_norm") != 0 or table.own("nonfinite_backward") > 0 or excused
        self._seen = self._seen or seen
        if attempts >= self._blind_after and blind:
            raise MonitorBlind(
                f"monitor blind: no gradient reached the guard on rank {_list(blind)} in {attempts} "
                "steps. Is the wrapped model the one that is trained, and is guard.backward called?"
            )
        self._reduced_seen |= table.grad_norm != 0
        if attempts >= self._blind_after and not self._reduced_seen and table.total("local_grad_norm") != 0:
            raise MonitorBlind(
                f"monitor blind: gradients were computed but none was left at the gate in {attempts} steps. Is zero_grad "
                "called between guard.backward and guard.step?"
            )


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
