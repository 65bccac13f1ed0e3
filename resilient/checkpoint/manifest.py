"""The manifest: the one file that makes a folder of parts a checkpoint, and the discovery that trusts nothing else.

    <run>/checkpoints/step-00000050-a00000057/   one folder per committed snapshot (step, attempt; -g00002: of start 2)
        opened.json      by which start, and for which of its saves: written first, parts go nowhere else
        rank-00000.pt    the part of rank 0      rank-00000.json   its size and digest, for the committer
        manifest.json    written last; no manifest, no checkpoint

Where each host has a folder of its own (layout.py), each has a manifest with the parts that lie there, and a checkpoint
is complete when all of them have.

No torch in here: the supervisor and `resilient checkpoint` read manifests too.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from resilient.checkpoint.files import as_json, parse_json
from resilient.checkpoint.storage import LocalStorage, Storage, open_storage, redact
from resilient.errors import CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 16 << 20  # bytes; about 400 per rank are needed

_FOLDER = re.compile(r"step-(\d{8,})-a(\d{8,})")


def folder_name(step: int, attempt: int, generation: int = 0) -> str:
    """A step may be reached twice (after a rollback), an attempt may not: both name the folder. So does, after the first,
    the start of the run that makes it: one that was thought dead and comes back never writes where a newer one does."""
    return f"step-{step:08d}-a{attempt:08d}" + (f"-g{generation:05d}" if generation > 0 else "")


def step_of(name: str) -> int | None:
    """The step in a checkpoint folder's name, None for any other name."""
    match = _FOLDER.match(name)
    return int(match.group(1)) if match else None


def part_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


@dataclass(frozen=True)
class Part:
    """One rank's file: its name inside the checkpoint folder, size in bytes, xxh3-128 of its bytes, and the snapshot's
    digest of each state part in it (the random streams of the rank are one of them)."""

    file: str
    size: int
    digest: str
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Health:
    """How good the weights of a checkpoint are (BR-35). Retention and the order of candidates at a load go by it.

    finite: the weights of all ranks, when saved. level: the stability letter then, "" if nobody judged.
    evaluation: what an evaluation of these very weights found, by name (eval_loss, entropy, repetition), null for what
    was not finite; empty: not evaluated. It may come after the commit, so the manifest's digest leaves this part out. A
    resumed run hands it to its judge, who had not heard of it when this was saved (BR-46)."""

    finite: bool = True
    level: str = ""
    evaluation: dict[str, float | None] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        return self.finite and None not in self.evaluation.values()

    @property
    def eval_loss(self) -> float | None:
        return self.evaluation.get("eval_loss")


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint holds. `serial` counts commits in this folder and orders them: steps and generations
    may both come again, after a rollback or a new `resilient launch` of the same run.

    position: data windows consumed; samples: the same in samples of all ranks, null where the loader does not tell.
    lr, schedule, loss_scale: what the next step would use. world: ranks of the job. ranks: those whose parts lie here, in
    the order of `parts`. about: what the job was: engine, precision, mesh, config digest, git commit."""

    run_id: str
    generation: int
    serial: int
    step: int
    attempt: int
    position: int
    lr: float
    schedule: int | None
    world: int
    fingerprint: dict[str, Any]
    parts: tuple[Part, ...]
    versions: dict[str, str]
    written_at: str
    outer: dict[str, Any] | None = None
    format: int = FORMAT
    health: Health = field(default_factory=Health)
    ranks: tuple[int, ...] = ()
    samples: int | None = None
    loss_scale: float = 1.0
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(len(self.parts))))

    def part_of(self, rank: int) -> Part:
        """CheckpointError if it does not lie here."""
        if rank not in self.ranks:
            raise CheckpointError(f"the part of rank {rank} lies elsewhere: here are those of ranks {list(self.ranks)}")
        return self.parts[self.ranks.index(rank)]

    @property
    def identity(self) -> str:
        """48 bits that the manifests of one checkpoint share on all hosts."""
        names = (self.run_id, self.generation, self.step, self.attempt, self.world)
        return hashlib.blake2b(repr(names).encode(), digest_size=6).hexdigest()

    @property
    def digest(self) -> str:
        """blake2b-128 of the manifest's own content: a flipped byte in it is found too."""
        return _content_digest(asdict(self))


def _content_digest(content: Mapping[str, Any]) -> str:
    sealed = {key: value for key, value in content.items() if key != "health"}
    return hashlib.blake2b(json.dumps(sealed, sort_keys=True).encode(), digest_size=16).hexdigest()


