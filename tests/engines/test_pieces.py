"""Saved in one world, loaded in another, on real DDP, FSDP2 and HSDP engines: bit for bit what torch itself gathers, and
what training makes of it afterwards (issue 5, deliver 6; S13, BR-09, BR-27)."""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from resilient.checkpoint.reshape import SourcePart, reshape
from resilient.engines.ddp import DDPEngine
from resilient.engines.fsdp2 import FSDP2Engine
from resilient.engines.pieces import state_from
from resilient.engines.torch_optim import TorchOptimEngine
from resilient.errors import CheckpointError
from tests.engines import contract
from tests.engines.models import Setup
from tests.engines.worlds import SETUP, WINDOWS, assert_same, build, load, save, whole, write
from tests.ranks import run_pooled, run_ranks

OTHER = SETUP.but(seed=99)  # other weights: what is equal afterwards has come from the checkpoint


def saved_by(rank: int, world: int, folder: Path) -> None:
    for kind in ("ddp", "fsdp2", "hsdp"):
        save(rank, world, kind, SETUP, folder / f"{kind}-{world}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<kind>-4/ of each kind of engine, saved on 4 ranks."""
    folder = tmp_path_factory.mktemp("worlds")
    run_pooled(saved_by, 4, folder)
    return folder


def oracle(kind: str, world: int, folder: Path) -> TorchOptimEngine:
    """A fresh engine that torch's own set_state_dict has filled with what torch gathered when it was saved."""
    engine = build(kind, OTHER, world)
    full = torch.load(folder / "whole.pt", weights_only=True)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_state_dict(
        engine.module, engine.optimizer, model_state_dict=full["model"], optim_state_dict=full["optim"], options=options
    )
    assert engine.scheduler is not None
    engine.scheduler.load_state_dict(load(folder)[0].state["schedule"]["state"])
    return engine


def one_move(kind: str, folder: Path, rank: int, world: int, work: Path) -> None:
    """`folder` into a fresh engine of this kind and world."""
    engine = build(kind, OTHER, world)
    before = whole(engine)
    engine.restore(state_from(load(folder), engine, rank, world))
    now, expected = whole(engine), torch.load(folder / "whole.pt", weights_only=True)
    if rank == 0:
        with pytest.raises(AssertionError, match="differs"):
            assert_same(before["model"], expected["model"], "the control: before the restore")
        assert_same(now, expected, f"{folder.name} -> {kind}-{world}")
    counters, (lr_source, *_) = engine.counters(), load(folder)
    assert (counters.steps, counters.schedule) == (WINDOWS, WINDOWS)
    assert engine.lr() == lr_source.state["optimizer"]["groups"][0]["options"]["lr"] != OTHER.lr
    assert engine.module.cache.tolist() == [float(world)] * 4  # type: ignore[operator,union-attr]  # not persistent: its own

    write(engine, rank, work)  # and on from here: into yet another world
    torched = oracle(kind, world, folder)
    contract.train(engine, SETUP, range(WINDOWS, WINDOWS + 2), rank)
    contract.train(torched, SETUP, range(WINDOWS, WINDOWS + 2), rank)
    ours, theirs = whole(engine), whole(torched)
    assert_same(ours, theirs, f"{folder.name} -> {kind}-{world}, trained on")


def moves(rank: int, world: int, saved: Path, pairs: list[tuple[str, str]]) -> None:
    for source, kind in pairs:
        one_move(kind, saved / source, rank, world, saved / f"{source}--{kind}-{world}")


@pytest.mark.timeout(240)
def test_any_world_into_any_other(saved: Path) -> None:
    """4 -> 2, 3 and back to 4: uneven shards, HSDP <-> FSDP2, DDP <-> FSDP2."""
    run_pooled(moves, 2, saved, [("fsdp2-4", "fsdp2"), ("hsdp-4", "fsdp2"), ("ddp-4", "ddp"), ("ddp-4", "fsdp2")])
    run_pooled(moves, 3, saved, [("fsdp2-4", "fsdp2"), ("fsdp2-4", "ddp")])
    chained = [("fsdp2-4--fsdp2-3", "hsdp"), ("hsdp-4--fsdp2-2", "fsdp2"), ("ddp-4--fsdp2-2", "ddp")]
    run_pooled(moves, 4, saved, chained)


def lacking(rank: int, world: int, saved: Path) -> None:
    for source, kind in (("fsdp2-4", "fsdp2"), ("ddp-4", "fsdp2"), ("hsdp-4", "ddp")):
        engine = build(kind, OTHER, world)
        contract.train(engine, SETUP, range(2), rank)
        contract.another_world_may_lack(engine, load(saved / source), rank, world)


@pytest.mark.timeout(120)
def test_another_world_may_lack_what_was_named(saved: Path) -> None:
    run_pooled(lacking, 2, saved)


def one_of_eight(kind: str, rank: int, folder: Path) -> None:
    """Rank `rank` of 8, without the others: no communication is needed for a state of another world."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    full = torch.load(folder / "whole.pt", weights_only=True)
    engine = build(kind, OTHER, 8)
    state = state_from(load(folder), engine, rank, 8)
    for name, p in engine.module.named_parameters():
        shards, at = (8, rank) if kind == "fsdp2" else (4, rank % 4)
        rows = -(-p.shape[0] // shards)
        due = slice(min(at * rows, p.shape[0]), min((at + 1) * rows, p.shape[0]))
        assert_same(state["params"][name], full["model"][name][due], f"{kind} {rank} {name}")
        moment = state["optimizer"]["state"][name]["values"]["exp_avg_sq"]
        assert_same(moment, full["optim"]["state"][name]["exp_avg_sq"][due], f"{kind} {rank} {name} moment")
    engine.restore(state)
    assert_same(engine.capture(), state, f"{kind} {rank}")


def eight_in_turn(rank: int, world: int, folder: Path) -> list[str]:
    """Each in a fork of its own: DTensor remembers the mesh of its process, and with it the rank."""
    dist.destroy_process_group()
    failed = []
    for kind, one in [*(("fsdp2", one) for one in range(8)), ("hsdp", 3), ("hsdp", 6)]:
        child = os.fork()
        if child == 0:
            try:
                one_of_eight(kind, one, folder)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        if os.waitpid(child, 0)[1] != 0:
            failed.append(f"{kind} {one}")
    return failed


def test_eight_ranks(saved: Path) -> None:
    """Every rank of a world of 8 gets the right rows, out of 4 uneven shards."""
    assert run_ranks(eight_in_turn, 1, saved / "fsdp2-4") == [[]]


def refusals(rank: int, world: int, saved: Path) -> None:
    """What cannot be put together is named, and nothing was touched."""
    sources = load(saved / "ddp-4")
    engine = build("ddp", OTHER, world)
    before = engine.capture()

    def refused(parts: list[SourcePart], target: TorchOptimEngine, match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            state_from(parts, target, 0, 1)

    def altered(path: tuple[str, ...], value: object, of: int = 2) -> list[SourcePart]:
        parts = load(saved / "ddp-4")
        at: dict = parts[of].state  # type: ignore[assignment]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        return parts

    weight = sources[2].state["params"]["head.weight"].clone()
    weight[3, 3] += 1
    refused(
        altered(("params", "head.weight"), weight),
        engine,
        "parameters/head.weight is not the same on rank 0 and rank 2",
    )
    refused(
        altered(("counters", "steps"), 4), engine, "counters/steps is 3 in the part of rank 0 and 4 in that of rank 2"
    )
    refused(sources[1:], engine, "not whole: 0 of its")
    refused([replace(part, pieces=[]) for part in sources], engine, "does not say what its tensors are pieces of")
    shards = load(saved / "fsdp2-4")
    refused([*shards[:1], *shards[2:]], engine, "is not whole")
    refused(sources, build("ddp", SETUP.but(unused=True), world), "parameter spare.weight: not in the state")
    refused(
        sources, build("ddp", SETUP.but(width=12), world), r"shape \(23, 10\) torch.float32 in the checkpoint, \(?shape"
    )
    refused(sources, build("ddp", SETUP.but(optimizer="sgd"), world), "optimizer: AdamW in the state, SGD here")
    refused(sources, build("ddp", SETUP.but(groups=False), world), "parameter groups: 2 in the state, 1 here")
    refused(
        sources, build("ddp", SETUP.but(scheduled=False), world), "LR schedule: ExponentialLR in the state, none here"
    )
    assert_same(engine.capture(), before, "after refusals")


def test_refusals_name_the_part(saved: Path) -> None:
    run_pooled(refusals, 2, saved)


# --- what an optimizer keeps ---


class Scaled(nn.Module):
    """A scalar parameter, a tied one, one without gradient, one in channels-last order of memory, one integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(3, 5, 3)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.idle = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :3, None, None].expand(-1, 3, 3, 3)
        return (self.norm(self.second(self.first(x))) * self.scale).sum() + self.conv(image).square().sum()


