"""FSDP2 (`fully_shard`) behind the Engine protocol.

The only private state of torch used here is a module's list of FSDP parameter groups (`_param_groups`): to give a
replaced reduce-scatter back, to learn a custom divide factor and which parameters share a reduce-scatter, and to drop
gradients of an abandoned window, none of which the public API offers (torch 2.13).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter,
    ProcessGroupAllocReduceScatter,
    SymmMemReduceScatter,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilient.engines.base import CellRows, Taps
from resilient.engines.buffers import local
from resilient.engines.norms import sum_of_squares
from resilient.engines.reduction_check import BucketLayout, Piece, ReductionCheck
from resilient.engines.torch_optim import TorchOptimEngine
from resilient.errors import ConfigError
from resilient.signals import CheckPlan

_OF_TORCH = (DefaultReduceScatter, ProcessGroupAllocReduceScatter, SymmMemReduceScatter)


class FSDP2Engine(TorchOptimEngine):
    """Adapter around a model to which the user applied `fully_shard` (blocks as they like, and the root), and the
    optimizer built from it afterwards.

    Precision is the user's MixedPrecisionPolicy. One shard mesh or HSDP (replicas of shards) are both understood.
    The reduction check has one bucket for each module that `fully_shard` was applied to. There is none with a
    reduce-scatter or an all-reduce hook of the user's own, of which nobody can say what it returns, and none where a
    module's mesh is not all ranks.
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
        self._holders = _holders(sharded)
        self._ran = False
        self._taps: list[_ReduceScatterTap] = []
        self._gathers: list[_AllGatherTap] = []
        self._check: ReductionCheck | None = None
        if self._mesh.size() > 1:
            if _shards(sharded) == 1:
                raise ConfigError(
                    f"the mesh {self._mesh} replicates but does not shard: use DDP, or a mesh that shards"
                )
            self._attach()
            if self._is_checkable():
                self._check = ReductionCheck(self.device, self._holders)
                for bucket, tap in enumerate(self._taps):
                    tap.bucket, tap.check = bucket, self._check
        self._note_buffers()

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
        if squares:
            local_sq += torch.stack(squares).sum()
        waited = sum(tap.waited_s for tap in self._taps) + sum(gather.waited_s for gather in self._gathers)
        return Taps(local_sq, share, len(squares), by_layer, waited, waited, self._finish_check())

    def check_plan(self) -> CheckPlan | None:
        return self._check.plan if self._check is not None else None

    def uncheck(self) -> None:
        self._drop_check()

    def check_rows(self, cell: int) -> list[CellRows]:
        return self._check.rows(cell) if self._check is not None else []

    def close(self) -> None:
        """Gives every FSDP module the collectives back that it had."""
        for tap in self._taps:
            tap.unit.set_custom_reduce_scatter(tap.inner)
        for gather in self._gathers:
            gather.unit.set_custom_all_gather(gather.inner)
        self._taps, self._gathers, self._check = [], [], None
        self._set_sync(True)

    def _is_checkable(self) -> bool:
        groups = [tap.group for tap in self._taps]
        return (
            sorted(self._mesh.mesh.flatten().tolist()) == list(range(dist.get_world_size()))
            and all(group.mesh_info.mesh == self._mesh for group in groups)
            and all(isinstance(tap.inner, _OF_TORCH) for tap in self._taps)
        )

    def _finish_check(self) -> dict[str, torch.Tensor]:
        if self._check is None:
            return {}
        if any(tap.group._all_reduce_hook is not None for tap in self._taps):
            self._drop_check()
            return {}
        for tap in self._taps:
            if tap.squares:
                self._check.received(tap.bucket, *tap.received())
        return self._check.finish()

    def _drop_check(self) -> None:
        self._check = None
        for tap in self._taps:
            tap.check = None

    def _attach(self) -> None:
        names = {id(p): name for name, p in self._params.items()}
        of_unit = {
            id(unit): name or type(unit).__name__.removeprefix("FSDP") for name, unit in self.module.named_modules()
        }
        for unit in self._units:
            name, groups = of_unit[id(unit)], _param_groups(unit)
            if len(groups) > 1:
                raise ConfigError(
                    f"{type(unit).__name__} holds several FSDP parameter groups (a mesh per parameter), "
                    "whose reduce-scatter torch does not let anyone observe"
                )
            for group in groups:
                if isinstance(group._reduce_scatter_comm, _ReduceScatterTap):
                    raise ConfigError("this FSDP2 model already belongs to an open engine: close() that one first")
                tap = _ReduceScatterTap(name, unit, group._reduce_scatter_comm, self._mesh.size(), group, names)
                unit.set_custom_reduce_scatter(tap)
                self._taps.append(tap)
                gather = _AllGatherTap(unit, group._all_gather_comm)
                unit.set_custom_all_gather(gather)
                self._gathers.append(gather)

    def _copies(self) -> tuple[tuple[int, ...], ...]:
        """Under HSDP the ranks that hold the same shard."""
        return tuple(zip(*self._holders, strict=True)) if len(self._holders) > 1 else ()

    def _everyone(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(sorted(self._mesh.mesh.flatten().tolist())),) if self._mesh.size() > 1 else ()

    def _is_copied(self, name: str, tensor: torch.Tensor) -> bool:
        """What is in `ignored_params` is the user's: experts that differ from rank to rank, for example."""
        return isinstance(tensor, DTensor) or not isinstance(tensor, nn.Parameter)

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
        for gather in self._gathers:
            gather.waited_s = 0.0
        if self._check is not None:
            self._check.begin_window()

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


