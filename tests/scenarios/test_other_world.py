"""A run goes on with another number of ranks, or is refused by the name of what stands in the way (issue 5, deliver 6; BR-11, BR-17,
BR-13, BR-15)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import resilient
from resilient.checkpoint.config import CheckpointConfig
from resilient.checkpoint.manifest import list_checkpoints
from resilient.checkpoint.pieces import Piece, from_plain, node, to_plain
from resilient.errors import CheckpointError
from resilient.train.data import DataConfig, TokenStream, sample_ids
from tests.ranks import run_pooled, run_ranks
from tests.scenarios.harness import MODEL, Job, Outcome, run_job

# Without dropout two worlds with the same global batch do the same but for the order of sums.
JOB = Job(model=replace(MODEL, dropout=0.0), checkpoint=CheckpointConfig(every=3, blocking=True))

Part = tuple[dict[str, Any], list[tuple[Any, ...]]]


def stage(rank: int, world: int, job: Job) -> tuple[Part, Outcome, Part]:
    """One start: what this rank holds at its begin, what happened, what it holds in the end."""
    held: list[Part] = []
    engines: list[Any] = []

    def start(guard: Any, engine: Any) -> None:
        guard.start()
        engines.append(engine)
        hold()

    def hold() -> None:
        state = engines[0].capture()
        held.append((state, to_plain(engines[0].pieces(state))))

    outcome = run_job(job, rank, world, tweak=start)
    hold()
    return held[0], outcome, held[1]


def whole(parts: list[Part]) -> dict[str, torch.Tensor]:
    """Every tensor of the model and the optimizer, put together from what all ranks hold; copies must be equal."""
    found: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    for state, plain in parts:
        for piece in from_plain(plain):
            if piece.kind == "buffers":
                continue
            tensor = node(state, piece.path)
            full = found.setdefault(piece.name, torch.zeros(piece.shape, dtype=tensor.dtype))
            seen = known.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.bool))
            values = tensor.reshape(-1)[piece.start : piece.start + piece.elements]
            here, there = box(full, piece), box(seen, piece)
            assert torch.equal(here[there], values.view(here.shape)[there]), f"{piece.name}: copies differ"
            here.copy_(values.view(here.shape))
            there.fill_(True)
    for name, seen in known.items():
        assert bool(seen.all()), f"{name} is not whole"
    return found


def box(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    if len(piece.size) == tensor.dim():
        return tensor[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))]
    return tensor.view(-1)[piece.offset[0] : piece.offset[0] + piece.size[0]]


def delivered(outcomes: list[Outcome], job: Job) -> list[int]:
    """Ids of the samples trained on, in the global order that they were read in."""
    ids = []
    for window in zip(*(outcome.sample_ids for outcome in outcomes), strict=True):
        for micro in range(job.accumulation):
            for given in window:
                ids += given[micro * job.micro_batch : (micro + 1) * job.micro_batch]
    return ids


def of(kind: str, outcome: Outcome) -> list[dict[str, Any]]:
    return [fields for told, fields in outcome.events if told == kind]


def goes_on(spawn: Any, job: Job, worlds: list[tuple[int, int]], folder: Path) -> list[list[Outcome]]:
    """Three steps in each world (ranks, accumulation), each from the checkpoint of the one before, and all that must hold."""
    before: dict[str, torch.Tensor] = {}
    schedule: list[tuple[int | None, float]] = []
    ids: list[int] = []
    told = []
    for n, (world, accumulation) in enumerate(worlds):
        here = job.with_(steps=3 * n + 3, accumulation=accumulation, run_dir=str(folder / "run"))
        stages = spawn(stage, world, here, timeout=170)
        begin, outcomes, end = ([s[i] for s in stages] for i in range(3))
        now = whole(begin)
        if n:
            (resume,) = of("resume", outcomes[0])
            assert resume["step"] == 3 * n and resume["changes"][0] == f"world: {worlds[n - 1][0]} ranks -> {world}"
            assert "rng/torch: started anew from (rank 0's, step, world, rank)" in resume["changes"], resume
            assert any("ranks and is taken by" in w["message"] for w in of("warning", outcomes[0]))
            assert now.keys() == before.keys() and any(name.startswith("moments/") for name in now)
            for name, tensor in now.items():
                assert tensor.dtype == before[name].dtype and torch.equal(
                    tensor.contiguous().view(-1).view(torch.uint8), before[name].contiguous().view(-1).view(torch.uint8)
                ), name
            assert len({o.rng for o in outcomes}) == world, "each rank has random streams of its own"
        before = whole(end)
        if n:
            assert any(not torch.equal(now[name], before[name]) for name in now), "it trains"
        ids += delivered(outcomes, here)
        for outcome in outcomes:
            assert outcome.applied == 3 * n + 3 and outcome.counters["steps_lost"] == 0
            assert outcome.counters["attempts"] == outcome.counters["applied"] == outcome.applied
        newest = list_checkpoints(folder / "run" / "checkpoints").complete[0].manifest
        assert (newest.world, newest.step, newest.samples) == (world, 3 * n + 3, len(ids))
        schedule.append((newest.schedule, newest.lr))
        told.append(outcomes)
    size = TokenStream(
        DataConfig(name="synthetic", seq_len=job.seq_len, max_bytes=60_000), seed=0, rank=0, world=1
    ).samples
    assert ids == sample_ids(0, len(ids), size, seed=0).tolist(), "no sample lost, none twice"
    assert [at for at, _ in schedule] == [3 * n + 3 for n in range(len(worlds))]
    return told


def close_to(twin: Outcome, outcomes: list[list[Outcome]], limit: float) -> None:
    """The losses of a course over several worlds, against those of one that stayed where it was."""
    undisturbed = twin.losses()
    for step, loss in {step: loss for stage in outcomes for step, loss in stage[0].losses().items()}.items():
        assert loss == pytest.approx(undisturbed[step], rel=limit), step


def alone(rank: int, world: int, job: Job) -> Outcome:
    return run_job(job, rank, world)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_from_4_ranks_to_2_and_to_3(tmp_path: Path, engine: str):
    job = JOB.with_(engine=engine)
    outcomes = goes_on(run_pooled, job, [(4, 1), (2, 2), (3, 1)], tmp_path)
    twin = run_pooled(alone, 4, job.with_(steps=9), timeout=100)[0]
    close_to(twin, outcomes[:2], 1e-4)  # the same global batch
    assert outcomes[2][0].lr == twin.lr, "a smaller global batch changes no LR"
    (warning,) = [w["message"] for w in of("warning", outcomes[2][0]) if "taken by" in w["message"]]
    assert "the global batch is 0.75 times as large" in warning and "LR" in warning
    first = outcomes[0][0].losses()[1]
    assert all(loss < first for loss in outcomes[2][0].losses().values()), "and it goes on learning"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("engine", "precision"), [("fsdp2", "bf16"), ("zero1", "bf16"), ("zero3", "bf16"), ("zero2", "fp32")]
)
def test_more_and_fewer_ranks_with_masters(tmp_path: Path, engine: str, precision: str):
    """2 -> 4 -> 3."""
    spawn = run_ranks if engine.startswith("zero") else run_pooled
    job = JOB.with_(engine=engine, precision=precision)
    outcomes = goes_on(spawn, job, [(2, 2), (4, 1), (3, 1)], tmp_path)
    twin = spawn(alone, 2, job.with_(steps=6, accumulation=2), timeout=100)[0]
    close_to(twin, outcomes[:2], 1e-4 if precision == "fp32" else 1e-2)


@pytest.mark.timeout(240)
def test_zero_from_4_ranks_to_2(tmp_path: Path):
    outcomes = goes_on(run_ranks, JOB.with_(engine="zero1", precision="bf16"), [(4, 1), (2, 2)], tmp_path)
    assert outcomes[1][0].applied == 6


# --- refused --------------------------------------------------------------------------------------------------------


def refused(rank: int, world: int, job: Job, error: Any = (CheckpointError,)) -> tuple[str, Outcome]:
    outcome = run_job(job, rank, world, raises=error)
    return outcome.error, outcome


def drift(guard: Any, engine: Any) -> None:
    """One weight of rank 1 is one unit in the last place off, which no loss shows."""
    guard.start()
    if guard.rank == 1:
        weight = next(engine.module.parameters()).data.view(-1)
        weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))


def drifted(rank: int, world: int, job: Job) -> Outcome:
    return run_job(job, rank, world, tweak=drift)


@pytest.mark.timeout(120)
def test_copies_that_differ_in_one_bit_are_refused(tmp_path: Path):
    """The control: what is compared bit for bit is not equal here, and nothing is made of it."""
    job = JOB.with_(steps=3, run_dir=str(tmp_path / "run"), checkpoint=CheckpointConfig(every=3, blocking=True))
    run_pooled(drifted, 2, job)
    errors = [error for error, _ in run_pooled(refused, 3, job.with_(steps=6))]
    assert all(error.startswith("BoundToItsWorld") for error in errors), errors
    assert any("parameters/" in error and "not the same on rank 0 and rank 1" in error for error in errors), errors


@pytest.mark.timeout(120)
def test_an_engine_of_another_kind_is_refused(tmp_path: Path):
    job = JOB.with_(steps=3, run_dir=str(tmp_path / "run"))
    run_pooled(alone, 2, job)
    for error, _ in run_pooled(refused, 3, job.with_(steps=6, engine="fsdp2")):
        assert "engine 'ddp' there, 'fsdp2' here" in error


def at_another_stage(rank: int, world: int, job: Job) -> str:
    return refused(rank, world, job)[0]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_another_zero_stage_is_refused(tmp_path: Path):
    job = JOB.with_(steps=3, run_dir=str(tmp_path / "run"), engine="zero1")
    run_ranks(alone, 2, job)
    for error in run_ranks(at_another_stage, 3, job.with_(engine="zero3")):
        assert "engine 'deepspeed_zero1' there, 'deepspeed_zero3' here" in error


class Counting:
    """A user's loader without a state: twelve batches an epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        torch.manual_seed(self.rank)
        return iter([torch.randn(2, 4) for _ in range(12)])


