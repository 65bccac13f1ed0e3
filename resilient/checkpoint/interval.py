"""How many steps apart checkpoints are (S15): far when all is calm and saving is dear, close when the run looks ill. Pure.

Calm: the interval that loses the least time to saving and to repeating what a failure cost. Young, "A first order
approximation to the optimum checkpoint interval", CACM 17 (1974): T = sqrt(2 d M). Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps", FGCS 22 (2006):

    T = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d   for d < 2M,    T = M   otherwise

d: seconds that a save keeps training from going on (an asynchronous save: the stall alone). M: mean seconds between failures.

Ill: a stability level below A is taken for a failure rate that many times higher (`HAZARD`), so the interval shrinks by its
root. All inputs come from the table, so all ranks have the same interval; the columns they need are named at `Intervals`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

HAZARD: Mapping[str, float] = {"A": 1.0, "B": 4.0, "C": 16.0, "D": 64.0, "E": 64.0}
"""Failures to expect at a stability level, as a multiple of those when calm: each letter halves the interval. E is as D:
what is captured of a broken run will not be trusted, and capturing it more often helps nobody."""

RANK_MTBF_S = 50_000 * 3600.0
"""Mean time between failures of one rank, before anything is known of this run: 419 unexpected interruptions in 54 days on
16,384 GPUs (Llama 3, arXiv 2407.21783) are one in 50,700 hours of a GPU."""

_SAVES = 9  # the cost is the median of so many last saves: one slow write is no reason
_STEP_WEIGHT = 0.02  # of the newest step in the mean step time


@dataclass(frozen=True)
class IntervalConfig:
    """shortest, longest: bounds in steps. At most 1000 apart, as S15 has it, however cheap a lost hour may be.
    calm_after: steps that a better level must last before the interval grows. change: the relative difference below which
    an interval that only costs or step times have moved stays as it is."""

    shortest: int = 5
    longest: int = 1000
    calm_after: int = 100
    change: float = 0.25

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= 1000:
            raise ValueError(
                f"checkpoint intervals need 1 <= shortest <= longest <= 1000, got {self.shortest} and {self.longest}"
            )
        if self.calm_after < 0 or not 0 <= self.change < 1:
            raise ValueError(f"calm_after >= 0 and 0 <= change < 1 are needed, got {self.calm_after} and {self.change}")


def young(cost_s: float, mtbf_s: float) -> float:
    """Young's interval in seconds."""
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Daly's interval in seconds of training between two saves. cost_s >= 0, mtbf_s > 0."""
    ratio = cost_s / (2.0 * mtbf_s)
    if ratio >= 1.0:
        return mtbf_s
    return young(cost_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


def mtbf(prior_s: float, up_s: float, failures: int) -> float:
    """Mean seconds between failures of the job: a prior that weighs as much as one failure, and what this run has seen.

    (prior + time up) / (1 + failures) is the inverse of the mean failure rate under a gamma prior of shape 1."""
    return (prior_s + max(up_s, 0.0)) / (1.0 + max(failures, 0))


class Intervals:
    """The interval in force. Feed it the same on every rank:

    after every step     level letter; `step_s`: wall seconds of an attempt, the largest of all ranks, NaN: not known yet
    after every save     `stall_s`: seconds that training stood still for it, and `write_s`: until it was committed; the
                         largest of all ranks of each
    after every failure  a rollback, or a restart

    The stability letter and rollbacks follow from the table; the seconds are gathered when a save is committed.

    The interval shrinks at once when the level gets worse. It grows when a better level has lasted `calm_after` steps."""

    def __init__(self, config: IntervalConfig, world: int) -> None:
        self.config = config
        self._prior_s = RANK_MTBF_S / max(world, 1)
        self._stalls: list[float] = []
        self._writes: list[float] = []
        self._step_s = math.nan
        self._up_s = 0.0
        self._failures = 0
        self._letter = "A"
        self._better_for = 0  # steps
        self._best_since = "A"  # the worst letter seen in those steps
        self._settled_for = ""  # level
        self.steps = config.longest

    # -- what happens ---------------------------------------------------------------------------------------------

    def step(self, letter: str, step_s: float) -> None:
        """One attempt is over. A time that is not finite or not positive leaves the mean as it was."""
        if math.isfinite(step_s) and step_s > 0:
            self._up_s += step_s
            first = math.isnan(self._step_s)
            self._step_s = step_s if first else self._step_s + _STEP_WEIGHT * (step_s - self._step_s)
        self._follow(letter if letter in HAZARD else "A")
        self._settle()

    def saved(self, stall_s: float, write_s: float) -> None:
        """A save was committed. Not finite or negative: it was not measured."""
        for times, seconds in ((self._stalls, stall_s), (self._writes, write_s)):
            if math.isfinite(seconds) and seconds >= 0:
                times.append(seconds)
                del times[:-_SAVES]
        self._settle()

    def failed(self, times: int = 1) -> None:
        self._failures += max(times, 0)
        self._settle()

    # -- what follows from it ---------------------------------------------------------------------------------------

    def due(self, step: int, last: int | None) -> bool:
        """Whether to save at `step`. last: step of the newest checkpoint of this course, None: there is none."""
        return last is None or not last <= step < last + self.steps

    def reason(self) -> str:
        """In words, for the journal."""
        if not self._stalls or math.isnan(self._step_s):
            return f"{self.steps} steps at level {self._letter}: the cost of a save is not known yet"
        hours = mtbf(self._prior_s, self._up_s, self._failures) / 3600
        return (
            f"{self.steps} steps at level {self._letter}: a save stalls {median(self._stalls):.2g} s, a step takes "
            f"{self._step_s:.2g} s, a failure is expected every {hours:.3g} h ({self._failures} so far)"
        )

    def _follow(self, letter: str) -> None:
        """Down at once, up when it has lasted, and then to the worst level of that time."""
        if letter >= self._letter:
            self._letter, self._better_for, self._best_since = letter, 0, "A"
            return
        self._better_for += 1
        self._best_since = max(self._best_since, letter)
        if self._better_for >= self.config.calm_after:
            self._letter, self._better_for, self._best_since = self._best_since, 0, "A"

    def _settle(self) -> None:
        wanted, least = self._wanted()
        if self._letter != self._settled_for or self.steps < least or self._differs(wanted):
            self.steps, self._settled_for = wanted, self._letter

    def _differs(self, wanted: int) -> bool:
        return abs(wanted - self.steps) > self.config.change * max(wanted, self.steps)

    def _wanted(self) -> tuple[int, int]:
        """(steps, fewest possible): a save must have been written before the next one begins."""
        low, high = self.config.shortest, self.config.longest
        hazard = HAZARD[self._letter]
        ceiling = max(low, round(high / math.sqrt(hazard)))  # saving may be so cheap that only the bound holds
        if not self._stalls or math.isnan(self._step_s):
            return ceiling, low
        seconds = daly(median(self._stalls), mtbf(self._prior_s, self._up_s, self._failures) / hazard)
        busy = median(self._writes) if self._writes else 0.0
        least = min(max(low, math.ceil(busy / self._step_s)), high)
        return max(min(round(seconds / self._step_s), ceiling), least), least

    # -- kept outside the rollback: going back must not make the failure unseen ------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "stalls": list(self._stalls),
            "writes": list(self._writes),
            "step_s": None if math.isnan(self._step_s) else self._step_s,
            "up_s": self._up_s,
            "failures": self._failures,
            "letter": self._letter,
            "better_for": self._better_for,
            "best_since": self._best_since,
            "settled_for": self._settled_for,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stalls, self._writes = list(state["stalls"]), list(state["writes"])
        self._step_s = math.nan if state["step_s"] is None else float(state["step_s"])
        self._up_s, self._failures = float(state["up_s"]), int(state["failures"])
        self._letter, self._better_for = str(state["letter"]), int(state["better_for"])
        self._best_since, self._settled_for = str(state["best_since"]), str(state["settled_for"])
        self.steps = int(state["steps"])