def installed_versions() -> dict[str, str]:
    """Versions that decide whether a state can be read again. Nothing is imported for it."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "deepspeed", "resilient-train"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_manifest(folder: Path, manifest: Manifest, storage: Storage | None = None) -> None:
    """Commit `folder`. Call on the committer only, after all parts are durable. Raises OSError or ValueError.

    storage: where the folder is, by its last name; None: on this machine's file system."""
    content = asdict(manifest)
    data = as_json({**content, "digest": _content_digest(content)}, limit=MANIFEST_LIMIT, name=MANIFEST)
    (storage or LocalStorage(folder.parent)).put(f"{folder.name}/{MANIFEST}", data)


def read_manifest(folder: Path, storage: Storage | None = None) -> Manifest:
    """The manifest of one checkpoint folder, validated. Raises CheckpointError naming what is wrong with it."""
    storage = storage or LocalStorage(folder.parent)
    path = f"{storage.name}/{folder.name}/{MANIFEST}"
    try:
        content = parse_json(storage.get(f"{folder.name}/{MANIFEST}", MANIFEST_LIMIT), MANIFEST)
        digest = content.pop("digest", None)
        if content.get("format") != FORMAT:
            raise ValueError(f"format {content.get('format')!r}, this version reads {FORMAT}")
        if digest != _content_digest(content):
            raise ValueError("its content does not match its digest")
        return _as_manifest(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"unusable manifest {path}: {redact(str(error))}") from error


def _as_manifest(content: dict[str, Any]) -> Manifest:
    """ValueError or TypeError where a field is not what the rest of the program will take it for."""
    parts = tuple(Part(**part) for part in content.pop("parts"))
    ranks = tuple(content.pop("ranks"))
    manifest = Manifest(parts=parts, ranks=ranks, health=Health(**content.pop("health")), **content)
    for name in ("generation", "serial", "step", "attempt", "position", "world"):
        if type(getattr(manifest, name)) is not int or getattr(manifest, name) < 0:
            raise ValueError(f"{name} is {getattr(manifest, name)!r}")
    if any(type(rank) is not int or not 0 <= rank < manifest.world for rank in ranks) or len(set(ranks)) < len(ranks):
        raise ValueError(f"ranks are {ranks} for a world of {manifest.world}")
    if len(parts) != len(ranks):
        raise ValueError(f"{len(parts)} parts for {len(ranks)} ranks")
    for rank, part in zip(ranks, parts, strict=True):
        if part.file != part_name(rank):  # nothing else is ever opened: a manifest cannot point out of its folder
            raise ValueError(f"part {rank} is named {part.file!r}")
        if type(part.size) is not int or part.size < 0 or not isinstance(part.digests, dict):
            raise ValueError(f"part {rank} has size {part.size!r}")
    for name in ("fingerprint", "versions", "about"):
        if not isinstance(getattr(manifest, name), dict):
            raise ValueError(f"{name} is not an object")
    if not isinstance(manifest.health.evaluation, dict):
        raise ValueError("health.evaluation is not an object")
    return manifest


def check_sizes(folder: Path, manifest: Manifest, storage: Storage | None = None) -> None:
    """Every part is a regular file of the right size. Raises CheckpointError naming the first that is not."""
    storage = storage or LocalStorage(folder.parent)
    for rank, part in zip(manifest.ranks, manifest.parts, strict=True):
        where = f"part of rank {rank} in {storage.name}/{folder.name}"
        try:
            size = storage.size(f"{folder.name}/{part.file}")
        except OSError as error:
            raise CheckpointError(f"{where} is missing: {redact(error.strerror or str(error))}") from error
        if size != part.size:
            raise CheckpointError(f"{where} has {size} bytes, expected {part.size}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and manifest. In a remote store the path is only the folder's name there."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Orphan:
    """A folder that looks like a checkpoint and is not one, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Listing:
    """complete: newest commit first. orphans: newest change first."""

    complete: tuple[Checkpoint, ...]
    orphans: tuple[Orphan, ...]


def list_checkpoints(place: Path | str | Storage) -> Listing:
    """What a place holds, judged by manifests and sizes alone; digests are checked when a part is loaded.

    Call on one rank: what the others see may be older (BR-28). Where each host has a place of its own, "complete" is said
    of this host's share."""
    storage = open_storage(place)
    complete, orphans = [], []
    for name in storage.folders():
        if step_of(name) is None:
            continue
        path = path_of(storage, name)
        try:
            manifest = read_manifest(path, storage)
            check_sizes(path, manifest, storage)
            complete.append(Checkpoint(path, manifest))
        except CheckpointError as error:
            orphans.append(Orphan(path, str(error)))
    complete.sort(key=lambda c: (c.manifest.serial, c.manifest.generation), reverse=True)
    orphans.sort(key=lambda o: storage.changed_at(o.path.name), reverse=True)
    return Listing(tuple(complete), tuple(orphans))


def path_of(storage: Storage, folder: str) -> Path:
    return storage.path(folder) if isinstance(storage, LocalStorage) else Path(folder)
