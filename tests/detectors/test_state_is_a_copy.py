"""A snapshot keeps what `state_dict` gives as it is (Detector.state_dict: independent of later changes)."""

from __future__ import annotations

import copy

import pytest

from resilient.bench.simulated import SimulatedRun
from resilient.checkpoint.digest import state_digest
from resilient.coordinator.judge import Judge
from resilient.coordinator.state import _to_tensors
from resilient.detectors import DetectorConfig, build_monitor
from resilient.policies import Ladder, PolicyConfig
from resilient.signals.record import INDEX


def judged(judge: Judge, run: SimulatedRun, first: int, last: int) -> None:
    for step in range(first, last + 1):
        table = run.table(step)
        if step % 7 == 0:  # an outlier, a spike or a NaN: what is kept of these moves, too
            table.block[INDEX["local_grad_norm"], 1] *= 50.0
        if step % 11 == 0:
            table.block[INDEX["loss"]] *= 4.0
        if step % 13 == 0:
            table.block[INDEX["nonfinite_loss"], 0] = 1.0
        judgement = judge.conclude(*judge.see(table), dynamic_scale=False, targets=lambda onset: 1)
        judge.settle(judgement, applied=judgement.decision.action == "apply")


@pytest.mark.parametrize("world", [2, 8])
def test_what_was_captured_stays_as_it_was(world: int):
    judge = Judge(build_monitor(DetectorConfig()), Ladder(PolicyConfig(mode="observe")))
    run = SimulatedRun(world, tails="t3", seed=1)
    judged(judge, run, 1, 150)
    state = judge.state_dict()
    as_it_was = state_digest(_to_tensors(copy.deepcopy(state)))
    judged(judge, run, 151, 300)
    assert state_digest(_to_tensors(judge.state_dict())) != as_it_was, "nothing has moved: this shows nothing"
    assert state_digest(_to_tensors(state)) == as_it_was
