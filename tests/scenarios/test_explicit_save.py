"""A save that the loop asks for, called by some ranks only: `if rank == 0: save(...)`.

With an engine's own `save_checkpoint` that hangs all ranks and names nobody. Here a request by one rank is carried out by all,
and a save that is waited for names the ranks that did not come, in less than 10 s; training goes on as if nothing had been.
"""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from resilient.checkpoint.config import CheckpointConfig
from resilient.coordinator.config import GuardConfig
from resilient.errors import CheckpointError, ConfigError, ExchangeFailed, ExitCode
from resilient.policies import PolicyConfig
from resilient.recovery.verdict import read_verdict
from tests.ranks import run_ranks
from tests.scenarios.harness import Job, Outcome, run_job, same_training
from tests.scenarios.test_own_loop import batches, build, guarded, run_loop

pytestmark = pytest.mark.timeout(180)

OFF = PolicyConfig(name="off", mode="off")


@dataclass
class Calls:
    """What the calls of one rank came to. seconds: of each."""

    answers: list[bool] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def training(
    rank: int, world: int, job: Job, call: str, at: dict[int, int], within: bool = False
) -> tuple[Outcome, Calls]:
    """at: by rank, the step after which it makes its `call`. within: before that step ends, instead.

    Besides the guard's own calls there is `unmet`: a save that ranks go into without asking who else is there."""
    calls = Calls()

    def tweak(guard: Any, engine: Any) -> None:
        stepped = guard.step

        def now() -> None:
            began = time.monotonic()
            try:
                calls.answers.append(getattr(guard, call)())
            except CheckpointError as error:
                calls.errors.append(str(error))
            calls.seconds.append(time.monotonic() - began)

        def step() -> bool:
            if within and guard.step_index == at.get(rank):
                now()
            ended = stepped()
            if not within and ended and guard.applied == at.get(rank):
                now()
            return ended

        guard.step = step
        guard.unmet = lambda: guard._coordinator._save_if_due(applied=False, asked=True, snapshot=None)

    return run_job(job, rank, world, tweak=tweak), calls


def job_in(folder: Path, name: str, engine: str = "ddp", timeout_s: float = 30.0, **changes: Any) -> Job:
    return Job(
        engine=engine,
        steps=8,
        run_dir=str(folder / name),
        checkpoint=CheckpointConfig(every=100),
        guard=GuardConfig(exchange_timeout_s=timeout_s),
        **changes,
    )


def saved(outcome: Outcome) -> list[int]:
    return [fields["step"] for kind, fields in outcome.events if kind == "checkpoint"]


def unharmed(outcome: Outcome, twin: Outcome) -> bool:
    broken = [fields for kind, fields in outcome.events if kind == "guard_failed"]
    return not broken and outcome.error == "" and outcome.applied == 8 and same_training(outcome, twin) == []


# -- a request ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [pytest.param("ddp", marks=pytest.mark.slow), "zero1"])
def test_deepspeeds_hole_only_some_ranks_ask_for_a_checkpoint_and_all_save(tmp_path: Path, engine: str):
    """Rank 0 alone, and all but one: nobody waits for a rank that did not ask, and all go on training."""
    twins = run_ranks(training, 3, job_in(tmp_path, "twin", engine), "checkpoint", {})
    assert all(saved(twin) == [0] for twin, _ in twins), "the control: nothing is saved that nobody asks for"
    for name, ranks in (("one", (0,)), ("all-but-one", (0, 2))):
        run = run_ranks(training, 3, job_in(tmp_path, name, engine), "checkpoint", dict.fromkeys(ranks, 5), True)
        for (outcome, calls), (twin, _) in zip(run, twins, strict=True):
            assert saved(outcome) == [0, 5] and all(seconds < 0.5 for seconds in calls.seconds)
            assert unharmed(outcome, twin)


# -- a save that is waited for --------------------------------------------------------------------------------------------


