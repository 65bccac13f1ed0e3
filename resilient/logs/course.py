"""How the loss ran: its trend, where it broke away from it, whether it came back. Causal, O(1) in the length of the log.

Level: the lowest median of 32 accepted points so far (a loss is meant to fall, so this is where it would be without the
fault, also when it drifts away so slowly that a moving reference would follow). Residual: of an accepted point, from the
median of the eight before it; the last 128 count. Spread: half their interquartile range (the median absolute deviation of
a symmetric distribution, and unlike it blind to a steady fall). A point is off when it exceeds level + max(half a nat or its
like, 10 spreads, 3 times the 90th percentile of the residuals, which tells batches of two kinds, or heavy tails).

Three of five points off are a break-away, and so are two in a row of which one is off by twice as much (a log of every
hundredth step shows no more of it); one alone is a batch. Its first point is the blow-up; non-finite points count as off. It
is over when two of the last eight points or fewer are off. Points off, and those of a break-away, never enter level and
spread.

Half a nat or its like: for losses that are not nats, a quarter of the level below 2, and a fortieth of it above 20. A loss
at or below zero (a policy gradient's) has no level to compare with: half a nat. With fewer than eight accepted points there
is no spread to speak of: only half a level more counts as off, and no less than what the accepted ones differ by. Such a
break-away is taken back when the noise that the loss turns out to have explains it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

_LEVEL = 32  # accepted points behind a level
_SPREAD = 128  # residuals behind the spread
_SETTLED = 8  # accepted points before level and spread mean something
_OFF, _OF = 3, 5  # points off, of points, make a break-away
_BACK, _BACK_OF = 2, 8  # at most so many off, of so many, end it


def half_nat(level: float) -> float:
    """What half a nat is for a loss at `level`, whatever its unit."""
    size = abs(level)
    return max(min(0.5, 0.25 * size) if level > 0 else 0.5, 0.025 * size, 1e-6)


class RunningMedian:
    """Median of the last `size` values; O(size) memory, cheap for small sizes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    def quantile(self, share: float) -> float:
        """NaN when empty."""
        n = len(self._sorted)
        return self._sorted[min(int(share * n), n - 1)] if n else math.nan

    def add(self, value: float) -> None:
        self._order.append(value)
        insort(self._sorted, value)
        if len(self._order) > self._size:
            old = self._order.popleft()
            del self._sorted[bisect_left(self._sorted, old)]

    @property
    def value(self) -> float:
        """NaN when empty."""
        n = len(self._sorted)
        if not n:
            return math.nan
        return self._sorted[n // 2] if n % 2 else 0.5 * (self._sorted[n // 2 - 1] + self._sorted[n // 2])


def _half_range(residuals: RunningMedian) -> float:
    """Half the interquartile range; 0 without residuals."""
    return 0.5 * (residuals.quantile(0.75) - residuals.quantile(0.25)) if len(residuals) else 0.0


@dataclass
class BreakAway:
    """One departure of the loss from its trend. blowup_step: its first point off."""

    blowup_step: int
    blowup_point: int  # number of the point in the log, from 0
    level: float  # of the trend when it began
    first: float  # loss at its first point
    peak: float
    peak_step: int
    early: bool = False  # it began before there was a spread
    nonfinite: bool = False
    over_step: int | None = None  # None: not come back
    over_point: int | None = None


class LossCourse:
    """Feed every training loss in order; refused attempts stay out of it (the weights never saw them)."""

    def __init__(self) -> None:
        self.points = 0
        self.breaks: list[BreakAway] = []  # at most _KEPT, with the first and the last ones
        self.break_count = 0
        self.start = math.nan  # median of the first eight points
        self.first: list[float] = []  # those eight
        self.start_step = 0
        self.interval = 0  # between the first two points
        self.level = math.inf
        self.distinct = False  # more than one value was seen
        self.nonfinite = 0  # points, all together
        self.nonfinite_run = 0  # points in a row, at the end so far
        self.nonfinite_longest = 0
        self.nonfinite_step: int | None = None  # first point of the longest run
        self._run_step = 0
        self._recent = RunningMedian(_LEVEL)
        self._short = RunningMedian(_SETTLED)
        self._residuals = RunningMedian(_SPREAD)
        self._now = RunningMedian(_LEVEL)  # of all finite points: where the loss is, fault or not
        self._now_short = RunningMedian(_SETTLED)
        self._now_residuals = RunningMedian(_SPREAD)
        self._window: deque[tuple[int, int, float, bool]] = deque(maxlen=_BACK_OF)
        self._open: BreakAway | None = None
        self._early_of_break: RunningMedian | None = None
        self._value: float | None = None

    @property
    def open(self) -> BreakAway | None:
        """The break-away that goes on."""
        return self._open

    @property
    def spread(self) -> float:
        """Of the accepted points."""
        return _half_range(self._residuals)

    @property
    def present(self) -> float:
        """Median of the last 32 finite points."""
        return self._now.value

    @property
    def present_spread(self) -> float:
        """Of all finite points, fault or not."""
        return _half_range(self._now_residuals)

    def limit(self) -> float:
        """Above this a point is off."""
        return self._reference() + self._margin()

    def _reference(self) -> float:
        return self.level if len(self._recent) >= _SETTLED else self._recent.value

    def _margin(self) -> float:
        level = self._reference()
        if math.isnan(level) or len(self._recent) < 2:
            return math.inf
        if len(self._recent) < _SETTLED:
            return max(half_nat(level), 0.5 * abs(level), self._recent.quantile(1.0) - self._recent.quantile(0.0))
        return max(half_nat(level), 10.0 * self.spread, 3.0 * self._residuals.quantile(0.9))

    def add(self, step: int, value: float) -> None:
        """One training loss as logged, NaN and Inf included."""
        self._note(step, value)
        off = not math.isfinite(value) or value > self.limit()
        self._window.append((step, self.points, value, off))
        self.points += 1
        if self._open is None:
            if off:
                self._maybe_break()
            else:
                self._accept(value)
        else:
            self._follow(step, value)

    def shifted(self) -> bool:
        """The break-away that goes on is a new level, calm since it began: within twice the margin, no wider than three
        times the spread before, and not growing."""
        away = self._open
        if away is None or away.nonfinite or self._early_of_break is None or self.points - away.blowup_point < 100:
            return False
        began = self._early_of_break.value
        margin = self._margin()
        calm = self.present_spread <= 3.0 * max(self.spread, 0.002 * abs(away.level))
        return calm and began - away.level <= 2 * margin and self.present <= began + self.present_spread

    def _note(self, step: int, value: float) -> None:
        if self._value is not None and value != self._value:
            self.distinct = True
        self._value = value
        if self.points == 0:
            self.start_step = step
        elif self.points == 1:
            self.interval = step - self.start_step
        if math.isfinite(value):
            self.nonfinite_run = 0
            if len(self.first) < _SETTLED:
                self.first.append(value)
                self.start = sorted(self.first)[len(self.first) // 2]
            if len(self._now_short):
                self._now_residuals.add(value - self._now_short.value)
            self._now_short.add(value)
            self._now.add(value)
            return
        self.nonfinite += 1
        self.nonfinite_run += 1
        if self.nonfinite_run == 1:
            self._run_step = step
        if self.nonfinite_run > self.nonfinite_longest:
            self.nonfinite_longest, self.nonfinite_step = self.nonfinite_run, self._run_step

    def _accept(self, value: float) -> None:
        if len(self._short):
            self._residuals.add(value - self._short.value)
        self._short.add(value)
        self._recent.add(value)
        if len(self._recent) >= _SETTLED:
            self.level = min(self.level, self._recent.value)
        first = self.breaks[0] if self.breaks else None
        if first is not None and first.early and len(self._recent) == _LEVEL and not first.nonfinite:
            if first.peak <= self.limit():
                self._take_back(first)
            first.early = False  # settled

    def _maybe_break(self) -> None:
        lately = [point for point in list(self._window)[-_OF:] if point[3]]
        pair = [point[2] for point in list(self._window)[-2:] if point[3]]
        widest = self._residuals.quantile(1.0)
        far = self._reference() + max(2.0 * self._margin(), 0.0 if math.isnan(widest) else widest)
        if len(lately) < _OFF and not (len(pair) == 2 and not all(value <= far for value in pair)):
            return
        step, point, value, _ = lately[0]
        level = self.level if math.isfinite(self.level) else self._recent.value
        finite = [(v, s) for s, _, v, _ in lately if math.isfinite(v)]
        peak, peak_step = max(finite, default=(math.nan, step))
        early = len(self._recent) < _SETTLED
        self._open = BreakAway(step, point, level, value, peak, peak_step, early, len(finite) < len(lately))
        self._early_of_break = RunningMedian(_LEVEL)
        self.break_count += 1
        self.breaks.append(self._open)
        if len(self.breaks) > _KEPT:
            del self.breaks[_KEPT // 2]

    def _follow(self, step: int, value: float) -> None:
        away, early = self._open, self._early_of_break
        assert away is not None and early is not None
        if not math.isfinite(value):
            away.nonfinite = True
        elif not value <= away.peak:
            away.peak, away.peak_step = value, step
        if math.isfinite(value) and len(early) < _LEVEL:
            early.add(value)
        if len(self._window) == _BACK_OF and sum(off for *_, off in self._window) <= _BACK:
            away.over_step, away.over_point = step, self.points - 1
            self._open = self._early_of_break = None
            return
        looked_at = away.early and not away.nonfinite and self.points == away.blowup_point + 2 * _LEVEL
        if looked_at and self.present - away.level <= 4.0 * self.present_spread:
            self._take_back(away)

    def _take_back(self, away: BreakAway) -> None:
        """It was noise."""
        self.breaks.remove(away)
        self.break_count -= 1
        if self._open is away:
            self._open = self._early_of_break = None


_KEPT = 64  # break-aways remembered