class _AllGatherTap(AllGather):
    """Times the all-gathers of a module's parameters: that is where the ranks of a job that shards wait for one that
    computes slowly, in the middle of the forward, and it would count as their own computing otherwise."""

    def __init__(self, unit: FSDPModule, inner: AllGather) -> None:
        self.unit = unit
        self.inner = inner
        self.waited_s = 0.0  # host seconds in the collective

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        started = time.perf_counter()
        work = self.inner(output_tensor, input_tensor, group, async_op)
        self.waited_s += time.perf_counter() - started
        return work


class _ReduceScatterTap(ReduceScatter):
    """Notes the squared norm and the signed sums of what each reduce-scatter is given, then lets the module's own one
    do it.

    A reduce-scatter takes the gradients of the module's parameters that have one, cut into as many equal parts as
    there are shards, padded with zeros. Part after part, each with its share of every parameter: that is the bucket.
    """

    def __init__(
        self, name: str, unit: FSDPModule, inner: ReduceScatter, ranks: int, group: Any, names: Mapping[int, str]
    ) -> None:
        self.unit = unit
        self.inner = inner
        self.group = group
        self.squares: list[torch.Tensor] = []
        self.waited_s = 0.0  # host seconds in the collective
        self.bucket = 0
        self.check: ReductionCheck | None = None
        self._name = name
        self._names = names  # id of a parameter -> its name
        self._ranks = ranks
        self._size = self._shards = self._position = 0  # of the last one: elements, ranks, this rank
        self._layouts: dict[tuple[int, ...], tuple[BucketLayout, tuple[int, ...]]] = {}

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
        factor = self._ranks if self.group.gradient_divide_factor is None else self.group.gradient_divide_factor
        divided = _predivided(input_tensor.dtype, factor)
        if self.check is None:
            square = sum_of_squares([input_tensor], input_tensor.device)
        else:
            self._size, self._shards, self._position = (
                input_tensor.numel(),
                dist.get_world_size(group),
                dist.get_rank(group),
            )
            square = self.check.sent(self.bucket, input_tensor, factor / divided, shards=self._shards)
        self.squares.append(square * divided**2 if divided != 1 else square)
        started = time.perf_counter()
        work = self.inner(output_tensor, input_tensor, group, op, async_op)
        self.waited_s += time.perf_counter() - started
        return work

    def received(self) -> tuple[BucketLayout | None, list[Piece]]:
        """This rank's part of the reduced gradient as the optimizer will use it, and where it lies in the bucket; no
        layout if the sizes do not tell which parameters the reduce-scatter was of."""
        params = self.group.fsdp_params
        grads = [p.sharded_param.grad for p in params]
        every = tuple(i for i, p in enumerate(params) if p.sharded_param.requires_grad)
        for members in dict.fromkeys((every, tuple(i for i in every if grads[i] is not None))):
            layout, starts = self._layout(members)
            if layout.size == self._size:
                shift = self._position * (self._size // self._shards)
                found = [
                    (local(grads[i]), start) for i, start in zip(members, starts, strict=True) if grads[i] is not None
                ]
                return layout, _in_one_piece(found, shift, self._size // self._shards)
        return None, []

    def _layout(self, members: tuple[int, ...]) -> tuple[BucketLayout, tuple[int, ...]]:
        """Of a reduce-scatter of these parameters; and where each begins in a rank's part."""
        if members not in self._layouts:
            spans, at = [], 0
            for i in members:
                param = self.group.fsdp_params[i]
                share = param.padded_sharded_param_size.numel()
                spans.append((at, at + share, self._names[id(param.sharded_param)]))
                at += share
            layout = BucketLayout(self._name, at * self._shards, tuple(spans), self._shards)
            self._layouts[members] = layout, tuple(start for start, _, _ in spans)
        return self._layouts[members]


def _predivided(dtype: torch.dtype, factor: float) -> float:
    """What FSDP2 divided a gradient by before reducing it: about sqrt(factor) for a dtype it takes to be at risk of
    overflow, else 1 (`_get_gradient_divide_factors` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)."""
    if dtype in (torch.float32, torch.bfloat16):
        return 1.0
    before = 1
    while factor % before == 0 and factor / before > before:
        before *= 2
    return float(before)


def _in_one_piece(grads: Sequence[Piece], start: int, size: int) -> list[Piece]:
    """grads: by their places in a rank's part of a bucket, which begins at `start` of it and has so many elements. FSDP2
    leaves them as views of the one tensor that the collective filled; then that is the only piece."""
    if grads:
        first, at = grads[0]
        base = first.data_ptr() - at * first.element_size()
        whole = first.storage_offset() >= at and first.untyped_storage().nbytes() >= (
            (first.storage_offset() - at + size) * first.element_size()
        )
        if whole and all(
            g.data_ptr() == base + place * first.element_size() and g.dtype is first.dtype and g.is_contiguous()
            for g, place in grads
        ):
            return [(first.as_strided((size,), (1,), first.storage_offset() - at), start)]
    return [(g.reshape(-1), start + place) for g, place in grads]


def _holders(sharded: DTensor) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that together hold every shard once: all ranks, or under HSDP those of each replica, in the order
    of their shards."""
    copies = [dim for dim, placement in enumerate(sharded.placements) if not placement.is_shard()]
    mesh = sharded.device_mesh.mesh.movedim(copies, list(range(len(copies))))
    return tuple(tuple(ranks) for ranks in mesh.reshape(-1, _shards(sharded)).tolist())


def _shards(tensor: torch.Tensor) -> int:
    """How many different parts of this tensor there are across its mesh; 1 for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_shard())


def _param_groups(unit: FSDPModule) -> list[Any]:
    return list(unit._get_fsdp_state()._fsdp_param_groups)
