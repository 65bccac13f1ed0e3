"""The other way back: a rank is killed, `resilient launch` starts the whole job again, and it goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import resilient
from resilient.checkpoint.files import wait_until
from resilient.recovery.process import in_child

_EVERY = 4  # steps between checkpoints
_KILL_AFTER = 6  # the step applied last, so that two are lost
_PATIENCE_S = 180.0
_RANK = 1  # rank 0 writes what is looked at here

JOB = (
    "data=synthetic",
    "data.seq_len=64",
    "data.micro_batch=2",
    "data.num_workers=0",
    "run.steps=100000",
    f"run.checkpoint.every={_EVERY}",
    "run.eval_every=0",
)


def relaunch(engine: str, model: str, nproc: int, folder: Path) -> dict[str, float]:
    """Seconds from SIGKILL of one rank of a job to its next applied step (`next_step_s`), and until it stands again where it was
    (`regained_s`). engine, model: names in conf/. folder: an empty one. Raises RuntimeError when the job does not do as
    expected within minutes."""
    run = folder / "runs" / "killed"
    command = [sys.executable, "-m", "resilient", "launch", "--backoff", "0", "--run-id", run.name, "--"]
    command += [sys.executable, "-m", "resilient.cli.train", f"run.nproc={nproc}", f"engine={engine}", f"model={model}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RESILIENT_", "RANK", "WORLD_SIZE", "MASTER_"))}
    with open(folder / "log", "wb") as log:
        job = subprocess.Popen(
            [*command, *JOB],
            cwd=folder,
            env=env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _import_path()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=in_child(signal.SIGTERM),
        )
    try:
        steps = run / "steps.jsonl"

        def await_step(generation: int, step: int) -> float:
            """Unix time at which it was applied."""
            found: list[float] = []

            def there() -> bool:
                if job.poll() is not None:
                    raise RuntimeError(f"the job ended with {job.returncode}: {(folder / 'log').read_text()[-2000:]}")
                found[:] = [
                    line["time"]
                    for line in _lines(steps)
                    if line["generation"] == generation and line["applied"] and line["step"] >= step
                ]
                return bool(found)

            if not wait_until(there, _PATIENCE_S):
                raise RuntimeError(f"no step {step} of start {generation} after {_PATIENCE_S:.0f} s")
            return found[0]

        await_step(0, _KILL_AFTER)
        killed = time.time()
        os.kill(_process_of(run.name, _RANK), signal.SIGKILL)
        reached = max(line["step"] for line in _lines(steps) if line["applied"])
        return {
            "next_step_s": await_step(1, 1) - killed,
            "regained_s": await_step(1, int(reached)) - killed,
        }
    finally:
        job.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            job.wait(60.0)
        job.kill()
        job.wait()


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Of a file that is being written."""
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def _process_of(run_id: str, rank: int) -> int:
    """The first process that was started as this rank of this run: its children have the same environment and higher numbers."""
    wanted = {f"RESILIENT_RUN_ID={run_id}".encode(), f"RANK={rank}".encode()}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # not ours, or gone
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    if not found:
        raise RuntimeError(f"no process of rank {rank} of run {run_id}")
    return min(found, key=_started)


def _started(pid: int) -> int:
    """Ticks after boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _import_path() -> str:
    """Where this package lies, for processes with another working directory."""
    return os.pathsep.join([str(Path(resilient.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
