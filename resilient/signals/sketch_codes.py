"""How a sketch writes numbers: floats as integers of the same order, values packed with their rank, and bins of a histogram."""

from __future__ import annotations

import math

import numpy as np

MOST_RANKS = 1 << 20
ABSENT = int(np.iinfo(np.int64).min)
_MOST = np.iinfo(np.int64).max

BINS = 1024
REACH = 20.0  # log units from the centre; beyond counts as this far
_FINE = 0.25  # log units around the centre in which bins are narrow: 0.0025 there, 0.06 at a factor of 400
_BIN_SCALE = (BINS / 2 - 1) / math.asinh(REACH / _FINE)
RANK_BITS = 20
_VALUE_BITS, _SIGMA_BITS, _OWN_BITS = 24, 8, 9
TOLD_BITS = _SIGMA_BITS + _OWN_BITS + 2  # the last two: `stays` and `mature`
_SIGMA_LOG = (-6.0, 3.0)  # natural logarithm of what the sigma's bits span
_OWN_REACH = 8.0


class _Steps:
    """Numbers between two ends as whole numbers of so many bits, and back."""

    def __init__(self, bits: int, low: float, high: float) -> None:
        self.most, self.low, self.width = (1 << bits) - 1, low, high - low

    def __call__(self, values: np.ndarray) -> np.ndarray:
        share = np.clip((values - self.low) / self.width, 0.0, 1.0)
        return np.rint(share * self.most).astype(np.int64)

    def back(self, steps: np.ndarray) -> np.ndarray:
        return self.low + (steps & self.most) / self.most * self.width


class _LogSteps(_Steps):
    def __call__(self, values: np.ndarray) -> np.ndarray:
        return super().__call__(np.log(values))

    def back(self, steps: np.ndarray) -> np.ndarray:
        return np.exp(super().back(steps))


VALUE = _Steps(_VALUE_BITS, -REACH, REACH)
OWN = _Steps(_OWN_BITS, -_OWN_REACH, _OWN_REACH)
LOG_SIGMA = _LogSteps(_SIGMA_BITS, *_SIGMA_LOG)
OWN_SHIFT, SIGMA_SHIFT, VALUE_SHIFT = 2, _OWN_BITS + 2, RANK_BITS + TOLD_BITS


def bin_of(distance: np.ndarray) -> np.ndarray:
    """Bin of a distance from the centre, in log units."""
    return np.clip(np.floor(BINS / 2 + _BIN_SCALE * np.arcsinh(distance / _FINE)), 0, BINS - 1).astype(np.int64)


EDGES = _FINE * np.sinh((np.arange(BINS + 1) - BINS / 2) / _BIN_SCALE)
MIDDLES = 0.5 * (EDGES[1:] + EDGES[:-1])


def ordered(values: np.ndarray) -> np.ndarray:
    """float64 -> int64 of the same order; every NaN is the same, and above all."""
    bits = np.where(np.isnan(values), np.nan, np.asarray(values, dtype=np.float64) + 0.0).view(np.int64)
    return np.where(bits < 0, bits ^ _MOST, bits)


def unordered(bits: np.ndarray) -> np.ndarray:
    """Back again."""
    return np.where(bits < 0, bits ^ _MOST, bits).view(np.float64)


def low_rank(ranks: np.ndarray) -> np.ndarray:
    """Larger for lower ranks, so that a MAX keeps the lowest; the same function leads back."""
    return MOST_RANKS - 1 - ranks
