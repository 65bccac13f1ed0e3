"""The statistics of many signals at once: four families, each a few array operations a step, O(1) in the run's length.

    point      this point against the running level, in robust sigmas
    confirmed  the median of the last three points: two of them are off, so it is no single odd batch
    level      the mean of the last 8 points against the 56 before
    drift      the mean of the last 32 points against the 96 before
    trend      the rise over the last 64 points, by least squares
    scale      the mean step-to-step difference of the last 96 points (recent ones count more) against a reference of 1024

All are one-sided: the rows are signed so that up is bad. `level`, `drift` and `trend` are linear functions of the last 128
points, clipped around the running level so that no single point carries them, and standardised by their own healthy
history, which takes autocorrelation into account. Nothing that is off enters a reference, and what enters `scale`'s
reference is at least 96 points old: a slow ramp cannot hide in it.

Made to cost little, since every step waits for it: what only the references need is kept for 16 steps and taken in at
once; a new value costs a column, not a shift of its window (`Windows`); what does not apply any more (youth) is a flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

STATISTICS = ("point", "confirmed", "level", "drift", "trend", "scale")
COUNT = len(STATISTICS)
POINT, CONFIRMED, LEVEL, DRIFT, TREND, SCALE = range(COUNT)
LINEAR = slice(LEVEL, SCALE)

_WINDOW = 128
_MEDIAN = 16  # accepted points behind the running level
_DIFFERENCES = 96
_REFERENCE = 1024
_CLIP = 6.0  # robust sigmas beyond which a point counts no further in level, drift and trend
_CLIP_DIFFERENCE = 4.0
_ABS_TO_SIGMA = 1.2533  # of a normal distribution: sigma / E|x|
_MAD_TO_SIGMA = 1.4826
_LEAST_SPREAD = 0.05
_SIGMA_MEMORY = np.array([128.0, 24.0])  # points; the smaller of both sigmas counts, the short one 1.4 times
_YOUNG = 160  # points of a steep start: differences have a say in sigma (their own is sqrt(2) larger, which is margin)
_EARLY = 25
_LAG = 4  # batches
_BATCH = 16  # steps after which the references take in what was kept
_RECENT = 64
_SLACK = 64  # columns to go before a window is moved back to the front of its array


def _window_weights() -> np.ndarray:
    """(128, 4) weights of the window *before* the new point is in: how far the running level (a median of 16) lags behind
    the trend of the last 32 points; then level, drift and trend without the new point's own share."""
    linear = np.zeros((_WINDOW, 3))
    linear[-8:, 0], linear[-64:-8, 0] = 1 / 8, -1 / 56
    linear[-32:, 1], linear[:-32, 1] = 1 / 32, -1 / 96
    t = np.arange(64) - 31.5
    linear[-64:, 2] = 64 * t / (t @ t)
    weights = np.zeros((_WINDOW, 4))
    t = np.arange(32) - 15.5
    weights[-32:, 0] = 8.5 * t / (t @ t)
    weights[1:, 1:] = linear[:-1]  # shifted: the oldest point is about to leave
    return weights


_WEIGHTS = _window_weights()
_NEWEST = np.array([1 / 8, 1 / 32, 64 * 31.5 / float((np.arange(64) - 31.5) @ (np.arange(64) - 31.5))])
_RECENCY = np.linspace(0.1, 1.0, _DIFFERENCES) / np.linspace(0.1, 1.0, _DIFFERENCES).sum()
_RECENCY_BEFORE = np.concatenate([[0.0], _RECENCY[:-1]])  # shifted likewise


