"""From a bare module and conf/engine to an engine: how the reference job wraps its model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilient.engines.base import Engine, EngineConfig, engine_problems
from resilient.engines.ddp import DDPEngine
from resilient.engines.fsdp2 import FSDP2Engine
from resilient.errors import ConfigError

MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def build_engine(
    config: EngineConfig,
    module: nn.Module,
    *,
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None,
    clip: float | None,
    accumulation: int,
    micro_batch: int,
    device: torch.device,
) -> Engine:
    """Wrap `module` (the same weights on every rank; moved to `device`) as `config` says. Call on every rank.

    clip: largest global gradient norm; None or 0 for no clipping.
    make_optimizer: called with the wrapped or sharded module, whose parameters it must use.
    accumulation, micro_batch: micro-steps per optimizer step and samples per micro-step and rank (DeepSpeed asks).
    Raises ConfigError, naming the key, for a combination that cannot work.
    """
    check_engine_config(config)
    clip = clip or None
    module.to(device)
    if config.name == "deepspeed":
        from resilient.engines import deepspeed  # slow to import, and needed only here

        return deepspeed.build(
            config,
            module,
            make_optimizer=make_optimizer,
            make_scheduler=make_scheduler,
            clip=clip,
            accumulation=accumulation,
            micro_batch=micro_batch,
            device=device,
        )
    if config.name == "fsdp2":
        model = _shard(module, config.precision, device)
        optimizer = make_optimizer(model)
        return FSDP2Engine(model, optimizer, make_scheduler and make_scheduler(optimizer), clip=clip)
    optimizer = make_optimizer(module)
    scheduler = make_scheduler and make_scheduler(optimizer)
    model = _replicate(module, config.bucket_mb, device)
    return DDPEngine(model, optimizer, scheduler, clip=clip, precision=config.precision)


def check_engine_config(config: EngineConfig) -> None:
    """Raises ConfigError for values that cannot work together. Needs no process group."""
    problems = engine_problems(config)
    if problems:
        which = f"engine.precision={config.precision} with engine.name={config.name}"
        raise ConfigError(f"{which} cannot be built: {'; '.join(problems)}")


def _replicate(module: nn.Module, bucket_mb: float, device: torch.device) -> nn.Module:
    """DDP where there are other ranks, else the module itself."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return module
    device_ids = None if device.type == "cpu" else [device]
    return DistributedDataParallel(module, device_ids=device_ids, bucket_cap_mb=bucket_mb)  # type: ignore[arg-type]


def _shard(module: nn.Module, precision: str, device: torch.device) -> nn.Module:
    """fully_shard on each of `module.blocks`, if there are any, and on the whole."""
    if not dist.is_initialized():
        raise ConfigError("engine.name=fsdp2 needs a process group, of one process if need be")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in getattr(module, "blocks", ()):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)  # in place
    return module
