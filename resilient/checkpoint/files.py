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
    write_whole(path, as_json(value, limit=limit, name=path.name))


def read_json(path: Path, *, limit: int) -> dict[str, Any]:
    """The object in `path`. Raises OSError when it cannot be read, ValueError when it is not an object or too long."""
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path.name} is longer than {limit} bytes")
    return parse_json(data, path.name)


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """The object in `data`. Raises ValueError when it is none, or nested so deep that it cannot be an honest one."""
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} does not hold an object")
    return value


def as_json(value: Any, *, limit: int | None = None, name: str = "") -> bytes:
    """ValueError when it would be longer than `limit` bytes."""
    data = json.dumps(value, indent=1, sort_keys=True).encode()
    if limit is not None and len(data) > limit:
        raise ValueError(f"{name} would take {len(data)} bytes; the limit is {limit}")
    return data


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll `condition`: another host may see a new file late (NFS and Lustre cache names and attributes, BR-28)."""
    deadline, pause = time.monotonic() + timeout_s, 0.02
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.2, 0.25)  # in an object store each look is a request
    return True
