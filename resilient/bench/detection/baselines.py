"""The public alarm rules, from their published constants: what they alarm on, what they let into their windows, what a NaN does.

One protocol: `score(x, here) -> s` for one signal and one step of many runs at once, all arrays of shape (runs,); `here` is
False where the run logged nothing (then the score is -inf and nothing changes). A rule alarms where the score exceeds its
threshold. Only the rule is rebuilt, never the action it takes. Sources: OLMo-core and levanter skip step, llm.c outlier
detector, OLMo 2 spike score, llm-foundry KillLossSpike, Lightning Fabric SpikeDetection, metaseq, Megatron-LM rerun state
machine, ZClip, and the textbook charts. The per-tensor rules (AdaGC events, RMS of g^2/v) need tensors and are left out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from resilient.bench.detection.events import Streams

Array = np.ndarray
MAD_TO_SIGMA = 1.4826  # of a normal distribution
NOTHING = -np.inf  # the score of a step without an opinion


class Rule(ABC):
    """State of one rule on one signal of `runs` runs. threshold: (runs,); only rules that refuse values look at it."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        self.runs, self.lengths, self.threshold = runs, lengths, threshold

    @abstractmethod
    def score(self, x: Array, here: Array) -> Array:
        """Judge this step against the past, then let it in as the original does."""


class Ring:
    """The last `size` values pushed, one ring per run."""

    def __init__(self, runs: int, size: int, fill: float = 0.0) -> None:
        self.size = size
        self.data = np.full((runs, size), fill)
        self.count = np.zeros(runs, dtype=np.int64)  # values ever pushed
        self._rows = np.arange(runs)

    def push(self, x: Array, where: Array) -> None:
        rows = self._rows[where]
        self.data[rows, self.count[rows] % self.size] = x[rows]
        self.count[rows] += 1

    def oldest(self) -> Array:
        """What the next push overwrites."""
        return self.data[self._rows, self.count % self.size]

    @property
    def filled(self) -> Array:
        return np.minimum(self.count, self.size)

    def mean_std(self, unbiased: bool) -> tuple[Array, Array]:
        """A NaN inside makes both NaN, as in the originals."""
        n = self.filled
        with np.errstate(all="ignore"):
            if (n == self.size).all():
                mean = self.data.mean(axis=1)
                away = self.data - mean[:, None]
                return mean, np.sqrt(np.einsum("ij,ij->i", away, away) / (self.size - 1 if unbiased else self.size))
            inside = np.arange(self.size)[None, :] < n[:, None]
            mean = np.where(inside, self.data, 0.0).sum(axis=1) / n
            square = np.where(inside, (self.data - mean[:, None]) ** 2, 0.0).sum(axis=1)
            return mean, np.sqrt(square / (n - 1 if unbiased else n))

    def median_mad(self) -> tuple[Array, Array]:
        """Median and median absolute deviation; only for rings filled with +inf, that never took a NaN."""
        centre = median(self.data, self.filled)
        with np.errstate(invalid="ignore"):
            return centre, median(np.abs(self.data - centre[:, None]), self.filled)