class Windows:
    """The last `width` values of each row, oldest first, as `now` (rows, width).

    When all rows get a value, it goes into the next column of a wider array, of which `now` is a view that moves along;
    rows that get one alone are shifted in place."""

    def __init__(self, rows: int, width: int, empty: float = 0.0, dtype: type = np.float64) -> None:
        self._data: np.ndarray = np.full((rows, width + _SLACK), empty, dtype=dtype)
        self._width = width
        self._move(width)

    def _move(self, end: int) -> None:
        self._end = end
        self.now = self._data[:, end - self._width : end]

    def push(self, rows: Any, values: np.ndarray | float, everyone: bool) -> None:
        """Append values (n,) to `rows`; everyone: to all rows, in order."""
        if not everyone:
            self.now[rows, :-1] = self.now[rows, 1:]
            self.now[rows, -1] = values
            return
        if self._end == self._data.shape[1]:
            self._data[:, : self._width] = self.now
            self._move(self._width)
        self._data[:, self._end] = values
        self._move(self._end + 1)


@dataclass
class Look:
    """One step of some rows against their past; made by `Statistics.look`, consumed by `Statistics.learn`."""

    rows: Any  # a slice where the rows are contiguous, else indices
    everyone: bool  # all rows
    y: np.ndarray  # (n,) signed (log) values
    level: np.ndarray  # (n,) running level expected for this step
    scores: np.ndarray  # (n, COUNT); 0 where a statistic does not speak yet
    clipped: np.ndarray  # (n,) y within 6 sigmas of the level
    linear: np.ndarray  # (n, 3) level, drift, trend before standardising, in sigmas
    residual: np.ndarray  # (n,) y - level
    ratio: np.ndarray  # (n,) |y - last y| in units of its reference mean, at most 4


