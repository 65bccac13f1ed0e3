"""`resilient analyze FILE... [--html FILE] [--plot FILE.png] [--format text|json]`: what a training log says.

A log is a file in any format that the readers know, a run directory, or a folder of TensorBoard event files. Exit codes:
0 healthy, 1 warnings (alarms, or a loss spike that came back), 2 a broken run (diverged, nonfinite, collapse), 64 a file
that cannot be read; of several files the worst. JSON is one object for one file, and a list for several.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from resilient.logs.analysis import Analysis
    from resilient.logs.rows import Log


def main(argv: list[str]) -> int:
    """Analyse each file, print what was found, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="resilient analyze", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="training logs, run directories, event folders")
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained page")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw the curves")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(argv)
    for option in ("html", "plot"):
        path = getattr(options, option)
        if path is not None and not Path(path).parent.is_dir():
            return _fail(f"--{option}: there is no folder {Path(path).parent}")

    found: list[Analysis] = []
    unreadable = _analyze_all(options.files, found, told=options.format == "text")
    if options.format == "json" and found:
        objects = [analysis.as_dict() for analysis in found]
        _say(json.dumps(objects[0] if len(options.files) == 1 else objects, indent=2, allow_nan=False))
    try:
        _write(found, options.html, options.plot, told=options.format == "text")
    except (ConfigError, OSError) as error:
        return _fail(str(error))
    if unreadable:
        return ExitCode.BAD_CONFIG
    return max(analysis.exit_code for analysis in found)


def _analyze_all(files: Sequence[str], found: list[Analysis], *, told: bool) -> int:
    """Analyse each file into `found`, telling the person meanwhile. Returns how many could not be read."""
    from resilient.logs.analysis import analyze
    from resilient.logs.open import open_log

    unreadable = 0
    for file in files:
        gap = "\n" if found else ""

        def seen(log: Log, name: str = file, gap: str = gap) -> None:
            _say(f"{gap}{name}: {log.remarks.format}")

        try:
            analysis = analyze(open_log(file), seen=seen if told else None)
        except (ConfigError, OSError) as error:
            unreadable += 1
            print(f"resilient analyze: {error}", file=sys.stderr, flush=True)
            continue
        found.append(analysis)
        if told:
            from resilient.logs.show import text_report

            width = shutil.get_terminal_size((100, 24)).columns
            _say(text_report(analysis, width=max(width - 1, 40), unicode=_takes_braille()))
    return unreadable


def _write(found: list[Analysis], page: str | None, picture: str | None, *, told: bool) -> None:
    if page is not None and found:
        from resilient.logs.page import analysis_page

        Path(page).write_text(analysis_page(found), encoding="utf-8")
    if picture is not None and found:
        from resilient.logs.plot import write_png

        write_png(found, picture)
    if told and found:
        for name, path in (("page", page), ("picture", picture)):
            if path is not None:
                _say(f"{name}: {path}")


def _say(text: str) -> None:
    """Print at once. When nobody reads any more (`| head`), the rest goes nowhere."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _takes_braille() -> bool:
    """A UTF encoding; a stream that replaces what it cannot encode would print a row of question marks."""
    return (sys.stdout.encoding or "ascii").lower().replace("_", "-").startswith("utf")


def _fail(message: str) -> int:
    print(f"resilient analyze: {message}", file=sys.stderr, flush=True)
    return ExitCode.BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
