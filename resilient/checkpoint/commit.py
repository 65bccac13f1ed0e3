"""One save on one rank, as two pieces of work for the background, with an agreement of all ranks after each:

    write     the committer opens the folder; every rank writes and fsyncs its part and a note of its size and digest
    commit    the committer reads the notes and writes the manifest; every rank sees it with its own part in it
                                                                                 -> only now is it a checkpoint
    withdraw  instead: the committer takes back what it has made, the manifest first

Each may be done again after it failed. Nothing here talks to another rank but through files that are waited for.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

from resilient.checkpoint.files import as_json, parse_json, wait_until
from resilient.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_LIMIT,
    Health,
    Manifest,
    Part,
    folder_name,
    installed_versions,
    list_checkpoints,
    part_name,
    path_of,
    read_manifest,
    write_manifest,
)
from resilient.checkpoint.parts import is_finite, note_name, write_part
from resilient.checkpoint.snapshot import PARTS, Snapshot
from resilient.checkpoint.storage import Storage, redact
from resilient.checkpoint.writer import Task
from resilient.errors import CheckpointError

log = logging.getLogger(__name__)

OPENED = "opened.json"
_OPENED_LIMIT = 1 << 16

Stage = Literal["write", "commit"]


@dataclass
class Job:
    """What all saves of a process have in common.

    domain: ranks that share `storage`, this one among them (layout.py). may_write: raises when a newer start of the run
    exists. visible_s: how long to wait for a file that another rank has written."""

    storage: Storage
    rank: int
    world: int
    domain: tuple[int, ...]
    run_id: str
    generation: int
    fingerprint: dict[str, Any]
    about: dict[str, Any]
    may_write: Callable[[], None]
    visible_s: float

    @property
    def committer(self) -> bool:
        return self.rank == self.domain[0]

    def where(self, folder: str) -> str:
        return f"{self.storage.name}/{folder}"


class Save:
    """number: of this save in this process; the same on all ranks. `stage`: what is being done or waited for."""

    def __init__(
        self,
        job: Job,
        number: int,
        snapshot: Snapshot,
        outer: dict[str, Any] | None,
        health: Health | None,
        facts: Mapping[str, Any],
    ) -> None:
        self.job, self.number = job, number
        self.step, self.attempt = snapshot.step, snapshot.attempt
        self.folder = folder_name(snapshot.step, snapshot.attempt, job.generation)
        self.stage: Stage = "write"
        self.tries = 1  # of this stage, this one among them
        self.began = time.monotonic()
        self.manifest: Manifest | None = None
        self.missing = [name for name in PARTS if name not in snapshot.parts or name not in snapshot.digests]
        self._snapshot: Snapshot | None = snapshot
        self._about = {
            "step": snapshot.step,
            "attempt": snapshot.attempt,
            "position": snapshot.position,
            "lr": snapshot.lr,
            "schedule": snapshot.schedule,
            "outer": outer,
            "health": health or Health(),
            **facts,
        }
        self._finite = True  # the state of every rank of this domain
        self._made = False
        self._part: Part | None = None

    @property
    def what(self) -> str:
        return (
            f"write {part_name(self.job.rank)} of {self.folder}" if self.stage == "write" else f"commit {self.folder}"
        )

    def work(self, task: Task) -> None:
        """The present stage. Raises what goes wrong."""
        self._write(task) if self.stage == "write" else self._commit(task)

    def next_stage(self) -> None:
        self.stage, self.tries = "commit", 1
        self._snapshot = None  # its memory is free again

    # -- write ----------------------------------------------------------------------------------------------------

    def _write(self, task: Task) -> None:
        if self.missing:
            raise CheckpointError(f"the snapshot lacks the required part (or its digest) {', '.join(self.missing)}")
        if self.job.committer:
            self._open(task)
        elif not wait_until(lambda: self._is_open(task), self.job.visible_s):
            raise CheckpointError(
                f"{socket.gethostname()} does not see {self.job.where(self.folder)}, which rank {self.job.domain[0]} has "
                "made: all ranks must share the checkpoint folder, or all ranks of a host theirs (run.checkpoint.location)"
            )
        if self._part is None:
            assert self._snapshot is not None
            about = {"finite": is_finite(self._snapshot.parts["engine"])}
            part = write_part(self.job.storage, self.folder, self.job.rank, self._snapshot, about, check=task.check)
            task.check()
            self._part = part

    def _open(self, task: Task) -> None:
        """A folder of this save alone. What is there under the name is put aside: an orphan, or complete but refused at load,
        where a run without a count of its starts was started again."""
        storage = self.job.storage
        self.job.may_write()
        if not self._made:
            if storage.has_files(self.folder):
                aside = next(n for n in (f"{self.folder}.old{i}" for i in range(10**6)) if not storage.has_files(n))
                storage.move_folder(self.folder, aside, last=MANIFEST)
            task.check()
            storage.make_folder(self.folder)
            self._made = True
        storage.put(f"{self.folder}/{OPENED}", as_json(self._opened))

    @property
    def _opened(self) -> dict[str, Any]:
        return {"run_id": self.job.run_id, "generation": self.job.generation, "save": self.number}

    def _is_open(self, task: Task) -> bool:
        task.check()
        return self._is_mine()

    def _is_mine(self) -> bool:
        """False as well once another process has put this folder aside and made its own under the name."""
        try:
            return parse_json(self.job.storage.get(f"{self.folder}/{OPENED}", _OPENED_LIMIT), OPENED) == self._opened
        except (OSError, ValueError):
            return False

    # -- commit ---------------------------------------------------------------------------------------------------

    def _commit(self, task: Task) -> None:
        storage, path = self.job.storage, path_of(self.job.storage, self.folder)
        if self.job.committer and self.manifest is None:
            self.job.may_write()
            manifest = self._describe(task)
            task.check()
            self.job.may_write()  # again: a commit numbered after those of a newer start would go before them
            write_manifest(path, manifest, storage)
        found: list[Manifest] = []

        def seen() -> bool:
            task.check()
            try:
                found[:] = [read_manifest(path, storage)]
            except CheckpointError:
                return False
            return True

        if not wait_until(seen, self.job.visible_s):
            raise CheckpointError(
                f"{self.job.where(self.folder)}/{MANIFEST} is not there after {self.job.visible_s:.0f} s"
            )
        if found[0].part_of(self.job.rank) != self._part:
            raise CheckpointError(
                f"{self.job.where(self.folder)}/{MANIFEST} does not describe the part of rank {self.job.rank}"
            )
        self.manifest = found[0]

    def _describe(self, task: Task) -> Manifest:
        job, known = self.job, list_checkpoints(self.job.storage).complete
        parts = tuple(self._read_note(rank, task) for rank in job.domain)
        health = self._about["health"]
        about = {**self._about, "health": replace(health, finite=health.finite and self._finite)}
        return Manifest(
            run_id=job.run_id,
            generation=job.generation,
            serial=1 + max((c.manifest.serial for c in known), default=0),
            world=job.world,
            fingerprint=job.fingerprint,
            parts=parts,
            ranks=job.domain,
            versions=installed_versions(),
            written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            about=job.about,
            **about,
        )

    def _read_note(self, rank: int, task: Task) -> Part:
        """What another rank says about its part, checked against the file itself."""
        storage, note, part = self.job.storage, f"{self.folder}/{note_name(rank)}", f"{self.folder}/{part_name(rank)}"
        content: dict[str, Any] = {}

        def there() -> bool:
            task.check()
            try:
                content.update(parse_json(storage.get(note, MANIFEST_LIMIT), note))
                return storage.size(part) == content["size"]
            except OSError:
                return False

        if not wait_until(there, self.job.visible_s):
            if not content:
                raise CheckpointError(f"the part of rank {rank} is not visible in {self.job.where(self.folder)}")
            raise CheckpointError(f"the part of rank {rank} has not the {content['size']} bytes that it wrote")
        if (content["step"], content["attempt"]) != (self.step, self.attempt):
            raise CheckpointError(f"rank {rank} saved step {content['step']}, rank {self.job.rank} step {self.step}")
        self._finite &= content.get("finite") is not False
        return Part(part_name(rank), int(content["size"]), str(content["digest"]), dict(content["digests"]))

    # -- withdraw -------------------------------------------------------------------------------------------------

    def withdraw(self) -> None:
        """On the committer, once no rank goes on with it. What another process has made under the name stays."""
        self._snapshot = None
        if self._made and self._is_mine():
            delete_checkpoint(self.job.storage, self.folder)


def delete_checkpoint(storage: Storage, folder: str) -> None:
    """Manifest first, so that a half-deleted folder is never taken for a checkpoint. Failure is a warning."""
    try:
        storage.delete_folder(folder, first=MANIFEST)
    except (OSError, ValueError) as error:
        log.warning("could not delete %s/%s: %s", storage.name, folder, redact(str(error)))
