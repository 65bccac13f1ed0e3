"""checkpoint/writer.py: what happens in the background is in order, ends by its deadline, and holds nobody up."""

from __future__ import annotations

import threading
import time

from resilient.checkpoint.writer import GivenUp, Task, Writer


def test_tasks_run_in_order_and_an_error_is_kept():
    writer, seen = Writer("writer"), []

    def fail(task: Task) -> None:
        seen.append(2)
        raise OSError("no space")

    tasks = [
        writer.submit("one", lambda task: seen.append(1), 10),
        writer.submit("two", fail, 10),
        writer.submit("three", lambda task: seen.append(3), 10),
    ]
    assert writer.settle(10)
    assert seen == [1, 2, 3]
    assert [t.failed for t in tasks] == [False, True, False]
    assert str(tasks[1].error) == "no space"
    writer.close(5)


def test_a_task_given_up_before_its_turn_is_not_begun():
    writer, gate, seen = Writer("writer"), threading.Event(), []
    writer.submit("gate", lambda task: gate.wait(10), 10)  # type: ignore[arg-type, return-value]
    task = writer.submit("never", lambda task: seen.append("begun"), 10)
    task.give_up()
    assert task.finished
    assert isinstance(task.error, GivenUp)
    gate.set()
    assert writer.settle(10)
    assert seen == []
    writer.close(5)


def test_a_hanging_task_fails_at_its_deadline_and_another_thread_takes_over():
    writer, released = Writer("writer"), threading.Event()

    def hang(task: Task) -> None:
        released.wait(60)
        task.check()  # nobody waits any more: what would have been renamed here is not

    began = time.monotonic()
    stuck = writer.submit("hang", hang, 0.2)
    behind = writer.submit("behind it", lambda task: None, 60)
    assert not stuck.wait(0.05)
    assert stuck.wait(30)
    assert isinstance(stuck.error, TimeoutError)
    assert time.monotonic() - began < 20
    after = writer.run("after it", lambda task: None, 30)
    assert after.error is None
    assert behind.error is None and behind.finished, "what was queued goes on in the new thread"
    released.set()
    writer.close(5)


def test_while_too_many_hang_nothing_is_begun_and_then_all_is_well_again():
    before = threading.active_count()  # other tests' threads
    writer, released = Writer("writer"), threading.Event()
    for _ in range(2):
        assert writer.run("hang", lambda task: released.wait(60), 0.05).failed  # type: ignore[arg-type, return-value]
    refused = writer.run("one more", lambda task: None, 30)
    assert isinstance(refused.error, TimeoutError)
    assert "still hangs" in str(refused.error)
    assert threading.active_count() < before + 5
    released.set()
    deadline = time.monotonic() + 20
    while writer.run("again", lambda task: None, 5).failed:  # the threads need a moment to notice
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer.close(5)


def test_an_end_after_the_deadline_does_not_count():
    released, done = threading.Event(), threading.Event()

    def late(task: Task) -> None:
        released.wait(60)
        done.set()

    writer = Writer("writer")
    task = writer.run("late", late, 0.05)
    released.set()
    assert done.wait(30)
    assert isinstance(task.error, TimeoutError)
    writer.close(5)


def test_a_pause_between_tries_ends_when_nobody_waits():
    writer, seen = Writer("writer"), []

    def patient(task: Task) -> None:
        task.sleep(3600)
        seen.append("went on")

    task = writer.submit("patient", patient, 7200)
    task.give_up()
    assert writer.settle(30)
    assert seen == []
    writer.close(5)
