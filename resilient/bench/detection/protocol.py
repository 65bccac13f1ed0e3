"""What counts as a hit, a lead and a false alarm, and how thresholds are tuned to a false-alarm rate.

Alarms are bool arrays (runs, points). Positions, not step numbers, are counted: a log that keeps every 10th step has fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice

import numpy as np

from resilient.bench.detection.baselines import Baseline
from resilient.bench.detection.events import Streams, join

MERGE = 50  # points: an alarm this close to the first of its group is the same alarm
GRACE = 20  # points after the blow-up in which an alarm still counts (with a lead below zero)
LEADS = (0, 10, 50, 100)


def merged_starts(alarms: np.ndarray, within: int = MERGE) -> np.ndarray:
    """Positions at which an alarm group of one run begins; a group ends after `within` points without an alarm."""
    at = np.flatnonzero(alarms)
    if at.size == 0:
        return at
    return at[np.concatenate([[True], np.diff(at) > within])]


def _poisson_at_most(mean: float) -> Iterator[float]:
    """P(N <= 0), P(N <= 1), ... of a Poisson count N with this mean, above 0."""
    return accumulate(math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in count())


def poisson_quantile(probability: float, mean: float) -> int:
    """The smallest n with P(N <= n) >= probability, which must be below 1."""
    return next(n for n, at_most in enumerate(_poisson_at_most(mean)) if at_most >= probability)


def poisson_interval(events: int, level: float = 0.95) -> tuple[float, float]:
    """Exact (Garwood) interval of the mean behind a count of `events`."""
    tail = (1 - level) / 2

    def mean_where(n: int, probability: float) -> float:  # P(N <= n) falls with the mean
        low, high = 1e-9, 10.0 + 4.0 * n
        for _ in range(60):
            middle = (low + high) / 2
            at_most = next(islice(_poisson_at_most(middle), n, None))
            low, high = (middle, high) if at_most > probability else (low, middle)
        return (low + high) / 2

    return (0.0 if events == 0 else mean_where(events - 1, 1 - tail)), mean_where(events, tail)


@dataclass(frozen=True)
class FalseAlarms:
    """Merged false alarms on healthy runs: all of them, and apart those near a benign event. Rates per 10,000 points."""

    points: int
    clean: int
    benign: int

    @property
    def per_10k(self) -> float:
        return 1e4 * (self.clean + self.benign) / self.points

    def as_json(self) -> dict[str, object]:
        low, high = poisson_interval(self.clean + self.benign)
        return {
            "points": self.points,
            "clean": self.clean,
            "benign": self.benign,
            "per_10k": self.per_10k,
            "interval_95": [1e4 * low / self.points, 1e4 * high / self.points],
        }


def false_alarms(streams: Streams, alarms: np.ndarray) -> FalseAlarms:
    """Of healthy runs."""
    clean = benign = 0
    for i in np.flatnonzero(alarms.any(axis=1)):
        starts = merged_starts(alarms[i])
        near = int(streams.benign[i, starts].sum()) if streams.benign is not None else 0
        benign += near
        clean += len(starts) - near
    return FalseAlarms(int(streams.lengths().sum()), clean, benign)


@dataclass(frozen=True)
class Outcome:
    """How a detector did on the runs of one event. lead: points from the first alarm to what the event is due by
    (its blow-up); runs without an alarm have none. delay: points from the onset to that alarm."""

    runs: int
    first: np.ndarray  # (runs,) position of the first alarm, -1 for none
    lead: np.ndarray  # (runs,), NaN for none
    delay: np.ndarray  # (runs,), NaN for none

    def recall(self, lead: int) -> float:
        """Share of runs with an alarm at least `lead` points ahead."""
        return float(np.mean(np.nan_to_num(self.lead, nan=-np.inf) >= lead))

    @property
    def caught(self) -> float:
        """Share of runs with an alarm at all, up to GRACE points late."""
        return float(np.mean(self.first >= 0))

    def within(self, points: int) -> float:
        """Share of runs with an alarm less than `points` after the onset."""
        return float(np.mean(np.nan_to_num(self.delay, nan=np.inf) < points))

    def lead_quantile(self, q: float) -> float:
        """Over all runs; one without an alarm counts as a lead of -GRACE."""
        return float(np.quantile(np.nan_to_num(self.lead, nan=-GRACE), q))

    def as_json(self) -> dict[str, object]:
        delays = self.delay[~np.isnan(self.delay)]
        return {
            "runs": self.runs,
            "caught": self.caught,
            "recall_at_lead": {str(n): self.recall(n) for n in LEADS},
            "median_lead": self.lead_quantile(0.5),
            "p10_lead": self.lead_quantile(0.1),
            "median_delay": float(np.median(delays)) if delays.size else None,
        }


def outcome(streams: Streams, alarms: np.ndarray) -> Outcome:
    """First alarm that begins in [onset, blow-up + GRACE]. One that was on before the onset does not count until it ends."""
    rising = alarms.copy()
    rising[:, 1:] &= ~alarms[:, :-1]
    first = np.full(streams.runs, -1)
    for i in range(streams.runs):
        window = rising[i, streams.onset[i] : streams.blowup[i] + GRACE + 1]
        if window.any():
            first[i] = streams.onset[i] + int(np.argmax(window))
    seen = first >= 0
    lead = np.where(seen, streams.due - first, np.nan)
    delay = np.where(seen, first - streams.onset, np.nan)
    return Outcome(streams.runs, first, lead, delay)


def longest_row(flags: np.ndarray) -> int:
    """The most flags in a row, over all runs."""
    best, row = 0, np.zeros(len(flags), dtype=int)
    for column in flags.T:
        row = np.where(column, row + 1, 0)
        best = max(best, int(row.max()))
    return best


def calibrate(baseline: Baseline, healthy: Streams, targets: Sequence[float], grid: int = 12) -> dict[float, float]:
    """For each target the smallest threshold with at most that many merged false alarms per 10,000 healthy points.

    A rule that refuses values is run once per threshold of a grid, since its state depends on it; the others once.
    Inf: no threshold does it, the rule never alarms."""
    points = float(healthy.lengths().sum())

    def groups(alarms: np.ndarray) -> int:
        return sum(len(merged_starts(row)) for row in alarms[alarms.any(axis=1)])

    scores = baseline.scores(healthy, np.inf)
    finite = scores[np.isfinite(scores)]
    if finite.size == 0:
        return {target: math.inf for target in targets}
    if baseline.refuses:
        candidates = np.quantile(finite, 1 - np.geomspace(0.02, 2 / finite.size, grid))  # lowest first
        candidates = np.concatenate([candidates, [finite.max() * 1.01, finite.max() * 1.5]])
        copies = join("copies", [healthy] * len(candidates))  # all thresholds in one pass
        limits = np.repeat(candidates, healthy.runs)
        alarms = baseline.alarms(baseline.scores(copies, limits), limits[:, None])
        counts = [groups(rows) for rows in np.split(alarms, len(candidates))]
        # The lowest one from which on every higher one keeps the target, as the count need not fall evenly.
        over = {target: [i for i, n in enumerate(counts) if n > target * points / 1e4] for target in targets}
        first = {target: max(indices, default=-1) + 1 for target, indices in over.items()}
        return {t: float(candidates[i]) if i < len(candidates) else math.inf for t, i in first.items()}
    candidates = np.unique(finite)
    found = {}
    for target in targets:
        low, high = 0, len(candidates) - 1  # the count falls (nearly) with the threshold: bisection
        while low < high:
            middle = (low + high) // 2
            if groups(scores > candidates[middle]) <= target * points / 1e4:
                high = middle
            else:
                low = middle + 1
        found[target] = math.nextafter(float(candidates[low]), math.inf)  # the same for rules with > and with >=
    return found
