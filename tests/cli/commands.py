"""The command line in processes of its own, with a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a launcher's variables, with the package importable from anywhere."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RESILIENT_RUN_ID")
    kept = {key: value for key, value in os.environ.items() if key not in launcher}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | dict(extra or {})


def start(arguments: Sequence[str], cwd: Path, extra: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`python ARGUMENTS` in the folder `cwd`."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    """A job that a shell started in the background ignores SIGINT, and would hand that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process: subprocess.Popen[str], timeout: float = 90.0) -> tuple[int, str, str]:
    """(exit code, stdout, stderr). Kills the process at the deadline and raises."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{process.args} did not end in {timeout:.0f} s:\n{out}\n{err}") from None
    return process.returncode, out, err
