"""Checkpoints at quiescent points: when one is due, that it is consistent, and what became of it.

A save is frozen in memory when it is begun, and written in the background. How far each rank is rides in its row of the
table (`state`, `hear`), so that an ordinary step costs no collective more; where there is no table, ranks vote now and then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from resilient.checkpoint.age import Age, checkpoint_age, overdue
from resilient.checkpoint.config import CheckpointConfig
from resilient.checkpoint.filesystem import Outcome, State
from resilient.checkpoint.interval import IntervalConfig, Intervals
from resilient.checkpoint.manifest import Checkpoint, Health
from resilient.checkpoint.pieces import to_plain
from resilient.checkpoint.snapshot import PLAIN, Snapshot
from resilient.coordinator.contracts import Contracts
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.feed import WindowFeed
from resilient.coordinator.outer import Outer
from resilient.coordinator.state import StateKeeper
from resilient.engines.base import Engine
from resilient.errors import CheckpointError, CounterMismatch, ExchangeFailed, GuardError


class Store(Protocol):
    """Where checkpoints go: see FilesystemStore. All methods are called on all ranks at the same point if not said
    otherwise; only `poll` and `drain` always communicate, `begin` when it has to wait."""

    @property
    def pending(self) -> tuple[int, ...]: ...

    def begin(
        self,
        snapshot: Snapshot,
        outer: dict[str, Any] | None,
        health: Health | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Sequence[Outcome]: ...

    def report(self) -> State: ...

    def advance(self, *, failed: bool, ready: bool) -> Sequence[Outcome]: ...

    def poll(self) -> Sequence[Outcome]: ...

    def drain(self) -> Sequence[Outcome]: ...

    def give_up_after(self, step: int) -> Sequence[Outcome]: ...

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Note the evaluation of the checkpoint of `step`, if there is one. Does not wait."""

    def best(self) -> Checkpoint | None:
        """The checkpoint with the best evaluation. For one rank."""

    def close(self) -> None:
        """Not collective."""


@dataclass
class _Begun:
    """A save that is not done yet. at: when it was begun. stall_s: seconds that training stood still for it, None: all of
    them, it was waited for."""

    snapshot: Snapshot
    at: float
    stall_s: float | None = None


