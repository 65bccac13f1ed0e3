"""Issue 4, must reach: after three interruptions in a row inside one epoch, one in each tier, the run is bit for bit the one
that was never disturbed; with and without workers in the loader. A control that forgets a stream is not."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.coordinator import state as coordinator_state
from resilient.errors import Preempted
from tests.ranks import run_ranks
from tests.scenarios.harness import ROLL_BACK_AT_ONCE, Job, Outcome, run_job
from tests.scenarios.test_tiers import at_the_end_forget, resumed_from

STEPS = 12


def leave_at(step: int) -> Any:
    def tweak(guard: Any, engine: Any) -> None:
        stepped = guard.step

        def step_once() -> bool:
            ended = stepped()
            if ended and guard.applied == step and guard.rank == 1:
                guard.preempt()
            return ended

        guard.step = step_once

    return tweak


def chained(rank: int, world: int, engine: str, precision: str, workers: int, folder: str) -> list[str]:
    """What differs from the undisturbed run, and what did not happen as planned."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # a loader's workers are children
    job = Job(
        engine=engine,
        precision=precision,
        steps=STEPS,
        accumulation=2,
        workers=workers,
        policy=ROLL_BACK_AT_ONCE,
        snapshot=SnapshotConfig(every=2, keep=3, trust_after=0),
        checkpoint=CheckpointConfig(every=100, peer=True, peer_folder=f"{folder}/memory"),
    )
    twin = run_job(job, rank, world)
    inside = job.with_(run_dir=f"{folder}/run")
    hurt = {"kind": "nan", "step": 4, "rank": 1, "place": "loss"}
    parts = [run_job(inside.with_(fault=hurt), rank, world, tweak=leave_at(5), raises=Preempted)]  # memory; leaves at 6
    parts.append(
        run_job(inside.with_(steps=9), rank, world, tweak=at_the_end_forget)
    )  # from disk; the copy of 8 is left
    parts.append(run_job(inside, rank, world))  # from the copies in memory
    problems = []
    if [(i.action, i.target_step) for i in parts[0].incidents] != [("rollback", 2)]:
        problems.append(f"no rollback from memory: {parts[0].incidents}")
    for part, step, tier in ((parts[1], 6, "disk"), (parts[2], 8, "peer")):
        came = resumed_from(part)
        if f"step {step} " not in came or tier not in came:
            said = [fields for before in parts for kind, fields in before.events if kind in ("warning", "checkpoint")]
            problems.append(f"not from step {step} in {tier}: {came or part.error}; {parts[0].error}; {said}")
    return problems + different(twin, parts[-1], [report for part in parts for report in part.reports])


def different(twin: Outcome, end: Outcome, reports: list[Any]) -> list[str]:
    problems = [] if end.digest == twin.digest else [p for p in twin.leaves if twin.leaves[p] != end.leaves.get(p)]
    problems = [p for p in problems if not any(word in p for word in ("skipped", "micro_steps"))]
    if end.rng != twin.rng:
        problems.append("random streams")
    losses = {report.step: report.loss for report in reports if report.applied}
    if losses != twin.losses():
        problems.append(f"losses: {losses} against {twin.losses()}")
    return problems


CASES = [
    ("ddp", "fp32", 0),
    ("ddp", "bf16", 2),
    ("fsdp2", "fp32", 2),
    ("fsdp2", "bf16", 0),
    ("zero0", "fp32", 0),
    ("zero0", "bf16", 2),
    ("zero1", "fp32", 2),
    ("zero1", "bf16", 0),
    ("zero1", "fp16", 0),
    ("zero2", "fp32", 0),
    ("zero2", "bf16", 2),
    ("zero2", "fp16", 2),
    ("zero3", "fp32", 2),
    ("zero3", "bf16", 0),
    ("hsdp", "fp32", 0),
    ("hsdp", "bf16", 2),
]
WORLDS = {"hsdp": 4}  # two replicas of two shards
QUICK = {("ddp", "fp32", 0), ("zero2", "bf16", 2)}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES], ids=str
)
def test_three_in_a_row_leave_no_trace(tmp_path: Path, case: tuple[str, str, int]):
    for rank, problems in enumerate(run_ranks(chained, WORLDS.get(case[0], 2), *case, str(tmp_path), timeout=230)):
        assert not problems, f"rank {rank}: {problems}"


def forgetful(rank: int, world: int, folder: str) -> list[str]:
    real, proof = coordinator_state.restore_rng, coordinator_state.StateKeeper._differences
    coordinator_state.restore_rng = lambda *args: None  # type: ignore[assignment]
    coordinator_state.StateKeeper._differences = lambda *args: []  # type: ignore[method-assign]
    try:
        return chained(rank, world, "ddp", "fp32", 0, folder)
    finally:
        coordinator_state.restore_rng, coordinator_state.StateKeeper._differences = real, proof  # type: ignore[method-assign]


@pytest.mark.timeout(240)
def test_a_control_that_forgets_the_random_streams_is_caught(tmp_path: Path):
    for problems in run_ranks(forgetful, 2, str(tmp_path), timeout=230):
        assert "random streams" in problems and any("losses" in problem for problem in problems), problems
