"""What a verdict about a fault should say: the ground truth that verdicts are scored against.

Where a cause is a matter of definition, this is the definition:

- compute: this rank's own gradient, weights or speed are wrong, with a sound batch. A micro-step whose contribution is
  missing is among them: its batch was read and its loss is right, the machine or program lost the rest.
- communication: this rank's own gradient is right, and what it received, or when, is wrong.
- data: what a rank was fed. Random streams that two ranks share are counted here: nothing in the machine or on the wire
  is broken; as with a sampler's seed, the set-up makes two ranks draw what should be independent.
"""

from __future__ import annotations

from dataclasses import dataclass

from resilient.faults.config import (
    BadReduction,
    BadSample,
    Beta2Shock,
    BitFlip,
    DroppedMicroStep,
    EmptyBatch,
    Fault,
    FaultConfig,
    FaultSequence,
    Fp16Overflow,
    GradNoise,
    GradStuck,
    KillRank,
    LrOvershoot,
    NanFault,
    NanInModule,
    NoFault,
    PoisonedWindow,
    RankGradSpike,
    ReplicaDrift,
    SecondMomentLost,
    ShuffleMismatch,
    SkippedReduction,
    SlowCompute,
    SlowLink,
    SwappedRng,
)
from resilient.signals.findings import Cause
from resilient.signals.places import Place


@dataclass(frozen=True)
class GroundTruth:
    """Of one fault. ranks: that it hits; empty: all together. step, last: the first and last step at which it acts (None: to
    the end); its consequences may stay for longer. place: where it shows first; None: nowhere in the numbers of a step.
    again: what is replayed after a rollback is hit again."""

    kind: str
    cause: Cause
    ranks: tuple[int, ...]
    step: int
    last: int | None
    place: Place | None
    again: bool


_CAUSES: dict[type[Fault], tuple[Cause, Place | None]] = {  # place: of those that have none of their own
    NanFault: ("compute", None),
    NanInModule: ("data", None),
    RankGradSpike: ("compute", "backward"),
    BitFlip: ("compute", "backward"),
    GradNoise: ("compute", "backward"),
    GradStuck: ("compute", "backward"),
    DroppedMicroStep: ("compute", "backward"),
    BadReduction: ("communication", "reduction"),
    SkippedReduction: ("communication", "reduction"),
    ReplicaDrift: ("compute", "optimizer"),
    SwappedRng: ("data", None),
    PoisonedWindow: ("data", "loss"),
    BadSample: ("data", None),
    EmptyBatch: ("data", "loss"),
    ShuffleMismatch: ("data", None),
    SlowCompute: ("compute", None),
    SlowLink: ("communication", None),
    Fp16Overflow: ("precision", None),
    LrOvershoot: ("optimizer", "optimizer"),
    Beta2Shock: ("optimizer", "optimizer"),
    SecondMomentLost: ("optimizer", "optimizer"),
}
_ALWAYS_AGAIN = (NanInModule, PoisonedWindow, BadSample, EmptyBatch, ShuffleMismatch, SlowCompute, SlowLink)


def ground_truth(fault: FaultConfig) -> tuple[GroundTruth, ...]:
    """One for each fault, in order. None for no fault, nor for a killed rank: no step is left to judge."""
    if isinstance(fault, FaultSequence):
        return tuple(truth for one in fault.faults for truth in ground_truth(one))
    if isinstance(fault, NoFault | KillRank):
        return ()
    cause, place = _CAUSES[type(fault)]
    if isinstance(fault, NanFault | NanInModule | Fp16Overflow):
        place = fault.place
    elif isinstance(fault, BadSample):
        place = "loss" if fault.loss == "odd" else "backward"
    rank: int | None = getattr(fault, "rank", None)
    ranks: tuple[int, ...] = () if rank is None else (rank,)
    if isinstance(fault, SwappedRng):  # nobody can tell which of the two was there first
        ranks = tuple(sorted((fault.rank, fault.source)))
    window: int | None = getattr(fault, "window", 1)
    last = None if window is None else fault.step + window - 1
    if isinstance(fault, BadSample):
        last = None  # once an epoch
    if isinstance(fault, SwappedRng | ReplicaDrift):
        last = None  # until it is put right
    again = isinstance(fault, _ALWAYS_AGAIN) or bool(getattr(fault, "repeat", False))
    return (GroundTruth(fault.kind, cause, ranks, fault.step, last, place, again),)
