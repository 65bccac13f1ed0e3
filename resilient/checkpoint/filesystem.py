"""The filesystem store: committed together or not at all, loaded together or not at all.

Saving goes on in the background (commit.py says what is done): `begin` returns at once, and the ranks agree later, at
points that all of them pass, that every one is ready for the next stage (`advance`) or wait for it (`drain`). A rank that
fails at a stage says so, and all ranks leave by the same door. What steers a rank is never its own view of the place: the
committer lists, tells the others, and all try the same (BR-28).

A place is a folder or an fsspec URL that all ranks share, or one that the ranks of each host share (layout.py).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from resilient.checkpoint.commit import Job, Save, delete_checkpoint
from resilient.checkpoint.config import CheckpointConfig
from resilient.checkpoint.layout import Gather, Layout, gather_in_default_group, probe_layout
from resilient.checkpoint.loading import Loaded, Loader, Offer, traces_of_training
from resilient.checkpoint.manifest import (
    Checkpoint,
    Health,
    Listing,
    Manifest,
    list_checkpoints,
    read_manifest,
    write_manifest,
)
from resilient.checkpoint.retention import Held, Retention, best_of, expendable
from resilient.checkpoint.snapshot import Snapshot
from resilient.checkpoint.storage import Storage, open_storage, place_of, redact
from resilient.checkpoint.together import Together
from resilient.checkpoint.trust import Trust
from resilient.checkpoint.writer import Task, Writer
from resilient.errors import CheckpointError, ResilientError

log = logging.getLogger(__name__)

__all__ = ["FilesystemStore", "Outcome", "State", "configured_store", "traces_of_training"]

_HOUSEKEEPING_S = 30.0  # what is only tidying may hold up the end of a save by so much
_CLOSE_S = 10.0
_PROBE_S = 5.0  # where not all ranks share a place, the start takes so much longer

State = Literal["idle", "busy", "ready", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What became of a save; the same on all ranks but for `problem` ("" when committed). dropped: on purpose."""

    step: int
    attempt: int
    committed: bool
    seconds: float
    problem: str = ""
    dropped: bool = False


