"""Faults of what a rank keeps between steps: its replica of parameters or moments, its random streams."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from resilient.checkpoint.rng import capture_rng, restore_rng
from resilient.engines.base import Engine
from resilient.engines.buffers import local
from resilient.errors import ConfigError
from resilient.faults.config import ReplicaDrift, SwappedRng
from resilient.faults.gradient import draw, generator_for, sizes
from resilient.faults.optimizer import SECOND_MOMENT, optimizer_of
from resilient.faults.proxy import EngineProxy, Trigger

_KINDS = {"parameter": "parameters", "moment": "optimizer"}


class DriftingEngine(EngineProxy):
    """One rank's copy of a tensor is changed when a step begins. On every rank, so that all of them refuse a fault that
    cannot be: where that tensor has no replica, or no moments."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: ReplicaDrift, rank: int) -> None:
        super().__init__(engine, step)
        replicated = engine.replicas().get(_KINDS[fault.what], ())
        if not any(fault.rank in ranks and len(ranks) > 1 for ranks in replicated):
            raise ConfigError(
                f"fault.what={fault.what}: {engine.name} keeps no second copy of what rank {fault.rank} holds of it"
            )
        self.parameter, _ = draw(sizes(engine.module), fault.parameter, fault.seed)
        self._live = dict(engine.module.named_parameters())[self.parameter]  # now: the shard of it, where there is one
        self._trigger = Trigger(self, fault)
        self._fault, self._here = fault, rank == fault.rank

    def begin_micro_step(self, index: int, count: int) -> None:
        super().begin_micro_step(index, count)
        if index == 0 and self._here and self._trigger.due():
            self._drift()

    @torch.no_grad()
    def _drift(self) -> None:
        target = local(self._live if self._fault.what == "parameter" else self._moment())
        noise = torch.randn(
            target.shape, generator=generator_for(target.device, self._fault.seed, self.step), device=target.device
        )
        size = torch.linalg.vector_norm(target, dtype=torch.float32) * self._fault.relative
        target.add_((noise * (size / torch.linalg.vector_norm(noise))).to(target.dtype))
        if self._fault.what == "moment":
            target.abs_()  # a square has no sign

    def _moment(self) -> torch.Tensor:
        """Of the parameter, or of a master of its own that holds it; before the first step there is none."""
        states = optimizer_of(self.inner).state
        state = states.get(self._live)
        if state is None:  # masters apart from the parameters: the one that the seed says
            held = [s for s in states.values() if SECOND_MOMENT in s]
            if not held:
                raise ConfigError(f"fault.step={self._fault.step}: the optimizer has no moments yet")
            state = held[self._fault.seed % len(held)]
        moment: torch.Tensor = state[SECOND_MOMENT]
        return moment


class SwappedStreams(EngineProxy):
    """One rank's random streams become those of another. Collective, on every rank, once, in the step where it is due."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: SwappedRng, rank: int) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault)
        self._fault, self._here = fault, rank == fault.rank

    def begin_micro_step(self, index: int, count: int) -> None:
        super().begin_micro_step(index, count)
        if index == 0 and self._trigger.due():
            box = [capture_rng(self.device)]
            dist.broadcast_object_list(box, src=self._fault.source, device=self.device)
            if self._here:
                restore_rng(box[0], self.device)
