"""One rank's file of a checkpoint: written through a hash, read back only if every byte is the one that was written.

`torch.save` neither fsyncs nor cleans up on a full disk, and `torch.load` checks no CRC: both are done here.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, cast

import torch

from resilient.checkpoint.files import fsync_folder, write_json
from resilient.checkpoint.manifest import Part, part_name
from resilient.checkpoint.snapshot import PARTS, Snapshot
from resilient.errors import CheckpointError

_CHUNK = 1 << 20
_FIELDS = tuple(f.name for f in fields(Snapshot))


class _HashedFile:
    """The write side of a file for `torch.save`: counts and hashes what passes.

    An error is kept for later and the rest of the data dropped: raised inside torch's C++ writer it would lose its
    errno, and raised again in that writer's destructor it would abort the process."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=32)
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            self._hash.update(data)
            self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: the caller flushes and fsyncs the file itself."""

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def note_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def write_part(folder: Path, rank: int, snapshot: Snapshot) -> Part:
    """Write this rank's part durably and, beside it, a note of its size and digest for the committer.

    It is also unpickled once, so that a state which `weights_only` refuses fails now and not at the resume.
    Raises OSError, or CheckpointError for such a state; leaves no partial file.
    """
    path = folder / part_name(rank)
    partial = folder / f"{part_name(rank)}.partial"
    try:
        with open(partial, "wb") as file:
            hashed = _HashedFile(file)
            torch.save({name: getattr(snapshot, name) for name in _FIELDS}, cast(IO[bytes], hashed))
            if hashed.error is not None:
                raise hashed.error
            file.flush()
            os.fsync(file.fileno())
        _prove_loadable(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_folder(folder)
    part = Part(path.name, hashed.size, hashed.hexdigest(), dict(snapshot.digests))
    note = {"step": snapshot.step, "attempt": snapshot.attempt, "size": part.size, "digest": part.digest}
    write_json(folder / note_name(rank), {**note, "digests": part.digests})
    return part


def _prove_loadable(path: Path) -> None:
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # mmap: structure only, no second copy
    except Exception as error:
        raise CheckpointError(f"the state holds something that cannot be loaded again: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """The line that matters of torch's page of advice on `weights_only`."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "Unsupported" in line), lines[0])


def read_part(folder: Path, part: Part) -> Snapshot:
    """The snapshot in one part, after its size and digest were verified. Tensors are on the CPU.

    Raises CheckpointError naming the file and what is wrong with it."""
    path = folder / part.file
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            _verify(file, part)
            file.seek(0)  # the same open file that was hashed
            content = torch.load(file, map_location="cpu", weights_only=True)
        return _as_snapshot(content, part)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # torch.load raises many kinds
        raise CheckpointError(f"{path} cannot be read: {_brief(error)}") from error


def _verify(file: IO[bytes], part: Part) -> None:
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_size != part.size:
        raise CheckpointError(f"{found.st_size} bytes, the manifest says {part.size}")
    hashed = hashlib.blake2b(digest_size=32)
    while chunk := file.read(_CHUNK):
        hashed.update(chunk)
    if hashed.hexdigest() != part.digest:
        raise CheckpointError("its content is not what was written (digest differs)")


def _as_snapshot(content: Any, part: Part) -> Snapshot:
    if not isinstance(content, dict) or set(content) != set(_FIELDS):
        raise CheckpointError("it does not hold a snapshot")
    missing = [name for name in PARTS if name not in content["parts"]]
    if missing:
        raise CheckpointError(f"required part missing: {', '.join(missing)}")
    if content["digests"] != part.digests:
        raise CheckpointError("the snapshot's digests are not those of the manifest")
    return Snapshot(**content)
