"""`resilient.Guard`: the guard around a training loop of one's own.

    guard = resilient.Guard(model, optimizer, scheduler=scheduler, data=loader, run_dir="runs/my-run")
    for batch in guard.batches(epochs=3):
        loss = model(batch)
        guard.backward(loss)
        guard.step()

`model` may be a DeepSpeed engine, a model with `fully_shard` applied, a DistributedDataParallel, or, in one process, a
plain module. `guard.step()` is called once per micro-batch and does what optimizer.step(), scheduler.step() and
zero_grad() did, when the window is complete and all ranks agree that the step is sound.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.checkpoint.filesystem import configured_store
from resilient.checkpoint.peer import PeerStore
from resilient.checkpoint.ring import MemoryRing
from resilient.checkpoint.storage import LocalStorage
from resilient.coordinator.config import GuardConfig
from resilient.coordinator.coordinator import Coordinator
from resilient.coordinator.events import Listener
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.feed import WindowFeed, count_tokens
from resilient.coordinator.judge import Judge
from resilient.coordinator.other_world import OtherWorld
from resilient.coordinator.outer import Outer
from resilient.detectors import DetectorConfig, build_monitor
from resilient.engines.absent import refuse_unknown
from resilient.engines.base import Engine
from resilient.errors import CheckpointError, ConfigError, ExitCode, ResilientError
from resilient.incidents.nan_origin import OriginProbe
from resilient.incidents.scene import SceneKeeper
from resilient.policies import Ladder, PolicyConfig
from resilient.recovery.verdict import announce, write_verdict
from resilient.telemetry.listeners import Progress, RunRecorder
from resilient.telemetry.replay import ReplayCheck
from resilient.telemetry.run_directory import RunDirectory


class Guard:
    """Construct on every rank, after the model is wrapped and before the first batch.

    model, optimizer, scheduler, data: the loop's own objects. `data` is any iterable of micro-batches; with
        `state_dict`/`load_state_dict` it is restored exactly, otherwise by count (`restores_data` says which).
    accumulation: micro-batches per optimizer step. For a DeepSpeed engine its own setting is taken.
    clip: clip the global gradient norm to this value. For a DeepSpeed engine its own setting is used.
    policy: "default", "observe", "off", or a PolicyConfig.
    run_dir: where to write journal, steps, incidents and checkpoints; None: nothing is written or resumed.
    resume: auto (go on if `run_dir` holds a checkpoint) | never | must.
    tokens: how many loss-carrying tokens a micro-batch holds. text: what it says in words, for the scene of an incident.
    fingerprint: JSON values a checkpoint must match to be loaded, besides engine and world size.

    Raises ConfigError on all ranks when the parts do not fit together.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        data: Iterable[Any],
        scheduler: Any = None,
        accumulation: int | None = None,
        clip: float | None = None,
        policy: str | PolicyConfig = "default",
        detector: DetectorConfig | None = None,
        run_dir: str | os.PathLike[str] | RunDirectory | None = None,
        resume: Literal["auto", "never", "must"] = "auto",
        on_no_valid_checkpoint: Literal["stop", "fresh"] = "stop",
        snapshot: SnapshotConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        guard: GuardConfig | None = None,
        total_steps: int | None = None,
        log_every: int = 10,
        tokens: Callable[[Any], float] = count_tokens,
        text: Callable[[Any], str] | None = None,
        config: Mapping[str, Any] | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        listeners: Sequence[Listener] = (),
        exchange: Exchange | None = None,
        progress: bool = True,
    ) -> None:
        engine = wrap(model, optimizer, scheduler, clip)
        self.engine = engine
        self.policy = _policy(policy)
        guard = guard or GuardConfig()
        checkpoint = checkpoint or CheckpointConfig()
        refuse_unknown(checkpoint.allow_missing, engine.optional_parts(), engine.name)
        exchange = exchange or Exchange(engine.device, guard.exchange_timeout_s, mode=guard.exchange_mode)
        self.rank, self.world = exchange.rank, exchange.world_size
        _no_one_way_data(data)
        feed = WindowFeed(
            data,
            _accumulation(model, accumulation),
            tail=guard.on_epoch_tail,
            tokens=tokens,
            digests=self.policy.mode != "off",
        )
        judge = None
        if self.policy.mode == "off":
            engine.close()  # no hook, no tap: nothing is measured
        else:
            monitor = build_monitor(detector or DetectorConfig())
            judge = Judge(monitor, Ladder(self.policy), exchange.sketch_state)
        if run_dir is not None and not isinstance(run_dir, RunDirectory):
            run_dir = open_run(run_dir, config or {}, exchange, resume=resume)
        self.run: RunDirectory | None = run_dir
        store = None
        if self.run is not None:
            store = configured_store(
                checkpoint,
                self.run.path,
                rank=self.rank,
                world=self.world,
                vote=exchange.vote,
                gather=exchange.gather,
                generation=self.run.generation,
                fingerprint={"engine": engine.name, **(fingerprint or {})},
                about={**self.run.about(), **_about(engine)},
                may_write=self.run.assert_current_generation,
            )
        self._recorder = RunRecorder(self.run) if self.run is not None and self.rank == 0 else None
        built: list[Listener] = [*listeners]
        if self._recorder is not None:
            built.append(self._recorder)
        if progress and self.rank == 0:
            built.append(Progress(self.run, total_steps=total_steps, log_every=log_every))
        if self.run is not None and self.run.resumed and self.rank == 0:
            built.append(ReplayCheck(self.run, tuple(built)))
        scene = None
        if self.run is not None:
            scene = SceneKeeper(self.run.incidents, self.rank, keep=guard.scene, limit=guard.scene_limit, text=text)
        self._coordinator = Coordinator(
            engine,
            feed,
            judge=judge,
            exchange=exchange,
            ring=MemoryRing(snapshot or SnapshotConfig()),
            config=guard,
            checkpoint=checkpoint,
            store=store,
            listeners=built,
            outer_path=self.run.path / "outer.json" if self.run is not None else None,
            scene=scene,
            origin=OriginProbe(self.run.incidents if self.run is not None else None, self.rank),
            requests=(self.run.path, self.run.generation) if self.run is not None else None,
            peer=_peer_store(checkpoint, self.run, exchange) if self.run is not None else None,
        )
        self._exchange = exchange
        self.restores_data: Literal["exactly", "by count"] = "exactly" if feed.exact else "by count"
        self._store = store
        self._refit = None
        if store is not None and checkpoint.elastic and isinstance(store.storage, LocalStorage):
            self._refit = OtherWorld(
                store.folder,
                engine,
                feed,
                judge,
                rank=self.rank,
                world=self.world,
                tell=self._coordinator.event,
                allow_missing=checkpoint.allow_missing,
            )
        self._on_no_valid_checkpoint = on_no_valid_checkpoint
        self._begun = False

    # -- the loop -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Resume or begin. Called by the first `batches()`; call it yourself to know `applied` before. Collective."""
        if self._begun:
            return
        self._begun = True
        coordinator = self._coordinator
        about = {
            "engine": self.engine.name,
            "policy": self.policy.name,
            "world": self.world,
            "data_restored": self.restores_data,
        }
        coordinator.event("start", {**about, "generation": self.run.generation if self.run is not None else 0})
        coordinator.start(self._on_no_valid_checkpoint, self._refit)

    def batches(self, *, steps: int | None = None, epochs: int | None = None) -> Iterator[Any]:
        """Micro-batches until `steps` optimizer steps are in force or `epochs` epochs of the run are over; with neither,
        one pass over the data. Rollbacks happen inside, and so does a second look at a window refused for a NaN (see
        `rerunning`). The same number of micro-batches on all ranks."""
        self.start()
        yield from self._coordinator.batches(steps, epochs)

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def backward(self, loss: torch.Tensor, report: torch.Tensor | None = None, tokens: int | None = None) -> None:
        """In place of loss.backward(). Gradients are the mean over micro-steps and ranks of `loss`: do not divide by the
        accumulation. report, tokens: this rank's own mean loss and over how many tokens, when `loss` is weighted."""
        self._coordinator.backward(loss, report, tokens)

    def step(self) -> bool:
        """In place of optimizer.step(), scheduler.step() and zero_grad(); once per micro-batch. True when a window ended.

        Raises on all ranks together: StopRequested (the policy stops), Preempted, MonitorBlind, ScheduleMismatch,
        CounterMismatch, RankDisagreement. Each leaves its verdict in the run directory for `resilient launch`."""
        try:
            return self._coordinator.step()
        except ResilientError as error:
            self.leave_verdict(error.exit_code, f"{type(error).__name__}: {error}")
            raise

    def evaluation(self) -> AbstractContextManager[None]:
        """`with guard.evaluation():` around evaluation passes: the guard does not look at what happens inside."""
        return self._coordinator.evaluation()

    def probe(self, *, attention_entropy: Any = None, attention_logit_max: Any = None) -> None:
        """Tell the guard what your model knows about its attention in this window: mean entropy in nats, largest |q.k|
        before the softmax, each a float or a 0-dim tensor (S8, S9). Once a layer or once a step; means and maxima are
        taken. A module that leaves a list `attention_stats` of objects with `entropy` and `peak_logit` needs no call."""
        self._coordinator.probe(attention_entropy, attention_logit_max)

    def checkpoint(self) -> None:
        """Save at the end of this step, on all ranks. Call it from one rank or several: the request travels with the step, and
        nobody waits for a rank that did not ask. In a run that is not guarded it does nothing, and says so: see `save`."""
        self._coordinator.request_checkpoint()

    def save(self) -> bool:
        """Save the state of step `applied` now, and wait until it is on disk. Call it on every rank at the same place, where
        `step()` has returned True; collective.

        True on all ranks: it is on disk. False on all of them: it could not be written, or there is no consistent state now
        (a step is still under way on some rank: it is saved at its end). A warning in the journal says why; training goes on.

        Raises CheckpointError, on the ranks that called it, when others do not come within 8 s (or `exchange_timeout_s`, if that
        is shorter), naming them: nothing was saved, and a loop may catch it and train on. ConfigError without a run directory
        or before the start.
        After something that only some ranks do, which may take longer, put a dist.barrier() before it."""
        try:
            return self._coordinator.save()
        except CheckpointError:
            raise
        except ResilientError as error:
            self.leave_verdict(error.exit_code, f"{type(error).__name__}: {error}")
            raise

    def leaving(self) -> bool:
        """Ask now and then in a long evaluation, on all ranks at the same place: True on all of them as soon as any was asked
        to leave. Break off then: the end of `with guard.evaluation()` saves and raises Preempted. One small all-reduce."""
        return self._coordinator.leaving()

    def preempt(self) -> None:
        """Leave at the next step boundary, saved, with Preempted on all ranks. For a signal handler."""
        self._coordinator.request_preemption()

    def evaluated(
        self,
        step: int,
        *,
        loss: float | None = None,
        entropy: float | None = None,
        repetition: float | None = None,
        text: str | None = None,
    ) -> None:
        """Tell what an evaluation after `step` found: into the journal, and into the judgement of the next attempt, where
        silent collapse and a widening gap between training and evaluation are looked for (S1, S9, T10).

        loss: held-out, as the training loss is measured. entropy: of the model's output over text it sampled, nats a
        token. repetition: share of that text's n-grams that repeat earlier ones, 0..1. text: some of it, for people.
        Call it on all ranks with the same numbers; what only some ranks know is taken from them."""
        known = {"loss": loss, "entropy": entropy, "repetition": repetition}
        measured = {name: float(value) for name, value in known.items() if value is not None}
        about: dict[str, Any] = {**measured, "text": text} if text is not None else {**measured}
        columns = {"eval_loss" if name == "loss" else name: value for name, value in measured.items()}
        self._coordinator.evaluated(step, columns, about)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A line of your own in the journal, for example ("dataset", {"version": 3}). See `evaluated` for evaluations."""
        self._coordinator.event(kind, fields)

    # -- what a loop may ask --------------------------------------------------------------------------------------

    @property
    def applied(self) -> int:
        """Optimizer steps in force."""
        return self._coordinator.applied

    @property
    def step_index(self) -> int:
        """Optimizer step being attempted, 1-based."""
        return self._coordinator.step_index

    @property
    def window_tokens(self) -> float:
        """Loss-carrying tokens of the current window over all ranks and micro-steps; 0 if unknown."""
        return self._coordinator.window_tokens

    @property
    def window_size(self) -> int:
        """Micro-steps in the current window."""
        return self._coordinator.window_size

    @property
    def rerunning(self) -> bool:
        """True while a refused window is delivered once more to find where its NaN began: run it as any other; its
        result is dropped and `step()` returns False. For a loop that counts micro-batches on its own."""
        return self._coordinator.rerunning

    @property
    def guarded(self) -> bool:
        """False with policy=off, and after the guard itself broke."""
        return self._coordinator.guarded

    @property
    def counters(self) -> Outer:
        """attempts, applied, skipped, nonfinite_loss, nonfinite_grad, rollbacks, steps_lost of the whole run (BR-44)."""
        return self._coordinator.outer

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(
        self, status: str, *, eval_loss: float | None = None, reason: str = "", save: bool = True
    ) -> dict[str, Any]:
        """Write the last checkpoint, the summary and, for `done`, the verdict. status: done | stopped | preempted | failed. Collective when `save`.

        Ranks that are missing there are named in a warning after 8 s and waited for until the exchange gives up; then
        ExchangeFailed names them, and nothing was saved.

        Returns the summary on rank 0, {} elsewhere or without a run directory."""
        if save:
            try:
                self._coordinator.save_final()
            except ResilientError as error:
                self.leave_verdict(error.exit_code, f"{type(error).__name__}: {error}")
                raise
        counters = {
            k: v for k, v in self.counters.as_dict().items() if k not in ("policy", "excluded", "window_samples")
        }
        fields: dict[str, Any] = {"status": status, "counters": counters}
        if eval_loss is not None:
            fields["eval_loss"] = eval_loss
        if reason:
            fields["reason"] = reason
        self._coordinator.event("end", fields)
        if status == "done":
            self.leave_verdict(ExitCode.DONE, "done")
        return self._recorder.summary.as_dict() if self._recorder is not None else {}

    def leave_verdict(self, code: ExitCode, reason: str) -> None:
        """verdict.json, for the supervisor: launchers hide the ranks' exit codes. Does nothing on ranks other than 0,
        without a run directory, or when a newer start owns the run."""
        if self.run is not None and self.run.writable:
            try:
                self.run.assert_current_generation()
                write_verdict(self.run.path, code, reason, self.run.generation)
            except (OSError, ResilientError) as error:
                print(f"resilient: WARNING: no verdict could be written: {error}", file=sys.stderr)

    def close(self) -> None:
        """Remove every hook; the wrapped objects work on unguarded. Idempotent."""
        self._coordinator.close()
        self.engine.close()
        if self.run is not None:
            self.run.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close()


def wrap(model: Any, optimizer: torch.optim.Optimizer | None, scheduler: Any, clip: float | None) -> Engine:
    """The engine adapter for what the loop trains. Raises ConfigError when a part is missing."""
    if isinstance(model, Engine):
        return model
    _no_stray_scheduler(optimizer, scheduler)
    if type(model).__module__.startswith("deepspeed."):  # asked without importing deepspeed for those who do not use it
        from resilient.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(model, scheduler=scheduler)
    if optimizer is None:
        raise ConfigError("Guard: optimizer is missing; only a DeepSpeed engine brings its own")
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        from resilient.engines.fsdp2 import FSDP2Engine

        return FSDP2Engine(model, optimizer, scheduler, clip=clip)
    from resilient.engines.ddp import DDPEngine

    return DDPEngine(model, optimizer, scheduler, clip=clip)


def _about(engine: Engine) -> dict[str, Any]:
    """For the manifests of checkpoints: what a person wants to know of the job that wrote them."""
    parameters = list(engine.module.parameters())
    mesh = next((p.device_mesh for p in parameters if hasattr(p, "device_mesh")), None)
    return {
        "engine": engine.name,
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "mesh": {"names": list(mesh.mesh_dim_names or ()), "shape": list(mesh.shape)} if mesh is not None else None,
    }


def _no_stray_scheduler(optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
    """A schedule the guard does not know of is not rolled back, not saved, and not held on a skip (BR-09)."""
    patched = getattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched", False)
    if patched and scheduler is None:
        raise ConfigError(
            "Guard: an LR scheduler is attached to this optimizer but was not given to the guard: it would not be saved, "
            "restored or held on a refused step. Pass scheduler=..., and do not step it yourself"
        )


def _no_one_way_data(data: Iterable[Any]) -> None:
    """A generator gives its batches once: after a rollback or a restart it would go on with the wrong ones."""
    if isinstance(data, Iterator) and not hasattr(data, "load_state_dict"):
        raise ConfigError(
            f"Guard: data is a {type(data).__name__}, which can be read only once and has no state to restore. Pass "
            "something that can be iterated again (a DataLoader, a list), or give it state_dict and load_state_dict"
        )


def _peer_store(config: CheckpointConfig, run: RunDirectory, exchange: Exchange) -> PeerStore | None:
    """Copies in the hosts' memory, where they are asked for. Collective."""
    if not config.peer:
        return None
    token = exchange.share(run.token() if exchange.rank == 0 else None)
    digest = hashlib.blake2b(token.encode(), digest_size=4).hexdigest()
    problem, peer = "", None
    try:
        peer = PeerStore(
            Path(config.peer_folder) / f"{run.run_id}-{digest}",
            rank=exchange.rank,
            token=token,
        )
    except CheckpointError as error:
        problem = str(error)
    if exchange.vote(peer is not None) and peer is not None:
        peer.join(exchange.hosts(), exchange.gather)
        return peer
    raise ConfigError(problem or "run.checkpoint.peer: another rank cannot keep copies in memory; its log says why")


