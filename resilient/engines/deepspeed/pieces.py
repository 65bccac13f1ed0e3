"""What the elements of a captured DeepSpeed state are of the whole model.

ZeRO 0 keeps everything whole on every rank. ZeRO 1 and 2 keep whole weights, and masters and moments as this rank's
range of one flat tensor per parameter group. ZeRO 3 cuts every parameter, the small ones that stay gathered too, into
equal shards, and lays the shards of a sub-group one after another. Whatever fills up a flat tensor or a last shard is of
no parameter: it belongs to no piece.

All of it is read from the state, so that a checkpoint can be taken apart where there is no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from resilient.checkpoint.pieces import Piece
from resilient.engines.base import EngineState
from resilient.engines.deepspeed.layout import shape_of
from resilient.engines.deepspeed.stages import HalfStage, Stage
from resilient.engines.deepspeed.zero import Bf16Stage, PartitionedStage, ShardedStage
from resilient.errors import CheckpointError


class Span(NamedTuple):
    """Elements [first, first + size) of parameter `number` of the model lie at `start` of a flat tensor."""

    number: int
    first: int
    start: int
    size: int


# --- written into a state ---


class Description(NamedTuple):
    """Entries of every state of one engine; nobody writes to them.

    spans: label of each flat tensor that the optimizer steps on this rank -> (n, 4) int64, rows of `Span` in the order of
        the tensor. A label that is not in it is the name of a parameter, and its tensor is the whole of it.
    shared: other name of a parameter that the model holds twice -> the name that everything else goes by.
    """

    spans: dict[str, torch.Tensor]
    shared: dict[str, str]


_described: WeakKeyDictionary[Stage, Description] = WeakKeyDictionary()


def describe(stage: Stage) -> Description:
    """Made once: a snapshot must cost little more than the copy."""
    if stage not in _described:
        numbers = {id(p): i for i, p in enumerate(stage.parameters.values())}
        spans = {
            label: torch.tensor([(numbers[id(p)], *span) for p, *span in rows], dtype=torch.int64).reshape(-1, 4)
            for label, rows in _flat(stage)
        }
        names, every = stage.names, stage.engine.module.named_parameters(remove_duplicate=False)
        _described[stage] = Description(spans, {name: names[id(p)] for name, p in every if names[id(p)] != name})
    return _described[stage]


def _flat(stage: Stage) -> Iterator[tuple[str, list[tuple[torch.Tensor, int, int, int]]]]:
    """Label -> (parameter, first, start, size) of its flat tensor."""
    optimizer = stage.optimizer
    if isinstance(stage, PartitionedStage):
        for i, group in enumerate(optimizer.round_robin_bit16_groups):  # in the order of the flat tensor
            size, rank = optimizer.partition_size[i], dist.get_rank(group=optimizer.real_dp_process_group[i])
            yield f"group{i}", _cut(group, optimizer.round_robin_bit16_offsets[i], rank * size, size)
    elif isinstance(stage, Bf16Stage):
        for i, flat in enumerate(optimizer.fp32_groups_flat_partition):
            group, rank = optimizer.bf16_groups[i], dist.get_rank(group=optimizer.real_dp_process_group[i])
            yield f"group{i}", _cut(group, _in_a_row(group), rank * flat.numel(), flat.numel())
    elif isinstance(stage, ShardedStage):
        for i, group in enumerate(optimizer.fp16_groups):
            rows = []
            for p in group:
                _, start, size = optimizer.grad_position[optimizer.get_param_id(p)]
                first = p.ds_zero_partition_rank * size
                rows.append((p, first, int(start), min(max(p.ds_numel - first, 0), size)))
            yield f"subgroup{i}", [row for row in rows if row[-1]]
    elif isinstance(stage, HalfStage) and hasattr(optimizer, "fp32_groups_flat"):
        for i, group in enumerate(optimizer.fp16_groups):
            yield f"group{i}", _cut(group, _in_a_row(group), 0, optimizer.fp32_groups_flat[i].numel())


def _in_a_row(parameters: Iterable[torch.Tensor]) -> list[int]:
    offsets, at = [], 0
    for parameter in parameters:
        offsets.append(at)
        at += parameter.numel()
    return offsets


def _cut(
    parameters: Iterable[torch.Tensor], offsets: Iterable[int], left: int, size: int
) -> list[tuple[torch.Tensor, int, int, int]]:
    """What [left, left + size) of a flat tensor holds that has these parameters at these offsets."""
    rows = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        begin, end = max(offset, left), min(offset + parameter.numel(), left + size)
        if begin < end:
            rows.append((parameter, begin - offset, begin - left, end - begin))
    return rows


# --- read from a state ---


def labelled_spans(state: EngineState) -> dict[str, list[Span]]:
    """Label of each tensor that the optimizer steps -> what it holds on this rank."""
    numbers = {name: i for i, name in enumerate(state["parameters"])}
    found = {}
    for label in state["moments"] if "moments" in state else {**state["spans"], **state["masters"]}:
        if label in state["spans"]:
            found[label] = [Span(*row) for row in state["spans"][label].tolist()]
        else:
            found[label] = [Span(numbers[label], 0, 0, math.prod(shape_of(state, f"parameter {label}")))]
    return found


def pieces_of(state: EngineState) -> list[Piece]:
    """Of one rank's captured state: ranges of wholes flattened in C order. A tied parameter is there under each of its
    names, its masters and moments under the first.

    Of ranks that hold the same the first is the owner, and so it is of buffers, which DeepSpeed does not synchronise: at
    another world size rank 0's go on. Buffers that are not persistent are in no piece: a new world makes its own.

    CheckpointError for an optimizer that keeps something of a flat tensor which is not one number per element."""
    rank = int(state["layout"]["rank"])
    shapes = [shape_of(state, f"parameter {name}") for name in state["parameters"]]
    names = list(state["parameters"])
    first_of_all, alone = rank == 0, state["layout"]["zero stage"] != "0"
    numbers = {name: i for i, name in enumerate(names)}
    aliases = {name: numbers[first] for name, first in state["shared"].items()}
    pieces = []
    for name, number in (numbers | aliases).items():
        path: tuple[str, ...] = ("parameters", names[number])
        shape = shapes[number]
        size, held = math.prod(shape), state["parameters"][names[number]].numel()
        if is_sharded(state):
            first = min(rank * held, size)
            pieces.append(_range(path, 0, f"parameters/{name}", shape, first, min(size - first, held), owner=True))
        else:
            pieces.append(_range(path, 0, f"parameters/{name}", shape, 0, size, first_of_all))
    for label, spans in labelled_spans(state).items():
        held_here: list[tuple[tuple[str, ...], str]] = []
        if label in state["masters"]:
            held_here.append((("masters", label), "masters/{}"))
        for key, value in state.get("moments", {}).get(label, {}).items():
            if per_element(state, label, key, value):
                held_here.append((("moments", label, key), f"moments/{{}}/{key}"))
            elif isinstance(value, torch.Tensor) and value.ndim > 0:  # of a parameter that every rank has whole
                path, shape = ("moments", label, key), tuple(value.shape)
                pieces.append(_range(path, 0, f"moments/{label}/{key}", shape, 0, value.numel(), first_of_all))
        for path, whole in held_here:
            for number, first, start, size in spans:
                name = whole.format(names[number])
                pieces.append(_range(path, start, name, shapes[number], first, size, alone or first_of_all))
    for name, buffer in state["buffers"].items():
        if f"buffer {name}" in state["layout"]:
            shape = tuple(buffer.shape)
            pieces.append(_range(("buffers", name), 0, f"buffers/{name}", shape, 0, buffer.numel(), first_of_all))
    return pieces


def _range(
    path: tuple[str, ...], start: int, name: str, shape: tuple[int, ...], first: int, size: int, owner: bool
) -> Piece:
    return Piece(path, start, name, shape, (first,), (size,), owner)


def is_sharded(state: EngineState) -> bool:
    return bool(state["layout"]["zero stage"] == "3")


def per_element(state: EngineState, label: str, key: str, value: Any) -> bool:
    """Whether an optimizer's value is one number for each element of the tensor that it steps."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return False
    if tuple(value.shape) == shape_of(state, f"master {label}"):
        return True
    if label in state["spans"]:
        raise CheckpointError(
            f"optimizer state {key} of {label} has shape {list(value.shape)}: it cannot be told which parameters it is "
            f"of, so this state fits no other world size"
        )
    return False
