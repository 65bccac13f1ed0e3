"""One class per DeepSpeed optimizer: where it keeps gradients, masters, clip value and loss scale.

Taps hook the method through which every local gradient bucket passes just before its reduction, on the optimizer
*instance*, so two engines in one process cannot be confused. The collective below it would be too late: ZeRO 3 pads
its buckets with uninitialised memory there, and ZeRO 1 and 2 have already divided and cast.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.engines.deepspeed.rows import Piece
from resilient.engines.layers import Layers, Part
from resilient.errors import ConfigError
from resilient.signals import Knobs

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine as Engine

Observer = Callable[[list[Piece]], None]


@dataclass(frozen=True)
class Master:
    """One tensor the base optimizer updates. alias: it shares memory with a module parameter (or its shard)."""

    label: str
    tensor: torch.Tensor
    alias: bool


class Stage:
    """What the wrapper needs to know about one DeepSpeed optimizer. This class: ZeRO 0 in fp32, where the engine's
    optimizer is the user's own and gradients are plain `param.grad`."""

    replicated = True  # every rank steps all parameters
    whole = True  # every rank receives the whole reduced gradient
    begins_cast = True  # weights are the cast of their masters before the first step, too

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.optimizer: Any = engine.optimizer
        self.base: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        # Looked up once, for a walk over all modules costs as much as copying a layer: the engine has taken these over
        self.parameters: dict[str, torch.nn.Parameter] = dict(engine.module.named_parameters())
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.layers = Layers(
            {n: int(getattr(p, "ds_numel", p.numel())) for n, p in self.parameters.items()},
            torch.device(engine.device),
        )
        self._layer_of = {id(p): self.layers.of[n] for n, p in self.parameters.items()}
        self._weight = 1 / engine.dp_world_size if self.replicated else 1.0
        self._owners: dict[int, torch.nn.Parameter] = {}  # address of a gradient -> whose it is
        self.reduce_s = 0.0  # host seconds in the tapped collectives, counted up
        self._undo: list[Callable[[], None]] = []

    # --- taps ---

    def connect(self, observe: Observer) -> None:
        """Call `observe` with the local gradients of each bucket, before anything is divided, cast or sent."""
        self._before(self.engine, "allreduce_bucket", lambda bucket, *_, **__: observe(self._pieces(bucket)))

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
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.reduce_s += time.perf_counter() - started

        setattr(owner, name, tapped)
        self._undo.append(lambda: delattr(owner, name) if shadowed is None else setattr(owner, name, shadowed))

    def _pieces(self, bucket: Iterable[torch.Tensor]) -> list[Piece]:
        """The gradients of a bucket of the engine's plain all-reduce, and whose they are."""
        return [Piece(gradient, self._owner(gradient)) for gradient in bucket]

    def _owner(self, gradient: torch.Tensor) -> torch.nn.Parameter:
        at = gradient.data_ptr()
        owner = self._owners.get(at)
        if owner is None or owner.grad is None or owner.grad.data_ptr() != at:
            self._owners = {p.grad.data_ptr(): p for p in self.parameters.values() if p.grad is not None}
            owner = self._owners[at]
        return owner

    def received(self) -> list[Piece]:
        """The reduced gradients that lie ready on this rank, still multiplied by the loss scale."""
        params = [p for group in self.base.param_groups for p in group["params"]]
        return [Piece(p.grad, p) for p in params if p.grad is not None]

    def reduced(self) -> list[tuple[torch.Tensor, Part]]:
        """Those of them that the next step would use on this rank, and how they count."""
        return [(piece.tensor, self._part(piece.parameter)) for piece in self.received()]

    def reduction_dtypes(self) -> tuple[torch.dtype, ...]:
        """Those that gradients go through from a bucket to the step; the last one is that in which micro-steps are
        added up after their reduction, where they are."""
        held = {p.dtype for group in self.base.param_groups for p in group["params"]}
        return self.engine.communication_data_type, *held

    def extent(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Elements of a parameter, and of a segment of it, whose receiver can be told from that of the next."""
        return parameter.numel(), max(parameter.numel(), 1)

    def mean_factor(self) -> float:
        """What a rank's gradient is multiplied with on its way into the reduced one."""
        return 1 / self.engine.dp_world_size if self.engine.gradient_average else 1.0

    @functools.cached_property
    def parts(self) -> dict[int, list[Part]]:
        """id of each tensor of `masters()` -> whose its elements are."""
        return {id(p): [self._part(p)] for group in self.base.param_groups for p in group["params"]}

    def _part(self, parameter: torch.Tensor, start: int = 0, stop: int | None = None) -> Part:
        return Part(self._layer_of[id(parameter)], self._weight, start, stop)

    def _in_a_row(self, parameters: Iterable[torch.Tensor], first: int = 0, length: int | None = None) -> list[Part]:
        """Parts of the slice [first, first + length) of a flat buffer that holds whole parameters one after another."""
        parts, at = [], -first
        for parameter in parameters:
            start, stop = max(at, 0), at + parameter.numel()
            stop = stop if length is None else min(stop, length)
            if start < stop:
                parts.append(self._part(parameter, start, stop))
            at += parameter.numel()
        return parts

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
        return [Master(self.names[id(p)], p, alias=True) for group in self.base.param_groups for p in group["params"]]

    def parameter(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The live tensor that holds this rank's part of a module parameter."""
        return parameter.data

    def holds_from(self, parameter: torch.nn.Parameter) -> int:
        """The first element of a module parameter that `parameter()` holds."""
        return 0

    def moments_replaced(self) -> None:
        """Optimizer state tensors were created or dropped: links to the old ones must not survive."""


class HalfStage(Stage):
    """ZeRO 0 in fp16 or bf16: FP16_UnfusedOptimizer, or FP16_Optimizer around a fused Adam."""

    # deepspeed 0.19.8 has the optimizer step on zeros when it is built: weight decay moves the masters, and the weights
    # follow with the first step only
    begins_cast = False

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

    def received(self) -> list[Piece]:
        params = [p for group in self.optimizer.fp16_groups for p in group]
        return [Piece(p.grad, p) for p in params if p.grad is not None]

    def reduction_dtypes(self) -> tuple[torch.dtype, ...]:
        return self.engine.communication_data_type, *{p.dtype for group in self.optimizer.fp16_groups for p in group}

    @functools.cached_property
    def parts(self) -> dict[int, list[Part]]:
        groups = self.optimizer.fp16_groups
        if hasattr(self.optimizer, "fp32_groups_flat"):
            flats = self.optimizer.fp32_groups_flat
            return {id(flat): self._in_a_row(group) for flat, group in zip(flats, groups, strict=True)}
        return {
            id(master): [self._part(half)]
            for halves, masters in zip(groups, self.optimizer.fp32_groups, strict=True)
            for half, master in zip(halves, masters, strict=True)
        }

    def masters(self) -> list[Master]:
        if hasattr(self.optimizer, "fp32_groups_flat"):
            return [Master(f"group{i}", t, alias=False) for i, t in enumerate(self.optimizer.fp32_groups_flat)]
        return [
            Master(self.names[id(half)], master, alias=False)
            for halves, masters in zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True)
            for half, master in zip(halves, masters, strict=True)
        ]
