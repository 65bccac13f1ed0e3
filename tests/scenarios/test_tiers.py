"""C3, S13, S15, S16: from which tier a run goes back or starts again, and what it does not trust any more."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.checkpoint.trust import Key, Trust
from resilient.errors import ExchangeFailed, NothingUsable, StopRequested
from tests.ranks import run_pooled
from tests.scenarios.harness import ROLL_BACK_AT_ONCE, Job, Outcome, run_job, same_training

NAN = {"kind": "nan", "step": 8, "rank": 1, "place": "loss"}


def resumed_from(outcome: Outcome) -> str:
    return next((fields["from"] for kind, fields in outcome.events if kind == "resume"), "")


def spoil_memory(guard: Any, engine: Any) -> None:
    """From step 8 on every snapshot in memory is one bit off."""
    tiers = guard._coordinator._kept.tiers
    before = tiers.before

    def spoiled(onset: int, further_back: int) -> Any:
        for snapshot in tiers.ring.snapshots:
            next(iter(snapshot.parts["engine"]["params"].values())).view(-1)[0] += 1.0
        return before(onset, further_back)

    tiers.before = spoiled


def from_disk(rank: int, world: int, folder: str, how: str) -> tuple[Outcome, Outcome]:
    """Memory cannot be gone back to: the checkpoint of step 6 is."""
    job = Job(steps=10, policy=ROLL_BACK_AT_ONCE, checkpoint=CheckpointConfig(every=3, blocking=True))
    twin = run_job(job, rank, world)
    snapshot = SnapshotConfig(every=0, trust_after=0) if how == "no ring" else job.snapshot
    hurt = run_job(
        job.with_(fault=NAN, run_dir=f"{folder}/{how.replace(chr(32), chr(45))}", snapshot=snapshot),
        rank,
        world,
        tweak=spoil_memory if how == "damaged" else None,
    )
    return twin, hurt


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["no ring", "damaged"])
def test_what_memory_cannot_give_comes_from_disk(tmp_path: Path, how: str):
    for twin, hurt in run_pooled(from_disk, 2, str(tmp_path), how, timeout=170):
        assert [(i.action, i.target_step) for i in hurt.incidents] == [("rollback", 6)]
        assert same_training(twin, hurt) == []
        why = next(fields["why"] for kind, fields in hurt.events if kind == "target")
        assert "disk on all ranks" in why, why
        refused = [fields["message"] for kind, fields in hurt.events if kind == "warning"]
        assert any("cannot be restored" in message for message in refused) == (how == "damaged"), refused


def host_lost(rank: int, world: int, folder: str) -> tuple[Outcome, Outcome, Outcome]:
    """Two hosts with memory of their own. The run ends at step 7; then host 1 is another machine, and the disk is old."""
    real, socket.gethostname = socket.gethostname, lambda: f"host{rank}"
    try:
        config = CheckpointConfig(every=100, peer=True, peer_folder=f"{folder}/memory{rank}")
        job = Job(steps=12, checkpoint=config, snapshot=SnapshotConfig(every=2, keep=2, trust_after=0))
        twin = run_job(job.with_(run_dir=None), rank, world)
        first = run_job(job.with_(run_dir=f"{folder}/run", steps=7), rank, world, tweak=at_the_end_forget)
        if rank == 1:
            shutil.rmtree(f"{folder}/memory1")
        return twin, first, run_job(job.with_(run_dir=f"{folder}/run"), rank, world)
    finally:
        socket.gethostname = real


def at_the_end_forget(guard: Any, engine: Any) -> None:
    """As if the job had been killed: no last checkpoint."""
    guard._coordinator._finish_saves = lambda: None
    copies = guard._coordinator._kept.copies
    begin = copies.begin

    def waited_for(snapshot: Any, outer: Any) -> None:
        begin(snapshot, outer)
        copies._peer.drain(20.0)

    copies.begin = waited_for


@pytest.mark.timeout(120)
def test_a_host_is_lost_without_shared_storage(tmp_path: Path):
    for rank, (twin, first, again) in enumerate(run_pooled(host_lost, 2, str(tmp_path), timeout=110)):
        assert first.applied == 7
        assert "step 6" in resumed_from(again) and "peer on" in resumed_from(again), resumed_from(again)
        assert (again.applied, again.digest, again.rng) == (twin.applied, twin.digest, twin.rng), rank


def returning(rank: int, world: int, folder: str) -> list[Any]:
    """The same failure after every load of the checkpoint of step 6: the third start must not begin there."""
    job = Job(
        steps=12,
        policy=ROLL_BACK_AT_ONCE,
        checkpoint=CheckpointConfig(every=3, blocking=True),
        snapshot=SnapshotConfig(every=0),
        run_dir=f"{folder}/run",
    )
    told = []
    for _ in range(3):
        hurt = run_job(job.with_(fault={**NAN, "repeat": True}), rank, world, raises=(StopRequested, NothingUsable))
        told.append(
            (hurt.error[:13], resumed_from(hurt), [fields for kind, fields in hurt.events if kind == "quarantine"])
        )
    return told


@pytest.mark.timeout(180)
def test_br30_a_state_that_fails_again_and_again_is_left_alone(tmp_path: Path):
    told = run_pooled(returning, 2, str(tmp_path), timeout=170)[0]
    assert any(quarantined for _, _, quarantined in told), told
    book = json.loads((tmp_path / "run" / "checkpoints" / "trust.json").read_text())
    levels = {Key(*entry["key"]): Trust[entry["level"].upper()] for entry in book["entries"]}
    assert Trust.QUARANTINED in levels.values(), levels


def adapting(rank: int, world: int, folder: str) -> tuple[list[Any], list[int]]:
    config = CheckpointConfig(adaptive=True, shortest=3, longest=16, blocking=True)
    job = Job(steps=44, checkpoint=config, run_dir=f"{folder}/run")

    def ill_for_a_while(guard: Any, engine: Any) -> None:
        guard._coordinator._kept.saver._level = lambda: "C" if 20 <= guard.applied < 32 else "A"

    outcome = run_job(job, rank, world, tweak=ill_for_a_while)
    told = [fields["steps"] for kind, fields in outcome.events if kind == "interval"]
    return told, [fields["step"] for kind, fields in outcome.events if kind == "checkpoint"]


@pytest.mark.timeout(120)
def test_s15_the_interval_follows_the_risk(tmp_path: Path):
    (intervals, saved), (others, _) = run_pooled(adapting, 2, str(tmp_path), timeout=110)
    assert intervals == others, "the same on all ranks"
    assert saved[:2] == [0, 16], "calm, and saving is cheap: as far apart as allowed"
    assert intervals and intervals[0] < 16, intervals
    after = [step for step in saved if step > 16]
    assert after[0] <= 22 and max(b - a for a, b in itertools.pairwise(after)) < 16, saved


def parted(rank: int, world: int, folder: str, when: str) -> Outcome:
    """From step 5 on the ranks cannot agree on anything but the table of a step."""
    job = Job(
        steps=12,
        run_dir=f"{folder}/run",
        checkpoint=CheckpointConfig(adaptive=True, shortest=3, longest=16, blocking=when == "save"),
        snapshot=SnapshotConfig(every=3, budget_mb=1000.0),
    )

    def tweak(guard: Any, engine: Any) -> None:
        coordinator, stepped = guard._coordinator, guard.step

        def lost(*_: Any, **__: Any) -> Any:
            raise ExchangeFailed("nobody there")

        def step() -> bool:
            ended = stepped()
            if ended and guard.applied == 4:
                exchange = coordinator.exchange
                exchange.gather, exchange.vote = (lost, lost) if when != "save" else (lost, exchange.vote)
                if when == "evaluation":
                    with guard.evaluation():
                        assert not guard.leaving()
                elif when == "save":
                    guard.checkpoint()
                elif when == "budget":
                    coordinator._kept._sized = 0
            return ended

        guard.step = step

    return run_job(job, rank, world, tweak=tweak)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["evaluation", "save", "budget"])
def test_what_the_ranks_cannot_agree_on_does_not_end_the_job(tmp_path: Path, when: str):
    for outcome in run_pooled(parted, 2, str(tmp_path), when, timeout=110):
        assert outcome.applied == 12 and outcome.error == ""
        assert any(kind == "guard_failed" and "nobody there" in f["message"] for kind, f in outcome.events), when