class Statistics:
    """State of all rows (signals). `look` changes nothing; `learn` does.

    speaks: (rows, COUNT) 1.0 where a statistic has points enough to be used, else 0.0."""

    _WINDOWS = ("accepted", "window", "recent", "ratios")
    _ARRAYS = (
        "floors", "points", "level_1", "level_2", "sigmas", "centre", "spread", "difference_mean",
        "reference_points", "speaks", "sigma_now", "reach_now", "centre_now", "spread_now", "unit_now", "mature", "kept_residual",
        "kept_linear", "kept_ratio", "kept_calm", "kept", "waiting", "waiting_calm",
    )  # fmt: skip

    def __init__(self, floors: np.ndarray, start: int, trend_after: int, scale_after: int) -> None:
        n = len(floors)
        self.floors = floors
        self.start, self.trend_after, self.scale_after = start, trend_after, scale_after
        self.points = np.zeros(n, dtype=np.int64)
        self.accepted = Windows(n, _MEDIAN)  # accepted values
        self.window = Windows(n, _WINDOW)  # clipped values
        self.recent = Windows(n, _RECENT)  # values as they came
        self.ratios = Windows(n, _DIFFERENCES)  # of step-to-step differences to their reference mean
        self.level_1, self.level_2 = np.zeros(n), np.zeros(n)  # running level one and two steps ago
        self.sigmas = np.zeros((n, 2))  # of _SIGMA_MEMORY points
        self.centre, self.spread = np.zeros((n, 3)), np.ones((n, 3))  # of the linear statistics in healthy times
        self.difference_mean = np.zeros(n)  # m with E min(|difference| / m, 4) = 1 over the reference
        self.reference_points = np.zeros(n, dtype=np.int64)
        self.speaks = np.zeros((n, COUNT))
        # What `look` uses, derived from the references when they change.
        self.sigma_now, self.reach_now, self.unit_now = np.ones(n), np.full(n, _CLIP), np.ones(n)
        self.centre_now, self.spread_now = np.zeros((n, 3)), np.ones((n, 3))
        self.mature = np.zeros(n)  # 1 from where on the window's slope is no longer that of the steep start
        # What the references have not taken in yet.
        self.kept_residual = np.zeros((n, _BATCH))
        self.kept_linear = np.zeros((n, _BATCH, 3))
        self.kept_ratio = np.zeros((n, _BATCH))
        self.kept_calm = np.zeros((n, _BATCH))
        self.kept = np.zeros(1, dtype=np.int64)
        # Linear statistics that are not old enough to be a reference, oldest batch first: a ramp must not teach the
        # detector to expect it before it has been seen.
        self.waiting = np.zeros((n, _LAG, _BATCH, 3))
        self.waiting_calm = np.zeros((n, _LAG, _BATCH))
        self.changed()

    def arrays(self) -> dict[str, np.ndarray]:
        """The whole state by name, as live views: (rows, ...) each, except `kept`."""
        found = {name: getattr(self, name).now for name in self._WINDOWS}
        return {**found, **{name: getattr(self, name) for name in self._ARRAYS}}

    def changed(self) -> None:
        """Arrays were written from outside: forget what was concluded from them."""
        self._unmet = self._young = True  # some row has no value yet; some row takes in step by step
        self._all_mature, self._all_speak = bool(self.mature.all()), bool(self.speaks.all())

    def look(self, rows: Any, y: np.ndarray, everyone: bool) -> Look:
        """Judge the values y (n,) of `rows` against the past. everyone: these are all rows, in order."""
        if self._unmet:
            self._meet(rows, y)
        recent, window, accepted, ratios = self.recent.now, self.window.now, self.accepted.now, self.ratios.now
        sigma, reach, level_2, unit = self.sigma_now, self.reach_now, self.level_2, self.unit_now
        centre, spread, mature, speaks = self.centre_now, self.spread_now, self.mature, self.speaks
        if not everyone:
            recent, window, accepted, ratios = recent[rows], window[rows], accepted[rows], ratios[rows]
            sigma, reach, level_2, unit = sigma[rows], reach[rows], level_2[rows], unit[rows]
            centre, spread, mature, speaks = centre[rows], spread[rows], mature[rows], speaks[rows]
        last, before = recent[:, -1], recent[:, -2]
        fixed = window @ _WEIGHTS
        ordered = np.sort(accepted, axis=1)  # 16 values: faster than a selection
        bias = np.minimum(fixed[:, 0], 0.0)
        if not self._all_mature:
            bias *= mature
        level = ordered[:, _MEDIAN // 2 - 1] + ordered[:, _MEDIAN // 2]
        level *= 0.5
        expected = level + bias
        residual = y - expected
        scores = np.empty((len(y), COUNT))
        np.divide(residual, sigma, out=scores[:, POINT])
        middle_of_three = np.maximum(np.minimum(y, last), np.minimum(np.maximum(y, last), before))
        middle_of_three -= level_2
        middle_of_three -= bias
        np.divide(middle_of_three, sigma, out=scores[:, CONFIRMED])
        clipped = np.minimum(np.maximum(y, level - reach), level + reach)
        linear = clipped[:, None] * _NEWEST
        linear += fixed[:, 1:]
        linear /= sigma[:, None]
        slow = linear - centre
        np.divide(slow, spread, out=scores[:, LINEAR])
        ratio = np.abs(y - last)
        ratio /= unit
        np.minimum(ratio, _CLIP_DIFFERENCE, out=ratio)
        np.add(ratios @ _RECENCY_BEFORE, ratio * _RECENCY[-1] - 1.0, out=scores[:, SCALE])
        if not self._all_speak:
            scores *= speaks
        return Look(rows, everyone, y, expected, scores, clipped, linear, residual, ratio)

    def _meet(self, rows: Any, y: np.ndarray) -> None:
        """Rows without a past take their first value for it."""
        new = self.points[rows] == 0
        met = np.arange(len(self.points))[rows][new]
        for windows in (self.accepted, self.window, self.recent):
            windows.now[met] = y[new, None]
        self.level_1[met] = self.level_2[met] = y[new]

    def learn(self, look: Look, calm: np.ndarray | None) -> None:
        """Take a step in. calm (n,) bool, None for all: the value may enter the references; every value enters the short
        windows."""
        rows, everyone, y = look.rows, look.everyone, look.y
        slot = int(self.kept[0])
        self.kept_residual[rows, slot] = look.residual
        self.kept_linear[rows, slot] = look.linear
        self.kept_ratio[rows, slot] = self.ratios.now[rows, 0]  # the difference that leaves the window
        self.window.push(rows, look.clipped, everyone)
        self.recent.push(rows, y, everyone)
        self.ratios.push(rows, look.ratio, everyone)
        if everyone:
            self.level_2, self.level_1 = self.level_1, look.level
        else:
            self.level_2[rows] = self.level_1[rows]
            self.level_1[rows] = look.level
        if calm is None:
            self.accepted.push(rows, y, everyone)
            self.kept_calm[rows, slot] = 1.0
        else:
            self.accepted.push(np.arange(len(self.points))[rows][calm], y[calm], False)
            self.kept_calm[rows, slot] = calm
        self.points[rows] += 1
        self.kept[0] = slot + 1
        if slot + 1 == _BATCH or (self._young and self._take_in_now(rows)):
            self._take_in()

    def _take_in_now(self, rows: Any) -> bool:
        """One of these rows is young: its references move with every step."""
        self._unmet = not self.points.all()
        self._young = bool((self.points <= self.trend_after).any())
        return bool((self.points[rows] <= self.trend_after).any())

    def _take_in(self) -> None:
        """The kept steps enter the references of the rows they belong to; what `look` uses is derived anew."""
        used = int(self.kept[0])
        calm = self.kept_calm[:, :used]
        count = calm.sum(axis=1)
        points = np.maximum(self.points, 1).astype(np.float64)
        share = count / np.maximum(count, 1.0)  # 1 where a row has anything to take in
        size = _ABS_TO_SIGMA * np.abs(self.kept_residual[:, :used])
        young = self.points <= _MEDIAN
        cap = 4.0 * np.maximum(self.sigmas, self.floors[:, None])
        rate = np.minimum(np.maximum(count[:, None] / _SIGMA_MEMORY, (3.0 * count / (points + 3.0))[:, None]), 1.0)
        if young.any():
            cap[young], rate[young] = np.inf, 1.0 / points[young, None]
        mean = (np.minimum(size[:, None], cap[:, :, None]) * calm[:, None]).sum(axis=2) / np.maximum(count, 1.0)[
            :, None
        ]
        self.sigmas += share[:, None] * rate * (mean - self.sigmas)
        self._take_in_linear(calm, points)
        self._take_in_differences(calm, count, self.kept_ratio[:, :used])
        self.kept_calm[:] = 0.0
        self.kept[0] = 0
        self._derive()

    def _take_in_linear(self, calm: np.ndarray, points: np.ndarray) -> None:
        """Level, drift and trend of 64 steps ago enter their centre and spread; in a young row those of now do."""
        used = calm.shape[1]
        young = (self.points <= _YOUNG)[:, None]
        linear, weight = self.waiting[:, 0].copy(), self.waiting_calm[:, 0].copy()
        if young.any():
            now, now_calm = np.zeros_like(self.kept_linear), np.zeros_like(self.kept_calm)
            now[:, :used], now_calm[:, :used] = self.kept_linear[:, :used], calm
            linear, weight = np.where(young[:, :, None], now, linear), np.where(young, now_calm, weight)
        if used == _BATCH:  # else a young row makes all take in step by step
            self.waiting[:, :-1], self.waiting[:, -1] = self.waiting[:, 1:], self.kept_linear
            self.waiting_calm[:, :-1], self.waiting_calm[:, -1] = self.waiting_calm[:, 1:], calm
        else:
            weight = weight * young
        count = weight.sum(axis=1)
        many = np.maximum(count, 1.0)[:, None]
        rate = np.minimum(np.maximum(count / 256, 3.0 * count / np.maximum(points - 27, 1.0)), 1.0) * (
            self.points > self.start
        )
        off = np.minimum(
            _ABS_TO_SIGMA * np.abs(linear - self.centre[:, None]),
            4.0 * np.maximum(self.spread, _LEAST_SPREAD)[:, None],
        )
        share = (rate * (count > 0))[:, None]
        self.centre += share * ((linear * weight[:, :, None]).sum(axis=1) / many - self.centre)
        self.spread += share * ((off * weight[:, :, None]).sum(axis=1) / many - self.spread)

    def forget_recent(self, rows: np.ndarray) -> None:
        """What these rows saw lately is no reference after all: they have raised an alarm since."""
        self.waiting_calm[rows] = 0.0

    def _take_in_differences(self, calm: np.ndarray, count: np.ndarray, ratio: np.ndarray) -> None:
        """Differences that left the window enter the reference mean m of `scale`: m += rate * m * (mean ratio - 1)."""
        filled = self.reference_points >= _DIFFERENCES
        known = np.maximum(self.reference_points - _DIFFERENCES, 0) + 1.0
        mean = (ratio * calm).sum(axis=1) / np.maximum(count, 1.0)
        rate = filled * np.minimum(np.maximum(count / _REFERENCE, count / known), 1.0) * (count > 0)
        self.difference_mean += rate * self.unit_now * mean - rate * self.difference_mean
        # While the window fills for the first time, its own differences are the only unit there is.
        filling = ~filled & (self.points > 1)
        if filling.any():
            step = np.abs(self.recent.now[:, -1] - self.recent.now[:, -2])
            first = 1.0 / np.minimum(np.maximum(self.points - 1.0, 1.0), 32.0)
            self.difference_mean += (
                filling
                * first
                * (np.minimum(step, 12.0 * np.maximum(self.difference_mean, 0.3 * self.floors)) - self.difference_mean)
            )
        self.reference_points += np.where(
            filled, count, np.minimum(self.points - 1, _DIFFERENCES) - self.reference_points
        ).astype(np.int64)

    def _derive(self) -> None:
        sigma = np.minimum(self.sigmas[:, 0], 1.4 * self.sigmas[:, 1])
        young = np.flatnonzero(self.points < _YOUNG)
        if len(young):  # residuals of the steep start are no noise: step-to-step differences do not see the trend
            steps = np.abs(np.diff(self.recent.now[young, -_EARLY:], axis=1))
            sigma[young] = np.minimum(sigma[young], _MAD_TO_SIGMA * np.median(steps, axis=1))
        self.mature = (self.points >= _YOUNG).astype(np.float64)
        sigma = np.maximum(sigma, self.floors)
        self.sigma_now = sigma * np.minimum(
            1.0 + 8.0 / np.maximum(self.points, 1), 2.0
        )  # few points: not so sure of it
        self.reach_now = _CLIP * self.sigma_now
        self.unit_now = np.maximum(self.difference_mean, self.floors)
        self.centre_now = np.maximum(self.centre, 0.0)  # a falling loss must not make its end look like a rise
        self.spread_now = np.maximum(self.spread, _LEAST_SPREAD)
        self.speaks[:, :LEVEL] = (self.points >= self.start)[:, None]
        self.speaks[:, LINEAR] = (self.points >= self.trend_after)[:, None]
        self.speaks[:, SCALE] = self.reference_points >= self.scale_after
        self._all_mature, self._all_speak = bool(self.mature.all()), bool(self.speaks.all())

    def rebase(self, row: int) -> None:
        """Take the last 16 values of a row as its level from now on; the noise may have grown, not shrunk."""
        recent = self.recent.now[row, -32:]
        level = float(np.median(recent[-_MEDIAN:]))
        self.accepted.now[row] = recent[-_MEDIAN:]
        self.window.now[row] = level
        self.level_1[row] = self.level_2[row] = level
        noise = _ABS_TO_SIGMA * float(np.mean(np.abs(recent - np.median(recent))))
        self.sigmas[row] = np.maximum(self.sigmas[row], noise)
        self._derive()

    def accept_widening(self, row: int) -> None:
        """Take the present dispersion, and the present pace of level, drift and trend, for the usual one from now on."""
        wider = max(float(self.ratios.now[row].mean()), 1.0)
        self.difference_mean[row] = wider * float(self.unit_now[row])
        self.ratios.now[row] /= wider
        self.spread[row] = np.maximum(self.spread[row], np.abs(self.kept_linear[row]).max(axis=0) / 3.0)
        self.waiting_calm[row] = 0.0
        self._derive()
