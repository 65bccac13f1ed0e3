"""Gloo ranks for tests: a deadline on everything, the child's traceback on failure.

Ranks are forked from a server that has imported torch, DeepSpeed and the guard (preload.py) and done nothing else: as fresh as a
new interpreter, in a tenth of a second instead of five.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

_TIMEOUT = 120.0
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])


def _send(pipe: Connection, status: str, value: Any) -> None:
    """By value: torch's own pickler would send tensors as file descriptors that die with the child."""
    pipe.send_bytes(pickle.dumps((status, value)))


class RankFailure(AssertionError):
    """A rank raised, died or outlived the deadline."""


def _child(
    pipe: Connection,
    environ: dict[str, str],
    fn: Callable[..., Any],
    rank: int,
    world: int,
    rendezvous: str,
    args: tuple,
) -> None:
    _become_fresh(environ)
    _one_task(pipe, fn, rank, world, rendezvous, args)
    pipe.close()


def _become_fresh(environ: dict[str, str]) -> None:
    """What a new interpreter would have of its own, and a fork has of the server: the starter's environment of today, and
    NumPy's random stream (Python sees to its own)."""
    os.environ.clear()
    os.environ.update(environ)
    np.random.seed()


def _one_task(pipe: Connection, fn: Callable[..., Any], rank: int, world: int, rendezvous: str, args: tuple) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), DS_ACCELERATOR="cpu"
    )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        _send(pipe, "ok", fn(rank, world, *args))
    except BaseException:
        _send(pipe, "error", traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = _TIMEOUT) -> list[Any]:
    """Run picklable, top-level `fn(rank, world, *args)` on `world` fresh gloo ranks; return their results in rank order.

    Raises RankFailure with the first failing rank's traceback; kills all ranks at the deadline.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            arguments = (theirs, dict(os.environ), fn, rank, world, rendezvous, args)
            process = _CONTEXT.Process(target=_child, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


class RankPool:
    """Ranks that stay: each task gets a fresh process group in warm processes. For tests that leave nothing behind in
    their process (DeepSpeed does: it keeps the group it was initialised with). A failed task costs the pool."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = _TIMEOUT) -> list[Any]:
        """As `run_ranks`."""
        if not self._processes:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self._pipes:
                pipe.send_bytes(pickle.dumps((os.path.join(folder, "store"), fn, args)))
            try:
                return _collect(self._pipes, timeout)
            except BaseException:
                self.close()
                raise

    def _start(self) -> None:
        for rank in range(self.world):
            ours, theirs = _CONTEXT.Pipe()
            arguments = (theirs, dict(os.environ), rank, self.world)
            process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        """Kill the ranks. The next task starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


_pools: dict[int, RankPool] = {}


def run_pooled(fn: Callable[..., Any], world: int, *args: Any, timeout: float = _TIMEOUT) -> list[Any]:
    """`run_ranks` in warm processes that this test session keeps."""
    return _pools.setdefault(world, RankPool(world)).run(fn, *args, timeout=timeout)


def _serve(pipe: Connection, environ: dict[str, str], rank: int, world: int) -> None:
    _become_fresh(environ)
    while True:
        try:
            rendezvous, fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        _one_task(pipe, fn, rank, world, rendezvous, args)


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    errors: dict[int, str] = {}
    while len(results) + len(errors) < len(pipes):
        left = deadline - time.monotonic()
        if errors:
            left = min(left, 5.0)  # the others die of the first one; do not wait for them
        waiting = [p for i, p in enumerate(pipes) if i not in results and i not in errors]
        ready = wait(waiting, timeout=max(left, 0))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                status, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                status, value = "error", "the process died without a word"
            (results if status == "ok" else errors)[rank] = value
    if errors:
        rank, text = next(iter(errors.items()))
        raise RankFailure(f"rank {rank} failed:\n{text}")
    if len(results) < len(pipes):
        missing = [i for i in range(len(pipes)) if i not in results]
        raise RankFailure(f"ranks {missing} did not finish in {timeout:.0f} s")
    return [results[i] for i in range(len(pipes))]
