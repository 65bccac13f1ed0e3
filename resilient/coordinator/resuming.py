"""The state that a start goes on from: the best one that every rank can restore exactly, and what it was restored without."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from resilient.checkpoint.snapshot import Snapshot
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.feed import WindowFeed
from resilient.coordinator.keeping import Keeper
from resilient.coordinator.other_world import refit_windows, samples_per_window
from resilient.coordinator.outer import Outer, newest
from resilient.coordinator.state import StateKeeper
from resilient.coordinator.tiers import Candidate, Refit


@dataclass(frozen=True)
class Resumed:
    """What was restored on all ranks. outer: of the run, as it goes on."""

    candidate: Candidate
    snapshot: Snapshot
    outer: Outer


class Resumer:
    """Used once, at the start, on all ranks.

    outer_path: where the run keeps what outlives a process, on rank 0. allow_missing: parts that a state may lack, alike on
    all ranks. tell: events."""

    def __init__(
        self,
        exchange: Exchange,
        feed: WindowFeed,
        state: StateKeeper,
        kept: Keeper,
        *,
        outer_path: Path | None,
        allow_missing: Collection[str],
        tell: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._exchange, self._feed, self._state, self._kept = exchange, feed, state, kept
        self._outer_path, self._allow_missing, self._tell = outer_path, tuple(allow_missing), tell

    def best(self, on_no_valid_checkpoint: Literal["stop", "fresh"], refit: Refit | None) -> Resumed | None:
        """The engine, data and random streams are as they were then. None: nothing was trained yet, a fresh start.

        refit: takes a checkpoint of another world size. Raises NothingUsable where something was trained and no state of it
        can be restored exactly on all ranks. Collective."""
        excluded: set[tuple[int, ...]] = set()
        for candidate in self._kept.tiers.resumes(refit, on_no_valid_checkpoint):
            outer = Outer.from_dict(self._exchange.share(newest(self._outer_path, candidate.outer)))
            windows = samples_per_window(self._feed, self._exchange.world_size)
            refit_windows(outer, candidate.snapshot.position, windows)
            for window in {tuple(window) for window in outer.excluded} - excluded:
                excluded.add(window)
                self._feed.exclude(*window)
            snapshot, kept, differences = self._state.completed(candidate.snapshot, self._allow_missing)
            differences = differences or self._state.tried(snapshot)
            if self._exchange.vote(not differences, snapshot.step):
                self._told(candidate, snapshot, self._absent(kept))
                return Resumed(candidate, snapshot, outer)
            self._kept.refused(candidate, differences)
        return None

    def _absent(self, kept: tuple[str, ...]) -> list[str]:
        """What any rank's state was restored without, and on which ranks if not on all. Collective where anything may be."""
        if not self._allow_missing:
            return []
        flags = self._exchange.gather(torch.tensor([float(name in kept) for name in self._allow_missing]))
        found = []
        for name, column in zip(self._allow_missing, flags.T, strict=True):
            ranks = [str(rank) for rank in np.flatnonzero(column)]
            if ranks:
                found.append(name if len(ranks) == len(column) else f"{name} (rank {', '.join(ranks[:8])})")
        return found

    def _told(self, candidate: Candidate, snapshot: Snapshot, absent: list[str]) -> None:
        about: dict[str, Any] = {
            "step": snapshot.step,
            "position": snapshot.position,
            "from": str(candidate.target),
        }
        if absent:
            about["absent"] = absent
        if candidate.changes:
            about["changes"] = list(candidate.changes)
        self._tell("resume", about)
        if absent:
            message = f"the state of step {snapshot.step} has no {', '.join(absent)}: kept as it is here"
            self._tell("warning", {"message": f"{message} (run.checkpoint.allow_missing)"})
