"""What a state of `TorchOptimEngine` holds of the whole model, and room for such a state in another world.

DTensor itself says which box of its whole a rank holds (what DCP asks, too); any other tensor is whole on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from resilient.checkpoint.pieces import KeyPath, Piece
from resilient.checkpoint.reshape import SourcePart, reshape
from resilient.engines.absent import BUFFER
from resilient.engines.base import Engine, EngineState
from resilient.engines.buffers import local
from resilient.errors import CheckpointError


def state_from(
    sources: Sequence[SourcePart], engine: Engine, rank: int, world: int, allow_missing: Collection[str] = ()
) -> EngineState:
    """This rank's state, out of the parts that another world of the same engine has saved, for `engine.restore`.

    sources: all of them, rank 0's first. allow_missing: see `Engine.frame`. Not a collective, but all ranks of the new world must call it: they share the
    comparing of copies. Raises CheckpointError, on one rank perhaps: vote before anybody restores."""
    frame = engine.frame(dict(sources[0].state), allow_missing)
    return reshape(sources, frame, engine.pieces(frame), share=(rank, world), per_rank=engine.per_rank)


@dataclass(frozen=True)
class _Box:
    """shape: of the whole tensor. offset, size: of what this rank holds. owner: see Piece."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    owner: bool

    def piece(self, path: KeyPath, name: str, tensor: torch.Tensor) -> Piece:
        if tuple(tensor.shape) != self.size:
            raise CheckpointError(f"{name} has shape {tuple(tensor.shape)} in the state, {self.size} on this rank")
        return Piece(path, 0, name, self.shape, self.offset, self.size, self.owner)


def pieces_of(module: nn.Module, state: EngineState) -> list[Piece]:
    """Of a state of this module on this rank. A tied parameter is there under each of its names.

    CheckpointError for a parameter that is not laid out in boxes (FSDP over tensor parallelism of the same dimension)."""
    pieces = []
    boxes: dict[str, _Box] = {}
    first_name: dict[int, str] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        key = first_name.setdefault(id(p), name)
        if key not in boxes and (box := _box_of(name, p)) is not None:
            boxes[key] = box
        if key in boxes:
            pieces.append(boxes[key].piece(("params", key), f"parameters/{name}", state["params"][key]))
    for name, b in persistent_buffers(module).items():
        key = first_name.setdefault(id(b), name)
        if key in state["buffers"] and (box := _box_of(name, b)) is not None:
            pieces.append(box.piece(("buffers", key), f"buffers/{name}", state["buffers"][key]))
    sharded = {first_name[id(p)] for p in module.parameters() if isinstance(p, DTensor)}
    for name, entry in state["optimizer"].get("state", {}).items():
        if name not in boxes:
            continue
        for key, value in entry["values"].items():
            if (key in entry["shapes"]) == (name in sharded) and _is_moment(entry, key, value, boxes[name].shape):
                path = ("optimizer", "state", name, "values", key)
                pieces.append(boxes[name].piece(path, f"moments/{name}/{key}", value))
    return pieces


def _is_moment(entry: Mapping[str, Any], key: str, value: Any, shape: Sequence[int]) -> bool:
    """Optimizer state of a parameter of that (whole) shape with one value for each of its elements."""
    return isinstance(value, torch.Tensor) and list(entry["shapes"].get(key, value.shape)) == list(shape)


def _box_of(name: str, tensor: torch.Tensor) -> _Box | None:
    """None: this rank holds nothing of it."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        first = not dist.is_initialized() or dist.get_rank() == 0
        return _Box(shape, (0,) * len(shape), shape, first)
    if not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        raise CheckpointError(
            f"{name} is laid out as {tensor.placements}: what a rank holds of it is no box of the whole"
        )
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    owner = all(
        at == 0 for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )
    return _Box(shape, tuple(chunk.offsets), tuple(chunk.sizes), owner)


def frame_of(module: nn.Module, source: EngineState, absent: Collection[str] = ()) -> EngineState:
    """Room in host memory for this rank's state of `module`: parameters and moments to be filled in (see `pieces_of`),
    buffers as they are here, everything else as in `source`, rank 0's state in the earlier world. absent: parts that the
    source lacks, and so does the frame."""
    parameters = dict(module.named_parameters())
    optimizer: dict[str, Any] = {
        "class": source["optimizer"]["class"],
        "groups": copy.deepcopy(source["optimizer"]["groups"]),
    }
    if "moments" not in absent:
        saved = source["optimizer"]["state"].items()
        optimizer["state"] = {name: _moments(parameters[name], entry) for name, entry in saved if name in parameters}
    return {
        "params": {name: _room(p, p.dtype) for name, p in parameters.items()},
        "buffers": {
            name: local(b).to("cpu", copy=True) for name, b in module.named_buffers() if BUFFER + name not in absent
        },
        "optimizer": optimizer,
        "schedule": copy.deepcopy(source.get("schedule")),
        "counters": dict(source["counters"]),
    }


def _moments(parameter: nn.Parameter, entry: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    shapes: dict[str, list[int]] = {}
    for key, value in entry["values"].items():
        if not _is_moment(entry, key, value, parameter.shape):
            values[key] = copy.deepcopy(value)
            if key in entry["shapes"]:
                raise CheckpointError(
                    f"optimizer state {key} of a parameter of shape {list(parameter.shape)} is sharded and has the shape "
                    f"{entry['shapes'][key]}: it cannot be told how another world would hold it"
                )
            continue
        values[key] = _room(parameter, value.dtype)
        if isinstance(parameter, DTensor):
            shapes[key] = list(parameter.shape)
    return {"values": values, "shapes": shapes}


def _room(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(local(parameter), dtype=dtype, device="cpu")


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are in `module.state_dict()`, under one name each."""
    found, seen = {}, set()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer not in seen:  # by its first name, as named_buffers() does
                seen.add(buffer)
                if name not in part._non_persistent_buffers_set:
                    found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
