"""The campaign: rounds of one fault each, and what must hold after every one of them.

A round starts the job with a fault (or does damage to its files) and then starts it again without. What must hold:

    lost    the newest checkpoint that was committed, and not damaged by the round itself, is what the job finds
    wrong   what it restores is, bit for bit on every rank, the state of that step; all ranks restore the same one
    hollow  no folder has a manifest over parts that are not whole, but where the round damaged them
    stuck   and the job goes on: it commits a new checkpoint, and nothing in it breaks
    hangs   every start ends before its deadline
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from resilient.bench.drill.damage import DAMAGE, TMPFS_BYTES, fill, orphans, small_disk, stale_latest
from resilient.bench.drill.faults import Fault, Journal, Phase
from resilient.bench.drill.job import EVERY, WORLD, Course, MakeStore, Plan, filesystem_store, run_rank
from resilient.checkpoint.manifest import MANIFEST, list_checkpoints, read_manifest
from resilient.checkpoint.storage import LocalStorage
from resilient.checkpoint.verify import verify_checkpoint
from resilient.errors import CheckpointError

_FORK = multiprocessing.get_context("fork")  # a new interpreter would spend two seconds on importing torch
_STEPS = 4 * EVERY  # of a start with a fault: with two checkpoints kept, every save deletes one
_AFTER = 2 * EVERY  # of the start after it
_DAMAGED = "damaged-by-the-drill"  # a file beside the parts: it goes where the folder goes

KILLS = ("kill one", "kill all")
STARTS: tuple[tuple[str, Phase | None], ...] = (
    *((kill, phase) for kill in KILLS for phase in ("write", "commit", "delete", "load")),  # type: ignore[misc]
    ("power cut", "write"),
    ("power cut", "commit"),
    ("two writers", "write"),
    ("two writers", "commit"),
    ("two writers", "delete"),
    *((name, None) for name in DAMAGE),
    ("no space", None),
    ("stale latest", None),
    ("orphans", None),
)
"""(fault, phase): one deck of rounds."""


@dataclass
class Round:
    """What one round did, and what was found after it. point: where it struck, "" for damage. problems: in words."""

    number: int
    fault: str
    phase: str
    point: str = ""
    struck: bool = False
    detail: str = ""
    lost: int = 0
    wrong: int = 0
    hollow: int = 0
    stuck: int = 0
    hangs: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def blame(self, kind: str, problem: str) -> None:
        setattr(self, kind, 1)
        self.problems.append(f"{kind}: {problem}")

    @property
    def ok(self) -> bool:
        return not self.problems


class Start:
    """One start of the job, in processes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        plan.notes.mkdir(parents=True)
        self._ranks = [_FORK.Process(target=run_rank, args=(rank, plan), daemon=True) for rank in range(WORLD)]
        self._deadline = time.monotonic() + plan.deadline_s
        for process in self._ranks:
            process.start()
        self.hung = False

    def said(self, what: str) -> list[dict[str, Any]]:
        """Journal lines of all ranks, with the rank."""
        return [
            {**line, "rank": rank}
            for rank in range(WORLD)
            for line in Journal.read(self.plan.journal(rank))
            if line["what"] == what
        ]

    def until_struck(self) -> bool:
        """Wait until the fault has struck or the start has ended."""
        while not self.said("struck") and any(p.is_alive() for p in self._ranks):
            if time.monotonic() > self._deadline:
                break
            time.sleep(0.005)
        return bool(self.said("struck"))

    def go_on(self) -> None:
        """After a pause."""
        self._deadline = time.monotonic() + self.plan.deadline_s
        for process in self._ranks:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGCONT)

    def end(self) -> Start:
        """Wait for all ranks: one that has lost its peer has to notice. At the deadline they are killed, and it hung."""
        for process in self._ranks:
            process.join(max(self._deadline - time.monotonic(), 0.0))
        self.hung = any(p.is_alive() for p in self._ranks)
        for process in self._ranks:
            if process.is_alive():
                process.kill()
            process.join()
        return self


