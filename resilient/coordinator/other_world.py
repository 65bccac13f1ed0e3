"""The snapshot that a rank restores when the job goes on with another number of ranks.

refit = OtherWorld(store.folder, engine, feed, judge, rank=rank, world=world, tell=tell)
snapshot, changes = refit(folder, manifest)     every rank, then a vote (Tiers does it)
keeper.restore(snapshot)                        with the usual proof
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from resilient.checkpoint.export import Opened, open_checkpoint
from resilient.checkpoint.manifest import Manifest
from resilient.checkpoint.rng import rederive
from resilient.checkpoint.snapshot import Snapshot, freeze
from resilient.checkpoint.world import fit_data, fit_excluded, fit_judge
from resilient.coordinator.feed import WindowFeed
from resilient.coordinator.judge import Judge
from resilient.coordinator.outer import Outer
from resilient.engines.base import Engine
from resilient.engines.pieces import state_from
from resilient.errors import CheckpointError, DataPositionError


class BoundToItsWorld(CheckpointError):
    """A checkpoint in order, of which some part cannot be had with this number of ranks. Where it was saved it can be loaded,
    so none of its steps may be given up for it."""


class OtherWorld:
    """Takes checkpoints of another world size for this run: a `Refit` (tiers.py). Construct on all ranks, before the start.

    place: a local folder that all ranks share, of checkpoints. allow_missing: what they may lack; the snapshot then lacks it,
    too (StateKeeper.completed). tell: an event, for people: that it is done is never silent."""

    def __init__(
        self,
        place: Path,
        engine: Engine,
        feed: WindowFeed,
        judge: Judge | None,
        *,
        rank: int,
        world: int,
        tell: Callable[[str, Mapping[str, Any]], None],
        allow_missing: Collection[str] = (),
    ) -> None:
        self._place, self._engine, self._feed, self._judge = place, engine, feed, judge
        self._rank, self._world, self._tell = rank, world, tell
        self._allow_missing = allow_missing

    def __call__(self, folder: str, manifest: Manifest) -> tuple[Snapshot, list[str]]:
        """See `snapshot_for`. All ranks must call it, and vote afterwards. manifest: as all ranks have read it.

        Raises CheckpointError for a damaged file, BoundToItsWorld naming the part that cannot be had in this world."""
        opened = open_checkpoint(self._place / folder, (self._rank, self._world))
        if opened.manifest.digest != manifest.digest:
            raise CheckpointError(f"{self._place / folder} was written anew while it was loaded")
        try:
            snapshot, changes = snapshot_for(
                opened,
                self._engine,
                self._feed,
                self._judge,
                rank=self._rank,
                world=self._world,
                allow_missing=self._allow_missing,
            )
        except (CheckpointError, DataPositionError) as error:
            raise BoundToItsWorld(
                f"step {manifest.step} was saved by {manifest.world} ranks and cannot be taken by {self._world}: {error}"
            ) from error
        before, now = len(opened.contents), self._world
        message = (
            f"step {snapshot.step} was saved by {before} ranks and is taken by {now}: its state is put together anew"
        )
        self._tell("warning", {"message": f"{message}; {_about_batch(*_batches(opened, self._feed, now))}"})
        return snapshot, changes


def samples_per_window(feed: WindowFeed, world: int) -> int:
    """Over all ranks. Where the loader does not tell (`global_batch`): in micro-batches, taken to be all of one size."""
    told = getattr(feed.loader, "global_batch", None)
    return told if isinstance(told, int) and told > 0 else world * feed.accumulation


def refit_windows(outer: Outer, window: int, samples: int) -> None:
    """Excluded windows ahead of `window`, the next one, as windows of `samples` over all ranks from now on."""
    before, outer.window_samples = outer.window_samples, samples
    if before not in (0, samples):
        outer.excluded = fit_excluded(outer.excluded, window=window, samples_before=before, samples_now=samples)


def _batches(opened: Opened, feed: WindowFeed, world: int) -> tuple[int, int]:
    """Micro-batches per window over all ranks, before and from now on."""
    return len(opened.contents) * int(opened.part("data")[0]["accumulation"]), world * feed.accumulation


def _about_batch(before: int, now: int) -> str:
    if before == now:
        return "the global batch is as large as before"
    factor = now / before
    return (
        f"the global batch is {factor:.4g} times as large as before ({now} micro-batches, before {before}); the LR stays as it "
        f"is, where linear scaling would have it times {factor:.3g}, square-root scaling (Adam) times {math.sqrt(factor):.3g}"
    )


def snapshot_for(
    opened: Opened,
    engine: Engine,
    feed: WindowFeed,
    judge: Judge | None,
    *,
    rank: int,
    world: int,
    allow_missing: Collection[str] = (),
) -> tuple[Snapshot, list[str]]:
    """This rank's snapshot in a world of `world` ranks, and what in it is not as it was saved, for the journal.

    Weights, optimizer, schedule and counters are the saved ones, bit for bit; the rest follows checkpoint/world.py. Reads
    only what this rank needs, and its share of the copies that are compared; nothing here is touched. Not a collective.
    Raises CheckpointError or DataPositionError naming the part that cannot be had in this world."""
    saved, before = opened.contents[0], len(opened.contents)
    step = int(saved["step"])
    rng, streams = rederive(opened.part("rng"), step=step, rank=rank, world=world)
    data = fit_data(
        opened.part("data"),
        any_world=bool(getattr(feed.loader, "any_world", False)),
        accumulation=feed.accumulation,
        step=step,
        rank=rank,
        world=world,
    )
    learned, anew = fit_judge(opened.part("judge")[0], _as_saved(judge.state_dict())) if judge is not None else ({}, [])
    # frozen: nothing of it may lie in a file that can go away
    parts = {
        "engine": state_from(opened.sources(), engine, rank, world, allow_missing),
        **freeze({"rng": rng, "data": data, "judge": learned}),
    }
    snapshot = Snapshot(
        step=step,
        attempt=int(saved["attempt"]),
        position=int(saved["position"]),
        lr=float(saved["lr"]),
        schedule=saved["schedule"],
        parts=parts,
        digests=Snapshot.digest_parts(parts),
    )
    changes = [f"world: {before} ranks -> {world}"]
    said = {"kept": "as before, common to all ranks", "derived": "started anew from (rank 0's, step, world, rank)"}
    changes += [f"rng/{stream}: {said[done]}" for stream, done in streams.items()]
    changes += [f"judge: {name} learns anew" for name in anew]
    was, now = _batches(opened, feed, world)
    if data["accumulation"] != opened.part("data")[0]["accumulation"]:
        changes.append(f"data: {data['accumulation']} micro-batches per window and rank from now on")
    if was != now:
        changes.append(f"data: {now} micro-batches per window over all ranks from now on, before {was}")
    return snapshot, changes


def _as_saved(state: Any) -> Any:
    """Arrays as tensors, which is how a snapshot holds them."""
    if isinstance(state, dict):
        return {key: _as_saved(value) for key, value in state.items()}
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state
