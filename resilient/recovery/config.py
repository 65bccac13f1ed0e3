"""How a job is started and how often it may be started again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PreflightMode = Literal["off", "warn", "refuse"]  # what a finding of the probe before the start does to the job


@dataclass(frozen=True)
class LaunchConfig:
    """conf/launch. name: who starts the ranks when `resilient train` is called outside any launcher."""

    name: Literal["local", "deepspeed", "torchrun"] = "local"


@dataclass(frozen=True)
class SuperviseConfig:
    """`resilient launch`. max_restarts: restarts in a row without a checkpoint of a later step.

    backoff_s: wait before the first restart in a row; doubles with each, up to backoff_cap_s.
    grace_s: time to finish after TERM or INT; must exceed the time of a save (BR-52).
    orphan_grace_s: the same for what a command that died by itself has left running."""

    max_restarts: int = 3
    backoff_s: float = 1.0
    backoff_cap_s: float = 300.0
    grace_s: float = 30.0
    orphan_grace_s: float = 5.0
