"""Whether the files of a checkpoint are the bytes that were written. Streamed, so memory is bounded; nothing is unpickled.

No torch in here: whoever looks after the storage can run it without a device and without the training code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from resilient.checkpoint.manifest import MANIFEST, Manifest, Part, read_manifest
from resilient.checkpoint.storage import Storage, redact
from resilient.errors import CheckpointError

CHUNK = 8 << 20


@dataclass(frozen=True)
class Damage:
    """file: in the checkpoint folder. rank: whose part it is, None: the manifest itself."""

    file: str
    rank: int | None
    problem: str


def verify_checkpoint(
    storage: Storage, folder: str, tick: Callable[[int], None] = lambda count: None
) -> tuple[Manifest | None, list[Damage]]:
    """The manifest, if it can be read, and everything that is wrong with the folder. tick: told of every chunk's bytes.

    Parts that lie on other hosts (`manifest.ranks`) are not looked for."""
    try:
        manifest = read_manifest(Path(folder), storage)
    except CheckpointError as error:
        return None, [Damage(MANIFEST, None, str(error))]
    damage = []
    for rank, part in zip(manifest.ranks, manifest.parts, strict=True):
        try:
            verify_part(storage, folder, part, tick)
        except (CheckpointError, OSError, ValueError) as error:
            damage.append(Damage(part.file, rank, redact(str(error))))
    return manifest, damage


def verify_part(storage: Storage, folder: str, part: Part, tick: Callable[[int], None] = lambda count: None) -> None:
    """Size and digest of one rank's file. Raises CheckpointError saying what differs, OSError if it cannot be read."""
    size = storage.size(f"{folder}/{part.file}")  # first: a remote file is fetched whole
    if size != part.size:
        raise CheckpointError(f"it has {size} bytes, {part.size} were written")
    with storage.open(f"{folder}/{part.file}") as stream:
        verify_stream(stream, part, tick)


def verify_stream(stream: IO[bytes], part: Part, tick: Callable[[int], None] = lambda count: None) -> None:
    """Reads an open part to its end. Raises CheckpointError."""
    hashed, size = xxhash.xxh3_128(), 0
    while chunk := stream.read(CHUNK):
        hashed.update(chunk)
        size += len(chunk)
        if size > part.size:
            break
        tick(len(chunk))
    if size != part.size:
        raise CheckpointError(f"it has not the {part.size} bytes that were written")
    if hashed.hexdigest() != part.digest:
        raise CheckpointError("its content is not what was written (digest differs)")
