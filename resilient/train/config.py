"""The reference job's configuration tree: one frozen dataclass per Hydra group, beside the class it configures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.coordinator.config import GuardConfig
from resilient.detectors.config import DetectorConfig
from resilient.engines.base import EngineConfig
from resilient.policies.config import PolicyConfig
from resilient.recovery.config import LaunchConfig
from resilient.train.data import DataConfig
from resilient.train.model import ModelConfig
from resilient.train.optim import OptimConfig


@dataclass(frozen=True)
class RunConfig:
    """conf/run: identity, length and cadence of one run."""

    root: str = "runs"
    id: str | None = None  # null: RESILIENT_RUN_ID, or a fresh one
    steps: int = 200  # applied optimizer steps
    seed: int = 0
    nproc: int | None = None  # ranks that `resilient train` starts when no launcher did; see `processes`
    eval_every: int = 50  # steps; 0: only at the end
    eval_batches: int = 8
    sample_tokens: int = 64  # sampled behind each of two held-out prompts at an evaluation (S1); 0: none
    log_every: int = 10  # steps between progress lines when the output is not a terminal
    threads: int = 1  # torch threads per process; 0: leave torch's default
    resume: Literal["auto", "never", "must"] = "auto"
    on_config_change: Literal["keep", "refuse"] = "keep"
    on_no_valid_checkpoint: Literal["stop", "fresh"] = "stop"
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    def processes(self) -> int:
        """`nproc`; if null, one rank per CUDA device, and two on a machine without."""
        return self.nproc if self.nproc is not None else torch.cuda.device_count() or 2


@dataclass(frozen=True)
class JobConfig:
    """Everything `resilient train` needs. `fault` stays a plain mapping here: faults is a room of its own that
    train does not import; cli converts it."""

    engine: EngineConfig
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    policy: PolicyConfig
    detector: DetectorConfig
    launch: LaunchConfig
    run: RunConfig
