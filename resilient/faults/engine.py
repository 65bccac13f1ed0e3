"""Faults of one rank's computation, of the optimizer and of the process: the engine is wrapped, never edited.

Faults of the computation sit in a forward hook on the module, so they reach the gradients of any engine in the way a
real fault would: through the graph, before the reduction.
"""

from __future__ import annotations

import difflib
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from resilient.engines.base import Engine
from resilient.errors import ConfigError
from resilient.faults.config import KillRank, LrOvershoot, NanFault, NanInModule, RankGradSpike
from resilient.faults.proxy import EngineProxy, Trigger
from resilient.signals import Knobs
from resilient.train.data import Batch
from resilient.train.loop import Objective, ObjectiveFn


class OutputFault(EngineProxy):
    """Changes the module's output in training, never under no_grad or in eval mode.

    change: a floating-point output tensor that needs gradients -> its replacement.
    """

    def __init__(
        self,
        engine: Engine,
        step: Callable[[], int],
        fault: NanFault | RankGradSpike,
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault.step, repeat=fault.repeat)
        self._change = change
        self._handle = engine.module.register_forward_hook(self._hook)

    def _hook(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if not (module.training and torch.is_grad_enabled() and self._trigger.due()):
            return None
        return pytree.tree_map_only(torch.Tensor, lambda t: self._change(t) if t.requires_grad else t, output)

    def close(self) -> None:
        self._handle.remove()
        super().close()


def not_finite(output: torch.Tensor) -> torch.Tensor:
    """The same output as NaN, with its graph."""
    return output * math.nan


def scale_gradient(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same output, whose gradient is multiplied by `factor` on the way back."""

    def change(output: torch.Tensor) -> torch.Tensor:
        output = output.view_as(output)  # a tensor of our own: hooks that others put on theirs see the change
        output.register_hook(lambda grad: grad * factor)
        return output

    return change


class LossFault(EngineProxy):
    """NaN in the loss alone; the output stays finite. `objective` is the wrapped objective to train with."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: NanFault, objective: ObjectiveFn) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault.step, repeat=fault.repeat)
        self._objective = objective

    def objective(self, engine: Engine, batch: Batch) -> Objective:
        result = self._objective(engine, batch)
        if torch.is_grad_enabled() and self._trigger.due():
            return replace(result, loss_sum=result.loss_sum * math.nan)
        return result


class ModuleFault(EngineProxy):
    """One submodule makes a NaN from one micro-batch, whenever that one is read. `objective` is the wrapped objective
    to train with: it knows the batch. Raises ConfigError for a path that the model does not have.

    position: of that micro-batch in the global order of samples.
    """

    def __init__(
        self,
        engine: Engine,
        step: Callable[[], int],
        fault: NanInModule,
        objective: ObjectiveFn,
        position: int,
    ) -> None:
        super().__init__(engine, step)
        try:
            module = engine.module.get_submodule(fault.module)
        except AttributeError:
            names = [name for name, _ in engine.module.named_modules() if name]
            close = difflib.get_close_matches(fault.module, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"fault.module={fault.module}: the model has no such module{hint}") from None
        self._change = not_finite if fault.place == "forward" else scale_gradient(math.nan)
        self._position, self._armed = position, False
        self._objective = objective
        self._handle = module.register_forward_hook(self._hook)

    def objective(self, engine: Engine, batch: Batch) -> Objective:
        self._armed = torch.is_grad_enabled() and batch["position"] == self._position
        try:
            return self._objective(engine, batch)
        finally:
            self._armed = False

    def _hook(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return self._change(output) if self._armed else None

    def close(self) -> None:
        self._handle.remove()
        super().close()


class OvershootEngine(EngineProxy):
    """The optimizer steps with `factor` times the LR that was decided; the schedule does not notice."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: LrOvershoot) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault.step, fault.window, fault.repeat)
        self._factor = fault.factor

    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        if self._trigger.due():
            knobs = replace(knobs, lr_factor=knobs.lr_factor * self._factor)
        super().apply(grad_norm, knobs)


class KilledEngine(EngineProxy):
    """Ends this process without a word when the step begins."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: KillRank) -> None:
        super().__init__(engine, step)
        self._at = fault.step

    def begin_micro_step(self, index: int, count: int) -> None:
        super().begin_micro_step(index, count)
        if self.step == self._at and os.environ.get("RESILIENT_GENERATION", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
