"""What may stand on the command line of a rank: launcher arguments, options, overrides.

`deepspeed` and older launchers append `--local_rank=N` to the user's arguments, which Hydra rejects (BR-59). They are
removed here, wherever they stand. Who a rank is comes from the environment alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from resilient.errors import ConfigError, ExitCode


class Parser(argparse.ArgumentParser):
    """Of one command: bad usage ends with exit code 64 and one line that names the command."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        command = " ".join(self.prog.split()[:2])  # not its subcommands
        self.exit(ExitCode.BAD_CONFIG, f"{command}: {message}\n")


_LOCAL_RANK = re.compile(r"--local[-_]rank(?:=(.*))?")

# Variable names of (rank, world, local rank), in the order in which they are believed. The first row is what torchrun
# and deepspeed set. Slurm sets SLURM_STEP_NUM_TASKS for ranks that srun started, and not in the batch script itself.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


@dataclass(frozen=True)
class Runtime:
    """Who this process is. launched: a launcher started it, so it starts no ranks of its own."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    launched: bool = False

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Set RANK, WORLD_SIZE and LOCAL_RANK, so that torch and DeepSpeed see what Slurm or MPI said."""
        environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world), LOCAL_RANK=str(self.local_rank))


def strip_launcher_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Runtime, list[str]]:
    """Split `argv` into who we are and what the user wrote. Raises ConfigError if either cannot be read."""
    rest: list[str] = []
    argument: int | None = None
    words = iter(argv)
    for word in words:
        match = _LOCAL_RANK.fullmatch(word)
        if match is None:
            rest.append(word)
            continue
        text = match.group(1) if match.group(1) is not None else next(words, "")
        argument = _number(text, word.partition("=")[0])
    return _runtime(environ, argument), rest


def _runtime(environ: Mapping[str, str], argument: int | None) -> Runtime:
    for rank_name, world_name, local_name in _LAUNCHERS:
        if rank_name not in environ or (rank_name != "RANK" and world_name not in environ):
            continue
        if world_name not in environ:
            raise ConfigError(f"{rank_name} is set but {world_name} is not: the launcher's environment is incomplete")
        rank, world = _number(environ[rank_name], rank_name), _number(environ[world_name], world_name)
        if not 0 <= rank < world:
            raise ConfigError(f"{rank_name}={rank} is not below {world_name}={world}")
        if rank_name != "RANK" and world == 1:
            continue  # a shell under `srun --pty`, or mpirun -n 1: nobody else to meet
        default = argument if argument is not None else 0
        local = _number(environ[local_name], local_name) if local_name in environ else default
        return Runtime(rank, world, local, launched=True)
    return Runtime(local_rank=argument or 0)


def number(kind: type[int] | type[float], least: float, *, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number of at least `least`, or (above) greater than it."""

    def convert(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf") or (above and value == least):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number {'above' if above else 'of at least'} {least:g}"
            )
        return value

    convert.__name__ = kind.__name__  # argparse names it in its message
    return convert


def _number(text: str, name: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name} needs a number, found {text!r}")
    return int(text)


@dataclass(frozen=True)
class Arguments:
    """The user's part of the command line.

    ask_hydra: the command line asks for something that Hydra answers by itself (--help, --cfg, --info ...) or has an
    option that is nobody's; `words` is then what to hand to Hydra, options first.
    """

    overrides: tuple[str, ...] = ()
    config_dir: str | None = None
    config_name: str = "config"
    config_json: str | None = None
    multirun: bool = False
    ask_hydra: bool = False
    words: tuple[str, ...] = ()


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Sort the words that `strip_launcher_arguments` left. Raises ConfigError for options that exclude each other."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("--config-json")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--run", "-r", action="store_true")
    for long, short in (("--cfg", "-c"), ("--package", "-p"), ("--info", "-i")):
        parser.add_argument(long, short, nargs="?", const="", dest=f"ask{long}")
    for long, short in (("--help", "-h"), ("--shell-completion", "-sc")):
        parser.add_argument(long, short, action="store_const", const="", dest=f"ask{long}")
    for long in ("--hydra-help", "--resolve", "--version"):
        parser.add_argument(long, action="store_const", const="", dest=f"ask{long}")
    try:
        known, left = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    overrides = tuple(word for word in left if not word.startswith("-"))
    asked = any(value is not None for name, value in vars(known).items() if name.startswith("ask"))
    unknown = len(overrides) < len(left)
    if known.config_json and (overrides or known.multirun or known.config_dir):
        raise ConfigError("--config-json is a complete configuration: it takes no overrides and no further options")
    return Arguments(
        overrides=overrides,
        config_dir=known.config_dir,
        config_name=known.config_name.removesuffix(".yaml"),
        config_json=known.config_json,
        multirun=known.multirun,
        ask_hydra=asked or unknown,
        words=tuple(word for word in argv if word not in overrides) + overrides,
    )
