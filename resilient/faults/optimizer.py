"""Faults of the optimizer, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from resilient.engines.base import Engine
from resilient.engines.buffers import local
from resilient.errors import ConfigError
from resilient.faults.config import Beta2Shock, LrOvershoot, SecondMomentLost
from resilient.faults.proxy import EngineProxy, Trigger
from resilient.signals import Knobs

SECOND_MOMENT = "exp_avg_sq"  # as torch and DeepSpeed call it


def optimizer_of(engine: Engine) -> torch.optim.Optimizer:
    """The optimizer that updates this rank's parameters, its state by tensor: torch's own, or the one in DeepSpeed's."""
    stage = getattr(engine, "_stage", None)
    return engine.optimizer if stage is None else stage.base  # type: ignore[attr-defined, no-any-return]


class OvershootEngine(EngineProxy):
    """The optimizer steps with `factor` times the LR that was decided; the schedule does not notice."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: LrOvershoot) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault)
        self._factor = fault.factor

    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        if self._trigger.due():
            knobs = replace(knobs, lr_factor=knobs.lr_factor * self._factor)
        super().apply(grad_norm, knobs)


class Beta2Engine(EngineProxy):
    """The optimizer steps with another beta2. ConfigError for an optimizer without."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: Beta2Shock) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault)
        self._beta2 = fault.value
        self._group = optimizer_of(engine).param_groups[0]
        if "betas" not in self._group:
            raise ConfigError("fault.kind=beta2_shock: this optimizer has no betas")

    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        if self._trigger.due():
            beta1 = (knobs.betas or self._group["betas"])[0]
            knobs = replace(knobs, betas=(beta1, self._beta2))
        super().apply(grad_norm, knobs)


class ForgetfulEngine(EngineProxy):
    """Scales every second moment just before a step."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: SecondMomentLost) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault)
        self._factor = fault.factor

    @torch.no_grad()
    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        if self._trigger.due():
            for state in optimizer_of(self.inner).state.values():
                if SECOND_MOMENT in state:
                    local(state[SECOND_MOMENT]).mul_(self._factor)
        super().apply(grad_norm, knobs)
