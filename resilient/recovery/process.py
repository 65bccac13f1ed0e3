"""Processes that end with their parent, and the sweep that leaves none behind. Linux: prctl and /proc.

Elsewhere the prctl calls do nothing and only process groups are ended."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded before any fork


def become_subreaper() -> bool:
    """Orphaned descendants become children of this process instead of init's, so that they can be found and ended."""
    return _LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def in_child(death_signal: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn`: own process group, and `death_signal` when the parent dies, even by SIGKILL.

    It runs between fork and exec, so it allocates little and imports nothing. The parent must stay in the thread that
    forked (the kernel's parent-death signal watches that thread)."""
    parent = os.getpid()
    death = int(death_signal)

    def prepare() -> None:
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, death, 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl was called
            os._exit(128 + death)

    return prepare


def free_port() -> int:
    """A TCP port that nobody used a moment ago. Another process may still take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def exit_status(returncode: int) -> int:
    """A Popen return code as a shell would report it: a death by signal becomes 128 + signal."""
    return 128 - returncode if returncode < 0 else returncode


def describe(status: int) -> str:
    """`exit 1`, or `exit 137 (SIGKILL)`; 247 is the same signal as sys.exit(-9) reports it (the deepspeed launcher)."""
    for number in (status - 128, 256 - status):
        if status > 128 and number in {int(s) for s in signal.Signals}:
            return f"exit {status} ({signal.Signals(number).name})"
    return f"exit {status}"


def signal_group(group: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def descendants(root: int) -> list[int]:
    """Living (not zombie) descendants of `root`, by /proc."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = entry.read_text().rpartition(")")[2].split()  # the name may hold spaces and brackets
            children.setdefault(int(fields[1]), []).append((int(entry.parent.name), fields[0]))
    found, queue = [], [root]
    while queue:
        for pid, state in children.get(queue.pop(), []):
            queue.append(pid)
            if state not in "ZX":
                found.append(pid)
    return found


def reap() -> None:
    """Collect every child that has ended. Only for a process whose children are all its to collect."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def sweep(grace_s: float, *, kill_s: float = 10.0) -> tuple[int, int]:
    """End every descendant of this process: TERM, `grace_s` to comply, then KILL. Returns how many there were and how
    many are left.

    Left over after `kill_s` are only processes that the kernel cannot end now (stuck in I/O). Call it in a subreaper
    that has no other children."""
    reap()
    first = descendants(os.getpid())
    left = first
    for signum, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, kill_s)):
        deadline = time.monotonic() + patience
        told: set[int] = set()
        while left and (time.monotonic() < deadline or not told):
            for pid in left:
                if pid not in told or signum == signal.SIGKILL:
                    told.add(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signum)
            time.sleep(0.02)
            reap()
            left = descendants(os.getpid())
    return len(first), len(left)
