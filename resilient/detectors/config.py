"""Constants of the detectors. Units: robust sigmas of a log-scaled signal, steps, nats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PointConfig:
    """Point outlier of one signal (detectors/point.py)."""

    signal: str
    act: float = 12.0
    warn: float = 8.0
    floor: float = 0.05  # smallest scale, in the units of the (log) signal
    level: int = 9  # accepted values behind the running median
    history: int = 128  # residuals behind the scale
    min_history: int = 12
    accept_after: int = 24  # alarms in a row after which a new level is accepted, with a warning
    log: bool = True


@dataclass(frozen=True)
class CrossRankConfig:
    """Outlier across ranks of one per-rank column (detectors/crossrank.py)."""

    signal: str = "local_grad_norm"
    act: float = 12.0
    warn: float = 8.0
    floor: float = 0.12
    history: int = 128
    min_history: int = 12
    min_ratio: float = 4.0  # an act finding also needs this factor over the peers


@dataclass(frozen=True)
class DetectorConfig:
    """conf/detector: which detectors run."""

    name: Literal["default", "nonfinite_only"] = "default"
    point: tuple[PointConfig, ...] = (
        PointConfig(signal="loss", floor=0.02),
        PointConfig(signal="grad_norm", floor=0.15),
    )
    cross_rank: tuple[CrossRankConfig, ...] = (CrossRankConfig(), CrossRankConfig(signal="loss", floor=0.04))
