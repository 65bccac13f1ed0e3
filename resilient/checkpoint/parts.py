"""One rank's file of a checkpoint: written through a hash, read back only if every byte is the one that was written.

`torch.save` neither fsyncs nor cleans up on a full disk, and `torch.load` checks no CRC: both are done here. The hash is
xxh3-128: it finds accidents, at some twenty times the speed of blake2b, and asks so little of a processor that the
training step beside it does not notice. It proves nothing against somebody who can write the manifest too; what a
file could do when it is loaded does not depend on it (`weights_only`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import IO, Any, cast

import torch
import xxhash

from resilient.checkpoint.digest import walk
from resilient.checkpoint.files import as_json
from resilient.checkpoint.manifest import Part, part_name
from resilient.checkpoint.snapshot import PARTS, Snapshot
from resilient.checkpoint.storage import Storage, redact
from resilient.checkpoint.verify import verify_stream
from resilient.errors import CheckpointError

_CHUNK = 8 << 20
_FIELDS = tuple(f.name for f in fields(Snapshot))


class _HashedFile:
    """The write side of a file for `torch.save`: counts and hashes what passes, and may be told to stop.

    An error is kept for later and the rest of the data dropped: raised inside torch's C++ writer it would lose its
    errno, and raised again in that writer's destructor it would abort the process."""

    def __init__(self, file: IO[bytes], check: Callable[[], None]) -> None:
        self._file, self._check = file, check
        self._hash = xxhash.xxh3_128()
        self.size = 0
        self.error: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):  # a tensor may take minutes
            if self.error is not None:
                break
            chunk = view[start : start + _CHUNK]
            try:
                self._check()
                self._file.write(chunk)
            except Exception as error:
                self.error = error
            self._hash.update(chunk)
            self.size += len(chunk)
        return len(view)

    def flush(self) -> None:
        """Nothing: the storage flushes and fsyncs the file itself."""

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def note_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def write_part(
    storage: Storage,
    folder: str,
    rank: int,
    snapshot: Snapshot,
    about: dict[str, Any] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Part:
    """Write this rank's part durably and, after it, a note of its size and digest (and `about`) for the committer.

    A state which `weights_only` refuses fails now and not at the resume: its skeleton is loaded once beforehand.
    check: raises when the save was given up. Raises OSError, or CheckpointError for such a state; leaves no partial file.
    """
    content = {name: getattr(snapshot, name) for name in _FIELDS}
    _prove_loadable(content)
    found: list[_HashedFile] = []

    def fill(file: IO[bytes]) -> None:
        hashed = _HashedFile(file, check)
        torch.save(content, cast(IO[bytes], hashed))
        if hashed.error is not None:
            raise hashed.error
        found.append(hashed)

    file = f"{folder}/{part_name(rank)}"
    storage.write(file, fill)
    part = Part(part_name(rank), found[0].size, found[0].hexdigest(), dict(snapshot.digests))
    note = {"step": snapshot.step, "attempt": snapshot.attempt, "size": part.size, "digest": part.digest}
    check()
    storage.put(f"{folder}/{note_name(rank)}", as_json({**note, "digests": part.digests, **(about or {})}))
    return part


def is_finite(engine: Mapping[str, Any]) -> bool:
    """Whether every weight and every number of the optimizer in an engine's state is finite. Buffers are not asked: a mask
    may be full of -inf."""
    tensors = (leaf for name, part in engine.items() if name != "buffers" for _, leaf in walk(part))
    floating = (t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point())
    return all(bool(torch.isfinite(t).all()) for t in floating)


def _prove_loadable(content: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    try:
        torch.save(_skeleton(content), buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"the state holds something that cannot be loaded again: {_brief(error)}") from error


def _skeleton(state: Any) -> Any:
    """The same structure with empty tensors. What is no plain container goes whole: it is what may not load."""
    if type(state) in (torch.Tensor, torch.nn.Parameter):
        return torch.empty(0, dtype=state.dtype)
    if type(state) is dict:
        return {key: _skeleton(item) for key, item in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_skeleton(item) for item in state)
    return state


def _brief(error: Exception) -> str:
    """The line that matters of torch's page of advice on `weights_only`."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "Unsupported" in line), lines[0])


def read_part(storage: Storage, folder: str, part: Part, check: Callable[[], None] = lambda: None) -> Snapshot:
    """The snapshot in one part, after its size and digest were verified. Tensors are on the CPU.

    Raises CheckpointError naming the file and what is wrong with it."""
    file = f"{folder}/{part.file}"
    try:
        with storage.open(file) as stream:
            verify_stream(stream, part, lambda count: check())
            stream.seek(0)  # the same open file that was hashed
            content = torch.load(stream, map_location="cpu", weights_only=True)
        return _as_snapshot(content, part)
    except CheckpointError as error:
        raise CheckpointError(f"{storage.name}/{file}: {error}") from error
    except Exception as error:  # torch.load raises many kinds
        raise CheckpointError(f"{storage.name}/{file} cannot be read: {redact(_brief(error))}") from error


def _as_snapshot(content: Any, part: Part) -> Snapshot:
    if not isinstance(content, dict) or set(content) != set(_FIELDS) or not isinstance(content["parts"], dict):
        raise CheckpointError("it does not hold a snapshot")
    missing = [name for name in PARTS if name not in content["parts"]]
    if missing:
        raise CheckpointError(f"required part missing: {', '.join(missing)}")
    if content["digests"] != part.digests:
        raise CheckpointError("the snapshot's digests are not those of the manifest")
    return Snapshot(**content)
