"""`resilient train -m`: Hydra's multirun, with every job in a process tree of its own.

Hydra composes the jobs and its launcher decides where and when they run; the task function starts `resilient train
--config-json FILE` in a new session, waits, and takes down whatever the job left behind (BR-61). The sweep's folder:

    <run.root>/sweep-<id>/<num>-<what is swept>/    one run directory per job, as of any run
    <run.root>/sweep-<id>/jobs/<num>/               config.json, output.log, result.json
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Glob
from omegaconf import DictConfig

from resilient.cli.argv import Arguments, Runtime
from resilient.cli.check import check_job
from resilient.cli.compose import (
    compose_arguments,
    more_folders,
    parse,
    plain,
    prepare,
    quote,
    rename_deprecated,
    search_path,
)
from resilient.cli.errors import all_in_one
from resilient.errors import ConfigError, ExitCode
from resilient.recovery.verdict import fresh_run_id

_TAG = "RESILIENT_SWEEP_JOB"
"""In the environment of every process of a job: what still carries it after the job's end is a leftover."""

_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_LONGEST_NAME = 100
_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


@dataclass(frozen=True)
class JobResult:
    """One job of a sweep. status: summary.json's, or `failed (exit code)`. eval_loss: None for a failed job."""

    number: int
    name: str
    run_directory: str
    log: str
    exit_code: int
    status: str
    eval_loss: float | None


def sweep(arguments: Arguments, runtime: Runtime) -> int:
    """Run the sweep to its end. Returns 0, or 77 if a job failed. Raises ConfigError before any job starts."""
    if runtime.launched:
        raise ConfigError(
            f"--multirun inside rank {runtime.rank} of {runtime.world}: every rank would start the whole sweep. Run the "
            "sweep outside the launcher; each job starts its own ranks (run.nproc=N, launch=local|deepspeed|torchrun)"
        )
    root = _check_choices(arguments)
    folder = Path(root).absolute() / f"sweep-{fresh_run_id()}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a terminated sweep ends its jobs
    folders = search_path(arguments)
    fixed = [override.key_or_group for override in map(parse, arguments.overrides) if not override.is_sweep_override()]
    sys.argv = [
        "resilient train",
        "--multirun",
        *prepare(arguments.overrides, lambda text: None),
        *more_folders(folders),
        f"hydra.sweep.dir={quote(str(folder))}",
        # a job is named after what sets it apart from the others
        f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(quote, fixed))}]",
    ]
    try:
        hydra.main(version_base="1.3", config_path=str(folders[0]), config_name=arguments.config_name)(run_job)()
    except SystemExit as end:
        if end.code:
            raise ConfigError("Hydra refused the sweep, see above") from None
    finally:
        results = read_results(folder)
        if results:
            print(summary(results, folder), flush=True)
    return int(ExitCode.DONE if results and all(r.exit_code == 0 for r in results) else ExitCode.NEEDS_PERSON)


def _check_choices(arguments: Arguments) -> str:
    """Compose and check each choice of each swept key once, the other keys at their first choice. Returns run.root."""
    choices: list[list[str]] = []
    for override in map(parse, arguments.overrides):
        text = override.input_line or ""
        if not override.is_sweep_override():
            choices.append([text])
        elif override.is_discrete_sweep() and not isinstance(override.value(), Glob):
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        # Intervals and globs have no list of choices here; a job that gets a bad one fails by itself.
    first = [options[0] for options in choices]
    variants = [first] + [
        [*first[:i], choice, *first[i + 1 :]] for i, options in enumerate(choices) for choice in options[1:]
    ]
    problems: list[str] = []
    root = "runs"
    for overrides in variants:
        try:
            job = check_job(compose_arguments(replace(arguments, overrides=tuple(overrides))), Runtime())
            root = job.run.root
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise all_in_one(problems)
    return root


