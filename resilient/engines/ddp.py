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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilient.engines.base import CellRows, Taps
from resilient.engines.ddp_first import FirstReduction, rebuilds_buckets
from resilient.engines.norms import sum_of_squares
from resilient.engines.reduction_check import BucketLayout, Piece, ReductionCheck
from resilient.engines.torch_optim import TorchOptimEngine
from resilient.errors import ConfigError
from resilient.signals import CheckPlan

CommHook = tuple[Any, Callable[[Any, dist.GradBucket], Future[torch.Tensor]]]
"""(state, hook) as DDP's `register_comm_hook` takes them."""

_MEANS: dict[Any, torch.dtype | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
"""torch's hooks that return the mean over their group (their state), and the dtype they take it in, if another."""


class DDPEngine(TorchOptimEngine):
    """Adapter around the user's DDP model (or, without other ranks, a bare module), optimizer and schedule.

    precision: fp32, or bf16 for `torch.autocast` around the forward; parameters and gradients stay as they are.
    comm_hook: the user's own DDP communication hook. DDP takes one hook per model and ours must be it; this one is
        called after each bucket was measured and does the reduction. The reduction check knows torch's `allreduce_hook`,
        `fp16_compress_hook` and `bf16_compress_hook`, over all ranks. Of any other hook nobody can say whether it
        returns the mean (PowerSGD does not), so there is no check then; likewise where the model's process group is
        not all ranks.
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
        self._tap: _BucketTap | None = None
        if isinstance(model, DistributedDataParallel):
            self._tap = _attach(model, comm_hook)
            self._tap.check = _check_for(model, comm_hook, self.device)
            self._tap.names = {id(p): parameter for parameter, p in self._params.items()}
        self._note_buffers()

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
        squares = list(self._tap.squares.values())
        local = torch.stack(squares).sum() if squares else torch.zeros_like(share)
        checks = self._tap.finish_check()
        return Taps(local, share, len(squares), by_layer, self._reduce_s, self._collective_s, checks)

    def check_plan(self) -> CheckPlan | None:
        return self._tap.check.plan if self._tap is not None and self._tap.check is not None else None

    def uncheck(self) -> None:
        if self._tap is not None:
            self._tap.check = None

    def check_rows(self, cell: int) -> list[CellRows]:
        return self._tap.check.rows(cell) if self._tap is not None and self._tap.check is not None else []

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

    def _copies(self) -> tuple[tuple[int, ...], ...]:
        """Of a group that is not all ranks, nobody knows here what the others are."""
        world = self._tap.world if self._tap is not None else 1
        return (tuple(range(world)),) if world > 1 and world == dist.get_world_size() else ()

    def _everyone(self) -> tuple[tuple[int, ...], ...]:
        return self._copies()

    def _is_copied(self, name: str, tensor: torch.Tensor) -> bool:
        return not (isinstance(self.model, DistributedDataParallel) and name in self.model.parameters_to_ignore)

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
    the host inside the hook, and when it was last left (0: not called yet).

    check: of the buckets, or None. names: id of a parameter -> its name."""

    def __init__(self, model: DistributedDataParallel, user: CommHook | None) -> None:
        self.model = model
        self.group = model.process_group
        self.world = dist.get_world_size(self.group)
        self.user = user
        self.open = True
        self.check: ReductionCheck | None = None
        self.names: dict[int, str] = {}
        self.buckets: dict[int, _Bucket] = {}  # by index, once DDP will not change them any more
        self.begin_window()
        self.first = FirstReduction(model) if user is None and FirstReduction.lies_ahead(model) else None

    def begin_window(self) -> None:
        self.squares: dict[int, torch.Tensor] = {}
        self.hook_s = self.hooked_at = 0.0
        if self.check is not None:
            self.check.begin_window()

    def measure(self, bucket: dist.GradBucket) -> None:
        """Before the reduction. A bucket that goes twice in a window holds all that was accumulated the second time."""
        index, buffer = bucket.index(), bucket.buffer()
        if self.check is None or rebuilds_buckets(self.model):
            self.squares[index] = sum_of_squares([buffer], buffer.device)
            return
        if index not in self.buckets:
            self.buckets[index] = _Bucket(index, bucket.parameters(), self.names)
        self.squares[index] = self.check.sent(index, buffer, self.world, whole=True)

    def finish_check(self) -> dict[str, torch.Tensor]:
        if self.check is None:
            return {}
        for index in self.squares:
            if index in self.buckets:
                self.check.received(index, self.buckets[index].layout, self.buckets[index].gradients())
        return self.check.finish()

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
        self.squares, self.check = {}, None
        self.forget_first()


class _Bucket:
    """What lies where in one of DDP's buckets: its parameters one behind the other, each in its own order of memory."""

    def __init__(self, index: int, parameters: list[torch.Tensor], names: dict[int, str]) -> None:
        spans, at = [], 0
        for p in parameters:
            spans.append((at, at + p.numel(), names[id(p)]))
            at += p.numel()
        name = (
            f"bucket {index} ({spans[0][2]} .. {spans[-1][2]})" if len(spans) > 1 else f"bucket {index} ({spans[0][2]})"
        )
        self.layout = BucketLayout(name, at, tuple(spans))
        self._parameters = [(p, start) for p, (start, _, _) in zip(parameters, spans, strict=True)]

    def gradients(self) -> list[Piece]:
        """As the optimizer will use them. A parameter that no rank has used has none; its part of the bucket is zero."""
        return [(_in_order(p, p.grad), start) for p, start in self._parameters if p.grad is not None]


def _in_order(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """(n,) the gradient's elements in the order that DDP puts them into a bucket: that of the parameter in memory."""
    if parameter.is_contiguous():
        return gradient.detach().reshape(-1)
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)  # keeps the strides of a dense parameter
    return gradient.detach().as_strided((gradient.numel(),), (1,))


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
        state.measure(bucket)
    if state.user is not None:
        user_state, user_hook = state.user
        return user_hook(user_state, bucket)
    buffer.mul_(1.0 / state.world)
    if state.first is not None and not state.model._has_rebuilt_buckets:
        return state.first.reduce(bucket, state.group)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _check_for(model: DistributedDataParallel, user: CommHook | None, device: torch.device) -> ReductionCheck | None:
    dtype = None
    groups = [model.process_group]
    if user is not None:
        state, hook = user
        if hook not in _MEANS or not (state is None or isinstance(state, dist.ProcessGroup)):
            return None
        dtype = _MEANS[hook]
        groups += [state] if state is not None else []
    world = dist.get_world_size()
    if world == 1 or any(dist.get_world_size(group) != world for group in groups):
        return None
    return ReductionCheck(device, tuple((rank,) for rank in range(world)), dtype)


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
