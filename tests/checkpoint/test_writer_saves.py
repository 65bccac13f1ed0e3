"""Saves in the background: what is agreed when, what waits for what, retries, deadlines, and courses taken back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from resilient.checkpoint.age import Age, checkpoint_age, overdue
from resilient.checkpoint.filesystem import FilesystemStore, Outcome
from resilient.checkpoint.manifest import list_checkpoints
from resilient.checkpoint.snapshot import Snapshot
from resilient.checkpoint.storage import LocalStorage
from tests.checkpoint.threads import ThreadRanks

pytestmark = pytest.mark.timeout(120)


class Gated(LocalStorage):
    """A folder whose writes of parts wait for `gate`, and fail `failures` times with ENOSPC."""

    def __init__(self, root: Path, failures: int = 0) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.failures = failures
        self.begun: list[str] = []

    def write(self, file: str, fill: Callable[[IO[bytes]], None]) -> None:
        self.begun.append(file)
        assert self.gate.wait(60)
        if self.failures > 0:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        super().write(file, fill)


def snapshot(step: int, attempt: int | None = None, size: int = 8) -> Snapshot:
    parts: dict[str, Any] = {"engine": {"w": torch.full((size,), float(step))}, "rng": {}, "data": {}, "judge": {}}
    digests = Snapshot.digest_parts(parts)
    return Snapshot(step, step if attempt is None else attempt, step, 0.1, step, parts, digests)


def alone(storage: LocalStorage, **changes: Any) -> FilesystemStore:
    arguments: dict[str, Any] = {
        "rank": 0,
        "world": 1,
        "vote": lambda ok: ok,
        "keep": 5,
        "run_id": "r",
        "generation": 0,
    }
    return FilesystemStore(storage, fingerprint={}, visible_s=2.0, **(arguments | changes))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def to_end(store: FilesystemStore) -> list[Outcome]:
    """As the step loop does: a report, and at a later point all ranks' reports."""
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + 30
    while store.pending:
        state = store.report()
        outcomes += store.advance(failed=state == "failed", ready=state == "ready")
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return outcomes


def steps(storage: LocalStorage) -> list[int]:
    return [c.manifest.step for c in list_checkpoints(storage).complete]


def test_begin_returns_before_anything_is_written_and_nothing_counts_before_all_agree(tmp_path: Path):
    storage = Gated(tmp_path / "checkpoints")
    store = alone(storage)
    assert store.report() == "idle"
    storage.gate.clear()
    assert store.begin(snapshot(5)) == []
    assert store.pending == (5,)
    until(lambda: bool(storage.begun))
    assert store.report() == "busy"
    storage.gate.set()
    until(lambda: store.report() == "ready")
    assert steps(storage) == [], "the part is there, and no rank has heard that of the others"
    assert store.advance(failed=False, ready=False) == []
    store.report()
    assert store.advance(failed=False, ready=True) == []  # on to the commit
    until(lambda: store.report() == "ready")
    (outcome,) = store.advance(failed=False, ready=True)
    assert (outcome.step, outcome.committed, outcome.problem) == (5, True, "")
    assert steps(storage) == [5]
    assert store.pending == ()
    assert store.begin(snapshot(5)) == [] and store.pending == (), "the same again is nothing (BR-27)"
    store.close()


def test_a_report_of_a_stage_that_is_over_moves_nothing(tmp_path: Path):
    storage = Gated(tmp_path / "checkpoints")
    store = alone(storage)
    store.begin(snapshot(5))
    until(lambda: store.report() == "ready")
    store.give_up_after(3)  # between the row and the decision: a rollback
    store.begin(snapshot(3, attempt=9))
    assert store.advance(failed=False, ready=True) == [], "ready was said of the save of step 5"
    assert [o.step for o in to_end(store) if o.committed] == [3]
    assert steps(storage) == [3]
    store.close()


def test_one_waits_while_one_is_written_and_a_third_waits_for_the_first(tmp_path: Path):
    storage = Gated(tmp_path / "checkpoints")
    store = alone(storage)
    storage.gate.clear()
    assert store.begin(snapshot(1)) == [] and store.begin(snapshot(2)) == []
    assert store.pending == (1, 2)
    threading.Timer(0.3, storage.gate.set).start()
    outcomes = store.begin(snapshot(3))  # back-pressure: at most two snapshots are held
    assert [(o.step, o.committed) for o in outcomes] == [(1, True)]
    assert store.pending == (2, 3)
    assert [(o.step, o.committed) for o in store.drain()] == [(2, True), (3, True)]
    assert steps(storage) == [3, 2, 1]
    store.close()


def test_or_it_replaces_the_one_that_was_not_begun(tmp_path: Path):
    storage = Gated(tmp_path / "checkpoints")
    store = alone(storage, when_busy="replace")
    storage.gate.clear()
    store.begin(snapshot(1)), store.begin(snapshot(2))
    (dropped,) = store.begin(snapshot(3))
    assert (dropped.step, dropped.committed, dropped.dropped) == (2, False, True)
    assert store.pending == (1, 3)
    storage.gate.set()
    store.drain()
    assert steps(storage) == [3, 1]
    store.close()


