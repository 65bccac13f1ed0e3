"""Training curves made up for the analysis, and a log that hands them out row by row. Deterministic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from resilient.logs.rows import Remarks, Row


class Rows:
    """A Log over rows in memory."""

    def __init__(self, rows: Iterable[Row], path: str = "run.csv") -> None:
        self.path = path
        self.remarks = Remarks("made up")
        self._rows = list(rows)

    def rows(self) -> Iterator[Row]:
        return iter(self._rows)


def falling(points: int, seed: int = 0, start: float = 9.0, end: float = 2.0, noise: float = 0.03) -> np.ndarray:
    """A loss that learns: exponential decay with noise."""
    steps = np.arange(points)
    return end + (start - end) * np.exp(-steps / (points / 8)) + np.random.default_rng(seed).normal(0, noise, points)


def norms(points: int, seed: int = 0) -> np.ndarray:
    """A calm gradient norm around 0.5."""
    return 0.5 * np.exp(np.random.default_rng(seed + 1).normal(0, 0.15, points))


def rows(
    loss: Iterable[float], norm: Iterable[float] | None = None, *, every: int = 1, **others: Iterable[float]
) -> list[Row]:
    """Rows of a foreign log, step = index x every. NaN in a column of `others` or `norm`... is logged as it is."""
    columns = {"loss": list(loss), **({} if norm is None else {"grad_norm": list(norm)})}
    columns |= {name: list(values) for name, values in others.items()}
    return [
        Row(i * every, {name: float(values[i]) for name, values in columns.items()}, line=i + 2)
        for i in range(len(columns["loss"]))
    ]


def warm_up(points: int, until: int, peak: float = 1e-3) -> list[float]:
    """Linear warm-up, then a cosine down to a tenth."""
    return [
        peak * (i + 1) / until
        if i < until
        else peak * (0.55 + 0.45 * math.cos(math.pi * (i - until) / (points - until)))
        for i in range(points)
    ]
