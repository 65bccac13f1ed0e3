"""Which checkpoint all ranks load, and that each of them loads it whole or none does."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from resilient.checkpoint.commit import Job
from resilient.checkpoint.files import wait_until
from resilient.checkpoint.layout import Gather, Layout
from resilient.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    folder_name,
    list_checkpoints,
    path_of,
    read_manifest,
    step_of,
)
from resilient.checkpoint.parts import read_part
from resilient.checkpoint.snapshot import PARTS, Snapshot
from resilient.checkpoint.storage import LocalStorage, Storage
from resilient.checkpoint.together import Together
from resilient.checkpoint.writer import Task
from resilient.errors import CheckpointError, NothingUsable

log = logging.getLogger(__name__)

_OFFERED = 32  # checkpoints that the ranks tell each other of

_FOLDER = re.compile(r"step-(\d{8,})-a(\d{8,})(?:-g(\d{5,}))?(?:\.old(\d+))?")


@dataclass(frozen=True)
class Loaded:
    folder: str
    manifest: Manifest
    snapshot: Snapshot | None  # None on a rank that has it from elsewhere, and on all ranks of another world size


@dataclass(frozen=True)
class Offer:
    """One complete checkpoint as a committer has listed it, as numbers that a float64 holds exactly.

    start: in the folder's name, 0 for none. aside: of a folder that was put aside, -1 for others. sound: as its health says. seal: 48 bits of its manifest's digest, of this domain only.
    identity: 48 bits that are the same in all domains."""

    step: int
    attempt: int
    start: int
    aside: int
    sound: bool
    identity: int
    seal: int

    @classmethod
    def of(cls, folder: str, manifest: Manifest) -> Offer | None:
        """None for a folder with a name that no store has given it."""
        match = _FOLDER.fullmatch(folder)
        if match is None:
            return None
        step, attempt, start, aside = match.groups()
        return cls(
            int(step),
            int(attempt),
            int(start or 0),
            int(aside or -1),
            manifest.health.sound,
            int(manifest.identity, 16),
            _seal(manifest),
        )

    @property
    def folder(self) -> str:
        return folder_name(self.step, self.attempt, self.start) + (f".old{self.aside}" if self.aside >= 0 else "")


def _seal(manifest: Manifest) -> int:
    return int(manifest.digest[:12], 16)


class Loader:
    """For one load. Construct and use on all ranks. elastic: `take` may give checkpoints of another world size. `rejected`:
    folders whose content was refused."""

    def __init__(
        self,
        job: Job,
        together: Together,
        layout: Layout,
        gather: Gather,
        vote: Callable[[bool], bool],
        run_dir: Path | None,
        elastic: bool = True,
    ) -> None:
        self._job, self._together, self._layout, self._elastic = job, together, layout, elastic
        self._gather, self._vote, self._run_dir = gather, vote, run_dir
        self._own_world_only = False
        self.rejected: set[str] = set()

    def load(self, step: int | None, on_no_valid_checkpoint: Literal["stop", "fresh"]) -> Loaded | None:
        """See FilesystemStore.load. Never of another world size: there is no part of this rank in it."""
        self._own_world_only = True
        offers, traces = self.offers(step)
        for offer in offers:
            if step is not None and offer.step != step:
                continue
            loaded = self.take(offer)
            if loaded is not None:
                return loaded
        place = self._job.storage.name
        if step is not None:
            known = sorted((offer.step for offer in offers), reverse=True) or "none"
            raise CheckpointError(f"no usable checkpoint of step {step} in {place}; complete ones: {known}")
        if self._vote(not traces):
            return None
        what = f"{self._run_dir or place} holds traces of training ({traces or 'as another rank sees'}) but no usable checkpoint"
        if on_no_valid_checkpoint == "fresh":
            log.warning("%s: starting from the beginning, as on_no_valid_checkpoint=fresh says", what)
            return None
        raise nothing_usable(what)

    # -- which ---------------------------------------------------------------------------------------------------

    def offers(self, step: int | None = None) -> tuple[list[Offer], str]:
        """Checkpoints to try in order, and traces of training: what the committer of this rank's domain sees, of what all
        domains have. Nothing is written for it: a full disk can be loaded from. Collective."""
        self._together.problem = ""
        listed: list[Offer] = []
        traces = ""

        def look(task: Task) -> None:
            nonlocal traces
            if self._job.committer:
                complete = list_checkpoints(self._job.storage).complete
                wanted = sorted(
                    complete, key=lambda c: not c.manifest.health.sound
                )  # stable: newest first, sick ones last
                if step is not None:
                    wanted.sort(key=lambda c: c.manifest.step != step)
                listed.extend(o for c in wanted if (o := Offer.of(c.path.name, c.manifest)) is not None)
                traces = traces_of_training(self._job.storage, self._run_dir)

        if not self._together.agree("list the checkpoints", look):
            raise CheckpointError(self._together.problem)
        mine = np.full((_OFFERED, len(fields(Offer))), -1.0)
        for row, offer in zip(mine, listed, strict=False):
            row[:] = astuple(offer)
        told = self._gather(torch.from_numpy(mine.reshape(-1))).reshape(-1, *mine.shape)
        offers = {
            domain: [Offer(*row.astype(int).tolist()) for row in told[domain[0]] if row[0] >= 0]
            for domain in self._layout.domains
        }
        common = set.intersection(*({offer.identity for offer in found} for found in offers.values()))
        order = {offer.identity: place for place, offer in reversed(list(enumerate(offers[self._layout.domains[0]])))}
        own = [offer for offer in offers[self._job.domain] if offer.identity in common]
        if not self._layout.shared:  # one of each, for domains must not try different numbers of them
            own = list({offer.identity: offer for offer in reversed(own)}.values())
        return sorted(own, key=lambda offer: order[offer.identity]), traces

    # -- load ----------------------------------------------------------------------------------------------------

    def take(self, offer: Offer, part: bool = True) -> Loaded | None:
        """One checkpoint on all ranks: its manifest, fitting this job, every rank's part verified and loaded. None if a rank
        cannot. part: False on a rank that has its part from elsewhere. Of another world size, all get the manifest alone: what
        they make of it is theirs to vote about (coordinator/other_world.py). Collective.

        Raises CheckpointError, on all ranks, when it is of another job."""
        loaded = self._try(offer, part)
        if loaded is None:
            self.rejected.add(offer.folder)
            log.warning("checkpoint %s refused on all ranks: %s", offer.folder, self._together.problem)
        return loaded

    def _try(self, offer: Offer, own: bool) -> Loaded | None:
        job, storage, folder = self._job, self._job.storage, offer.folder
        path = path_of(storage, folder)
        manifests: list[Manifest] = []
        snapshots: list[Snapshot] = []

        def read(task: Task) -> None:
            problem = ""

            def there() -> bool:
                nonlocal problem
                task.check()
                try:
                    manifests[:] = [read_manifest(path, storage)]
                except CheckpointError as error:
                    problem = str(error)
                return bool(manifests)

            if not wait_until(there, job.visible_s):
                raise CheckpointError(problem)
            if _seal(manifests[0]) != offer.seal:
                raise CheckpointError(f"{job.where(folder)}/{MANIFEST} is not the one that rank {job.domain[0]} chose")

        def load(task: Task) -> None:
            if manifests[0].world != job.world and not own:
                raise CheckpointError(f"{job.where(folder)} is of another world size than the copy of rank {job.rank}")
            if manifests[0].world != job.world or not own:
                return
            part = manifests[0].part_of(job.rank)
            snapshot = read_part(storage, folder, part, task.check)
            if (snapshot.step, snapshot.attempt) != (manifests[0].step, manifests[0].attempt):
                raise CheckpointError(
                    f"{job.where(folder)}: the part is of step {snapshot.step}, the manifest of {manifests[0].step}"
                )
            snapshots.append(snapshot)

        if not self._together.agree(f"read the manifest of {folder}", read):
            return None
        unfit = self._unfit(manifests[0])
        if not self._vote(not unfit):
            raise CheckpointError(unfit or f"{job.where(folder)} does not fit this job, another rank says")
        if not self._together.agree(f"load its part of {folder}", load):
            return None
        return Loaded(folder, manifests[0], snapshots[0] if snapshots else None)

    def _unfit(self, manifest: Manifest) -> str:
        """Why this job must not load it, "" if it may."""
        job = self._job
        path = job.where(f"step {manifest.step}")
        if manifest.run_id != job.run_id:
            return f"{path} belongs to run {manifest.run_id!r}, this is run {job.run_id!r}"
        differences = []
        if manifest.world != job.world:
            obstacle = self._bound_to_its_world(manifest)
            if obstacle is not None:
                sizes = f"world size {manifest.world} there, {job.world} here"
                differences.append(f"{sizes} (start {manifest.world} ranks{obstacle})")
        elif job.rank not in manifest.ranks:
            differences.append(
                f"parts of ranks {list(manifest.ranks)} there, rank {job.rank} here: the hosts have changed"
            )
        for key in sorted({*manifest.fingerprint, *job.fingerprint}):
            there, here = manifest.fingerprint.get(key), job.fingerprint.get(key)
            if there != here:
                differences.append(f"{key} {there!r} there, {here!r} here")
        if differences:
            return (
                f"{path} was written by a different job: {'; '.join(differences)}. "
                "Start with the settings it was written with, or choose another run.id for a new run"
            )
        for rank, part in zip(manifest.ranks, manifest.parts, strict=True):
            missing = [name for name in PARTS if name not in part.digests]
            if missing:
                return f"{path} lacks the required part {', '.join(missing)} of rank {rank}"
        return ""

    def _bound_to_its_world(self, manifest: Manifest) -> str | None:
        """What keeps a checkpoint of another world size from being taken; None if nothing does."""
        if self._own_world_only:
            return ""
        if not self._elastic:
            return ", or with run.checkpoint.elastic=true"
        if not isinstance(self._job.storage, LocalStorage):
            return "; or copy it to a folder that all ranks share: every rank reads all parts"
        if len(manifest.ranks) < manifest.world or not self._layout.shared:
            return "; or bring all parts together in one folder that all ranks share: every rank reads all of them"
        return None


def nothing_usable(what: str) -> NothingUsable:
    return NothingUsable(
        f"{what}. Starting from zero would throw that work away: repair a checkpoint, choose another run.id, "
        "or say run.on_no_valid_checkpoint=fresh"
    )


def traces_of_training(place: Path | Storage, run_dir: Path | None = None) -> str:
    """What says that training has happened: "" for a fresh run. place: its checkpoints; run_dir: None: the folder above.

    A save of step 0 that never committed is no trace: nothing was lost with it (BR-25)."""
    storage = LocalStorage(place) if isinstance(place, Path) else place
    if run_dir is None and isinstance(storage, LocalStorage):
        run_dir = storage.root.parent
    found = []
    for name in storage.folders():
        step = step_of(name)
        if step is not None and (step > 0 or MANIFEST in storage.files(name)):
            found.append(name)
    steps = run_dir / "steps.jsonl" if run_dir is not None else None
    if steps is not None and steps.exists() and steps.stat().st_size > 0:
        found.append(steps.name)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
