"""Building a DeepSpeed engine from an EngineConfig, on whatever accelerator `device` asks for."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from resilient.engines.base import EngineConfig
from resilient.engines.deepspeed.wrapper import DeepSpeedEngine
from resilient.errors import ConfigError

_ELEMENT_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


def build(
    config: EngineConfig,
    module: torch.nn.Module,
    *,
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
    clip: float | None,
    accumulation: int,
    micro_batch: int,
    device: torch.device,
) -> DeepSpeedEngine:
    """A guarded DeepSpeed engine around `module` (fp32, on any device; DeepSpeed moves and casts it).

    make_optimizer gets the module, make_scheduler the optimizer (it may return None). clip: largest global gradient
    norm, 0 or None for no clipping. Call on every rank, with the default process group initialised.
    """
    deepspeed = load_deepspeed(device, config.precision)
    optimizer = make_optimizer(module)
    scheduler = make_scheduler(optimizer) if make_scheduler is not None else None
    settings = compose(config, clip=clip, accumulation=accumulation, micro_batch=micro_batch)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, lr_scheduler=scheduler, config=settings, dist_init_required=False
    )
    if not hasattr(engine.optimizer, "reduce_bucket_size"):  # ZeRO 0, BF16_Optimizer: no setting, a default argument
        elements = settings["zero_optimization"]["reduce_bucket_size"]
        engine.allreduce_gradients = functools.partial(engine.allreduce_gradients, bucket_size=elements)
    return DeepSpeedEngine(engine)


def compose(config: EngineConfig, *, clip: float | None, accumulation: int, micro_batch: int) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`; `config.deepspeed` is merged over it, key by key, at every depth."""
    bucket = max(int(config.bucket_mb * 2**20 / _ELEMENT_SIZE[config.precision]), 2)
    bucket += bucket % 2  # allgather_bucket_size must be even
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip or 0.0,
        "zero_optimization": {
            "stage": config.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {
            "enabled": config.precision == "fp16",
            "loss_scale": 0,  # dynamic
            "initial_scale_power": config.initial_loss_scale_power,
        },
        "steps_per_print": None,
    }
    return _merge(ours, config.deepspeed or {})


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        mine = merged.get(key)
        both = isinstance(mine, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(mine, value) if both else value  # type: ignore[arg-type]
    return merged


def load_deepspeed(device: torch.device, precision: str) -> Any:
    """Import deepspeed for this device type, quietly. ConfigError if it is already set up for another one."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    if os.environ.get("RESILIENT_VERBOSE"):
        logger.setLevel("INFO")
    else:
        logger.setLevel("WARNING")  # torch 2.13 deprecates collectives that deepspeed 0.19.8 calls in every step
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    accelerator = get_accelerator()
    if accelerator.device_name() != device.type:
        raise ConfigError(
            f"DeepSpeed runs on {accelerator.device_name()}, the engine is asked for on {device.type}: "
            f"set DS_ACCELERATOR={device.type} before deepspeed is imported"
        )
    if device.type == "cpu":
        leave_out_shm_extension(deepspeed)
        if precision == "fp16":
            allow_fp16_on_cpu(accelerator)
    return deepspeed


def leave_out_shm_extension(deepspeed: Any) -> None:
    """On its first CPU start DeepSpeed compiles a shared-memory extension that only `inference_all_reduce` uses.
    Training never calls that, and a rank killed while it compiles leaves a lock behind on which every later start
    waits for ever (torch's FileBaton has no deadline). So it is declared incompatible, and gloo serves."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def allow_fp16_on_cpu(accelerator: Any) -> None:
    """DeepSpeed refuses fp16 on CPUs without native fp16 arithmetic. torch computes it there all the same, slowly, so
    the real dynamic loss scaler can run (for tests and rehearsals). Affects this process's accelerator object only."""
    accelerator.is_fp16_supported = lambda: True
