"""The `resilient` command: looks up the subcommand, imports only that one, and turns named errors into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import resilient
from resilient.cli.errors import did_you_mean, fail
from resilient.errors import ConfigError, ExitCode, ResilientError

COMMANDS = {
    "train": "train the reference job under the guard; -m runs a sweep",
    "launch": "run a training command and restart it when it dies",
    "analyze": "read any training log: what happened, when it began, what to do",
    "watch": "follow a run or a log from outside: level, alarms, calls for help",
    "request": "ask a live run for a checkpoint, a stop, a rollback or another LR",
    "report": "write one HTML page about a run",
    "compare": "compare the runs of a sweep",
    "checkpoint": "list, verify, compare, delete and export checkpoints",
    "probe": "measure the links between ranks, and their arithmetic: what is slow or wrong",
    "bench": "the benchmarks behind the figures: detection, overhead",
    "drill": "rehearse failures: checkpoints under kills, damage and full disks",
    "demo": "break a small run in several ways, with and without the guard",
}

_ARGPARSE_ERROR = 2
_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def main(argv: Sequence[str] | None = None) -> int:
    """Run `resilient COMMAND ...`; each command is `resilient.cli.COMMAND:main(argv) -> exit code`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else fail(ConfigError("no command given"))
    if words[0] in ("-V", "--version"):
        print(f"resilient {resilient.__version__}")
        return 0
    command = words[0]
    if command not in COMMANDS:
        return fail(ConfigError(f"{command}: unknown command{did_you_mean(command, COMMANDS)}"))
    try:
        return int(import_module(f"resilient.cli.{command}").main(words[1:]) or 0)
    except ResilientError as error:
        return fail(error)
    except SystemExit as end:  # argparse has printed its message; its own code 2 means nothing to a supervisor
        if end.code == _ARGPARSE_ERROR:
            return int(ExitCode.BAD_CONFIG)
        raise
    except KeyboardInterrupt:
        return _INTERRUPTED


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: resilient COMMAND ...", "", *lines, "", "resilient COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
