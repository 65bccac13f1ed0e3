"""The stages whose optimizer partitions its state: ZeRO 1, 2 and 3, and BF16_Optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resilient.engines.deepspeed.stages import Master, Observer, Stage
from resilient.engines.layers import Part

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine as Engine


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

    def reduced(self) -> list[tuple[torch.Tensor, Part]]:
        found: list[tuple[torch.Tensor, Part]] = []
        for i, gradients in self.optimizer.averaged_gradients.items():
            if gradients is None:
                continue
            parts = self.parts[id(self.optimizer.single_partition_of_fp32_groups[i])]
            flat = getattr(gradients, "flat_partition", None)
            if flat is not None:
                found.extend((flat, part) for part in parts)
                continue
            starts, at = {part.start: part for part in parts}, 0
            for gradient in gradients:  # one after another they fill the partition
                part = starts.get(at)
                if part is not None:  # otherwise padding, which is zero
                    found.append((gradient, Part(part.layer, part.weight)))
                at += gradient.numel()
        return found

    @functools.cached_property
    def parts(self) -> dict[int, list[Part]]:
        optimizer = self.optimizer
        parts: dict[int, list[Part]] = {}
        for i, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            rank = dist.get_rank(group=optimizer.real_dp_process_group[i])
            parts[id(flat)] = []
            for parameter in optimizer.params_in_partition[i]:
                key = optimizer.get_param_id(parameter)
                skipped = int(optimizer.grad_start_offset[i][rank][key])
                start = int(optimizer.grad_partition_insertion_offset[i][rank][key])
                stop = min(start + parameter.numel() - skipped, flat.numel())
                parts[id(flat)].append(self._part(parameter, start, stop))
        return parts

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

    def reduced(self) -> list[tuple[torch.Tensor, Part]]:
        return [
            (gradient, self._part(parameter))
            for i, gradients in self.optimizer.averaged_gradients.items()
            if gradients
            for gradient, parameter in zip(gradients, self.optimizer.fp16_groups[i], strict=True)
        ]

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
