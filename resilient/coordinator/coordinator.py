"""The step loop: measure -> exchange -> judge -> decide -> act -> commit, the same on every rank.

Read `step` first: it is one step's data from tap to action. No leader, no broadcast: every rank sees the same table
and takes the same decision. The vote comes after the backward pass and before the optimizer touches anything. How a
table becomes a decision is in inquiry.py; a window may run once more before anything acts (rerun.py).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from resilient.checkpoint.config import CheckpointConfig
from resilient.checkpoint.filesystem import FilesystemStore
from resilient.checkpoint.peer import PeerStore
from resilient.checkpoint.ring import MemoryRing
from resilient.checkpoint.rng import capture_rng, restore_rng
from resilient.checkpoint.snapshot import Snapshot
from resilient.coordinator.attendance import Attendance
from resilient.coordinator.config import GuardConfig
from resilient.coordinator.contracts import Contracts
from resilient.coordinator.events import Listener
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.feed import Window, WindowFeed
from resilient.coordinator.inquiry import Inquiry
from resilient.coordinator.judge import Judge, Judgement
from resilient.coordinator.keeping import Keeper
from resilient.coordinator.measure import Measurement
from resilient.coordinator.other_world import samples_per_window
from resilient.coordinator.outer import Outer
from resilient.coordinator.preemption import CalledAway, Preemption
from resilient.coordinator.reporting import Listeners, incident_report, step_report, unguarded_report, verdict_report
from resilient.coordinator.requests import RequestDesk
from resilient.coordinator.rerun import OriginProbe, Refused
from resilient.coordinator.resuming import Resumer
from resilient.coordinator.state import StateKeeper
from resilient.coordinator.tiers import Refit
from resilient.engines.base import Engine
from resilient.errors import (
    CheckpointError,
    ConfigError,
    ExchangeFailed,
    GuardError,
    Interrupted,
    MonitorBlind,
    Preempted,
    StopRequested,
)
from resilient.signals import Alarm, Confirmation, Decision, Exchanged, Flag, Kind, Knobs, StepRecord
from resilient.signals.record import names_digest

_UNGUARDED_REPORT_EVERY = 10  # steps: reading a loss costs a host sync, and unguarded must cost nothing


class Scene(Protocol):
    """Keeps what a refused step looked like. Called on every rank at the gate, before anything acts. Never raises."""

    def __call__(self, decision: Decision, batches: Sequence[Any], engine: Engine) -> None: ...


class Coordinator:
    """One per process, around one engine and one data feed. Without a judge (policy=off) it measures, exchanges and
    decides nothing: it only counts, feeds data and saves checkpoints.

    Attributes that a loop may read: `applied` (steps in force), `step_index` (step being attempted, 1-based),
    `window_size`, `window_tokens` (over all ranks, 0 if unknown), `guarded`, `rerunning` (a refused window is only looked
    at again).
    """

    def __init__(
        self,
        engine: Engine,
        feed: WindowFeed,
        *,
        judge: Judge | None,
        exchange: Exchange,
        ring: MemoryRing,
        config: GuardConfig,
        checkpoint: CheckpointConfig | None = None,
        store: FilesystemStore | None = None,
        listeners: Sequence[Listener] = (),
        outer_path: Path | None = None,
        scene: Scene | None = None,
        origin: OriginProbe | None = None,
        requests: tuple[Path, int] | None = None,
        peer: PeerStore | None = None,
    ) -> None:
        self.engine = engine
        self.feed = feed
        self.judge = judge
        self.exchange = exchange
        self.config = config
        self.outer = Outer(window_samples=samples_per_window(feed, exchange.world_size))
        self.applied = 0
        self.guarded = judge is not None
        self.window_size = feed.accumulation
        self.window_tokens = 0.0
        self.rerunning = False
        self._listeners = Listeners(listeners, exchange.rank)
        self._outer_path = outer_path if exchange.rank == 0 else None
        self._scene = scene
        self._origin = origin
        self._inquiry: Inquiry | None = None  # from `start` on, where there is a judge
        self._refused: Refused | None = None  # a window that is to run again before anything else: looked at, or held
        self._again: Refused | None = None  # the window of the next attempt, after a retry
        self._after_retry: Any = None  # random streams as they were at the end of the attempt that is run again
        self._state = StateKeeper(engine, feed, judge)
        self._contracts = Contracts(engine, config.blind_after)
        self.ring = ring
        self._preemption = Preemption(config.grace_s)
        self._kept = Keeper(
            engine,
            exchange,
            feed,
            self._state,
            self._contracts,
            ring,
            judge=judge,
            store=store,
            checkpoint=checkpoint or CheckpointConfig(every=0),
            peer=peer,
            preemption=self._preemption,
            tell=self._tell,
            level=self._level,
        )
        self._resumer = Resumer(
            exchange,
            feed,
            self._state,
            self._kept,
            outer_path=self._outer_path,
            allow_missing=checkpoint.allow_missing if checkpoint is not None else (),
            tell=self._tell,
        )
        self._measure = Measurement(engine, config) if judge is not None else None
        self._window: Window | None = None
        self._micro = 0
        self._backwards = 0
        self._window_of_step: dict[int, int] = {}
        self._digest = 0.0
        self._pending_flags = 0
        self._has_next = self._all_have_next = self._any_has_next = True  # this rank, all of them, any: the next window
        self._started = False
        self._pass_over = False
        self._clock = time.perf_counter()
        self._leaving = self._stopped = False
        self._exchange_works = True
        self._attendance = Attendance(exchange)
        self._told_no_request = False
        self._last_loss: torch.Tensor | None = None
        self._evaluated: dict[str, float] = {}  # since the last attempt, by column
        self._desk = None  # requests: run directory and generation; from outside, read on rank 0 and shared in its row
        if requests is not None and exchange.rank == 0:
            self._desk = RequestDesk(*requests, self._tell)

    # -- the loop's side ------------------------------------------------------------------------------------------

    @property
    def step_index(self) -> int:
        return self.applied + 1

    def start(self, on_no_valid_checkpoint: Literal["stop", "fresh"] = "stop", refit: Refit | None = None) -> None:
        """Begin or resume. Call once on all ranks before the first batch. refit: takes a checkpoint of another world size.

        Raises NothingUsable where something was trained and no state of it can be restored exactly on all ranks; ConfigError
        for weights that are not the cast of the engine's masters."""
        self._started = True
        self._contracts.anchor()
        resumed = self._resume(on_no_valid_checkpoint, refit)
        if not resumed and self.guarded:
            self._refuse_stale_masters()
        self._upcoming()
        if self.judge is not None and self.guarded:
            self._hello()
            self._inquiry = Inquiry(
                self.judge,
                self.engine,
                self.exchange,
                self.feed,
                self.config,
                self.outer,
                self._origin,
                targets=self._kept.tiers.count,
                tell=self._tell,
            )
        snapshot = self._snapshot_if(self.guarded and self.ring.config.every > 0)
        if not resumed and self._kept.saver.periodic:
            self._save(snapshot or self._state.capture(0, 0))  # a restart never has to begin from nothing
        remark = self._preemption.remark()
        if remark is not None:
            self._tell("warning", {"message": remark})
        self._leave_if_asked()

    def _resume(self, on_no_valid_checkpoint: Literal["stop", "fresh"], refit: Refit | None) -> bool:
        """From the best state that every rank can restore exactly. False: a fresh start."""
        resumed = self._resumer.best(on_no_valid_checkpoint, refit)
        if resumed is None:
            return False
        candidate, step = resumed.candidate, resumed.snapshot.step
        self.outer = resumed.outer
        if self.judge is not None and self.outer.policy:
            self.judge.ladder.load_state_dict(self.outer.policy)
        if candidate.health is not None:
            evaluation = candidate.health.evaluation.items()
            self._evaluated = {name: math.inf if v is None else v for name, v in evaluation}
        self.applied = step
        self._kept.saver.resumed(step, self.outer)
        self.outer.steps_lost = self.outer.applied - step
        self._contracts.anchor(step)
        self._kept.tiers.loaded(candidate)
        return True

    def _refuse_stale_masters(self) -> None:
        """A fresh start on weights that were loaded into a ready engine, past its masters: the first step would write the old
        ones back (BR-08). Collective."""
        wrong = self.engine.mismatched_weights()
        found = np.flatnonzero(self.exchange.gather(torch.tensor([float(bool(wrong))]))[:, 0])
        if len(found):
            why = self.exchange.share("; ".join(wrong), source=int(found[0]))
            raise ConfigError(
                f"the first step would overwrite the weights: {why}. Load weights before the engine is built or together with "
                "its optimizer's state, or make new masters of them on all ranks (DeepSpeed: "
                "engine.optimizer.refresh_fp32_params())"
            )

    def batches(self, steps: int | None = None, epochs: int | None = None) -> Iterator[Any]:
        """Micro-batches, window by window, until `steps` optimizer steps are in force, `epochs` epochs of the run are
        over (None: the current pass over the loader), or the data ends. Rollbacks happen inside: the iterator goes on
        from where the state is."""
        if not self._started:
            self.start()
        if self._pass_over:
            self._open_epoch()
            self.ring.clear()  # an earlier pass of the caller's loop cannot be gone back to from this one
            self._snapshot_if(self.guarded and self.ring.config.every > 0)
            self._pass_over = False
        while steps is None or self.applied < steps:
            refused, self._refused = self._refused, None
            if refused is not None and self.guarded:
                yield from self._run_again(refused)
                continue
            if self._again is None and not self._data_left():
                if epochs is None or self.feed.epoch + 1 >= epochs or self.config.on_uneven_data == "stop_all":
                    self._pass_over = True
                    break
                self._open_epoch()
                if not self._data_left():
                    break
            self._begin_window()
            assert self._window is not None
            batches = self._window.batches
            for index, batch in enumerate(batches):
                self.engine.begin_micro_step(index, len(batches))
                yield batch
                if self._window is not None:
                    self._check_micro(index)
        self._finish_saves()  # all ranks end together; a loop need not call anything for it

    def backward(self, loss: torch.Tensor, report: torch.Tensor | None = None, tokens: float | None = None) -> None:
        """Backward of one micro-step. `report`: the rank's own mean loss to show, when `loss` is weighted for the global
        mean; `tokens`: how many tokens it is over. Neither may cost a host sync."""
        if self.rerunning:
            assert self._inquiry is not None
            self._inquiry.rerun.loss(
                loss if report is None else torch.stack((loss.reshape(()), report.to(loss).reshape(())))
            )
        elif self._measure is not None and self.guarded:
            self._measure.loss(loss, report, tokens)
        self._last_loss = (loss if report is None else report).detach()
        self.engine.backward(loss)
        if self._measure is not None:
            self._measure.backward_done()
        self._backwards += 1

    def step(self) -> bool:
        """End of a micro-step. At the end of a window: the vote and what follows. Returns True when a window ended.

        Raises StopRequested when the policy stops, Preempted after a TERM, and the named contract errors; always on all
        ranks together."""
        self._micro += 1
        if self._window is None or self.rerunning or self._micro < len(self._window.batches):
            return False
        if not self.guarded:
            self._apply_unguarded()
        else:
            self._vote_and_act()
        self._window = None
        self._leave_if_asked()
        return True

    def leaving(self) -> bool:
        """In a long evaluation, now and then, on all ranks at the same place: True on all of them as soon as any was asked
        to leave. Break off then; the end of `evaluation()` saves and leaves. Collective: one small all-reduce."""
        if self.guarded and not self._leaving and not self._stopped:
            with self._meeting():
                self._leaving = not self.exchange.vote(self._preemption.asked_at is None, self.applied)
        return self._leaving

    def _leave_if_asked(self) -> None:
        """At the quiescent point that a TERM has been waiting for, on all ranks."""
        if self._leaving:
            if not self._kept.kept_at(self.applied):
                self._save_if_due(applied=False, asked=True, snapshot=None, leaving=True)
            saved = "the state is saved" if self._kept.kept_at(self.applied) else "nothing was saved"
            raise Preempted(f"asked to leave at step {self.applied}; {saved}")

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Everything inside is evaluation: taps and hooks do not look at it."""
        if self._measure is not None:
            self._measure.pause(True)
        try:
            yield
        finally:
            if self._measure is not None:
                self._measure.pause(False)
        self._leave_if_asked()

    def probe(self, attention_entropy: Any = None, attention_logit_max: Any = None) -> None:
        """What the loop's own model knows about its attention in this window. Nothing without a guard."""
        if self._measure is not None and self.guarded:
            self._measure.probe(attention_entropy, attention_logit_max)

    def request_checkpoint(self) -> None:
        """Save at the next quiescent point (BR-19), on all ranks even if only one asks (BR-22)."""
        self._pending_flags |= Flag.CHECKPOINT
        if self._told_no_request or (self.guarded and self._kept.saver.stores):
            return
        self._told_no_request = True
        if self._kept.saver.stores:
            why = "this run is not guarded, so its ranks cannot share a request: call guard.save() on every rank"
        else:
            why = "there is no run_dir to save to"
        self._warn(f"guard.checkpoint() does nothing: {why}")

    def save(self) -> bool:
        """Save the state of the present step and wait for it. See Guard.save. Collective."""
        if not self._kept.saver.stores:
            raise ConfigError("guard.save(): there is no run_dir to save to")
        if not self._started:
            raise ConfigError("guard.save(): nothing has begun yet: take a batch or call guard.start() first")
        held = self._refused is not None and self._refused.held
        note = ""
        if not self._exchange_works:
            note = f"the guard has broken, and rank {self.exchange.rank} cannot vote on a checkpoint any more"
        elif self._window is not None or self._again is not None or held:
            note = f"rank {self.exchange.rank} is in the middle of step {self.step_index}"
            note += ", which is saved at its end" if self.guarded else ": call it where guard.step() has returned True"
        with self._meeting():
            met = self._attendance.meet(f"save/{self.outer.attempts}", note)
            if met.missing:
                raise CheckpointError(met.missed(f"guard.save() after step {self.applied}"))
            note = met.note
        if note:
            self._pending_flags |= Flag.CHECKPOINT
            self._tell("warning", {"message": f"guard.save() after step {self.applied}: not saved now: {note}"})
            return False
        self._save_if_due(applied=False, asked=True, snapshot=None)
        return self._kept.saver.last == self.applied

    def request_preemption(self) -> None:
        """Leave at the next step boundary, saved. Safe to call from a signal handler, any number of times: it sets a flag,
        and calls this rank away from a wait for its loader.

        Unguarded ranks cannot agree on a boundary: with policy=off it raises Preempted at once, and Interrupted if the
        guard had broken (a dying peer breaks it first and brings the launcher's TERM next: that is no pre-emption)."""
        if self._measure is None:
            raise Preempted("asked to leave with policy=off: nothing was saved since the last checkpoint")
        if not self.guarded:
            raise Interrupted("told to end after the guard had broken")
        self._pending_flags |= Flag.PREEMPTED
        self._preemption.ask()

    def evaluated(self, step: int, values: Mapping[str, float], about: Mapping[str, Any]) -> None:
        """What an evaluation at `step` found. It rides in the next attempt's row, so that all ranks judge the same.

        values: by column (eval_loss, entropy, repetition); one that is not finite rides as inf. about: the event."""
        self._evaluated = {name: v if math.isfinite(v) else math.inf for name, v in values.items()}
        if step == self.applied:
            self._kept.saver.evaluated(step, self._evaluated)
        self._tell("evaluation", {"step": step, **about})

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something the loop wants in the journal."""
        self._tell(kind, fields)

    def close(self) -> None:
        """Remove hooks, close listeners, give the process group back. Idempotent."""
        if self._measure is not None:
            self._measure.close()
            self._measure = None
        if self._desk is not None:
            self._desk.close(self.applied)
        self._kept.close()
        self._listeners.close()
        if self._inquiry is not None:
            self._inquiry.close()
        self.exchange.close()

    # -- one step -------------------------------------------------------------------------------------------------

    def _begin_window(self) -> None:
        again, self._again = self._again, None
        if again is not None:
            self._window, self.window_tokens = again.window, again.begin.tokens
        elif self._has_next or not self.guarded:
            self._window = self.feed.take()
        else:
            self._window = self.feed.pad()
        self.window_size = len(self._window.batches)
        self._micro = self._backwards = 0
        self._window_of_step.setdefault(self.step_index, self._window.index)
        self._clock = time.perf_counter()
        if self._measure is not None and self.guarded:
            self._measure.start()
        if again is not None:
            again.begin.put_back(self.engine.device)  # last: what was above may draw
        if self._inquiry is not None and self.guarded:
            self._inquiry.rerun.mark(self.window_tokens)

    def _run_again(self, refused: Refused) -> Iterator[Any]:
        """A refused window once more, only to be looked at (see rerun.py): it counts for nothing. If the step was held for
        it, what follows from the first run is decided and done now."""
        assert self._inquiry is not None and self._measure is not None
        rerun = self._inquiry.rerun
        tokens_to_come, self.window_tokens = self.window_tokens, refused.begin.tokens
        self._window, self.window_size = refused.window, len(refused.window.batches)
        self._micro, self.rerunning = 0, True
        self._measure.pause(True)
        try:
            with closing(rerun.deliver(refused)) as batches:
                for index, batch in enumerate(batches):
                    yield batch
                    self._check_micro(index)
            origin, confirmation = rerun.agree(refused)
        except ExchangeFailed as error:
            self._exchange_works = False
            return self._guard_failed(error)
        finally:
            self._measure.pause(False)
            self.rerunning, self._window, self.window_tokens = False, None, tokens_to_come
        if origin is not None:
            self._tell("nan_origin", origin)
        if confirmation is not None:
            self._tell("confirmation", asdict(confirmation))
        if refused.held:
            self._settle_held(refused, confirmation)

    def _settle_held(self, refused: Refused, confirmation: Confirmation | None) -> None:
        """The step was held at the gate: do what follows from its first run, knowing what the second has shown."""
        assert self._inquiry is not None
        try:
            judgement = self._inquiry.resolve(refused, confirmation)
        except Exception as error:
            self._exchange_works = not isinstance(error, ExchangeFailed)
            return self._guard_failed(error)
        self._digest = judgement.decision.digest()
        self._window = refused.window
        try:
            self._act(judgement, refused.table, looked_at=refused.probed)
        finally:
            self._window = None
        self._leave_if_asked()

    def _check_micro(self, index: int) -> None:
        if self._micro != index + 1:
            raise MonitorBlind(
                "a batch was taken but guard.step() was not called for it: call guard.backward(loss) and guard.step() "
                "once per micro-batch"
            )

    def _vote_and_act(self) -> None:
        """The gate. Anything that breaks in the guard itself leaves the job training, unguarded and loudly."""
        if self._backwards != self._micro:
            raise MonitorBlind(
                f"guard.backward was called {self._backwards} times for {self._micro} micro-steps: the guard cannot see the loss"
            )
        upcoming = self._upcoming()  # outside: what the user's loader raises is the user's, not a failure of the guard
        if self._after_retry is not None:  # fetching the window in hand drew random numbers when the attempt first ran
            restore_rng(self._after_retry, self.engine.device)
            self._after_retry = None
        problem: Exception | None = None
        try:
            record = self._record(upcoming)
        except Exception as error:  # of this rank alone, perhaps: its row tells the others, and all go on unguarded
            problem = error
            record = StepRecord(
                self.step_index, self.outer.attempts + 1, flags=Flag.GUARD_FAILED, loss=0.0, loss_max=0.0
            )
        try:
            table = self.exchange.table(record)
            failed = table.ranks_flagged(Flag.GUARD_FAILED)
            if failed:
                raise problem or GuardError(f"the guard failed on rank {', '.join(map(str, failed))}")
        except Exception as error:
            self._exchange_works = not isinstance(error, ExchangeFailed)
            self._guard_failed(error)
            return self._apply_unguarded()
        self._contracts.check(table, self.applied, self.outer.attempts + 1)
        remark = self._contracts.remark(table, self.outer.attempts + 1)
        if remark:
            self._tell("warning", {"message": remark})
        self._note_next(table)
        assert self._inquiry is not None and self._window is not None
        try:
            judgement = self._inquiry.decide(table)
            self._refused = self._inquiry.hold(judgement, table, self._window)
            if self._refused is not None:  # batches() delivers the window once more before anything is decided
                return self.engine.abandon()
        except Exception as error:
            # The judge is pure, so this happens on all ranks alike. Should a rank be alone, the flag in its next row
            # takes the others along: until then it keeps exchanging.
            self._guard_failed(error)
            self.guarded = not isinstance(error, ExchangeFailed)
            self._exchange_works = self.guarded
            self._pending_flags |= Flag.GUARD_FAILED
            return self._apply_unguarded()
        self._digest = judgement.decision.digest()
        self._act(judgement, table)

    def _record(self, upcoming: Window | None) -> StepRecord:
        """This rank's row: the measurements, the next window in hand, and what the others have to know."""
        assert self._measure is not None and self._window is not None
        record = self._measure.record(self.step_index, self.outer.attempts + 1)
        record.tokens = self._window.tokens
        record.longest, record.padding = self._window.longest, self._window.empty
        if self.config.weights_every > 0 and self.step_index % self.config.weights_every == 0:
            record.weight_sq_share = self.engine.weight_sq_share()
        record.has_next = float(upcoming is not None)
        record.next_tokens = upcoming.tokens if upcoming is not None else 0.0
        record.wait_s, self.feed.wait_s = self.feed.wait_s, 0.0
        evaluated, self._evaluated = self._evaluated, {}
        for name, value in evaluated.items():
            setattr(record, name, value)
        record.digest = self._digest
        if self._inquiry is not None:
            self._inquiry.fill(record, self._window)
        dropped = Flag.TELEMETRY_FAILED if self._listeners.dropped else 0
        record.flags = self._pending_flags | dropped | self._kept.flags() | self._contracts.flags(self.applied)
        if self._desk is not None:
            self._desk.fill(record)
        return record

    def _upcoming(self) -> Window | None:
        """The next window. None: the epoch has no more, or there is no time left to wait for it."""
        try:
            with self._preemption.interruptible():
                return self.feed.peek()
        except CalledAway:
            self.feed.give_up()
            return None

    def _act(self, judgement: Judgement, table: Exchanged, looked_at: bool = False) -> None:
        """looked_at: where the NaN of this attempt began is known already."""
        decision, window = judgement.decision, self._window
        assert self.judge is not None and window is not None
        self.outer.attempts += 1
        self.outer.nonfinite_loss += int(table.total("nonfinite_loss") + table.total("nonfinite_forward"))
        in_reduction = any(f.place == "reduction" for f in judgement.findings)
        self.outer.nonfinite_grad += int(table.total("nonfinite_backward") > 0 or in_reduction)
        lr, knobs = self.engine.lr(), decision.knobs
        further_back = self.judge.ladder.repeats  # before this decision is booked
        first = self.judge.ladder.refused_in_a_row == 0
        if decision.incident and self._scene is not None and first:
            self._scene(decision, window.batches, self.engine)
        if self._inquiry is not None and decision.action == "skip" and not looked_at:
            self._refused = self._inquiry.rerun.origin(judgement, table, window, first)
        applied, target, excluded = False, None, None
        if decision.action == "apply":
            applied = self._apply(table.grad_norm, knobs)
        alarms = self.judge.settle(judgement, applied)
        self._kept.book(judgement, applied, self.applied)
        self.outer.policy = self.judge.ladder.state_dict()
        self.outer.retried += decision.action == "retry"
        # Before a rollback: the counters add up in the checkpoint that it commits.
        self.outer.skipped += not applied and decision.action != "retry"
        if decision.action == "skip":
            self.engine.skip(decision.overflow)
        elif decision.action == "retry":
            self._run_it_again(judgement, table, window)
        elif decision.action == "rollback":
            target, excluded = self._roll_back(decision, further_back)
        self._tell_step(judgement, table, window, alarms, applied, lr * knobs.lr_factor if applied else lr)
        if decision.incident:
            self._keep_outer()
            self._listeners.tell("incident", incident_report(judgement, target, excluded))
        if decision.action == "stop":
            self.engine.skip(False)
            self._stopped = True
            raise StopRequested(f"step {decision.step}: {decision.reason}{self._kept.saver.kept()}")
        if decision.action == "retry":  # no quiescent point: its window is still to be trained on
            sent = int(table.own("flags"))
            self._pending_flags |= sent & (Flag.CHECKPOINT | Flag.PREEMPTED)  # asked for again at the next gate
            return
        self._commit(applied, table)
        if self._desk is not None:
            saved = self._kept.saver.last == self.applied
            self._desk.answer(decision, self.applied, saved=saved, leaving=self._leaving)

    def _tell_step(
        self,
        judgement: Judgement,
        table: Exchanged,
        window: Window,
        alarms: Sequence[Alarm],
        applied: bool,
        lr: float,
    ) -> None:
        """What became of the attempt. lr: used, or that would have been."""
        assert self.judge is not None
        report = step_report(
            judgement,
            table,
            self.judge,
            applied=applied,
            lr=lr,
            time_s=time.perf_counter() - self._clock,
            position=window.index,
            attempts=self.outer.attempts,
        )
        report = replace(report, signals={**report.signals, **self._kept.saver.signals(self.applied)})
        self._listeners.tell("step", report)
        for alarm in alarms:
            self._tell("alarm", asdict(alarm))
        if alarms and not judgement.decision.incident:  # which says itself what is behind it
            verdict = verdict_report(judgement)
            if verdict:
                self._tell("verdict", verdict)

    def _run_it_again(self, judgement: Judgement, table: Exchanged, window: Window) -> None:
        """The same window is the next attempt at this step, as if this one had not been."""
        assert self._inquiry is not None
        self.engine.abandon()
        self._again = self._inquiry.rerun.again(judgement, table, window)
        self._after_retry = capture_rng(self.engine.device)

    def _apply(self, grad_norm: float | None, knobs: Knobs) -> bool:
        """Optimizer step, schedule and counters move together. False if the engine refused the step by itself."""
        before, lr = self.engine.counters().steps, self.engine.lr()
        with self._measure.stepping(self.step_index) if self._measure and self.guarded else nullcontext():
            self.engine.apply(grad_norm, knobs)
        applied = self.engine.counters().steps == before + 1
        if applied:
            self.applied += 1
            self.outer.applied += 1
            if self._inquiry is not None:
                self._inquiry.applied(lr * knobs.lr_factor)
        else:
            self._tell("warning", {"message": f"the engine refused step {self.step_index} by itself"})
        self._contracts.remember_lr()
        return applied

    def _commit(self, applied: bool, table: Exchanged) -> None:
        """The quiescent point: optimizer, schedule, counters and data position have moved. Snapshots are taken here only."""
        problem = self.outer.problem(self.applied)
        if problem:
            return self._guard_failed(GuardError(problem))
        sent = int(table.own("flags"))  # a request that came in meanwhile is still to be told
        self._pending_flags &= ~(sent & (Flag.CHECKPOINT | Flag.PREEMPTED))
        leaving = bool(table.ranks_flagged(Flag.PREEMPTED))
        asked = leaving or bool(table.ranks_flagged(Flag.CHECKPOINT))
        snapshot = self._snapshot_if(applied and self.ring.due(self.applied))
        with self._meeting():
            self._kept.hear(table, self.outer)
        if snapshot is not None:
            self._kept.copy(snapshot, self.outer)
        self._save_if_due(applied, asked, snapshot, leaving)
        if table.ranks_flagged(Flag.TELEMETRY_FAILED) and self.config.on_guard_failure == "stop":
            ranks = table.ranks_flagged(Flag.TELEMETRY_FAILED)
            raise GuardError(f"rank {', '.join(map(str, ranks))} cannot write its journal (on_guard_failure: stop)")
        self._leaving |= leaving
        if self._window_of_step and len(self._window_of_step) > 4096:
            for step in sorted(self._window_of_step)[:2048]:
                del self._window_of_step[step]

    # -- going back -----------------------------------------------------------------------------------------------

    def _roll_back(self, decision: Decision, further_back: int) -> tuple[int, tuple[int, int] | None]:
        """Restore the newest snapshot safely before the onset on all ranks, with proof; fall back to older ones.

        Returns the step gone back to and the data windows [first, last) excluded from now on."""
        assert decision.onset_step is not None and self._window is not None
        self.engine.skip(False)
        excluded = None
        if decision.skip_data:
            excluded = (self._window_of_step.get(decision.onset_step, self._window.index), self.feed.position)
        for candidate in self._kept.tiers.before(decision.onset_step, further_back):
            differences = self._state.tried(candidate.snapshot, excluded)
            if self.exchange.vote(not differences, candidate.key.step, decision.attempt):
                break
            self._kept.refused(candidate, differences)
        else:
            raise StopRequested(f"no state before step {decision.onset_step} could be restored exactly")
        snapshot = candidate.snapshot
        self.outer.rollbacks += 1
        self.outer.steps_lost += self.applied - snapshot.step
        if excluded is not None:
            self.outer.excluded.append(list(excluded))
        self.applied = snapshot.step
        if self._measure is not None:
            self._measure.forget_update()
        self._kept.gone_back(candidate, self.outer)
        self._window_of_step = {s: w for s, w in self._window_of_step.items() if s <= snapshot.step}
        self._contracts.remember_lr()
        self._hello()
        if self._kept.saver.periodic:
            # The newest commit is what a restart takes: from now on this state, not a later one from the bad stretch.
            self._save(self._state.capture(snapshot.step, decision.attempt))
        return snapshot.step, excluded

    def _snapshot_if(self, due: bool) -> Snapshot | None:
        snapshot = None
        if due:
            with self._meeting():
                snapshot = self._kept.snapshot(self.applied, self.outer)
        return snapshot

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save_if_due(self, applied: bool, asked: bool, snapshot: Snapshot | None, leaving: bool = False) -> None:
        if self._exchange_works:  # without votes no checkpoint can be committed
            with self._meeting():
                self._kept.save_if_due(
                    self.outer, self.applied, applied=applied, asked=asked, snapshot=snapshot, leaving=leaving
                )

    def _save(self, snapshot: Snapshot) -> None:
        with self._meeting():
            self._kept.save(snapshot, self.outer)

    def _finish_saves(self) -> None:
        """Wait for what is being written."""
        if self._exchange_works:
            with self._meeting():
                self._kept.saver.finish()

    def _level(self) -> str:
        return self.judge.level().letter if self.judge is not None and self.guarded else ""

    def save_final(self) -> None:
        """A checkpoint of the present state, if the last one is older. Call on all ranks between steps.

        What ranks do alone before the end of a job may take long: those that are missing are named after a few seconds, and
        waited for until the exchange gives up. Raises ExchangeFailed then: nothing was saved."""
        if not self._kept.saver.periodic or not self._exchange_works or not self._kept.saver.owes(self.applied):
            return
        missed = ""
        with self._meeting():
            met = self._attendance.meet(f"finish/{self.outer.attempts}")
            missed = met.missed(f"guard.finish() after step {self.applied}") if met.missing else ""
            if met.first and missed:
                patience = self.exchange.timeout.total_seconds()
                self._warn(f"{missed}. The last checkpoint waits up to {patience:g} s more for them")
        try:
            if self._exchange_works:
                self._kept.save_if_due(self.outer, self.applied, applied=True, asked=True, snapshot=None)
        except ExchangeFailed as error:
            self._exchange_works = False
            if missed:
                raise ExchangeFailed(f"the state of step {self.applied} is not saved: {missed}") from error
            self._guard_failed(error)

    # -- data -----------------------------------------------------------------------------------------------------

    def _hello(self) -> None:
        """Agree on the first window: at the start, after a rollback, and when an epoch opens."""
        upcoming = self._upcoming()
        record = StepRecord(self.step_index, self.outer.attempts, kind=Kind.HELLO, loss=0.0, loss_max=0.0)
        record.flags = self._pending_flags & Flag.PREEMPTED
        record.has_next = float(upcoming is not None)
        record.next_tokens = upcoming.tokens if upcoming is not None else 0.0
        layers = self.engine.layers.names if self.config.layers else ()
        record.digest = names_digest(layers)
        table = self.exchange.table(record)
        alike = table.ends("digest") == (record.digest, record.digest)
        self.exchange.layers = layers if alike else ()  # in every row from the next one on
        if not alike:
            self._tell("warning", {"message": "the ranks' models have different layers: no norms by layer group"})
        self._note_next(table)
        self._leaving |= bool(table.ranks_flagged(Flag.PREEMPTED))

    def _note_next(self, table: Exchanged) -> None:
        self._has_next = table.own("has_next") > 0
        self._all_have_next, self._any_has_next = table.all_have_next, table.any_has_next
        self.window_tokens = table.next_tokens

    def _data_left(self) -> bool:
        """Will every rank take part in one more window? The same answer on all ranks."""
        if not self.guarded:
            return self.feed.peek() is not None
        if self.config.on_uneven_data == "pad_with_zero_weight":
            return self._any_has_next
        return self._all_have_next

    def _open_epoch(self) -> None:
        self.feed.next_epoch()
        self._has_next = self._all_have_next = self._any_has_next = True
        if self.guarded:
            with self._meeting():
                self._hello()
            self._leave_if_asked()

    # -- when the guard itself breaks ---------------------------------------------------------------------------------

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Ranks agree on something inside that training does not depend on: if they cannot, it goes on unguarded."""
        try:
            yield
        except ExchangeFailed as error:
            self._exchange_works = False
            self._guard_failed(error)

    def _guard_failed(self, error: Exception) -> None:
        self.guarded = False
        self.window_tokens = 0.0  # nobody counts them together any more
        message = f"the guard failed at step {self.step_index}: {type(error).__name__}: {error}"
        if self.config.on_guard_failure == "stop":
            raise GuardError(f"{message} (on_guard_failure: stop)") from error
        print(
            f"resilient: WARNING: rank {self.exchange.rank}: {message}. TRAINING CONTINUES UNGUARDED.",
            file=sys.stderr,
            flush=True,
        )
        self._tell("guard_failed", {"message": message})

    def _apply_unguarded(self) -> None:
        """What the loop would have done without us. Checkpoints go on as long as the ranks can vote on them."""
        if self._desk is not None:
            self._desk.refuse_all("this run is not guarded now: its ranks cannot agree on a request", self.applied)
        self.outer.attempts += 1
        applied = self._apply(None, Knobs())
        self.outer.skipped += not applied
        if self._preemption.asked_at is not None:
            raise Interrupted("told to end when the guard broke: the ranks cannot agree on a step to leave at")
        self.feed.peek()
        self._save_if_due(applied, False, None)
        if applied and self.applied % _UNGUARDED_REPORT_EVERY == 0 and self._listeners:
            loss = float(self._last_loss) if self._last_loss is not None else math.nan
            tokens = self._window.tokens * self.exchange.world_size if self._window is not None else 0.0
            seconds = time.perf_counter() - self._clock
            self._listeners.tell(
                "step", unguarded_report(self.engine, self.applied, self.outer.attempts, loss, tokens, seconds)
            )

    # -- telling ------------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._listeners.tell("event", kind, fields)

    def _warn(self, message: str) -> None:
        """On this rank's stderr, and to its listeners."""
        print(f"resilient: WARNING: rank {self.exchange.rank}: {message}", file=sys.stderr, flush=True)
        self._tell("warning", {"message": message})

    def _keep_outer(self) -> None:
        """What outlives a rollback also outlives the process, from the incident on."""
        if self._outer_path is None:
            return
        try:
            self.outer.write(self._outer_path)
        except OSError as error:
            self._pending_flags |= Flag.TELEMETRY_FAILED
            print(f"resilient: WARNING: {self._outer_path} cannot be written: {error}", file=sys.stderr)
