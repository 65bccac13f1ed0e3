"""Faults of time: a rank that computes slowly, a rank whose link is slow. Nothing that is computed changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from resilient.engines.base import Engine
from resilient.faults.config import SlowCompute, SlowLink
from resilient.faults.proxy import EngineProxy, Trigger

# What torch.distributed's functions call to reduce or gather gradients and shards (torch 2.13, and before it).
_COLLECTIVES = ("allreduce", "reduce_scatter_single", "_reduce_scatter_base", "all_gather_single", "_allgather_base")
_MESSAGES = ("send",)


class SlowRank(EngineProxy):
    """Keeps this rank busy before each forward in training. The machine is slow: in a replay as well."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: SlowCompute) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault, repeat=True)
        self._seconds = fault.ms / 1e3
        self._handle = engine.module.register_forward_pre_hook(self._hook)

    def _hook(self, module: torch.nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled() and self._trigger.due():
            settle(self.device)
            until = time.perf_counter() + self._seconds / self.count
            while time.perf_counter() < until:
                pass

    def close(self) -> None:
        self._handle.remove()
        super().close()


class SlowWire(EngineProxy):
    """Holds each collective of a backward back before it is issued, and, as the link is the same, each message to a single
    rank for as long as the fault is due: a probe of the links finds it. The wire is slow: in a replay as well."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: SlowLink) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault, repeat=True)
        self._seconds = fault.ms / 1e3
        self._messages = ExitStack()

    def begin_micro_step(self, index: int, count: int) -> None:
        super().begin_micro_step(index, count)
        if index == 0:
            self._messages.close()
            if self._trigger.due():
                self._messages.enter_context(self._held_back(_MESSAGES))

    def backward(self, loss: torch.Tensor) -> None:
        if not self._trigger.due():
            return super().backward(loss)
        with self._held_back(_COLLECTIVES):
            super().backward(loss)

    @contextmanager
    def _held_back(self, names: Sequence[str]) -> Iterator[None]:
        """In the class of all process groups: whoever asks for one, and through which function, it ends up there."""
        # as the class holds them, not as getattr shows them: only those bind to a group when they are put back
        there = {name: vars(dist.ProcessGroup)[name] for name in names if name in vars(dist.ProcessGroup)}

        def late(operation: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                settle(self.device)
                time.sleep(self._seconds)
                return operation(*args, **kwargs)

            return call

        for name, operation in there.items():
            setattr(dist.ProcessGroup, name, late(operation))
        try:
            yield
        finally:
            for name, operation in there.items():
                setattr(dist.ProcessGroup, name, operation)

    def close(self) -> None:
        self._messages.close()
        super().close()


def settle(device: torch.device) -> None:
    """Let an accelerator finish what it was given, so that time spent on the host delays it too."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
