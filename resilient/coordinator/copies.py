"""Copies of snapshots in the hosts' memory, kept up to date while training goes on (checkpoint/peer.py).

A copy is made in the background. How far each rank is rides in its row, as with checkpoints; complete is what every rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from resilient.checkpoint.peer import PeerStore
from resilient.checkpoint.snapshot import Snapshot
from resilient.coordinator.exchange import Exchange
from resilient.signals import Exchanged, Flag


class PeerCopies:
    """One per coordinator that has a peer store. All methods but `flags` are called on all ranks at the same point."""

    def __init__(
        self,
        peer: PeerStore,
        exchange: Exchange,
        *,
        tell: Callable[[str, Mapping[str, Any]], None],
        lend: Callable[[Snapshot], None],
        give_back: Callable[[Snapshot], None],
    ) -> None:
        self._peer, self._exchange, self._tell, self._lend, self._give_back = peer, exchange, tell, lend, give_back
        self._lent: Snapshot | None = None
        self._pending: tuple[int, int] | None = None  # step and attempt of the copy under way
        self._told = False  # that copies fail: once is enough
        self.last: int | None = None  # step of the newest complete one

    def flags(self) -> int:
        """For this rank's row."""
        if self._pending is None:
            return 0
        if not self._peer.idle:
            return Flag.COPY_BUSY
        return 0 if self._peer.held() == self._pending[1] else Flag.COPY_FAILED

    def hear(self, table: Exchanged) -> None:
        """At a quiescent point, what all ranks said of it in the attempt's rows."""
        if self._pending is None or table.ranks_flagged(Flag.COPY_BUSY):
            return
        failed = table.ranks_flagged(Flag.COPY_FAILED)
        if not failed:
            if self._lent is not None:
                self._give_back(self._lent)
            self._peer.settle(*self._pending)
            self.last = self._pending[0]
        elif not self._told:
            self._told = True
            why = self._peer.problem() or "its log says why"
            ranks = ", ".join(map(str, failed))
            self._tell("warning", {"message": f"no copy in another host's memory on rank {ranks}: {why}"})
        self._pending = None

    def begin(self, snapshot: Snapshot, outer: Mapping[str, Any]) -> None:
        """Copy a snapshot in the background, unless one is being copied."""
        if self._pending is None:
            self._lend(snapshot)
            self._lent = snapshot
            self._pending = (snapshot.step, snapshot.attempt)
            self._peer.hold(snapshot, outer)

    def make(self, snapshot: Snapshot, outer: Mapping[str, Any], seconds: float) -> bool:
        """Copy it now and wait for it. True on all ranks if all have it. Collective."""
        done = self._peer.drain(seconds / 2)
        if not self._exchange.vote(done, snapshot.step):
            return False
        self._peer.hold(snapshot, outer)
        done = self._peer.drain(seconds / 2) and self._peer.held() == snapshot.attempt
        if not self._exchange.vote(done, snapshot.step):
            return False
        self._peer.settle(snapshot.step, snapshot.attempt)
        self.last = snapshot.step
        return True

    def give_up(self) -> None:
        """What is being copied belongs to a course that was taken back: it is not made complete."""
        self._pending = None if self._peer.idle else self._pending
