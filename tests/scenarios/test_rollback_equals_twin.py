"""C3, S16: after a rollback with the fault gone, the run equals an undisturbed twin bit for bit; a control must not.

Dropout is on, so a forgotten random stream shows at once.
"""

from __future__ import annotations

import pytest

from resilient.coordinator import state as coordinator_state
from resilient.errors import StopRequested
from tests.ranks import run_pooled, run_ranks
from tests.scenarios.harness import ROLL_BACK_AT_ONCE, Job, Outcome, run_job, same_training

CASES = [
    ("ddp", "fp32"),
    ("ddp", "bf16"),
    ("fsdp2", "fp32"),
    ("fsdp2", "bf16"),
    *((f"zero{stage}", precision) for stage in range(4) for precision in ("fp32", "bf16", "fp16")),
]


def rolled_back_against_twin(rank: int, world: int, engine: str, precision: str) -> list[str]:
    job = Job(engine=engine, precision=precision, steps=9, accumulation=2, policy=ROLL_BACK_AT_ONCE)
    twin = run_job(job, rank, world)
    # NaN before the optimizer at step 8: back to the snapshot of step 6, replayed without the fault
    hurt = run_job(job.with_(fault={"kind": "nan", "step": 8, "rank": 1, "place": "loss"}), rank, world)
    assert [(i.action, i.target_step) for i in hurt.incidents] == [("rollback", 6)], hurt.incidents
    assert hurt.counters["steps_lost"] == 1 and hurt.counters["attempts"] == 11
    return same_training(twin, hurt)


def by_engine(rank: int, world: int, cases: list[tuple[str, str]]) -> dict[str, list[str]]:
    return {
        f"{engine}/{precision}": rolled_back_against_twin(rank, world, engine, precision) for engine, precision in cases
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "family", ["ddp", "fsdp2", "zero3", *(pytest.param(f"zero{s}", marks=pytest.mark.slow) for s in (0, 1, 2))]
)
def test_bit_identical_to_the_twin(family: str):
    cases = [case for case in CASES if case[0] == family]
    run = run_ranks if family.startswith("zero") else run_pooled
    for rank, problems in enumerate(run(by_engine, 2, cases, timeout=280)):
        assert all(not p for p in problems.values()), f"rank {rank}: {problems}"


def without_rng(rank: int, world: int, prove: bool) -> tuple[list[str], Outcome]:
    job = Job(steps=9, policy=ROLL_BACK_AT_ONCE)
    twin = run_job(job, rank, world)
    real, proof = coordinator_state.restore_rng, coordinator_state.StateKeeper._differences
    coordinator_state.restore_rng = lambda *args: None  # type: ignore[assignment]
    if not prove:
        coordinator_state.StateKeeper._differences = lambda *args: []  # type: ignore[method-assign]
    try:
        fault = {"kind": "nan", "step": 8, "rank": 1, "place": "loss"}
        hurt = run_job(job.with_(fault=fault), rank, world, raises=StopRequested)
    finally:
        coordinator_state.restore_rng, coordinator_state.StateKeeper._differences = real, proof  # type: ignore[method-assign]
    return same_training(twin, hurt), hurt


@pytest.mark.timeout(120)
def test_the_control_that_omits_rng_differs():
    for problems, hurt in run_pooled(without_rng, 2, False):
        assert hurt.applied == 9 and not hurt.error
        assert any("losses differ from step" in p for p in problems), problems


@pytest.mark.timeout(120)
def test_the_proof_refuses_a_restore_without_rng_on_every_target():
    for _, hurt in run_pooled(without_rng, 2, True):
        assert "StopRequested" in hurt.error and "could be restored exactly" in hurt.error
        warnings = [f["message"] for kind, f in hurt.events if kind == "warning"]
        assert len(warnings) == 3 and all(
            "rng: digest" in w for w in warnings
        )  # steps 6, 3, 0: each tried, each refused