def run_job(config: DictConfig) -> float:
    """Hydra's task function: one job from start to end. Returns the evaluation loss, NaN if it has none, for sweepers
    that look for the best; a failed job never raises, so that the others go on."""
    about = HydraConfig.get()
    number, name = int(about.job.num), job_name(str(about.job.override_dirname))
    folder = Path(about.runtime.output_dir)
    run_id = f"{number}-{name}" if name else str(number)
    directory, log = Path(about.sweep.dir) / run_id, folder / "output.log"
    print(f"[{number}] {name or 'defaults'}", flush=True)
    code = _INTERRUPTED
    try:
        resolved = rename_deprecated(plain(config), lambda text: None)
        resolved["run"].update(root=str(about.sweep.dir), id=run_id)
        path = folder / "config.json"
        path.write_text(json.dumps(resolved, indent=2), encoding="utf-8")
        code = run_alone([sys.executable, "-m", "resilient.cli.train", "--config-json", str(path)], number, log)
    except ConfigError as error:
        print(f"[{number}] {error}", file=sys.stderr, flush=True)
        code = int(error.exit_code)
    finally:
        done = _read(directory / "summary.json")
        status = str(done.get("status", "failed")) if code == 0 else f"failed ({code})"
        loss = done.get("eval_loss") if code == 0 else None
        result = JobResult(number, name, str(directory), str(log), code, status, loss)
        (folder / "result.json").write_text(json.dumps(asdict(result)), encoding="utf-8")
    return math.nan if loss is None else float(loss)


def job_name(override_dirname: str) -> str:
    """Hydra's `key=value,key=value` as part of one folder's name."""
    return re.sub(r"[^\w.=,+-]+", "_", override_dirname)[:_LONGEST_NAME].rstrip(".,_")


def run_alone(command: Sequence[str], number: int, log: Path) -> int:
    """Run `command` in a session of its own, its output copied to `log` and, line by line, to stdout. Returns the exit
    code. When this returns or raises, no process of the job is left."""
    tag = f"{os.getpid()}-{number}-{time.time_ns()}"
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=os.environ | {_TAG: tag, "PYTHONUNBUFFERED": "1"},
        )
        reader = Thread(target=_copy_lines, args=(process.stdout, file, f"[{number}] "), daemon=True)
        reader.start()
        try:
            return process.wait()
        finally:
            end_all(tag)
            process.wait()
            reader.join()  # ends with the last writer to the pipe, and none is left


def _copy_lines(source: TextIO, file: TextIO, prefix: str) -> None:
    for line in source:
        file.write(line)
        file.flush()
        sys.stdout.write(prefix + line)
        sys.stdout.flush()


def end_all(tag: str) -> None:
    """End every process that carries the tag, wherever it moved to: SIGTERM, then SIGKILL after the grace."""
    deadline = time.monotonic() + _GRACE_S
    told: set[int] = set()
    while alive := tagged(tag):
        late = time.monotonic() > deadline
        for pid in alive:
            if late or pid not in told:
                _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
        told.update(alive)
        time.sleep(0.05)


def tagged(tag: str) -> list[int]:
    """Process ids whose environment carries the tag (Linux; zombies have no environment any more)."""
    wanted = f"{_TAG}={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # ended meanwhile, or another user's
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def read_results(folder: Path) -> list[JobResult]:
    """Results of the jobs that ran, in their order."""
    found = [JobResult(**_read(path)) for path in folder.glob("jobs/*/result.json")]
    return sorted(found, key=lambda result: result.number)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def summary(results: Sequence[JobResult], folder: Path) -> str:
    """One line per job, and what to do next."""
    failed = [result for result in results if result.exit_code != 0]
    shown = os.path.relpath(folder)
    lines = ["", f"sweep: {len(results)} jobs, {len(failed)} failed"]
    for result in results:
        loss = f"{result.eval_loss:.4f}" if result.eval_loss is not None else "-"
        log = f"  see {os.path.relpath(result.log)}" if result in failed else ""
        lines.append(f"  {result.number:>3}  {result.status:<12}  eval_loss {loss:<8}  {result.name}{log}")
    return "\n".join([*lines, f"compare: resilient compare {shown}"])
