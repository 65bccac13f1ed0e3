"""What the recovery tests share: finding processes by a mark in their environment, and waiting with a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "RESILIENT_TEST_MARK"


def marked(mark: str) -> list[int]:
    """Living processes that carry `mark` in their environment, wherever they hang in the process tree."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if needle in (entry / "environ").read_bytes().split(b"\0") and state(int(entry.name)) not in "ZX":
                found.append(int(entry.name))
    return found


def state(pid: int) -> str:
    """R, S, D, Z ... of a process; X when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def children(pid: int) -> list[int]:
    """Direct children of `pid`, zombies included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
    return found


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Running:
    """A Python program in a process of its own, marked, with its stderr collected."""

    def __init__(self, tmp_path: Path, mark: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.log = tmp_path / f"{mark}.log"
        self._file = open(self.log, "wb")  # noqa: SIM115 - lives as long as the process
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RESILIENT_")}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env=clean | {MARK: mark, "PYTHONPATH": str(Path(__file__).parents[2])} | (env or {}),
            stdout=self._file,
            stderr=self._file,
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
        )

    def wait(self, timeout_s: float = 40.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not end in {timeout_s} s; it said:\n{self.text}") from None
        finally:
            self._file.close()

    @property
    def text(self) -> str:
        return self.log.read_text()
