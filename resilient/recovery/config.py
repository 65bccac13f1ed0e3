"""How a job is started and how often it may be started again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LaunchConfig:
    """conf/launch. name: who starts the ranks when `resilient train` is called outside any launcher."""

    name: Literal["local", "deepspeed", "torchrun"] = "local"
