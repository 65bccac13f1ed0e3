"""What each fault does to a real engine, and what it leaves alone."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resilient.engines.base import Engine, EngineConfig
from resilient.engines.build import build_engine
from resilient.errors import ConfigError
from resilient.faults import (
    FaultConfig,
    FaultSequence,
    KillRank,
    LrOvershoot,
    NanFault,
    NoFault,
    PoisonedWindow,
    RankGradSpike,
    install,
)
from resilient.integrations.guard import Guard
from resilient.signals import Knobs
from resilient.train.data import DataConfig, TokenStream
from resilient.train.evaluate import HeldOut
from resilient.train.loop import next_byte_loss, train
from resilient.train.model import GPT, ModelConfig
from resilient.train.optim import OptimConfig, make_optimizer, make_scheduler
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

MODEL = ModelConfig(name="small", width=32, layers=2, heads=2, hidden=48, dropout=0.0)
DATA = DataConfig(name="synthetic", seq_len=16, micro_batch=2, accumulation=2, max_bytes=20_000)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2)
FACTOR = 50.0
ENGINES = {
    "ddp": EngineConfig(name="ddp"),
    "fsdp2": EngineConfig(name="fsdp2"),
    "zero1": EngineConfig(name="deepspeed", zero_stage=1),
    "zero3": EngineConfig(name="deepspeed", zero_stage=3),
}
FAULTS = FaultSequence(
    faults=(
        NanFault(step=2, rank=1, place="forward"),
        NanFault(step=3, rank=1, place="loss"),
        NanFault(step=4, rank=1, place="backward"),
        RankGradSpike(step=5, rank=1, factor=FACTOR),
        RankGradSpike(step=6, rank=1, factor=FACTOR, repeat=True),
    )
)
STEPS = (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7)  # each step is tried again, as after a refused step or a rollback


def build(config: EngineConfig, data: DataConfig = DATA, model: ModelConfig = MODEL) -> Engine:
    torch.manual_seed(1)
    return build_engine(
        config,
        GPT(model),
        make_optimizer=lambda module: make_optimizer(module, OPTIM),
        make_scheduler=lambda optimizer: make_scheduler(optimizer, OPTIM, 20),
        clip=OPTIM.clip,
        accumulation=data.accumulation,
        micro_batch=data.micro_batch,
        device=torch.device("cpu"),
    )


def attempts(rank: int, world: int, engine_name: str) -> list[dict[str, float]]:
    """Attempts at the steps STEPS, all on the same two micro-batches, none applied: what was seen in each."""
    now = [0]
    stream = TokenStream(DATA, seed=0, rank=rank, world=world)
    batches = [batch for _, batch in zip(range(2), stream, strict=False)]
    engine, _, objective = install(
        FAULTS,
        engine=build(ENGINES[engine_name]),
        stream=stream,
        objective=next_byte_loss,
        step=lambda: now[0],
        rank=rank,
        world=world,
    )
    seen = []
    for now[0] in STEPS:
        losses, outputs = [], []
        for index, batch in enumerate(batches):
            engine.begin_micro_step(index, 2)
            result = objective(engine, batch)
            engine.backward(result.loss_sum / result.tokens)
            losses.append(float(result.loss_sum.detach()))
            outputs.append(bool(result.logits.isfinite().all()))
        taps = engine.taps()
        share = taps.reduced_sq_share.double()
        dist.all_reduce(share)
        local, norm = float(taps.local_sq.double().sqrt()), float(share.sqrt())
        seen.append({"output": float(all(outputs)), "loss": sum(losses), "local": local, "norm": norm})
        engine.skip(False)
    engine.close()
    return seen


def attempts_on_all_engines(rank: int, world: int) -> dict[str, list[dict[str, float]]]:
    return {name: attempts(rank, world, name) for name in ENGINES}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, list[dict[str, float]]]]:
    return run_ranks(attempts_on_all_engines, 2, timeout=170)


@pytest.mark.parametrize("engine", ENGINES)
def test_computation_faults_hit_one_rank_once_at_their_place(engine, on_two_ranks):
    """On rank 1, in the first attempt at their step only. Other attempts, and the other rank's loss and own gradient,
    are bit for bit what they are without a fault."""
    zero, one = (rank[engine] for rank in on_two_ranks)
    clean, clean_zero = one[-1], zero[-1]
    forward, loss, backward, spike = (one[STEPS.index(step)] for step in (2, 3, 4, 5))
    first_again = STEPS.index(6)
    for i in (3, 5, 7, 9):  # the second attempts at steps 2 to 5
        assert one[i] == clean, i
    for row in zero[2:]:  # DDP sorts its buckets anew after the first window
        assert (row["loss"], row["local"]) == (clean_zero["loss"], clean_zero["local"])

    assert not forward["output"]
    assert math.isnan(forward["loss"])
    assert loss["output"]
    assert math.isnan(loss["loss"])
    assert backward["output"]
    assert backward["loss"] == clean["loss"]
    for row in (forward, loss, backward):
        assert not math.isfinite(row["local"])
        assert not math.isfinite(row["norm"])
    for row in (spike, one[first_again], one[first_again + 1]):
        assert (row["output"], row["loss"]) == (1.0, clean["loss"])
        assert row["local"] == pytest.approx(FACTOR * clean["local"], rel=1e-4)
        assert row["norm"] > 10 * clean["norm"]


@pytest.fixture
def one_rank_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank_group")
def test_lr_overshoot_scales_the_update_and_not_the_schedule():
    def update(fault: FaultConfig) -> tuple[list[float], list[float]]:
        """Size of each of four updates to the output layer, under the same gradient, and the LR announced before it."""
        now = [0]
        stream = TokenStream(DATA, seed=0, rank=0, world=1)
        batch = next(iter(stream))
        engine, _, objective = install(
            fault,
            engine=build(ENGINES["ddp"]),
            stream=stream,
            objective=next_byte_loss,
            step=lambda: now[0],
            rank=0,
            world=1,
        )
        start, state = engine.capture(), []
        for now[0] in (1, 2, 3, 2):
            engine.restore(start)
            engine.begin_micro_step(0, 1)
            engine.backward(objective(engine, batch).loss_sum / 32)
            before = engine.module.head.weight.detach().clone()
            lr = engine.lr()
            norm = float(engine.taps().reduced_sq_share.sqrt())
            engine.apply(norm, Knobs())
            state.append((float((engine.module.head.weight.detach() - before).norm()), lr, engine.lr()))
        engine.close()
        return [s[0] for s in state], [s[1:] for s in state]

    plain, lrs = update(NoFault())
    hit, lrs_hit = update(LrOvershoot(step=2, window=2, factor=10.0))
    assert lrs == lrs_hit
    assert [h / p for h, p in zip(hit, plain, strict=True)] == pytest.approx([1, 10, 10, 1], rel=1e-4)


@pytest.mark.parametrize(("generation", "code"), [("0", -signal.SIGKILL), ("1", 0)])
@pytest.mark.usefixtures("one_rank_group")
def test_kill_rank_kills_itself_in_the_first_generation_only(generation, code, monkeypatch):
    monkeypatch.setenv("RESILIENT_GENERATION", generation)
    inner = build(ENGINES["ddp"])
    now = 0

    def child() -> None:
        nonlocal now
        engine, _, _ = install(
            KillRank(step=3, rank=0),
            engine=inner,
            stream=None,
            objective=next_byte_loss,
            step=lambda: now,
            rank=0,
            world=1,
        )
        for now in (1, 2, 3):
            engine.begin_micro_step(0, 2)
            engine.begin_micro_step(1, 2)
            if now == 2:
                os.write(pipe, b"2")
        os._exit(0)

    read, pipe = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    os.close(pipe)
    with os.fdopen(read, "rb") as file:
        assert file.read() == b"2"  # it lived through step 2
    assert process.exitcode == code
    inner.close()


def test_poison_belongs_to_the_data():
    """Labels of windows 2 and 3 are wrong, all of them, each time they are read, and nothing else is."""
    clean = TokenStream(DATA, seed=0, rank=0, world=2)
    fault = PoisonedWindow(step=2, window=2, seed=4)
    _, stream, _ = install(
        fault,
        engine=None,  # not touched
        stream=TokenStream(DATA, seed=0, rank=0, world=2),
        objective=next_byte_loss,
        step=lambda: 1,
        rank=0,
        world=2,
    )
    start = stream.state_dict()
    expected = [batch for _, batch in zip(range(10), clean, strict=False)]
    for _ in range(2):
        batches = [batch for _, batch in zip(range(10), stream, strict=False)]
        for i, (ours, theirs) in enumerate(zip(batches, expected, strict=True)):
            assert torch.equal(ours["input_ids"], theirs["input_ids"])
            assert torch.equal(ours["ids"], theirs["ids"])
            wrong = ours["labels"] != theirs["labels"]
            assert bool(wrong.all()) if i // 2 in (1, 2) else not wrong.any()
        assert stream.state_dict() == clean.state_dict()
        stream.rewind(start)


def test_poison_leaves_ignored_labels_and_other_ranks_alone():
    def poisoned(rank: int) -> Any:
        stream = TokenStream(DATA, seed=0, rank=rank, world=2)
        fault = PoisonedWindow(step=1, window=1, rank=1)
        return install(fault, engine=None, stream=stream, objective=next_byte_loss, step=lambda: 1, rank=rank, world=2)[
            1
        ]

    assert isinstance(poisoned(0), TokenStream)
    batch = {"labels": torch.tensor([[5, -100, 7]]), "position": 0}
    labels = poisoned(1).change(batch)["labels"]
    assert labels[0, 1] == -100
    assert labels[0, 0] != 5
    assert labels[0, 2] != 7
    assert batch["labels"].tolist() == [[5, -100, 7]]


class Losses:
    def __init__(self) -> None:
        self.of: dict[int, float] = {}

    def step(self, report: Any) -> None:
        self.of[report.step] = report.loss

    def incident(self, incident: Any) -> None: ...

    def event(self, kind: str, fields: Any) -> None: ...

    def close(self) -> None: ...


@pytest.mark.usefixtures("one_rank_group")
def test_poison_and_overshoot_together_damage_a_learning_run():
    """Observed and not acted upon: the poisoned windows show at once, and the model is worse for a while after."""
    torch.set_num_threads(1)
    data = DataConfig(name="synthetic", seq_len=32, micro_batch=8, max_bytes=100_000)
    faults = FaultSequence(faults=(PoisonedWindow(step=26, window=3), LrOvershoot(step=28, window=1, factor=10.0)))
    finals, seen = {}, Losses()
    for name, fault in (("clean", NoFault()), ("faulty", faults)):
        guard: Guard | None = None
        stream = TokenStream(data, seed=0, rank=0, world=1)
        inner = build(ENGINES["ddp"], data)
        engine, batches, objective = install(
            fault,
            engine=inner,
            stream=stream,
            objective=next_byte_loss,
            step=lambda: guard.step_index,  # noqa: B023  (the guard of this turn, made below)
            rank=0,
            world=1,
        )
        evaluate = HeldOut(engine, stream.corpus, data, batches=2, rank=0, world=1)
        guard = Guard(engine, data=batches, policy="observe", progress=False, listeners=[seen])
        finals[name] = train(guard, evaluate, steps=30, objective=objective)
        guard.close()
    assert max(seen.of[step] for step in range(20, 26)) < 3.4
    assert seen.of[26] > 2.0 + seen.of[25]
    assert finals["faulty"] > 0.5 + finals["clean"]


def test_a_missing_rank_is_refused_when_installed():
    with pytest.raises(ConfigError, match=r"fault\.rank=1"):
        install(NanFault(step=1, rank=1), engine=None, stream=None, objective=next_byte_loss, step=int, rank=0, world=1)
