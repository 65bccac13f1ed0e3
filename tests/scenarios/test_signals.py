"""What a guarded run measures of its model, optimizer and ranks: S3, S4, S8, S9, BR-04, BR-07, BR-42, BR-47."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import resilient
from resilient.bench.ranks import engine_config
from resilient.coordinator.config import GuardConfig
from resilient.coordinator.exchange import Exchange
from resilient.engines.build import build_engine
from resilient.engines.ddp import DDPEngine
from resilient.errors import GradientsLeft, MonitorBlind
from resilient.signals import Kind, StepRecord, StepTable
from resilient.signals.record import COLUMNS, LAYER_COLUMNS, row_width
from tests.ranks import run_pooled, run_ranks
from tests.scenarios.harness import Ear, Job, Outcome, run_job
from tests.scenarios.test_own_loop import batches, build, guarded, loss_sum, run_loop

pytestmark = pytest.mark.timeout(180)

GROUPS = ("embed", "blocks.0", "blocks.1", "norm", "head")


# -- by layer, updates, attention ------------------------------------------------------------------------------------


def measured(rank: int, world: int, engine: str, layers: bool) -> Outcome:
    config = GuardConfig(exchange_timeout_s=30.0, weights_every=2, layers=layers)

    def probe(guard: resilient.Guard, engine: Any) -> None:
        engine.module.probe_attention = True

    return run_job(Job(engine=engine, steps=6, guard=config), rank, world, tweak=probe)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_s3_s8_s9_br07_every_rank_gets_the_same_norms_by_layer_updates_and_attention(engine: str):
    one, two = run_pooled(measured, 2, engine, True)
    assert len(one.reports) == 6
    for a, b in zip(one.reports, two.reports, strict=True):
        assert {k: v for k, v in a.signals.items() if k != "wait_s"} == {
            k: v for k, v in b.signals.items() if k != "wait_s"
        }
    for report in one.reports:
        signals = report.signals
        by_layer = [signals[f"grad_norm/{group}"] for group in GROUPS]
        assert math.hypot(*by_layer) == pytest.approx(report.grad_norm, rel=1e-9)
        assert min(by_layer) > 0
        assert 0 < signals["attention_entropy"] < math.log(16)
        assert 0 < signals["attention_logit_max"] != signals["logit_max"]
        told = report.step > 1  # each row tells of the step before
        assert ("update_norm" in signals) == told
        if told:
            parts = [signals[f"update_norm/{group}"] for group in GROUPS]
            assert math.hypot(*parts) == pytest.approx(signals["update_norm"], rel=1e-9)
        lag = report.step in (3, 5)  # weights_every
        assert ("adam_lag" in signals) == lag
        if lag:
            assert signals["adam_lag"] == max(signals[f"adam_lag/{group}"] for group in GROUPS)


def test_s3_layers_can_be_left_out():
    for report in run_pooled(measured, 2, "ddp", False)[0].reports:
        assert not any("/" in name for name in report.signals)
        assert "adam_lag" not in report.signals
        assert ("update_norm" in report.signals) == (report.step > 1)


def unlike(rank: int, world: int) -> tuple[int, list[str], tuple[str, ...]]:
    model, optimizer, scheduler = build(world)
    guard, ear = guarded(model, optimizer, scheduler, batches(3, rank))
    if rank == 1:
        guard.engine.layers.names = ("body", "head")
    run_loop(guard, model)
    guard.close()
    told = [fields["message"] for kind, fields in ear.events if kind == "warning"]
    return guard.applied, told, tuple(n for r in ear.reports for n in r.signals if "/" in n)


def test_s3_ranks_that_do_not_agree_on_the_layers_go_without():
    for applied, told, named in run_pooled(unlike, 2):
        assert (applied, named) == (3, ())
        assert len(told) == 1
        assert "different layers" in told[0]


def test_s3_a_layer_that_is_not_finite_is_told_from_the_others():
    names = ("a", "b", "c")
    exchange = Exchange(torch.device("cpu"), 5.0)
    exchange.layers = names
    shares = torch.tensor([4.0, math.nan, math.inf], dtype=torch.float64)
    record = StepRecord(1, 1, loss=1.0, loss_max=1.0, reduced_sq_share=shares.sum(), layers={LAYER_COLUMNS[0]: shares})
    table = exchange.table(record)
    assert table.rows.shape == (1, row_width(3)) == (1, len(COLUMNS) + 9)
    values = table.observation().values
    assert values["grad_norm/a"] == 2.0
    assert math.isnan(values["grad_norm/b"])
    assert values["grad_norm/c"] == math.inf
    assert not any(name.startswith(("update_norm", "adam_lag")) for name in values)  # not measured: absent


def test_s3_a_table_of_another_width_is_refused():
    with pytest.raises(ValueError, match="shape"):
        StepTable(np.zeros((2, len(COLUMNS))), layers=("a",))


def test_s8_s9_a_model_of_ones_own_tells_the_guard_about_its_attention():
    model, optimizer, scheduler = build(1)
    guard, ear = guarded(model, optimizer, scheduler, batches(6, 0), accumulation=2)
    for i, batch in enumerate(guard.batches()):
        total, tokens = loss_sum(model, batch)
        if i < 2:  # the first window, both micro-steps
            guard.probe(attention_entropy=torch.tensor(1.0 + i), attention_logit_max=3.0 - i)
            guard.probe(attention_logit_max=2.5)
        guard.backward(total / tokens)
        guard.step()
    first, later = ear.reports[0].signals, ear.reports[1].signals
    assert (first["attention_entropy"], first["attention_logit_max"]) == (1.5, 3.0)
    assert "attention_entropy" not in later
    assert "attention_logit_max" not in later


# -- BR-07: the update norm leads ------------------------------------------------------------------------------------


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Linear(64, 1, bias=False)
        nn.init.zeros_(self.direction.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.direction(x)


def aligned(calm: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Single samples of +-1 whose gradients all have one norm: first directions that cancel, then five times the same
    one, then its price."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(calm // 2):
        x = torch.randint(0, 2, (1, 64), generator=generator) * 2.0 - 1
        yield x, torch.ones(1, 1)
        yield x, -torch.ones(1, 1)
    x = torch.randint(0, 2, (1, 64), generator=generator) * 2.0 - 1
    for sign in (1, 1, 1, 1, 1, -1, -1, -1):
        yield x, torch.full((1, 1), float(sign))


def test_br07_the_update_norm_rises_before_the_loss_while_the_gradient_norm_stays_as_it_was():
    calm = 60
    model = Line()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    ear = Ear()
    guard = resilient.Guard(
        model,
        optimizer,
        data=list(aligned(calm)),
        policy="observe",
        listeners=[ear],
        progress=False,
        tokens=lambda b: 1.0,
    )
    for x, y in guard.batches():
        guard.backward(((model(x) - y) ** 2).mean())
        guard.step()
    rows = {r.step: r for r in ear.reports}
    usual = range(20, calm + 1)  # moments have settled
    update = np.median([rows[s].signals["update_norm"] for s in usual])
    later = range(calm + 1, len(rows) + 1)
    rises = next(s for s in later if rows[s].signals["update_norm"] >= 1.5 * update)
    doubled = max(rows[s].signals["update_norm"] for s in later)
    pays = next(s for s in later if rows[s].loss > 1.1 * max(rows[u].loss for u in usual))
    assert pays - rises >= 1, (rises, pays)
    assert doubled >= 1.8 * update
    most = max(rows[s].grad_norm for s in usual)
    assert max(rows[s].grad_norm for s in range(calm + 1, pays)) <= 1.05 * most
    assert rows[rises].signals["update_norm/direction"] == pytest.approx(rows[rises].signals["update_norm"])


# -- S4: the loss scale ----------------------------------------------------------------------------------------------


def overflowing(rank: int, world: int) -> Outcome:
    return run_job(Job(engine="zero1", precision="fp16", steps=3, scale_power=22), rank, world)


def test_s4_the_loss_scale_is_reported_on_every_attempt_those_skipped_for_an_overflow_included():
    (outcome,) = run_ranks(overflowing, 1)
    refused = [r for r in outcome.reports if not r.applied]
    assert len(refused) >= 2, "2**22 does not overflow here: this test shows nothing"
    assert outcome.reports[0].loss_scale == 2.0**22
    assert all(r.loss_scale > 0 for r in outcome.reports)
    assert len({r.loss_scale for r in refused}) >= 2  # each with the scale that it was tried at
    assert outcome.reports[-1].loss_scale == outcome.loss_scale
    applied = [r for r in outcome.reports if r.applied]
    assert [("update_norm" in r.signals) for r in applied] == [False, True, True]
    assert math.isfinite(applied[0].signals["grad_norm/blocks.1"])


# -- BR-04: gradients that were left ---------------------------------------------------------------------------------


def uncleared(rank: int, world: int, where: tuple[int, ...]) -> tuple[str, int]:
    model, optimizer, scheduler = build(world)
    guard, _ = guarded(model, optimizer, scheduler, batches(8, rank))
    if rank in where:
        guard.engine._clear_gradients = lambda: None  # what a wrapper that forgets them amounts to
    with pytest.raises(GradientsLeft) as caught:
        run_loop(guard, model)
    guard.close()
    return str(caught.value), guard.applied


@pytest.mark.parametrize("where", [(0, 1), (1,)], ids=["all ranks", "rank 1"])
def test_br04_gradients_that_were_not_cleared_are_reported_by_step_two_with_the_rank(where: tuple[int, ...]):
    named = ", ".join(map(str, where))
    for message, applied in run_pooled(uncleared, 2, where):
        assert message.startswith(f"on rank {named} gradients")
        assert "when step 2 began" in message
        assert applied == 1


def test_br04_a_backward_that_the_guard_does_not_know_of_is_found():
    model, optimizer, scheduler = build(1)
    guard, _ = guarded(model, optimizer, scheduler, batches(8, 0))
    with pytest.raises(GradientsLeft, match="backward that the guard does not know of"):
        for batch in guard.batches():
            total, tokens = loss_sum(model, batch)
            guard.backward(total / tokens)
            if guard.step() and guard.applied == 1:
                loss_sum(model, batch)[0].backward()
    assert guard.applied == 1


# -- BR-47: a monitor that does not see ------------------------------------------------------------------------------


def cleared(rank: int, world: int) -> tuple[str, int]:
    model, optimizer, scheduler = build(world)
    guard, _ = guarded(model, optimizer, scheduler, batches(8, rank))
    with pytest.raises(MonitorBlind) as caught:
        for batch in guard.batches():
            total, tokens = loss_sum(model, batch)
            guard.backward(total / tokens)
            optimizer.zero_grad()
            guard.step()
    guard.close()
    return str(caught.value), guard.applied


def test_br47_gradients_cleared_before_the_gate_are_an_error_by_step_two():
    """The hook after zero_grad: buckets went by, and nothing is left of them."""
    for message, applied in run_pooled(cleared, 2):
        assert "zero_grad" in message
        assert applied == 1


def test_br47_an_output_that_never_comes_by_is_told_once_and_not_taken_for_a_zero():
    model, optimizer, scheduler = build(1)
    guard, ear = guarded(model, optimizer, scheduler, batches(6, 0))
    for batch in guard.batches():
        logits = model.forward(batch["x"])  # past the hook
        guard.backward(nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
        guard.step()
    told = [fields["message"] for kind, fields in ear.events if kind == "warning"]
    assert guard.applied == 6
    assert len(told) == 1
    assert "no output of the model has reached the guard on rank 0" in told[0]
    assert not any("logit_max" in r.signals for r in ear.reports)


def test_br47_a_monitor_that_sees_says_nothing():
    model, optimizer, scheduler = build(1)
    guard, ear = guarded(model, optimizer, scheduler, batches(6, 0))
    run_loop(guard, model)
    assert guard.applied == 6
    assert not [kind for kind, _ in ear.events if kind == "warning"]


# -- BR-42: who is waited for ----------------------------------------------------------------------------------------

NAP = 0.15


def slow_hook(state: Any, bucket: Any) -> Any:
    time.sleep(NAP)
    return allreduce_hook(None, bucket)


def waits(rank: int, world: int, how: str) -> tuple[np.ndarray, np.ndarray]:
    """Smallest compute_s and median collective_s of every rank over the steps after the first: a busy machine lengthens
    the one, and shortens the other of those who wait."""
    torch.manual_seed(0)
    toy = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    model = DistributedDataParallel(toy)
    hook = (None, slow_hook if (how, rank) == ("communication", 1) else lambda _, bucket: allreduce_hook(None, bucket))
    engine = DDPEngine(model, torch.optim.SGD(toy.parameters(), lr=1e-3), comm_hook=hook)
    data = [torch.randn(4, 16) for _ in range(5)]
    guard = resilient.Guard(engine, data=data, policy="observe", progress=False, tokens=lambda batch: 4.0)
    tables = kept_tables(guard)
    for x in guard.batches():
        out = guard.engine(x)
        if (how, rank) == ("compute", 1):
            out.register_hook(lambda grad: time.sleep(NAP))
        guard.backward(out.square().mean())
        guard.step()
    guard.close()
    return compute_and_wait(tables)


def kept_tables(guard: resilient.Guard) -> list[StepTable]:
    """The list that every table of the guard's will be in."""
    tables: list[StepTable] = []
    table = guard._coordinator.exchange.table

    def kept(record: StepRecord) -> StepTable:
        tables.append(table(record))
        return tables[-1]

    guard._coordinator.exchange.table = kept  # type: ignore[method-assign]
    return tables


