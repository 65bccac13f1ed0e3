"""Ranks as threads of one process, for what needs several ranks and no tensors between them: a vote and a gather that are
collective, with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class ThreadRanks:
    """`run(fn)` calls fn(rank, vote, gather) on `world` threads and returns their results in rank order."""

    def __init__(self, world: int, timeout_s: float = 30.0) -> None:
        self.world, self._timeout_s = world, timeout_s
        self._barrier = threading.Barrier(world, timeout=timeout_s)
        self._told: list[Any] = [None] * world

    def vote(self, rank: int) -> Callable[[bool], bool]:
        return lambda ok: all(self._meet(rank, ok))

    def gather(self, rank: int) -> Callable[[torch.Tensor], np.ndarray]:
        return lambda vector: np.stack([told.numpy() for told in self._meet(rank, vector.double())])

    def _meet(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = value
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told

    def run(self, fn: Callable[..., Any]) -> list[Any]:
        results: list[Any] = [None] * self.world
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = fn(rank, self.vote(rank), self.gather(rank))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._timeout_s)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results
