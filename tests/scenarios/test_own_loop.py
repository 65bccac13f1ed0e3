"""`resilient.Guard` in a loop of one's own: contracts that hold for any model, loader and schedule.

BR-09, BR-10, BR-18, BR-19, BR-40, BR-41, BR-47, and what happens when the guard itself breaks.
"""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import resilient
import resilient.errors
from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.coordinator.config import GuardConfig
from resilient.errors import ConfigError, MonitorBlind, RankDisagreement, ScheduleMismatch
from tests.ranks import run_pooled
from tests.scenarios.harness import Ear, seed

pytestmark = pytest.mark.timeout(180)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def batches(n: int, rank: int, masked: tuple[int, ...] = ()) -> list[dict[str, torch.Tensor]]:
    """n micro-batches of this rank; the labels of those in `masked` carry no loss at all."""
    generator = torch.Generator().manual_seed(100 + rank)
    made = []
    for i in range(n):
        x = torch.randint(0, 16, (4, 6), generator=generator)
        labels = torch.randint(0, 16, (4, 6), generator=generator)
        made.append({"x": x, "labels": torch.full_like(labels, -100) if i in masked else labels, "id": torch.tensor(i)})
    return made


def build(world: int, decay: Any = None, groups: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    seed(7)
    toy = Toy()
    parameters: Any = toy.parameters()
    if groups:
        parameters = [{"params": toy.body.parameters(), "lr": 3e-2}, {"params": toy.head.parameters()}]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    model = DistributedDataParallel(toy) if world > 1 else toy
    return model, optimizer, LambdaLR(optimizer, decay or (lambda step: 1.0 - step / 100))


def loss_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    logits = model(batch["x"])
    total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
    return total, int((batch["labels"] != -100).sum())


def run_loop(guard: resilient.Guard, model: nn.Module, **limits: Any) -> list[int]:
    """Token-weighted training; returns the ids of the micro-batches delivered on this rank."""
    delivered = []
    for batch in guard.batches(**limits):
        delivered.append(int(batch["id"]))
        total, tokens = loss_sum(model, batch)
        weight = guard.world * guard.window_size / guard.window_tokens if guard.window_tokens else 1 / max(tokens, 1)
        guard.backward(total * weight, report=total.detach() / max(tokens, 1), tokens=tokens)
        guard.step()
    return delivered


def guarded(model: nn.Module, optimizer: Any, scheduler: Any, data: Any, **options: Any) -> tuple[resilient.Guard, Ear]:
    ear = Ear()
    options.setdefault("guard", GuardConfig(exchange_timeout_s=20.0))
    guard = resilient.Guard(
        model, optimizer, scheduler=scheduler, data=data, listeners=[ear], progress=False, **options
    )
    return guard, ear


# -- schedule and counters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 3, 4])
def test_br10_the_schedule_moves_once_per_optimizer_step(accumulation: int):
    model, optimizer, scheduler = build(1, lambda step: max(0.0, 1 - step / 10))
    guard, _ = guarded(model, optimizer, scheduler, batches(10 * accumulation, 0), accumulation=accumulation)
    lrs = []
    for batch in guard.batches():
        total, tokens = loss_sum(model, batch)
        guard.backward(total / tokens)
        if guard.step():
            lrs.append(scheduler.get_last_lr()[0])
    assert lrs == pytest.approx([1e-2 * (1 - s / 10) for s in range(1, 11)])
    assert guard.applied == scheduler.last_epoch == 10


def steps_the_scheduler_itself(rank: int, world: int) -> str:
    model, optimizer, scheduler = build(world)
    guard, _ = guarded(model, optimizer, scheduler, batches(40, rank), accumulation=4)
    with pytest.raises(ScheduleMismatch) as caught:
        for batch in guard.batches():
            total, tokens = loss_sum(model, batch)
            guard.backward(total / tokens)
            guard.step()
            if rank == 1:
                scheduler.step()  # the faulty wrapper: once per micro-batch, and on one rank only
    assert guard.applied == 0  # found in the first window, before the optimizer
    guard.close()
    return str(caught.value)


def test_br09_br10_a_scheduler_stepped_by_someone_else_stops_all_ranks_with_both_numbers():
    messages = run_pooled(steps_the_scheduler_itself, 2)
    assert all("on rank 1" in m and "expected" in m and "LR" in m for m in messages), messages


def test_br09_a_scheduler_that_was_not_given_is_refused():
    model, optimizer, _ = build(1)
    with pytest.raises(ConfigError, match=r"scheduler=\.\.\."):
        guarded(model, optimizer, None, batches(4, 0))


def resumed(rank: int, world: int, folder: str) -> tuple[list[int], list[int]]:
    """Save after every step k, start again from it with new objects, and compare with one uninterrupted run."""
    model, optimizer, scheduler = build(world, groups=True)
    guard, _ = guarded(model, optimizer, scheduler, batches(24, rank), accumulation=2)
    whole = run_loop(guard, model)
    reference = copy.deepcopy(model.module.state_dict())
    guard.close()
    pieces: list[int] = []
    for stop in (1, 2, 5, 6, 11, 12):
        model, optimizer, scheduler = build(world, groups=True)
        guard, _ = guarded(
            model,
            optimizer,
            scheduler,
            batches(24, rank),
            accumulation=2,
            run_dir=f"{folder}/run",
            checkpoint=CheckpointConfig(every=50),
        )
        seed(stop)  # whatever was drawn before a resume must not matter
        pieces += run_loop(guard, model, steps=stop)
        guard.finish("done")
        guard.close()
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, reference[name]), name
    return whole, pieces


