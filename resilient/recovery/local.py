"""Start the ranks of one host as torchrun and deepspeed do, and return the first failure's own exit code (BR-55)."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from resilient.recovery.process import describe, exit_status, free_port, in_child, signal_group

_POLL_S = 0.5


def spawn(command: Sequence[str], nproc: int, env: Mapping[str, str] | None = None, *, grace_s: float = 10.0) -> int:
    """Run `nproc` copies of `command` as ranks 0..nproc-1 of one job on this host, and wait for all of them.

    Each gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and a free MASTER_PORT on top of `env`
    (default: this process's environment), its own process group, and dies with this process. TERM and INT are passed
    on to all ranks, which then have `grace_s` seconds. When a rank ends non-zero, the others get TERM and, after
    `grace_s`, KILL.

    Returns 0 if all ranks did, else the code of the rank that failed first (128 + signal for a death by signal).
    Call it in the main thread. Raises FileNotFoundError or PermissionError if the command cannot be started.
    """
    ranks = _Ranks(command, nproc, dict(os.environ if env is None else env), grace_s)
    previous = {s: signal.signal(s, ranks.on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        ranks.start()
        return ranks.wait()
    finally:
        ranks.kill()
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class _Ranks:
    def __init__(self, command: Sequence[str], nproc: int, env: dict[str, str], grace_s: float) -> None:
        self.command, self.nproc, self.grace_s = list(command), nproc, grace_s
        self.env = env | {
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # ranks in the order in which they ended; -1: wake up
        self.deadline: float | None = None  # when KILL is due

    def start(self) -> None:
        for rank in range(self.nproc):
            process = subprocess.Popen(
                self.command,
                env=self.env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                preexec_fn=in_child(signal.SIGKILL),
            )
            self.processes.append(process)
        for rank in range(self.nproc):  # threads only after the last fork; they give the true order of ends
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()

    def _watch(self, rank: int) -> None:
        self.processes[rank].wait()
        self.ended.put(rank)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        _say(f"{signal.Signals(signum).name} received: passing it on, {self.grace_s:g} s to finish")
        self.stop(signum)
        self.ended.put(-1)

    def stop(self, signum: int) -> None:
        """Ask all ranks to end and start the clock; a second request does not restart it."""
        for process in self.processes:
            if process.poll() is None:
                signal_group(process.pid, signum)
        if self.deadline is None:
            self.deadline = time.monotonic() + self.grace_s

    def wait(self) -> int:
        origin = 0
        left = self.nproc
        while left:
            rank = self._next()
            if rank is None:
                continue
            left -= 1
            status = exit_status(self.processes[rank].returncode)
            signal_group(self.processes[rank].pid, signal.SIGKILL)  # whatever that rank left in its group
            if status != 0 and origin == 0:
                origin = status
                if left:
                    _say(f"rank {rank} ended first: {describe(status)}; stopping the other {left}")
                    self.stop(signal.SIGTERM)
                else:
                    _say(f"rank {rank}: {describe(status)}")
        return origin

    def _next(self) -> int | None:
        """The next rank that ended, or None after a while; KILLs the rest when their time is up."""
        patience = _POLL_S if self.deadline is None else min(_POLL_S, max(self.deadline - time.monotonic(), 0.0))
        try:
            rank = self.ended.get(timeout=patience)
        except queue.Empty:
            rank = -1
        if self.deadline is not None and time.monotonic() >= self.deadline:
            alive = [i for i, p in enumerate(self.processes) if p.poll() is None]
            if alive:
                _say(f"killing ranks {alive}: still there after {self.grace_s:g} s")
            for i in alive:
                signal_group(self.processes[i].pid, signal.SIGKILL)
            self.deadline = time.monotonic() + _POLL_S  # again, should a group have been missed
        return rank if rank >= 0 else None

    def kill(self) -> None:
        """The last resort, whatever happened before: nothing is left running and nothing is left unreaped."""
        for process in self.processes:
            if process.poll() is None:
                signal_group(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def _say(text: str) -> None:
    print(f"[ranks] {text}", file=sys.stderr, flush=True)
