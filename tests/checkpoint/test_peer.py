"""The peer tier (S16): any one host may vanish, and every rank still gets the newest snapshot that all of them held."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resilient.checkpoint.peer import PeerStore
from resilient.checkpoint.snapshot import Snapshot
from resilient.errors import CheckpointError

HOSTS = ("a", "a", "b", "b")


class World:
    """Ranks as threads: `gather` is a barrier with a deadline."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20.0)
        self.rows: list[Any] = [None] * size

    def gather(self, rank: int) -> Callable[[torch.Tensor], np.ndarray]:
        def together(vector: torch.Tensor) -> np.ndarray:
            self.rows[rank] = vector.double().numpy().copy()
            self.barrier.wait()
            table = np.stack(self.rows)
            self.barrier.wait()
            return table

        return together


def on_all(work: Callable[[int, World], Any], size: int = len(HOSTS)) -> list[Any]:
    world, found = World(size), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, world)
        except Exception as error:
            found[rank] = error
            world.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def store(root: Path, rank: int, world: World, **options: Any) -> PeerStore:
    made = PeerStore(root / HOSTS[rank], rank=rank, token="t", timeout_s=5.0, **options)
    made.join(HOSTS, world.gather(rank))
    return made


def snapshot(step: int, rank: int, attempt: int | None = None) -> Snapshot:
    parts = {
        "engine": {"w": torch.full((1000,), float(step * 10 + rank))},
        "rng": {"r": torch.tensor(rank)},
        "data": {"window": step},
        "judge": {},
    }
    return Snapshot(
        step, attempt if attempt is not None else step, step, 0.1, step, parts, Snapshot.digest_parts(parts)
    )


def train(root: Path, steps: list[int], settled: list[int], keep: int = 2) -> None:
    """Hold `steps`, and settle those that all ranks held."""

    def work(rank: int, world: World) -> None:
        with_copies = store(root, rank, world, keep=keep)
        for step in steps:
            with_copies.hold(snapshot(step, rank))
            assert with_copies.drain(20.0) and with_copies.held() == step and with_copies.problem() == ""
            world.barrier.wait()
            if step in settled:
                with_copies.settle(step, step)
            world.barrier.wait()
        with_copies.close()

    on_all(work)


def resume(root: Path) -> list[tuple[list[int], int | str]]:
    """(steps found, step loaded and proven) by rank; a text if it could not be loaded."""

    def work(rank: int, world: World) -> tuple[list[int], int | str]:
        again = store(root, rank, world)
        found = again.find()
        loaded: int | str = -1
        if found:
            key, holders = found[0]
            try:
                back, _ = again.load(key, holders[rank])
                assert back.digests == snapshot(key.step, rank).digests == Snapshot.digest_parts(back.parts)
                loaded = back.step
            except CheckpointError as error:
                loaded = str(error)
        world.barrier.wait()  # nobody stops serving before all have loaded
        again.close()
        return [key.step for key, _ in found], loaded

    return on_all(work)


def test_a_host_is_lost_with_its_memory(tmp_path: Path):
    train(tmp_path, [5, 10, 15], settled=[5, 10, 15])
    assert resume(tmp_path) == [([15, 10], 15)] * 4
    shutil.rmtree(tmp_path / "b")
    assert resume(tmp_path) == [([15, 10], 15)] * 4, "from the partners on the other host"


def test_only_what_every_rank_held_counts(tmp_path: Path):
    train(tmp_path, [5, 10], settled=[5])
    assert resume(tmp_path) == [([5], 5)] * 4
    for lost in (tmp_path / "a").glob("*a00000005-rank-00001*"):
        lost.unlink()
    assert resume(tmp_path) == [([5], 5)] * 4, "one copy is enough"
    assert list((tmp_path / "a").glob("*a00000005-rank-00001*")), "which has been fetched back"
    for lost in tmp_path.glob("*/*a00000005-rank-00001*"):
        lost.unlink()
    assert resume(tmp_path) == [([], -1)] * 4, "a part that lies nowhere"


def test_damage_is_found(tmp_path: Path):
    train(tmp_path, [5], settled=[5])
    (path,) = (tmp_path / "a").glob("*rank-00000*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    told = resume(tmp_path)
    assert "digest differs" in str(told[0][1]) and [loaded for _, loaded in told[1:]] == [5, 5, 5]


def test_memory_is_bounded(tmp_path: Path):
    train(tmp_path, list(range(1, 9)), settled=list(range(1, 9)))
    for host in ("a", "b"):
        names = sorted(os.listdir(tmp_path / host))
        assert len([n for n in names if n.endswith(".pt")]) == 2 * 4, names  # two snapshots, own and partners' parts
        assert not [n for n in names if n.endswith(".partial")]


@pytest.mark.parametrize("full", ["own", "partner"])
def test_a_copy_that_fails_is_said_and_nothing_else_happens(tmp_path: Path, full: str):
    def work(rank: int, world: World) -> tuple[int, str]:
        with_copies = store(tmp_path, rank, world, limit=10 if full == "partner" else 1 << 30)
        world.barrier.wait()
        if full == "own" and rank == 0:
            shutil.rmtree(with_copies.folder)
        world.barrier.wait()
        with_copies.hold(snapshot(5, rank))
        assert with_copies.drain(20.0)
        world.barrier.wait()
        told = with_copies.held(), with_copies.problem()
        with_copies.close()
        return told

    told = on_all(work)
    assert told[0][0] == -1 and ("could not copy step 5" if full == "own" else "413") in told[0][1]
    assert full == "own" or all(held == -1 for held, _ in told)


def test_newer_is_the_later_attempt_not_the_larger_step(tmp_path: Path):
    def work(rank: int, world: World) -> list[int]:
        copies = store(tmp_path, rank, world)
        for step, attempt in ((15, 18), (12, 20)):  # after a rollback
            copies.hold(snapshot(step, rank, attempt))
            assert copies.drain(20.0) and copies.held() == attempt
            world.barrier.wait()
            copies.settle(step, attempt)
            world.barrier.wait()
        found = [key.step for key, _ in copies.find()]
        world.barrier.wait()
        copies.close()
        return found

    assert on_all(work) == [[12, 15]] * 4
