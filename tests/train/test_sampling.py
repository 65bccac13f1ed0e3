"""S1, S9, T10: what is sampled at an evaluation, and that it reaches every rank's judgement alike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.engines.base import EngineConfig
from resilient.engines.build import build_engine
from resilient.integrations.guard import Guard
from resilient.train.data import DataConfig, TokenStream, load_corpus
from resilient.train.evaluate import HeldOut, Sample, Sampler, repetition
from resilient.train.loop import next_byte_loss, train, weighted
from resilient.train.model import GPT, ModelConfig
from resilient.train.optim import OptimConfig, make_optimizer, make_scheduler
from tests.ranks import run_pooled
from tests.scenarios.harness import Ear

pytestmark = pytest.mark.timeout(120)

MODEL = ModelConfig(name="small", width=16, layers=2, heads=2, hidden=32, dropout=0.2)
DATA = DataConfig(name="synthetic", seq_len=16, micro_batch=2, accumulation=1, max_bytes=20_000)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2)


def build(engine: str = "ddp", steps: int = 6) -> Any:
    torch.manual_seed(1)
    return build_engine(
        EngineConfig(name=engine),  # type: ignore[arg-type]
        GPT(MODEL),
        make_optimizer=lambda module: make_optimizer(module, OPTIM),
        make_scheduler=lambda optimizer: make_scheduler(optimizer, OPTIM, steps),
        clip=OPTIM.clip,
        accumulation=1,
        micro_batch=DATA.micro_batch,
        device=torch.device("cpu"),
    )


def test_s1_repetition_is_the_share_of_ngrams_seen_before():
    assert repetition(np.arange(40)) == 0.0
    assert repetition(np.array([7, 8] * 20)) == pytest.approx(1 - 2 / 37)
    assert repetition(np.array([1, 2, 3])) == 0.0  # too short to say


def sampled(rank: int, world: int) -> dict[str, Any]:
    engine = build("fsdp2")
    sampler = Sampler(engine, load_corpus(DATA), DATA, tokens=48)
    torch.manual_seed(5 + rank)
    rng = torch.get_rng_state()
    first, second = sampler(), sampler()
    quiet = torch.equal(rng, torch.get_rng_state()) and engine.module.training
    return {"first": first, "second": second, "quiet": quiet}


def test_s1_samples_are_the_same_on_all_ranks_of_a_sharded_model_and_draw_no_random_number():
    one, two = run_pooled(sampled, 2, timeout=110)
    assert one == two
    assert one["first"] == one["second"]
    assert one["quiet"]
    assert one["first"].entropy == pytest.approx(math.log(256), abs=0.2)  # nothing learned yet
    assert one["first"].repetition < 0.1


@pytest.fixture
def one_rank_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank_group")
def test_s1_a_model_that_always_says_the_same_has_no_entropy_and_repeats_itself():
    engine = build()
    with torch.no_grad():
        engine.module.head.weight.zero_()
        engine.module.head.weight[ord("a")] = 50 * engine.module.norm.weight.sign()
    engine.module.head.register_forward_pre_hook(lambda module, args: (args[0].abs(),))
    collapsed = Sampler(engine, load_corpus(DATA), DATA, tokens=48)()
    assert collapsed.entropy < 0.01
    assert collapsed.repetition > 0.9
    assert collapsed.text == "a" * 48


def told_by_rank_0(rank: int, world: int, folder: str) -> list[tuple[int, dict[str, float]]]:
    """Only rank 0 evaluates, after step 2; after step 4 both tell that the loss is not finite."""
    engine = build()
    stream = TokenStream(DATA, seed=0, rank=rank, world=world)
    ear = Ear()
    with Guard(
        engine,
        data=stream,
        listeners=[ear],
        run_dir=f"{folder}/run",
        snapshot=SnapshotConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
        progress=False,
    ) as guard:
        for batch in guard.batches(steps=6):
            result = next_byte_loss(engine, batch)
            guard.backward(weighted(result, guard), tokens=result.tokens)
            guard.step()
            if guard.applied == 2 and rank == 0:
                guard.evaluated(2, loss=3.5, entropy=1.25, repetition=0.5, text="the the the")
            if guard.applied == 4:
                guard.evaluated(4, loss=math.nan)
    stream.close()
    return [(r.step, dict(r.signals)) for r in ear.reports]


def test_s9_t10_an_evaluation_is_in_the_next_attempts_table_on_every_rank_and_in_its_line(tmp_path: Path):
    one, two = run_pooled(told_by_rank_0, 2, str(tmp_path), timeout=110)
    told = {step: {k: s[k] for k in ("eval_loss", "entropy", "repetition") if k in s} for step, s in one}
    assert told == {step: {k: s[k] for k in ("eval_loss", "entropy", "repetition") if k in s} for step, s in two}
    assert told[3] == {"eval_loss": 3.5, "entropy": 1.25, "repetition": 0.5}
    assert told[5] == {"eval_loss": math.inf}  # BR-35: the worst there is, not a gap
    assert [step for step, values in told.items() if values] == [3, 5]
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("repetition") == 0.5] == [3]
    journal = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    evaluation = next(r for r in journal if r["kind"] == "evaluation")
    assert (evaluation["step"], evaluation["loss"], evaluation["text"]) == (2, 3.5, "the the the")


@pytest.mark.usefixtures("one_rank_group")
def test_s1_the_reference_loop_tells_loss_entropy_and_repetition_at_each_evaluation():
    engine = build()
    stream = TokenStream(DATA, seed=0, rank=0, world=1)
    evaluate = HeldOut(engine, stream.corpus, DATA, batches=1, rank=0, world=1)
    ear = Ear()
    with Guard(engine, data=stream, listeners=[ear], progress=False) as guard:
        train(guard, evaluate, steps=5, eval_every=2, sample=lambda: Sample(0.5, 0.25, "x"))
    stream.close()
    told = [fields for kind, fields in ear.events if kind == "evaluation"]
    assert [(f["step"], f["entropy"], f["repetition"]) for f in told] == [(s, 0.5, 0.25) for s in (2, 4, 5)]
    assert [r.step for r in ear.reports if r.signals.get("repetition") == 0.25] == [3, 5]
    assert [r.signals["eval_loss"] for r in ear.reports if "eval_loss" in r.signals] == [f["loss"] for f in told[:2]]
