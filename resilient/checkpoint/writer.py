"""What a save does to the disk is done by a thread in the background: nothing there may hold up a training step.

A write that hangs cannot be ended (a mount that has gone away holds its thread in the kernel), so a task has a deadline:
past it the task is given up, and a new thread takes over what is queued. Given-up threads are counted: while too many hang,
tasks fail at once, so that memory stays bounded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

_MAX_HANGING = 2


class GivenUp(Exception):
    """This task was cancelled, or its deadline has passed."""


class Task:
    """One piece of work. `error` says how it failed, once `finished`.

    The action is called with the task, and calls `check` between its steps: it raises GivenUp once nobody waits for the
    result any more. Nothing may be renamed or deleted after that."""

    def __init__(self, what: str, action: Callable[[Task], None], deadline_s: float) -> None:
        self.what = what
        self.deadline = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._action: Callable[[Task], None] | None = action
        self._over = threading.Event()
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self.error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Past its deadline a task is finished, and has failed."""
        if not self._over.is_set() and time.monotonic() >= self.deadline:
            self.give_up(TimeoutError(f"not done after {self._deadline_s:.0f} s: the storage hangs or is too slow"))
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        return self.finished and self.error is not None

    def wait(self, timeout_s: float) -> bool:
        """True once it is finished."""
        self._over.wait(max(min(timeout_s, self.deadline - time.monotonic()), 0))
        return self.finished

    def check(self) -> None:
        if self._cancelled.is_set():
            raise GivenUp(self.what)

    def sleep(self, seconds: float) -> None:
        """For the action: wait, but not for longer than somebody waits for it."""
        self._cancelled.wait(seconds)
        self.check()

    def give_up(self, error: Exception | None = None) -> None:
        """Nobody waits for it any more. Its thread ends at the next `check`, or when the storage lets it."""
        self._cancelled.set()
        self._end(error or GivenUp(self.what))

    def run(self) -> None:
        action, self._action = self._action, None  # it holds a snapshot, which goes with it
        try:
            self.check()
            assert action is not None
            action(self)
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        """The first end counts: a write that comes through after its deadline has failed all the same."""
        with self._lock:
            if not self._over.is_set():
                self.error = error
                self._over.set()


class Writer:
    """A queue of tasks and one thread for it, made when it is needed. For one caller's thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: _Thread | None = None
        self._hanging: list[_Thread] = []

    def submit(self, what: str, action: Callable[[Task], None], deadline_s: float) -> Task:
        """Queue it. Its deadline counts from now."""
        task = Task(what, action, deadline_s)
        self._look_after_thread()
        if len(self._hanging) >= _MAX_HANGING:
            task.give_up(TimeoutError(f"not begun: the storage still hangs ({self._hanging[-1].hangs_in})"))
            return task
        if self._thread is None:
            self._thread = _Thread(self._name)
        self._thread.put(task)
        return task

    def run(self, what: str, action: Callable[[Task], None], deadline_s: float) -> Task:
        """Queue it and wait for it, at most until its deadline."""
        task = self.submit(what, action, deadline_s)
        task.wait(deadline_s)
        return task

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued. False if that takes longer."""
        return self._thread is None or self.run("settle", lambda task: None, timeout_s).error is None

    def close(self, timeout_s: float) -> None:
        """Finish what is queued if that takes no longer than `timeout_s`; leave the rest."""
        if not self.settle(timeout_s):
            log.warning("%s is still busy after %.0f s and is left alone", self._name, timeout_s)
        if self._thread is not None:
            self._thread.stop()
            self._thread.join(0.5)
        self._thread = None

    def _look_after_thread(self) -> None:
        """A thread whose task was given up long ago hangs: another one takes the queue."""
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        thread = self._thread
        if thread is not None and thread.hangs:
            log.warning("%s hangs in %s; a new thread takes over", self._name, thread.hangs_in)
            self._hanging.append(thread)
            rest = thread.stop()
            self._thread = None
            if rest and len(self._hanging) < _MAX_HANGING:
                self._thread = _Thread(self._name)
            for task in rest:
                if self._thread is not None:
                    self._thread.put(task)
                else:
                    task.give_up(TimeoutError("not begun: the storage still hangs"))


class _Thread(threading.Thread):
    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)  # daemon: a hanging write must not keep the process
        self._queue: deque[Task] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._now: Task | None = None
        self.start()

    def put(self, task: Task) -> None:
        with self._changed:
            self._queue.append(task)
            self._changed.notify()

    def stop(self) -> list[Task]:
        """No new task is begun. Returns what was queued."""
        with self._changed:
            self._stopped = True
            rest = list(self._queue)
            self._queue.clear()
            self._changed.notify()
        return rest

    @property
    def hangs(self) -> bool:
        """Its task is over for those who wait, by its deadline, and it is still in it."""
        now = self._now
        return now is not None and now.finished and isinstance(now.error, TimeoutError)

    @property
    def hangs_in(self) -> str:
        now = self._now
        return now.what if now is not None else "nothing"

    def run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                self._now = self._queue.popleft()
            self._now.run()
            self._now = None
