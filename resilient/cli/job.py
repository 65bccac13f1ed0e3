"""One training job, from a resolved configuration to an exit code. Runs on every rank."""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from resilient import faults
from resilient.cli.argv import Runtime
from resilient.cli.check import check_job
from resilient.cli.errors import fail
from resilient.coordinator.exchange import Exchange
from resilient.engines.build import build_engine
from resilient.errors import ConfigError, ExitCode, Preempted, ResilientError, StopRequested
from resilient.integrations.guard import Guard, open_run
from resilient.recovery.verdict import GENERATION, write_verdict
from resilient.telemetry.run_directory import RunDirectory
from resilient.train.config import JobConfig
from resilient.train.data import TokenStream, as_text
from resilient.train.evaluate import HeldOut, Sampler
from resilient.train.loop import next_byte_loss, train
from resilient.train.model import GPT
from resilient.train.optim import make_optimizer, make_scheduler


def run(resolved: dict[str, Any], runtime: Runtime) -> int:
    """Train as `resolved` says. Returns the exit code of DESIGN 8, the same on all ranks."""
    if int(resolved["run"]["threads"]) > 0:
        torch.set_num_threads(int(resolved["run"]["threads"]))
    with ExitStack() as stack:
        device = _device(runtime)
        _open_process_group(stack, device, runtime)
        guard = resolved["run"]["guard"]
        exchange = Exchange(device, guard["exchange_timeout_s"], mode=guard["exchange_mode"])
        resolved = exchange.share(resolved)  # one resolution for all: rank 0's
        settings = resolved["run"]
        try:
            directory = open_run(
                Path(settings["root"]) / settings["id"],
                resolved,
                exchange,
                resume=settings["resume"],
                on_config_change=settings["on_config_change"],
            )
            stack.callback(directory.close)
            resolved = exchange.share(directory.config)  # of a resumed run: the one it began with
            resolved = _same_global_batch(resolved, directory.first_world, exchange)
            config = check_job(resolved, runtime)
        except ConfigError as error:
            return fail(error, runtime.rank)
        os.environ[GENERATION] = str(directory.generation)
        return _train_to_the_end(config, resolved, directory, exchange, device, runtime)


def _train_to_the_end(
    config: JobConfig,
    resolved: dict[str, Any],
    directory: RunDirectory,
    exchange: Exchange,
    device: torch.device,
    runtime: Runtime,
) -> int:
    guard: Guard | None = None
    code, status, reason, eval_loss = ExitCode.DONE, "done", "done", None
    try:
        guard, stream, evaluate, sample, objective = _assemble(config, resolved, directory, exchange, device, runtime)
        signal.signal(signal.SIGTERM, lambda *_: guard.preempt())
        signal.signal(signal.SIGUSR1, lambda *_: guard.preempt())
        try:
            eval_loss = train(
                guard,
                evaluate,
                steps=config.run.steps,
                eval_every=config.run.eval_every,
                probe_every=config.model.probe_every,
                sample=sample,
                objective=objective,
            )
            guard.finish("done", eval_loss=eval_loss)
        finally:
            stream.close()
    except StopRequested as stop:
        code, status, reason = stop.exit_code, "stopped", str(stop)
        assert guard is not None
        with guard.evaluation():  # all ranks stopped together, on sound weights: say how good they are
            eval_loss = evaluate()
    except Preempted as leave:
        code, status, reason = leave.exit_code, "preempted", str(leave)
    except ResilientError as error:
        code, status, reason = error.exit_code, "failed", f"{type(error).__name__}: {error}"
    except Exception as error:
        traceback.print_exc()
        code, status, reason = ExitCode.RESTART, "failed", f"{type(error).__name__}: {error}"
    finally:
        if code is not ExitCode.DONE:
            if runtime.rank == 0:
                print(f"resilient: {status}: {reason}", file=sys.stderr, flush=True)
                write_verdict(directory.path, code, reason, directory.generation)
            if guard is not None:
                guard.finish(status, eval_loss=eval_loss, reason=reason, save=False)
        if guard is not None:
            guard.close()
    return int(code)


