"""The job that the drill interrupts: two gloo ranks with a small model, real saves in the background, and an exact answer
to what the state of every step has to be."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from resilient.bench.drill.faults import DrillStorage, Fault, Journal, Points
from resilient.checkpoint.filesystem import FilesystemStore, Outcome
from resilient.checkpoint.snapshot import Snapshot, freeze
from resilient.errors import CheckpointError, ResilientError

WORLD = 2
EVERY = 3  # steps between saves
KEEP = 2
_SIZE = 40_000  # float32 of one tensor: a part is some 330 kB
_COLLECTIVE_S = 20.0
_VISIBLE_S = 5.0
_STAGE_S = 15.0


class Model:
    """Weights and momentum driven by noise of this rank's generator, reduced over ranks: the state after n steps is a function
    of seed and rank alone, however often training was interrupted, if every restore is exact."""

    def __init__(self, seed: int, rank: int) -> None:
        self.step = 0
        self.weights = torch.zeros(_SIZE)
        self.momentum = torch.zeros(_SIZE)
        self.random = torch.Generator().manual_seed(1000 * seed + rank)

    def gradient(self) -> torch.Tensor:
        return torch.randn(_SIZE, generator=self.random) + 0.01 * self.weights

    def apply(self, gradient: torch.Tensor) -> None:
        """gradient: summed over ranks. Of two ranks the sum is the same in any order."""
        self.momentum.mul_(0.9).add_(gradient)
        self.weights.sub_(self.momentum, alpha=1e-3)
        self.step += 1

    def snapshot(self, generation: int) -> Snapshot:
        """Frozen. The generation is in it so that a part of another start is never taken for one of this."""
        parts = freeze(
            {
                "engine": {"weights": self.weights, "momentum": self.momentum, "step": self.step},
                "rng": {"state": self.random.get_state()},
                "data": {"position": self.step},
                "judge": {"generation": generation},
            }
        )
        return Snapshot(self.step, self.step, self.step, 1e-3, self.step, parts, Snapshot.digest_parts(parts))

    def restore(self, snapshot: Snapshot) -> None:
        engine = snapshot.parts["engine"]
        self.step = engine["step"]
        self.weights.copy_(engine["weights"])
        self.momentum.copy_(engine["momentum"])
        self.random.set_state(snapshot.parts["rng"]["state"])

    def fingerprint(self) -> str:
        """sha256 of all its bits: not the digests of the store under test."""
        bits = hashlib.sha256(str(self.step).encode())
        for tensor in (self.weights, self.momentum, self.random.get_state()):
            bits.update(tensor.numpy().tobytes())
        return bits.hexdigest()


class Course:
    """What the state has to be, computed without any checkpoint."""

    def __init__(self, seed: int) -> None:
        self._models = [Model(seed, rank) for rank in range(WORLD)]
        self._known: dict[int, list[str]] = {0: [m.fingerprint() for m in self._models]}
        self._at = 0

    def fingerprints(self, step: int) -> list[str]:
        """Of all ranks after `step`; [] for one that is never saved."""
        while self._at < step:
            gradient = torch.stack([m.gradient() for m in self._models]).sum(0)
            for model in self._models:
                model.apply(gradient)
            self._at += 1
            if self._at % EVERY == 0:
                self._known[self._at] = [m.fingerprint() for m in self._models]
        return self._known.get(step, [])


class Store(Protocol):
    """What the drill uses of FilesystemStore."""

    manifest: Any

    def load(self) -> Snapshot | None: ...
    def begin(self, snapshot: Snapshot) -> list[Outcome]: ...
    def poll(self) -> list[Outcome]: ...
    def drain(self) -> list[Outcome]: ...
    def close(self) -> None: ...


MakeStore = Callable[[DrillStorage, int, int, Callable[[bool], bool], Callable[[], None]], Store]
"""(storage, rank, generation, vote, may_write), in the rank's own process."""