class PerRank(Counting):
    """With a state that is a position among this rank's own batches, and nobody has said otherwise."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.at = 0

    def __iter__(self) -> Any:
        batches = list(super().__iter__())
        while self.at < len(batches):
            self.at += 1
            yield batches[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def own_loop(rank: int, world: int, loader: type[Counting], steps: int, folder: str) -> tuple[int, str, list[str]]:
    torch.manual_seed(0)
    model: nn.Module = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    heard: list[str] = []

    class Ear:
        def event(self, kind: str, fields: Any) -> None:
            heard.extend([*fields.get("changes", ()), str(fields.get("message", ""))])

        def step(self, report: Any) -> None: ...
        def incident(self, incident: Any) -> None: ...
        def close(self) -> None: ...

    config = CheckpointConfig(every=4, keep=1, blocking=True)
    with resilient.Guard(
        model, optimizer, data=loader(rank), run_dir=folder, checkpoint=config, listeners=[Ear()], progress=False
    ) as guard:  # fmt: skip
        try:
            guard.start()
            for batch in guard.batches(steps=steps):
                guard.backward(model(batch).square().mean())
                guard.step()
        except CheckpointError as error:
            return guard.applied, f"{type(error).__name__}: {error}", heard
    return guard.applied, "", heard


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("loader", "part"), [(Counting, "data/batches: the position is 8 batches into epoch 0"), (PerRank, "data/loader: ")]
)
def test_a_position_that_is_another_sample_elsewhere_is_refused(tmp_path: Path, loader: type[Counting], part: str):
    """In the middle of an epoch; and nothing is lost by it: where it was saved it can be loaded."""
    folder = str(tmp_path / "run")
    assert [applied for applied, *_ in run_pooled(own_loop, 2, loader, 8, folder)] == [8, 8]
    steps = [complete.manifest.step for complete in list_checkpoints(tmp_path / "run" / "checkpoints").complete]
    assert steps[0] == 8 and 0 in steps, "one of them could be taken, and eight steps lost"
    for applied, error, _ in run_pooled(own_loop, 3, loader, 10, folder):
        assert applied == 0 and error.startswith("BoundToItsWorld: step 8 was saved by 2 ranks"), error
        assert part in error or "another rank" in error, error
    assert [applied for applied, *_ in run_pooled(own_loop, 2, loader, 10, folder)] == [10, 10]


@pytest.mark.timeout(120)
def test_elastic_false_refuses_another_world(tmp_path: Path):
    job = JOB.with_(steps=3, run_dir=str(tmp_path / "run"))
    run_pooled(alone, 2, job)
    config = replace(job.checkpoint, elastic=False)
    for error, _ in run_pooled(refused, 3, job.with_(steps=6, checkpoint=config)):
        assert "world size 2 there, 3 here (start 2 ranks, or with run.checkpoint.elastic=true)" in error
    assert run_pooled(alone, 2, job.with_(steps=6, checkpoint=config))[0].applied == 6


@pytest.mark.timeout(120)
def test_excluded_data_stays_excluded(tmp_path: Path):
    """Windows of 4 samples ahead of the change become windows of 6 that hold all of them, and not more than they must."""
    job = JOB.with_(steps=3, run_dir=str(tmp_path / "run"))
    run_pooled(alone, 2, job)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints").complete[0].manifest
    assert newest.outer is not None and newest.outer["window_samples"] == 4
    later = {
        **newest.outer,
        "attempts": 4,
        "skipped": 1,
        "excluded": [[1, 2], [5, 7]],
    }  # an incident after the checkpoint
    (tmp_path / "run" / "outer.json").write_text(json.dumps(later))
    outcomes = run_pooled(alone, 3, job.with_(steps=7))
    assert outcomes[0].counters["excluded"] == [[1, 2], [4, 6]] and outcomes[0].counters["window_samples"] == 6
    size = TokenStream(DataConfig(name="synthetic", seq_len=16, max_bytes=60_000), seed=0, rank=0, world=1).samples
    order = sample_ids(0, 60, size, seed=0).tolist()
    assert delivered(outcomes, job) == order[12:18] + order[30:48], "samples 20 to 28 were condemned"


@pytest.mark.timeout(180)
def test_a_loader_without_a_state_goes_on_where_an_epoch_ends(tmp_path: Path):
    folder = str(tmp_path / "run")
    run_pooled(own_loop, 2, Counting, 12, folder)
    for applied, error, changes in run_pooled(own_loop, 3, Counting, 12, folder):
        assert (applied, error) == (12, "") and "world: 2 ranks -> 3" in changes
