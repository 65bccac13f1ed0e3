"""Faults of time: a rank that computes slowly, a rank whose link is slow. Nothing that is computed changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from resilient.engines.base import Engine
from resilient.faults.config import SlowCompute, SlowLink
from resilient.faults.proxy import EngineProxy, Trigger

# What torch.distributed's functions call to reduce or gather gradients and shards (torch 2.13, and before it).
_COLLECTIVES = ("allreduce", "reduce_scatter_single", "_reduce_scatter_base", "all_gather_single", "_allgather_base")


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
    """Holds each collective of a backward back before it is issued. The wire is slow: in a replay as well."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: SlowLink) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault, repeat=True)
        self._seconds = fault.ms / 1e3

    def backward(self, loss: torch.Tensor) -> None:
        if not self._trigger.due():
            return super().backward(loss)
        with self._held_back():
            super().backward(loss)

    @contextmanager
    def _held_back(self) -> Iterator[None]:
        """In the class of all process groups: whoever asks for a collective, and through which function, it ends up there."""
        # as the class holds them, not as getattr shows them: only those bind to a group when they are put back
        there = {name: vars(dist.ProcessGroup)[name] for name in _COLLECTIVES if name in vars(dist.ProcessGroup)}

        def late(collective: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                settle(self.device)
                time.sleep(self._seconds)
                return collective(*args, **kwargs)

            return call

        for name, collective in there.items():
            setattr(dist.ProcessGroup, name, late(collective))
        try:
            yield
        finally:
            for name, collective in there.items():
                setattr(dist.ProcessGroup, name, collective)


def settle(device: torch.device) -> None:
    """Let an accelerator finish what it was given, so that time spent on the host delays it too."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
