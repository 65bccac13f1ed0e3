"""T6, T12, BR-44: a NaN on one rank is refused on all ranks before the optimizer, with rank and place named. Where it was
a passing fault of that rank's machine, the window runs again, and training equals the undisturbed twin bit for bit (C2)."""

from __future__ import annotations

import pytest

from tests.ranks import run_pooled, run_ranks
from tests.scenarios.harness import Job, Outcome, run_job, same_training

PLACES = ("forward", "loss", "backward")


def in_turn(rank: int, world: int, kinds: list[tuple[str, str]]) -> list[dict[str, Outcome]]:
    return [at_each_place(rank, world, *kind) for kind in kinds]


def at_each_place(rank: int, world: int, engine: str, precision: str) -> dict[str, Outcome]:
    job = Job(engine=engine, precision=precision, steps=9)
    clean = {"clean": run_job(job, rank, world)}
    return clean | {
        place: run_job(job.with_(fault={"kind": "nan", "step": 5, "rank": 1, "place": place}), rank, world)
        for place in PLACES
    }


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "kinds",
    [
        [("ddp", "fp32"), ("fsdp2", "fp32")],
        [("zero1", "bf16"), ("zero3", "fp32")],
        pytest.param([("zero0", "fp32"), ("zero2", "fp32"), ("zero3", "bf16")], marks=pytest.mark.slow),
    ],
    ids=lambda kinds: "-".join(engine for engine, _ in kinds),
)
def test_refused_on_all_ranks_and_named(kinds: list[tuple[str, str]]):
    run = run_ranks if kinds[0][0].startswith("zero") else run_pooled
    both = run(in_turn, 2, kinds, timeout=230)
    for (engine, precision), results in zip(kinds, zip(*both, strict=True), strict=True):
        for rank, outcomes in enumerate(results):
            for place in PLACES:
                check_refused(outcomes[place], outcomes["clean"], place, f"{engine}/{precision} {place} on rank {rank}")
        assert [o.counters for o in results[0].values()] == [o.counters for o in results[1].values()]
        assert [o.losses() for o in results[0].values()] == [o.losses() for o in results[1].values()]


def check_refused(outcome: Outcome, clean: Outcome, place: str, where: str) -> None:
    (incident,) = outcome.incidents
    assert (incident.step, incident.ranks, incident.place, incident.action) == (5, (1,), place, "retry"), where
    # The same window was finite when it ran again, there and on the peer: no data is left out for it (C2).
    assert incident.cause == "compute" and any("passing fault" in line for line in incident.evidence), where
    assert outcome.finite, f"{where}: something became NaN"
    assert same_training(outcome, clean) == [], where
    refused = [r.attempt for r in outcome.reports if not r.applied]
    assert refused == [5], f"{where}: refused attempts {refused}, a later one is a false skip"
    assert outcome.applied == 9 and outcome.counters["attempts"] == 10
    assert outcome.counters["retried"] == 1 and outcome.engine_skipped == 0, where
    nonfinite = outcome.counters["nonfinite_loss"], outcome.counters["nonfinite_grad"]
    assert nonfinite == ((0, 1) if place == "backward" else (1, 0)), where


def overflow(rank: int, world: int) -> Outcome:
    # 2**24 overflows fp16 gradients at once; the real scaler has to come down by itself
    return run_job(Job(engine="zero1", precision="fp16", steps=5, scale_power=24), rank, world)


@pytest.mark.timeout(180)
def test_an_fp16_overflow_is_the_scalers_business_and_no_incident():
    for outcome in run_ranks(overflow, 2, timeout=170):
        refused = [r for r in outcome.reports if not r.applied]
        assert refused and all(r.action == "skip" for r in refused)
        assert outcome.loss_scale < 2**24 and outcome.incidents == []
        assert outcome.applied == 5 and outcome.finite and outcome.engine_skipped == len(refused)