def test_br11_br19_stopped_anywhere_the_next_batch_is_the_next_one(tmp_path):
    for whole, pieces in run_pooled(resumed, 2, str(tmp_path)):
        assert pieces == whole == list(range(24))


@pytest.mark.parametrize(("tail", "steps"), [("drop", 6), ("flush", 9), ("carry", 7)])
def test_br18_an_incomplete_window_at_the_end_of_an_epoch_has_a_declared_policy(tail: Any, steps: int):
    model, optimizer, scheduler = build(1)
    guard, _ = guarded(
        model, optimizer, scheduler, batches(10, 0), accumulation=4, guard=GuardConfig(on_epoch_tail=tail)
    )
    run_loop(guard, model, epochs=3)
    assert guard.applied == scheduler.last_epoch == guard.engine.counters().steps == steps


# -- ranks with different data ---------------------------------------------------------------------------------------


def masked_rank(rank: int, world: int) -> tuple[int, float]:
    model, optimizer, scheduler = build(world)
    data = batches(16, rank, masked=(8, 9, 13) if rank == 1 else ())  # all of step 5; the last micro-batch of step 7
    guard, ear = guarded(model, optimizer, scheduler, data, accumulation=2)
    worst = 0.0
    for batch in guard.batches():
        total, tokens = loss_sum(model, batch)
        guard.backward(
            total * (world * guard.window_size / guard.window_tokens),
            report=total.detach() / max(tokens, 1),
            tokens=tokens,
        )
        if guard.step_index == 5 and int(batch["id"]) == 9:
            twin = copy.deepcopy(model.module)
            twin.zero_grad()
            mine = [loss_sum(twin, b) for b in batches(16, 0)[8:10]]  # rank 0's tokens alone
            (sum(t for t, _ in mine) / sum(n for _, n in mine)).backward()
            for ours, theirs in zip(model.module.parameters(), twin.parameters(), strict=True):
                worst = max(worst, float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()))
        guard.step()
    assert not ear.incidents and all(r.applied for r in ear.reports)
    guard.close()
    return guard.applied, worst


def test_br40_a_rank_without_tokens_neither_hangs_nor_dilutes():
    for applied, worst in run_pooled(masked_rank, 2, timeout=60):
        assert applied == 8 and worst < 1e-5


def uneven(rank: int, world: int, mode: Any) -> tuple[int, int, int]:
    model, optimizer, scheduler = build(world)
    data = batches(8 if rank == 1 else 4, rank)
    guard, ear = guarded(
        model, optimizer, scheduler, data, guard=GuardConfig(exchange_timeout_s=20.0, on_uneven_data=mode)
    )
    delivered = run_loop(guard, model, epochs=2)
    guard.close()
    assert not ear.incidents
    return guard.applied, guard.engine.counters().steps, len(delivered)


