"""`resilient compare DIR|RUN... [--baseline RUN] [--html FILE]`: the runs of a sweep, or any runs, side by side."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from resilient.errors import ConfigError, ExitCode
from resilient.telemetry.output import check_folder, hand_over, unusable


def main(argv: list[str]) -> int:
    """Print the comparison. 64 when no run can be read, or an output file cannot be written."""
    parser = argparse.ArgumentParser(prog="resilient compare", description=__doc__)
    parser.add_argument("paths", metavar="DIR|RUN", nargs="+", help="run directories, or folders that hold some")
    parser.add_argument("--baseline", metavar="RUN", help="the run that the others are measured against")
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained page")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--out", metavar="FILE", help="write the table there instead of to stdout")
    options = parser.parse_args(argv)

    from rich.console import Console

    from resilient.telemetry.compare import compare_runs, html_page, text_table

    try:
        check_folder("--html", options.html)
        check_folder("--out", options.out)
        comparison = compare_runs(options.paths, options.baseline)
        if options.html:
            Path(options.html).write_text(html_page(comparison), encoding="utf-8")
        if options.format == "json":
            text = json.dumps(comparison, indent=2, allow_nan=False)
        else:
            terminal = sys.stdout.isatty() and not options.out
            console = Console() if terminal else Console(width=240, color_system=None)
            with console.capture() as capture:
                console.print(text_table(comparison))
            text = "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))
    except (ConfigError, OSError) as error:
        return unusable("compare", error)
    code = hand_over("compare", text, options.out)
    if code == ExitCode.DONE and options.html and options.format == "text":
        print(f"page: {options.html}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
