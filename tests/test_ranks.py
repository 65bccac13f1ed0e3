"""The ranks of the tests are forks of a server that has imported much and done nothing; this holds it to that."""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import pytest
import torch

from tests.ranks import RankFailure, run_ranks


def _seen(rank: int, world: int) -> dict[str, object]:
    return {
        "imported": "resilient.engines.deepspeed" in sys.modules and "tests.scenarios.harness" in sys.modules,
        "server": len(os.listdir(f"/proc/{os.getppid()}/task")),
        "told": os.environ.get("RESILIENT_TEST_TOLD"),
        "drawn": (random.random(), float(np.random.rand())),
        "torch": float(torch.rand(())),
        "sum": float(torch.ones(1_000_000).sum()),  # a pool of threads that the fork has lost would hang here
    }


def _leave(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)


def test_a_rank_is_as_fresh_as_a_new_interpreter(monkeypatch: pytest.MonkeyPatch):
    first = run_ranks(_seen, 2)
    monkeypatch.setenv("RESILIENT_TEST_TOLD", "later")  # the server runs already
    found = run_ranks(_seen, 2)
    assert [each["told"] for each in first + found] == [None, None, "later", "later"]
    assert all(each["server"] == 1 for each in found), "an import of preload.py starts a thread: forks are not safe"
    assert all(each["imported"] for each in found) and all(each["sum"] == 1e6 for each in found)
    drawn = [number for each in first + found for number in each["drawn"]]  # type: ignore[union-attr]
    assert len(set(drawn)) == len(drawn)
    assert len({each["torch"] for each in first + found}) == 1  # torch's own default seed, as in any new interpreter


def test_a_rank_that_dies_is_a_failure():
    with pytest.raises(RankFailure, match=r"rank 1 failed:\nthe process died without a word"):
        run_ranks(_leave, 2)
