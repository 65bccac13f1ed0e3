"""The parts of a committed checkpoint, opened for another world size or for export, and its export as a DCP checkpoint.

    opened = open_checkpoint(folder)
    export_dcp(opened, out)            any engine and format: engines/export.py

Nothing of the job that wrote it is needed: no model, no process group, no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resilient.checkpoint.dcp import Stored, state_dict_of, write_dcp
from resilient.checkpoint.manifest import Manifest, read_manifest
from resilient.checkpoint.pieces import from_plain
from resilient.checkpoint.reshape import Held, SourcePart, compare, held_by
from resilient.checkpoint.storage import LocalStorage
from resilient.checkpoint.verify import verify_part
from resilient.errors import CheckpointError

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and activation checkpointing


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose parts are memory-mapped. contents: of each rank's part, rank 0's first, as it was saved."""

    manifest: Manifest
    contents: Sequence[Mapping[str, Any]]

    def sources(self) -> list[SourcePart]:
        """The engine's state of every rank, and what its tensors are pieces of."""
        return [
            SourcePart(rank, content["parts"]["engine"], from_plain(content.get("pieces") or ()))
            for rank, content in enumerate(self.contents)
        ]

    def part(self, name: str) -> list[Any]:
        """One part of every rank's snapshot: rng, data, judge."""
        return [content["parts"][name] for content in self.contents]


def open_checkpoint(folder: Path, share: tuple[int, int] = (0, 1)) -> Opened:
    """All parts of the checkpoint in a local folder, loadable code refused (`weights_only`), tensors memory-mapped.

    share: (rank, world) of those who open it together: each verifies the digests of its share of the files, and they must
    vote before anything of them is used. Raises CheckpointError naming the file and what is wrong with it."""
    manifest = read_manifest(folder)
    if len(manifest.ranks) < manifest.world:
        raise CheckpointError(
            f"{folder} holds the parts of ranks {list(manifest.ranks)} of {manifest.world}: the others lie on other hosts. "
            "Bring them together in one folder per host first, or use a shared checkpoint folder"
        )
    storage = LocalStorage(folder.parent)
    index, shares = share
    for rank in range(index, manifest.world, shares):
        part = manifest.part_of(rank)
        try:
            verify_part(storage, folder.name, part)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{folder / part.file}: {error}") from error
    return Opened(manifest, [_mapped(folder / manifest.part_of(rank).file) for rank in range(manifest.world)])


def _mapped(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises many kinds
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or "engine" not in content.get("parts", ()):
        raise CheckpointError(f"{path} does not hold a snapshot")
    return content


@dataclass(frozen=True)
class OptimizerView:
    """What is no piece of an optimizer's state. groups: their options, and the names of their parameters in "params".
    values: parameter -> key -> plain value or small tensor (step counts). schedule: state dict of the LR schedule."""

    groups: list[dict[str, Any]]
    values: Mapping[str, Mapping[str, Any]]
    schedule: Mapping[str, Any] | None = None


def torch_optimizer(state: Mapping[str, Any]) -> OptimizerView:
    """Of a state of TorchOptimEngine (DDP, FSDP2)."""
    if "optimizer" not in state:
        raise CheckpointError("the state is not one of DDP or FSDP2: nobody has said how its optimizer is read")
    saved = state["optimizer"]
    groups = [{**group["options"], "params": list(group["params"])} for group in saved["groups"]]
    values = {name: entry["values"] for name, entry in saved["state"].items()}
    return OptimizerView(groups, values, state["schedule"] and state["schedule"]["state"])


def export_dcp(
    opened: Opened,
    out: Path,
    *,
    optimizer: Callable[[Mapping[str, Any]], OptimizerView] = torch_optimizer,
    flatten_optimizer: bool = False,
) -> None:
    """Write a checkpoint to `out` so that plain `torch.distributed.checkpoint.load` reads it:

        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=out)

    with any wrapping and any number of ranks, as torch itself would have saved it. "scheduler" (its state dict, where there
    is one) and "train" (step, position, lr) lie beside them. Weights are fp32 where the optimizer keeps masters. Buffers are
    rank 0's. All copies are compared first. One process; memory: one piece.

    optimizer: reads what is no piece out of rank 0's state. flatten_optimizer: for
    `StateDictOptions(flatten_optimizer_state_dict=True)`. Raises CheckpointError and OSError; `out` is not left half done."""
    sources = opened.sources()
    held = held_by(sources)
    compare(held)
    seen = optimizer(sources[0].state)
    content = state_dict_of(
        _model(held),
        _optimizer(held, seen.values),
        [{**group, "params": [_plain_name(name) for name in group["params"]]} for group in seen.groups],
        flatten_optimizer,
    )
    if seen.schedule is not None:
        content["scheduler"] = dict(seen.schedule)
    manifest = opened.manifest
    content["train"] = {"step": manifest.step, "position": manifest.position, "lr": manifest.lr}
    write_dcp(content, out)


def _model(held: Mapping[str, Held]) -> dict[str, Stored]:
    found = {}
    for kind in ("buffers", "parameters", "masters"):
        for name, whole in held.items():
            if name.startswith(f"{kind}/"):
                found[_plain_name(name.removeprefix(f"{kind}/"))] = Stored(name, _shaped(name, whole, held))
    return found


def _optimizer(held: Mapping[str, Held], values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    moments: dict[str, dict[str, Any]] = {}
    for name, whole in held.items():
        if name.startswith("moments/"):
            parameter, _, key = name.removeprefix("moments/").rpartition("/")
            moments.setdefault(parameter, {})[key] = Stored(name, _shaped(name, whole, held))
    names = dict.fromkeys([*values, *moments])
    return {_plain_name(name): {**values.get(name, {}), **moments.get(name, {})} for name in names}


def _shaped(name: str, whole: Held, held: Mapping[str, Held]) -> Held:
    """Moments and masters that were cut up flat have the shape of their parameter."""
    kind, _, rest = name.partition("/")
    parameter = held.get(f"parameters/{rest.rpartition('/')[0] if kind == 'moments' else rest}")
    return whole.shaped_as(parameter.whole.shape) if parameter is not None else whole


def _plain_name(name: str) -> str:
    """As `get_model_state_dict` has it: without wrappers that only change how a module runs."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
