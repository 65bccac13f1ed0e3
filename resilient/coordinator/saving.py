"""Checkpoints at quiescent points: when one is due, that it is consistent, and what is known about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from resilient.checkpoint.config import CheckpointConfig
from resilient.checkpoint.manifest import Checkpoint, Health
from resilient.checkpoint.snapshot import Snapshot
from resilient.coordinator.contracts import Contracts
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.feed import WindowFeed
from resilient.coordinator.outer import Outer
from resilient.coordinator.state import StateKeeper
from resilient.engines.base import Engine
from resilient.errors import CounterMismatch, GuardError


class Store(Protocol):
    """Where checkpoints go. All methods are collective."""

    def save(self, snapshot: Snapshot, outer: dict[str, Any] | None, health: Health | None = None) -> bool:
        """True on all ranks if the checkpoint is committed and visible; False on all ranks if it is not."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Note the evaluation of the checkpoint of `step`, if there is one. Not collective."""

    def best(self) -> Checkpoint | None:
        """The checkpoint with the best evaluation. For one rank."""


class Saver:
    """One per coordinator. Collective methods raise ExchangeFailed when the ranks cannot vote: nothing was committed then,
    and nothing can be until they can.

    last: step of the newest checkpoint known here. level: the stability letter to write down with it."""

    def __init__(
        self,
        engine: Engine,
        exchange: Exchange,
        feed: WindowFeed,
        state: StateKeeper,
        contracts: Contracts,
        *,
        store: Store | None,
        config: CheckpointConfig,
        tell: Callable[[str, Mapping[str, Any]], None],
        level: Callable[[], str],
    ) -> None:
        self._engine, self._exchange, self._feed = engine, exchange, feed
        self._state, self._contracts = state, contracts
        self._store, self._config = store, config
        self._tell, self._level = tell, level
        self._last_evaluation: tuple[int, dict[str, float]] = (-1, {})
        self.last: int | None = None

    @property
    def periodic(self) -> bool:
        return self._store is not None and self._config.every > 0

    def save_if_due(self, outer: Outer, step: int, *, applied: bool, asked: bool, snapshot: Snapshot | None) -> None:
        """At a quiescent point at `step`. snapshot: of it, if there is one already."""
        if self._store is None or step == self.last:
            return
        if asked or (applied and self._config.every > 0 and step % self._config.every == 0):
            self.save(snapshot or self._state.capture(step, outer.attempts), outer)

    def save(self, snapshot: Snapshot, outer: Outer) -> None:
        """Raises CounterMismatch rather than save what does not belong together, GuardError if the configuration wants
        the job to end when a checkpoint fails."""
        assert self._store is not None
        steps = self._contracts.engine_steps()
        if steps != snapshot.step or self._feed.position != snapshot.position:
            raise CounterMismatch(
                f"not saved: step {snapshot.step}, engine {steps}, "
                f"data window {self._feed.position} against {snapshot.position}"
            )
        finite = bool(torch.isfinite(self._engine.weight_sq_share()))
        health = Health(finite=self._exchange.vote(finite, snapshot.step), level=self._level())
        if self._store.save(snapshot, outer.as_dict(), health):
            self.last = snapshot.step
            if self._last_evaluation[0] == snapshot.step:
                self._store.evaluated(*self._last_evaluation)
            self._tell("checkpoint", {"step": snapshot.step})
        elif self._config.on_failure == "abort":
            raise GuardError(
                f"the checkpoint of step {snapshot.step} could not be saved (checkpoint.on_failure: abort)"
            )
        else:
            self._tell(
                "warning", {"message": f"the checkpoint of step {snapshot.step} could not be saved; training goes on"}
            )

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """What an evaluation of the weights of `step` found (BR-35: retention knows which checkpoint is the best)."""
        self._last_evaluation = (step, dict(values))
        if self._store is not None:
            self._store.evaluated(*self._last_evaluation)

    def kept(self) -> str:
        """The best checkpoint, in words; only rank 0 looks."""
        best = self._store.best() if self._store is not None and self._exchange.rank == 0 else None
        if best is None or not math.isfinite(best.manifest.health.eval_loss or math.nan):
            return ""
        return f"; best evaluation at step {best.manifest.step} ({best.manifest.health.eval_loss:.4g}), checkpoint kept"
