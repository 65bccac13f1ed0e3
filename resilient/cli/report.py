"""`resilient report RUN [--twin RUN2] [--out FILE]`: one self-contained HTML page about a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from resilient.errors import ConfigError, ExitCode


def main(argv: list[str]) -> int:
    """Write the page and print its path. 64 when a run or the output file cannot be used."""
    parser = argparse.ArgumentParser(prog="resilient report", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="run directory, such as runs/my-run")
    parser.add_argument("--twin", metavar="RUN2", help="an undisturbed run to draw underneath")
    parser.add_argument("--out", metavar="FILE", help="default: RUN/report.html")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(argv)

    from resilient.telemetry.report import report_page
    from resilient.telemetry.run_data import load_run

    try:
        run = load_run(options.run)
        twin = load_run(options.twin) if options.twin else None
        out = Path(options.out) if options.out else run.path / "report.html"
        if not out.parent.is_dir():
            raise ConfigError(f"--out: there is no folder {out.parent}")
        out.write_text(report_page(run, twin), encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"resilient report: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    print(json.dumps({"report": str(out)}) if options.format == "json" else f"report: {out}")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
