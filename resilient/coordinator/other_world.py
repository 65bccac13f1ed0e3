"""The snapshot that a rank restores when the job goes on with another number of ranks.

opened = open_checkpoint(folder, share=(rank, world))     every rank, then a vote
snapshot, changes = snapshot_for(opened, engine, feed, judge, rank=rank, world=world)     every rank, then a vote
keeper.restore(snapshot)                                                                  with the usual proof
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from resilient.checkpoint.export import Opened
from resilient.checkpoint.rng import rederive
from resilient.checkpoint.snapshot import Snapshot
from resilient.checkpoint.world import fit_data, fit_judge
from resilient.coordinator.feed import WindowFeed
from resilient.coordinator.judge import Judge
from resilient.engines.base import Engine
from resilient.engines.pieces import state_from


def snapshot_for(
    opened: Opened, engine: Engine, feed: WindowFeed, judge: Judge | None, *, rank: int, world: int
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
    parts = {
        "engine": state_from(opened.sources(), engine, rank, world),
        "rng": rng,
        "data": data,
        "judge": learned,
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
    if data["accumulation"] != opened.part("data")[0]["accumulation"]:
        changes.append(f"data: {data['accumulation']} micro-batches per window from now on")
    return snapshot, changes


def _as_saved(state: Any) -> Any:
    """Arrays as tensors, which is how a snapshot holds them."""
    if isinstance(state, dict):
        return {key: _as_saved(value) for key, value in state.items()}
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state
