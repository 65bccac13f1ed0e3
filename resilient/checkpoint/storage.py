"""Where checkpoints lie: a folder of a file system, or a prefix of an object store (any fsspec URL).

Names are relative to the place: `folder` is one checkpoint's, `file` is "folder/name" or a name directly in the place.
A file is there whole or not at all, and durable when `write` or `put` has returned. Nothing here decides anything: a
listing may be stale and a name may show up late (BR-28), so what steers the ranks is agreed elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Protocol

from resilient.checkpoint.files import fsync_folder, write_whole
from resilient.errors import ConfigError

_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)(?:::|://)")
_LOGIN = re.compile(r"(\w[\w+.-]*://)[^/@\s]+@")
_QUERY = re.compile(r"(\w[\w+.-]*://[^\s?#'\"]*)[?#][^\s'\"]*")


class Storage(Protocol):
    """One place. All methods raise OSError (FileNotFoundError where something is not there)."""

    name: str
    """For messages. Never holds a credential."""

    def folders(self) -> list[str]:
        """Names directly under the place that hold files, sorted; no links. [] where the place does not exist yet."""

    def files(self, folder: str) -> list[str]:
        """Names of the files in it, sorted; [] if it is not there."""

    def make_folder(self, folder: str) -> None:
        """Durable. FileExistsError if anything is there under this name."""

    def has_files(self, folder: str) -> bool:
        """True if there is anything under this name."""

    def changed_at(self, folder: str) -> float:
        """Seconds since the epoch; 0 where it is not known."""

    def move_folder(self, folder: str, to: str, last: str) -> None:
        """last: the file that makes the folder what it is; it leaves first and arrives last where a move is many steps."""

    def delete_folder(self, folder: str, first: str) -> None:
        """first: the file that goes before all others, so that half a folder is never taken for a whole one; "": none."""

    def size(self, file: str) -> int:
        """Bytes of a regular file. OSError for anything else, a link too."""

    def write(self, file: str, fill: Callable[[IO[bytes]], None]) -> None:
        """A new file with what `fill` writes. Nothing is left under its name, nor a part beside it, when `fill` raises."""

    def put(self, file: str, data: bytes) -> None:
        """Replace a file: a reader sees the old content or the new."""

    def get(self, file: str, limit: int) -> bytes:
        """The content of a regular file. ValueError if it has more than `limit` bytes."""

    def open(self, file: str) -> AbstractContextManager[IO[bytes]]:
        """A regular file to read and seek in, which stays the same bytes whatever happens to its name."""

    def delete(self, file: str) -> None:
        """Nothing if it is not there."""


def open_storage(place: Path | str | Storage) -> Storage:
    """Raises ConfigError for a URL that fsspec cannot open or that holds a credential."""
    if not isinstance(place, Path | str):
        return place
    if not is_url(place):
        return LocalStorage(Path(place))
    problem = location_problem(str(place))
    if problem:
        raise ConfigError(problem)
    if str(place).startswith("file://"):
        return LocalStorage(Path(str(place).removeprefix("file://")))
    from resilient.checkpoint.storage_remote import RemoteStorage  # imports fsspec

    return RemoteStorage(str(place))


def place_of(location: str | None, run_dir: Path) -> Path | str:
    """Where the checkpoints of a run lie, by run.checkpoint.location."""
    if not location:
        return run_dir / "checkpoints"
    return f"{location.rstrip('/')}/{run_dir.name}"


def is_url(place: Path | str) -> bool:
    return isinstance(place, str) and _URL.match(place) is not None


def redact(text: str) -> str:
    """URLs without login and query, which may be a signature or a token. For whatever is logged or written down."""
    return _LOGIN.sub(r"\1***@", _QUERY.sub(r"\1?***", text))


def location_problem(location: str) -> str:
    """What is wrong with run.checkpoint.location; "" for nothing. A URL must not hold a credential: it would be copied into
    configuration dumps, journals and process lists."""
    if is_url(location) and redact(location) != location:
        return (
            f"run.checkpoint.location: {redact(location)} holds a login or a query: give credentials to fsspec by its own "
            "variables (FSSPEC_S3_KEY, ...), its configuration files, or the cloud's own profile"
        )
    return ""


class LocalStorage:
    """A folder. It need not exist before the first write. File modes are what the umask leaves of rw-rw-rw-."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.name = str(self.root)

    def folders(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> list[str]:
        try:
            with os.scandir(self.path(folder)) as entries:
                return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def make_folder(self, folder: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.path(folder).mkdir()
        fsync_folder(self.root)

    def has_files(self, folder: str) -> bool:
        return os.path.lexists(self.path(folder))

    def changed_at(self, folder: str) -> float:
        try:
            return self.path(folder).stat().st_mtime
        except OSError:
            return 0.0

    def move_folder(self, folder: str, to: str, last: str) -> None:
        self.path(folder).rename(self.path(to))
        fsync_folder(self.root)

    def delete_folder(self, folder: str, first: str) -> None:
        path = self.path(folder)
        if path.is_symlink():
            raise OSError(f"{path} is a link")
        if first:
            (path / first).unlink(missing_ok=True)
            fsync_folder(path)
        shutil.rmtree(path)

    def size(self, file: str) -> int:
        found = self.path(file).lstat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{file} is not a regular file")
        return found.st_size

    def write(self, file: str, fill: Callable[[IO[bytes]], None]) -> None:
        path = self.path(file)
        partial = path.with_name(f"{path.name}.partial")
        try:
            with open(partial, "wb", opener=_unlinked) as stream:
                fill(stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):  # what went wrong first is what counts
                partial.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)

    def put(self, file: str, data: bytes) -> None:
        path = self.path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)

    def get(self, file: str, limit: int) -> bytes:
        with self.open(file) as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"{file} is longer than {limit} bytes")
        return data

    def open(self, file: str) -> IO[bytes]:
        """No link is followed, neither of the file nor of its folder, and no device or pipe is waited for."""
        path = self.path(file)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if "/" in file else 0))
        try:
            descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{file} is not a regular file")
        return open(descriptor, "rb")

    def delete(self, file: str) -> None:
        self.path(file).unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        return self.root / safe_name(name)


def safe_name(name: str) -> str:
    """The name itself. ValueError if it could lead out of the place."""
    pieces = name.split("/")
    if not 1 <= len(pieces) <= 2 or any(p in ("", ".", "..") or "\\" in p or "\0" in p for p in pieces):
        raise ValueError(f"{name!r} is no name of a file in a checkpoint folder")
    return name


def _unlinked(path: str, flags: int) -> int:
    """Open to write, but never through a link that somebody has put there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