def compute_and_wait(tables: list[StepTable]) -> tuple[np.ndarray, np.ndarray]:
    """Over the steps after the first: smallest compute_s and median collective_s of every rank."""
    steps = [t for t in tables if t.column("kind")[0] == Kind.STEP][1:]
    assert len(steps) >= 4
    per_rank = [t.observation().per_rank for t in steps]
    compute, wait = (np.array([r[name] for r in per_rank]) for name in ("compute_s", "collective_s"))
    return compute.min(axis=0), np.median(wait, axis=0)


def sharded_waits(rank: int, world: int, engine: str) -> tuple[np.ndarray, np.ndarray]:
    """As `waits`, of a rank that is slow before its forward, where sharded parameters are gathered."""
    torch.manual_seed(0)
    made = build_engine(
        engine_config(engine),
        nn.Sequential(nn.Linear(16, 8192), nn.Tanh(), nn.Linear(8192, 16)),  # ZeRO 3 keeps whole what is below 1e5
        make_optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3),
        make_scheduler=None,
        clip=1.0,
        accumulation=1,
        micro_batch=4,
        device=torch.device("cpu"),
    )
    data = [torch.randn(4, 16) for _ in range(6)]
    guard = resilient.Guard(made, data=data, policy="observe", progress=False, tokens=lambda batch: 4.0)
    tables = kept_tables(guard)
    for x in guard.batches():
        if rank == 1:
            time.sleep(NAP)
        guard.backward(guard.engine(x).square().mean())
        guard.step()
    guard.close()
    return compute_and_wait(tables)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_br42_a_wait_for_gathered_parameters_is_no_computing(engine: str):
    compute, wait = run_ranks(sharded_waits, 2, engine)[0]
    assert compute[1] > 0.9 * NAP > 0.6 * NAP > compute[0], (compute, wait)
    assert wait[0] > 0.9 * NAP - 0.01 > wait[1], (compute, wait)


@pytest.mark.parametrize("how", ["compute", "communication", "none"])
def test_br42_the_culprit_waits_least_and_only_a_slow_computation_computes_longest(how: str):
    compute, wait = run_pooled(waits, 4, how)[0]
    others = np.array([0, 2, 3])
    slow, long = 0.9 * NAP, 0.6 * NAP
    assert wait[1] < long
    assert (wait[others] > slow - 0.01).all() == (how != "none"), (compute, wait)
    assert (compute[1] > slow) == (how == "compute"), (compute, wait)
    assert (compute[others] < long).all(), (compute, wait)
