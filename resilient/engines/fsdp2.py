"""FSDP2 (`fully_shard`) behind the Engine protocol.

The only private state of torch used here is a module's list of FSDP parameter groups (`_param_groups`): to give a
replaced reduce-scatter back, to learn a custom divide factor, and to drop gradients of an abandoned window, none of
which the public API offers (torch 2.13).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilient.engines.base import Taps
from resilient.engines.norms import sum_of_squares
from resilient.engines.torch_optim import TorchOptimEngine
from resilient.errors import ConfigError


class FSDP2Engine(TorchOptimEngine):
    """Adapter around a model to which the user applied `fully_shard` (blocks as they like, and the root), and the
    optimizer built from it afterwards.

    Precision is the user's MixedPrecisionPolicy. One shard mesh or HSDP (replicas of shards) are both understood.
    Raises ConfigError for a root that is not sharded, for modules with several FSDP parameter groups, and for HSDP
    whose shard dimension is 1 (torch calls no reduce-scatter there, so nothing could be measured: use DDP).
    """

    name = "fsdp2"

    def __init__(
        self,
        model: nn.Module | FSDPModule,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        clip: float | None = None,
    ) -> None:
        if not isinstance(model, FSDPModule):
            raise ConfigError(
                f"fully_shard was not applied to {type(model).__name__} itself: "
                "apply it to the blocks first and to the whole model last"
            )
        module = cast(nn.Module, model)  # FSDPModule is mixed into the module's own class
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        for unit in self._units:
            unit.reshard()  # an earlier forward leaves the root's whole parameters registered in place of its shards
        sharded = next((p for p in module.parameters() if isinstance(p, DTensor)), None)
        if sharded is None:
            raise ConfigError("no parameter of this model is sharded by FSDP2: all of them are in ignored_params")
        self._mesh = sharded.device_mesh
        device = torch.device(self._mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.get_device_module(device).current_device())
        super().__init__(module, optimizer, scheduler, clip, device)
        self.model = model
        self._ran = False
        self._taps: list[_ReduceScatterTap] = []
        if self._mesh.size() > 1:
            if _shards(sharded) == 1:
                raise ConfigError(
                    f"the mesh {self._mesh} replicates but does not shard: use DDP, or a mesh that shards"
                )
            self._attach()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._ran = True
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def taps(self) -> Taps:
        """Shards count once, replicas of a shard and unsharded parameters a part on each rank that holds them.

        The local norm of a parameter in `ignored_params` is that of its `.grad` as it stands. Without other ranks
        nothing is reduced: both norms are that of `.grad`, and each gradient counts as a bucket.
        """
        grads = self._grads()
        by_layer = self._sums(grads)
        share = by_layer.sum()
        if self._mesh.size() == 1:
            return Taps(share.clone(), share, len(grads), by_layer)
        local_sq = sum_of_squares((g for g in grads.values() if not isinstance(g, DTensor)), self.device)
        squares = [square for tap in self._taps for square in tap.squares]
        for square in squares:
            local_sq += square
        waited = sum(tap.waited_s for tap in self._taps)
        return Taps(local_sq, share, len(squares), by_layer, waited, waited)

    def close(self) -> None:
        """Gives every FSDP module the reduce-scatter back that it had."""
        for tap in self._taps:
            tap.unit.set_custom_reduce_scatter(tap.inner)
        self._taps = []
        self._set_sync(True)

    def _attach(self) -> None:
        for unit in self._units:
            groups = _param_groups(unit)
            if len(groups) > 1:
                raise ConfigError(
                    f"{type(unit).__name__} holds several FSDP parameter groups (a mesh per parameter), "
                    "whose reduce-scatter torch does not let anyone observe"
                )
            for group in groups:
                if isinstance(group._reduce_scatter_comm, _ReduceScatterTap):
                    raise ConfigError("this FSDP2 model already belongs to an open engine: close() that one first")
                tap = _ReduceScatterTap(unit, group._reduce_scatter_comm, self._mesh.size(), group)
                unit.set_custom_reduce_scatter(tap)
                self._taps.append(tap)

    def _weight(self, parameter: nn.Parameter) -> float:
        return _shards(parameter) / self._mesh.size()

    def _measure_norm(self) -> float:
        total = self._sums(self._grads()).sum()
        for dim in range(self._mesh.ndim):
            dist.all_reduce(total, group=self._mesh.get_group(dim))
        return math.sqrt(float(total))

    def _begin_window(self) -> None:
        for tap in self._taps:
            tap.squares, tap.waited_s = [], 0.0

    def _set_sync(self, last: bool) -> None:
        self.model.set_requires_gradient_sync(last)

    def _abandon_window(self) -> None:
        """Back to shards, so that the next forward gathers restored values; unreduced gradients are dropped."""
        if self._ran:
            self.model.reset_iter_state()
        for unit in self._units:
            unit.reshard()
            for group in _param_groups(unit):
                for p in group.fsdp_params:
                    p.unsharded_accumulated_grad = None
                    if hasattr(p, "_unsharded_param"):  # created by the first forward
                        p._unsharded_param.grad = None


class _ReduceScatterTap(ReduceScatter):
    """Notes the squared norm of what each reduce-scatter is given, then lets the module's own one do it."""

    def __init__(self, unit: FSDPModule, inner: ReduceScatter, ranks: int, group: Any) -> None:
        self.unit = unit
        self.inner = inner
        self.squares: list[torch.Tensor] = []
        self.waited_s = 0.0  # host seconds in the collective
        self._ranks = ranks
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """input_tensor: all gradients of the module, flat, padded with zeros, divided by `_predivided` by now."""
        square = sum_of_squares([input_tensor], input_tensor.device)
        factor = self._group.gradient_divide_factor
        self.squares.append(square * _predivided(input_tensor.dtype, self._ranks if factor is None else factor) ** 2)
        started = time.perf_counter()
        work = self.inner(output_tensor, input_tensor, group, op, async_op)
        self.waited_s += time.perf_counter() - started
        return work


def _predivided(dtype: torch.dtype, factor: float) -> float:
    """What FSDP2 divided a gradient by before reducing it: about sqrt(factor) for a dtype it takes to be at risk of
    overflow, else 1 (`_get_gradient_divide_factors` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)."""
    if dtype in (torch.float32, torch.bfloat16):
        return 1.0
    before = 1
    while factor % before == 0 and factor / before > before:
        before *= 2
    return float(before)


def _shards(tensor: torch.Tensor) -> int:
    """How many different parts of this tensor there are across its mesh; 1 for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_shard())


def _param_groups(unit: FSDPModule) -> list[Any]:
    return list(unit._get_fsdp_state()._fsdp_param_groups)
