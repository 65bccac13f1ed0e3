"""The loop and the evaluation, through the real guard and engine (BR-40, T2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from resilient.engines.base import EngineConfig
from resilient.engines.build import build_engine
from resilient.integrations.guard import Guard
from resilient.train.data import IGNORED, Batch, DataConfig, TokenStream, load_corpus
from resilient.train.evaluate import HeldOut
from resilient.train.loop import train
from resilient.train.model import GPT, ModelConfig
from resilient.train.optim import OptimConfig, make_optimizer, make_scheduler
from tests.ranks import run_pooled

pytestmark = pytest.mark.timeout(120)

MODEL = ModelConfig(name="small", width=32, layers=2, heads=2, hidden=48, dropout=0.0)
DATA = DataConfig(name="synthetic", seq_len=16, micro_batch=2, accumulation=2, max_bytes=20_000)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2)
STEPS = 6


def build(accumulation: int = 2, model: ModelConfig = MODEL, optim: OptimConfig = OPTIM, steps: int = STEPS) -> Any:
    torch.manual_seed(1)
    return build_engine(
        EngineConfig(name="ddp"),
        GPT(model),
        make_optimizer=lambda module: make_optimizer(module, optim),
        make_scheduler=lambda optimizer: make_scheduler(optimizer, optim, steps),
        clip=optim.clip,
        accumulation=accumulation,
        micro_batch=DATA.micro_batch,
        device=torch.device("cpu"),
    )


def uneven_batches(rank: int, world: int) -> list[Batch]:
    """STEPS windows of two micro-steps. Rank 1 has no label at all in window 5, none in the last micro-batch of window
    2, and only a few in window 3."""
    stream = TokenStream(DATA, seed=3, rank=rank, world=world)
    batches = [batch for _, batch in zip(range(2 * STEPS), stream, strict=False)]
    for i, batch in enumerate(batches):
        window, micro = i // 2 + 1, i % 2
        if rank == 1 and (window == 5 or (window == 2 and micro == 1)):
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        elif rank == 1 and window == 3:
            batch["labels"] = batch["labels"].masked_fill(torch.arange(16) > 2, IGNORED)
    return batches


def guarded_run(rank: int, world: int) -> dict[str, Any]:
    engine = build()
    evaluate = HeldOut(engine, load_corpus(DATA), DATA, batches=5, rank=rank, world=world)
    engine.module.train()
    rng = torch.get_rng_state()
    before = evaluate()
    quiet = torch.equal(rng, torch.get_rng_state()) and engine.module.training
    with Guard(engine, data=uneven_batches(rank, world), accumulation=2, progress=False) as guard:
        after = train(guard, evaluate, steps=STEPS)
        counters = guard.counters
        applied, attempts = guard.applied, counters.attempts
    # numpy: a tensor sent through a pipe needs its process to live until it is read
    weights = torch.cat([p.detach().flatten() for p in engine.module.parameters()]).numpy()
    return {"weights": weights, "applied": applied, "attempts": attempts, "evals": (before, after), "quiet": quiet}


def reference_weights(weighting: str) -> torch.Tensor:
    """One process, no engine, no guard: the mean over all tokens of both ranks, or (wrongly) the mean of means."""
    torch.manual_seed(1)
    model = GPT(MODEL)
    optimizer = make_optimizer(model, OPTIM)
    scheduler = make_scheduler(optimizer, OPTIM, STEPS)
    ranks = [uneven_batches(rank, 2) for rank in range(2)]
    for window in range(STEPS):
        parts = [batches[2 * window + micro] for batches in ranks for micro in range(2)]
        sums = [
            F.cross_entropy(
                model(b["input_ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            for b in parts
        ]
        counts = [int((b["labels"] != IGNORED).sum()) for b in parts]
        if weighting == "tokens":
            loss = sum(sums) / sum(counts)
        else:
            loss = sum(s / max(c, 1) for s, c in zip(sums, counts, strict=True)) / len(parts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip)
        optimizer.step()
        scheduler.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_br40_ranks_with_few_or_no_tokens_and_evaluation_over_ranks():
    """No hang, equal counters, and the weights that training on all tokens alone gives; a mean of means does not."""
    first, second = ({**r, "weights": torch.from_numpy(r["weights"])} for r in run_pooled(guarded_run, 2, timeout=110))
    assert torch.equal(first["weights"], second["weights"])
    assert [r["applied"] for r in (first, second)] == [STEPS, STEPS]
    assert [r["attempts"] for r in (first, second)] == [STEPS, STEPS]

    right, naive = reference_weights("tokens"), reference_weights("means")
    distance = float((first["weights"] - right).norm() / right.norm())
    assert distance < 1e-5
    assert float((first["weights"] - naive).norm() / right.norm()) > 100 * max(distance, 1e-7)

    # evaluation: the same on both ranks and as computed directly, without touching RNG or the training mode
    assert first["evals"] == second["evals"]
    assert first["quiet"]
    assert second["quiet"]
    assert first["evals"][0] == pytest.approx(direct_held_out_loss(batches=5), rel=1e-6)
    assert first["evals"][1] < first["evals"][0]


@torch.no_grad()
def direct_held_out_loss(batches: int) -> float:
    torch.manual_seed(1)
    model = GPT(MODEL).eval()
    text = torch.from_numpy(load_corpus(DATA).held_out.astype("int64"))
    available, wanted = (len(text) - 1) // 16, batches * DATA.micro_batch
    starts = [(i * available // wanted) * 16 for i in range(wanted)]
    losses = [F.cross_entropy(model(text[s : s + 16][None])[0], text[s + 1 : s + 17]) for s in starts]
    return float(torch.stack(losses).double().mean())


class Signals:
    """Keeps what the guard reports."""

    def __init__(self) -> None:
        self.entropy: dict[int, float] = {}
        self.evaluations: list[int] = []

    def step(self, report: Any) -> None:
        self.entropy[report.step] = report.signals.get("attention_entropy", math.nan)

    def incident(self, incident: Any) -> None: ...

    def event(self, kind: str, fields: Any) -> None:
        if kind == "evaluation":
            self.evaluations.append(fields["step"])

    def close(self) -> None: ...


@pytest.fixture
def one_rank_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank_group")
def test_it_learns_evaluates_on_time_and_probes_sampled_steps():
    torch.set_num_threads(1)
    data = replace(DATA, seq_len=64, micro_batch=8, accumulation=1, max_bytes=200_000)
    optim = OptimConfig(lr=1e-2, warmup_steps=5)
    engine = build(1, replace(MODEL, width=64, hidden=96, dropout=0.1), optim, steps=45)
    stream = TokenStream(data, seed=0, rank=0, world=1)
    evaluate = HeldOut(engine, stream.corpus, data, batches=4, rank=0, world=1)
    seen = Signals()
    untrained = evaluate()
    with Guard(engine, data=stream, listeners=[seen], progress=False) as guard:
        loss = train(guard, evaluate, steps=45, eval_every=20, probe_every=15)
    stream.close()
    assert untrained == pytest.approx(math.log(256), abs=0.2)
    assert loss < 2.7  # single-byte frequencies alone give 3.0
    assert seen.evaluations == [20, 40, 45]
    assert [step for step, value in seen.entropy.items() if math.isfinite(value)] == [15, 30, 45]
    assert all(0 < seen.entropy[step] < math.log(64) for step in (15, 30, 45))
