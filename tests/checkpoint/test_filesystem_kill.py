"""Death at every point of a save (BR-23): two forked processes, the real store, a rank that ends without cleaning up.

Each point is one system call that changes the disk (mkdir, write, fsync, rename, unlink). The rank dies just before the
n-th of them, for n = 1, 2, ... until the save gets through. After each death both ranks start again and load what is
on disk, as the next start of a job does."""

from __future__ import annotations

import builtins
import logging
import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import pytest
import torch

from resilient.bench.drill.faults import Halves
from resilient.checkpoint.filesystem import FilesystemStore
from resilient.checkpoint.manifest import list_checkpoints
from resilient.checkpoint.snapshot import Snapshot

FORK = multiprocessing.get_context("fork")  # spawned gloo ranks would take seconds for each of some forty deaths
DIED = 137


class Vote:
    """A collective over shared memory: True only if all said True; raises when somebody does not come."""

    def __init__(self, world: int) -> None:
        self.said = FORK.Array("b", world)
        self.told = FORK.Array("d", world * 512)
        self.barrier: Barrier = FORK.Barrier(world, timeout=15)

    def of(self, rank: int) -> Callable[[bool], bool]:
        def vote(ok: bool) -> bool:
            self.said[rank] = ok
            self.barrier.wait()
            answer = all(self.said)
            self.barrier.wait()
            return answer

        return vote

    def gather(self, rank: int) -> Callable[[torch.Tensor], np.ndarray]:
        def gather(vector: torch.Tensor) -> np.ndarray:
            self.told[rank * 512 : rank * 512 + len(vector)] = vector.tolist()
            self.barrier.wait()
            answer = np.array(self.told[:]).reshape(-1, 512)[:, : len(vector)]
            self.barrier.wait()
            return answer

        return gather


def snapshot(step: int, rank: int) -> Snapshot:
    state = torch.full((50_000,), float(1000 * step + rank))
    parts: dict[str, Any] = {"engine": {"w": state}, "rng": {"r": step}, "data": {"p": step}, "judge": {}}
    return Snapshot(step, step, step, 0.1, step, parts, Snapshot.digest_parts(parts))


def store(folder: Path, rank: int, vote: Vote, generation: int) -> FilesystemStore:
    return FilesystemStore(
        folder,
        rank=rank,
        world=2,
        vote=vote.of(rank),
        gather=vote.gather(rank),
        keep=1,
        run_id="r",
        generation=generation,
        fingerprint={},
        visible_s=2.0,
    )


class DeathBefore:
    """Ends this process just before the n-th call that changes the disk."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        for name in ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir"):
            setattr(os, name, self.counting(getattr(os, name)))
        self.open = builtins.open
        builtins.open = self.opening  # type: ignore[assignment]

    def counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return call(*args, **kwargs)

        return counted

    def opening(self, *args: Any, **kwargs: Any) -> Any:
        file = self.open(*args, **kwargs)
        if "w" not in "".join(a for a in args[1:2] if isinstance(a, str)):
            return file
        return _Dying(file, self.tick)

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            os._exit(DIED)


class _Dying(Halves):
    """A file whose writes count: a death leaves the first half of the data."""

    def __enter__(self) -> _Dying:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


def start(rank: int, folder: Path, vote: Vote, loaded: Any, step: int, victim: int, nth: int) -> None:
    """One start of the job: load, then save `step` with a death in it (nth 0: without)."""
    torch.set_num_threads(1)
    ours = store(folder, rank, vote, generation=step)
    found = ours.load()
    if found is not None:
        assert Snapshot.digest_parts(found.parts) == snapshot(found.step, rank).digests, "not a byte of another step"
    loaded[rank] = -1 if found is None else found.step
    vote.of(rank)(True)
    if rank == victim and nth > 0:
        DeathBefore(nth)
    try:
        saved = ours.save(snapshot(step, rank))
    except BrokenBarrierError:
        os._exit(3)
    os._exit(0 if saved else 4)


def run_start(folder: Path, step: int, victim: int, nth: int) -> tuple[list[int], list[int]]:
    """Exit codes, and the steps that were loaded, of both ranks. The first death breaks the vote for the survivor."""
    vote, loaded = Vote(2), FORK.Array("i", [-2, -2])
    ranks = [FORK.Process(target=start, args=(r, folder, vote, loaded, step, victim, nth)) for r in range(2)]
    for process in ranks:
        process.start()
    first = multiprocessing.connection.wait([p.sentinel for p in ranks], 20)
    if any(p.exitcode != 0 for p in ranks if p.sentinel in first):
        vote.barrier.abort()
    for process in ranks:
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()
    return [int(p.exitcode or 0) for p in ranks], list(loaded)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_at_any_point_of_a_save_leaves_one_whole_checkpoint(tmp_path: Path, victim: int) -> None:
    """BR-23, BR-29: the previous or the new one, the same on both ranks, never a mixture, never none."""
    torch.set_num_threads(1)
    logging.getLogger("resilient").setLevel(logging.CRITICAL)
    folder = tmp_path / "checkpoints"
    assert run_start(folder, 0, victim, 0) == ([0, 0], [-1, -1])
    expected, deaths, outcomes = 0, 0, set()
    for step in range(1, 100):
        codes, loaded = run_start(folder, step, victim, nth=step)
        assert loaded == [expected, expected]
        if codes[victim] == 0:
            break
        deaths += 1
        assert codes[victim] == DIED
        assert codes[1 - victim] in (0, 3), "the other notices, or was already through"
        complete = [c.manifest.step for c in list_checkpoints(folder).complete]
        assert complete, "the last complete checkpoint is never lost"
        assert complete[0] in (expected, step)
        if codes[1 - victim] == 0:
            assert complete[0] == step, "a rank that was told True finds its checkpoint"
        outcomes.add(complete[0] == step)
        expected = complete[0]
    assert codes == [0, 0]
    assert deaths >= (15 if victim == 0 else 8), "the points were really hit"
    assert outcomes == ({True, False} if victim == 0 else {False}), "before and, on the committer, after the commit"
    assert [c.manifest.step for c in list_checkpoints(folder).complete] == [step]
