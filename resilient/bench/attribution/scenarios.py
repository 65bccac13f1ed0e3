"""What is injected: one fault a run, each with its ground truth, and clean controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resilient.bench.ranks import ENGINES

FAULT_STEP = 40  # references need a history; a run that breaks in its first steps is another benchmark's
STEPS, CLEAN_STEPS = 56, 120


@dataclass(frozen=True)
class Scenario:
    """fault: as in conf/fault, without its step. engines: where it can be; precision: what it needs. steps: of
    the run, for what shows only over a while."""

    name: str
    fault: Mapping[str, Any]
    engines: tuple[str, ...] = ENGINES
    precision: str = "fp32"
    accumulation: int = 1
    worlds: tuple[int, ...] = (2, 4)
    steps: int = STEPS

    def at(self, step: int, seed: int) -> dict[str, Any]:
        """The fault at `step`. Drawn places change with the seed."""
        found = dict(self.fault)
        if found["kind"] != "none":
            found["step"] = step
        if "seed" in found:
            found["seed"] = seed + 1
        return found


_HALF = ("zero0", "zero1", "zero2", "zero3")

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("clean", {"kind": "none"}, steps=CLEAN_STEPS),
    Scenario("clean, accumulation 2", {"kind": "none"}, accumulation=2, steps=CLEAN_STEPS),
    Scenario("clean, bf16", {"kind": "none"}, precision="bf16", steps=CLEAN_STEPS),
    # compute: one rank's own gradient is wrong
    Scenario("spike x1000", {"kind": "rank_grad_spike", "rank": 1, "factor": 1000.0}),
    Scenario("spike x10", {"kind": "rank_grad_spike", "rank": 1, "factor": 10.0}),
    Scenario(
        "spike x10, broken for good",
        {"kind": "rank_grad_spike", "rank": 1, "factor": 10.0, "window": None, "repeat": True},
    ),
    Scenario("exponent bit flip", {"kind": "bit_flip", "rank": 1, "bit": 30, "seed": 0}),
    Scenario("gradient noise", {"kind": "grad_noise", "rank": 1, "relative": 30.0, "seed": 0}),
    Scenario("NaN, one rank, passing", {"kind": "nan", "rank": 1, "place": "backward"}),
    Scenario(
        "replica drift", {"kind": "replica_drift", "rank": 1, "relative": 0.05, "seed": 0}, engines=("ddp", "zero0")
    ),
    Scenario("slow compute", {"kind": "slow_compute", "rank": 1, "ms": 120.0}, steps=80),
    # communication: what a rank received is wrong, or late
    Scenario("result NaN", {"kind": "bad_reduction", "rank": 1, "how": "nan", "seed": 0}),
    Scenario("result off by 0.1", {"kind": "bad_reduction", "rank": 1, "how": "finite", "relative": 0.1, "seed": 0}),
    Scenario("result off by 0.001", {"kind": "bad_reduction", "rank": 1, "how": "finite", "relative": 1e-3, "seed": 0}),
    Scenario(
        "result off by 0.05, bf16",
        {"kind": "bad_reduction", "rank": 1, "how": "finite", "relative": 0.05, "seed": 0},
        precision="bf16",
    ),
    Scenario(
        "element unreduced", {"kind": "bad_reduction", "rank": 1, "how": "unreduced", "elements": None, "seed": 0}
    ),
    Scenario("stale bucket", {"kind": "bad_reduction", "rank": 1, "how": "stale", "elements": None, "seed": 0}),
    Scenario("skipped reduction", {"kind": "skipped_reduction", "rank": 1}),
    Scenario("slow link", {"kind": "slow_link", "rank": 1, "ms": 120.0}, steps=80),
    # data
    Scenario("bad sample, odd loss", {"kind": "bad_sample", "rank": 1, "loss": "odd", "seed": 0}),
    Scenario("bad sample, normal loss", {"kind": "bad_sample", "rank": 1, "loss": "normal", "seed": 0}),
    Scenario(
        "NaN in a module from one batch", {"kind": "nan_in_module", "rank": 1, "module": "blocks.1", "place": "forward"}
    ),
    Scenario("same samples on two ranks", {"kind": "shuffle_mismatch", "rank": 1, "differs": "rank"}, steps=60),
    Scenario("sampler seed differs", {"kind": "shuffle_mismatch", "rank": 1, "differs": "seed"}),
    Scenario("sampler epoch differs", {"kind": "shuffle_mismatch", "rank": 1, "differs": "epoch"}),
    Scenario("poisoned on all ranks", {"kind": "poisoned_window", "window": 1, "rank": None, "seed": 0}),
    # precision
    Scenario(
        "fp16 overflow", {"kind": "fp16_overflow", "rank": None, "place": "backward"}, engines=_HALF, precision="fp16"
    ),
    # optimizer
    Scenario("LR x30", {"kind": "lr_overshoot", "window": 5, "factor": 30.0}),
    Scenario("second moment lost", {"kind": "second_moment_lost", "factor": 0.0}),
)
