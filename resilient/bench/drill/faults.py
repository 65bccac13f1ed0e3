"""Where a rank of the drill is ended or stopped: a storage that counts what is done to it, by phase.

A point is one call that changes the disk (mkdir, open to write, half of a block of data, rename, unlink, rmdir), heard
through Python's audit events just before it happens, or one finished read, just after. Points are counted per phase of the
store's work, so that every phase is hit however many calls another one takes:

    write   the folder, the parts and their notes        delete  old checkpoints, and saves that failed
    commit  the manifest, and every look at it            load    everything that is read until a state is there
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import IO, Any, Literal

from resilient.checkpoint.commit import OPENED
from resilient.checkpoint.manifest import MANIFEST
from resilient.checkpoint.storage import LocalStorage

Phase = Literal["write", "commit", "delete", "load"]
PHASES: tuple[Phase, ...] = ("write", "commit", "delete", "load")

Action = Literal["kill one", "kill all", "power cut", "pause"]

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


@dataclass(frozen=True)
class Fault:
    """What happens to rank `victim` at the `nth` point (1-based) of a phase.

    kill one, kill all: SIGKILL of the victim, of all ranks. power cut: of all, and what the victim has written and not yet
    fsynced is cut off at a random length. pause: SIGSTOP, as a machine that is away for a while."""

    action: Action
    phase: Phase
    nth: int
    victim: int
    seed: int = 0


class Journal:
    """What a rank says, one JSON line each, outside the checkpoints. A line is there, whole, whatever happens next."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def tell(self, what: str, **facts: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **facts}).encode() + b"\n")

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Points:
    """Counts the points of one process and carries out its fault. One per process: an audit hook cannot be taken back.

    pids: of all ranks, once they are known; before that nothing is done."""

    def __init__(self, rank: int, fault: Fault | None, journal: Journal) -> None:
        self.counts: Counter[str] = Counter()
        self.pids: Sequence[int] = ()
        self._rank, self._journal = rank, journal
        self._fault = fault if fault is not None and fault.victim == rank else None
        self._here = threading.local()
        self._unsynced: set[str] = set()
        sys.addaudithook(self._hear)
        if self._fault is not None and self._fault.action == "power cut":
            self._watch_fsync()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Changes to the disk by this thread count for `phase`."""
        before = getattr(self._here, "phase", "")
        self._here.phase = phase
        try:
            yield
        finally:
            self._here.phase = before

    def point(self, phase: str, what: str) -> None:
        self.counts[phase] += 1
        fault = self._fault
        if fault is not None and self.pids and phase == fault.phase and self.counts[phase] == fault.nth:
            self._strike(fault, what)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _CHANGES and event != "open":
            return
        phase = getattr(self._here, "phase", "")
        if not phase:
            return
        path = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else ""
        if event == "open":
            if not args[2] & (os.O_WRONLY | os.O_RDWR):
                return
            self._unsynced.add(path)
        elif event == "os.rename" and path in self._unsynced:
            self._unsynced.discard(path)
            self._unsynced.add(os.fsdecode(args[1]))
        self.point(phase, f"{event.removeprefix('os.')} {_kind(path)}")

    def _watch_fsync(self) -> None:
        fsync = os.fsync

        def watched(file: Any) -> None:
            fsync(file)
            number = file if isinstance(file, int) else file.fileno()
            self._unsynced.discard(os.readlink(f"/proc/self/fd/{number}"))

        os.fsync = watched  # type: ignore[assignment]

    def _strike(self, fault: Fault, what: str) -> None:
        self._journal.tell("struck", phase=fault.phase, point=what, rank=self._rank)
        if fault.action == "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if fault.action in ("kill all", "power cut"):
            for rank, pid in enumerate(self.pids):
                if rank != self._rank:
                    os.kill(pid, signal.SIGKILL)
        if fault.action == "power cut":
            random = Random(fault.seed)
            for path in sorted(self._unsynced):
                if os.path.exists(path):
                    os.truncate(path, random.randint(0, os.path.getsize(path)))
        os.kill(os.getpid(), signal.SIGKILL)


def _kind(path: str) -> str:
    """Of which file, without step and rank."""
    name = os.path.basename(path)
    if name.startswith("rank-"):
        name = f"part{name[10:]}" if ".pt" in name else "note" + (".partial" if name.endswith(".partial") else "")
    elif name.startswith("step-"):
        name = "folder"
    elif name.startswith((MANIFEST, OPENED)):
        name = name.split(".")[0] + (".partial" if name.endswith(".partial") else "")
    return name


class DrillStorage(LocalStorage):
    """A folder whose points are counted. `loading` is set by the rank while it loads."""

    def __init__(self, root: Path, points: Points) -> None:
        super().__init__(root)
        self.points = points
        self.loading = False
        self._stage: Phase = "write"  # of the save in hand: for reads, which do not say whose they are

    def _read(self, what: str) -> None:
        self.points.point("load" if self.loading else self._stage, f"read {what}")

    def folders(self) -> list[str]:
        found = super().folders()
        if not self.loading:  # listed once to number the commit, and once to see what is old
            self._stage = "commit" if self._stage == "write" else "delete"
        self._read("list")
        return found

    def get(self, file: str, limit: int) -> bytes:
        data = super().get(file, limit)
        if not self.loading and self._stage == "write" and file.endswith(MANIFEST):
            self._stage = "commit"
        self._read(_kind(file))
        return data

    def open(self, file: str) -> IO[bytes]:
        stream = super().open(file)
        return _Reading(stream, lambda: self._read(f"block of {_kind(file)}")) if self.loading else stream  # type: ignore[return-value]

    def make_folder(self, folder: str) -> None:
        self._stage = "write"
        with self.points.within("write"):
            super().make_folder(folder)

    def move_folder(self, folder: str, to: str, last: str) -> None:
        with self.points.within("write"):
            super().move_folder(folder, to, last)

    def write(self, file: str, fill: Callable[[IO[bytes]], None]) -> None:
        self._stage = "write"
        with self.points.within("write"):
            tick = lambda: self.points.point("write", f"half a block of {_kind(file)}")  # noqa: E731
            super().write(file, lambda stream: fill(Halves(stream, tick)))  # type: ignore[arg-type]

    def put(self, file: str, data: bytes) -> None:
        name = file.rsplit("/", 1)[-1]
        if name == MANIFEST:
            self._stage = "commit"
        elif name == OPENED:
            self._stage = "write"
        with self.points.within("commit" if name == MANIFEST else "write" if file.startswith("step-") else "start"):
            super().put(file, data)

    def delete_folder(self, folder: str, first: str) -> None:
        with self.points.within("delete" if folder.startswith("step-") else "start"):
            super().delete_folder(folder, first)


class Halves:
    """Writes data in two halves with a point between them, headers and padding aside."""

    def __init__(self, file: IO[bytes], tick: Callable[[], None]) -> None:
        self._file, self._tick = file, tick

    def write(self, data: bytes | memoryview) -> int:
        if len(data) < 150:
            return self._file.write(data)
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._tick()
        self._file.write(data[half:])
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Reading:
    """A point after every block that is read."""

    def __init__(self, file: IO[bytes], tick: Callable[[], None]) -> None:
        self._file, self._tick = file, tick

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._tick()
        return data

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