@pytest.mark.parametrize(("mode", "steps"), [("drop_epoch_tail", 8), ("stop_all", 4), ("pad_with_zero_weight", 16)])
def test_br41_ranks_with_different_numbers_of_batches_end_together(mode: str, steps: int):
    assert run_pooled(uneven, 2, mode, timeout=60) == [(steps, steps, steps)] * 2


# -- the monitor and the guard itself ----------------------------------------------------------------------------------


def blind(rank: int, world: int, how: str) -> str:
    model, optimizer, scheduler = build(world)
    guard, _ = guarded(model, optimizer, scheduler, batches(8, rank), guard=GuardConfig(exchange_timeout_s=20.0))
    with pytest.raises(MonitorBlind) as caught:
        for batch in guard.batches():
            total, tokens = loss_sum(model, batch)
            if how == "zero_grad before the hook":
                total = total * 0.0 if rank == 1 else total
                guard.backward(total / tokens)
            elif how == "another model":
                other = Toy()
                guard.backward(loss_sum(other, batch)[0] / tokens)
            else:
                total.backward()
            guard.step()
    assert guard.applied <= 1
    guard.close()
    return str(caught.value)


@pytest.mark.parametrize("how", ["zero_grad before the hook", "another model", "never called"])
def test_br47_a_monitor_that_receives_nothing_is_an_error_by_step_two(how: str):
    messages = run_pooled(blind, 2, how, timeout=60)
    if how == "zero_grad before the hook":
        assert all("rank 1" in m for m in messages)
    assert len(set(messages)) == 1


def broken(rank: int, world: int, how: str, on_failure: Any, folder: str) -> dict[str, Any]:
    model, optimizer, scheduler = build(world)
    guard, ear = guarded(
        model,
        optimizer,
        scheduler,
        batches(10, rank),
        guard=GuardConfig(exchange_timeout_s=3.0, on_guard_failure=on_failure),
        run_dir=f"{folder}/run-{on_failure}" if how == "disk full" else None,
        checkpoint=CheckpointConfig(every=0),
        snapshot=SnapshotConfig(every=2, keep=2),
    )
    coordinator = guard._coordinator
    if how == "detector raises":
        seen = []

        def explode(observation: Any) -> list[Any]:
            seen.append(observation)
            if len(seen) == 5:
                raise ZeroDivisionError("a bug in a detector")
            return []

        coordinator.judge.monitor.detectors[0].observe = explode
    elif how == "measurement raises on one rank" and rank == 1:

        def odd(output: Any) -> None:
            if guard.step_index == 5:
                raise ZeroDivisionError("an output the probe cannot read")

        coordinator._measure._output._look_at = odd
    elif how == "exchange times out" and rank == 1:
        table = coordinator.exchange.table

        def lost(record: Any) -> Any:
            if record.step == 5:
                raise resilient.errors.GuardError("this rank does not come")
            return table(record)

        coordinator.exchange.table = lost
    elif how == "disk full" and rank == 0:
        guard.start()
        guard._recorder._steps.close()
        guard._recorder._steps = type(guard._recorder._steps)(__import__("pathlib").Path("/dev/full"))
    error, said = "", io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            run_loop(guard, model)
    except resilient.errors.GuardError as problem:
        error = str(problem)
    state = {k: v.clone() for k, v in model.module.state_dict().items()}
    failed = [f["message"] for kind, f in ear.events if kind == "guard_failed"]
    guard.close()
    return {
        "applied": guard.applied,
        "guarded": guard.guarded,
        "error": error,
        "failed": failed,
        "state": state,
        "said": said.getvalue(),
    }


def unguarded(rank: int, world: int) -> dict[str, torch.Tensor]:
    model, optimizer, scheduler = build(world)
    guard, _ = guarded(model, optimizer, scheduler, batches(10, rank), policy="off")
    run_loop(guard, model)
    guard.close()
    return {k: v.clone() for k, v in model.module.state_dict().items()}


HOW = ["detector raises", "measurement raises on one rank", "exchange times out", "disk full"]


