"""What benchmarks in real ranks have in common: engines and models by their short names, and the start of a rank, on the CPU."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from resilient.engines.base import Engine, EngineConfig
from resilient.engines.build import build_engine
from resilient.train.model import GPT, ModelConfig
from resilient.train.optim import OptimConfig, make_optimizer, make_scheduler

ENGINES = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")
MODELS = {
    "gpt_1m": ModelConfig(),
    "gpt_3m": ModelConfig(name="gpt_3m", width=192, layers=7, heads=6, hidden=512),
    "gpt_28m": ModelConfig(name="gpt_28m", width=512, layers=9, heads=8, hidden=1360),
}


def engine_config(name: str, **settings: Any) -> EngineConfig:
    """name: one of ENGINES."""
    if name.startswith("zero"):
        return EngineConfig(name="deepspeed", zero_stage=int(name[-1]), **settings)
    return EngineConfig(name=name, **settings)  # type: ignore[arg-type]


def trained_engine(name: str, model: ModelConfig, micro_batch: int) -> Engine:
    """One of ENGINES around a new model with the reference job's optimizer and schedule, without accumulation. On all ranks."""
    optim = OptimConfig()
    return build_engine(
        engine_config(name),
        GPT(model),
        make_optimizer=lambda module: make_optimizer(module, optim),
        make_scheduler=lambda optimizer: make_scheduler(optimizer, optim, 10_000),
        clip=1.0,
        accumulation=1,
        micro_batch=micro_batch,
        device=torch.device("cpu"),
    )


def begin(engine: str) -> None:
    """Join the job that a launcher has started, on gloo; before DeepSpeed is imported."""
    torch.set_num_threads(1)
    if engine.startswith("zero"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
