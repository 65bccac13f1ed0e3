"""A checkpoint place as people look at it: what lies there, how far it may be trusted, and what it lacks.

Everything read here was written by somebody else, perhaps damaged or malicious: manifests are parsed as data with size limits
by the checkpoint room, values of any type may be in them, and text goes to a terminal only after `printable`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from resilient.checkpoint.files import parse_json
from resilient.checkpoint.manifest import MANIFEST, Checkpoint, Manifest, Orphan, list_checkpoints, path_of
from resilient.checkpoint.storage import LocalStorage, Storage, is_url, open_storage, redact, safe_name
from resilient.checkpoint.trust import TRUST, TRUST_LIMIT, Key, Trust, TrustBook
from resilient.errors import ConfigError
from resilient.telemetry.checkpoints_view import ranks_text
from resilient.telemetry.files import finite, plain
from resilient.telemetry.run_data import MARKS
from resilient.telemetry.run_directory import is_live, read_config

STATE_PARTS = ("engine", "rng", "data", "judge")
"""`checkpoint.snapshot.PARTS`, said again: importing it would load torch, and a test holds the two together."""

_INSIDE = "checkpoints"  # of a run directory
_NAME = re.compile(r"step-\d{8,}-a\d{8,}(-g\d{5,})?(\.old\d+)?")


@dataclass(frozen=True)
class Place:
    """only: the one folder that was asked for, None: all of them. run: the run directory it belongs to, if it is known. book:
    None where there is none, or it cannot be read. remarks: what a person should know about the place."""

    storage: Storage
    only: str | None = None
    run: Path | None = None
    book: TrustBook | None = None
    remarks: tuple[str, ...] = ()

    def trust(self, manifest: Manifest) -> Trust | None:
        return self.book.level(key_of(manifest)) if self.book is not None else None


def open_place(path: str) -> Place:
    """A run directory, its checkpoint folder, one checkpoint in it, or an fsspec URL of either. Raises ConfigError.

    A run that keeps its checkpoints elsewhere (run.checkpoint.location) is followed there."""
    only: str | None = None
    run: Path | None = None
    if is_url(path):
        parent, _, last = path.rstrip("/").rpartition("/")
        only = last if is_checkpoint_name(last) else None
        storage = open_storage(parent if only else path)
    else:
        folder = Path(path).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(f"{path} is not a folder")
        if is_checkpoint_name(folder.name):
            only, folder = folder.name, folder.parent
        elif any((folder / name).exists() for name in (*MARKS, _INSIDE)):
            run = folder
        if folder.name == _INSIDE:
            run = folder.parent
        storage = open_storage(_location(run) or run / _INSIDE if run == folder else folder)
    if only is not None and not storage.has_files(only):
        raise ConfigError(f"{redact(path)} holds nothing")
    book, remarks = _book(LocalStorage(run / _INSIDE) if run is not None else storage)
    return Place(storage, only, run, book, remarks)


def _location(run: Path) -> str | None:
    """Where the configuration of a run sends its checkpoints; None: into its own folder."""
    try:
        found = read_config(run)["run"]["checkpoint"]["location"]
    except (ConfigError, KeyError, TypeError):
        return None
    return f"{found.rstrip('/')}/{run.name}" if isinstance(found, str) and found else None


def is_checkpoint_name(name: str) -> bool:
    """What a store names its folders, also those it has put aside."""
    return _NAME.fullmatch(name) is not None


def key_of(manifest: Manifest) -> Key:
    return Key(manifest.step, manifest.attempt)


def _book(storage: Storage) -> tuple[TrustBook | None, tuple[str, ...]]:
    try:
        data = storage.get(TRUST, TRUST_LIMIT)
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError) as error:
        return None, (f"{TRUST} cannot be read: {redact(str(error))}",)
    book = TrustBook()
    try:
        book.load_state_dict(parse_json(data, TRUST))
    except ValueError as error:
        return None, (f"{TRUST} cannot be used: {error}",)
    return book, ()


# -- what is there --------------------------------------------------------------------------------------------------------


def listing(place: Place, now: float | None = None) -> dict[str, Any]:
    """Plain JSON: `place`, `checkpoints` (newest commit first), `orphans`, `in_memory` (states a live run keeps in memory
    alone), `bytes`, `remarks`. Sizes are checked, digests are not."""
    now = time.time() if now is None else now
    found = list_checkpoints(place.storage)
    wanted = [c for c in found.complete if place.only in (None, c.path.name)]
    rows = [checkpoint_row(place, checkpoint, now) for checkpoint in wanted]
    orphans = [_orphan_row(place, o, now) for o in found.orphans if place.only in (None, o.path.name)]
    elsewhere: list[dict[str, Any]] = []
    if place.book is not None and place.only is None and place.run is not None and is_live(place.run):
        here = {key_of(c.manifest) for c in found.complete}
        elsewhere = [
            {"step": key.step, "attempt": key.attempt, "trust": place.book.level(key).word}
            for key in place.book.known()
            if key not in here
        ]
    total = sum(row["bytes"] for row in [*rows, *orphans])
    return _strict(
        {
            "place": place.storage.name,
            "checkpoints": rows,
            "orphans": orphans,
            "in_memory": elsewhere,
            "bytes": total,
            "remarks": list(place.remarks),
        }
    )


def checkpoint_row(place: Place, checkpoint: Checkpoint, now: float) -> dict[str, Any]:
    manifest, level = checkpoint.manifest, place.trust(checkpoint.manifest)
    key = key_of(manifest)
    return {
        "name": checkpoint.path.name,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "serial": manifest.serial,
        "trust": level.word if level is not None else None,
        "reasons": list(place.book.reasons(key)) if place.book is not None else [],
        "in_force": place.book.in_force(key) if place.book is not None else None,
        "health": {**asdict(manifest.health), "sound": manifest.health.sound},
        "tiers": ["disk" if isinstance(place.storage, LocalStorage) else "remote"],
        "ranks_here": list(manifest.ranks),
        "world": manifest.world,
        "bytes": sum(part.size for part in manifest.parts),
        "written_at": manifest.written_at,
        "age_s": _age(manifest.written_at, now),
        "lacks": lacks(manifest),
    }


def lacks(manifest: Manifest) -> list[str]:
    """What a restart from these files alone would miss, in words."""
    found = []
    elsewhere = sorted(set(range(manifest.world)) - set(manifest.ranks))
    if elsewhere:
        found.append(f"parts of {ranks_text(elsewhere)} (on other hosts)")
    for name in STATE_PARTS:
        without = [r for r, part in zip(manifest.ranks, manifest.parts, strict=True) if name not in part.digests]
        if without:
            found.append(f"{name} of {ranks_text(without)}")
    if manifest.samples is None:
        found.append("position in samples")
    return found


def _orphan_row(place: Place, orphan: Orphan, now: float) -> dict[str, Any]:
    folder, storage = orphan.path.name, place.storage
    names = _files(storage, folder)
    size = 0
    for name in names:
        try:
            size += storage.size(f"{folder}/{safe_name(name)}")
        except (OSError, ValueError):
            continue
    changed = storage.changed_at(folder)
    reason = orphan.reason
    if MANIFEST not in names:
        reason = "no manifest: it is being written, or was left by a save that did not end"
    return {
        "name": folder,
        "reason": reason,
        "committed": MANIFEST in names,
        "bytes": size,
        "age_s": now - changed if changed > 0 else None,
    }


def _files(storage: Storage, folder: str) -> list[str]:
    try:
        return storage.files(folder)
    except OSError:
        return []


def details(place: Place, checkpoint: Checkpoint, now: float) -> dict[str, Any]:
    """Everything about one checkpoint as plain JSON: its row, its manifest, and why it is trusted or not."""
    manifest = checkpoint.manifest
    refused = place.book.refused(key_of(manifest)) if place.book is not None else {}
    row = checkpoint_row(place, checkpoint, now)
    return _strict({**row, "place": place.storage.name, "refused": refused, "manifest": plain(manifest)})


def choose(place: Place, step: int | None) -> Checkpoint:
    """The one that a place names, or its newest commit, or the newest of a step. Raises ConfigError."""
    found = list_checkpoints(place.storage)
    wanted = [c for c in found.complete if place.only in (None, c.path.name) and step in (None, c.manifest.step)]
    if wanted:
        return wanted[0]
    if place.only is not None:
        reason = next((o.reason for o in found.orphans if o.path.name == place.only), "it is no checkpoint")
        raise ConfigError(f"{place.storage.name}/{place.only}: {reason}")
    steps = sorted({c.manifest.step for c in found.complete})
    what = f"checkpoint of step {step}" if step is not None else "complete checkpoint"
    raise ConfigError(f"no {what} in {place.storage.name}; there is: {', '.join(map(str, steps)) or 'none'}")


def last_good(place: Place, going: Iterable[str]) -> list[str]:
    """Names among `going` whose deletion would leave no checkpoint to go back to: the last good ones, or where none is
    good (or nobody has judged) the last usable ones. Empty: something as good stays."""
    names = set(going)
    usable: dict[str, Trust] = {}
    for c in list_checkpoints(place.storage).complete:
        level = place.trust(c.manifest)
        level = Trust.PROVISIONAL if level is None else level
        if c.manifest.health.sound and level >= Trust.PROVISIONAL:
            usable[c.path.name] = level
    best = max(usable.values(), default=None)
    holding = [name for name, level in usable.items() if level is best]
    return [name for name in holding if name in names] if set(holding) <= names else []


def is_link(place: Place, folder: str) -> bool:
    """A link is never followed to delete what it points to."""
    return isinstance(place.storage, LocalStorage) and path_of(place.storage, folder).is_symlink()


def strange_files(place: Place, folder: str) -> list[str]:
    """Names in a folder that no store has written there."""
    return [name for name in _files(place.storage, folder) if not _ours(name)]


def _ours(name: str) -> bool:
    return re.fullmatch(r"(manifest|opened|rank-\d+)\.json(\.\d+\.partial)?|rank-\d+\.pt(\.partial)?", name) is not None


def _age(written_at: Any, now: float) -> float | None:
    try:
        return now - datetime.fromisoformat(str(written_at)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _strict(value: dict[str, Any]) -> dict[str, Any]:
    """JSON without NaN, whatever a manifest held."""
    return finite(plain(value), [])