def test_deepspeeds_hole_only_rank_0_saves_and_the_absent_ranks_are_named_in_less_than_10_s(tmp_path: Path):
    """With the patience of the default: the exchange itself would wait for two minutes."""
    patient = job_in(tmp_path, "alone", timeout_s=120.0)
    twins = run_ranks(training, 3, job_in(tmp_path, "twin"), "save", {})
    run = run_ranks(training, 3, patient, "save", {0: 5})
    (_, calls), *others = run
    assert calls.answers == [] and 7 < calls.seconds[0] < 10
    assert calls.errors == [
        "ranks 1, 2 did not come to guard.save() after step 5 within 8 s: call it on every rank at the same place"
    ]
    assert all(other.seconds == [] for _, other in others)
    for (outcome, _), (twin, _) in zip(run, twins, strict=True):
        assert saved(outcome) == [0] and unharmed(outcome, twin)


@pytest.mark.slow
def test_the_hole_is_there_without_the_meeting(tmp_path: Path):
    """The control: the same call, straight into the votes. It costs the whole patience, the guard, and tells no rank's name."""
    (outcome, calls), _ = run_ranks(training, 2, job_in(tmp_path, "run", timeout_s=5.0), "unmet", {0: 5})
    broken = [fields["message"] for kind, fields in outcome.events if kind == "guard_failed"]
    assert calls.seconds[0] > 4 and len(broken) == 1 and "rank 1" not in broken[0]


@pytest.mark.parametrize(
    ("engine", "at"),
    [
        pytest.param("zero1", {0: 5}, marks=pytest.mark.slow),
        pytest.param("ddp", {0: 5, 2: 5}, marks=pytest.mark.slow),
        ("ddp", {0: 4, 1: 5, 2: 5}),
    ],
)
def test_deepspeeds_hole_every_way_in_which_ranks_miss_each_other(tmp_path: Path, engine: str, at: dict[int, int]):
    """One rank, all but one, and all of them at different steps. Who was there is told; who was not trains on."""
    twins = run_ranks(training, 3, job_in(tmp_path, "twin", engine), "save", {})
    run = run_ranks(training, 3, job_in(tmp_path, "apart", engine, timeout_s=3.0), "save", at)
    for rank, ((outcome, calls), (twin, _)) in enumerate(zip(run, twins, strict=True)):
        together = [other for other, step in at.items() if step == at.get(rank)]
        absent = ", ".join(str(r) for r in range(3) if r not in together)
        assert len(calls.errors) == len(calls.seconds) == (rank in at) and not calls.answers
        for error, seconds in zip(calls.errors, calls.seconds, strict=True):
            assert f"{absent} did not come to guard.save() after step {at[rank]} within 3 s" in error
            assert seconds < 5
        assert saved(outcome) == [0] and unharmed(outcome, twin)


@pytest.mark.parametrize("policy", [PolicyConfig(), OFF], ids=["default", "off"])
def test_a_save_that_all_ranks_come_to_is_on_disk_when_it_returns(tmp_path: Path, policy: PolicyConfig):
    job = job_in(tmp_path, "run", policy=policy)
    for outcome, calls in run_ranks(training, 2, job, "save", {0: 5, 1: 5}):
        assert calls.answers == [True] and not calls.errors
        assert saved(outcome) == [0, 5] and outcome.applied == 8
    assert [p.name for p in (tmp_path / "run/checkpoints").glob("step*5*")]


def test_a_save_in_the_middle_of_a_step_is_made_at_its_end(tmp_path: Path):
    for outcome, calls in run_ranks(training, 2, job_in(tmp_path, "run"), "save", {0: 5, 1: 5}, True):
        assert calls.answers == [False] and saved(outcome) == [0, 5]
        told = [fields["message"] for kind, fields in outcome.events if kind == "warning"]
        assert any("in the middle of step 5, which is saved at its end" in message for message in told), told


@pytest.mark.slow
def test_a_save_between_two_attempts_at_a_step_is_made_when_it_is_in(tmp_path: Path):
    """The loop saves where step() has returned True: after step 4, and again when step 5 is held for a NaN of rank 1."""
    job = job_in(tmp_path, "run", fault={"kind": "nan", "step": 5, "rank": 1, "place": "loss"})
    for outcome, calls in run_ranks(training, 2, job, "save", {0: 4, 1: 4}):
        assert calls.answers == [True, False] and not calls.errors
        assert [r.action for r in outcome.reports if not r.applied] == ["retry"]
        assert saved(outcome) == [0, 4, 5] and outcome.applied == 8 and outcome.error == ""


