"""How a command ends: its one text on stdout or in a file, or one line on stderr about what it cannot use."""

from __future__ import annotations

import sys
from pathlib import Path

from resilient.errors import ConfigError, ExitCode


def check_folder(option: str, path: str | Path | None) -> None:
    """Before the work: raises ConfigError if the file `path` of `option` has no folder to be written into. None passes."""
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"{option}: there is no folder {Path(path).parent}")


def unusable(command: str, error: Exception) -> int:
    """Say on stderr what `command` was given and cannot use. Returns 64."""
    print(f"resilient {command}: {error}", file=sys.stderr, flush=True)
    return ExitCode.BAD_CONFIG


def hand_over(command: str, text: str, out: str | Path | None) -> int:
    """Print `text`, or write it to the file `out`. Returns 0, or 64 with a line on stderr if it cannot be written there."""
    if not out:
        print(text)
        return ExitCode.DONE
    try:
        Path(out).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        return unusable(command, error)
    return ExitCode.DONE
