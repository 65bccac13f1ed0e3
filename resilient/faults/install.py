"""Put a fault between the job and its engine, data and objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilient.engines.base import Engine
from resilient.faults.config import (
    FaultConfig,
    FaultSequence,
    KillRank,
    LrOvershoot,
    NanFault,
    NanInModule,
    NoFault,
    PoisonedWindow,
    RankGradSpike,
    check_world,
)
from resilient.faults.data import PoisonedStream
from resilient.faults.engine import (
    KilledEngine,
    LossFault,
    ModuleFault,
    OutputFault,
    OvershootEngine,
    not_finite,
    scale_gradient,
)
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
    Raises ConfigError if the fault aims at a rank that does not exist.
    """
    check_world(fault, world)
    for one in fault.faults if isinstance(fault, FaultSequence) else (fault,):
        if isinstance(one, PoisonedWindow):
            if one.rank in (None, rank):
                stream = PoisonedStream(stream, one)
        elif isinstance(one, LrOvershoot):
            engine = OvershootEngine(engine, step, one)
        elif isinstance(one, NoFault) or one.rank not in (None, rank):
            continue
        elif isinstance(one, KillRank):
            engine = KilledEngine(engine, step, one)
        elif isinstance(one, NanInModule):
            position = (one.step - 1) * stream.global_batch
            module_fault = ModuleFault(engine, step, one, objective, position)
            engine, objective = module_fault, module_fault.objective
        elif isinstance(one, RankGradSpike):
            engine = OutputFault(engine, step, one, scale_gradient(one.factor))
        elif one.place == "forward":
            engine = OutputFault(engine, step, one, not_finite)
        elif one.place == "backward":
            engine = OutputFault(engine, step, one, scale_gradient(float("nan")))
        else:
            assert isinstance(one, NanFault)
            loss_fault = LossFault(engine, step, one, objective)
            engine, objective = loss_fault, loss_fault.objective
    return engine, stream, objective
