"""The memory ring: the last few snapshots in host or device memory, for a rollback without any disk."""

from __future__ import annotations

from collections import deque

from resilient.checkpoint.config import SnapshotConfig
from resilient.checkpoint.snapshot import Snapshot


class MemoryRing:
    """Every rank holds its own part; the steps are the same on all ranks because snapshots are taken by schedule."""

    def __init__(self, config: SnapshotConfig) -> None:
        self.config = config
        self._snapshots: deque[Snapshot] = deque(maxlen=max(config.keep, 1))

    def __len__(self) -> int:
        return len(self._snapshots)

    def due(self, step: int) -> bool:
        return self.config.every > 0 and step % self.config.every == 0

    def add(self, snapshot: Snapshot) -> None:
        """Newest last. A snapshot of the same step replaces the older one; nothing newer may exist."""
        self.drop_after(snapshot.step - 1)
        self._snapshots.append(snapshot)

    def steps(self) -> tuple[int, ...]:
        return tuple(s.step for s in self._snapshots)

    def targets(self, onset_step: int) -> list[Snapshot]:
        """Rollback targets for trouble that began at `onset_step`, best first: newest that had `trust_after` clean
        steps between it and the onset. The oldest snapshot qualifies if it is at least before the onset."""
        before = [s for s in self._snapshots if s.step < onset_step]
        good = [s for s in before if s.step + self.config.trust_after < onset_step]
        return list(reversed(good or before[:1]))

    def drop_after(self, step: int) -> None:
        """Forget snapshots newer than `step`: they belong to a future that was taken back."""
        while self._snapshots and self._snapshots[-1].step > step:
            self._snapshots.pop()

    def clear(self) -> None:
        self._snapshots.clear()
