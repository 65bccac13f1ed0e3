"""Faults of one rank's computation and of the process: the engine is wrapped, never edited.

Faults of the computation sit in a forward hook on the module, so they reach the gradients of any engine in the way a
real fault would: through the graph, before the reduction.
"""

from __future__ import annotations

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
from resilient.faults.config import Fault, Fp16Overflow, KillRank, NanFault, NanInModule, nearest
from resilient.faults.proxy import EngineProxy, Trigger
from resilient.train.data import Batch
from resilient.train.loop import Objective, ObjectiveFn

_FP16_MAX = torch.finfo(torch.float16).max


class OutputFault(EngineProxy):
    """Changes the module's output in training, never under no_grad or in eval mode.

    change: a floating-point output tensor that needs gradients -> its replacement.
    """

    def __init__(
        self,
        engine: Engine,
        step: Callable[[], int],
        fault: Fault,
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault)
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


def overflow(fault: Fp16Overflow) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same output, or its gradient on the way back, so large that part of it is beyond fp16 and infinite."""

    def beyond(values: torch.Tensor) -> torch.Tensor:
        peak = values.detach().abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
        values = values.float() * (fault.times * _FP16_MAX / peak)
        return torch.where(values.abs() > _FP16_MAX, values * math.inf, values)

    def change(output: torch.Tensor) -> torch.Tensor:
        if fault.place == "forward":
            return beyond(output).to(output.dtype)
        output = output.view_as(output)
        output.register_hook(lambda grad: beyond(grad).to(grad.dtype))
        return output

    return change


class LossFault(EngineProxy):
    """NaN in the loss alone; the output stays finite. `objective` is the wrapped objective to train with."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: NanFault, objective: ObjectiveFn) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault)
        self._objective = objective

    def objective(self, engine: Engine, batch: Batch) -> Objective:
        result = self._objective(engine, batch)
        if torch.is_grad_enabled() and self._trigger.due():
            return replace(result, loss_sum=result.loss_sum * math.nan)
        return result


def submodule(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """ConfigError for a path that the model does not have."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in module.named_modules() if name]
        raise ConfigError(f"fault.module={path}: the model has no such module{nearest(path, names)}") from None


class ModuleFault(EngineProxy):
    """One submodule makes a NaN from one micro-batch, whenever that one is read. `objective` is the wrapped objective
    to train with: it knows the batch. Raises ConfigError for a path that the model does not have.

    position: of that micro-batch in the global order of samples. sample: the first one in it, which tells one rank's part
    of it from the others'; None: each rank's.
    """

    def __init__(
        self,
        engine: Engine,
        step: Callable[[], int],
        fault: NanInModule,
        objective: ObjectiveFn,
        position: int,
        sample: int | None,
    ) -> None:
        super().__init__(engine, step)
        module = submodule(engine.module, fault.module)
        self._change = not_finite if fault.place == "forward" else scale_gradient(math.nan)
        self._position, self._sample, self._armed = position, sample, False
        self._objective = objective
        self._handle = module.register_forward_hook(self._hook)

    def objective(self, engine: Engine, batch: Batch) -> Objective:
        here = batch["position"] == self._position
        if self._sample is not None:
            here = here and self._sample in batch["ids"].tolist()
        self._armed = here and torch.is_grad_enabled()
        try:
            return self._objective(engine, batch)
        finally:
            self._armed = False

    def _hook(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return self._change(output) if self._armed else None

    def close(self) -> None:
        self._handle.remove()
        super().close()


class KilledEngine(EngineProxy):
    """Ends this process without a word when the step begins."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: KillRank) -> None:
        super().__init__(engine, step)
        self._at = fault.step

    def begin_micro_step(self, index: int, count: int) -> None:
        super().begin_micro_step(index, count)
        if self.step == self._at and os.environ.get("RESILIENT_GENERATION", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
