"""Leaving when told to (TERM, USR1): heard in every loop, joined over all ranks, saved before the time is up.

The signal handler only asks. A step's gate carries it to the other ranks; so does `leaving` in a long evaluation; and a
rank that waits for its loader is called away from there, for the others already wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_MARGIN = 1.5  # a save under pressure takes longer than the ones before it


class CalledAway(BaseException):
    """Raised out of a wait for the loader, in the thread that the signal came to. No Exception: a loader that tries again
    after whatever goes wrong shall not swallow it."""


class Preemption:
    """One per coordinator. grace_s: seconds between the signal and the end, None if nobody knows."""

    def __init__(self, grace_s: float | None) -> None:
        self.grace_s = grace_s
        self.asked_at: float | None = None
        self._interruptible = False
        self._slowest_save = 0.0

    def ask(self) -> None:
        """From a signal handler, in the main thread, any number of times."""
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        if self._interruptible:
            self._interruptible = False
            raise CalledAway

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """What happens inside may be broken off by `ask`, with CalledAway."""
        self._interruptible = True
        try:
            if self.asked_at is not None:
                raise CalledAway
            yield
        finally:
            self._interruptible = False

    # -- time -----------------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save that is waited for, to know how long one takes."""
        began = time.monotonic()
        yield
        self._slowest_save = max(self._slowest_save, time.monotonic() - began)

    def fits(self) -> bool:
        """Will a save like the slowest so far be done before the time is up? This rank's own view."""
        if self.grace_s is None:
            return True
        spent = time.monotonic() - self.asked_at if self.asked_at is not None else 0.0
        return self._slowest_save * _MARGIN <= self.grace_s - spent

    def remark(self) -> str | None:
        """What to tell at the start, when a save has been measured against the time there will be."""
        if self.grace_s is None or self._slowest_save * _MARGIN <= self.grace_s:
            return None
        return (
            f"a checkpoint takes {self._slowest_save:.1f} s; when asked to leave there are {self.grace_s:.1f} s "
            "(run.guard.grace_s): only the copies in memory (run.checkpoint.peer) can be brought up to date then"
        )
