"""S10, S16, BR-51: whole rescues, by the default ladder. Poisoned data and an LR overshoot end near the undisturbed twin; the
unguarded run does not; a clean run sees no intervention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from resilient.checkpoint.config import SnapshotConfig
from resilient.policies import PolicyConfig, RollbackConfig
from resilient.train.model import ModelConfig
from resilient.train.optim import OptimConfig
from tests.ranks import run_pooled
from tests.scenarios.harness import Job, Outcome, run_job

STEPS = 60
POISON = {"kind": "poisoned_window", "step": 35, "window": 8}
OVERSHOOT = {"kind": "lr_overshoot", "step": 35, "window": 2, "factor": 100.0}
JOB = Job(
    steps=STEPS,
    schedule=STEPS,
    model=ModelConfig(name="tiny", width=32, layers=2, heads=2, hidden=64, dropout=0.1, probe_every=0),
    optim=OptimConfig(lr=1e-2, warmup_steps=5),
    seq_len=32,
    micro_batch=8,
    snapshot=SnapshotConfig(every=5, keep=4),
    policy=PolicyConfig(rollback=RollbackConfig(rewarm=8)),
)


def three(rank: int, world: int, fault: dict[str, Any]) -> tuple[Outcome, Outcome, Outcome]:
    twin = run_job(JOB, rank, world)
    watched = run_job(JOB.with_(fault=fault, policy=replace(JOB.policy, mode="observe")), rank, world)
    guarded = run_job(JOB.with_(fault=fault), rank, world)
    return twin, watched, guarded


def last(outcome: Outcome, n: int = 8) -> float:
    losses = outcome.losses()
    return sum(losses[s] for s in range(STEPS - n + 1, STEPS + 1)) / n


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [POISON, OVERSHOOT], ids=["poison", "overshoot"])
def test_rescued(fault: dict[str, Any]):
    for twin, watched, guarded in run_pooled(three, 2, fault):
        assert not twin.incidents and twin.counters["skipped"] == 0
        assert guarded.applied == STEPS and guarded.finite and not guarded.error
        gap, unguarded_gap = abs(last(guarded) / last(twin) - 1), abs(last(watched) / last(twin) - 1)
        assert gap < 0.05, f"guarded ends {gap:.1%} from the twin"
        assert not unguarded_gap < 2 * gap, f"unguarded {unguarded_gap:.1%}, guarded {gap:.1%}: nothing to rescue"
        rollbacks = [i for i in guarded.incidents if i.action == "rollback"]
        assert rollbacks and all(i.target_step is not None and i.target_step < (i.onset_step or 0) for i in rollbacks)
        assert math.isclose(guarded.lr, twin.lr)  # the cut is over and never leaked into the schedule


def fault_that_always_returns(rank: int, world: int) -> Outcome:
    from resilient.errors import StopRequested

    fault = {"kind": "nan", "step": 20, "rank": 1, "place": "backward", "repeat": True}
    policy = PolicyConfig(
        skip=replace(JOB.policy.skip, stretch=3, budget=9), rollback=RollbackConfig(budget=2, rewarm=4)
    )
    return run_job(JOB.with_(fault=fault, policy=policy), rank, world, raises=StopRequested)


@pytest.mark.timeout(120)
def test_br46_a_fault_that_always_returns_ends_after_exactly_the_budget():
    for outcome in run_pooled(fault_that_always_returns, 2):
        assert "StopRequested" in outcome.error and "budget is used up" in outcome.error
        actions = [i.action for i in outcome.incidents]
        refused = actions.count("retry") + actions.count("skip")
        assert actions.count("rollback") == 2 and refused == 9 and actions[-1] == "stop"
        counted = outcome.counters
        assert counted["attempts"] == counted["applied"] + counted["skipped"] + counted["retried"]
        assert outcome.finite and counted["retried"] == actions.count("retry") > 0
