"""Typed, composable, seeded faults: `parse` a mapping, then `install` it around engine, data and objective."""

from resilient.faults.config import (
    FaultConfig,
    FaultSequence,
    KillRank,
    LrOvershoot,
    NanFault,
    NanInModule,
    NoFault,
    PoisonedWindow,
    RankGradSpike,
    check_world,
    parse,
)
from resilient.faults.install import install

__all__ = [
    "FaultConfig",
    "FaultSequence",
    "KillRank",
    "LrOvershoot",
    "NanFault",
    "NanInModule",
    "NoFault",
    "PoisonedWindow",
    "RankGradSpike",
    "check_world",
    "install",
    "parse",
]
