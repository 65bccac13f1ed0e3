"""A user's own loader: torchdata's StatefulDataLoader, with and without workers, shuffled, with augmentation.

Issue 4.5, BR-11, BR-13: after three interruptions inside one epoch (a rollback, a pre-emption, a crash) and new processes'
worth of objects, the run is bit for bit the one that was never disturbed.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.checkpoint.digest import state_digest
from resilient.checkpoint.rng import capture_rng
from resilient.errors import Preempted
from tests.ranks import run_ranks
from tests.scenarios.harness import ROLL_BACK_AT_ONCE
from tests.scenarios.test_own_loop import build, guarded, loss_sum

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

STEPS, EPOCH = 14, 10  # windows


class Words(torch.utils.data.Dataset):
    """Made-up tokens, disturbed by a random stream of each sample: torchdata does not restore those of its workers."""

    def __len__(self) -> int:
        return EPOCH * 2 * 4 * 2  # windows, micro-batches, rows, ranks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randint(0, 16, (6,), generator=generator)
        noise = torch.rand(6, generator=generator) < 0.1
        return {
            "x": torch.where(noise, torch.randint(0, 16, (6,), generator=generator), x),
            "labels": x,
            "id": torch.tensor(index),
        }


class Crash(Exception):
    pass


def loader(rank: int, world: int, workers: int) -> Any:
    sampler = torchdata_sampler()(Words(), num_replicas=world, rank=rank, shuffle=True, seed=3)
    return torchdata.StatefulDataLoader(Words(), batch_size=4, sampler=sampler, num_workers=workers)


def torchdata_sampler() -> Any:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return StatefulDistributedSampler


def run(
    rank: int, world: int, workers: int, folder: str | None, hurt: int = 0, end: type[Exception] | None = None
) -> dict[str, Any]:
    """Train to STEPS. hurt: step at which rank 1's loss is NaN once. end: how it is cut short, at step hurt + 2."""
    model, optimizer, scheduler = build(world)
    torch.manual_seed(50 + rank)
    guard, ear = guarded(
        model,
        optimizer,
        scheduler,
        loader(rank, world, workers),
        accumulation=2,
        run_dir=folder,
        policy=ROLL_BACK_AT_ONCE,
        checkpoint=CheckpointConfig(every=3),
        snapshot=SnapshotConfig(every=2, keep=3, trust_after=0),
    )
    dropout, ids, done = nn.Dropout(0.2), [], False
    try:
        for batch in guard.batches(steps=STEPS, epochs=2):
            total, tokens = loss_sum(model, batch)
            total = dropout(total.expand(8)).mean()
            if hurt and guard.step_index == hurt and not done and rank == 1:
                total, done = total * float("nan"), True
            ids.append((guard.step_index, batch["id"].tolist()))
            guard.backward(total / tokens)
            if guard.step() and end is not None and guard.applied == hurt + 2:
                if end is Crash:
                    raise Crash
                if rank == 0:
                    guard.preempt()
    except (Crash, Preempted) as error:
        assert type(error) is end
    found = {
        "state": state_digest(guard.engine.capture()),
        "rng": state_digest(capture_rng()),
        "ids": dict(ids),
        "applied": guard.applied,
        "incidents": len(ear.incidents),
    }
    guard.close()
    return found


def disturbed(rank: int, world: int, workers: int, folder: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # workers are children
    twin = run(rank, world, workers, None)
    parts = [
        run(rank, world, workers, folder, hurt=4, end=Preempted),
        run(rank, world, workers, folder, hurt=8, end=Crash),
    ]
    return twin, run(rank, world, workers, folder), parts


@pytest.mark.timeout(240)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_three_interruptions_inside_one_epoch_leave_no_trace(tmp_path: Path, workers: int):
    for rank, (twin, end, parts) in enumerate(run_ranks(disturbed, 2, workers, str(tmp_path / "run"), timeout=230)):
        assert [part["incidents"] for part in parts] == [1, 1] and parts[1]["applied"] == 10
        seen = {step: ids for part in (*parts, end) for step, ids in part["ids"].items()}
        assert seen == twin["ids"], f"rank {rank}: other samples"
        assert (end["applied"], end["state"], end["rng"]) == (twin["applied"], twin["state"], twin["rng"]), rank
