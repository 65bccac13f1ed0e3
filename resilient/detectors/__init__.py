"""Detectors: what the statistics of a run say about it. Pure, numpy only; the same code in a run, over a log, in a simulation.

series      every signal over time: point, level, drift, trend, scale (statistics.py, tail.py, specs.py)
crossrank   one rank against the others (peers.py)
stragglers  ranks and wires that the others wait for
nonfinite   NaN and Inf, and where they began
samples     the same sample on two ranks
odd_window  one window that was off on all ranks, and passed
drops       the fp16 loss scale falling
collapse    silent collapse: evaluation and output statistics
layers      several layers losing control together, and the first of them
sketched    what speaks where there is a sketch of all ranks instead of their rows
monitor     all of them over one stream: findings, alarms, the stability level (stability.py)
"""

from __future__ import annotations

from resilient.detectors.base import Detector
from resilient.detectors.collapse import Collapse
from resilient.detectors.config import (
    CollapseConfig,
    CrossRankConfig,
    DetectorConfig,
    DropsConfig,
    ReductionConfig,
    ReplicasConfig,
    SeriesConfig,
    StragglersConfig,
    Targets,
)
from resilient.detectors.crossrank import CrossRankOutlier
from resilient.detectors.drops import LossScaleDrops
from resilient.detectors.monitor import Monitor
from resilient.detectors.nonfinite import NonFinite
from resilient.detectors.odd_window import OddWindow
from resilient.detectors.reduction import ReductionCheck
from resilient.detectors.replicas import Replicas
from resilient.detectors.samples import SharedSamples
from resilient.detectors.series import Series
from resilient.detectors.sketched import ByMode, NonFiniteByMode, ReductionCheckByMode, ReplicasByMode
from resilient.detectors.stragglers import SketchStragglers, Stragglers

__all__ = [
    "Collapse",
    "CollapseConfig",
    "CrossRankConfig",
    "CrossRankOutlier",
    "Detector",
    "DetectorConfig",
    "DropsConfig",
    "LossScaleDrops",
    "Monitor",
    "NonFinite",
    "OddWindow",
    "ReductionCheck",
    "ReductionConfig",
    "Replicas",
    "ReplicasConfig",
    "Series",
    "SeriesConfig",
    "SharedSamples",
    "Stragglers",
    "StragglersConfig",
    "Targets",
    "build_detectors",
    "build_monitor",
]


def build_detectors(config: DetectorConfig) -> list[Detector]:
    """All configured detectors, in a fixed order (the order is part of every rank's identical judgement)."""
    if config.name == "nonfinite_only":
        return [NonFinite()]
    return [
        NonFiniteByMode(),
        Series(config.series, config.targets),
        *(CrossRankOutlier(c, config.targets) for c in config.cross_rank),
        ReductionCheckByMode(config.reduction.sigmas, config.reduction.window, config.reduction.lossy),
        ReplicasByMode(repeats=config.replicas.repeats, window=config.replicas.window),
        ByMode(Stragglers(config.stragglers), SketchStragglers(config.stragglers)),
        SharedSamples(),
        OddWindow(),
        LossScaleDrops(config.drops),
        Collapse(config.collapse),
    ]


def build_monitor(config: DetectorConfig) -> Monitor:
    """The configured detectors as one monitor."""
    return Monitor(build_detectors(config), config.targets)
