"""Faults of one rank's gradient and of the wire (issue 4, item 8): what each does to a real engine, and what it leaves alone."""

from __future__ import annotations

import pytest

from resilient.engines.base import EngineConfig
from resilient.faults import (
    BadReduction,
    BitFlip,
    DroppedMicroStep,
    FaultSequence,
    GradNoise,
    GradStuck,
    RankGradSpike,
    SkippedReduction,
)
from resilient.faults.config import SingleFault
from tests.faults.twins import Difference, differences
from tests.ranks import run_pooled, run_ranks

pytestmark = pytest.mark.timeout(240)

WEIGHT, SIZE = "blocks.1.mlp.down.weight", 32 * 48
LOCAL: dict[str, SingleFault] = {  # one step each, in this order
    "bit_flip": BitFlip(step=2, parameter=WEIGHT, element=5, bit=20),
    "grad_noise": GradNoise(step=3, parameter=WEIGHT),
    "grad_stuck": GradStuck(step=4, window=1, parameter=WEIGHT, value=0.5),
    "rank_grad_spike": RankGradSpike(step=5),
    "dropped_micro_step": DroppedMicroStep(step=6),
}
WIRE: dict[str, SingleFault] = {
    "nan": BadReduction(step=7, how="nan"),
    "finite": BadReduction(step=8, how="finite", relative=1e-3),
    "unreduced": BadReduction(step=9, how="unreduced", elements=3),
    "stale": BadReduction(step=10, how="stale", elements=None),
    "skipped": SkippedReduction(step=11),
    "skipped_by_all": SkippedReduction(step=12, rank=None),
}
ALL = FaultSequence(faults=(*LOCAL.values(), *WIRE.values()))
LAST = 13
STEPS = (*range(1, LAST + 1), 2, 6, 9, 10, 11)  # then some of the faulty ones once more, as after a rollback


def spawned(rank: int, world: int, configs: dict[str, EngineConfig]) -> dict[str, list[Difference]]:
    return {name: differences(rank, world, config, ALL, STEPS) for name, config in configs.items()}


def check(zero: list[Difference], one: list[Difference], *, whole: bool) -> None:
    """zero, one: of the two ranks. whole: each holds the whole reduced gradient."""
    faulty = {fault.step: name for name, fault in (LOCAL | WIRE).items()}
    for ours in (zero, one):
        for i, step in enumerate(STEPS):
            if step not in faulty or i >= LAST:
                assert ours[i] == Difference(0, 0, True), (step, "is clean, and a replay is")
        assert all(seen.loss for seen in ours)  # none of them shows in a loss
    at = {name: (zero[fault.step - 1], one[fault.step - 1]) for name, fault in (LOCAL | WIRE).items()}

    for name in LOCAL:  # on the wire: of rank 1 alone
        assert at[name][0].sent == 0
        assert at[name][1].sent > 0
    assert at["bit_flip"][1].sent == 1
    for name, size in (("bit_flip", 1), ("grad_noise", SIZE), ("grad_stuck", SIZE)):
        held = [seen.held for seen in at[name]]  # and from there in what all hold, in its place
        assert held == [size, size] if whole else sum(held) == size
    for name in ("rank_grad_spike", "dropped_micro_step"):
        assert min(seen.held for seen in at[name]) > 10_000

    for name in WIRE:  # nothing on the wire
        assert [seen.sent for seen in at[name]] == [0, 0]
        assert at[name][0].held > 10_000 if name == "skipped_by_all" else at[name][0].held == 0
    assert [at[name][1].held for name in ("nan", "finite")] == [1, 1]
    assert 1 <= at["unreduced"][1].held <= 3  # in bf16 an element of the mean may equal this rank's own
    assert at["stale"][1].held > 1000
    assert min(at[name][1].held for name in ("skipped", "skipped_by_all")) > 10_000


def test_one_rank_of_ddp_and_fsdp2_is_hit_at_its_place_once() -> None:
    """C2, BR-03, BR-39: bit for bit the twin's everywhere else."""
    configs = {
        "ddp": EngineConfig(name="ddp", bucket_mb=0.02),
        "fsdp2": EngineConfig(name="fsdp2"),
    }
    zero, one = run_pooled(spawned, 2, configs)
    check(zero["ddp"], one["ddp"], whole=True)
    check(zero["fsdp2"], one["fsdp2"], whole=False)


def test_one_rank_of_deepspeed_is_hit_at_its_place_once() -> None:
    """C2, BR-03: ZeRO 1 and 3."""
    configs = {f"zero{stage}": deepspeed(stage) for stage in (1, 3)}
    zero, one = run_ranks(spawned, 2, configs, timeout=220)
    for name in configs:
        check(zero[name], one[name], whole=False)


@pytest.mark.slow
def test_the_other_stages_and_precisions_as_well() -> None:
    """C2, BR-03."""
    configs = {
        "zero0": deepspeed(0),
        "zero2": deepspeed(2),
        "zero0 in bf16": deepspeed(0, "bf16"),
        "zero1 in bf16": deepspeed(1, "bf16"),
        "zero2 in bf16": deepspeed(2, "bf16"),
        "zero3 in bf16": deepspeed(3, "bf16"),
        "zero2 in fp16": deepspeed(2, "fp16"),
        "fsdp2 in bf16": EngineConfig(name="fsdp2", precision="bf16"),
        "ddp in bf16": EngineConfig(name="ddp", precision="bf16", bucket_mb=0.02),
    }
    zero, one = run_ranks(spawned, 2, configs, timeout=220)
    for name in configs:
        check(zero[name], one[name], whole=name.startswith(("zero0", "ddp")))


def deepspeed(stage: int, precision: str = "fp32") -> EngineConfig:
    return EngineConfig(
        name="deepspeed", zero_stage=stage, precision=precision, bucket_mb=0.02, initial_loss_scale_power=4
    )