def single(make: type[torch.optim.Optimizer], seed: int, **options: float) -> DDPEngine:
    torch.manual_seed(seed)
    model = Scaled()
    model.conv.weight.data = model.conv.weight.data.contiguous(memory_format=torch.channels_last)
    return DDPEngine(model, make(model.parameters(), **options))


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict]] = [
    (torch.optim.SGD, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_optimizer_of_torch(make: type[torch.optim.Optimizer], options: dict) -> None:
    """Moments, step counts and per-parameter scalars of a used optimizer, into one that was never stepped."""
    source, target = single(make, 1, **options), single(make, 2, **options)
    torch.manual_seed(5)
    batches = [torch.randn(6, 4) for _ in range(4)]

    def train(engine: DDPEngine, some: list[torch.Tensor]) -> None:
        for x in some:
            engine.begin_micro_step(0, 1)
            engine.backward(engine(x))
            engine.apply(None, contract.NEUTRAL)

    train(source, batches[:2])
    state = source.capture()
    parts = [SourcePart(0, state, source.pieces(state))]
    target.restore(state_from(parts, target, 0, 1))
    assert_same(target.capture(), state, make.__name__)
    assert target.module.conv.weight.stride() == source.module.conv.weight.stride()  # type: ignore[operator,union-attr]
    train(source, batches[2:])
    train(target, batches[2:])
    assert_same(target.capture(), source.capture(), f"{make.__name__}, trained on")


def test_a_tied_parameter_is_there_under_each_name_and_must_be_one() -> None:
    source = single(torch.optim.SGD, 1, lr=0.1)
    state = source.capture()
    pieces = source.pieces(state)
    assert {"parameters/first.weight", "parameters/second.weight"} <= {piece.name for piece in pieces}
    assert not any(piece.name.startswith("buffers/norm.num") and not piece.owner for piece in pieces)
    apart = {**state, "params": {**state["params"], "second.weight": state["params"]["first.weight"] + 1}}
    moved = [
        replace(p, path=("params", "second.weight")) if p.name == "parameters/second.weight" else p for p in pieces
    ]
    frame = source.frame(state)
    with pytest.raises(CheckpointError, match="are one tensor here, but differ in the checkpoint"):
        reshape([SourcePart(0, apart, moved)], frame, source.pieces(frame))


def test_a_parameter_that_is_no_box_is_refused() -> None:
    """FSDP over tensor parallelism of the same dimension: a rank holds scattered rows."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        engine = FSDP2Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(CheckpointError, match="no box of the whole"):
            engine.pieces(engine.capture())
    finally:
        dist.destroy_process_group()


def test_setup_is_uneven() -> None:
    assert isinstance(SETUP, Setup) and all(rows % n for rows in (31, 23) for n in (2, 3, 4, 8))
