"""A prefix of an object store, or of any other file system that fsspec knows, as a `Storage`.

An object is there whole when its upload is closed, so nothing needs a rename; listings are read anew each time. Import
it lazily: it imports fsspec.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import IO, Any, cast

import fsspec

from resilient.checkpoint.storage import redact, safe_name
from resilient.errors import ConfigError

_CHUNK = 16 << 20


class RemoteStorage:
    """url: without credentials; fsspec finds them in its own configuration. fs: to use instead of the one that fsspec
    makes of it."""

    def __init__(self, url: str, fs: Any = None) -> None:
        self.name = redact(url)
        try:
            found, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"run.checkpoint.location: {self.name} cannot be opened: {redact(str(error))}") from error
        self._fs = fs if fs is not None else found
        self._root = root.rstrip("/")

    def folders(self) -> list[str]:
        try:
            found = self._entries("")
        except FileNotFoundError:
            return []
        return sorted(_last(entry["name"]) for entry in found if entry["type"] == "directory")

    def files(self, folder: str) -> list[str]:
        try:
            return sorted(_last(entry["name"]) for entry in self._entries(folder) if entry["type"] == "file")
        except FileNotFoundError:
            return []

    def make_folder(self, folder: str) -> None:
        if self.has_files(folder):
            raise FileExistsError(f"{self.name}/{folder} exists")
        self._fs.makedirs(self._path(folder), exist_ok=True)  # nothing, in an object store

    def has_files(self, folder: str) -> bool:
        try:
            return bool(self._entries(folder))
        except FileNotFoundError:
            return False

    def changed_at(self, folder: str) -> float:
        try:
            times = [entry.get("LastModified") or entry.get("created") for entry in self._entries(folder)]
        except OSError:
            return 0.0
        return max((t.timestamp() if isinstance(t, datetime) else float(t) for t in times if t), default=0.0)

    def move_folder(self, folder: str, to: str, last: str) -> None:
        names = self.files(folder)
        for name in [n for n in names if n != last] + [n for n in names if n == last]:
            self._fs.cp_file(self._path(f"{folder}/{name}"), self._path(f"{to}/{name}"))
        self.delete_folder(folder, last)

    def delete_folder(self, folder: str, first: str) -> None:
        names = self.files(folder)
        for name in [n for n in names if n == first] + [n for n in names if n != first]:
            self._fs.rm_file(self._path(f"{folder}/{name}"))
        with suppress(
            OSError, NotImplementedError
        ):  # an object store has none; where there are, an empty one is nothing
            self._fs.rmdir(self._path(folder))

    def size(self, file: str) -> int:
        self._fs.invalidate_cache(self._parent(file))
        found = self._fs.info(self._path(file))
        if found["type"] != "file":
            raise OSError(f"{file} is not a regular file")
        return int(found["size"])

    def write(self, file: str, fill: Callable[[IO[bytes]], None]) -> None:
        stream = self._fs.open(self._path(file), "wb")
        try:
            fill(stream)
        except BaseException:
            with suppress(OSError, NotImplementedError):  # what went wrong first is what counts
                stream.discard() if hasattr(stream, "discard") else stream.close()
                self.delete(file)
            raise
        stream.close()

    def put(self, file: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(file), data)

    def get(self, file: str, limit: int) -> bytes:
        data = self._fs.cat_file(self._path(file), start=0, end=limit + 1)
        if len(data) > limit:
            raise ValueError(f"{file} is longer than {limit} bytes")
        return bytes(data)

    @contextmanager
    def open(self, file: str) -> Iterator[IO[bytes]]:
        """The object is copied to a nameless local file once: what is verified there is what is loaded."""
        with tempfile.TemporaryFile() as local:
            with self._fs.open(self._path(file), "rb") as stream:
                while chunk := stream.read(_CHUNK):
                    local.write(chunk)
            local.seek(0)
            yield cast(IO[bytes], local)

    def delete(self, file: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(file))

    def _entries(self, folder: str) -> list[dict[str, Any]]:
        path = self._path(folder) if folder else self._root
        self._fs.invalidate_cache(path)
        own = path.rstrip("/")
        return [entry for entry in self._fs.ls(path, detail=True) if entry["name"].rstrip("/") != own]

    def _path(self, name: str) -> str:
        return f"{self._root}/{safe_name(name)}"

    def _parent(self, file: str) -> str:
        return os.path.dirname(self._path(file))


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
