"""Thresholds from a run's own healthy history, blended with shipped defaults (calibration).

Scores of training curves have heavy tails, so "6 sigma" has no fixed false-alarm rate: on Student-t3 noise it costs
dozens of alarms per 10,000 steps. Here the largest score of every block of 64 healthy points is kept, and the score that a
block exceeds with the wanted probability is read off their distribution:

    single points    the logarithm of block maxima is Gumbel distributed for the tails that occur (the maximum itself is
                     Frechet; extreme-value theory, e.g. Coles 2001, ch. 3)
    averages         of many clipped points are nearly normal, and hardly move inside a block

Blocks take the autocorrelation of slow statistics into account. A prior worth a few blocks speaks until the run has a
history of its own. The three newest blocks wait, and are dropped if an alarm follows: a ramp that has not been seen yet
must not raise the threshold it is measured by.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

BLOCK = 64
_REMEMBERED = 128  # blocks
_WAITING = 3  # blocks
_EULER = 0.5772156649
_TO_GUMBEL = math.sqrt(6) / math.pi  # standard deviation -> Gumbel scale


class Tail:
    """Block maxima of (rows, statistics) scores and the thresholds (rows, statistics, targets) that follow.

    prior_mean, prior_std: (rows, statistics), of the block maximum of a healthy run, or of its logarithm. prior_weight:
    (statistics,), how many blocks they count for. single: (statistics,) bool, which statistics are of single points. lowest:
    (rows, statistics), block maxima count as at least this, so that a very quiet run does not become hypersensitive.
    least: (rows, statistics, targets), thresholds never fall below. rates: false alarms per step of each target; shares:
    (statistics,), how much of that each statistic may spend."""

    _ARRAYS = (
        "prior_mean", "prior_std", "lowest", "least", "maximum", "filled", "blocks", "count", "waiting", "waits", "thresholds",
    )  # fmt: skip

    def __init__(
        self,
        prior_mean: np.ndarray,
        prior_std: np.ndarray,
        prior_weight: np.ndarray,
        single: np.ndarray,
        lowest: np.ndarray,
        least: np.ndarray,
        rates: tuple[float, ...],
        shares: tuple[float, ...],
    ) -> None:
        rows, statistics = prior_mean.shape
        self.rates = rates
        self.prior_mean, self.prior_std, self.lowest, self.least = prior_mean, prior_std, lowest, least
        self.prior_weight, self.single = prior_weight, single
        # Chance that a block exceeds the threshold, (statistics, targets), and the reduced variates that belong to it.
        chances = [[min(BLOCK * rate * share, 0.99) for rate in rates] for share in shares]
        self._gumbel = np.array([[-math.log(-math.log1p(-chance)) for chance in row] for row in chances])
        self._normal = np.array([[NormalDist().inv_cdf(1.0 - chance) for chance in row] for row in chances])
        self.maximum = np.zeros((rows, statistics))
        self.filled = np.zeros(rows, dtype=np.int64)  # healthy points in the open block
        self.blocks = np.zeros((rows, _REMEMBERED, statistics))  # maxima, or their logarithms
        self.count = np.zeros(rows, dtype=np.int64)  # blocks ever taken in
        self.waiting = np.zeros((rows, _WAITING, statistics))  # oldest first
        self.waits = np.zeros(rows, dtype=np.int64)
        self.thresholds = np.zeros((rows, statistics, len(rates)))
        self.refresh(np.arange(rows))

    def arrays(self) -> dict[str, np.ndarray]:
        """The whole state by name, (rows, ...) each, live."""
        return {name: getattr(self, name) for name in self._ARRAYS}

    def add(self, rows: Any, healthy: np.ndarray | None, scores: np.ndarray) -> None:
        """Scores (n, statistics) of one step of `rows`. healthy (n,) bool, None for all: those that count."""
        if healthy is None:
            maximum = self.maximum[rows]
            np.maximum(maximum, scores, out=maximum)
            if not isinstance(rows, slice):  # a slice was a view
                self.maximum[rows] = maximum
            self.filled[rows] += 1
        elif healthy.any():
            chosen = np.arange(len(self.filled))[rows][healthy]
            self.maximum[chosen] = np.maximum(self.maximum[chosen], scores[healthy])
            self.filled[chosen] += 1

    def flush(self) -> bool:
        """Close the blocks that are full. True if a threshold may have moved."""
        full = np.flatnonzero(self.filled >= BLOCK)
        if len(full):
            self._close(full)
        return bool(len(full))

    @property
    def watch_from(self) -> float:
        """Below this share of its warn threshold no statistic of any row is worth watching."""
        return float((self.thresholds[:, :, 0] / self.thresholds[:, :, 1]).min()) if len(self.filled) else 1.0

    def _close(self, rows: np.ndarray) -> None:
        ready = rows[self.waits[rows] == _WAITING]
        if len(ready):
            self.blocks[ready, self.count[ready] % _REMEMBERED] = self.waiting[ready, 0]
            self.count[ready] += 1
            self.waiting[ready, :-1] = self.waiting[ready, 1:]
            self.waits[ready] -= 1
        highest = np.maximum(self.maximum[rows], self.lowest[rows])
        self.waiting[rows, self.waits[rows]] = np.where(self.single, np.log(highest), highest)
        self.waits[rows] += 1
        self.filled[rows] = 0
        self.maximum[rows] = 0.0
        self.refresh(rows)

    def forget_recent(self, rows: np.ndarray) -> None:
        """These rows have raised an alarm: what they saw just before is no healthy history."""
        self.waits[rows] = self.filled[rows] = 0
        self.maximum[rows] = 0.0

    def refresh(self, rows: np.ndarray) -> None:
        """Thresholds of these rows (indices) from their blocks and priors."""
        if not len(rows):
            return
        count = np.minimum(self.count[rows], _REMEMBERED)
        longest = int(count.max())
        known = self.blocks[rows, :longest]
        there = (np.arange(longest) < count[:, None])[:, :, None]
        weight = self.prior_weight + count[:, None]
        mean = (self.prior_weight * self.prior_mean[rows] + (known * there).sum(1)) / weight
        around = ((known - mean[:, None]) ** 2 * there).sum(1)
        std = np.sqrt((self.prior_weight * self.prior_std[rows] ** 2 + around) / weight)
        scale = (std * _TO_GUMBEL)[:, :, None]
        gumbel = np.exp(np.minimum(mean[:, :, None] - _EULER * scale + scale * self._gumbel, 50.0))
        normal = mean[:, :, None] + std[:, :, None] * self._normal
        self.thresholds[rows] = np.maximum(np.where(self.single[:, None], gumbel, normal), self.least[rows])
