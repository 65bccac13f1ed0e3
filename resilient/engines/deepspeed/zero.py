"""The stages whose optimizer partitions its state: ZeRO 1, 2 and 3, and BF16_Optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from resilient.engines.deepspeed.rows import Piece
from resilient.engines.deepspeed.stages import Master, Observer, Stage
from resilient.engines.layers import Part
from resilient.engines.projection import ROW

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine as Engine


_MOST_SEGMENTS = 16  # of a parameter: each fills up a row with zeros


class _Kept(NamedTuple):
    """Elements of a parameter that a partition holds: from `first` on, at [start, stop) of the partition."""

    parameter: torch.Tensor
    first: int
    start: int
    stop: int


class ZeroStage(Stage):
    """What the optimizers derived from ZeROOptimizer have in common."""

    replicated = False
    whole = False

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
    on each rank, takes its norm for clipping and steps on its own partition; the engine's plain all-reduce reduces."""

    whole = True

    def _pieces(self, bucket: Iterable[torch.Tensor]) -> list[Piece]:
        """DeepSpeed reduces the flat buffers of whole parameter groups."""
        flats = {flat.data_ptr(): i for i, flat in enumerate(self.optimizer.fp32_groups_gradients_flat)}
        return [piece for flat in bucket for piece in self._group(flats[flat.data_ptr()])]

    def _group(self, i: int) -> list[Piece]:
        pairs = zip(self.optimizer.fp32_groups_gradients[i], self.optimizer.bf16_groups[i], strict=True)
        return [Piece(gradient, parameter) for gradient, parameter in pairs]

    def received(self) -> list[Piece]:
        return [piece for i in range(len(self.optimizer.bf16_groups)) for piece in self._group(i)]

    def reduction_dtypes(self) -> tuple[torch.dtype, ...]:
        return self.engine.communication_data_type, self.optimizer.grad_acc_dtype

    def reduced(self) -> list[tuple[torch.Tensor, Part]]:
        flats = self.optimizer.fp32_groups_gradient_flat_partition
        return [(flat, part) for flat, parts in zip(flats, self.parts.values(), strict=True) for part in parts]

    @functools.cached_property
    def parts(self) -> dict[int, list[Part]]:
        optimizer = self.optimizer
        parts = {}
        for i, flat in enumerate(optimizer.fp32_groups_flat_partition):
            rank = dist.get_rank(group=optimizer.real_dp_process_group[i])
            parts[id(flat)] = self._in_a_row(optimizer.bf16_groups[i], rank * flat.numel(), flat.numel())
        return parts

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
                        observe(
                            [
                                Piece(gradient, optimizer.bit16_groups[group][index])
                                for gradient, (group, index, _) in zip(bucket.grads, bucket.params, strict=True)
                            ]
                        )

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

    def received(self) -> list[Piece]:
        found: list[Piece] = []
        for i, gradients in self.optimizer.averaged_gradients.items():
            if gradients is None:
                continue
            flat = getattr(gradients, "flat_partition", None)
            if flat is not None:
                found.extend(Piece(flat[k.start : k.stop], k.parameter, k.first) for k in self._kept[i])
                continue
            starts, at = {kept.start: kept for kept in self._kept[i]}, 0
            for gradient in gradients:  # one after another they fill the partition
                kept = starts.get(at)
                if kept is not None:  # otherwise padding, which is zero
                    found.append(Piece(gradient, kept.parameter, kept.first))
                at += gradient.numel()
        return found

    def reduction_dtypes(self) -> tuple[torch.dtype, ...]:
        optimizer = self.optimizer
        return (
            optimizer.communication_data_type,
            optimizer._gradient_reduction_buffer_dtype(),
            optimizer.gradient_accumulation_dtype,
        )

    def mean_factor(self) -> float:
        return 1 / self.engine.dp_world_size if self.optimizer.gradient_average else 1.0

    @functools.cached_property
    def _kept(self) -> list[list[_Kept]]:
        """What this rank's partition of each parameter group is made of."""
        optimizer = self.optimizer
        kept: list[list[_Kept]] = []
        for i, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            rank = dist.get_rank(group=optimizer.real_dp_process_group[i])
            kept.append([])
            for parameter in optimizer.params_in_partition[i]:
                key = optimizer.get_param_id(parameter)
                first = int(optimizer.grad_start_offset[i][rank][key])
                start = int(optimizer.grad_partition_insertion_offset[i][rank][key])
                stop = min(start + parameter.numel() - first, flat.numel())
                kept[i].append(_Kept(parameter, first, start, stop))
        return kept

    @functools.cached_property
    def parts(self) -> dict[int, list[Part]]:
        flats = self.optimizer.single_partition_of_fp32_groups
        return {
            id(flat): [self._part(k.parameter, k.start, k.stop) for k in kept]
            for flat, kept in zip(flats, self._kept, strict=True)
        }

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
        for parameter in self.parameters.values():
            size = parameter.partition_numel()  # type: ignore[attr-defined]
            _, used = _shard(parameter)
            parameter.ds_tensor.data[used:].zero_()  # type: ignore[attr-defined]
            if optimizer.get_param_id(parameter) in optimizer.grad_position:
                group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                optimizer.fp32_partitioned_groups_flat[group].data[offset + used : offset + size].zero_()

    def connect(self, observe: Observer) -> None:
        from deepspeed.accelerator import get_accelerator

        optimizer = self.optimizer

        def before(comm_dtype: torch.dtype) -> None:
            pieces = [Piece(p.grad, p) for p in optimizer.ipg_buckets[comm_dtype].params if p.grad is not None]
            if pieces:
                with get_accelerator().stream(optimizer.reduce_and_partition_stream):
                    observe(pieces)

        self._before(optimizer, "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads", before)
        # where ranks wait for one that computes slowly, in the middle of the forward; it would count as their computing
        self._before(optimizer.parameter_offload.get_param_coordinator(), "fetch_sub_module", lambda *_, **__: None)

    def received(self) -> list[Piece]:
        found = []
        for i, gradients in self.optimizer.averaged_gradients.items():
            if gradients:
                for gradient, parameter in zip(gradients, self.optimizer.fp16_groups[i], strict=True):
                    first, used = _shard(parameter)
                    found.append(Piece(gradient.view(-1)[:used], parameter, first))
        return found

    def reduction_dtypes(self) -> tuple[torch.dtype, ...]:
        optimizer = self.optimizer
        return optimizer.communication_data_type, optimizer.dtype, optimizer.gradient_accumulation_dtype

    def extent(self, parameter: Any) -> tuple[int, int]:
        """A parameter of which each rank holds less than a row is cut by rank, or by neighbouring ranks where there are
        many: rows that all of them share could not say who received what."""
        size, shard = parameter.ds_numel, parameter.partition_numel()
        together = -(-self.engine.dp_world_size // _MOST_SEGMENTS)
        return size, min(shard * together, size) if shard <= ROW else size

    def mean_factor(self) -> float:
        optimizer, world = self.optimizer, self.engine.dp_world_size
        # deepspeed 0.19.8 predivides by this factor and, when it equals the world size, never multiplies by it again
        lost = optimizer.postscale_gradients and optimizer.gradient_predivide_factor == world
        return 1 / world**2 if lost else 1 / world

    @functools.cached_property
    def parts(self) -> dict[int, list[Part]]:
        optimizer = self.optimizer
        parts: dict[int, list[Part]] = {}
        for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            parts[id(flat)] = []
            for parameter in group:
                _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                parts[id(flat)].append(self._part(parameter, start, start + length))
        return parts

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

    def holds_from(self, parameter: torch.nn.Parameter) -> int:
        return _shard(parameter)[0]


def _shard(parameter: Any) -> tuple[int, int]:
    """Of a parameter under ZeRO 3: the first element that this rank holds, and how many; the rest of its shard is padding."""
    size = parameter.partition_numel()
    first = parameter.ds_zero_partition_rank * size
    return first, min(max(parameter.ds_numel - first, 0), size)
