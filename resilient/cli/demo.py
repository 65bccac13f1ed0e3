"""`resilient demo`: one small training run, three times on one seed, through the real deepspeed launcher.

undisturbed    nothing happens; the guard watches
unguarded      NaN on a rank, a one-rank gradient spike, a stretch of wrong labels; the guard only takes notes
guarded        the same faults; the guard acts
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from resilient.cli import report
from resilient.errors import ConfigError, ExitCode

RUNS = {
    "undisturbed": ("fault=none", "policy=default"),
    "unguarded": ("fault=demo", "policy=observe"),
    "guarded": ("fault=demo", "policy=default"),
}
_DEADLINE_S = 600.0  # for one run


def main(argv: Sequence[str]) -> int:
    """Train the three runs, print the table and the path of the report. 0 when the guarded run finished and ended
    closer to the undisturbed one than the unguarded run did."""
    parser = argparse.ArgumentParser(
        prog="resilient demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", default="demo", metavar="DIR", help="where the runs go (default: demo; replaced)")
    parser.add_argument(
        "--steps", type=int, default=None, help="optimizer steps (default: 120, as conf/experiment/demo.yaml says)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(list(argv))
    out = Path(options.out).absolute()
    _make_room(out)
    extra = [] if options.steps is None else [f"run.steps={options.steps}"]
    console = Console(stderr=options.format == "json", highlight=False, soft_wrap=True)
    started = time.monotonic()
    for name, overrides in RUNS.items():
        console.rule(f"{name}: {' '.join(overrides)}", align="left")
        code = _train(out, name, [*overrides, *extra], console)
        console.print(f"{name} ended with exit code {code}", style="dim")
    summaries = {name: _summary(out / name) for name in RUNS}
    page = out / "report.html"
    report.main([str(out / "guarded"), "--twin", str(out / "undisturbed"), "--out", str(page)])
    console.print(_table(summaries))
    rescued = _rescued(summaries)
    console.print(
        f"{'Rescued' if rescued else 'NOT rescued'} in {time.monotonic() - started:.0f} s. Report: {page}",
        style="bold green" if rescued else "bold red",
    )
    if options.format == "json":
        print(json.dumps({"runs": summaries, "report": str(page), "rescued": rescued}))
    return ExitCode.DONE if rescued else 1


def _make_room(out: Path) -> None:
    """Replace an earlier demo's runs, and nothing that is not one."""
    if out.exists() and any(out.iterdir()) and not any((out / name).is_dir() for name in RUNS):
        raise ConfigError(f"--out: {out} is not empty and holds no earlier demo; choose another folder")
    for name in RUNS:
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)


def _train(out: Path, name: str, overrides: list[str], console: Console) -> int:
    """One run under the deepspeed launcher: what rank 0 says on the console, everything in <name>.log."""
    launcher = Path(sys.executable).with_name("deepspeed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(launcher), "--num_gpus", "2", "--master_port", str(port), "--module", "resilient.cli.train",
        "experiment=demo", f"run.root={out}", f"run.id={name}", *overrides,
    ]  # fmt: skip
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    console.print("$ deepspeed " + " ".join(command[1:]), style="dim")
    with open(out / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + _DEADLINE_S
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                if line.startswith(("step ", "! ", "~ ", "evaluation at", "resilient:", "run ")):
                    console.print("  " + line.rstrip())
                if time.monotonic() > deadline:
                    raise ConfigError(f"{name} did not finish in {_DEADLINE_S:.0f} s; see {log.name}")
            return process.wait(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def _summary(run: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run / "summary.json").read_text()))
    except FileNotFoundError:
        raise ConfigError(f"{run.name} left no summary.json; see {run}.log") from None


def _rescued(summaries: dict[str, dict[str, Any]]) -> bool:
    losses = {name: s["eval_loss"] for name, s in summaries.items()}
    if summaries["guarded"]["status"] != "done" or losses["guarded"] is None or losses["undisturbed"] is None:
        return False
    if losses["unguarded"] is None:
        return True
    gap = {name: abs(loss - losses["undisturbed"]) for name, loss in losses.items()}
    return bool(gap["guarded"] < gap["unguarded"])


def _table(summaries: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="One seed, three runs")
    for column in ("run", "status", "final eval loss", "steps lost", "rollbacks", "skips", "named ranks"):
        table.add_column(column, justify="left" if column in ("run", "status") else "right", no_wrap=column == "run")
    for name, s in summaries.items():
        loss = "-" if s["eval_loss"] is None else f"{s['eval_loss']:.4f}"
        skips = s["skipped"] - s["rollbacks"]
        ranks = ", ".join(map(str, s["named_ranks"])) or "-"
        table.add_row(name, s["status"], loss, str(s["steps_lost"]), str(s["rollbacks"]), str(skips), ranks)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
