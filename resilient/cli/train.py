"""`resilient train KEY=VALUE ...`, and the same as a module under any launcher: `-m resilient.cli.train`.

Every rank composes and checks the configuration by itself, before a process group exists, so all of them end alike
when it is bad. Outside a launcher this process may first start the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.cli.argv import Arguments, Runtime, parse_arguments, strip_launcher_arguments
from resilient.cli.errors import fail
from resilient.errors import ConfigError, ExitCode, ResilientError
from resilient.recovery.verdict import RUN_ID, fresh_run_id

if TYPE_CHECKING:
    from resilient.train.config import JobConfig

_MODULE = "resilient.cli.train"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of DESIGN 8, the same on all ranks for a bad configuration (64)."""
    words = list(sys.argv[1:] if argv is None else argv)
    runtime = Runtime()
    try:
        runtime, words = strip_launcher_arguments(words, os.environ)
        arguments = parse_arguments(words)
        if arguments.ask_hydra:
            return _let_hydra_answer(arguments, runtime)
        if arguments.multirun:
            from resilient.cli.sweep import sweep

            return sweep(arguments, runtime)
        resolved = _resolve(arguments, runtime)
        job = _check(resolved, runtime)
        if not runtime.launched and (job.run.processes() > 1 or job.launch.name != "local"):
            return _start_ranks(words, job)
        runtime.export(os.environ)

        from resilient.cli.job import run

        return run(resolved, runtime)
    except ResilientError as error:
        return fail(error, runtime.rank)


def _resolve(arguments: Arguments, runtime: Runtime) -> dict[str, Any]:
    if arguments.config_json is not None:
        try:
            resolved = json.loads(Path(arguments.config_json).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--config-json {arguments.config_json}: {error}") from None
        if not isinstance(resolved, dict):
            raise ConfigError(f"--config-json {arguments.config_json}: not a configuration")
    else:
        from resilient.cli.compose import compose_arguments

        warn = None if runtime.rank == 0 else (lambda text: None)
        resolved = compose_arguments(arguments, warn)
    run = resolved.get("run")
    if isinstance(run, dict) and run.get("id") is None:
        run["id"] = os.environ.get(RUN_ID) or fresh_run_id()
    return resolved


def _check(resolved: dict[str, Any], runtime: Runtime) -> JobConfig:
    # Not at the top: the dataclasses live beside classes that import torch, and --help need not wait for it.
    from resilient.cli.check import check_job

    return check_job(resolved, runtime)


def _start_ranks(words: Sequence[str], job: JobConfig) -> int:
    """Start the run's ranks with the same command line on this machine; returns when they are done, if at all."""
    # The environment, not an override, so that it reaches the ranks whatever the command line looks like.
    env = os.environ | {RUN_ID: str(job.run.id)}
    if job.run.threads > 0:
        env.setdefault("OMP_NUM_THREADS", str(job.run.threads))
    if job.launch.name == "local":
        from resilient.recovery.local import spawn

        return spawn([sys.executable, "-m", _MODULE, *words], job.run.processes(), env=env)
    count = str(job.run.processes())
    if job.launch.name == "deepspeed":
        command = ["deepspeed", "--num_gpus", count, "--master_port", str(_free_port()), "--module", _MODULE]
    else:
        command = ["torchrun", "--standalone", "--nproc-per-node", count, "-m", _MODULE]
    program = Path(sys.executable).with_name(command[0])
    if not program.exists():
        raise ConfigError(f"launch={job.launch.name}: {command[0]} is not installed beside {sys.executable}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, [str(program), *command[1:], *words], env)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _let_hydra_answer(arguments: Arguments, runtime: Runtime) -> int:
    """--help, --cfg, --info and the like, and Hydra's own message for options that nobody knows; on rank 0 only."""
    import hydra

    from resilient.cli.compose import config_folder, prepare

    def nothing(config: Any) -> None:
        raise ConfigError("this option starts nothing")

    overrides = prepare(arguments.overrides, lambda text: None)
    options = arguments.words[: len(arguments.words) - len(arguments.overrides)]
    sys.argv = ["resilient train", *options, *overrides]
    with contextlib.ExitStack() as stack:
        if runtime.rank != 0:
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        try:
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(nothing)()
        except SystemExit as end:
            return 0 if not end.code else int(ExitCode.BAD_CONFIG)  # argparse says 2, Hydra 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
