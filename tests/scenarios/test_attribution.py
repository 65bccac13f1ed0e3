"""C2, S18, S19, BR-03, BR-39: the right rank and cause at the step where it happens, and no data lost for a machine's or wire's
fault: after it has passed, training equals the undisturbed twin bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilient.coordinator.config import GuardConfig
from resilient.errors import Preempted, StopRequested
from resilient.integrations.guard import Guard
from tests.ranks import run_pooled, run_ranks
from tests.scenarios.harness import Job, Outcome, run_job, same_training

AT, STEPS = 18, 21
GUARD = GuardConfig(exchange_timeout_s=30.0, digests_every=4, link_probe_s=0.5)
JOB = Job(steps=STEPS, micro_batch=4, guard=GUARD)

SPIKE = {"kind": "rank_grad_spike", "step": AT, "rank": 1, "factor": 1000.0}
RESULT = {"kind": "bad_reduction", "step": AT, "rank": 1, "how": "finite", "relative": 0.1}
UNREDUCED = {"kind": "skipped_reduction", "step": AT, "rank": 1}
PASSING = {"compute": SPIKE, "communication": RESULT, "unreduced": UNREDUCED}


def passing(rank: int, world: int, kinds: list[tuple[str, str]]) -> list[dict[str, Outcome]]:
    found = []
    for engine, precision in kinds:
        job = JOB.with_(engine=engine, precision=precision)
        runs = {name: run_job(job.with_(fault=fault), rank, world) for name, fault in PASSING.items()}
        found.append({"twin": run_job(job, rank, world), **runs})
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "kinds",
    [
        [("ddp", "fp32"), ("ddp", "bf16")],
        pytest.param([("fsdp2", "fp32"), ("fsdp2", "bf16")], marks=pytest.mark.slow),
        [("zero3", "fp32")],
        pytest.param(
            [(f"zero{n}", p) for n, p in ((0, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16"))], marks=pytest.mark.slow
        ),
    ],
    ids=lambda kinds: kinds[0][0],
)
def test_c2_a_passing_fault_is_named_at_its_step_and_leaves_no_trace(kinds: list[tuple[str, str]]):
    run = run_ranks if kinds[0][0].startswith("zero") else run_pooled
    for results in run(passing, 2, kinds, timeout=230):
        for kind, outcomes in zip(kinds, results, strict=True):
            twin = outcomes.pop("twin")
            assert twin.incidents == [] and not [e for e in twin.events if e[0] in ("verdict", "alarm")], kind
            for name, outcome in outcomes.items():
                where = f"{kind} {name}"
                (incident,) = outcome.incidents
                cause = "compute" if name == "compute" else "communication"
                told = (incident.step, incident.cause, incident.ranks, incident.action)
                assert told == (AT, cause, (1,), "retry"), f"{where}: {incident}"
                assert outcome.counters["excluded"] == [] and outcome.counters["retried"] == 1, where
                assert same_training(outcome, twin) == [], where
            assert "row by row: rank 1, " in outcomes["communication"].incidents[0].evidence[0], kind


def follows(rank: int, world: int) -> dict[str, Outcome]:
    sample = {"kind": "bad_sample", "step": AT, "rank": 1}
    broken = SPIKE | {"window": None, "repeat": True}
    return {
        "odd": run_job(JOB.with_(fault=sample | {"loss": "odd"}), rank, world),
        "normal": run_job(JOB.with_(fault=sample | {"loss": "normal"}), rank, world),
        "broken": run_job(JOB.with_(fault=broken), rank, world, raises=StopRequested),
        "drift": run_job(JOB.with_(fault={"kind": "replica_drift", "step": AT, "rank": 1}, steps=24), rank, world),
        "twin": run_job(JOB.with_(steps=24), rank, world),
        "fed alike": run_job(
            JOB.with_(fault={"kind": "shuffle_mismatch", "step": 6, "rank": 1, "differs": "rank"}), rank, world
        ),
    }


@pytest.fixture(scope="module")
def both_ranks() -> list[dict[str, Outcome]]:
    return run_pooled(follows, 2, timeout=190)


@pytest.mark.timeout(200)
def test_c2_batch_and_machine_are_told_apart_by_a_run_on_a_peer(both_ranks: list[dict[str, Outcome]]):
    for outcomes in both_ranks:
        for loss in ("odd", "normal"):
            (incident,) = outcomes[loss].incidents
            assert (incident.step, incident.cause, incident.ranks, incident.action) == (AT, "data", (1,), "skip"), loss
            assert any("on rank 0 the same batch is off too" in line for line in incident.evidence), incident.evidence
        broken = outcomes["broken"]
        assert {i.cause for i in broken.incidents} == {"compute"} and {i.ranks for i in broken.incidents} == {(1,)}
        assert any("it is the machine of rank 1" in line for line in broken.incidents[0].evidence)
        assert [i.action for i in broken.incidents[:3]] == ["retry", "retry", "rollback"]
        assert broken.counters["excluded"] == [] and broken.finite and broken.counters["skipped"] == 4 + 1
        assert "StopRequested" in broken.error  # four rollbacks did not help: this rank's host has to go


@pytest.mark.timeout(200)
def test_br39_replicas_that_differ_are_found_and_gone_back_from(both_ranks: list[dict[str, Outcome]]):
    for outcomes in both_ranks:
        drift = outcomes["drift"]
        (incident,) = drift.incidents
        assert (incident.cause, incident.ranks, incident.action) == ("compute", (0, 1), "rollback")
        assert incident.step == 20 and incident.target_step is not None and incident.target_step < AT
        assert "parameters differ between replicas" in incident.evidence[0]
        assert same_training(drift, outcomes["twin"]) == []


@pytest.mark.timeout(200)
def test_s18_two_ranks_that_are_fed_the_same_are_named_before_it_shows_in_the_loss(
    both_ranks: list[dict[str, Outcome]],
):
    for outcomes in both_ranks:
        fed = outcomes["fed alike"]
        told = [fields for kind, fields in fed.events if kind == "verdict"]
        assert told and (told[0]["cause"], sorted(told[0]["ranks"])) == ("data", [0, 1]), fed.events
        assert told[0]["step"] < 12 and fed.incidents == []


def asking(ask: Callable[[Guard], None], at_attempt: int) -> Callable[[Guard, Any], None]:
    """A change of the guard: `ask(guard)` when that attempt begins."""

    def tweak(guard: Guard, engine: Any) -> None:
        begun = guard._coordinator._begin_window

        def begin() -> None:
            begun()
            if guard.counters.attempts + 1 == at_attempt:
                ask(guard)

        guard._coordinator._begin_window = begin  # type: ignore[method-assign]

    return tweak


def with_requests(rank: int, world: int, folder: str) -> dict[str, Outcome]:
    def leave(guard: Guard) -> None:
        if rank == 1:  # TERM reaches one rank only
            guard.preempt()

    sample = {"kind": "bad_sample", "step": AT, "rank": 1}
    jobs = {
        "retried": (JOB.with_(fault=SPIKE, steps=AT), asking(Guard.checkpoint, AT)),
        "retried, leaving": (JOB.with_(fault=SPIKE), asking(leave, AT)),
        "held, leaving": (JOB.with_(fault=sample), asking(leave, AT)),
    }
    return {
        name: run_job(job.with_(run_dir=f"{folder}/{i}"), rank, world, tweak=tweak, raises=Preempted)
        for i, (name, (job, tweak)) in enumerate(jobs.items())
    }


@pytest.mark.timeout(120)
def test_what_is_asked_for_at_a_retried_or_held_attempt_is_done_after_it(tmp_path: Path):
    """At the next quiescent point, on all ranks. The first retried step is the last one, too: the run ends with it in
    force."""
    for rank, outcomes in enumerate(run_pooled(with_requests, 2, str(tmp_path))):
        retried = outcomes["retried"]
        assert retried.applied == AT and retried.counters["retried"] == 1 and not retried.error
        assert [r.attempt for r in retried.reports] == list(range(1, AT + 2))
        assert [fields["step"] for kind, fields in retried.events if kind == "checkpoint"] == [AT], rank
        left = outcomes["retried, leaving"]
        assert left.error == f"Preempted: asked to leave at step {AT}; the state is saved"
        held = outcomes["held, leaving"]
        assert held.error == f"Preempted: asked to leave at step {AT - 1}; the state is saved"
        assert [i.action for i in held.incidents] == ["skip"] and held.counters["attempts"] == AT
