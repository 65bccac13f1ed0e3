"""Engines of every torch kind in any world, trained a little, saved as parts with their pieces; and, from torch's own
full state dicts, what they hold as a whole: the oracle of the tests of other world sizes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from resilient.checkpoint.pieces import from_plain, to_plain
from resilient.checkpoint.reshape import SourcePart
from resilient.engines.ddp import DDPEngine
from resilient.engines.fsdp2 import FSDP2Engine
from resilient.engines.torch_optim import TorchOptimEngine
from tests.engines import contract
from tests.engines.models import Setup, TinyLM, build_model, build_optimizer, build_scheduler

SETUP = Setup(groups=True, width=10)  # 10 and 31 rows: uneven on 2, 3, 4 and 8 ranks
WINDOWS = 3


def build_wrapped(kind: str, setup: Setup, world: int) -> tuple[nn.Module, TinyLM]:
    """The model as its user wraps it (ddp, fsdp2, hsdp: two copies of the shards), and the module inside.

    It has a buffer that is not persistent, too, and one parameter of a single row."""
    model = build_model(setup)
    model.register_buffer("cache", torch.full((4,), float(world)), persistent=False)
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=setup.bucket_mb), model
    mesh = init_device_mesh("cpu", (world,))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


def build(kind: str, setup: Setup, world: int) -> TorchOptimEngine:
    wrapped, model = build_wrapped(kind, setup, world)
    optimizer = build_optimizer(model, setup)
    engine = DDPEngine if kind == "ddp" else FSDP2Engine
    return engine(wrapped, optimizer, build_scheduler(optimizer, setup), clip=setup.clip)


def whole(engine: TorchOptimEngine) -> dict[str, Any]:
    """What torch says the model and the optimizer hold, gathered: "model" and "optim". On rank 0; empty elsewhere."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optim = get_state_dict(engine.module, engine.optimizer, options=options)
    return copy.deepcopy({"model": model, "optim": optim})  # on the CPU some of it is the live tensors


def part(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}.pt"


def save(rank: int, world: int, kind: str, setup: Setup, folder: Path) -> None:
    """Train WINDOWS windows and write this rank's part; rank 0 writes whole.pt, the oracle."""
    engine = build(kind, setup, world)
    contract.train(engine, setup, range(WINDOWS), rank)
    write(engine, rank, folder)


def write(engine: TorchOptimEngine, rank: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = engine.capture()
    torch.save({"state": state, "pieces": to_plain(engine.pieces(state))}, part(folder, rank))
    oracle = whole(engine)
    if rank == 0:
        torch.save(oracle, folder / "whole.pt")


def load(folder: Path) -> list[SourcePart]:
    found = []
    for rank in range(len(list(folder.glob("part-*.pt")))):
        content = torch.load(part(folder, rank), weights_only=True, mmap=True)
        found.append(SourcePart(rank, content["state"], from_plain(content["pieces"])))
    return found


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """Flat: path -> tensor or plain value."""
    if isinstance(state, dict):
        return {k: v for key, item in state.items() for k, v in leaves(item, f"{path}/{key}").items()}
    if isinstance(state, list | tuple):  # torch turns betas into a list
        return {k: v for i, item in enumerate(state) for k, v in leaves(item, f"{path}/{i}").items()}
    return {path: state}


def assert_same(a: Any, b: Any, what: str, leave_out: Sequence[str] = ()) -> None:
    """Bit for bit, also types and dtypes. leave_out: ends of paths."""
    ours, theirs = leaves(a), leaves(b)
    assert ours.keys() == theirs.keys(), f"{what}: {sorted(set(ours) ^ set(theirs))[:6]}"
    for path, value in ours.items():
        if path.endswith(tuple(leave_out)) and leave_out:
            continue
        other = theirs[path]
        assert type(value) is type(other), f"{what}{path}: {type(value)} and {type(other)}"
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and value.shape == other.shape, (
                f"{what}{path}: {value.shape} {other.shape}"
            )
            assert torch.equal(
                value.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
            ), f"{what}{path} differs"
        else:
            assert value == other, f"{what}{path}: {value} and {other}"