@pytest.mark.parametrize("how", HOW)
def test_a_broken_guard_lets_the_job_finish_unguarded_and_says_so(how: str, tmp_path):
    results = run_pooled(broken, 2, how, "continue", str(tmp_path), timeout=90)
    reference = run_pooled(unguarded, 2, timeout=60)[0]
    for result in results:
        assert result["applied"] == 10 and not result["error"]
        assert result["guarded"] == (how == "disk full")  # without its journal the guard still guards
        if how != "disk full":
            assert result["failed"] and "the guard failed at step" in result["failed"][0]
        for name, value in result["state"].items():
            assert torch.allclose(value, reference[name], rtol=1e-5, atol=1e-7), name
    assert "WARNING" in results[0]["said"]


@pytest.mark.parametrize("how", HOW)
def test_a_broken_guard_stops_all_ranks_if_asked_to(how: str, tmp_path):
    for result in run_pooled(broken, 2, how, "stop", str(tmp_path), timeout=90):
        assert result["error"] and 4 <= result["applied"] + 4 < 14 and result["applied"] < 10


def disagreeing(rank: int, world: int) -> str:
    model, optimizer, scheduler = build(world)
    guard, _ = guarded(model, optimizer, scheduler, batches(10, rank))
    with pytest.raises(RankDisagreement) as caught:
        for batch in guard.batches():
            total, tokens = loss_sum(model, batch)
            guard.backward(total / tokens)
            guard.step()
            if rank == 1 and guard.applied == 4:
                guard._coordinator._digest += 1
    assert guard.applied == 4
    guard.close()
    return str(caught.value)


def test_ranks_that_decided_differently_stop_one_step_later():
    assert all("digests" in m for m in run_pooled(disagreeing, 2, timeout=60))


def test_policy_off_is_a_true_zero():
    model, optimizer, scheduler = build(1)
    guard, ear = guarded(model, optimizer, scheduler, batches(6, 0), policy="off")
    assert not model._forward_hooks and guard._coordinator._measure is None
    calls = []
    guard._coordinator.exchange.table = lambda record: calls.append(record)
    run_loop(guard, model)
    assert guard.applied == 6 and not calls and not ear.reports and not guard.guarded


def test_evaluation_is_not_looked_at():
    model, optimizer, scheduler = build(1)
    guard, ear = guarded(model, optimizer, scheduler, batches(6, 0))
    for batch in guard.batches():
        total, tokens = loss_sum(model, batch)
        guard.backward(total / tokens)
        with guard.evaluation():
            model(batch["x"]) * float("nan")
            model.head.weight.data.mul_(1e6)
            model(batch["x"])
            model.head.weight.data.div_(1e6)
        guard.step()
    assert max(r.signals["logit_max"] for r in ear.reports) < 100 and not ear.incidents


def test_a_copy_of_the_guarded_model_is_free_of_the_guard():
    model, optimizer, scheduler = build(1)
    guard, _ = guarded(model, optimizer, scheduler, batches(6, 0))
    average = copy.deepcopy(model)  # an EMA copy, say
    average(torch.zeros(1, 2, dtype=torch.long)).mul_(float("nan"))
    assert float(guard._coordinator._measure._output.peak) == 0.0
    guard.close()


def finishing(rank: int, world: int, folder: str) -> tuple[str, int, list[str]]:
    model, optimizer, scheduler = build(world)
    guard, ear = guarded(
        model,
        optimizer,
        scheduler,
        batches(10, rank),
        guard=GuardConfig(exchange_timeout_s=3.0),
        run_dir=f"{folder}/run",
        checkpoint=CheckpointConfig(every=4, blocking=True),
    )
    coordinator = guard._coordinator
    if rank == 1:
        vote = coordinator._kept.saver._store._vote

        def lost(ok: bool) -> bool:
            if guard.applied >= 4:
                raise resilient.errors.ExchangeFailed("this rank does not come to the vote")
            return vote(ok)

        coordinator._kept.saver._store._vote = lost
    with contextlib.redirect_stderr(io.StringIO()):
        run_loop(guard, model)
        summary = guard.finish("done")
    failed = [f["message"] for kind, f in ear.events if kind == "guard_failed"]
    guard.close()
    return str(summary.get("status", "done")), guard.applied, failed


def test_a_save_that_cannot_be_voted_on_neither_kills_the_job_nor_its_end(tmp_path):
    for status, applied, failed in run_pooled(finishing, 2, str(tmp_path), timeout=60):
        assert (status, applied) == ("done", 10)
        assert len(failed) == 1 and "step 5" in failed[0]
