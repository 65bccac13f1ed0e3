"""Bug reports of others, replayed against a guarded job: BR-01, BR-02, BR-05, BR-08, and the shuffle mismatch of S18."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from resilient.checkpoint.config import CheckpointConfig
from resilient.coordinator.config import GuardConfig
from resilient.detectors import DetectorConfig, build_detectors
from resilient.engines.deepspeed import DeepSpeedEngine
from resilient.errors import ConfigError, StopRequested
from resilient.policies import PolicyConfig, RetryConfig, RollbackConfig, SkipConfig
from tests.ranks import run_pooled, run_ranks
from tests.scenarios.harness import ROLL_BACK_AT_ONCE, Job, Outcome, run_job, same_training, seed
from tests.scenarios.test_own_loop import batches, build, guarded, loss_sum

pytestmark = pytest.mark.timeout(180)

SKIP_THEN_STOP = PolicyConfig(
    retry=RetryConfig(max_in_a_row=0), skip=SkipConfig(max_in_a_row=4, budget=8), rollback=RollbackConfig(budget=0)
)


# -- BR-01: every step refused, and nobody says so ------------------------------------------------------------------------


def poisoned_for_good(rank: int, world: int) -> dict[str, Any]:
    """From step 3 on the gradient of rank 1 is NaN behind a finite loss."""
    model, optimizer, scheduler = build(world)
    guard, ear = guarded(
        model,
        optimizer,
        scheduler,
        batches(40, rank),
        policy=SKIP_THEN_STOP,
        guard=GuardConfig(exchange_timeout_s=30.0, confirmations=0),  # a re-run would end it at once: it does not pass
    )
    weights: list[Any] = []
    lrs: list[float] = []
    error = ""
    try:
        for batch in guard.batches():
            total, tokens = loss_sum(model, batch)
            if rank == 1 and guard.step_index >= 3:
                total.register_hook(lambda grad: grad * math.nan)
            weights.append(copy.deepcopy(model.module.state_dict()))
            lrs.append(scheduler.get_last_lr()[0])
            guard.backward(total / tokens)
            guard.step()
    except StopRequested as stop:
        error = str(stop)
    end = model.module.state_dict()
    guard.close()
    return {
        "error": error,
        "applied": [r.applied for r in ear.reports],
        "incidents": [(i.attempt, i.place, i.ranks, i.action) for i in ear.incidents],
        "skipped": guard.counters.skipped,
        "steps": (guard.applied, scheduler.last_epoch),
        "lrs": lrs,
        "kept": all(torch.equal(end[name], value) for name, value in weights[2].items()),
    }


def test_br01_refused_steps_are_counted_told_and_ended_and_move_nothing() -> None:
    for seen in run_pooled(poisoned_for_good, 2):
        refused = len(seen["applied"]) - 2
        assert seen["applied"] == [True, True] + [False] * refused and 4 <= refused <= SKIP_THEN_STOP.skip.budget + 1
        assert seen["incidents"][0][:3] == (3, "backward", (1,))  # in the first bad attempt, by name
        assert seen["incidents"][-1][3] == "stop" and "step 3" in seen["error"]
        assert seen["skipped"] == refused
        assert seen["steps"] == (2, 2) and len(set(seen["lrs"][2:])) == 1
        assert seen["kept"]


# -- BR-02: no loss scale would help --------------------------------------------------------------------------------------


def log_of_zero(rank: int, world: int) -> Outcome:
    """fp16 under a dynamic loss scale; from step 5 on, the loss of rank 1 is not finite whatever the scale."""
    fault = {"kind": "nan", "step": 5, "rank": 1, "place": "forward", "repeat": True}
    job = Job(engine="zero1", precision="fp16", steps=12, fault=fault, policy=SKIP_THEN_STOP)
    return run_job(job, rank, world, raises=StopRequested)


def test_br02_a_nan_in_the_forward_is_no_matter_of_the_loss_scale() -> None:
    for seen in run_pooled(log_of_zero, 2, timeout=170):
        first = seen.incidents[0]
        assert (first.step, first.place, first.ranks) == (5, "forward", (1,))
        assert first.cause not in ("precision", "communication")
        assert seen.incidents[-1].action == "stop" and seen.error.startswith("StopRequested")
        assert len(seen.reports) <= 4 + 6  # long before a scale of 256 has been halved to its floor
        assert seen.loss_scale == seen.reports[0].loss_scale == 256.0
        assert seen.applied == 4 and seen.finite  # what would be saved is from before


# -- BR-05: the same figures, whatever the stage and the number format ----------------------------------------------------


def in_turn(rank: int, world: int) -> dict[str, Outcome]:
    plain = Job(steps=6)
    configs = {
        "ddp": plain,
        "again": plain,
        "fsdp2": plain.with_(engine="fsdp2"),
        "fsdp2 in bf16": plain.with_(engine="fsdp2", precision="bf16"),
    }
    return {name: run_job(job, rank, world) for name, job in configs.items()}


def first_difference(one: Outcome, other: Outcome, relative: float) -> int | None:
    """Step at which loss or gradient norm differ by more than that share."""
    for a, b in zip(one.reports, other.reports, strict=True):
        for x, y in ((a.loss, b.loss), (a.grad_norm, b.grad_norm)):
            if abs(x - y) > relative * abs(x):
                return a.step
    return None


def test_br05_runs_of_different_engines_can_be_laid_beside_each_other() -> None:
    """Our own statistics are sums in float64 of what the engine reduces: engines agree to rounding, precision shows at once."""
    seen = run_pooled(in_turn, 2)[0]
    assert first_difference(seen["ddp"], seen["again"], 0.0) is None
    assert first_difference(seen["ddp"], seen["fsdp2"], 1e-4) is None
    assert first_difference(seen["fsdp2"], seen["fsdp2 in bf16"], 1e-4) in (1, 2)
    assert (
        first_difference(seen["fsdp2"], seen["fsdp2 in bf16"], 0.2) is None
    )  # and it is precision, not another quantity


# -- BR-08: weights loaded without their masters ----------------------------------------------------------------------------


def weights_alone(rank: int, world: int, engine: str, precision: str, folder: str, proof: bool) -> dict[str, Outcome]:
    """Behind step 6, before anything is kept of it, other weights are put into the model of rank 1, and its masters know
    nothing of it. One run goes back (NaN in step 8), another ends there and starts again. proof: False leaves out what
    tells them apart."""
    real = DeepSpeedEngine.mismatched_weights
    if not proof:
        DeepSpeedEngine.mismatched_weights = lambda self: []  # type: ignore[method-assign]
    try:
        job = Job(
            engine=engine,
            precision=precision,
            steps=10,
            policy=ROLL_BACK_AT_ONCE,
            checkpoint=CheckpointConfig(every=3, blocking=True),
        )
        nan = {"kind": "nan", "step": 8, "rank": 0, "place": "loss"}
        again = job.with_(run_dir=f"{folder}/run")
        return {
            "twin": run_job(job, rank, world),
            "back": run_job(job.with_(fault=nan), rank, world, tweak=put_in_after_step_6),
            "ends": run_job(again.with_(steps=6), rank, world, tweak=put_in_after_step_6),
            "resumed": run_job(again, rank, world),
        }
    finally:
        DeepSpeedEngine.mismatched_weights = real  # type: ignore[method-assign]


def put_in_after_step_6(guard: Any, engine: Any) -> None:
    """Once: the replay of step 6 is left alone."""
    apply, due = engine.apply, [guard.rank == 1]

    def and_load(grad_norm: float | None, knobs: Any) -> None:
        apply(grad_norm, knobs)
        if guard.step_index == 6 and any(due):
            due.clear()
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    engine._stage.parameter(parameter).mul_(1.25)

    engine.apply = and_load


CASES = [
    ("zero2", "bf16"),
    pytest.param(("zero0", "bf16"), marks=pytest.mark.slow),
    pytest.param(("zero1", "fp16"), marks=pytest.mark.slow),
    pytest.param(("zero3", "bf16"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_br08_weights_that_are_not_the_cast_of_their_masters_are_never_gone_on_from(
    tmp_path: Path, case: tuple[str, str]
) -> None:
    for seen in run_ranks(weights_alone, 2, *case, str(tmp_path), True, timeout=170):
        assert [(i.action, i.target_step) for i in seen["back"].incidents] == [("rollback", 3)]
        assert [f["step"] for kind, f in seen["resumed"].events if kind == "resume"] == [3]
        for ended in ("back", "resumed"):
            told = [f["message"] for kind, f in seen[ended].events if kind == "warning"]
            told = [message for message in told if "the state of step 6 cannot be restored: rank 1: " in message]
            assert told and all("not the cast of their masters" in m and "elements" in m for m in told), told
        assert same_training(seen["twin"], seen["back"]) == []
        assert (seen["resumed"].digest, seen["resumed"].rng) == (seen["twin"].digest, seen["twin"].rng)


def test_br08_without_the_proof_the_run_goes_on_from_them(tmp_path: Path) -> None:
    """The control: the digests prove the copy alone, and step 7 is taken with weights that no optimizer has made."""
    for seen in run_ranks(weights_alone, 2, "zero2", "bf16", str(tmp_path), False, timeout=170):
        assert [(i.action, i.target_step) for i in seen["back"].incidents] == [("rollback", 6)]
        assert [f["step"] for kind, f in seen["resumed"].events if kind == "resume"] == [6]
        assert seen["resumed"].losses()[7] != seen["twin"].losses()[7]


def loaded_into_a_ready_engine(rank: int, world: int, engine: str, how: str) -> tuple[str, float, float]:
    """(error, loss of step 1, loss of step 3) of a start from weights that were saved without their optimizer's state.
    how: "alone", on rank 1 only "elsewhere", "with new masters"."""
    job = Job(engine=engine, precision="bf16", steps=3)

    def finetune(guard: Any, made: Any) -> None:
        torch.manual_seed(11)
        for p in made.module.parameters():
            start = torch.randn(p.shape).to(p.dtype) * 0.05
            with torch.no_grad():
                p.copy_(start if rank == 1 or how != "elsewhere" else p)
        if how == "with new masters":
            made.engine.optimizer.refresh_fp32_params()

    try:
        outcome = run_job(job, rank, world, tweak=finetune)
    except ConfigError as error:
        return str(error), math.nan, math.nan
    losses = outcome.losses()
    return outcome.error, losses[1], losses[3]


@pytest.mark.parametrize("engine", ["zero2", pytest.param("zero1", marks=pytest.mark.slow)])
def test_br08_weights_loaded_past_the_masters_are_no_start(engine: str) -> None:
    """The first step would write the masters' old weights back, and the second loss would jump."""
    for how, ranks in (("alone", (0, 1)), ("elsewhere", (1,))):
        errors = {error for error, _, _ in run_ranks(loaded_into_a_ready_engine, 2, engine, how)}
        assert len(errors) == 1, errors
        (error,) = errors
        assert "the first step would overwrite the weights: rank " in error and "refresh_fp32_params" in error
        assert any(f"rank {rank}: the weights of" in error for rank in ranks), error
    for error, first, third in run_ranks(loaded_into_a_ready_engine, 2, engine, "with new masters"):
        assert error == "" and abs(third - first) < 0.2 * first, (first, third)


