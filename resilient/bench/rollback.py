"""How long the way back takes: from memory, another host's memory and disk, by the engines' own means, and by a new start.

    resilient bench rollback [--quick] [--nproc 2] [--engines ddp ...] [--models gpt_3m gpt_28m] [--no-relaunch]
                             [--format text|json] [--out FILE]

Before each measurement the job takes a step that the guard does not see, so that weights, moments, schedule, counters, data and
random streams are elsewhere. Then, in turn in one run:

    copy               the plain copy of a snapshot's bytes into the live tensors: nothing can be faster
    memory             a snapshot is restored, proven (every bit of the live state is hashed again) and voted on
    peer, fetched      the same, from the memory of a partner by TCP; `peer, own`: from this host's copy in memory
    disk               the same, from a checkpoint; its files are in the system's cache
    load_checkpoint, dcp.load   the engines' own: no data position, no random streams, no proof
    relaunch           a rank of a job of its own (run under `resilient launch`) is killed with SIGKILL; until the next step
                       that is applied

A round counts as long as its slowest rank. Bounds are on the lowest round of each: the cores may be shared with other programs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resilient.bench.bounds import Check
from resilient.bench.checkpoint import arguments, heading, run, table, verdicts
from resilient.bench.checkpoint_job import Job, Native, Settings, Spent, copier, slowest, summary, timed
from resilient.bench.rollback_relaunch import relaunch
from resilient.checkpoint.digest import walk
from resilient.checkpoint.peer import PeerStore
from resilient.checkpoint.snapshot import Snapshot

COPIES = 3.0  # from memory takes at most so many times as long as the plain copy
FASTER = 50.0  # and a new start at least so many times as long as that
RELAUNCHED = {"gpt_1m", "gpt_3m", "gpt_10m"}  # models that the reference job knows


def measure(settings: Settings, folder: Path) -> dict[str, Any]:
    """Run on every rank; the result is the same on all of them. folder: of all ranks."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        return _measure(settings, folder, Path(place))


def _measure(settings: Settings, folder: Path, place: Path) -> dict[str, Any]:
    """place: of this rank, in memory."""
    job = Job(settings, folder / "run")
    native = Native(job, folder / "native")
    snapshot = job.capture(None)
    job.save(snapshot, wait=True)
    native.save()
    peer = _peer_store(job, place)
    peer.hold(snapshot)
    if not peer.drain(120.0) or peer.problem():
        raise RuntimeError("no copy in the partner's memory")
    dist.barrier()
    peer.settle(snapshot.step, snapshot.attempt)
    dist.barrier()
    restore = _Restore(job)
    saved = [leaf for _, leaf in walk(snapshot.parts["engine"]) if isinstance(leaf, torch.Tensor)]

    def from_peer() -> None:
        key, holders = peer.find()[0]
        restore(peer.load(key, holders[job.exchange.rank])[0])

    def fetched() -> None:
        for path in peer.folder.glob(f"*-rank-{job.exchange.rank:05d}-*.pt"):
            path.unlink()
        spent.setdefault("peer, fetched", []).append(timed(from_peer))

    def from_disk() -> None:
        assert job.store is not None
        loaded = job.store.load(snapshot.step)
        assert loaded is not None
        restore(loaded)

    spent: dict[str, list[Spent]] = {}

    def way(name: str, action: Callable[[], None]) -> tuple[str, Callable[[], None]]:
        return name, lambda: spent.setdefault(name, []).append(timed(action))

    ways = dict(
        [
            way("copy", lambda: copier(job.tensors(), saved)()),
            way("memory", lambda: restore(snapshot)),
            ("peer, fetched", fetched),
            way("peer, own", from_peer),
            way("disk", from_disk),
            way(native.names[1], native.load),
        ]
    )
    for turn in range(settings.rounds + 1):
        for name in ways if turn % 2 == 0 else reversed(ways):
            job.stray()
            ways[name]()
            restore(snapshot)  # after those that do not bring everything back
        if turn == 0:
            for rounds in spent.values():
                rounds.clear()  # each was done once
    found = slowest(spent)
    result = {
        "settings": asdict(settings),
        "world": dist.get_world_size(),
        "bytes": sum(tensor.nbytes for tensor in saved),
        "ways": {name: summary(rounds) for name, rounds in found.items()},
    }
    peer.close()
    job.close()
    return result


class _Restore:
    """Restored, proven and agreed upon, as the guard does it. Raises RuntimeError when it is not exact on every rank."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, snapshot: Snapshot) -> None:
        differences = self._job.state.restore(snapshot)
        if not self._job.exchange.vote(not differences, snapshot.step):
            raise RuntimeError(f"the restore is not exact: {'; '.join(differences) or 'on another rank'}")


def _peer_store(job: Job, place: Path) -> PeerStore:
    """Each rank a host of its own, as far as the store can tell: the partner's copy comes by TCP."""
    peer = PeerStore(place / "peer", rank=job.exchange.rank, token="bench")
    peer.join([f"host{rank}" for rank in range(job.exchange.world_size)], job.exchange.gather)
    return peer


def checks(found: Sequence[dict[str, Any]]) -> list[Check]:
    held = []
    for one in found:
        name, ways = f"{one['settings']['engine']}, {one['settings']['model']}", one["ways"]
        memory = ways["memory"]["lowest_ms"]
        held.append(Check(f"{name}: memory / copy", memory / ways["copy"]["lowest_ms"], COPIES, False))
        if one.get("relaunch"):
            held.append(Check(f"{name}: relaunch / memory", 1e3 * one["relaunch"]["next_step_s"] / memory, FASTER))
    return held


def conf_name(engine: str) -> str:
    """In conf/engine."""
    return f"deepspeed_{engine}" if engine.startswith("zero") else engine


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("rollback", __doc__)
    parser.add_argument("--no-relaunch", action="store_true", help="kill and start no job")
    options = parser.parse_args(argv)

    def relaunched(settings: Settings) -> dict[str, Any]:
        if settings.model not in RELAUNCHED or options.no_relaunch:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            return {"relaunch": relaunch(conf_name(settings.engine), settings.model, options.nproc, Path(folder))}

    def bounds(found: Sequence[dict[str, Any]]) -> list[Check]:
        return [check for check in checks(found) if not (options.quick and check.name.endswith("copy"))]

    return run("rollback", options, measure, bounds, text, relaunched)


def text(found: Sequence[dict[str, Any]], held: Sequence[Check]) -> str:
    lines = []
    for one in found:
        lines += heading(one) + table(one)
        again = one.get("relaunch")
        if again:
            lines.append(
                f"  relaunch: {again['next_step_s']:.1f} s to the next step, {again['regained_s']:.1f} s to where it was"
            )
    return "\n".join(lines + verdicts(held))


if __name__ == "__main__":
    sys.exit(main())
