"""Start a training command, and start it again: `resilient launch`.

The supervisor knows nothing of training. It reads an exit code, the run's verdict.json and its manifests; it never
imports torch. It runs as a process of its own, because it ends and reaps everything below it.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from resilient.checkpoint.manifest import Listing, list_checkpoints
from resilient.errors import ExitCode
from resilient.recovery.config import SuperviseConfig
from resilient.recovery.process import become_subreaper, describe, exit_status, in_child, signal_group, sweep
from resilient.recovery.verdict import (
    GENERATION,
    RUN_ID,
    SUPERVISOR,
    Verdict,
    forget_announcement,
    fresh_run_id,
    read_announcement,
    read_verdict,
    supervisor_token,
)

Outcome = Literal["done", "stop", "restart"]

_FINAL = {
    ExitCode.BAD_CONFIG: "the configuration cannot be used",
    ExitCode.RESTART_EXCLUDING: "a restart without the named hosts is due, and this supervisor has only this machine",
    ExitCode.NEEDS_PERSON: "a person is needed",
    ExitCode.PREEMPTED: "pre-empted; the run can be resumed with the same command and run id",
}


def outcome_of(code: int) -> Outcome:
    """What an exit code of DESIGN 8 asks for. Everything unknown (1, 137, signals) is a crash, worth another try."""
    if code == ExitCode.DONE:
        return "done"
    return "stop" if code in _FINAL else "restart"


@dataclass
class Budget:
    """Restarts in a row without progress. Progress: a complete checkpoint of a later step than any seen before."""

    max_restarts: int
    used: int = 0
    furthest: int = -1

    def progressed(self, listing: Listing) -> bool:
        """Take note of the checkpoints there are; a later step than ever before earns all restarts back."""
        step = max((c.manifest.step for c in listing.complete), default=-1)
        if step <= self.furthest:
            return False
        self.furthest, self.used = step, 0
        return True

    def spend(self) -> bool:
        """Take one restart; False when none is left."""
        if self.used >= self.max_restarts:
            return False
        self.used += 1
        return True


@dataclass(frozen=True)
class Ended:
    """How one start ended: the code that counts (the verdict's if there is one), where it is from, and why."""

    code: int
    text: str


class Supervisor:
    """One `resilient launch`. Use `supervise` unless you test its pieces."""

    def __init__(self, command: Sequence[str], config: SuperviseConfig, run_id: str) -> None:
        self.command, self.config, self.run_id = list(command), config, run_id
        self.budget = Budget(config.max_restarts)
        self.folder = Path(tempfile.mkdtemp(prefix="resilient-launch-"))
        self.run_dir: Path | None = None
        self.events: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # exit status of the command; None: a signal
        self.child: int | None = None
        self.asked: int | None = None  # the signal that asks us to end
        self.deadline: float | None = None

    def run(self) -> int:
        """Start, watch, judge, start again. Returns the exit code for the shell."""
        generation = 0
        while True:
            code = self._once(generation)
            if isinstance(code, int):
                return code
            generation += 1

    def _once(self, generation: int) -> int | None:
        """One start. The exit code to end with, or None when the next start is due."""
        _say(f"run {self.run_id} generation {generation}: starting {' '.join(self.command)}")
        began = time.monotonic()
        try:
            status = self._start_and_wait(generation)
        except OSError as error:
            _say(f"cannot start {self.command[0]!r}: {error.strerror}")
            return ExitCode.BAD_CONFIG
        verdict = self._read_verdict()
        left_running = self._clear_up()
        ended = _judge(status, verdict or self._late_verdict(), cut_off=self.run_dir is not None and left_running > 0)
        listing = list_checkpoints(self.run_dir / "checkpoints") if self.run_dir else Listing((), ())
        progress = self.budget.progressed(listing)
        after = f"run {self.run_id} generation {generation} ended after {time.monotonic() - began:.1f} s: {ended.text}"
        outcome = outcome_of(ended.code)
        if outcome != "restart":
            _say(f"{after}" + (f"; {_FINAL[ExitCode(ended.code)]}" if outcome == "stop" else ""))
            return ended.code
        if self.asked is not None:
            _say(f"{after}; not restarted after {signal.Signals(self.asked).name}")
            return ended.code
        if not self.budget.spend():
            _say(
                f"{after}; {self.config.max_restarts} restarts in a row brought no checkpoint of a later step: "
                f"giving up, a person is needed ({_newest(listing, 'it stands at')})"
            )
            return ExitCode.NEEDS_PERSON
        pause = min(self.config.backoff_s * 2 ** (self.budget.used - 1), self.config.backoff_cap_s)
        _say(
            f"{after}; {'progress was made, ' if progress else ''}restart {self.budget.used} of "
            f"{self.config.max_restarts} in {pause:g} s, {_newest(listing, 'from')}"
        )
        return self._pause(pause)

    # -- one start ----------------------------------------------------------------------------------------------

    def _start_and_wait(self, generation: int) -> int:
        forget_announcement(self.folder)
        env = os.environ | {RUN_ID: self.run_id, GENERATION: str(generation), SUPERVISOR: str(self.folder)}
        process = subprocess.Popen(
            self.command,
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=in_child(signal.SIGTERM),
        )
        self.child = process.pid
        threading.Thread(target=self._reap_until, args=(process,), daemon=True).start()
        if self.asked is not None:  # the signal came while we were starting
            signal_group(process.pid, self.asked)
        while True:
            status = self._next_event()
            if status is not None:
                self.child = None
                return status
            if self.deadline is not None and time.monotonic() >= self.deadline:
                _say(f"still running when the {self.config.grace_s:g} s to finish were over: killing it")
                signal_group(process.pid, signal.SIGKILL)
                self.deadline = time.monotonic() + 1.0

    def _reap_until(self, process: subprocess.Popen[bytes]) -> None:
        """Collect all children, adopted orphans too, until the command itself has ended."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)  # Popen must not wait for it again
                self.events.put(exit_status(process.returncode))
                return

    def _next_event(self) -> int | None:
        patience = 1.0 if self.deadline is None else min(1.0, max(self.deadline - time.monotonic(), 0.0))
        try:
            return self.events.get(timeout=patience)
        except queue.Empty:
            return None

    def _clear_up(self) -> int:
        """End what the command left behind: ranks of a launcher that was killed, data workers of a rank that was.
        Returns how many processes there were."""
        grace = self.config.orphan_grace_s if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)
        found, left = sweep(grace)
        if found:
            _say(f"ended {found - left} processes that the command had left running")
        if left:
            _say(f"{left} processes cannot be ended (stuck in the kernel)")
        return found

    def _read_verdict(self) -> Verdict | None:
        """The verdict of exactly this start: by the generation that it announced, and under this supervisor."""
        announced = read_announcement(self.folder)
        if announced is None:
            return None
        self.run_dir = announced.run_dir
        verdict = read_verdict(announced.run_dir)
        mine = (announced.generation, supervisor_token(str(self.folder)))
        return verdict if verdict is not None and (verdict.generation, verdict.supervisor) == mine else None

    def _late_verdict(self) -> Verdict | None:
        """One that ranks wrote while they were cleared up. `pre-empted` is then our own TERM's doing, not the cluster's."""
        verdict = self._read_verdict()
        own_doing = self.asked is None and verdict is not None and verdict.code == ExitCode.PREEMPTED
        return None if own_doing else verdict

    # -- signals and waiting ------------------------------------------------------------------------------------

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Pass it on once and start the clock; a second INT ends the patience."""
        if self.asked is None:
            self.asked, self.deadline = signum, time.monotonic() + self.config.grace_s
            if self.child is not None:
                _say(f"{signal.Signals(signum).name} received: passing it on, {self.config.grace_s:g} s to finish")
                signal_group(self.child, signum)
        elif signum == signal.SIGINT:
            self.deadline = time.monotonic()
        self.events.put(None)

    def _pause(self, seconds: float) -> int | None:
        """Wait before a restart. 78 when asked to end meanwhile: nothing runs, and the run can be resumed."""
        deadline = time.monotonic() + seconds
        while self.asked is None and (left := deadline - time.monotonic()) > 0:
            try:
                self.events.get(timeout=left)
            except queue.Empty:
                break
        if self.asked is None:
            return None
        _say(f"{signal.Signals(self.asked).name} received while waiting to restart: {_FINAL[ExitCode.PREEMPTED]}")
        return ExitCode.PREEMPTED


def _judge(status: int, verdict: Verdict | None, *, cut_off: bool) -> Ended:
    """The verdict counts where there is one: launchers turn every failure of a rank into exit 1.

    cut_off: a run that writes verdicts left ranks running and no verdict. Then exit 0 is no success: the deepspeed
    launcher returns it when its inner process is killed."""
    if verdict is None and status == ExitCode.DONE and cut_off:
        return Ended(ExitCode.RESTART, "exit 0 without a verdict while ranks were running, taken for a crash")
    if verdict is None:
        return Ended(status, describe(status))
    hosts = verdict.details.get("hosts")
    named = f", without hosts {hosts}" if hosts else ""
    reason = textwrap.shorten(verdict.reason, 300, placeholder=" ...")  # one line; the whole of it is in verdict.json
    return Ended(verdict.code, f"verdict {verdict.code}: {reason}{named} (the command: {describe(status)})")


def supervise(command: Sequence[str], config: SuperviseConfig, run_id: str | None = None) -> int:
    """Run `command` under supervision until it is done, must not be restarted, or the budget is used up.

    Sets RESILIENT_RUN_ID (given, or from the environment, or fresh), RESILIENT_GENERATION and RESILIENT_SUPERVISOR.
    Call it in the main thread of a process that has no other children. Returns the exit code (DESIGN 8):
    0, 64, 76, 77 or 78 as the job ended, 77 when the budget is used up, the command's own code after TERM or INT.
    """
    become_subreaper()
    supervisor = Supervisor(command, config, run_id or os.environ.get(RUN_ID) or fresh_run_id())
    previous = {s: signal.signal(s, supervisor.on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        return int(supervisor.run())
    finally:
        sweep(0.0)
        shutil.rmtree(supervisor.folder, ignore_errors=True)
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _newest(listing: Listing, verb: str) -> str:
    if not listing.complete:
        return "no checkpoint known"
    return f"{verb} the checkpoint of step {listing.complete[0].manifest.step}"


def _say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)
