"""Medians of many values, quickly. numpy selects one order statistic ten times faster than several at once; the neighbours
of one are the largest below it and the smallest above it."""

from __future__ import annotations

import numpy as np


def median(values: np.ndarray) -> float:
    """Of (n,) values without NaN; NaN for none."""
    n = len(values)
    if n == 0:
        return float("nan")
    ordered = np.partition(values, n // 2)
    upper = ordered[n // 2]
    return float(upper if n % 2 else 0.5 * (ordered[: n // 2].max() + upper))


def neighbours(values: np.ndarray, k: int, last: int) -> list[np.ndarray]:
    """The k-th to last-th smallest (from 0) of each row of (rows, n) values without NaN, as (rows, 1) each; last is k, k + 1 or
    k + 2, and inside the row."""
    if values.shape[1] <= 64:
        ordered = np.sort(values, axis=1)
        return [ordered[:, i : i + 1] for i in range(k, last + 1)]
    pivot = (k + last) // 2 if last > k else k
    ordered = np.partition(values, pivot, axis=1)
    found = [ordered[:, pivot : pivot + 1]]
    if pivot > k:
        found.insert(0, ordered[:, :pivot].max(axis=1, keepdims=True))
    if last > pivot:
        found.append(ordered[:, pivot + 1 :].min(axis=1, keepdims=True))
    return found
