"""Thresholds from a run's own healthy history, blended with shipped defaults (calibration).

Scores of training curves have heavy tails, so "6 sigma" has no fixed false-alarm rate: on Student-t3 noise it costs
dozens of alarms per 10,000 steps. Here the largest score of every block of 64 healthy points is kept; the logarithm of
block maxima is Gumbel distributed for the tails that occur (Frechet domain; extreme-value theory, e.g. Coles 2001,
ch. 3), and the score exceeded with a wanted probability per step is read off its quantile. Blocks take the
autocorrelation of slow statistics into account. A prior worth 16 blocks speaks until the run has a history of its own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

BLOCK = 64
_REMEMBERED = 128  # blocks
_PRIOR_WEIGHT = 16.0  # blocks
_EULER = 0.5772156649
_TO_GUMBEL = math.sqrt(6) / math.pi  # standard deviation -> Gumbel scale


class Tail:
    """Block maxima of (rows, statistics) scores and the thresholds (rows, statistics, targets) that follow.

    prior_mean, prior_std: (rows, statistics), of the log block maximum of a healthy run. lowest: (rows, statistics), block
    maxima count as at least this, so that a very quiet run does not become hypersensitive.
    least: (rows, statistics, targets), thresholds never fall below. rates: false alarms per step of each target."""

    ARRAYS = ("prior_mean", "prior_std", "lowest", "least", "maximum", "filled", "blocks", "count", "thresholds")

    def __init__(
        self,
        prior_mean: np.ndarray,
        prior_std: np.ndarray,
        lowest: np.ndarray,
        least: np.ndarray,
        rates: tuple[float, ...],
    ) -> None:
        rows, statistics = prior_mean.shape
        self.rates = rates
        self.prior_mean, self.prior_std, self.lowest, self.least = prior_mean, prior_std, lowest, least
        self.maximum = np.zeros((rows, statistics))
        self.filled = np.zeros(rows, dtype=np.int64)  # healthy points in the open block
        self.blocks = np.zeros((rows, _REMEMBERED, statistics))  # log maxima
        self.count = np.zeros(rows, dtype=np.int64)  # blocks ever closed
        self.thresholds = self._quantiles(prior_mean, prior_std, least)

    def add(self, rows: Any, healthy: np.ndarray | None, scores: np.ndarray) -> None:
        """Scores (n, statistics) of one step of `rows`. healthy (n,) bool, None for all: those that count."""
        if healthy is None:
            self.maximum[rows] = np.maximum(self.maximum[rows], scores)
            self.filled[rows] += 1
        elif healthy.any():
            chosen = np.arange(len(self.filled))[rows][healthy]
            self.maximum[chosen] = np.maximum(self.maximum[chosen], scores[healthy])
            self.filled[chosen] += 1

    def flush(self) -> bool:
        """Close the blocks that are full. True if a threshold may have moved."""
        full = np.flatnonzero(self.filled >= BLOCK)
        for row in full:
            self._close(int(row))
        return bool(len(full))

    @property
    def watch_from(self) -> float:
        """Below this share of its warn threshold no statistic of any row is worth watching."""
        return float((self.thresholds[:, :, 0] / self.thresholds[:, :, 1]).min()) if len(self.filled) else 1.0

    def _close(self, row: int) -> None:
        self.blocks[row, self.count[row] % _REMEMBERED] = np.log(np.maximum(self.maximum[row], self.lowest[row]))
        self.count[row] += 1
        self.filled[row] = 0
        self.maximum[row] = 0.0
        self.refresh(row)

    def refresh(self, row: int) -> None:
        """Thresholds of a row from its blocks and its prior."""
        known = self.blocks[row, : min(int(self.count[row]), _REMEMBERED)]
        weight = _PRIOR_WEIGHT + len(known)
        mean = (_PRIOR_WEIGHT * self.prior_mean[row] + known.sum(0)) / weight
        variance = (_PRIOR_WEIGHT * self.prior_std[row] ** 2 + ((known - mean) ** 2).sum(0)) / weight
        self.thresholds[row] = self._quantiles(mean, np.sqrt(variance), self.least[row])

    def _quantiles(self, mean: np.ndarray, std: np.ndarray, least: np.ndarray) -> np.ndarray:
        """(..., statistics) of both -> (..., statistics, targets)."""
        scale = std * _TO_GUMBEL
        location = mean - _EULER * scale
        reduced = np.array([-math.log(-math.log1p(-min(BLOCK * rate, 0.99))) for rate in self.rates])
        return np.maximum(np.exp(location[..., None] + scale[..., None] * reduced), least)
