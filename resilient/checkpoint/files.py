"""Small files that survive a crash: written whole or not at all, and waited for where a shared file system is slow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fsync_folder(folder: Path) -> None:
    """Make renames and new names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write, fsync, rename, fsync: a reader or a crash sees the old content or the new. Raises OSError; the old file is
    then untouched."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any, *, limit: int | None = None) -> None:
    """`write_whole` of one JSON value. ValueError when it would be longer than `limit` bytes."""
    data = json.dumps(value, indent=1, sort_keys=True).encode()
    if limit is not None and len(data) > limit:
        raise ValueError(f"{path.name} would take {len(data)} bytes; the limit is {limit}")
    write_whole(path, data)


def read_json(path: Path, *, limit: int) -> dict[str, Any]:
    """The object in `path`. Raises OSError when it cannot be read, ValueError when it is not an object or too long."""
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path.name} is longer than {limit} bytes")
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} does not hold an object")
    return value


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll `condition`: another host may see a new file late (NFS and Lustre cache names and attributes, BR-28)."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True