def test_a_save_without_a_place_or_before_the_start_is_refused(tmp_path: Path):
    model, optimizer, scheduler = build(1)
    guard, _ = guarded(model, optimizer, scheduler, batches(2, 0))
    with pytest.raises(ConfigError, match="no run_dir"):
        guard.save()
    guard, _ = guarded(model, optimizer, scheduler, batches(2, 0), run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="nothing has begun"):
        guard.save()
    run_loop(guard, model)
    assert guard.save()
    guard.close()


def test_a_request_that_cannot_be_shared_is_not_dropped_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for options, why in (({}, "no run_dir"), ({"policy": "off", "run_dir": tmp_path / "run"}, "call guard.save()")):
        model, optimizer, scheduler = build(1)
        guard, ear = guarded(model, optimizer, scheduler, batches(2, 0), **options)
        run_loop(guard, model)
        guard.checkpoint()
        guard.checkpoint()
        guard.close()
        assert capsys.readouterr().err.count(why) == 1
        assert [why in fields["message"] for kind, fields in ear.events if kind == "warning"] == [True]


# -- the last one ---------------------------------------------------------------------------------------------------------


def ending(rank: int, world: int, folder: str, comes: bool) -> tuple[str, str, float, list[int]]:
    """Rank 0 calls guard.finish(); rank 1 only when rank 0 has been told that it is missing, or never.

    (rank 0's error, its stderr, seconds until it was told, the steps saved)"""
    store = dist.distributed_c10d._get_default_store()
    model, optimizer, scheduler = build(world)
    guard, ear = guarded(
        model,
        optimizer,
        scheduler,
        batches(5, rank),
        guard=GuardConfig(exchange_timeout_s=4.0 if not comes else 30.0),
        run_dir=f"{folder}/run",
        checkpoint=CheckpointConfig(every=100),
    )
    told = [0.0]
    heard = ear.event

    def event(kind: str, fields: Any) -> None:
        heard(kind, fields)
        if kind == "warning" and "guard.finish()" in fields["message"]:
            told.append(time.monotonic())
            store.set("missed", "1")

    ear.event = event  # type: ignore[method-assign]
    run_loop(guard, model)
    said, error = io.StringIO(), ""
    began = time.monotonic()
    with contextlib.redirect_stderr(said):
        if rank == 1:
            store.wait(["missed"])
        if rank == 0 or comes:
            try:
                guard.finish("done")
            except ExchangeFailed as problem:
                error = str(problem)
    store.set(f"over/{rank}", "1")
    store.wait([f"over/{r}" for r in range(world)])
    guard.close()
    return error, said.getvalue(), told[-1] - began, [f["step"] for kind, f in ear.events if kind == "checkpoint"]


@pytest.mark.slow
def test_deepspeeds_hole_only_rank_0_finishes_and_the_absent_rank_is_named(tmp_path: Path):
    (error, said, seconds, steps), (_, silent, _, _) = run_ranks(ending, 2, str(tmp_path), False)
    assert "rank 1 did not come to guard.finish() after step 5 within 4 s: call it on every rank" in said
    assert "waits up to 4 s more" in said and silent == "" and seconds < 7
    assert error.startswith("the state of step 5 is not saved: rank 1 did not come") and steps == [0]
    verdict = read_verdict(tmp_path / "run")
    assert verdict is not None and verdict.code == ExitCode.RESTART, "not done: the last checkpoint is missing"


@pytest.mark.slow
def test_a_rank_that_is_only_late_for_the_end_is_named_and_waited_for(tmp_path: Path):
    """It may have evaluated or uploaded something alone: that is no reason to lose the last checkpoint."""
    (error, said, seconds, steps), (other, silent, _, _) = run_ranks(ending, 2, str(tmp_path), True)
    assert "rank 1 did not come" in said and 7 < seconds < 10
    assert error == other == silent == "" and steps == [0, 5]
    verdict = read_verdict(tmp_path / "run")
    assert verdict is not None and verdict.code == ExitCode.DONE
