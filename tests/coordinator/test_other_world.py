"""A whole snapshot, saved on 2 ranks, restored and proven on 3 and on 1: every part by its rule (issue 5, deliver 6)."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash

from resilient.checkpoint.digest import state_digest
from resilient.checkpoint.export import open_checkpoint
from resilient.checkpoint.manifest import Manifest, Part, part_name, write_manifest
from resilient.checkpoint.pieces import to_plain
from resilient.coordinator.feed import WindowFeed
from resilient.coordinator.judge import Judge
from resilient.coordinator.other_world import snapshot_for
from resilient.coordinator.state import StateKeeper
from resilient.detectors import DetectorConfig, build_monitor
from resilient.engines.torch_optim import TorchOptimEngine
from resilient.errors import DataPositionError
from resilient.policies import Ladder, PolicyConfig
from resilient.train.data import DataConfig, TokenStream, sample_ids
from tests.engines import contract
from tests.engines.worlds import SETUP, assert_same, build
from tests.ranks import run_pooled

DATA = DataConfig(name="synthetic", seq_len=8, micro_batch=3, max_bytes=20_000)


class OfOneRank(TokenStream):
    any_world = False


def parts_of(kind: str, world: int, rank: int, stream: type[TokenStream], seed: int) -> tuple[Any, ...]:
    random.seed(100 * seed + rank)
    torch.manual_seed(100 * seed + rank)
    np.random.seed(seed)  # on all ranks alike
    engine = build(kind, SETUP.but(seed=seed), world)
    feed = WindowFeed(stream(DATA, seed=1, rank=rank, world=world), 2)
    judge = Judge(build_monitor(DetectorConfig()), Ladder(PolicyConfig()))
    return engine, feed, judge, StateKeeper(engine, feed, judge)


def saved_on(rank: int, world: int, folder: Path) -> list[list[int]]:
    """A checkpoint of this world; returns the samples that this rank was given."""
    engine, feed, _, keeper = parts_of("fsdp2", world, rank, TokenStream, 1)
    given = []
    for index in range(3):
        given += [batch["ids"].tolist() for batch in feed.take().batches]
        contract.train(engine, SETUP, [index], rank)
    feed.peek()
    snapshot = keeper.capture(3, 3)
    folder.mkdir(exist_ok=True)
    content = {**{k: getattr(snapshot, k) for k in asdict(snapshot) if k != "digests"}, "digests": snapshot.digests}
    torch.save({**content, "pieces": to_plain(engine.pieces(snapshot.parts["engine"]))}, folder / part_name(rank))
    dist.barrier()
    if rank == 0:
        parts = []
        for r in range(world):
            data = (folder / part_name(r)).read_bytes()
            parts.append(Part(part_name(r), len(data), xxhash.xxh3_128(data).hexdigest(), {}))
        manifest = Manifest(
            run_id="r", generation=1, serial=1, step=3, attempt=3, position=3, lr=snapshot.lr, schedule=3, world=world,
            fingerprint={}, parts=tuple(parts), versions={}, written_at="",
        )  # fmt: skip
        write_manifest(folder, manifest)
    return given


def restored_on(rank: int, world: int, folder: Path) -> tuple[list[list[int]], list[str], str]:
    """Samples given after the restore, what changed, digest of torch's stream."""
    engine, feed, judge, keeper = parts_of("ddp" if world == 1 else "fsdp2", world, rank, TokenStream, 2)
    snapshot, changes = snapshot_for(
        open_checkpoint(folder, (rank, world)), engine, feed, judge, rank=rank, world=world
    )
    assert keeper.restore(snapshot) == []  # the usual proof
    assert isinstance(engine, TorchOptimEngine) and engine.counters().steps == 3
    stream = state_digest(torch.get_rng_state())
    given = [batch["ids"].tolist() for _ in range(2) for batch in feed.take().batches]
    contract.train(engine, SETUP, [3], rank)
    again = keeper.capture(4, 4)
    assert_same(again.parts["engine"]["counters"]["steps"], 4, "goes on")

    # by count, or without the loader's word for it, the position is refused by name and nothing has changed
    other, plain, judge, keeper = parts_of("ddp" if world == 1 else "fsdp2", world, rank, OfOneRank, 2)
    before = keeper.capture(0, 0)
    with pytest.raises(DataPositionError, match=f"data/loader: .* may be another sample on {world} ranks"):
        snapshot_for(open_checkpoint(folder, (rank, world)), other, plain, judge, rank=rank, world=world)
    assert keeper.capture(0, 0).digests == before.digests
    return given, changes, stream


def test_every_part_follows_its_rule(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000003-a00000003"
    before = run_pooled(saved_on, 2, folder)
    order = sample_ids(0, 72, TokenStream(DATA, seed=1, rank=0, world=1).samples, seed=1).tolist()
    seen = [i for micro in range(6) for rank in range(2) for i in before[rank][micro]]
    assert seen == order[:36]  # 3 windows of 2 micro-steps of 2 ranks of 3 samples
    for world in (3, 1):
        found = run_pooled(restored_on, world, folder)
        micro_steps = len(found[0][0])
        now = [i for micro in range(micro_steps) for rank in range(world) for i in found[rank][0][micro]]
        assert now == order[36 : 36 + len(now)]  # none twice, none left out
        assert len({digest for _, _, digest in found}) == world
        changes = found[0][1]
        assert changes[0] == f"world: 2 ranks -> {world}"
        assert "rng/torch: started anew from (rank 0's, step, world, rank)" in changes
        assert "rng/numpy: as before, common to all ranks" in changes
        assert any(change.startswith("judge: crossrank/") for change in changes)
