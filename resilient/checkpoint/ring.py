"""The memory ring: the last few snapshots in host memory, for a rollback without any disk."""

from __future__ import annotations

from collections import Counter

from resilient.checkpoint.config import SnapshotConfig
from resilient.checkpoint.snapshot import Snapshot


class MemoryRing:
    """Every rank holds its own part; the steps are the same on all ranks because snapshots are taken by schedule and kept
    by number, or by the number that the largest rank's budget allows (`limit`)."""

    def __init__(self, config: SnapshotConfig) -> None:
        self.config = config
        self._keep = max(config.keep, 1)
        self._snapshots: list[Snapshot] = []
        self._lent: Counter[int] = Counter()  # by id: how many others read it
        self._spare: Snapshot | None = None

    def __len__(self) -> int:
        return len(self._snapshots)

    def due(self, step: int) -> bool:
        return self.config.every > 0 and step % self.config.every == 0

    def add(self, snapshot: Snapshot) -> None:
        """Newest last. A snapshot of the same step replaces the older one; nothing newer may exist."""
        self.drop_after(snapshot.step - 1)
        self._snapshots.append(snapshot)
        while len(self._snapshots) > self._keep:
            self._release(self._snapshots.pop(0))

    def fits(self, snapshot_bytes: int) -> int:
        """How many snapshots of this size the budget holds on this rank beside the spare one, at most `keep`."""
        if self.config.budget_mb is None:
            return max(self.config.keep, 1)
        return min(max(self.config.keep, 1), int(self.config.budget_mb * 2**20 // max(snapshot_bytes, 1)) - 1)

    def limit(self, keep: int) -> None:
        """Keep so many from now on, at least three: the newest may be too young to go back to, and two good ones are to stay
        (S15). Same on all ranks."""
        self._keep = max(keep, min(3, max(self.config.keep, 1)))
        while len(self._snapshots) > self._keep:
            self._release(self._snapshots.pop(0))

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Oldest first."""
        return tuple(self._snapshots)

    def steps(self) -> tuple[int, ...]:
        return tuple(s.step for s in self._snapshots)

    def drop_after(self, step: int) -> None:
        """Forget snapshots newer than `step`: they belong to a future that was taken back."""
        while self._snapshots and self._snapshots[-1].step > step:
            self._release(self._snapshots.pop())

    def clear(self) -> None:
        while self._snapshots:
            self._release(self._snapshots.pop())

    # -- memory ---------------------------------------------------------------------------------------------------

    def lend(self, snapshot: Snapshot) -> None:
        """Somebody else reads it from now on: its memory is not used again until it was given back."""
        self._lent[id(snapshot)] += 1

    def give_back(self, snapshot: Snapshot) -> None:
        """One reader is done with it."""
        self._lent[id(snapshot)] -= 1
        if self._lent[id(snapshot)] <= 0:
            del self._lent[id(snapshot)]
            if not any(held is snapshot for held in self._snapshots):
                self._spare = snapshot

    def spare(self) -> Snapshot | None:
        """A snapshot that was dropped, for the next one to be written into. The caller's from now on."""
        spare, self._spare = self._spare, None
        return spare

    def _release(self, snapshot: Snapshot) -> None:
        if id(snapshot) not in self._lent:
            self._spare = snapshot
