"""What a log tells beside its alarms: LR, clipping, loss scale, evaluation, staircase, restarts. The facts of the symptom
table, each with the sentence that supports it. Causal while rows come; O(1) in the length of the log."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from resilient.logs.course import BreakAway

_NEAR = 50  # points: what counts as shortly before
_CUT = 0.8  # an LR that falls to this or less from one point to the next was cut
_BRIEF = 1000  # points after a cut within which trouble again means that it helped only briefly
_CALM = 20  # points that must be calm after a cut for it to have helped at all
_USUAL_CLIP = 1.0  # max_norm of most recipes; a foreign log does not say its own
_FEW = 32  # points before a share means something


@dataclass(frozen=True)
class _Cut:
    step: int
    point: int
    before: float
    after: float


@dataclass
class _Constant:
    value: float
    rows: int = 0
    alone: bool = True  # no other value was seen


class Clues:
    """Feed every row that is not a repetition; `point` counts training losses, as LossCourse.points does."""

    def __init__(self) -> None:
        self._rise: list[float] = []  # of the LR that rises now or rose last: [first point, first lr, last point, lr]
        self._first_rise = True  # the LR has only risen (or stood) so far
        self._warm_until = -1  # last point of the first rise
        self._rises: deque[tuple[int, float, int, float]] = deque(maxlen=64)
        self._cuts: deque[_Cut] = deque(maxlen=64)
        self._lr: float | None = None
        self._norms = self._above = 0
        self._scale: float | None = None
        self._falls: list[tuple[int, int, float, float]] = []  # step, point, from, to: since it last rose
        self._fallen: tuple[int, int, int, float, float] | None = (
            None  # newest run: steps from, to; point; scale from, to
        )
        self._evaluations = 0
        self._best: tuple[float, int, float] | None = None  # evaluation loss, step, training level then
        self._last_evaluations: deque[tuple[int, float]] = deque(maxlen=2)
        self._constants: dict[str, _Constant] = {}
        self._losses: deque[float] = deque(maxlen=32)
        self._steps_down: deque[tuple[int, int]] = deque(maxlen=8)  # step, point
        self.restarts: deque[tuple[int, int]] = deque(maxlen=256)  # step begun again from, point

    def add(self, step: int, point: int, values: Mapping[str, float], level: float, spread: float) -> None:
        """One row. level, spread: of the training loss before it."""
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in values:
                self._constant(name, values[name])
        if "lr" in values:
            self._learning_rate(step, point, values["lr"])
        norm = values.get("grad_norm", math.nan)
        if math.isfinite(norm):
            self._norms += 1
            self._above += norm > _USUAL_CLIP
        if "loss_scale" in values:
            self._loss_scale(step, point, values["loss_scale"])
        evaluation = values.get("eval_loss", math.nan)
        if math.isfinite(evaluation):
            self._evaluate(step, evaluation, level)
        loss = values.get("loss", math.nan)
        if math.isfinite(loss):
            self._staircase(step, point, loss, spread)

    # -- facts -----------------------------------------------------------------------------------------------------

    def standing(self, present: float) -> dict[str, str]:
        """What is worth saying about any run, at its end. present: training loss level now."""
        found: dict[str, str] = {}
        for name, seen in self._constants.items():
            if seen.alone and seen.rows >= _FEW:
                found["constant"] = f"{name} is {seen.value:g} on all {seen.rows} rows"
        if self._norms >= 2 * _FEW and self._above >= 0.95 * self._norms and "constant" not in found:
            found["clips_always"] = (
                f"the gradient norm is above {_USUAL_CLIP:g} on {self._above / self._norms:.0%} of the rows: with the usual "
                f"clip at {_USUAL_CLIP:g} (the log does not say its own) every step is clipped"
            )
        if self._best is not None and self._evaluations >= 4:
            best, at, level = self._best
            risen = all(value > best + 0.01 * abs(best) for _, value in self._last_evaluations)
            if risen and present < level:
                step, value = self._last_evaluations[-1]
                found["eval_rises"] = (
                    f"best evaluation {best:.4g} at step {at}, {value:.4g} at step {step}, while the training loss fell "
                    f"from {level:.4g} to {present:.4g}"
                )
        distances = [b[1] - a[1] for a, b in zip(self._steps_down, list(self._steps_down)[1:], strict=False)]
        if len(distances) >= 2 and max(distances) - min(distances) <= max(2, 0.1 * median(distances)):
            steps = ", ".join(str(step) for step, _ in self._steps_down)
            found["staircase"] = f"the loss fell in steps at {steps}: equal distances, as at the end of an epoch"
        return found

    def around(self, onset_step: int, onset_point: int, points: int, troubles: list[int]) -> dict[str, str]:
        """What stood around the beginning of trouble. points: of the log; troubles: points of all alarms and blow-ups."""
        found: dict[str, str] = {}
        if onset_point < 0.1 * points:
            found["early"] = f"it began at step {onset_step}, within the first tenth of the log"
        if 0 <= onset_point <= self._warm_until:
            found["warming_up"] = f"at step {onset_step} the LR was still rising from its start"
        else:
            for first, low, last, high in self._all_rises():
                if first <= onset_point <= last + _NEAR and first > self._warm_until and high >= 1.2 * low:
                    found["lr_rose"] = f"the LR rose from {low:.3g} to {high:.3g} just before step {onset_step}"
        for step, point in self.restarts:
            if 0 <= onset_point - point <= 5:
                found["restarted"] = f"training began again at step {step}, just before"
        if self._fallen is not None:
            begin, end, point, high, low = self._fallen
            if abs(point - onset_point) <= 4 * _NEAR or point >= points - 2 * _NEAR:
                found["scale_fell"] = f"the loss scale fell from {high:g} to {low:g} between steps {begin} and {end}"
        for cut in self._cuts:
            motive = any(cut.point - 4 * _NEAR <= p <= cut.point for p in troubles)
            later = [p for p in troubles if p > cut.point]
            if motive and later and _CALM <= min(later) - cut.point <= _BRIEF:
                found["lr_cut_brief"] = (
                    f"the LR was cut from {cut.before:.3g} to {cut.after:.3g} at step {cut.step}; trouble came back "
                    f"{min(later) - cut.point} points later"
                )
        return found

    # -- signals ---------------------------------------------------------------------------------------------------

    def _constant(self, name: str, value: float) -> None:
        seen = self._constants.setdefault(name, _Constant(value))
        seen.rows += 1
        seen.alone = seen.alone and value == seen.value

    def _learning_rate(self, step: int, point: int, lr: float) -> None:
        before, self._lr = self._lr, lr
        if before is None or not math.isfinite(lr) or lr == before:
            return
        if lr > before:
            if self._rise and self._rise[2] >= point - 2:
                self._rise[2:] = [point, lr]
            else:
                self._end_rise()
                self._rise = [point - 1, before, point, lr]
            if self._first_rise:
                self._warm_until = point
            return
        self._first_rise = False
        self._end_rise()
        if 0 < lr <= _CUT * before:
            self._cuts.append(_Cut(step, point, before, lr))

    def _end_rise(self) -> None:
        if self._rise:
            first, low, last, high = self._rise
            self._rises.append((int(first), low, int(last), high))
            self._rise = []

    def _all_rises(self) -> list[tuple[int, float, int, float]]:
        now = [(int(self._rise[0]), self._rise[1], int(self._rise[2]), self._rise[3])] if self._rise else []
        return [*self._rises, *now]

    def _loss_scale(self, step: int, point: int, scale: float) -> None:
        before, self._scale = self._scale, scale
        if before is None or scale == before or not math.isfinite(scale):
            return
        if scale > before:
            self._falls.clear()
            return
        self._falls.append((step, point, before, scale))
        del self._falls[:-_FEW]
        if len(self._falls) >= 3:
            self._fallen = (self._falls[0][0], step, point, self._falls[0][2], scale)

    def _evaluate(self, step: int, value: float, level: float) -> None:
        self._evaluations += 1
        self._last_evaluations.append((step, value))
        if self._best is None or value < self._best[0]:
            self._best = (value, step, level)

    def _staircase(self, step: int, point: int, loss: float, spread: float) -> None:
        """A step down: eight points lower than the flat stretch of 24 before them."""
        self._losses.append(loss)
        if len(self._losses) < 32 or (self._steps_down and point - self._steps_down[-1][1] < 32):
            return
        if not self._losses[-8] < self._losses[-9]:  # cheap: the step itself must lie there
            return
        values = list(self._losses)
        first, second, after = median(values[:12]), median(values[12:24]), median(values[24:])
        drop = second - after
        if drop > max(4.0 * spread, 0.03 * abs(second)) and abs(first - second) <= 0.25 * drop:
            self._steps_down.append((step, point - 7))


def reinitialised(away: BreakAway, first: Sequence[float]) -> str | None:
    """The sentence, if the loss jumped to where it stood at the very beginning of the log. first: its first losses."""
    for start in first[:2]:
        far = abs(start - away.level) > 0.5 * abs(away.level)
        if far and math.isfinite(away.first) and abs(away.first - start) <= 0.1 * abs(start):
            return f"at step {away.blowup_step} the loss jumped to {away.first:.4g}; the log began at {start:.4g}"
    return None
