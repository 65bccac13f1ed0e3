"""Detectors: one statistic family per file, pure, numpy only."""

from __future__ import annotations

from resilient.detectors.base import Detector
from resilient.detectors.config import CrossRankConfig, DetectorConfig, PointConfig
from resilient.detectors.crossrank import CrossRankOutlier
from resilient.detectors.monitor import Monitor
from resilient.detectors.nonfinite import NonFinite
from resilient.detectors.point import PointOutlier

__all__ = [
    "CrossRankConfig",
    "CrossRankOutlier",
    "Detector",
    "DetectorConfig",
    "Monitor",
    "NonFinite",
    "PointConfig",
    "PointOutlier",
    "build_detectors",
    "build_monitor",
]


def build_detectors(config: DetectorConfig) -> list[Detector]:
    """All configured detectors, in a fixed order (the order is part of every rank's identical judgement)."""
    detectors: list[Detector] = [NonFinite()]
    if config.name == "nonfinite_only":
        return detectors
    detectors += [PointOutlier(c) for c in config.point]
    detectors += [CrossRankOutlier(c) for c in config.cross_rank]
    return detectors


def build_monitor(config: DetectorConfig) -> Monitor:
    """The configured detectors as one monitor."""
    return Monitor(build_detectors(config))
