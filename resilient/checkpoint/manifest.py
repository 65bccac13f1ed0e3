"""The manifest: the one file that makes a folder of parts a checkpoint, and the discovery that trusts nothing else.

    <run>/checkpoints/step-00000050-a00000057/   one folder per committed snapshot (step, attempt)
        rank-00000.pt    the part of rank 0      rank-00000.json   its size and digest, for the committer
        manifest.json    written last; no manifest, no checkpoint

No torch in here: the supervisor and `resilient checkpoint` read manifests too.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from resilient.checkpoint.files import read_json, write_json
from resilient.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 16 << 20  # bytes; about 400 per rank are needed

_FOLDER = re.compile(r"step-(\d{8,})-a(\d{8,})")


def folder_name(step: int, attempt: int) -> str:
    """A step may be reached twice (after a rollback), an attempt may not: both name the folder."""
    return f"step-{step:08d}-a{attempt:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint folder's name, None for any other name."""
    match = _FOLDER.match(name)
    return int(match.group(1)) if match else None


def part_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


@dataclass(frozen=True)
class Part:
    """One rank's file: its name inside the checkpoint folder, size in bytes, blake2b-256 of its bytes, and the
    snapshot's digest of each state part in it."""

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
    may both come again, after a rollback or a new `resilient launch` of the same run."""

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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit `folder`. Call on the committer only, after all parts are durable. Raises OSError or ValueError."""
    content = asdict(manifest)
    write_json(folder / MANIFEST, {**content, "digest": _content_digest(content)}, limit=MANIFEST_LIMIT)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one checkpoint folder, validated. Raises CheckpointError naming what is wrong with it."""
    path = folder / MANIFEST
    try:
        content = read_json(path, limit=MANIFEST_LIMIT)
        digest = content.pop("digest", None)
        if content.get("format") != FORMAT:
            raise ValueError(f"format {content.get('format')!r}, this version reads {FORMAT}")
        if digest != _content_digest(content):
            raise ValueError("its content does not match its digest")
        parts = tuple(Part(**part) for part in content.pop("parts"))
        health = Health(**content.pop("health", {}))
        manifest = Manifest(parts=parts, health=health, **content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"unusable manifest {path}: {error}") from error
    if len(parts) != manifest.world:
        raise CheckpointError(f"unusable manifest {path}: {len(parts)} parts for a world of {manifest.world}")
    for rank, part in enumerate(parts):
        if part.file != part_name(rank):  # nothing else is ever opened: a manifest cannot point out of its folder
            raise CheckpointError(f"unusable manifest {path}: part {rank} is named {part.file!r}")
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Every part is a regular file of the right size. Raises CheckpointError naming the first that is not."""
    for rank, part in enumerate(manifest.parts):
        try:
            found = (folder / part.file).lstat()
        except OSError as error:
            raise CheckpointError(f"part of rank {rank} in {folder} is missing: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode) or found.st_size != part.size:
            raise CheckpointError(f"part of rank {rank} in {folder} has {found.st_size} bytes, expected {part.size}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and manifest."""

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


def list_checkpoints(folder: Path) -> Listing:
    """What `folder` holds, judged by manifests and sizes alone; digests are checked when a part is loaded.

    Call on one rank: what the others see may be older (BR-28)."""
    complete, orphans = [], []
    for path in _subfolders(folder):
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
            complete.append(Checkpoint(path, manifest))
        except CheckpointError as error:
            orphans.append(Orphan(path, str(error)))
    complete.sort(key=lambda c: c.manifest.serial, reverse=True)
    orphans.sort(key=lambda o: _changed_at(o.path), reverse=True)
    return Listing(tuple(complete), tuple(orphans))


def _subfolders(folder: Path) -> Sequence[Path]:
    try:
        return sorted(p for p in folder.iterdir() if step_of(p.name) is not None and p.is_dir() and not p.is_symlink())
    except FileNotFoundError:
        return []


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
