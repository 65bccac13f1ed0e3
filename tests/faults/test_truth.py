"""The ground truth of every fault, for a benchmark to score verdicts against."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_args

import pytest
from omegaconf import OmegaConf

from resilient import faults
from resilient.faults.config import KINDS, Fault, SingleFault

CONF = Path(__file__).parents[2] / "conf" / "fault"
EXPECTED = {  # what a verdict should say of the faults as conf/fault has them: cause, ranks, place
    "nan_one_rank": ("compute", (1,), "forward"),
    "nan_in_module": ("data", (1,), "forward"),
    "rank_grad_spike": ("compute", (1,), "backward"),
    "bit_flip": ("compute", (1,), "backward"),
    "grad_noise": ("compute", (1,), "backward"),
    "grad_stuck": ("compute", (1,), "backward"),
    "dropped_micro_step": ("compute", (1,), "backward"),
    "bad_reduction": ("communication", (1,), "reduction"),
    "skipped_reduction": ("communication", (1,), "reduction"),
    "replica_drift": ("compute", (1,), "optimizer"),
    "swapped_rng": ("data", (0, 1), None),
    "poisoned_window": ("data", (), "loss"),
    "bad_sample": ("data", (1,), "loss"),
    "empty_batch": ("data", (1,), "loss"),
    "shuffle_mismatch": ("data", (1,), None),
    "slow_compute": ("compute", (1,), None),
    "slow_link": ("communication", (1,), None),
    "fp16_overflow": ("precision", (), "backward"),
    "lr_overshoot": ("optimizer", (), "optimizer"),
    "beta2_shock": ("optimizer", (), "optimizer"),
    "second_moment_lost": ("optimizer", (), "optimizer"),
}


def fault_of(name: str) -> faults.FaultConfig:
    return faults.parse(OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml")))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_fault_says_what_a_verdict_about_it_should_say(name: str) -> None:
    (truth,) = faults.ground_truth(fault_of(name))
    assert (truth.cause, truth.ranks, truth.place) == EXPECTED[name]
    assert truth.step == 20


def test_there_is_one_for_every_kind() -> None:
    kinds = {fault_of(name).kind for name in EXPECTED}
    assert set(KINDS) - kinds == {"none", "kill_rank", "sequence"}
    assert {cls.kind for cls in get_args(SingleFault)} == set(KINDS) - {"sequence"}
    for cls in KINDS.values():
        assert issubclass(cls, Fault)
        assert inspect.getdoc(cls)
    for name in ("none", "kill_rank"):
        assert faults.ground_truth(fault_of(name)) == ()


def test_steps_and_repetition() -> None:
    sequence = faults.FaultSequence(
        faults=(
            faults.BitFlip(step=3, repeat=True),
            faults.GradStuck(step=5, window=4),
            faults.SlowLink(step=7),
            faults.KillRank(step=9),
            faults.SkippedReduction(step=11, rank=None),
        )
    )
    flip, stuck, slow, skipped = faults.ground_truth(sequence)
    assert (flip.step, flip.last, flip.again) == (3, 3, True)
    assert (stuck.step, stuck.last, stuck.again) == (5, 8, False)
    assert (slow.step, slow.last, slow.again) == (7, None, True)
    assert skipped.ranks == ()