def filesystem_store(
    storage: DrillStorage, rank: int, generation: int, vote: Callable[[bool], bool], may_write: Callable[[], None]
) -> Store:
    return FilesystemStore(
        storage,
        rank=rank,
        world=WORLD,
        vote=vote,
        keep=KEEP,
        run_id="drill",
        generation=generation,
        fingerprint={"job": "drill"},
        visible_s=_VISIBLE_S,
        deadline_s=_STAGE_S,
        run_dir=storage.root.parent,
        may_write=may_write,
    )  # type: ignore[return-value]


@dataclass(frozen=True)
class Plan:
    """One start of the job. place: its checkpoints; beside them lies generation.json. notes: a folder for journals and what
    is printed. largest: bytes that a file may grow to once the state is loaded, 0: no limit (a full disk, without one)."""

    place: Path
    notes: Path
    generation: int
    steps: int
    seed: int
    make_store: MakeStore
    fault: Fault | None = None
    largest: int = 0
    deadline_s: float = 30.0

    def journal(self, rank: int) -> Path:
        return self.notes / f"rank-{rank}.jsonl"


def run_rank(rank: int, plan: Plan) -> None:
    """Load, train, save every few steps. In a process of its own, which it ends."""
    output = os.open(plan.notes / f"rank-{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 2)
    sys.stderr = os.fdopen(os.dup(output), "w", buffering=1)
    faulthandler.dump_traceback_later(plan.deadline_s * 0.9, file=sys.stderr)
    logging.basicConfig(stream=sys.stderr, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign clears up
    torch.set_num_threads(1)
    journal = Journal(plan.journal(rank))
    code = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{plan.notes}/rendezvous",
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=_COLLECTIVE_S),
        )
        _train(rank, plan, journal)
        code = 0
    except ResilientError as error:
        journal.tell("refused", problem=f"{type(error).__name__}: {error}")
    except RuntimeError as error:  # of gloo: the other rank is gone
        journal.tell("broken", problem=str(error)[:200])
    except Exception:
        logging.getLogger(__name__).exception("rank %d", rank)
        journal.tell("raised", problem=repr(sys.exc_info()[1])[:300])
    os._exit(code)


def _train(rank: int, plan: Plan, journal: Journal) -> None:
    points = Points(rank, plan.fault, journal)
    storage = DrillStorage(plan.place, points)
    points.pids = _pids()
    store = plan.make_store(storage, rank, plan.generation, _vote, lambda: _assert_newest(plan))
    model = Model(plan.seed, rank)
    storage.loading = True
    found = store.load()
    storage.loading = False
    if found is not None:
        model.restore(found)
    wrote = found.parts["judge"]["generation"] if found is not None else -1
    journal.tell("loaded", step=model.step, bits=model.fingerprint(), generation=wrote, fresh=found is None)
    if plan.largest:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.largest, resource.RLIM_INFINITY))

    def told(outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            journal.tell("saved" if outcome.committed else "not saved", step=outcome.step, problem=outcome.problem)

    try:
        for _ in range(plan.steps):
            gradient = model.gradient()
            dist.all_reduce(gradient)
            model.apply(gradient)
            if model.step % EVERY == 0:
                journal.tell("begun", step=model.step)
                told(store.begin(model.snapshot(plan.generation)))
            told(store.poll())
        told(store.drain())
    finally:
        store.close()
    journal.tell("done", step=model.step, points=dict(points.counts))


def _vote(ok: bool) -> bool:
    told = torch.tensor([int(ok)])
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told.item())


def _pids() -> list[int]:
    told = [torch.zeros(1, dtype=torch.int64) for _ in range(WORLD)]
    dist.all_gather(told, torch.tensor([os.getpid()]))
    return [int(t.item()) for t in told]


def _assert_newest(plan: Plan) -> None:
    current = json.loads((plan.place.parent / "generation.json").read_text())
    if current != plan.generation:
        raise CheckpointError(f"this is generation {plan.generation}, generation {current} was started")
