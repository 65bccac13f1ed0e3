"""A run that exchanges sketches decides as one that exchanges tables, step by step, and ends bit for bit the same (C2, S19)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.bench.simulated import SimulatedRun
from resilient.coordinator.config import GuardConfig
from resilient.coordinator.judge import Judge
from resilient.detectors import CrossRankOutlier, DetectorConfig, build_monitor
from resilient.integrations.guard import Guard
from resilient.policies import Ladder, PolicyConfig
from resilient.signals import Decision, StepSketch, StepTable
from resilient.signals.history import RankHistory
from resilient.signals.sketch import read
from resilient.signals.sketch_pack import SketchLayout, SketchState, pack
from tests.ranks import run_pooled
from tests.scenarios.harness import ROLL_BACK_AT_ONCE, Job, Outcome, run_job, same_training

AT, STEPS = 18, 22
GUARD = GuardConfig(exchange_timeout_s=30.0, digests_every=4, link_probes=0)
JOB = Job(steps=STEPS, micro_batch=4, guard=GUARD)
FAULTS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "spike": {"kind": "rank_grad_spike", "step": AT, "rank": 1, "factor": 1000.0},
    "batch": {"kind": "bad_sample", "step": AT, "rank": 1, "loss": "odd"},
    "nan": {"kind": "nan", "step": AT, "rank": 1},
    "wire": {"kind": "bad_reduction", "step": AT, "rank": 1, "how": "finite", "relative": 0.1},
    "back": {"kind": "bad_sample", "step": AT, "rank": 1, "loss": "normal"},
    "drift": {"kind": "replica_drift", "step": AT, "rank": 1},
}


def both(rank: int, world: int, names: list[str]) -> dict[str, tuple[Outcome, Outcome]]:
    def run(job: Job, mode: Literal["table", "sketch"]) -> Outcome:
        def see(guard: Guard, engine: Any) -> None:
            assert (guard._coordinator.exchange.sketch_state is not None) == (mode == "sketch")

        return run_job(job.with_(guard=replace(GUARD, exchange_mode=mode)), rank, world, tweak=see)

    found = {}
    for name in names:
        job = JOB.with_(fault=FAULTS[name])
        if name == "back":
            job = job.with_(policy=ROLL_BACK_AT_ONCE)
        found[name] = run(job, "table"), run(job, "sketch")
    return found


def decided(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [(r.step, r.attempt, r.applied, r.action) for r in outcome.reports]


def told(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [(i.step, i.cause, i.ranks, i.place, i.action, i.onset_step, i.target_step) for i in outcome.incidents]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("world", "names"),
    [(2, list(FAULTS)), pytest.param(4, ["spike", "wire", "back"], marks=pytest.mark.slow)],
    ids=["2 ranks", "4 ranks"],
)
def test_c2_both_modes_decide_the_same_and_end_bit_for_bit_the_same(world: int, names: list[str]):
    for outcomes in run_pooled(both, world, names, timeout=230):
        for name, (table, sketch) in outcomes.items():
            assert decided(sketch) == decided(table), name
            assert told(sketch) == told(table), name
            assert bool(table.incidents) == (name != "none"), name
            if name in ("back", "drift"):
                assert "rollback" in [i.action for i in sketch.incidents], name
            assert same_training(sketch, table) == [], name
            counted = [{k: v for k, v in o.counters.items() if k != "policy"} for o in (table, sketch)]
            assert counted[0] == counted[1], name


class Simulated:
    """A judge of tables and one of sketches that know the same ranks equally well, without a history of the global signals."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.usual = {"local_grad_norm": self.rng.normal(0.0, 1.0, ranks), "loss": self.rng.normal(0.7, 0.02, ranks)}
        self.state = SketchState(range(ranks))
        self.table, self.sketch = (Judge(build_monitor(DetectorConfig()), Ladder(PolicyConfig())) for _ in range(2))
        for detector in self.table.monitor.detectors:
            if isinstance(detector, CrossRankOutlier):
                name, history = detector.config.signal, self.state.histories[detector.config.signal]
                past = {
                    "offset": self.usual[name],
                    "level": self.usual[name],
                    "scale": np.full(ranks, 0.6 * history.floor),
                }
                rest = {"points": np.full(ranks, 128.0), "away": np.zeros(ranks), "moved": np.zeros(ranks)}
                c = detector.config
                constants = (c.floor, c.history, c.min_history, c.accept_after)
                detector._history = self.state.histories[name] = RankHistory.from_state(past | rest, *constants)

    def step(self, fault: str, rank: int, common: float) -> tuple[Decision, Decision]:
        run = SimulatedRun(len(self.state.ranks), cells=0, seed=1)
        table = run.table(9)
        for name, usual in self.usual.items():
            noise = 0.03 * np.clip(self.rng.standard_normal(len(usual)), -3.0, 3.0)
            table.column(name)[:] = np.exp(usual + noise + (common if name == "local_grad_norm" else 0.0))
        table.column("reduced_sq_share")[:] = 1.0 / table.world_size
        if fault in ("compute", "batch"):
            table.column("local_grad_norm")[rank] *= 500.0
        if fault == "batch":
            table.column("loss")[rank] *= 20.0  # its score is clearly the larger one
        if fault == "unfed":
            table.column("tokens")[rank] = 0.0
        if fault in ("nan", "unfed", "nan on most"):
            hit = slice(0, 1 + 2 * table.world_size // 3) if fault == "nan on most" else slice(rank, rank + 1)
            table.column("nonfinite_forward")[hit] = 1.0
            table.column("loss")[hit] = table.column("local_grad_norm")[hit] = math.nan
        if fault == "reduction":
            table.column("reduced_sq_share")[:] = math.inf
        layout = SketchLayout()
        own = StepTable(table.rows[rank : rank + 1].copy())
        summary = read(layout, pack(layout, table, self.state), self.state.centre)
        return tuple(  # type: ignore[return-value]
            judge.conclude(*judge.see(brought), dynamic_scale=False, targets=lambda onset: 1).decision
            for judge, brought in ((self.table, table), (self.sketch, StepSketch(summary, own, SketchState([rank]))))
        )


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.one_of(st.integers(3, 64), st.integers(65, 4000), st.sampled_from([16_384, 100_000])),
    seed=st.integers(0, 2**31),
    fault=st.sampled_from(["none", "compute", "batch", "nan", "unfed", "nan on most", "reduction"]),
    common=st.floats(-0.5, 2.0),
    data=st.data(),
)
def test_c2_both_modes_take_the_same_decision_at_any_world_size(
    ranks: int, seed: int, fault: str, common: float, data: st.DataObject
):
    rank = data.draw(st.integers(0, ranks - 1))
    by_table, by_sketch = Simulated(ranks, seed).step(fault, rank, common)
    assert (by_table.action == "apply") == (fault == "none")
    told = [(d.action, d.cause, d.place, d.onset_step, d.skip_data, d.incident) for d in (by_table, by_sketch)]
    assert told[0] == told[1]
    if fault not in ("nan on most", "reduction") or ranks <= 16:
        assert by_sketch.ranks == by_table.ranks
    if fault in ("compute", "batch", "nan", "unfed"):
        assert by_sketch.ranks == (rank,)
