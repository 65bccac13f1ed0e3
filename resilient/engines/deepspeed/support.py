"""Which DeepSpeed engines can be guarded, and as what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from resilient.engines.deepspeed.stages import HalfStage, Stage
from resilient.engines.deepspeed.zero import Bf16Stage, PartitionedStage, ShardedStage
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine as Engine


def stage_of(engine: Engine) -> Stage:
    """The description that fits this engine's optimizer. ConfigError for what is not supported."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    refuse_unsupported(engine)
    optimizer = engine.optimizer
    known: list[tuple[type, type[Stage]]] = [
        (DeepSpeedZeroOptimizer_Stage3, ShardedStage),
        (DeepSpeedZeroOptimizer, PartitionedStage),
        (BF16_Optimizer, Bf16Stage),
        (FP16_Optimizer, HalfStage),
        (FP16_UnfusedOptimizer, HalfStage),
    ]
    for kind, stage in known:
        if type(optimizer) is kind:
            return stage(engine)
    if isinstance(optimizer, torch.optim.Optimizer) and engine.zero_optimization_stage() == 0:
        return Stage(engine)
    raise ConfigError(f"resilient cannot guard a DeepSpeed engine with optimizer {type(optimizer).__name__}")


def refuse_unsupported(engine: Engine) -> None:
    """ConfigError naming each feature whose gradients or state this package would not see in full."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    zero = engine._config.zero_config
    offloads = [o for o in (zero.offload_optimizer, zero.offload_param) if o is not None]
    reasons = {
        "no optimizer": engine.optimizer is None,
        "offload_optimizer or offload_param": any(o.device != OffloadDeviceEnum.none for o in offloads),
        "zenflow": bool(engine.zenflow),
        "MoE layers": bool(engine.has_moe_layers),
        "pipeline parallelism": bool(engine.pipeline_parallelism),
        "model or sequence parallelism": engine.mp_world_size > 1 or engine.sequence_parallel_size > 1,
        "an optimizer that communicates by itself": not engine.enable_backward_allreduce,
        "sparse gradients": any(getattr(module, "sparse", False) for module in engine.module.modules()),
        "torch_autocast": engine.torch_autocast_enabled(),
        "DeepCompile": engine.is_deepcompile_enabled(),
        "managed_gradient_accumulation: false": not engine.managed_gradient_accumulation(),
        "zero_hpz_partition_size": engine.zero_hpz_partition_size() > 1,
        "zero_quantized_weights or zero_quantized_gradients": bool(
            engine.zero_quantized_weights() or engine.zero_quantized_gradients()
        ),
    }
    found = [reason for reason, present in reasons.items() if present]
    if found:
        raise ConfigError(f"resilient cannot guard this DeepSpeed engine, it uses: {', '.join(found)}")
