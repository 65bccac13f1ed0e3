"""Put a fault between the job and its engine, data and objective."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resilient.engines.base import Engine
from resilient.faults.config import (
    BadReduction,
    BadSample,
    Beta2Shock,
    BitFlip,
    DroppedMicroStep,
    EmptyBatch,
    FaultConfig,
    FaultSequence,
    Fp16Overflow,
    GradNoise,
    GradStuck,
    KillRank,
    LrOvershoot,
    NanFault,
    NanInModule,
    PoisonedWindow,
    RankGradSpike,
    ReplicaDrift,
    SecondMomentLost,
    ShuffleMismatch,
    SingleFault,
    SkippedReduction,
    SlowCompute,
    SlowLink,
    SwappedRng,
    check_world,
)
from resilient.faults.data import (
    BadSampleStream,
    EmptyStream,
    MismatchedStream,
    PoisonedStream,
    bad_sample_objective,
    first_sample,
)
from resilient.faults.delay import SlowRank, SlowWire
from resilient.faults.engine import (
    KilledEngine,
    LossFault,
    ModuleFault,
    OutputFault,
    not_finite,
    overflow,
    scale_gradient,
)
from resilient.faults.gradient import DroppingEngine, FlippedBit, NoisyGradient, StuckGradient, check_parameter
from resilient.faults.optimizer import Beta2Engine, ForgetfulEngine, OvershootEngine
from resilient.faults.reduction import BadlyReduced, SkippedEngine, check_layer
from resilient.faults.state import DriftingEngine, SwappedStreams
from resilient.train.loop import ObjectiveFn


def install(
    fault: FaultConfig,
    *,
    engine: Engine,
    stream: Any,
    objective: ObjectiveFn,
    step: Callable[[], int],
    rank: int,
    world: int,
) -> tuple[Engine, Any, ObjectiveFn]:
    """The engine, stream and objective to use instead. Call on every rank, after the engine exists and before the
    guard does: the guard's hooks must come after ours to see what we change.

    step: tells the optimizer step being attempted (1-based); called when a window begins, so it may be
    `lambda: guard.step_index` of a guard that is made later. stream: a TokenStream, or anything with `global_batch`.
    Raises ConfigError, on all ranks, if the fault aims at a rank, parameter, layer or replica that does not exist.
    """
    check_world(fault, world)
    job = _Job(engine, stream, objective, step, rank, world)
    for one in fault.faults if isinstance(fault, FaultSequence) else (fault,):
        job.hit_all(one)
        if getattr(one, "rank", None) in (None, rank):
            job.hit_here(one)
    return job.engine, job.stream, job.objective


@dataclass
class _Job:
    engine: Engine
    stream: Any
    objective: ObjectiveFn
    step: Callable[[], int]
    rank: int
    world: int

    def hit_all(self, fault: SingleFault) -> None:
        """What every rank takes part in, whichever is hit, and what every rank refuses."""
        match fault:
            case NanInModule():
                position = (fault.step - 1) * self.stream.global_batch
                sample = None if fault.rank is None else first_sample(self.stream, fault.step, fault.rank)
                self._with_objective(ModuleFault(self.engine, self.step, fault, self.objective, position, sample))
            case BitFlip():
                self.engine = FlippedBit(self.engine, self.step, fault, self.rank)
            case GradNoise() | GradStuck():
                check_parameter(self.engine.module, fault.parameter)
            case BadReduction():
                check_layer(self.engine.layers, fault.layer)
            case ReplicaDrift():
                self.engine = DriftingEngine(self.engine, self.step, fault, self.rank)
            case SwappedRng():
                self.engine = SwappedStreams(self.engine, self.step, fault, self.rank)
            case BadSample():
                self.objective = bad_sample_objective(
                    self.objective, fault, first_sample(self.stream, fault.step, fault.rank)
                )
                if fault.loss == "odd":
                    self.stream = BadSampleStream(self.stream, fault)

    def hit_here(self, fault: SingleFault) -> None:
        """What only the ranks that are hit carry."""
        match fault:
            case NanFault(place="loss"):
                self._with_objective(LossFault(self.engine, self.step, fault, self.objective))
            case NanFault():
                change = not_finite if fault.place == "forward" else scale_gradient(math.nan)
                self.engine = OutputFault(self.engine, self.step, fault, change)
            case RankGradSpike():
                self.engine = OutputFault(self.engine, self.step, fault, scale_gradient(fault.factor))
            case Fp16Overflow():
                self.engine = OutputFault(self.engine, self.step, fault, overflow(fault))
            case GradNoise():
                self.engine = NoisyGradient(self.engine, self.step, fault)
            case GradStuck():
                self.engine = StuckGradient(self.engine, self.step, fault)
            case DroppedMicroStep():
                self.engine = DroppingEngine(self.engine, self.step, fault)
            case BadReduction():
                self.engine = BadlyReduced(self.engine, self.step, fault)
            case SkippedReduction():
                self.engine = SkippedEngine(self.engine, self.step, fault)
            case PoisonedWindow():
                self.stream = PoisonedStream(self.stream, fault)
            case EmptyBatch():
                self.stream = EmptyStream(self.stream, fault)
            case ShuffleMismatch():
                self.stream = MismatchedStream(self.stream, fault, self.rank, self.world)
            case SlowCompute():
                self.engine = SlowRank(self.engine, self.step, fault)
            case SlowLink():
                self.engine = SlowWire(self.engine, self.step, fault)
            case LrOvershoot():
                self.engine = OvershootEngine(self.engine, self.step, fault)
            case Beta2Shock():
                self.engine = Beta2Engine(self.engine, self.step, fault)
            case SecondMomentLost():
                self.engine = ForgetfulEngine(self.engine, self.step, fault)
            case KillRank():
                self.engine = KilledEngine(self.engine, self.step, fault)

    def _with_objective(self, fault: LossFault | ModuleFault) -> None:
        """A fault that needs to know the batch: it is engine and objective in one."""
        self.engine, self.objective = fault, fault.objective