def _policy(policy: str | PolicyConfig) -> PolicyConfig:
    if isinstance(policy, PolicyConfig):
        return policy
    modes = {"default": "act", "observe": "observe", "off": "off"}
    if policy not in modes:
        raise ConfigError(f"Guard: policy {policy!r} is not one of {', '.join(modes)} or a PolicyConfig")
    return replace(PolicyConfig(), name=policy, mode=modes[policy])  # type: ignore[arg-type]


def _accumulation(model: Any, given: int | None) -> int:
    own = getattr(model, "gradient_accumulation_steps", None)
    own = own() if callable(own) else None
    if given is not None and own is not None and given != own:
        raise ConfigError(f"Guard: accumulation={given}, but the engine was built with {own}")
    return given or own or 1


def open_run(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    exchange: Exchange,
    *,
    resume: Literal["auto", "never", "must"] = "auto",
    on_config_change: Literal["keep", "refuse"] = "keep",
) -> RunDirectory:
    """The run directory `path` (<root>/<run id>): rank 0 opens it, the others attach. Collective.

    Raises ConfigError on all ranks when rank 0 cannot open it."""
    run, answer = None, {}
    if exchange.rank == 0:
        try:
            where = Path(path)
            run = RunDirectory.open(
                where.parent,
                where.name,
                dict(config),
                resume=resume,
                on_config_change=on_config_change,
                world=exchange.world_size,
            )
            answer = {"path": str(run.path)}
            announce(
                run.path, run.run_id, run.generation
            )  # before anything can fail: the supervisor reads its verdict there
            for key, was, now in run.differences:
                print(f"resilient: {run.run_id} began with {key}={was!r}; {now!r} is ignored", file=sys.stderr)
        except ResilientError as error:
            answer = {"error": str(error)}
    answer = exchange.share(answer)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return run if run is not None else RunDirectory.attach(answer["path"])
