"""`policy=off` is a true zero for every engine: no hook, no measurement, and the same training as with the guard watching."""

from __future__ import annotations

import pytest

from resilient.coordinator.measure import OutputTap
from resilient.policies import PolicyConfig
from tests.ranks import run_pooled, run_ranks
from tests.scenarios.harness import Job, Outcome, run_job


def off_and_observed(rank: int, world: int, engine: str) -> tuple[Outcome, Outcome, int]:
    job = Job(engine=engine, steps=6, accumulation=2)
    hooks = []

    def count(guard: object, wrapped: object) -> None:
        hooks.append(sum(isinstance(h, OutputTap) for h in wrapped.module._forward_hooks.values()))  # type: ignore[attr-defined]

    off = run_job(job.with_(policy=PolicyConfig(name="off", mode="off")), rank, world, tweak=count)
    observed = run_job(job.with_(policy=PolicyConfig(name="observe", mode="observe")), rank, world)
    return off, observed, hooks[0]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_off_trains_like_observe_and_measures_nothing(engine: str):
    run = run_ranks if engine.startswith("zero") else run_pooled
    for off, observed, hooks in run(off_and_observed, 2, engine, timeout=170):
        assert hooks == 0 and off.reports == [] and off.counters["attempts"] == off.applied == 6
        assert len(observed.reports) == 6
        differing = [p for p in off.leaves if off.leaves[p] != observed.leaves.get(p) and "clip" not in p]
        assert not differing, differing[:5]
        assert off.rng == observed.rng and off.sample_ids == observed.sample_ids
