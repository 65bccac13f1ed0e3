"""What benchmarks in real ranks have in common: the engines by their short names, and the start of a rank, on the CPU."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from resilient.engines.base import EngineConfig

ENGINES = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")


def engine_config(name: str, **settings: Any) -> EngineConfig:
    """name: one of ENGINES."""
    if name.startswith("zero"):
        return EngineConfig(name="deepspeed", zero_stage=int(name[-1]), **settings)
    return EngineConfig(name=name, **settings)  # type: ignore[arg-type]


def begin(engine: str) -> None:
    """Join the job that a launcher has started, on gloo; before DeepSpeed is imported."""
    torch.set_num_threads(1)
    if engine.startswith("zero"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
