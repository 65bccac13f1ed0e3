"""Before a job starts: the link probe, and what to do when it names something. Imports no torch.

`resilient launch --preflight` runs a probe command, by default on the ranks of this machine, before the first start;
under a launcher of its own it is given as `--preflight-command`, because only that launcher knows the other hosts.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from resilient.errors import ExitCode
from resilient.recovery.config import PreflightMode
from resilient.recovery.process import describe, exit_status, in_child, signal_group

_PROBE = ("-m", "resilient.cli.probe")
_OVERTIME_S = 300.0  # for the start of the ranks and their imports; the probe itself gives up earlier


def probe_command(given: str | None, seconds: float, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The command that probes. given: the user's, as a shell would read it. Otherwise `resilient probe` with this
    process's environment: every rank's part of it when a launcher has set RANK, else the devices of this machine."""
    if given is not None:
        return shlex.split(given)
    return [sys.executable, *_PROBE, "--seconds", f"{seconds:g}"]


def preflight(mode: PreflightMode, command: Sequence[str], seconds: float, say: Callable[[str], None]) -> int:
    """Run the probe. Returns 0 when the job may start, 64 when the probe could not be run as given, and 77 when it has
    found something and `mode` is refuse. What it found, with ranks and hosts, it prints itself."""
    if mode == "off":
        return ExitCode.DONE
    say(f"preflight: {shlex.join(command)}")
    try:
        probe = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child(signal.SIGTERM))
    except OSError as error:
        say(f"preflight: cannot start {command[0]!r}: {error.strerror}")
        return ExitCode.BAD_CONFIG
    try:
        code = exit_status(probe.wait(2 * seconds + _OVERTIME_S))
        why = f"ended with {describe(code)}: see above for the ranks and hosts"
    except subprocess.TimeoutExpired as error:
        signal_group(probe.pid, signal.SIGKILL)
        probe.wait()
        code, why = 1, f"did not end within {error.timeout:g} s"
    if code == ExitCode.DONE:
        return ExitCode.DONE
    if code == ExitCode.BAD_CONFIG:
        say("preflight: the probe cannot be run like this; the job was not started")
        return ExitCode.BAD_CONFIG
    if mode == "warn":
        say(f"preflight: WARNING: the probe {why}; the job is started all the same")
        return ExitCode.DONE
    say(f"preflight: the probe {why}; the job was not started (--preflight warn starts it all the same)")
    return ExitCode.NEEDS_PERSON