def test_what_belongs_to_a_course_taken_back_is_not_committed(tmp_path: Path):
    storage = Gated(tmp_path / "checkpoints")
    store = alone(storage)
    storage.gate.clear()
    store.begin(snapshot(8)), store.begin(snapshot(12))
    given_up = store.give_up_after(6)
    assert [(o.step, o.dropped) for o in given_up] == [(12, True), (8, True)]
    store.begin(snapshot(6, attempt=14))
    storage.gate.set()
    assert [(o.step, o.committed) for o in store.drain()] == [(6, True)]
    assert steps(storage) == [6]
    assert list_checkpoints(storage).orphans == ()
    store.close()


def test_a_failed_write_is_tried_again_later_and_the_third_try_counts(tmp_path: Path):
    storage = Gated(tmp_path / "checkpoints", failures=2)
    store = alone(storage, retries=3, retry_wait_s=0.05)
    began = time.monotonic()
    assert store.save(snapshot(5))
    assert time.monotonic() - began >= 0.15, "0.05 s, then 0.1 s"
    assert steps(storage) == [5] and len(storage.begun) == 3
    store.close()


def test_after_the_last_try_nothing_is_left_and_the_older_one_is_as_it_was(tmp_path: Path):
    storage = Gated(tmp_path / "checkpoints")
    store = alone(storage, retries=1, retry_wait_s=0.01)
    assert store.save(snapshot(5))
    storage.failures = 2
    assert not store.save(snapshot(10))
    assert "could not write rank-00000.pt" in store.problem and "No space left" in store.problem
    assert storage.folders() == ["step-00000005-a00000005"]
    assert store.save(snapshot(15)), "and the next one is a save like any other"
    store.close()


def test_a_write_that_hangs_fails_at_its_deadline_and_the_next_save_works(tmp_path: Path):
    storage = Gated(tmp_path / "checkpoints")
    store = alone(storage, deadline_s=0.3)
    storage.gate.clear()
    began = time.monotonic()
    assert not store.save(snapshot(5))
    assert time.monotonic() - began < 20
    assert "the storage hangs" in store.problem
    storage.gate.set()
    until(lambda: store.save(snapshot(10)))
    assert steps(storage) == [10]
    store.close()


def test_close_leaves_a_hanging_write_alone(tmp_path: Path):
    storage = Gated(tmp_path / "checkpoints")
    store = alone(storage)
    storage.gate.clear()
    store.begin(snapshot(5))
    until(lambda: bool(storage.begun))
    from resilient.checkpoint import filesystem

    limit, filesystem._CLOSE_S = filesystem._CLOSE_S, 0.2
    try:
        began = time.monotonic()
        store.close()
        assert time.monotonic() - began < 10
    finally:
        filesystem._CLOSE_S = limit
        storage.gate.set()


def test_one_rank_that_cannot_write_is_a_no_from_all_and_the_others_do_not_wait_for_it(tmp_path: Path):
    """BR-29, BR-31; and a vote's deadline need not exceed the time to write."""
    ranks = ThreadRanks(3)
    slow = Gated(tmp_path / "checkpoints")

    def job(rank: int, vote: Any, gather: Any) -> Any:
        storage = slow if rank == 2 else LocalStorage(tmp_path / "checkpoints")
        store = FilesystemStore(
            storage, rank=rank, world=3, vote=vote, keep=3, run_id="r", generation=0, fingerprint={}, gather=gather
        )
        first = store.save(snapshot(1))
        if rank == 2:
            slow.gate.clear()
            slow.failures = 1
            threading.Timer(1.0, slow.gate.set).start()
        began = time.monotonic()
        second = store.save(snapshot(2))
        took = time.monotonic() - began
        third = store.save(snapshot(3))
        loaded = store.load()
        store.close()
        return first, second, third, took, loaded and loaded.step, store.problem

    for rank, (first, second, third, took, step, _) in enumerate(ranks.run(job)):
        assert (first, second, third, step) == (True, False, True, 3), rank
        assert 0.5 < took < 15
    assert [c.manifest.step for c in list_checkpoints(tmp_path / "checkpoints").complete] == [3, 1]


def test_the_age_of_the_newest_checkpoint():
    assert checkpoint_age(30, 100.0, (25, 90.0)) == Age(5, 10.0)
    assert checkpoint_age(20, 100.0, (25, 90.0)) == Age(0, 10.0), "after a rollback"
    assert not overdue(Age(75, 0.0), every=25, intervals=3)
    assert overdue(Age(76, 0.0), every=25, intervals=3)
    assert not overdue(Age(1000, 0.0), every=25, intervals=0)
    assert not overdue(Age(1000, 0.0), every=0, intervals=3)