class Saver:
    """One per coordinator. Collective methods raise ExchangeFailed when the ranks cannot vote: nothing was committed then,
    and nothing can be until they can.

    last: step of the newest checkpoint known here. level: the stability letter to write down with it. lend, give_back:
    told of every snapshot that is read in the background from now on, and when it is not any more. begun, ended: told step
    and attempt of every checkpoint, and whether it was committed."""

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
        lend: Callable[[Snapshot], None] = lambda snapshot: None,
        give_back: Callable[[Snapshot], None] = lambda snapshot: None,
        begun: Callable[[int, int], None] = lambda step, attempt: None,
        ended: Callable[[int, int, bool], None] = lambda step, attempt, committed: None,
    ) -> None:
        self._engine, self._exchange, self._feed = engine, exchange, feed
        self._state, self._contracts = state, contracts
        self._store, self._config = store, config
        self._tell, self._level, self._lend, self._give_back = tell, level, lend, give_back
        self._on_begun, self._on_ended = begun, ended
        self._intervals: Intervals | None = None
        if config.adaptive:
            bounds = IntervalConfig(shortest=config.shortest, longest=config.longest)
            self._intervals = Intervals(bounds, exchange.world_size)
        self._step_s = math.nan  # of all ranks, as told at the last save
        self._counted: tuple[int, float] | None = None  # attempts and time at the last save
        self._evaluations: dict[
            int, dict[str, float]
        ] = {}  # by step: the last one, and those of saves that are pending
        self._pending: dict[tuple[int, int], _Begun] = {}  # by step and attempt
        self._newest = (0, time.monotonic())  # of a committed one: step, when it was captured
        self._began = self._heard = self._alarmed = False
        self._unheard = 0
        self._pieces: tuple[Any, list[tuple[Any, ...]]] | None = None  # the newest ones: of a state of what structure
        self._asked = 0  # saves for which all ranks were asked whether their pieces can be told
        self.last: int | None = None

    @property
    def stores(self) -> bool:
        """Whether there is a place to save to."""
        return self._store is not None

    @property
    def periodic(self) -> bool:
        return self._store is not None and self._config.every > 0

    def owes(self, step: int) -> bool:
        """Whether the state of `step` is not on disk yet, or something is still being written. The same on all ranks."""
        return self._store is not None and (bool(self._store.pending) or step != self.last)

    # -- what is being written ------------------------------------------------------------------------------------

    def state(self) -> State:
        """For this rank's row: where it stands with what it writes in the background."""
        return self._store.report() if self._store is not None else "idle"

    def hear(self, *, failed: bool, busy: bool) -> None:
        """At a quiescent point, from the table of the attempt: whether the `state` of some rank was "failed", or "busy"."""
        if self._store is not None:
            self._heard = True
            self._settle(self._store.advance(failed=failed, ready=not failed and not busy))

    def _poll(self) -> None:
        """Once per quiescent point. Without a table it takes a vote to know how far all ranks are: after 1, 2, 4, 8 ... steps."""
        assert self._store is not None
        heard, self._heard = self._heard, False
        if heard or not self._store.pending:
            self._unheard = 0
            return
        self._unheard += 1
        if self._unheard & (self._unheard - 1) == 0:
            self._settle(self._store.poll())

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        """Raises GuardError if the configuration wants the job to end when a checkpoint fails."""
        assert self._store is not None
        for outcome in outcomes:
            begun = self._pending.pop((outcome.step, outcome.attempt))
            self._on_ended(outcome.step, outcome.attempt, outcome.committed)
            if outcome.committed:
                self._give_back(begun.snapshot)  # else a writer that hangs may still read it
                self.last = outcome.step
                self._newest = (outcome.step, begun.at)
                self._learn(outcome, begun)
                if outcome.step in self._evaluations:
                    self._store.evaluated(outcome.step, self._evaluations[outcome.step])
                self._tell("checkpoint", {"step": outcome.step, "seconds": round(outcome.seconds, 3)})
                continue
            problem = f"the checkpoint of step {outcome.step} could not be saved"
            if self._config.on_failure == "abort" and not outcome.dropped:
                raise GuardError(f"{problem}: {outcome.problem} (checkpoint.on_failure: abort)")
            self._tell("warning", {"message": f"{problem}: {outcome.problem}; training goes on"})

    # -- when one is due ------------------------------------------------------------------------------------------

    def save_if_due(self, outer: Outer, step: int, *, applied: bool, asked: bool, snapshot: Snapshot | None) -> None:
        """At a quiescent point at `step`. snapshot: of it, if there is one already. asked: now, and waited for."""
        if self._store is None:
            return
        self._poll()
        if asked:
            self._settle(self._store.drain())
        newest = self._store.pending[-1] if self._store.pending else self.last
        if step != newest and (asked or (applied and self._due(step, newest))):
            self.save(snapshot or self._state.capture(step, outer.attempts), outer, wait=asked)
        self._watch_age(step)

    def save(self, snapshot: Snapshot, outer: Outer, *, wait: bool = False) -> None:
        """Begin to save, or, with `wait`, save. Raises CounterMismatch rather than save what does not belong together,
        GuardError as `_settle`."""
        assert self._store is not None
        steps = self._contracts.engine_steps()
        if steps != snapshot.step or self._feed.position != snapshot.position:
            raise CounterMismatch(
                f"not saved: step {snapshot.step}, engine {steps}, "
                f"data window {self._feed.position} against {snapshot.position}"
            )
        if self.last is not None and self.last > snapshot.step:
            self.last = None  # its steps were taken back
        self._settle(self._store.give_up_after(snapshot.step))
        pieces, problem = self._pieces_of(snapshot)
        if self._asked < 2 and not self._exchange.vote(not problem, snapshot.step):  # without moments, and with them
            why = problem or "another rank cannot say what its tensors are pieces of"
            message = f"checkpoints can be loaded with {self._exchange.world_size} ranks only, and not exported: {why}"
            self._tell("warning", {"message": message})
        self._asked += 1
        health = Health(level=self._level())  # whether it is finite is found while it is written
        facts = {"loss_scale": self._engine.loss_scale(), "samples": _samples(snapshot)}
        begun = self._pending[snapshot.step, snapshot.attempt] = _Begun(snapshot, time.monotonic())
        self._lend(snapshot)
        self._on_begun(snapshot.step, snapshot.attempt)
        saved = replace(snapshot, pieces=pieces)
        self._settle(self._store.begin(saved, outer.as_dict(), health, facts))
        self._unheard = 0
        if wait or self._config.blocking or not self._began:  # the first one shows at once whether saving works
            self._settle(self._store.drain())
        else:
            begun.stall_s = time.monotonic() - begun.at
        self._began = True

    # -- how far apart (S15) ---------------------------------------------------------------------------------------

    def _due(self, step: int, newest: int | None) -> bool:
        if self._config.every <= 0:
            return False
        if self._intervals is not None:
            return self._intervals.due(step, newest)
        return step % self._config.every == 0

    def stepped(self, outer: Outer) -> None:
        """An attempt is over."""
        if self._intervals is not None:
            before = self._intervals.steps
            self._intervals.step(self._level(), self._step_s)
            self._tell_interval(before, outer)

    def failed(self, outer: Outer) -> None:
        """The run goes back."""
        if self._intervals is not None:
            before = self._intervals.steps
            self._intervals.failed()
            self._tell_interval(before, outer)

    def _learn(self, outcome: Outcome, begun: _Begun) -> None:
        """What a save has cost, of the slowest rank. Collective where the interval adapts."""
        if self._intervals is None:
            return
        now, attempts = time.monotonic(), outcome.attempt
        mean = math.nan
        if self._counted is not None and attempts > self._counted[0]:
            mean = (now - self._counted[1]) / (attempts - self._counted[0])
        self._counted = (attempts, now)
        stall_s = outcome.seconds if begun.stall_s is None else begun.stall_s
        mine = torch.tensor([stall_s, outcome.seconds, mean], dtype=torch.float64)
        stall_s, write_s, self._step_s = self._exchange.gather(mine).max(axis=0).tolist()
        self._intervals.saved(stall_s, write_s)

    def _tell_interval(self, before: int, outer: Outer) -> None:
        assert self._intervals is not None
        outer.interval = self._intervals.state_dict()
        if self._intervals.steps != before:
            self._tell("interval", {"steps": self._intervals.steps, "why": self._intervals.reason()})

    def _pieces_of(self, snapshot: Snapshot) -> tuple[list[tuple[Any, ...]], str]:
        """What the engine's tensors are of the whole model, and why that cannot be said, "" if it can. Made again only when
        the state has another structure (after the first step, say): it takes some 0.1 ms a parameter."""
        state = snapshot.parts["engine"]
        structure = _structure(state)
        if self._pieces is None or self._pieces[0] != structure:
            try:
                self._pieces = structure, to_plain(self._engine.pieces(state))
            except CheckpointError as error:
                return [], str(error)
        return self._pieces[1], ""

    def finish(self) -> None:
        """Wait for what is being written, on all ranks."""
        if self._store is not None and self._store.pending:
            self._settle(self._store.drain())

    # -- what is known --------------------------------------------------------------------------------------------

    def age(self, step: int) -> Age:
        """Of the newest checkpoint, at `step`."""
        return checkpoint_age(step, time.monotonic(), self._newest)

    def signals(self, step: int) -> dict[str, float]:
        """For the report of a step; empty where nothing is saved by the step."""
        if not self.periodic:
            return {}
        age = self.age(step)
        return {"checkpoint_age": float(age.steps), "checkpoint_age_s": age.seconds}

    def _watch_age(self, step: int) -> None:
        """Tell it once when there has been no checkpoint for too long."""
        age = self.age(step)
        every = self._intervals.steps if self._intervals is not None else self._config.every
        alarm = overdue(age, every, self._config.alarm_after)
        if alarm and not self._alarmed:
            message = f"no checkpoint for {age.steps} steps ({age.seconds:.0f} s), one is due every {every}"
            self._tell("warning", {"message": f"{message}: a restart would lose all of them"})
        self._alarmed = alarm

    def resumed(self, step: int, outer: Outer) -> None:
        """The run goes on from the checkpoint of `step`: a start that had an end before."""
        if self._intervals is not None:
            if outer.interval:
                self._intervals.load_state_dict(outer.interval)
            self._intervals.failed()
        self.last = step
        self._newest = (step, time.monotonic())
        self._began = True

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """What an evaluation of the weights of `step` found (BR-35: retention knows which checkpoint is the best)."""
        if self._store is not None:
            self._evaluations = {s: v for s, v in self._evaluations.items() if s in self._store.pending}
            self._evaluations[step] = dict(values)
            self._store.evaluated(step, values)

    def kept(self) -> str:
        """The best checkpoint, in words; only rank 0 looks. Collective: what is being written is waited for first."""
        if self._store is None:
            return ""
        try:
            self._settle(self._store.drain())
        except (ExchangeFailed, GuardError):
            return ""  # the job ends for a reason of its own
        best = self._store.best() if self._exchange.rank == 0 else None
        if best is None or not math.isfinite(best.manifest.health.eval_loss or math.nan):
            return ""
        return f"; best evaluation at step {best.manifest.step} ({best.manifest.health.eval_loss:.4g}), checkpoint kept"

    def close(self) -> None:
        """Nothing more is committed. Not collective."""
        if self._store is not None:
            self._store.close()


def _structure(state: Any) -> Any:
    """Keys and shapes of a nested state, without its values."""
    if isinstance(state, torch.Tensor):
        return state.shape
    if isinstance(state, dict):
        return list(state), [_structure(value) for value in state.values()]
    if isinstance(state, list | tuple):
        plain = PLAIN.issuperset(map(type, state))
        return len(state) if plain else [_structure(value) for value in state]
    return None


def _samples(snapshot: Snapshot) -> int | None:
    """Global position of the data in samples, where the loader counts them."""
    loader = snapshot.parts["data"].get("loader")
    position = loader.get("position") if isinstance(loader, dict) else None
    return position if isinstance(position, int) else None
