"""An engine that behaves like the one it wraps, for faults to change one thing about, and when a fault is due."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from resilient.checkpoint.pieces import Piece
from resilient.engines.base import CellRows, Counters, Engine, EngineState, Taps
from resilient.engines.updates import Update
from resilient.faults.config import Fault
from resilient.signals import CheckPlan, Knobs


class EngineProxy:
    """The Engine protocol, passed on. It also knows which attempt is running: it counts window starts.

    step: tells the optimizer step being attempted; read once when a window begins.
    """

    def __init__(self, engine: Engine, step: Callable[[], int]) -> None:
        self.inner = engine
        self.name = engine.name
        self.module = engine.module
        self.device = engine.device
        self.per_micro_step = engine.per_micro_step
        self.layers = engine.layers
        self.per_rank = engine.per_rank
        self.step = 0  # being attempted
        self.attempt = 0  # windows begun in this process
        self.index, self.count = 0, 1  # of the micro-step, 0-based, and how many the window has
        self._read_step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # what an engine offers beyond the protocol

    def begin_micro_step(self, index: int, count: int) -> None:
        if index == 0:
            self.step = self._read_step()
            self.attempt += 1
        self.index, self.count = index, count
        self.inner.begin_micro_step(index, count)

    def backward(self, loss: torch.Tensor) -> None:
        self.inner.backward(loss)

    def taps(self) -> Taps:
        return self.inner.taps()

    def check_plan(self) -> CheckPlan | None:
        return self.inner.check_plan()

    def uncheck(self) -> None:
        self.inner.uncheck()

    def check_rows(self, cell: int) -> list[CellRows]:
        return self.inner.check_rows(cell)

    def replicas(self) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        return self.inner.replicas()

    def replica_digests(self, kind: str) -> Mapping[str, torch.Tensor]:
        return self.inner.replica_digests(kind)

    def leftover_sq(self) -> torch.Tensor | None:
        return self.inner.leftover_sq()

    def watch_update(self, with_lag: bool) -> None:
        self.inner.watch_update(with_lag)

    def take_update(self) -> Update | None:
        return self.inner.take_update()

    def weight_sq_share(self) -> torch.Tensor:
        return self.inner.weight_sq_share()

    def mismatched_weights(self) -> list[str]:
        return self.inner.mismatched_weights()

    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        self.inner.apply(grad_norm, knobs)

    def skip(self, overflow: bool = False) -> None:
        self.inner.skip(overflow)

    def abandon(self) -> None:
        self.inner.abandon()

    def lr(self) -> float:
        return self.inner.lr()

    def loss_scale(self) -> float:
        return self.inner.loss_scale()

    def dynamic_loss_scale(self) -> bool:
        return self.inner.dynamic_loss_scale()

    def counters(self) -> Counters:
        return self.inner.counters()

    def capture(self) -> EngineState:
        return self.inner.capture()

    def live(self) -> EngineState:
        return self.inner.live()

    def restore(self, state: EngineState) -> None:
        self.inner.restore(state)

    def pieces(self, state: EngineState) -> list[Piece]:
        return self.inner.pieces(state)

    def optional_parts(self) -> tuple[str, ...]:
        return self.inner.optional_parts()

    def complete(self, state: EngineState, allow_missing: Collection[str]) -> tuple[EngineState, tuple[str, ...]]:
        return self.inner.complete(state, allow_missing)

    def frame(self, source: EngineState, allow_missing: Collection[str] = ()) -> EngineState:
        return self.inner.frame(source, allow_missing)

    def close(self) -> None:
        self.inner.close()


class Trigger:
    """Due in the steps [first, first + window), for the whole attempt (all its micro-steps), and in the first attempt
    at each step only: a replay after a rollback is clean, as with a real transient. repeat: in every attempt.

    first, window, repeat: the fault's `step`, `window` (one step without) and `repeat` (false without).
    """

    def __init__(self, proxy: EngineProxy, fault: Fault, *, repeat: bool | None = None) -> None:
        self._proxy = proxy
        self.first: int = getattr(fault, "step")  # noqa: B009  (of every fault that has a trigger)
        self._window: int | None = getattr(fault, "window", 1)
        self._repeat: bool = getattr(fault, "repeat", False) if repeat is None else repeat
        self._fired: dict[int, int] = {}  # step -> the attempt it fired in

    def covers(self, step: int) -> bool:
        """Is `step` one of its steps, whatever was attempted already?"""
        return self.first <= step and (self._window is None or step < self.first + self._window)

    def due(self) -> bool:
        step, attempt = self._proxy.step, self._proxy.attempt
        if not self.covers(step):
            return False
        return self._repeat or self._fired.setdefault(step, attempt) == attempt
