"""Follow a text file that grows: complete lines as they come, whatever happens to the file meanwhile (S11).

Nothing about a file is believed but its bytes. Sizes and times lie on a network file system, so a poll opens the path
anew (which makes NFS look again), reads from where it stopped, and checks first that what it read last still stands
there. If it does not, the file was truncated, copied away and emptied, or written anew: reading starts over.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_CHUNK = 1 << 18  # bytes a read
_PER_POLL = 8 << 20  # bytes a poll: a long log does not have to fit into memory
_MARK = 128  # bytes remembered at the head and before the position, to know the file again
_LONGEST_LINE = 1 << 20  # bytes; what runs on without a newline is no line


class LineFollower:
    """The lines of one file, each once, in order. Never blocks, never sleeps, never raises for what a file may do.

    nul_patience: polls after which a stretch of NUL bytes that has text behind it is taken for a hole that nobody will
        fill (a log emptied by copytruncate under a writer that keeps its offset) and stepped over. NULs at the end of
        the file are data that is still on its way, for any time.

    exists: the path could be opened at the last poll. problem: why it could not be read, "" when it could or is absent.
    behind: more is there than one poll takes; poll again without waiting. starts: how often reading began at the top of
    a file. lost: torn lines that their file never completed."""

    def __init__(self, path: str | os.PathLike[str], *, nul_patience: int = 10) -> None:
        self.path = Path(path)
        self.exists = False
        self.problem = ""
        self.behind = False
        self.starts = 0
        self.lost = 0
        self._nul_patience = nul_patience
        self._file: int | None = None
        self._identity = (0, 0)  # device and inode of the open file
        self._offset = 0  # of the next byte to read
        self._head = b""  # the first bytes of the file
        self._tail = b""  # the bytes before the offset
        self._torn = b""  # the beginning of a line whose end is not there yet
        self._nul_polls = 0
        self._rotated = False  # another file has the name; this one was read once more since
        self._doubted = False  # the file was too short at the last poll

    def poll(self) -> list[str]:
        """Lines completed since the last poll, without their newlines; bytes that are no UTF-8 are replaced."""
        self.behind, self.problem = False, ""
        try:
            return self._poll()
        except OSError as error:  # ESTALE, EIO, a mount that is away: the next poll opens it again and goes on
            self.problem = f"{self.path} cannot be read now: {error.strerror or error}"
            self._close()
            return []

    def rest(self) -> list[str]:
        """The last line without its newline, if there is one: for when nobody writes any more."""
        torn, self._torn = self._torn, b""
        return [torn.decode("utf-8", "replace")] if torn else []

    def close(self) -> None:
        """Let go of the file. Polling again goes on where it stopped."""
        self._close()

    # -- which file -------------------------------------------------------------------------------------------------

    def _poll(self) -> list[str]:
        named = self._open()
        if named is None:
            return self._read() if self._file is not None else []  # unlinked: the writer may still hold it
        found = os.fstat(named)
        identity = (found.st_dev, found.st_ino)
        if self._file is None or identity == self._identity:
            self._take(named, identity)
            return self._read_if_it_stands()
        try:
            lines = self._read()  # what the writer put into the old file before it was moved away
        except OSError:
            lines = []
        if lines or self.behind or not self._rotated:  # and once more: the writer may be slow to let go of it
            self._rotated = True
            os.close(named)
            return lines
        self._take(named, identity)
        return self._read_if_it_stands()  # it does in a whole new copy of the same file (rsync, an editor)

    def _open(self) -> int | None:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            self.exists = False
            return None
        self.exists = True
        return descriptor

    def _take(self, descriptor: int, identity: tuple[int, int]) -> None:
        self._close()
        self._file, self._identity, self._rotated = descriptor, identity, False
        self.starts = self.starts or 1

    def _read_if_it_stands(self) -> list[str]:
        """Is what was read last still there? A file that merely looks too short may be an old view of it (another host
        wrote what we saw): that counts when it is seen twice."""
        assert self._file is not None
        tail = os.pread(self._file, len(self._tail), self._offset - len(self._tail))
        head = os.pread(self._file, len(self._head), 0)
        if tail == self._tail and head == self._head:
            self._doubted = False
            return self._read()
        if self._tail.startswith(tail) and self._head.startswith(head) and not self._doubted:
            self._doubted = True
            return []
        self._start_over()
        return self._read()

    def _start_over(self) -> None:
        self.lost += bool(self._torn)
        self._offset, self._head, self._tail, self._torn, self._nul_polls = 0, b"", b"", b"", 0
        self._doubted = False
        self.starts += 1

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # -- what is in it ----------------------------------------------------------------------------------------------

    def _read(self) -> list[str]:
        assert self._file is not None
        lines: list[str] = []
        for _ in range(_PER_POLL // _CHUNK):
            try:
                data = os.pread(self._file, _CHUNK, self._offset)
            except OSError:
                if not lines:
                    raise
                return lines  # the next poll meets it again
            if not data:
                return lines
            if data[0]:
                self._nul_polls = 0
                self._accept(data.partition(b"\0")[0], lines)
            elif not self._step_over_nul():
                return lines
        self.behind = True
        return lines

    def _step_over_nul(self) -> bool:
        """False while the NULs at the position may still become text."""
        assert self._file is not None
        at = self._offset
        while True:
            try:
                at = os.lseek(self._file, at, os.SEEK_DATA)  # holes cost nothing; not every file system knows them
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return False  # nothing but a hole from here to the end
            data = os.pread(self._file, _CHUNK, at)
            if not data:
                return False  # at the end of the file
            text = data.lstrip(b"\0")
            at += len(data) - len(text)
            if text:
                break
        self._nul_polls += 1
        if self._nul_polls <= self._nul_patience:
            return False
        self.lost += bool(self._torn)
        self._torn = b""
        self._tail = bytes(min(_MARK, at - self._offset))
        self._offset = at
        return True

    def _accept(self, data: bytes, lines: list[str]) -> None:
        self._offset += len(data)
        if len(self._head) < _MARK and self._offset - len(data) == len(self._head):
            self._head += data[: _MARK - len(self._head)]
        self._tail = (self._tail + data)[-_MARK:]
        *whole, self._torn = (self._torn + data).split(b"\n")
        if len(self._torn) > _LONGEST_LINE:
            self.lost += 1
            self._torn = b""
        lines += [line.removesuffix(b"\r").decode("utf-8", "replace") for line in whole]