class Campaign:
    """folder: where checkpoints are written, the file system under test. progress: told of every round."""

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        make_store: MakeStore = filesystem_store,
        deadline_s: float = 30.0,
        progress: Callable[[Round], None] = lambda done: None,
    ) -> None:
        self.folder, self.seed = folder, seed
        self.rounds: list[Round] = []
        self._make_store, self._deadline_s, self._progress = make_store, deadline_s, progress
        self._course = Course(seed)
        self._random = Random(seed)
        self._starts = self._generation = 0
        self._place = folder / "run-0" / "checkpoints"
        self._points: dict[tuple[int, str], int] = {}

    def run(self, rounds: int, only: str = "") -> list[Round]:
        """only: faults with this in their name (and phase)."""
        fresh = False
        deck: list[tuple[str, Phase | None]] = []
        for number in range(rounds):
            if not deck:
                deck = [(fault, phase) for fault, phase in STARTS if only in f"{fault} {phase}"]
                self._random.shuffle(deck)
            fault, phase = deck.pop()
            if not fresh:
                self._begin_anew()
            done = Round(number, fault, phase or "")
            began = time.monotonic()
            self._run(done, phase)
            done.seconds = time.monotonic() - began
            self.rounds.append(done)
            self._progress(done)
            fresh = done.ok  # what one round broke is not held against the next
        return self.rounds

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _run(self, done: Round, phase: Phase | None) -> None:
        if done.fault == "no space":
            self._no_space(done)
            return
        known = self._committed()
        if phase is not None:
            for _ in range(3):  # it may end before the point that was drawn
                fault = self._draw("pause" if done.fault == "two writers" else done.fault, phase)
                known |= self._two_writers(done, fault) if fault.action == "pause" else self._struck(done, fault)
                if done.struck or done.hangs:
                    break
        elif done.fault in DAMAGE:
            known -= self._damage(done, known)
        else:
            done.detail = (stale_latest if done.fault == "stale latest" else orphans)(self._place, self._random)
            done.struck = True
        self._whole(done)
        self._after(done, max(known, default=0))

    def _struck(self, done: Round, fault: Fault) -> set[int]:
        start = self._start(_STEPS, fault).end()
        self._note(done, start)
        self._check_restored(done, start)
        return {line["step"] for line in start.said("saved")}

    def _two_writers(self, done: Round, fault: Fault) -> set[int]:
        """One start of the job is away for a while, another takes over, the first comes back and goes on."""
        old = self._start(_STEPS, fault)
        if not old.until_struck():
            self._note(done, old.end())
            return {line["step"] for line in old.said("saved")}
        new = self._start(EVERY * self._random.randint(1, 3)).end()  # few: it keeps what both may write to
        old.go_on()
        self._note(done, new)
        self._note(done, old.end())
        self._check_restored(done, new)
        if len(new.said("done")) < WORLD:
            done.blame("stuck", f"the start that took over: {_why(new)}")
        # What the old one commits before it is paused counts; the new one goes on from there.
        return {line["step"] for start in (old, new) for line in start.said("saved")}

    def _damage(self, done: Round, known: set[int]) -> set[int]:
        """The newest checkpoints, but not the last one that is left. Returns their steps."""
        whole = [c for c in list_checkpoints(self._place).complete if not (c.path / _DAMAGED).exists()]
        folders = [c.path for c in whole if c.manifest.step in known]
        damaged = folders[: self._random.randrange(1, len(folders))] if len(folders) > 1 else []
        done.detail = "; ".join(DAMAGE[done.fault](folder, self._random) for folder in damaged)
        done.struck = bool(damaged)
        for folder in damaged:
            (folder / _DAMAGED).touch()
        return {_step(folder.name) for folder in damaged}

    def _no_space(self, done: Round) -> None:
        """On a small disk of its own, where this user may mount one; else under a limit on the size of files."""
        home, self._place = self._place, self.folder / f"disk-{done.number}" / "run" / "checkpoints"
        disk = self._place.parent.parent
        with small_disk(disk) as mounted:
            self._place.parent.mkdir()
            self._start(_AFTER).end()
            known = self._committed()
            size = sum(f.stat().st_size for f in self._place.glob("step-*/rank-0*.pt")) // max(len(known), 1)
            room = self._random.randrange(max(size, 1))  # less than one checkpoint takes
            filler = fill(disk, room) if mounted else None
            limit = 0 if mounted else self._random.randrange(1, max(size // WORLD, 2))
            start = self._start(_STEPS, largest=limit).end()
            self._note(done, start)
            self._check_restored(done, start)
            failed = [line["problem"] for line in start.said("not saved")]
            done.struck, done.point = bool(failed), "tmpfs is full" if mounted else "file size limit"
            done.detail = f"{room} of {TMPFS_BYTES} bytes left" if mounted else f"files of at most {limit} bytes"
            if len(start.said("done")) < WORLD:
                done.blame("stuck", f"training ended with the disk full: {_why(start)}")
            if filler is not None:
                filler.unlink()
            self._whole(done)
            self._after(done, max(known | {line["step"] for line in start.said("saved")}, default=0))
        self._place = home

    # -- what must hold -------------------------------------------------------------------------------------------

    def _after(self, done: Round, expected: int) -> None:
        """Start again without a fault."""
        start = self._start(_AFTER).end()
        self._note(done, start)
        self._check_restored(done, start)
        loaded = [line["step"] for line in start.said("loaded")]
        if len(loaded) < WORLD:
            done.blame("stuck" if start.hung else "lost", f"step {expected} was committed; {_why(start)}")
            return
        if min(loaded) < expected:
            done.blame("lost", f"step {expected} was committed, step {min(loaded)} was found")
        if len(start.said("done")) < WORLD or max(loaded) + _AFTER - EVERY not in self._committed():
            problems = "; ".join(line["problem"] for line in start.said("not saved"))
            done.blame("stuck", f"no new checkpoint after it: {problems or _why(start)}")
        self._whole(done)

    def _check_restored(self, done: Round, start: Start) -> None:
        loaded = start.said("loaded")
        for line in loaded:
            right = self._course.fingerprints(line["step"])
            if not right or right[line["rank"]] != line["bits"]:
                done.blame("wrong", f"rank {line['rank']} restored something that is not step {line['step']}")
        if len({(line["step"], line["generation"]) for line in loaded}) > 1:
            done.blame("wrong", f"ranks restored {[(x['rank'], x['step'], x['generation']) for x in loaded]}")

    def _whole(self, done: Round) -> None:
        """Wherever a manifest can be read, every part of it is there, byte for byte."""
        storage = LocalStorage(self._place)
        for name in storage.folders():
            folder = self._place / name
            if (folder / _DAMAGED).exists() or not (folder / MANIFEST).exists():
                continue
            try:
                read_manifest(folder)
            except CheckpointError:
                continue
            _, damage = verify_checkpoint(storage, name)
            if damage:
                done.blame("hollow", f"{name}: {damage[0].file}: {damage[0].problem}")

    def _note(self, done: Round, start: Start) -> None:
        for line in start.said("struck"):
            done.struck, done.point = True, line["point"]
        if start.hung:
            done.blame("hangs", f"a start did not end in {self._deadline_s:.0f} s: {start.plan.notes}")
        for line in start.said("raised"):
            done.blame("stuck", f"rank {line['rank']} raised {line['problem']}")

    # -- starts ---------------------------------------------------------------------------------------------------

    def _start(self, steps: int, fault: Fault | None = None, largest: int = 0) -> Start:
        self._starts += 1
        self._generation += 1
        self._place.parent.mkdir(parents=True, exist_ok=True)
        (self._place.parent / "generation.json").write_text(json.dumps(self._generation))
        plan = Plan(
            place=self._place,
            notes=self.folder / "starts" / str(self._starts),
            generation=self._generation,
            steps=steps,
            seed=self.seed,
            make_store=self._make_store,
            fault=fault,
            largest=largest,
            deadline_s=self._deadline_s,
        )
        return Start(plan)

    def _begin_anew(self) -> None:
        """A place with good checkpoints, and how many points a start has in each phase, on each rank."""
        self._place = self.folder / f"run-{self._starts}" / "checkpoints"
        self._start(_AFTER).end()
        start = self._start(_STEPS).end()
        counted = {(line["rank"], phase): n for line in start.said("done") for phase, n in line["points"].items()}
        self._points = counted or self._points

    def _draw(self, action: str, phase: Phase) -> Fault:
        """Any point of the phase, on any rank that has one."""
        ranks = [rank for rank in range(WORLD) if self._points.get((rank, phase), 0) > 0] or [0]
        victim = self._random.choice(ranks)
        nth = self._random.randint(1, max(self._points.get((victim, phase), 1), 1))
        return Fault(action, phase, nth, victim, seed=self._random.getrandbits(32))  # type: ignore[arg-type]

    def _committed(self) -> set[int]:
        """Steps of the checkpoints that lie there, whole."""
        storage = LocalStorage(self._place)
        return {
            c.manifest.step
            for c in list_checkpoints(self._place).complete
            if not verify_checkpoint(storage, c.path.name)[1]
        }


def histogram(rounds: Sequence[Round]) -> dict[str, Counter[str]]:
    """By phase: at which points it struck, and how often."""
    found: dict[str, Counter[str]] = {}
    for done in rounds:
        if done.phase and done.struck:
            found.setdefault(done.phase, Counter())[done.point] += 1
    return found


def _step(folder: str) -> int:
    return int(folder[5:13])


def _why(start: Start) -> str:
    said = [line for what in ("refused", "raised", "broken") for line in start.said(what)]
    return "; ".join(f"rank {line['rank']}: {line['problem'][:300]}" for line in said) or "no word of it"
