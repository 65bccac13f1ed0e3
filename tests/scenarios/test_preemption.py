"""Issue 4.7, BR-22, BR-32: asked to leave in an evaluation or in a wait for data, all ranks leave saved, and nothing is lost."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from resilient.checkpoint.config import CheckpointConfig
from resilient.checkpoint.manifest import list_checkpoints
from resilient.coordinator.config import GuardConfig
from resilient.coordinator.preemption import CalledAway, Preemption
from resilient.errors import Preempted
from tests.ranks import run_pooled
from tests.scenarios.harness import Job, Outcome, run_job


def in_an_evaluation(at_step: int, asked: list[float]) -> Any:
    """Rank 1 is asked while all ranks evaluate after `at_step`; the loop polls."""

    def tweak(guard: Any, engine: Any) -> None:
        stepped = guard.step

        def step() -> bool:
            ended = stepped()
            if ended and guard.applied == at_step and not asked:
                with guard.evaluation():
                    for batch in range(1000):
                        if batch == 3 and guard.rank == 1:
                            guard.preempt()
                        if guard.leaving():
                            asked.append(batch)
                            break
            return ended

        guard.step = step

    return tweak


def in_a_wait_for_data(at_call: int, asked: list[float]) -> Any:
    """Rank 1's loader does not answer; the signal finds it there."""

    def tweak(guard: Any, engine: Any) -> None:
        feed, calls = guard._coordinator.feed, 0
        fetch = feed._next_batch

        def next_batch() -> Any:
            nonlocal calls
            calls += 1
            if calls == at_call and guard.rank == 1:
                before = signal.signal(signal.SIGALRM, lambda *_: guard.preempt())
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                began = time.monotonic()
                try:
                    time.sleep(60.0)  # what never comes
                finally:
                    asked.append(time.monotonic() - began)
                    signal.signal(signal.SIGALRM, before)
            return fetch()

        feed._next_batch = next_batch

    return tweak


def left_and_resumed(rank: int, world: int, folder: str, where: str) -> tuple[Outcome, Outcome, Outcome, list[float]]:
    job = Job(steps=8, run_dir=folder, checkpoint=CheckpointConfig(every=100))
    twin = run_job(job.with_(run_dir=None), rank, world)
    asked: list[float] = []
    tweak = in_an_evaluation(4, asked) if where == "evaluation" else in_a_wait_for_data(5, asked)
    left = run_job(job, rank, world, tweak=tweak, raises=Preempted)
    return twin, left, run_job(job, rank, world), asked


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["evaluation", "data"])
def test_heard_in_every_loop_saved_and_resumed_bit_for_bit(tmp_path: Path, where: str):
    for rank, (twin, left, resumed, asked) in enumerate(
        run_pooled(left_and_resumed, 2, str(tmp_path / "run"), where, timeout=110)
    ):
        assert left.error.startswith("Preempted: asked to leave at step 4; the state is saved"), (rank, left.error)
        if where == "evaluation":
            assert asked == [3], "all ranks break off at the same batch"
        elif rank == 1:
            assert len(asked) == 1 and asked[0] < 30.0, "called away from the wait"
        assert (resumed.applied, resumed.digest, resumed.rng) == (twin.applied, twin.digest, twin.rng), rank
        assert resumed.counters["applied"] == 8 and resumed.counters["steps_lost"] == 0, "no optimizer step is lost"


def test_a_loader_that_swallows_exceptions_does_not_swallow_the_call():
    preemption = Preemption(None)
    tried = 0
    with pytest.raises(CalledAway), preemption.interruptible():
        while True:
            try:
                tried += 1
                preemption.ask()
            except Exception:
                continue
    assert tried == 1
    preemption.ask()  # outside a wait it only notes
    with pytest.raises(CalledAway), preemption.interruptible():
        pytest.fail("asked already: there is no time to wait for data")


def test_the_time_of_a_save_is_held_against_the_time_there_is(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("resilient.coordinator.preemption.time.monotonic", lambda: now[0])
    preemption = Preemption(grace_s=30.0)
    with preemption.saving():
        now[0] += 10.0
    assert preemption.fits() and preemption.remark() is None
    preemption.ask()
    now[0] += 14.0
    assert preemption.fits()
    now[0] += 2.0
    assert not preemption.fits(), "14 s are left for what took 10 s: too near"
    with preemption.saving():
        now[0] += 21.0
    assert "21.0 s" in str(preemption.remark())
    assert Preemption(None).fits()


def slow_disk(seconds: float) -> Any:
    def tweak(guard: Any, engine: Any) -> None:
        storage = guard._store.storage
        write, stepped = storage.write, guard.step

        def slowly(file: str, fill: Any) -> None:
            time.sleep(seconds)
            write(file, fill)

        def step() -> bool:
            ended = stepped()
            if ended and guard.applied == 3 and guard.rank == 1:
                guard.preempt()
            return ended

        storage.write, guard.step = slowly, step

    return tweak


def in_a_hurry(rank: int, world: int, folder: str, grace_s: float) -> tuple[Outcome, Outcome, Outcome, list[int]]:
    config = CheckpointConfig(every=100, peer=True, peer_folder=f"{folder}/memory{grace_s:.0f}")
    job = Job(
        steps=8,
        run_dir=f"{folder}/run{grace_s:.0f}",
        checkpoint=config,
        guard=GuardConfig(exchange_timeout_s=30.0, grace_s=grace_s),
    )
    twin = run_job(job.with_(run_dir=None), rank, world)
    left = run_job(job, rank, world, tweak=slow_disk(1.0), raises=Preempted)
    on_disk = [c.manifest.step for c in list_checkpoints(Path(str(job.run_dir)) / "checkpoints").complete]
    return twin, left, run_job(job, rank, world), on_disk


@pytest.mark.timeout(120)
@pytest.mark.parametrize("grace_s", [1.0, 60.0])
def test_br52_what_does_not_fit_the_grace_goes_to_memory_and_the_disk_is_left_whole(tmp_path: Path, grace_s: float):
    for twin, left, resumed, on_disk in run_pooled(in_a_hurry, 2, str(tmp_path), grace_s, timeout=110):
        warned = [f["message"] for kind, f in left.events if kind == "warning" and "run.guard.grace_s" in f["message"]]
        came = next(fields["from"] for kind, fields in resumed.events if kind == "resume")
        assert "asked to leave at step 4; the state is saved" in left.error
        if grace_s < 2:
            assert warned and on_disk == [0] and "step 4" in came and "peer" in came, (warned, on_disk, came)
        else:
            assert not warned and on_disk == [4, 0] and "step 4" in came, (warned, on_disk, came)
        assert (resumed.digest, resumed.rng) == (twin.digest, twin.rng)