# -- S18: a torch DataLoader whose sampler differs on one rank ------------------------------------------------------------


class Untold(DistributedSampler):  # type: ignore[type-arg]
    """Somebody's own sampler: it goes through a permutation of a seed that it shows to nobody."""

    def __init__(self, size: int, world: int, rank: int, secret: int) -> None:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(secret)).tolist()
        self._mine = order[rank::world]

    def __iter__(self) -> Any:
        return iter(self._mine)

    def __len__(self) -> int:
        return len(self._mine)

    def set_epoch(self, epoch: int) -> None: ...


def mismatched(rank: int, world: int, how: str) -> tuple[list[tuple[Any, ...]], list[str]]:
    """(verdicts as (step, cause, ranks), signals of the detectors' messages), rank 1 with another seed."""
    seed(7)
    size = 512
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randint(0, 16, (size, 6), generator=generator) for _ in range(2))
    other = 5 if rank == 1 and how != "clean" else 0
    sampler: Any = (
        Untold(size, world, rank, other)
        if how in ("untold", "clean")
        else DistributedSampler(range(size), world, rank, seed=other)
    )
    loader = DataLoader(TensorDataset(x, y), batch_size=4, sampler=sampler)
    model, optimizer, scheduler = build(world)
    guard, ear = guarded(
        model, optimizer, scheduler, loader, guard=GuardConfig(exchange_timeout_s=30.0, digests_every=4)
    )
    for xs, ys in guard.batches(epochs=1):
        total, tokens = loss_sum(model, {"x": xs, "labels": ys})
        guard.backward(total / tokens)
        guard.step()
    told = [(f["step"], f["cause"], tuple(f["ranks"])) for kind, f in ear.events if kind == "verdict"]
    guard.close()
    return told, [str(f) for kind, f in ear.events if kind == "verdict"]


_BY_SAMPLE = any(d.name == "samples" for d in build_detectors(DetectorConfig()))


@pytest.mark.parametrize(
    "how",
    [
        "told",
        pytest.param("untold", marks=pytest.mark.skipif(not _BY_SAMPLE, reason="SharedSamples is not configured")),
        "clean",
    ],
)
def test_s18_a_sampler_seed_that_differs_is_named_before_the_epoch_is_over(how: str) -> None:
    for told, words in run_pooled(mismatched, 2, how):
        if how == "clean":
            assert told == []
            continue
        step, cause, ranks = told[0]
        assert (cause, ranks) == ("data", (0, 1)), words
        assert step <= (1 if how == "told" else 48)  # of 64 steps an epoch has
