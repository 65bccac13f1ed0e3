"""The whole model of a checkpoint as a torch.distributed.checkpoint (DCP) folder, which `dcp.load` reads without us.

Everything but the choice of items is DCP's own: its planner flattens and names them, checks that they cover each tensor
once, and writes the metadata last. Tensors go through one piece at a time, out of memory-mapped parts; DCP's own file
writer would hold all of them until the end of a file.

DCP's `.metadata` is a pickle. It is written here and never read: nothing in this package loads one.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from resilient.checkpoint.reshape import Cell, Held, Place, view
from resilient.errors import CheckpointError


@dataclass(frozen=True)
class Stored:
    """A tensor in a nested state dict that lies in a checkpoint, whole over several parts."""

    name: str
    held: Held


def write_dcp(content: dict[str, Any], out: Path) -> None:
    """Write a nested state dict, with `Stored` in place of its large tensors, as a DCP checkpoint folder.

    One process; no process group is used. Memory: one piece. `out` must not exist, or be empty; it is removed again if
    this fails. Raises CheckpointError naming a tensor that is not whole, and OSError."""
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty: choose a folder that does not exist yet")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
            dcp.save(content, storage_writer=_Writer(out, overwrite=False), planner=_Planner(), no_dist=True)
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        reason = next((e for e in _reasons(error) if isinstance(e, CheckpointError | OSError)), None)
        if reason is not None and reason is not error:
            raise reason from error
        raise


def _reasons(error: BaseException) -> list[BaseException]:
    """DCP wraps what goes wrong on each rank."""
    failures = getattr(error, "failures", {})
    return [error, *(failure[0] for failure in failures.values())]


class _Planner(DefaultSavePlanner):
    """Plans one item for each box of a `Stored`, and everything else as DCP does."""

    def create_local_plan(self) -> SavePlan:
        stored = {key: value for key, value in self.state_dict.items() if isinstance(value, Stored)}
        empty = {key: value.held.whole for key, value in stored.items() if 0 in value.held.whole.shape}
        self.state_dict = {key: value for key, value in self.state_dict.items() if key not in stored}
        self.state_dict |= {key: torch.empty(whole.shape, dtype=whole.dtype) for key, whole in empty.items()}
        plan = super().create_local_plan()
        self._boxes: dict[MetadataIndex, tuple[Place, Cell]] = {}
        items = [item for key, value in stored.items() if key not in empty for item in self._items(key, value)]
        return replace(plan, items=[*plan.items, *items])

    def _items(self, key: str, stored: Stored) -> list[WriteItem]:
        whole = stored.held.whole
        stored.held.refuse_incomplete(stored.name)
        items = []
        for place, cell in stored.held.owned(whole.shape):
            offset, size = (torch.Size(numbers) for numbers in cell.box)
            index = MetadataIndex(key, offset)
            self._boxes[index] = place, cell
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offset, size),
                properties=TensorProperties(dtype=whole.dtype),
                size=torch.Size(whole.shape),
            )
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def rank_of(self, item: WriteItem) -> int:
        """Whose part the item is in."""
        return self._boxes[item.index][0].rank if item.index in self._boxes else 0

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index not in self._boxes:
            return super().lookup_object(index)
        place, cell = self._boxes[index]
        return view(place.tensor, cell, cell.box).clone()  # a view would be saved with all of its storage


class _Writer(FileSystemWriter):
    """A file for each rank of the checkpoint, item by item."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        by_rank: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            by_rank.setdefault(cast(_Planner, planner).rank_of(item), []).append(item)
        results = []
        for rank, items in sorted(by_rank.items()):
            name = f"__{rank}_0.distcp"
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                for item in items:
                    start = stream.tell()
                    data = planner.resolve_data(item)
                    if isinstance(data, torch.Tensor):
                        torch.save(data, cast(Any, stream))
                    else:
                        stream.write(data.getbuffer())
                    size = stream.tell() - start
                    results.append(WriteResult(item.index, size, _StorageInfo(name, start, size)))
                stream.flush()
                os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def state_dict_of(
    model: Mapping[str, Any],
    optimizer: Mapping[str, Mapping[str, Any]],
    groups: list[dict[str, Any]],
    flatten_optimizer: bool,
) -> dict[str, Any]:
    """As `torch.distributed.checkpoint.state_dict` names them: "model" and "optim".

    model: name -> value. optimizer: parameter -> key -> value. groups: with the names of their parameters in "params".
    flatten_optimizer: as `StateDictOptions(flatten_optimizer_state_dict=True)` has it."""
    optim: dict[str, Any]
    if flatten_optimizer:
        optim = {f"state.{name}.{key}": value for name, state in optimizer.items() for key, value in state.items()}
        optim |= {
            f"param_groups.{name}.{key}": value
            for group in groups
            for name in group["params"]
            for key, value in group.items()
            if key != "params"
        }
    else:
        optim = {"state": {name: dict(state) for name, state in optimizer.items()}, "param_groups": groups}
    return {"model": dict(model), "optim": optim}