class FilesystemStore:
    """Checkpoints of one run in one place. Construct on all ranks.

    place: folder (usually <run>/checkpoints), fsspec URL, or a Storage. run_dir: where steps.jsonl lies; None: the folder
        above the place.
    vote: collective with its own deadline; all ranks call it, True only if every rank said True.
    gather: collective, see layout.py.
    keep: good checkpoints to keep (at least one stays). keep_every: and those of multiples of so many steps, 0: none.
        keep_best: and the one with the best evaluation. See retention.py.
    fingerprint: JSON values that must be equal to load: engine, precision, model shape and the like. about: others, for
        people: mesh, config digest, git commit.
    visible_s: how long a rank waits for a file that another rank has written.
    deadline_s: longest time of a stage of a save or load on this rank; then it has failed, even if it never returns.
    retries: how often a failed stage is done again, `retry_wait_s` later, twice that after the next.
    elastic: `take` may give checkpoints of another world size, by their manifest alone.
    when_busy: what `begin` does with two saves not done yet: "wait" for the first, or "replace" the one not begun.
    may_write: called on a committer before it writes; raises when this process must not any more (a newer generation).

    `manifest` is that of the last checkpoint loaded or saved (`manifest.outer` is the outer state saved with it);
    `problem` says why the last save or stage of a load failed. `trusted` is asked in the background for the trust in a
    checkpoint and whether training came through it, `at_risk` tells that more is to be kept: see trust.py.
    """

    def __init__(
        self,
        place: Path | str | Storage,
        *,
        rank: int,
        world: int,
        vote: Callable[[bool], bool],
        keep: int,
        keep_every: int = 0,
        keep_best: bool = True,
        run_id: str,
        generation: int,
        fingerprint: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        gather: Gather = gather_in_default_group,
        visible_s: float = 30.0,
        deadline_s: float = 600.0,
        retries: int = 0,
        retry_wait_s: float = 5.0,
        when_busy: Literal["wait", "replace"] = "wait",
        run_dir: Path | None = None,
        elastic: bool = False,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.storage = open_storage(place)
        self.rank, self.world = rank, world
        self.rules = Retention(last=keep, every=keep_every, best=keep_best)
        self.trusted: Callable[[Manifest], tuple[Trust, bool]] = lambda manifest: (Trust.GOOD, True)
        self.at_risk = False
        self.run_id = run_id
        self.manifest: Manifest | None = None
        self._vote, self._gather, self._elastic = vote, gather, elastic
        self._retries, self._retry_wait_s, self._when_busy = retries, retry_wait_s, when_busy
        self._layout: Layout | None = Layout.one(1) if world == 1 else None
        self._writer = Writer(f"the checkpoint writer of rank {rank}")
        self._together = Together(rank, lambda ok: self._vote(ok), self._writer, deadline_s)
        self._job = Job(
            storage=self.storage,
            rank=rank,
            world=world,
            domain=tuple(range(world)),
            run_id=run_id,
            generation=generation,
            fingerprint=_as_json(dict(fingerprint)),
            about=_as_json(dict(about or {})),
            may_write=may_write,
            visible_s=visible_s,
        )
        folder = Path(place) if isinstance(place, Path | str) and run_dir is None else None
        self._run_dir = folder.absolute().parent if folder is not None else run_dir
        self._now: Save | None = None
        self._next: Save | None = None
        self._task: Task | None = None
        self._stages = 0  # counts what `report` spoke of; the same on all ranks
        self._reported = -1
        self._begun = 0
        self._held: dict[tuple[int, int], str] = {}  # (step, attempt) saved or loaded by this process: its folder
        self._rejected: set[str] = set()  # folders whose content was refused

    @property
    def folder(self) -> Path:
        """Of a local place."""
        return Path(self.storage.name)

    @property
    def problem(self) -> str:
        return self._together.problem

    def layout(self) -> Layout:
        """Which ranks share the place. Collective the first time."""
        if self._layout is None:
            patience_s = min(self._job.visible_s, _PROBE_S)
            self._layout = probe_layout(self.storage, self.rank, self.world, self._gather, patience_s)
            self._job.domain = self._layout.domain(self.rank)
        return self._layout

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(
        self,
        snapshot: Snapshot,
        outer: dict[str, Any] | None = None,
        health: Health | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> bool:
        """Commit a snapshot, waited for. As `begin`, but returns, the same on all ranks, True once every rank sees it.

        False means that nothing was committed and older checkpoints are untouched; `problem` says why. Raises
        CheckpointError if a required part is missing, and whatever the vote raises when ranks do not come (BR-22)."""
        if (snapshot.step, snapshot.attempt) in self._held:
            return True
        outcomes = [*self.begin(snapshot, outer, health, facts), *self.drain()]
        committed = any(o.committed for o in outcomes if (o.step, o.attempt) == (snapshot.step, snapshot.attempt))
        if not committed and Save(self._job, 0, snapshot, None, None, {}).missing:
            raise CheckpointError(self.problem)
        return committed

    def begin(
        self,
        snapshot: Snapshot,
        outer: dict[str, Any] | None = None,
        health: Health | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> list[Outcome]:
        """Save a snapshot in the background. Call on all ranks at the same step. It may not change any more, nor its memory
        be used again, until its outcome is known.

        outer: JSON state that outlives a rollback (budget, skipped data); the committer's is stored in the manifest, and so
        are its `health` and `facts` (`samples`, `loss_scale`). The same (step, attempt) again does nothing. Returns
        outcomes of earlier saves that had to be waited for or given up; communicates only when it must wait."""
        if any((snapshot.step, snapshot.attempt) == (s.step, s.attempt) for s in (self._now, self._next) if s):
            return []
        if (snapshot.step, snapshot.attempt) in self._held:
            return []
        self.layout()
        outcomes = []
        if self._next is not None and self._when_busy == "replace":
            outcomes.append(_outcome(self._next, "a newer one was due before it was begun", dropped=True))
            self._next = None
        while self._next is not None:
            outcomes.extend(self._wait())
        self._begun += 1
        save = Save(self._job, self._begun, snapshot, _as_json(outer), health, facts or {})
        if self._now is None:
            self._start(save)
        else:
            self._next = save
        return outcomes

    @property
    def pending(self) -> tuple[int, ...]:
        """Steps whose save is not done yet, oldest first. The same on all ranks."""
        return tuple(save.step for save in (self._now, self._next) if save is not None)

    def report(self) -> State:
        """Where this rank stands with what it does in the background, for the others: they all have to hear it before
        `advance`."""
        self._reported = self._stages
        if self._task is None:
            return "idle"
        return "failed" if self._task.failed else "ready" if self._task.finished else "busy"

    def advance(self, *, failed: bool, ready: bool) -> list[Outcome]:
        """Go on to the next stage, on all ranks together. Does not wait and does not communicate.

        failed: some rank's last `report` was "failed"; ready: every rank's was "ready"."""
        if self._reported != self._stages or self._now is None:
            return []  # the report was of a stage that is over: a save was given up, begun or waited for since
        return self._advance(failed, ready)

    def poll(self) -> list[Outcome]:
        """`report` and `advance` by a vote, where ranks have no other way to hear of each other. Collective."""
        if self._task is None:
            return []
        return self._advance(*self._together.where_all_stand(self._task))

    def drain(self) -> list[Outcome]:
        """Wait until every save begun is committed or has failed. Collective."""
        outcomes = []
        while self._now is not None:
            outcomes.extend(self._wait())
        self._writer.settle(_HOUSEKEEPING_S)
        return outcomes

    def give_up_after(self, step: int) -> list[Outcome]:
        """Saves of later steps belong to a course that is taken back: those not in their last stage are given up. On all
        ranks; does not communicate."""
        outcomes = []
        if self._next is not None and self._next.step > step:
            outcomes.append(_outcome(self._next, "its steps were taken back", dropped=True))
            self._next = None
        if self._now is not None and self._now.step > step and self._now.stage == "write":
            outcomes.append(self._end("its steps were taken back", dropped=True))
        return outcomes

    def close(self) -> None:
        """Nothing more is committed: what is being written is given up. Not collective; idempotent."""
        if self._task is not None:
            self._task.give_up()
        self._now = self._next = self._task = None
        self._writer.close(_CLOSE_S)

    def _wait(self) -> list[Outcome]:
        assert self._task is not None
        self._task.wait(0.25)
        return self._advance(*self._together.where_all_stand(self._task))

    def _start(self, save: Save, after_s: float = 0.0) -> None:
        """Begin the present stage of `save`, or begin it again."""

        def work(task: Task) -> None:
            if after_s:
                task.sleep(after_s)
            save.work(task)

        self._now = save
        self._stages += 1
        self._task = self._writer.submit(save.what, work, self._together.deadline_s + after_s)

    def _advance(self, failed: bool, ready: bool) -> list[Outcome]:
        save, task = self._now, self._task
        assert save is not None and task is not None
        if failed:
            self._together.blame(save.what, task)
            task.give_up()
            if save.tries > self._retries:
                return [self._end(self.problem)]
            self._start(save, self._retry_wait_s * 2 ** (save.tries - 1))
            save.tries += 1
            return []
        if not ready:
            return []
        if save.stage == "write":
            save.next_stage()
            self._start(save)
            return []
        self.manifest = save.manifest
        self._held[save.step, save.attempt] = save.folder
        return [self._end("")]

    def _end(self, problem: str, dropped: bool = False) -> Outcome:
        """Done with the save in hand: tidy up, and begin the next one."""
        save, task = self._now, self._task
        assert save is not None and task is not None
        task.give_up()
        if self._job.committer:
            work = self._prune if not problem else lambda task: save.withdraw()
            self._writer.submit(f"tidy up after {save.folder}", work, self._together.deadline_s)
        self._now = self._task = None
        self._stages += 1
        if self._next is not None:
            following, self._next = self._next, None
            self._start(following)
        return _outcome(save, problem, dropped)

    # -- what is known about checkpoints --------------------------------------------------------------------------

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Note the evaluation (by name: eval_loss, ...) of the checkpoint of `step` that this process saved or loaded last, if
        there is one. Committers write, in the background, the others do nothing; a failure is a warning."""
        attempts = [attempt for held, attempt in self._held if held == step]
        if not attempts or not self._job.committer:
            return
        folder = self._held[step, max(attempts)]
        found = {name: value if math.isfinite(value) else None for name, value in values.items()}

        def note(task: Task) -> None:
            try:
                self._job.may_write()
                path = Path(folder)
                manifest = read_manifest(path, self.storage)
                health = replace(manifest.health, evaluation=found)
                write_manifest(path, replace(manifest, health=health), self.storage)
            except (OSError, ResilientError) as error:
                log.warning("the evaluation of step %d could not be noted: %s", step, redact(str(error)))

        self._writer.submit(f"note the evaluation of {folder}", note, self._together.deadline_s)

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the smallest evaluation loss, None if that is not known soon. For one rank."""
        found: list[Checkpoint | None] = []

        def look(task: Task) -> None:
            found.append(_best_of(list_checkpoints(self.storage)))

        self._writer.run("look for the best", look, _HOUSEKEEPING_S)
        return found[0] if found else None

    def _prune(self, task: Task) -> None:
        """In the background, when nothing is being written. Failure is a warning."""
        try:
            self._job.may_write()  # a start that another one has taken over from deletes nothing
            listing = list_checkpoints(self.storage)
        except (OSError, ResilientError) as error:
            log.warning("old checkpoints in %s are not deleted: %s", self.storage.name, redact(str(error)))
            return
        held = []
        for c in listing.complete:
            trust, in_force = self.trusted(c.manifest)
            health, name = c.manifest.health, c.path.name
            sound = health.sound and name not in self._rejected
            held.append(Held(name, c.manifest.step, trust, sound, in_force, loss=health.eval_loss))
        orphans = [o.path.name for o in listing.orphans]
        for name in expendable(held, orphans, self.rules, at_risk=self.at_risk):
            task.check()
            delete_checkpoint(self.storage, name)

    def write_beside(self, name: str, value: Any) -> None:
        """A small JSON file beside the checkpoints, in the background, by a committer. A failure is a warning."""
        data = json.dumps(value).encode()

        def write(task: Task) -> None:
            try:
                self._job.may_write()
                self.storage.put(name, data)
            except (OSError, ResilientError) as error:
                log.warning("%s could not be written: %s", name, redact(str(error)))

        self._writer.submit(f"write {name}", write, self._together.deadline_s)

    def read_beside(self, name: str, limit: int) -> Any:
        """What is in such a file; None if there is none that can be read. For one rank."""
        found: list[Any] = []

        def read(task: Task) -> None:
            found.append(json.loads(self.storage.get(name, limit)))

        self._writer.run(f"read {name}", read, _HOUSEKEEPING_S)
        return found[0] if found else None

    # -- loading --------------------------------------------------------------------------------------------------

    def load(
        self, step: int | None = None, *, on_no_valid_checkpoint: Literal["stop", "fresh"] = "stop"
    ) -> Snapshot | None:
        """This rank's snapshot of the newest checkpoint that every rank can read, or of `step` only when given.

        Call on all ranks; all get the same step. None: a fresh start (no traces of training in the run directory).
        Raises NothingUsable when there are traces and nothing can be loaded (unless on_no_valid_checkpoint="fresh"),
        CheckpointError when the checkpoint belongs to another run, world size or engine, when it lacks a required
        part, when `step` cannot be loaded, or when a rank does not see the place. All of these on all ranks alike."""
        loader = self._loader()
        found = loader.load(step, on_no_valid_checkpoint)
        self._rejected |= loader.rejected
        return self._keep(found).snapshot if found is not None else None

    def offers(self) -> tuple[list[Offer], str]:
        """Complete checkpoints that every rank could load, best first, and traces of training ("" for a fresh run), both the
        same on all ranks but for the names of folders. Collective."""
        return self._loader().offers()

    def take(self, offer: Offer, part: bool = True) -> Loaded | None:
        """See Loader.take. Collective."""
        loader = self._loader()
        found = loader.take(offer, part)
        self._rejected |= loader.rejected
        return self._keep(found) if found is not None else None

    def _loader(self) -> Loader:
        return Loader(
            self._job,
            self._together,
            self.layout(),
            self._gather,
            lambda ok: self._vote(ok),
            self._run_dir,
            elastic=self._elastic,
        )

    def _keep(self, found: Loaded) -> Loaded:
        self.manifest = found.manifest
        self._held[found.manifest.step, found.manifest.attempt] = found.folder
        return found


def configured_store(
    config: CheckpointConfig,
    run_dir: Path,
    *,
    rank: int,
    world: int,
    vote: Callable[[bool], bool],
    gather: Gather,
    generation: int,
    fingerprint: Mapping[str, Any],
    about: Mapping[str, Any],
    may_write: Callable[[], None],
) -> FilesystemStore:
    """The store of a run as its configuration has it: see FilesystemStore. Raises ConfigError for a location that cannot be
    opened."""
    return FilesystemStore(
        place_of(config.location, run_dir),
        rank=rank,
        world=world,
        vote=vote,
        gather=gather,
        keep=config.keep,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        run_id=run_dir.name,
        generation=generation,
        fingerprint=fingerprint,
        about=about,
        deadline_s=config.deadline_s,
        retries=config.retries if config.on_failure == "retry" else 0,
        retry_wait_s=config.retry_wait_s,
        when_busy=config.when_busy,
        run_dir=run_dir,
        elastic=config.elastic,
        may_write=may_write,
    )


def _best_of(listing: Listing) -> Checkpoint | None:
    complete = {c.path.name: c for c in listing.complete if c.manifest.health.sound}
    name = best_of({name: c.manifest.health.eval_loss for name, c in complete.items()})
    return complete[name] if name is not None else None


def _outcome(save: Save, problem: str, dropped: bool = False) -> Outcome:
    return Outcome(save.step, save.attempt, not problem, time.monotonic() - save.began, problem, dropped)


def _as_json(value: Any) -> Any:
    """As it will come back: tuples are lists and keys are strings in JSON."""
    return json.loads(json.dumps(value))
