"""The filesystem store: committed together or not at all, loaded together or not at all.

Save, in four stages with a vote of all ranks after each:

    prepare   rank 0 makes the folder
    write     every rank writes and fsyncs its part and a note of its size and digest
    commit    rank 0 reads the notes and writes the manifest (write, fsync, rename, fsync)
    see       every rank sees the manifest with its own part in it        -> only now is it a checkpoint

A rank that fails at a stage votes no, and all ranks leave by the same door. No decision that steers a rank is taken
from its own view of the folder: rank 0 lists, writes its choice to a file, and all ranks try that (BR-28).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from resilient.checkpoint.files import fsync_folder, read_json, wait_until, write_json
from resilient.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_LIMIT,
    Checkpoint,
    Health,
    Manifest,
    Part,
    folder_name,
    installed_versions,
    list_checkpoints,
    part_name,
    read_manifest,
    step_of,
    write_manifest,
)
from resilient.checkpoint.parts import note_name, read_part, write_part
from resilient.checkpoint.retention import best_of, to_delete
from resilient.checkpoint.snapshot import PARTS, Snapshot
from resilient.errors import CheckpointError, NothingUsable, ResilientError

log = logging.getLogger(__name__)


class FilesystemStore:
    """Checkpoints of one run in one folder that all ranks share.

    folder: usually <run>/checkpoints. A folder that only some ranks see is refused.
    vote: collective with its own deadline; all ranks call it, True only if every rank said True. Its deadline must
        exceed the time the slowest rank needs to write or read its part.
    keep: complete checkpoints to keep (at least one stays). keep_best: and the one with the best evaluation.
    fingerprint: JSON values that must be equal to load: engine, precision, model shape and the like.
    visible_s: how long a rank waits for a file that another rank has written.
    may_write: called on rank 0 before a save; raises when this process must not write any more (a newer generation).

    `manifest` is that of the last checkpoint loaded or saved (`manifest.outer` is the outer state saved with it);
    `problem` says why the last save returned False.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        rank: int,
        world: int,
        vote: Callable[[bool], bool],
        keep: int,
        keep_best: bool = True,
        run_id: str,
        generation: int,
        fingerprint: Mapping[str, Any],
        visible_s: float = 30.0,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.rank, self.world = rank, world
        self.keep, self.keep_best = keep, keep_best
        self.run_id, self.generation = run_id, generation
        self.fingerprint = _as_json(dict(fingerprint))
        self.visible_s = visible_s
        self._may_write = may_write
        self.manifest: Manifest | None = None
        self.problem = ""
        self._vote = vote
        self._held: set[tuple[int, int]] = set()  # (step, attempt) saved or loaded by this process
        self._rejected: set[str] = set()  # folders whose content was refused
        self._own: Part | None = None
        self._created: Path | None = None  # rank 0: the folder this save made
        self._choices = 0

    # -- save ---------------------------------------------------------------------------------------------------

    def save(self, snapshot: Snapshot, outer: dict[str, Any] | None = None, health: Health | None = None) -> bool:
        """Commit a snapshot. Call on all ranks at the same step; returns the same on all: True once every rank sees it.

        outer: JSON state that outlives a rollback (budget, skipped data); rank 0's is stored in the manifest, and so is
        its `health`.
        False means that nothing was committed and older checkpoints are untouched; `problem` says why.
        Saving the same (step, attempt) again does nothing. Raises CheckpointError if a required part is missing,
        and whatever the vote raises when ranks do not come (BR-22)."""
        key = (snapshot.step, snapshot.attempt)
        if key in self._held:
            return True
        path = self.folder / folder_name(*key)
        missing = [name for name in PARTS if name not in snapshot.parts or name not in snapshot.digests]
        self.problem, self._created = "", None
        committed = (
            self._agree(f"prepare {path.name}", lambda: self._prepare(path, missing))
            and self._agree(f"write {part_name(self.rank)}", lambda: self._write(path, snapshot))
            and self._agree(f"commit {path.name}", lambda: self._commit(path, snapshot, outer, health))
            and self._agree(f"see {path.name} committed", lambda: self._see(path))
        )
        if not committed:
            self._withdraw()
            if missing:
                raise CheckpointError(self.problem)
            return False
        self._held.add(key)
        if self.rank == 0:
            self._prune()
        return True

    def _agree(self, what: str, action: Callable[[], None]) -> bool:
        """This rank's share of a stage, then everybody's vote on it. An error on one rank is a no from all."""
        try:
            action()
        except Exception as error:
            self.problem = f"rank {self.rank} could not {what}: {error}"
            log.warning("%s", self.problem)
            self._vote(False)
            return False
        if self._vote(True):
            return True
        self.problem = f"another rank could not {what}; its log says why"
        return False

    def _prepare(self, path: Path, missing: list[str]) -> None:
        if missing:
            raise CheckpointError(f"the snapshot lacks the required part (or its digest) {', '.join(missing)}")
        if self.rank != 0:
            return
        self._may_write()
        self.folder.mkdir(parents=True, exist_ok=True)
        if path.exists():  # left by an earlier start: an orphan, or complete but refused at load
            aside = next(p for p in (path.with_name(f"{path.name}.old{i}") for i in range(10**6)) if not p.exists())
            path.rename(aside)
        path.mkdir()
        self._created = path
        fsync_folder(self.folder)

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        if not wait_until(path.is_dir, self.visible_s):
            raise CheckpointError(
                f"{socket.gethostname()} does not see {path}, which rank 0 has made: all ranks must share the "
                "checkpoint folder (run.root on a shared file system); node-local folders are not supported"
            )
        self._own = write_part(path, self.rank, snapshot)

    def _commit(self, path: Path, snapshot: Snapshot, outer: dict[str, Any] | None, health: Health | None) -> None:
        if self.rank != 0:
            return
        known = list_checkpoints(self.folder).complete
        manifest = Manifest(
            run_id=self.run_id,
            generation=self.generation,
            serial=1 + max((c.manifest.serial for c in known), default=0),
            step=snapshot.step,
            attempt=snapshot.attempt,
            position=snapshot.position,
            lr=snapshot.lr,
            schedule=snapshot.schedule,
            world=self.world,
            fingerprint=self.fingerprint,
            parts=tuple(self._read_note(path, rank, snapshot) for rank in range(self.world)),
            versions=installed_versions(),
            written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            outer=_as_json(outer),
            health=health or Health(),
        )
        write_manifest(path, manifest)

    def _read_note(self, path: Path, rank: int, snapshot: Snapshot) -> Part:
        """What another rank says about its part, checked against the file itself."""
        note_path, part_path = path / note_name(rank), path / part_name(rank)
        if not wait_until(lambda: note_path.exists() and part_path.exists(), self.visible_s):
            raise CheckpointError(f"the part of rank {rank} is not visible in {path}: all ranks must share this folder")
        note = read_json(note_path, limit=MANIFEST_LIMIT)
        if (note["step"], note["attempt"]) != (snapshot.step, snapshot.attempt):
            raise CheckpointError(f"rank {rank} saved step {note['step']}, rank 0 saved step {snapshot.step}")
        if not wait_until(lambda: part_path.stat().st_size == note["size"], self.visible_s):
            raise CheckpointError(f"the part of rank {rank} has not the {note['size']} bytes that it wrote")
        return Part(part_path.name, int(note["size"]), str(note["digest"]), dict(note["digests"]))

    def _see(self, path: Path) -> None:
        if not wait_until((path / MANIFEST).exists, self.visible_s):
            raise CheckpointError(f"{path / MANIFEST} is not visible after {self.visible_s:.0f} s")
        manifest = read_manifest(path)
        if manifest.parts[self.rank] != self._own:
            raise CheckpointError(f"{path / MANIFEST} does not describe the part of rank {self.rank}")
        self.manifest = manifest

    def _withdraw(self) -> None:
        """Rank 0: take back what this save made, the manifest first. All files are closed: every rank has voted."""
        if self._created is not None:
            self._delete(self._created)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Note the evaluation (by name: eval_loss, ...) of the checkpoint of `step` that this process saved or loaded last, if there is one. Rank 0
        writes, the others do nothing; a failure is a warning."""
        if self.rank != 0:
            return
        attempts = [attempt for held, attempt in self._held if held == step]
        if not attempts:
            return
        path = self.folder / folder_name(step, max(attempts))
        try:
            self._may_write()
            manifest = read_manifest(path)
            found = {name: value if math.isfinite(value) else None for name, value in values.items()}
            write_manifest(path, replace(manifest, health=replace(manifest.health, evaluation=found)))
        except (OSError, ResilientError) as error:
            log.warning("the evaluation of step %d could not be noted in %s: %s", step, path, error)

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the smallest evaluation loss. For one rank: it lists the folder."""
        try:
            complete = {c.path.name: c for c in list_checkpoints(self.folder).complete if c.manifest.health.sound}
        except OSError:
            return None
        name = best_of({name: c.manifest.health.eval_loss for name, c in complete.items()})
        return complete[name] if name is not None else None

    def _prune(self) -> None:
        listing = list_checkpoints(self.folder)
        best = self.best() if self.keep_best else None
        sick = {c.path.name for c in listing.complete if not c.manifest.health.sound}
        for name in to_delete(
            [c.path.name for c in listing.complete],
            [o.path.name for o in listing.orphans],
            keep=self.keep,
            rejected=self._rejected | sick,
            best=best.path.name if best is not None else None,
        ):
            self._delete(self.folder / name)

    def _delete(self, path: Path) -> None:
        """Manifest first, so that a half-deleted folder is never taken for a checkpoint. Failure is a warning."""
        try:
            (path / MANIFEST).unlink(missing_ok=True)
            fsync_folder(path)
            shutil.rmtree(path)
        except OSError as error:
            log.warning("could not delete %s: %s", path, error)

    # -- load ---------------------------------------------------------------------------------------------------

    def load(
        self, step: int | None = None, *, on_no_valid_checkpoint: Literal["stop", "fresh"] = "stop"
    ) -> Snapshot | None:
        """This rank's snapshot of the newest checkpoint that every rank can read, or of `step` only when given.

        Call on all ranks; all get the same step. None: a fresh start (no traces of training in the run directory).
        Raises NothingUsable when there are traces and nothing can be loaded (unless on_no_valid_checkpoint="fresh"),
        CheckpointError when the checkpoint belongs to another run, world size or engine, when it lacks a required
        part, when `step` cannot be loaded, or when a rank does not see the folder. All of these on all ranks alike."""
        candidates, available, traces = self._choose(step)
        for name, digest in candidates:
            snapshot = self._try(name, digest)
            if snapshot is not None:
                return snapshot
            self._rejected.add(name)
            log.warning("checkpoint %s refused on all ranks: %s", name, self.problem)
        if step is not None:
            raise CheckpointError(
                f"no usable checkpoint of step {step} in {self.folder}; complete ones: {available or 'none'}"
            )
        if not traces:
            return None
        what = f"{self.folder.parent} holds traces of training ({traces}) but no usable checkpoint"
        if on_no_valid_checkpoint == "fresh":
            log.warning("%s: starting from the beginning, as on_no_valid_checkpoint=fresh says", what)
            return None
        raise NothingUsable(
            f"{what}. Starting from zero would throw that work away: repair a checkpoint, choose another run.id, "
            "or say run.on_no_valid_checkpoint=fresh"
        )

    def _choose(self, step: int | None) -> tuple[list[tuple[str, str]], list[int], str]:
        """Rank 0 lists, all read its list: (folder name, manifest digest) to try in order, all steps, traces."""
        self.problem = ""
        self._choices += 1
        path = self.folder / f".choice-{self.generation}-{self._choices}.json"
        read: dict[str, Any] = {}

        def write() -> None:
            if self.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                complete = list_checkpoints(self.folder).complete
                wanted = [c for c in complete if step is None or c.manifest.step == step]
                wanted.sort(key=lambda c: not c.manifest.health.sound)  # stable: newest first, sick ones last
                write_json(path, self._as_choice(wanted, complete))

        def see() -> None:
            if not wait_until(path.exists, self.visible_s):
                raise CheckpointError(
                    f"{socket.gethostname()} does not see {path}, which rank 0 has written: all ranks must share the "
                    "checkpoint folder (run.root on a shared file system); node-local folders are not supported"
                )
            read.update(read_json(path, limit=MANIFEST_LIMIT))

        agreed = self._agree("list the checkpoints", write) and self._agree("read rank 0's list of checkpoints", see)
        if self.rank == 0:
            path.unlink(missing_ok=True)
        if not agreed:
            raise CheckpointError(self.problem)
        return [(name, digest) for name, digest in read["candidates"]], read["available"], read["traces"]

    def _as_choice(self, wanted: list[Checkpoint], complete: tuple[Checkpoint, ...]) -> dict[str, Any]:
        return {
            "candidates": [(c.path.name, c.manifest.digest) for c in wanted],
            "available": [c.manifest.step for c in complete],
            "traces": traces_of_training(self.folder),
        }

    def _try(self, name: str, digest: str) -> Snapshot | None:
        """One candidate on all ranks: same manifest, fitting this job, every rank's part verified and loaded."""
        path = self.folder / name
        found: dict[str, Any] = {}

        def read() -> None:
            wait_until((path / MANIFEST).exists, self.visible_s)
            manifest = read_manifest(path)
            if manifest.digest != digest:
                raise CheckpointError(f"{path / MANIFEST} is not the one that rank 0 chose")
            found["manifest"] = manifest

        def load() -> None:
            snapshot = read_part(path, manifest.parts[self.rank])
            if (snapshot.step, snapshot.attempt) != (manifest.step, manifest.attempt):
                raise CheckpointError(f"{path}: the part is of step {snapshot.step}, the manifest of {manifest.step}")
            found["snapshot"] = snapshot

        if not self._agree(f"read the manifest of {name}", read):
            return None
        manifest: Manifest = found["manifest"]
        self._refuse_unfit(path, manifest)  # the same manifest on all ranks, so all raise or none does
        if not self._agree(f"load its part of {name}", load):
            return None
        self.manifest = manifest
        self._held.add((manifest.step, manifest.attempt))
        return found["snapshot"]

    def _refuse_unfit(self, path: Path, manifest: Manifest) -> None:
        if manifest.run_id != self.run_id:
            raise CheckpointError(f"{path} belongs to run {manifest.run_id!r}, this is run {self.run_id!r}")
        differences = []
        if manifest.world != self.world:
            differences.append(f"world size {manifest.world} there, {self.world} here (start {manifest.world} ranks)")
        for key in sorted({*manifest.fingerprint, *self.fingerprint}):
            there, here = manifest.fingerprint.get(key), self.fingerprint.get(key)
            if there != here:
                differences.append(f"{key} {there!r} there, {here!r} here")
        if differences:
            raise CheckpointError(
                f"{path} was written by a different job: {'; '.join(differences)}. "
                "Start with the settings it was written with, or choose another run.id for a new run"
            )
        for rank, part in enumerate(manifest.parts):
            missing = [name for name in PARTS if name not in part.digests]
            if missing:
                raise CheckpointError(f"{path} lacks the required part {', '.join(missing)} of rank {rank}")


def traces_of_training(folder: Path) -> str:
    """What in a run directory says that training has happened: "" for a fresh one. `folder` is its checkpoint folder.

    A save of step 0 that never committed is no trace: nothing was lost with it (BR-25)."""
    found = []
    for path in sorted(folder.glob("step-*")):
        if (path / MANIFEST).exists() or (step_of(path.name) or 0) > 0:
            found.append(path.name)
    steps = folder.parent / "steps.jsonl"
    if steps.exists() and os.path.getsize(steps) > 0:
        found.append(steps.name)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _as_json(value: Any) -> Any:
    """As it will come back: tuples are lists and keys are strings in JSON."""
    return json.loads(json.dumps(value))
