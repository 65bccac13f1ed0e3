"""One class per DeepSpeed optimizer: where it keeps gradients, masters, clip value and loss scale.

Taps hook the method through which every local gradient bucket passes just before its reduction, on the optimizer
*instance*, so two engines in one process cannot be confused. The collective below it would be too late: ZeRO 3 pads
its buckets with uninitialised memory there, and ZeRO 1 and 2 have already divided and cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.signals import Knobs

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine as Engine

Observer = Callable[[list[torch.Tensor]], None]


@dataclass(frozen=True)
class Master:
    """One tensor the base optimizer updates. alias: it shares memory with a module parameter (or its shard)."""

    label: str
    tensor: torch.Tensor
    alias: bool


class Stage:
    """What the wrapper needs to know about one DeepSpeed optimizer. This class: ZeRO 0 in fp32, where the engine's
    optimizer is the user's own and gradients are plain `param.grad`."""

    replicated = True  # every rank holds the whole reduced gradient

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.optimizer: Any = engine.optimizer
        self.base: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self._undo: list[Callable[[], None]] = []

    # --- taps ---

    def connect(self, observe: Observer) -> None:
        """Call `observe` with the local gradients of each bucket, before anything is divided, cast or sent."""
        self._before(self.engine, "allreduce_bucket", lambda bucket, *_, **__: observe(list(bucket)))

    def disconnect(self) -> None:
        """Take every hook out again. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def _before(self, owner: Any, name: str, first: Callable[..., None]) -> None:
        """Run `first` with the same arguments before each call of `owner.name`, on this instance only."""
        original = getattr(owner, name, None)
        if original is None:
            raise ConfigError(f"this DeepSpeed has no {type(owner).__name__}.{name}; resilient knows deepspeed 0.19.8")
        shadowed = vars(owner).get(name)

        def tapped(*args: Any, **kwargs: Any) -> Any:
            first(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, tapped)
        self._undo.append(lambda: delattr(owner, name) if shadowed is None else setattr(owner, name, shadowed))

    def reduced(self) -> list[torch.Tensor]:
        """The reduced gradients that the next step would use on this rank, still multiplied by the loss scale."""
        return [p.grad for group in self.base.param_groups for p in group["params"] if p.grad is not None]

    # --- loss scale ---

    @property
    def scaler(self) -> Any | None:
        """The object whose plain attributes are the loss scaler's state, or None."""
        return None

    def loss_scale(self) -> float:
        return 1.0

    def dynamic(self) -> bool:
        return False

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """What `engine.backward` does not do to the loss although `engine.step` undoes it."""
        return loss

    def overflowed(self) -> None:
        """Tell the loss scaler about an overflow, exactly as the optimizer's own step would."""

    # --- the gate ---

    def drop_gradients(self) -> None:
        """Forget every gradient and every trace of an unfinished window. Local, no communication."""
        self.engine.zero_grad()

    def after_step(self) -> None:
        """Called after each engine.step at a boundary."""

    @property
    def clip(self) -> float:
        return self.engine._config.gradient_clipping

    @clip.setter
    def clip(self, value: float) -> None:
        self.engine._config.gradient_clipping = value

    @contextmanager
    def knobs(self, knobs: Knobs) -> Iterator[None]:
        """LR, betas and clip as `knobs` wants them. LR and betas change only inside the base optimizer's own step, so
        neither a schedule nor a log line ever sees them. ConfigError for betas on an optimizer without."""
        if knobs.betas is not None and not all("betas" in group for group in self.base.param_groups):
            raise ConfigError(f"the policy changes betas, but {type(self.base).__name__} has none")
        changed: list[tuple[dict[str, Any], str, Any]] = []

        def put(group: dict[str, Any], key: str, value: Any) -> None:
            changed.append((group, key, group[key]))
            group[key] = value

        def undo(*_: Any) -> None:
            while changed:
                group, key, value = changed.pop()
                group[key] = value

        def scale(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                put(group, "lr", group["lr"] * knobs.lr_factor)
                if knobs.betas is not None:
                    put(group, "betas", knobs.betas)

        clip, handles = self.clip, []
        self.clip = clip * knobs.clip_factor
        if knobs.lr_factor != 1.0 or knobs.betas is not None:
            handles = [self.base.register_step_pre_hook(scale), self.base.register_step_post_hook(undo)]
        try:
            yield
        finally:
            self.clip = clip
            undo()
            for handle in handles:
                handle.remove()

    # --- state ---

    def masters(self) -> list[Master]:
        """All tensors that the base optimizer updates on this rank, in a stable order."""
        names = {id(p): name for name, p in self.engine.module.named_parameters()}
        return [Master(names[id(p)], p, alias=True) for group in self.base.param_groups for p in group["params"]]

    def parameter(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The live tensor that holds this rank's part of a module parameter."""
        return parameter.data

    def moments_replaced(self) -> None:
        """Optimizer state tensors were created or dropped: links to the old ones must not survive."""


class HalfStage(Stage):
    """ZeRO 0 in fp16 or bf16: FP16_UnfusedOptimizer, or FP16_Optimizer around a fused Adam."""

    @property
    def scaler(self) -> Any:
        return self.optimizer.loss_scale_config

    def loss_scale(self) -> float:
        if not self.scaler.use_grad_scaling:
            return 1.0
        return float(self.optimizer.external_loss_scale if self.optimizer.custom_loss_scaler else self.scaler.cur_scale)

    def dynamic(self) -> bool:
        return bool(self.scaler.dynamic_loss_scale)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        # deepspeed 0.19.8: engine.backward scales only for ZeROOptimizer, but this optimizer's step divides by the
        # scale. Without this the gradients would come out 2**16 times too small (checked by a test).
        return loss * self.loss_scale() if self.scaler.use_grad_scaling else loss

    def overflowed(self) -> None:
        self.optimizer._update_scale(True)

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for master in self.masters():
            master.tensor.grad = None

    @property
    def clip(self) -> float:
        return self.optimizer.clip_grad

    @clip.setter
    def clip(self, value: float) -> None:
        self.optimizer.clip_grad = value

    def reduced(self) -> list[torch.Tensor]:
        return [p.grad for group in self.optimizer.fp16_groups for p in group if p.grad is not None]

    def masters(self) -> list[Master]:
        if hasattr(self.optimizer, "fp32_groups_flat"):
            return [Master(f"group{i}", t, alias=False) for i, t in enumerate(self.optimizer.fp32_groups_flat)]
        names = {id(p): name for name, p in self.engine.module.named_parameters()}
        return [
            Master(names[id(half)], master, alias=False)
            for halves, masters in zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True)
            for half, master in zip(halves, masters, strict=True)
        ]


class ZeroStage(Stage):
    """What the optimizers derived from ZeROOptimizer have in common."""

    replicated = False

    @property
    def scaler(self) -> Any | None:
        return getattr(self.optimizer, "loss_scaler", None)

    def loss_scale(self) -> float:
        return float(self.optimizer.loss_scale) if self.scaler is not None else 1.0

    def dynamic(self) -> bool:
        return bool(self.scaler is not None and self.scaler.dynamic)

    def overflowed(self) -> None:
        self.optimizer._update_scale(True)

    @property
    def clip(self) -> float:
        return self.optimizer.clip_grad

    @clip.setter
    def clip(self, value: float) -> None:
        self.optimizer.clip_grad = value

    def moments_replaced(self) -> None:
        if hasattr(self.optimizer, "_hp_optimizer_states_linked"):
            self.optimizer._hp_optimizer_states_linked = False

    def _forget_backward(self) -> None:
        """Close a backward that may have been abandoned halfway."""
        self.optimizer.clear_backward_seen_flag()
        self.optimizer._backward_active_depth = 0
        self.optimizer._remaining_grad_acc_hooks = 0


class Bf16Stage(ZeroStage):
    """BF16_Optimizer (ZeRO 1 with bf16 parameters and fp32 gradient accumulation). It keeps the whole reduced gradient
    on each rank and steps on its own partition of it; the engine's plain all-reduce does the reduction."""

    def reduced(self) -> list[torch.Tensor]:
        return list(self.optimizer.fp32_groups_gradient_flat_partition)  # padding is zero

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._forget_backward()

    def masters(self) -> list[Master]:
        return [Master(f"group{i}", t, alias=False) for i, t in enumerate(self.optimizer.fp32_groups_flat_partition)]


class PartitionedStage(ZeroStage):
    """ZeRO 1 and 2."""

    def connect(self, observe: Observer) -> None:
        optimizer = self.optimizer

        def before(comm_dtype: torch.dtype | None = None) -> None:
            for dtype in optimizer.ipg_buckets if comm_dtype is None else [comm_dtype]:
                bucket = optimizer.ipg_buckets[dtype]
                if bucket.grads:
                    with self._in_order(bucket):
                        observe([grad for grad in bucket.grads if grad is not None])

        self._before(optimizer, "reduce_ipg_grads", before)

    @contextmanager
    def _in_order(self, bucket: Any) -> Iterator[None]:
        """On CUDA with overlapped reduction: read the bucket after all streams that fill it, and make the reduction
        (which divides in place, on a stream of its own) wait for the reading."""
        if bucket.copy_streams:
            current = torch.cuda.current_stream()
            for stream in bucket.copy_streams:
                current.wait_stream(stream)
            bucket.copy_streams.add(current)
        yield

    def reduced(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for gradients in self.optimizer.averaged_gradients.values():
            if gradients is not None:
                flat = getattr(gradients, "flat_partition", None)
                found.extend([flat] if flat is not None else gradients)  # padding is zero in both
        return found

    def drop_gradients(self) -> None:
        optimizer = self.optimizer
        optimizer.zero_grad(set_to_none=True)
        self._forget_backward()
        optimizer.micro_step_id = -1  # INITIAL_MICRO_STEP_ID
        optimizer._release_preflattened_grad_buffers()
        for key in optimizer.averaged_gradients:  # the dict itself is linked to the parameters
            optimizer.averaged_gradients[key] = None
        for key in optimizer.all_grad_tensors:
            optimizer.all_grad_tensors[key] = None
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()
        optimizer.previous_reduced_grads.clear()
        optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
        optimizer._release_ipg_buffers()
        for master in self.masters():
            master.tensor.grad = None

    def masters(self) -> list[Master]:
        return [
            Master(f"group{i}", t, alias=False) for i, t in enumerate(self.optimizer.single_partition_of_fp32_groups)
        ]


class ShardedStage(ZeroStage):
    """ZeRO 3."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._zero_padding()

    @torch.no_grad()
    def _zero_padding(self) -> None:
        """The last shard of a parameter is padded with uninitialised memory, which ends up in the masters. Zero stays
        zero under any optimizer here (its gradient is zero), so that equal runs have equal state, and no NaN hides."""
        optimizer = self.optimizer
        for parameter in self.engine.module.parameters():
            shard = parameter.ds_tensor  # type: ignore[attr-defined]
            rank, size = parameter.ds_zero_partition_rank, parameter.partition_numel()  # type: ignore[attr-defined]
            used = min(max(parameter.ds_numel - rank * size, 0), size)  # type: ignore[attr-defined]
            shard.data[used:].zero_()
            if optimizer.get_param_id(parameter) in optimizer.grad_position:
                group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                optimizer.fp32_partitioned_groups_flat[group].data[offset + used : offset + size].zero_()

    def connect(self, observe: Observer) -> None:
        from deepspeed.accelerator import get_accelerator

        optimizer = self.optimizer

        def before(comm_dtype: torch.dtype) -> None:
            gradients = [p.grad for p in optimizer.ipg_buckets[comm_dtype].params if p.grad is not None]
            if gradients:
                with get_accelerator().stream(optimizer.reduce_and_partition_stream):
                    observe(gradients)

        self._before(optimizer, "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads", before)

    def reduced(self) -> list[torch.Tensor]:
        return [g for gradients in self.optimizer.averaged_gradients.values() for g in gradients or ()]

    def drop_gradients(self) -> None:
        optimizer = self.optimizer
        self._forget_backward()
        optimizer.parameter_offload.release_backward_leftovers()
        optimizer._pre_step()  # micro-step ids, stale buckets, the coordinator's position
        optimizer._partition_all_parameters()  # persistent ones too: the next forward gathers all of them anew
        optimizer.zero_grad(set_to_none=True)
        optimizer.averaged_gradients = {}
        for key in optimizer.params_already_reduced:
            optimizer.params_already_reduced[key] = False
        optimizer.inf_or_nan_tracker.zero_()
        self._zero_buffer()
        for master in self.masters():
            master.tensor.grad = None

    def after_step(self) -> None:
        self._zero_buffer()

    def _zero_buffer(self) -> None:
        # A parameter that gets no gradient in a window keeps its slice of this buffer from the window before, and the
        # step would use it again: after a skip that slice may be NaN, and after a restore it would be another window's.
        self.optimizer.grad_partitions_flat_buffer.zero_()

    def masters(self) -> list[Master]:
        halves = self.optimizer.fp16_partitioned_groups_flat
        return [
            Master(f"subgroup{i}", t, alias=t.data_ptr() == halves[i].data_ptr())
            for i, t in enumerate(self.optimizer.fp32_partitioned_groups_flat)
        ]

    def parameter(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.ds_tensor.data  # type: ignore[attr-defined]


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
