"""DistributedDataParallel, or a bare module in a single process, behind the Engine protocol.

No `from __future__ import annotations` here: DDP compares its hook's annotations with real types.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilient.engines.base import Taps
from resilient.engines.ddp_first import FirstReduction
from resilient.engines.norms import sum_of_squares
from resilient.engines.torch_optim import TorchOptimEngine
from resilient.errors import ConfigError

CommHook = tuple[Any, Callable[[Any, dist.GradBucket], Future[torch.Tensor]]]
"""(state, hook) as DDP's `register_comm_hook` takes them."""


class DDPEngine(TorchOptimEngine):
    """Adapter around the user's DDP model (or, without other ranks, a bare module), optimizer and schedule.

    precision: fp32, or bf16 for `torch.autocast` around the forward; parameters and gradients stay as they are.
    comm_hook: the user's own DDP communication hook. DDP takes one hook per model and ours must be it; this one is
        called after each bucket was measured and does the reduction.
    Raises ConfigError for fp16, for a bare module where there are other ranks, and for a DDP model that has a hook.
    """

    name = "ddp"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        clip: float | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        comm_hook: CommHook | None = None,
    ) -> None:
        if precision == "fp16":
            raise ConfigError("engine.precision=fp16 needs a DeepSpeed engine: its dynamic loss scaler")
        wrapped = isinstance(model, DistributedDataParallel)
        if not wrapped and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"{type(model).__name__} is not a DistributedDataParallel, and there are {dist.get_world_size()} ranks: "
                "nothing would reduce its gradients"
            )
        module = model.module if isinstance(model, DistributedDataParallel) else model
        super().__init__(module, optimizer, scheduler, clip, next(module.parameters()).device)
        self.model = model
        self._autocast = precision == "bf16"
        self._reduce_s = self._collective_s = 0.0
        self._tap = _attach(model, comm_hook) if isinstance(model, DistributedDataParallel) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext():
            return self.model(*args, **kwargs)

    @torch.no_grad()
    def taps(self) -> Taps:
        """Without other ranks nothing is reduced: both norms are that of `.grad`, and each gradient counts as a bucket."""
        grads = self._grads()
        by_layer = self._sums(grads)
        share = by_layer.sum()
        if self._tap is None:
            return Taps(share.clone(), share, len(grads), by_layer)
        local = torch.zeros_like(share)
        for square in self._tap.squares:
            local += square
        return Taps(local, share, len(self._tap.squares), by_layer, self._reduce_s, self._collective_s)

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        if self._tap is not None and self._tap.hooked_at:
            # The last bucket leaves when nothing is left to compute: from there on this rank waited for the others.
            self._collective_s = time.perf_counter() - self._tap.hooked_at
            self._reduce_s = self._tap.hook_s + self._collective_s

    def close(self) -> None:
        """DDP cannot unregister a hook: ours stays and from now on only reduces, as DDP would without one (or as the
        user's `comm_hook` does). A new engine on the same model takes it over."""
        if self._tap is not None:
            self._tap.close()
        self._set_sync(True)

    def _measure_norm(self) -> float:
        return math.sqrt(float(sum_of_squares(self._grads().values(), self.device)))

    def _weight(self, parameter: nn.Parameter) -> float:
        return 1 / self._tap.world if self._tap is not None else 1.0

    def _begin_window(self) -> None:
        self._reduce_s = self._collective_s = 0.0
        if self._tap is not None:
            self._tap.begin_window()

    def _set_sync(self, last: bool) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = last
            assert self._tap is not None
            self._tap.begin_backward()


class _BucketTap:
    """State of the hook: the squared norm of every bucket of the window, before reduction, and its times: seconds on
    the host inside the hook, and when it was last left (0: not called yet)."""

    def __init__(self, model: DistributedDataParallel, user: CommHook | None) -> None:
        self.model = model
        self.group = model.process_group
        self.world = dist.get_world_size(self.group)
        self.user = user
        self.open = True
        self.begin_window()
        self.first = FirstReduction(model) if user is None and FirstReduction.lies_ahead(model) else None

    def begin_window(self) -> None:
        self.squares: list[torch.Tensor] = []
        self.hook_s = self.hooked_at = 0.0

    def begin_backward(self) -> None:
        if self.model._has_rebuilt_buckets:
            self.forget_first()
        if self.first is not None:
            self.first.begin_backward()

    def forget_first(self) -> None:
        if self.first is not None:
            self.first.close()
            self.first = None

    def close(self) -> None:
        self.open = False
        self.squares = []
        self.forget_first()


def _measure_and_reduce(state: _BucketTap, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The hook: this rank's accumulated gradient goes by, its square is noted, then it is reduced to the mean.

    Scaling by the reciprocal before the sum is what DDP does without a hook, to the last bit; only the very first
    backward of a process differs from DDP's (see ddp_first.py), and only with three ranks or more.
    """
    entered = time.perf_counter()
    try:
        return _reduce(state, bucket)
    finally:
        state.hooked_at = time.perf_counter()
        state.hook_s += state.hooked_at - entered


def _reduce(state: _BucketTap, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    buffer = bucket.buffer()
    if state.open:
        state.squares.append(sum_of_squares([buffer], buffer.device))
    if state.user is not None:
        user_state, user_hook = state.user
        return user_hook(user_state, bucket)
    buffer.mul_(1.0 / state.world)
    if state.first is not None and not state.model._has_rebuilt_buckets:
        return state.first.reduce(bucket, state.group)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _attach(model: DistributedDataParallel, user: CommHook | None) -> _BucketTap:
    for hook, state in model._comm_hooks:
        if not isinstance(state, _BucketTap):
            raise ConfigError(
                f"this DistributedDataParallel already has a communication hook ({hook.__qualname__}) and takes only one: "
                "do not register it; pass it as DDPEngine(..., comm_hook=(state, hook)) and it will do the reduction"
            )
        if state.open:
            raise ConfigError("this DistributedDataParallel already belongs to an open engine: close() that one first")
        state.open, state.user = True, user
        return state
    tap = _BucketTap(model, user)
    try:
        model.register_comm_hook(tap, _measure_and_reduce)
    except RuntimeError as error:
        raise ConfigError(
            "this DistributedDataParallel already has a built-in communication hook and takes only one: "
            f"pass a Python hook as DDPEngine(..., comm_hook=(state, hook)) instead ({error})"
        ) from error
    return tap