def median(rows: Array, count: Array) -> Array:
    """Median of the `count` smallest entries of each row: the unfilled rest is +inf. NaN for an empty row."""
    size = rows.shape[1]
    with np.errstate(invalid="ignore"):
        if (count == size).all():
            middle = np.partition(rows, [(size - 1) // 2, size // 2], axis=1)
            return (middle[:, (size - 1) // 2] + middle[:, size // 2]) / 2
        ordered = np.sort(rows, axis=1)
        at = np.arange(len(rows))
        low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, size - 1)
        return np.where(count > 0, (ordered[at, low] + ordered[at, high]) / 2, np.nan)


def ratio(top: Array, bottom: Array) -> Array:
    """top / bottom without warnings; 0 / 0 is 0, as `top > k * bottom` would have it."""
    with np.errstate(all="ignore"):
        return np.where((top == 0) & (bottom == 0), 0.0, top / bottom)


class NonFinite(Rule):
    """B0: the value is NaN or Inf."""

    def score(self, x: Array, here: Array) -> Array:
        return np.where(here & ~np.isfinite(x), np.inf, NOTHING)


class Absolute(Rule):
    """B1: the gradient norm itself."""

    def score(self, x: Array, here: Array) -> Array:
        return np.where(here & np.isfinite(x), x, NOTHING)


class Watchdog(Rule):
    """B1: an absolute loss limit, exceeded on 3 steps in a row (axolotl)."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._last = Ring(runs, 3, NOTHING)

    def score(self, x: Array, here: Array) -> Array:
        self._last.push(np.where(np.isnan(x), NOTHING, x), here)
        return np.where(here, self._last.data.min(axis=1), NOTHING)


class MaxOfFirst(Rule):
    """B2, Megatron: ratio to the largest of the first 100 values, which is then frozen. Blind to NaN and Inf."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._count, self._largest = np.zeros(runs, int), np.zeros(runs)

    def score(self, x: Array, here: Array) -> Array:
        here = here & np.isfinite(x)
        learning = here & (self._count < 100)
        armed = here & ~learning
        self._largest = np.where(learning, np.maximum(self._largest, np.abs(x)), self._largest)
        self._count += learning
        return np.where(armed, ratio(np.abs(x), self._largest), NOTHING)


class RatioPatience(Rule):
    """B3, llm-foundry KillLossSpike: loss over the mean of the last W = max(100, 5 % of the run), on 5 steps in a row.

    Second rule, after 2 W steps: half of the window above cap = min(largest of the first window, 10)."""

    patience = 5

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._width = np.maximum(100, np.ceil(0.05 * lengths)).astype(int)
        size = int(self._width.max())
        self._values, self._over = np.zeros((runs, size)), np.zeros((runs, size), dtype=bool)
        self._at, self._sum, self._above = np.zeros(runs, int), np.zeros(runs), np.zeros(runs, int)
        self._cap = np.full(runs, -np.inf)
        self._ratios = Ring(runs, self.patience, NOTHING)
        self._rows = np.arange(runs)

    def score(self, x: Array, here: Array) -> Array:
        armed = here & (self._at >= self._width)
        with np.errstate(all="ignore"):
            relative = np.where(armed, x / (self._sum / self._width), NOTHING)
        self._ratios.push(np.where(np.isnan(relative), NOTHING, relative), here)
        score = np.where(here, self._ratios.data.min(axis=1), NOTHING)
        self._push(x, here)
        capped = here & (self._at >= 2 * self._width) & (self._above >= self._width / 2)
        return np.where(capped, np.inf, score)

    def _push(self, x: Array, here: Array) -> None:
        rows = self._rows[here]
        slot = self._at[rows] % self._width[rows]
        first = self._at[rows] < self._width[rows]
        self._cap[rows] = np.where(first, np.fmin(np.fmax(self._cap[rows], x[rows]), 10.0), self._cap[rows])
        over = ~first & (x[rows] > self._cap[rows])
        self._above[rows] += over.astype(int) - self._over[rows, slot]
        self._values[rows, slot], self._over[rows, slot] = x[rows], over
        self._at[rows] += 1
        # A running sum would keep a NaN for ever; the original takes the mean of the window, which forgets it.
        inside = np.arange(self._values.shape[1])[None, :] < np.minimum(self._at, self._width)[:, None]
        self._sum = np.where(inside, self._values, 0.0).sum(axis=1)


class RatioOfAccepted(Rule):
    """B4, Lightning Fabric: |loss - mean of the last 10 accepted| over that mean, if the loss rose. Non-finite is a spike."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._accepted = Ring(runs, 10)
        self._last = np.full(runs, np.nan)

    def score(self, x: Array, here: Array) -> Array:
        mean, _ = self._accepted.mean_std(unbiased=False)
        armed = here & (self._accepted.count > 1)
        away = np.abs(x - mean)
        with np.errstate(invalid="ignore"):  # a mean below zero: `away >= 2 * mean` always holds
            relative = np.where(mean > 0, ratio(away, mean), np.inf)
            score = np.where(armed & (x > self._last), relative, NOTHING)
        score = np.where(armed & ~np.isfinite(x), np.inf, score)
        accepted = here & (score < self.threshold)
        self._last = np.where(accepted, x, self._last)
        self._accepted.push(x, accepted)
        return score


class RatioToEwm(Rule):
    """B5, metaseq: loss over an exponentially weighted mean of span 9, not updated by values above the threshold."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._ewm = np.full(runs, np.nan)

    def score(self, x: Array, here: Array) -> Array:
        armed = here & ~np.isnan(self._ewm)
        with np.errstate(all="ignore"):
            score = np.where(armed, x / self._ewm, NOTHING)
        score = np.where(np.isnan(score), NOTHING, score)
        taken = armed & ~(score > self.threshold)
        self._ewm = np.where(taken, 0.2 * x + 0.8 * self._ewm, np.where(here & ~armed, x, self._ewm))
        return score


class SigmaKeep(Rule):
    """B6, OLMo-core, levanter, MaxText: sigmas above the mean of the last 128, outliers stored like all others.

    Steps are skipped unless the comparison holds, so a NaN alarms, and goes on to alarm until it has left the window."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._window = Ring(runs, 128)

    def score(self, x: Array, here: Array) -> Array:
        mean, std = self._window.mean_std(unbiased=True)
        score = ratio(x - mean, std)
        score = np.where(np.isnan(score), np.inf, score)
        armed = here & (self._window.count >= 64)
        self._window.push(x, here)
        return np.where(armed, score, NOTHING)


class SigmaSelf(Rule):
    """B7, llm.c: as B6 with the value itself inside the (full) window. The running sums never forget a NaN: then it is off."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._window = Ring(runs, 128)
        self._dead = np.zeros(runs, dtype=bool)

    def score(self, x: Array, here: Array) -> Array:
        self._dead |= here & ~np.isfinite(x)
        self._window.push(x, here)
        mean, std = self._window.mean_std(unbiased=False)
        score = ratio(x - mean, std)
        return np.where(here & ~self._dead & (self._window.count >= 128) & ~np.isnan(score), score, NOTHING)


class SigmaThousand(Rule):
    """B8, OLMo 2's spike score: sigmas away from the mean of the last 1000, either side; 128 of them are enough to begin."""

    size, least = 1000, 128

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._window = Ring(runs, self.size)

    def score(self, x: Array, here: Array) -> Array:
        mean, std = self._window.mean_std(unbiased=False)
        score = ratio(np.abs(x - mean), std)
        armed = here & (self._window.count >= self.least) & ~np.isnan(score)
        self._window.push(x, here)
        return np.where(armed, score, NOTHING)


class ZClip(Rule):
    """B9, ZClip: z against exponentially weighted mean and variance that take in the clipped value. One NaN ends it."""

    clip = 2.5

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._first = Ring(runs, 25)
        self._mean, self._var = np.zeros(runs), np.zeros(runs)

    def score(self, x: Array, here: Array) -> Array:
        learning = here & (self._first.count < 25)
        armed = here & ~learning
        with np.errstate(all="ignore"):
            sigma = np.sqrt(self._var)
            z = (x - self._mean) / (sigma + 1e-6)
            clipped = np.where(z > self.clip, self._mean + self.clip**2 * sigma / z, x)
        self._mean = np.where(armed, 0.97 * self._mean + 0.03 * clipped, self._mean)
        self._var = np.where(armed, 0.97 * self._var + 0.03 * (clipped - self._mean) ** 2, self._var)
        if learning.any():
            self._first.push(x, learning)
            mean, std = self._first.mean_std(unbiased=False)
            done = learning & (self._first.count == 25)
            self._mean, self._var = np.where(done, mean, self._mean), np.where(done, std**2, self._var)
        return np.where(armed & ~np.isnan(z), z, NOTHING)


class MadZ(Rule):
    """B12: robust z against the last 256 accepted values (64 to begin), renewed every 4 steps; after 64 alarms in a row
    everything is let in again."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._steps = 0
        self._centre, self._mad = np.full(runs, np.nan), np.full(runs, np.nan)
        self._accepted = Ring(runs, 256, np.inf)
        self._streak = Ring(runs, 64)
        self._in_a_row = np.zeros(runs, int)

    def score(self, x: Array, here: Array) -> Array:
        here = here & np.isfinite(x)
        if self._steps % 4 == 0:
            self._centre, self._mad = self._accepted.median_mad()
        self._steps += 1
        armed = here & (self._accepted.count >= 64) & ~np.isnan(self._centre)
        score = np.where(armed, ratio(x - self._centre, MAD_TO_SIGMA * self._mad), NOTHING)
        alarm = score > self.threshold
        self._accepted.push(x, here & ~alarm)
        self._streak.push(x, alarm)
        self._in_a_row = np.where(here, np.where(alarm, self._in_a_row + 1, 0), self._in_a_row)
        full = self._in_a_row >= 64
        if full.any():
            for i in range(64):
                self._accepted.push(self._streak.data[:, i], full)
            self._in_a_row[full] = 0
            self._centre, self._mad = self._accepted.median_mad()
        return score


class MadZLog(MadZ):
    """B12 on the logarithm."""

    def score(self, x: Array, here: Array) -> Array:
        return super().score(*logarithm(x, here))


def logarithm(x: Array, here: Array) -> tuple[Array, Array]:
    """log x, and where it exists."""
    with np.errstate(all="ignore"):
        y = np.log(x)
    return y, here & np.isfinite(y)


class Standardised(Rule):
    """z against the median and MAD of 512 values that lie 64 behind; what B13 to B16 build on."""

    log = True

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._recent = Ring(runs, 64)
        self._reference = Ring(runs, 512, np.inf)
        self._steps = 0
        self._centre, self._mad = np.full(runs, np.nan), np.full(runs, np.nan)

    def z(self, x: Array, here: Array) -> tuple[Array, Array]:
        """(z, where there is one). The reference is renewed every 8 steps: it lags by 64 anyway."""
        y, here = logarithm(x, here) if self.log else (x, here & np.isfinite(x))
        if self._steps % 8 == 0:
            self._centre, self._mad = self._reference.median_mad()
        self._steps += 1
        armed = here & (self._reference.count >= 128) & ~np.isnan(self._centre)
        z = ratio(y - self._centre, MAD_TO_SIGMA * self._mad)
        self._reference.push(self._recent.oldest(), here & (self._recent.count >= 64))
        self._recent.push(y, here)
        return z, armed & np.isfinite(z)

    def score(self, x: Array, here: Array) -> Array:
        z, armed = self.z(x, here)
        return np.where(armed, z, NOTHING)


class PageHinkley(Rule):
    """B13 with the defaults of the stream-learning libraries, on the raw value: delta 0.005, 30 values at least."""

    delta, least = 0.005, 30

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._n, self._mean, self._sum, self._low = (np.zeros(runs) for _ in range(4))

    def score(self, x: Array, here: Array) -> Array:
        here = here & np.isfinite(x)
        self._n += here
        with np.errstate(all="ignore"):
            self._mean = np.where(here, self._mean + (x - self._mean) / self._n, self._mean)
            self._sum = np.where(here, 0.9999 * self._sum + x - self._mean - self.delta, self._sum)
        self._low = np.where(here, np.minimum(self._low, self._sum), self._low)
        score = np.where(here & (self._n >= self.least), self._sum - self._low, NOTHING)
        again = score > self.threshold  # the libraries start anew after a detection
        for state in (self._n, self._mean, self._sum, self._low):
            state[again] = 0.0
        return score


class PageHinkleyRobust(Standardised):
    """B13 on the robust z: delta 0.25, the threshold has no default."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._sum, self._low = np.zeros(runs), np.zeros(runs)

    def score(self, x: Array, here: Array) -> Array:
        z, armed = self.z(x, here)
        self._sum = np.where(armed, 0.9999 * self._sum + z - 0.25, self._sum)
        self._low = np.where(armed, np.minimum(self._low, self._sum), self._low)
        score = np.where(armed, self._sum - self._low, NOTHING)
        again = score > self.threshold
        self._sum[again] = self._low[again] = 0.0
        return score


class Cusum(Standardised):
    """B14: one-sided CUSUM of the robust z, k = 0.5."""

    cut = np.inf

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._sum = np.zeros(runs)

    def score(self, x: Array, here: Array) -> Array:
        z, armed = self.z(x, here)
        z = np.clip(z, -self.cut, self.cut)
        self._sum = np.where(armed, np.maximum(0.0, self._sum + z - 0.5), self._sum)
        return np.where(armed, self._sum, NOTHING)


class CusumWinsorised(Cusum):
    """B14 with z cut at +-3."""

    cut = 3.0


class Ewma(Standardised):
    """B15: EWMA chart, lambda 0.2; the score is in units of its own sigma."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._mean = np.zeros(runs)

    def score(self, x: Array, here: Array) -> Array:
        z, armed = self.z(x, here)
        self._mean = np.where(armed, 0.2 * z + 0.8 * self._mean, self._mean)
        return np.where(armed, self._mean / math.sqrt(0.2 / 1.8), NOTHING)


class Bocpd(Standardised):
    """B16: Bayesian change points (Adams and MacKay), hazard 1/1000, Normal-Gamma; the score is P(run length < 16).

    Run lengths from 128 on share one hypothesis with the weight of 128 values; that replaces pruning."""

    longest = 128

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        n = self.longest
        self._p = np.zeros((runs, n + 1))
        self._p[:, n] = 1.0  # nothing changed just before the first value
        self._mean, self._scale = np.zeros((runs, n + 1)), np.ones((runs, n + 1))
        self._scale[:, n] = 1.0 + n / 2
        length = np.arange(n + 1)
        self._kappa, self._alpha = 1.0 + length, 1.0 + length / 2
        gammas = np.array([math.lgamma(a + 0.5) - math.lgamma(a) for a in self._alpha])
        self._constant = gammas - 0.5 * np.log(2 * np.pi * self._alpha)

    def score(self, x: Array, here: Array) -> Array:
        z, armed = self.z(x, here)
        z = np.where(armed, z, 0.0)[:, None]
        spread = self._scale * (self._kappa + 1) / (self._alpha * self._kappa)
        away = (z - self._mean) ** 2
        likelihood = np.exp(
            self._constant - 0.5 * np.log(spread) - (self._alpha + 0.5) * np.log1p(away / (2 * self._alpha * spread))
        )
        grown = self._p * np.maximum(likelihood, 1e-300)
        total = grown.sum(axis=1, keepdims=True)
        grown = grown / total
        mean = (self._kappa * self._mean + z) / (self._kappa + 1)
        scale = self._scale + self._kappa * away / (2 * (self._kappa + 1))
        p = np.empty_like(self._p)
        p[:, 0] = 1 / 1000
        p[:, 1:] = grown[:, :-1] * (1 - 1 / 1000)
        kept = grown[:, -1] * (1 - 1 / 1000)
        p[:, -1] += kept
        n = self.longest
        oldest = n / (n + 1.0)  # the shared hypothesis forgets one value for each it takes
        new_mean, new_scale = np.zeros_like(mean), np.ones_like(scale)
        new_mean[:, 1:], new_scale[:, 1:] = mean[:, :-1], scale[:, :-1]
        weight = np.where(p[:, -1] > 0, kept / np.maximum(p[:, -1], 1e-300), 0.0)
        new_mean[:, -1] = weight * mean[:, -1] + (1 - weight) * mean[:, -2]
        new_scale[:, -1] = weight * (1 + (scale[:, -1] - 1) * oldest) + (1 - weight) * scale[:, -2]
        rows = armed[:, None]
        self._p = np.where(rows, p, self._p)
        self._mean, self._scale = np.where(rows, new_mean, self._mean), np.where(rows, new_scale, self._scale)
        return np.where(armed, p[:, :16].sum(axis=1), NOTHING)


class RollingStd(Rule):
    """B17: std of the last 64 over the std of 1024 values behind them: the literal reading of S7."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._recent, self._reference = Ring(runs, 64), Ring(runs, 1024)

    def score(self, x: Array, here: Array) -> Array:
        here = here & np.isfinite(x)
        self._reference.push(self._recent.oldest(), here & (self._recent.count >= 64))
        self._recent.push(x, here)
        _, now = self._recent.mean_std(unbiased=False)
        _, before = self._reference.mean_std(unbiased=False)
        return np.where(here & (self._reference.count >= 256), ratio(now, before), NOTHING)


class ThreeTimes(Rule):
    """S10: |z| > 3 on three steps in a row, z against mean and std of the last 100 values."""

    def __init__(self, runs: int, lengths: Array, threshold: Array) -> None:
        super().__init__(runs, lengths, threshold)
        self._window = Ring(runs, 100)
        self._last = Ring(runs, 3, NOTHING)

    def score(self, x: Array, here: Array) -> Array:
        mean, std = self._window.mean_std(unbiased=False)
        z = ratio(np.abs(x - mean), std)
        armed = here & (self._window.count >= 100)
        self._last.push(np.where(armed & ~np.isnan(z), z, NOTHING), here)
        self._window.push(x, here)
        return np.where(armed, self._last.data.min(axis=1), NOTHING)


Factory = Callable[[int, Array, Array], Rule]


@dataclass(frozen=True)
class Baseline:
    """One public rule. parts: signal -> rule; the score is the largest of them. threshold: as shipped; NaN: has none.

    inclusive: alarms at the threshold too. refuses: its state depends on the threshold. always: signal -> (rule, limit),
    an alarm whatever the threshold of the main part."""

    key: str
    title: str
    threshold: float
    parts: Mapping[str, Factory]
    inclusive: bool = False
    refuses: bool = False
    always: Mapping[str, tuple[Factory, float]] | None = None

    def scores(self, streams: Streams, threshold: float | Array | None = None) -> Array:
        """(runs, points); +inf where it alarms at any threshold."""
        limit = np.broadcast_to(np.asarray(self.threshold if threshold is None else threshold, float), (streams.runs,))
        lengths = streams.lengths()
        out = np.full(streams.steps.shape, NOTHING)
        with np.errstate(invalid="ignore"):  # Inf - Inf
            for rows in _of_like_length(lengths):
                for signal, make in self.parts.items():
                    if signal in streams.values:
                        _follow(out, rows, streams, signal, make(len(rows), lengths[rows], limit[rows]))
                for signal, (make, fixed) in (self.always or {}).items():
                    if signal in streams.values:
                        rule = make(len(rows), lengths[rows], np.full(len(rows), fixed))
                        _follow(out, rows, streams, signal, rule, fixed)
        return out

    def alarms(self, scores: Array, threshold: float | Array | None = None) -> Array:
        """bool, of the shape of `scores`. threshold: a number or (runs, 1)."""
        limit = self.threshold if threshold is None else threshold
        return scores >= limit if self.inclusive else scores > limit


def _of_like_length(lengths: Array) -> list[Array]:
    """Rows in groups, so that short runs do not wait for long ones: a group ends where its longest run is 4x the shortest."""
    order = np.argsort(lengths)
    groups: list[list[int]] = []
    for row in order:
        if groups and lengths[row] <= 4 * lengths[groups[-1][0]]:
            groups[-1].append(int(row))
        else:
            groups.append([int(row)])
    return [np.array(group) for group in groups]


def _follow(out: Array, rows: Array, streams: Streams, signal: str, rule: Rule, fixed: float | None = None) -> None:
    """Raise `out` to the scores of one rule; `fixed`: to +inf where the score exceeds it."""
    points = int(streams.lengths()[rows].max())
    values = np.ascontiguousarray(streams.values[signal][rows, :points].T)
    present = np.ascontiguousarray(streams.present(signal)[rows, :points].T)
    found = np.empty((points, len(rows)))
    for t in range(points):
        found[t] = rule.score(values[t], present[t])
    if fixed is not None:
        found = np.where(found > fixed, np.inf, NOTHING)
    out[rows, :points] = np.maximum(out[rows, :points], found.T)


def both(rule: Factory) -> dict[str, Factory]:
    """The same rule on loss and gradient norm."""
    return {"loss": rule, "grad_norm": rule}


BASELINES: tuple[Baseline, ...] = (
    Baseline("B0", "non-finite", 0.0, both(NonFinite)),
    *(
        Baseline(
            f"B1-{c}", f"norm > {c} | loss > 5, 3 times", c, {"grad_norm": Absolute}, always={"loss": (Watchdog, 5.0)}
        )
        for c in (1, 5, 10)
    ),
    Baseline("B2", "Megatron: 10x max of first 100", 10.0, both(MaxOfFirst), inclusive=True),
    Baseline("B3", "KillLossSpike: 2x mean, 5 times", 2.0, {"loss": RatioPatience}, inclusive=True),
    Baseline("B4", "Lightning: 3x mean of 10", 2.0, {"loss": RatioOfAccepted}, inclusive=True, refuses=True),
    *(Baseline(f"B5-{r}", f"metaseq: {r}x EWM", r, {"loss": RatioToEwm}, refuses=True) for r in (1.1, 1.2, 1.5)),
    Baseline("B6", "OLMo: 6 sigma / 128", 6.0, both(SigmaKeep)),
    Baseline("B7", "llm.c: 7 sigma / 128, itself inside", 7.0, both(SigmaSelf)),
    Baseline("B8", "spike score: 7 sigma / 1000", 7.0, both(SigmaThousand)),
    Baseline("B9", "ZClip: z > 2.5", 2.5, {"grad_norm": ZClip}),
    Baseline("B12", "MAD-z > 6 / 256", 6.0, {"loss": MadZ, "grad_norm": MadZLog}, refuses=True),
    Baseline("B13", "Page-Hinkley, raw", 50.0, both(PageHinkley), refuses=True),
    Baseline("B13r", "Page-Hinkley, robust z", np.nan, both(PageHinkleyRobust), refuses=True),
    Baseline("B14", "CUSUM, h = 5", 5.0, both(Cusum)),
    Baseline("B14w", "CUSUM, z cut at 3", 5.0, both(CusumWinsorised)),
    Baseline("B15", "EWMA chart, L = 3", 3.0, both(Ewma)),
    Baseline("B16", "BOCPD: P(run < 16)", 0.5, {"grad_norm": Bocpd}),
    Baseline("B17", "rolling std of norm, 3x", 3.0, {"grad_norm": RollingStd}),
    Baseline("S10", "|z| > 3 three times in a row", 3.0, both(ThreeTimes)),
)
BY_KEY: Mapping[str, Baseline] = {baseline.key: baseline for baseline in BASELINES}
NAMED = (
    "B6",
    "B12",
    "B8",
    "S10",
    "B3",
    "B4",
    "B2",
)  # the rules whose figures on real logs are published with this project