def _assemble(
    config: JobConfig,
    resolved: dict[str, Any],
    directory: RunDirectory,
    exchange: Exchange,
    device: torch.device,
    runtime: Runtime,
) -> tuple[Guard, TokenStream, HeldOut, Sampler | None, Any]:
    """Model, data, engine, faults, guard. Faults go in before the guard, which must see what they do."""
    run_config, rank, world = config.run, exchange.rank, exchange.world_size
    _seed(run_config.seed)  # the same on all ranks: one model
    model = GPT(config.model)
    stream = TokenStream(config.data, seed=run_config.seed, rank=rank, world=world)
    engine = build_engine(
        config.engine,
        model,
        make_optimizer=lambda module: make_optimizer(module, config.optim),
        make_scheduler=lambda optimizer: make_scheduler(optimizer, config.optim, run_config.steps),
        clip=config.optim.clip,
        accumulation=config.data.accumulation,
        micro_batch=config.data.micro_batch,
        device=device,
    )
    _seed(run_config.seed + 1 + rank)  # and a random stream of its own for every rank
    evaluate = HeldOut(
        engine,
        stream.corpus,
        config.data,
        batches=run_config.eval_batches,
        rank=rank,
        world=world,
        leaving=lambda: guard is not None and guard.leaving(),
    )
    sample = None
    if run_config.sample_tokens > 0:
        sample = Sampler(engine, stream.corpus, config.data, tokens=run_config.sample_tokens, seed=run_config.seed)
    guard: Guard | None = None
    fault = faults.parse(resolved.get("fault") or {"kind": "none"})
    engine, data, objective = faults.install(
        fault,
        engine=engine,
        stream=stream,
        objective=next_byte_loss,
        step=lambda: guard.step_index if guard is not None else 0,
        rank=rank,
        world=world,
    )
    guard = Guard(
        engine,
        data=data,
        accumulation=config.data.accumulation,
        policy=config.policy,
        detector=config.detector,
        run_dir=directory,
        on_no_valid_checkpoint=run_config.on_no_valid_checkpoint,
        snapshot=run_config.snapshot,
        checkpoint=run_config.checkpoint,
        guard=run_config.guard,
        total_steps=run_config.steps,
        log_every=run_config.log_every,
        fingerprint={
            "engine.precision": config.engine.precision,
            "model": config.model.name,
        },
        exchange=exchange,
        text=as_text,
    )
    return guard, stream, evaluate, sample, objective


def _same_global_batch(resolved: dict[str, Any], first_world: int | None, exchange: Exchange) -> dict[str, Any]:
    """The configuration with so many micro-batches per window that a window holds as many samples over all ranks as it did
    on the ranks that the run began with, or as near to that as whole micro-batches allow."""
    before, world = int(resolved["data"]["accumulation"]), exchange.world_size
    if first_world is None or first_world == world:
        return resolved
    now = max(1, round(before * first_world / world))
    if exchange.rank == 0:
        batches = f"{before * first_world} micro-batches per step, now {now * world}"
        what = f"began with {first_world} ranks, now there are {world}: data.accumulation {before} -> {now} ({batches})"
        print(f"resilient: {resolved['run']['id']} {what}", file=sys.stderr)
    return {**resolved, "data": {**resolved["data"], "accumulation": now}}


def _device(runtime: Runtime) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(runtime.local_rank)
    return torch.device("cuda", runtime.local_rank)


def _open_process_group(stack: ExitStack, device: torch.device, runtime: Runtime) -> None:
    """Every engine but a bare module needs a group; a single process keeps its own in memory."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if runtime.world > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    # without this, gloo's teardown aborted one ZeRO-3 run in four
    stack.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)


def _seed(seed: int) -> None:
    """Python, NumPy, torch CPU and device streams (T1)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
