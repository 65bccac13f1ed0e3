"""Several runs side by side: a sweep over defensive configurations, or a run and its twin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from resilient.errors import ConfigError
from resilient.telemetry import html
from resilient.telemetry.files import flatten, read_json
from resilient.telemetry.messages import duration, number
from resilient.telemetry.report import gap
from resilient.telemetry.run_data import MARKS, find_runs, load_run, load_summary
from resilient.telemetry.run_directory import ABSENT, START_KEYS, read_config

FIGURES = ("steps", "eval_loss", "steps_lost", "skipped", "rollbacks")
_VAGUE = {
    "name",
    "kind",
    "mode",
    "steps",
    "step",
    "every",
    "keep",
    "budget",
    "floor",
    "act",
    "warn",
}  # need their group
_CURVES = 12  # more lines than this cannot be told apart
_SETTINGS = 6  # columns for settings that fit beside the figures


def collect(paths: Sequence[str]) -> list[dict[str, Any]]:
    """One row per run at or below `paths`, a run found twice once. A path without any run becomes a row `missing`, and
    so does a job of a sweep that ended before it had a run directory.

    Row: run, path, status, config (flat), the keys of FIGURES, incidents (count), named_ranks, wall_s."""
    rows: dict[Path, dict[str, Any]] = {}
    for path in paths:
        folder = Path(path).expanduser().absolute()
        found = list(find_runs(folder))
        for run in found:
            rows.setdefault(run, read_row(run))
        for lost in _jobs_without_run(folder):
            found.append(lost)
            rows.setdefault(lost, _missing(lost))
        if not found:
            rows.setdefault(folder, _missing(folder))
    return list(rows.values())


def read_row(folder: Path) -> dict[str, Any]:
    """The row of one run directory, finished or not."""
    summary = load_summary(folder)
    try:
        config = flatten(read_config(folder))
    except ConfigError:
        config = {}
    return {
        "run": folder.name,
        "path": str(folder),
        "status": summary.get("status") or "failed",
        "config": config,
        **{key: summary.get(key) for key in FIGURES},
        "incidents": len(summary.get("incidents") or ()),
        "named_ranks": summary.get("named_ranks") or [],
        "wall_s": summary.get("wall_s"),
    }


def compare_runs(paths: Sequence[str], baseline: str | None = None) -> dict[str, Any]:
    """The comparison as plain JSON: `runs` sorted by evaluation loss (those without one last), `baseline` (its run id or
    null), `differing_keys`, and of those the `shown_keys` that say it all in a table. Each run has `settings` (the differing keys only) and `gap` to the baseline.

    Raises ConfigError when no run can be read at all, or the baseline cannot."""
    rows = collect(paths)
    if all(row["status"] == "missing" for row in rows):
        raise ConfigError(f"no run directory at or below {', '.join(paths)}")
    reference = None
    if baseline is not None:
        folder = Path(baseline).expanduser().absolute()
        if not any((folder / name).exists() for name in MARKS):
            raise ConfigError(f"--baseline: {folder} is not a run directory")
        rows = [row for row in rows if row["path"] != str(folder)]
        reference = read_row(folder)
        rows.append(reference)
    keys = differing_keys(row["config"] for row in rows if row["config"])
    runs = []
    for row in sorted(rows, key=lambda r: (_loss(r), r["run"])):
        config = row.pop("config")
        row["settings"] = {key: config.get(key, ABSENT) for key in keys} if config else {}
        row["gap"] = None
        if reference is not None and math.isfinite(_loss(row)) and math.isfinite(_loss(reference)):
            row["gap"] = row["eval_loss"] - reference["eval_loss"]
        runs.append(row)
    return {
        "baseline": reference["run"] if reference else None,
        "differing_keys": keys,
        "shown_keys": telling_keys(keys, [row["settings"] for row in runs if row["settings"]]),
        "runs": runs,
    }


def differing_keys(configs: Iterable[dict[str, Any]]) -> list[str]:
    """Keys whose value is not the same in all flat configs, in the order in which they first appear."""
    known = list(configs)
    keys = dict.fromkeys(key for config in known for key in config if key not in START_KEYS)
    return [key for key in keys if any(c.get(key, ABSENT) != known[0].get(key, ABSENT) for c in known[1:])]


def telling_keys(keys: Sequence[str], settings: Sequence[dict[str, Any]]) -> list[str]:
    """`keys` without those that follow from the name of their group: where `fault.name` differs, `fault.step` is told
    only if two runs have the same fault at different steps."""
    kept = []
    for key in keys:
        name = f"{key.partition('.')[0]}.name"
        values: dict[str, set[str]] = {}
        for row in settings:
            values.setdefault(str(row.get(name)), set()).add(str(row.get(key)))
        if name == key or name not in keys or any(len(found) > 1 for found in values.values()):
            kept.append(key)
    return kept


def text_table(comparison: dict[str, Any]) -> Table:
    """The comparison for a terminal. Of many settings it shows the first few and names the rest below."""
    rest = comparison["shown_keys"][_SETTINGS:]
    comparison = {**comparison, "shown_keys": comparison["shown_keys"][:_SETTINGS]}
    caption = f"also different: {', '.join(rest)}" if rest else None
    table = Table(caption=caption, caption_justify="left", header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True)
    for name in _names(comparison["shown_keys"]):
        table.add_column(name, overflow="fold")
    for name in _columns(comparison):
        table.add_column(name, justify="left" if name == "status" else "right", no_wrap=True)
    styles = {"done": "green", "running": "cyan", "preempted": "yellow"}
    for row in comparison["runs"]:
        cells = _cells(row, comparison)
        cells[_status_at(comparison)] = Text(row["status"], style=styles.get(row["status"], "bold red"))
        table.add_row(*cells)
    return table


def html_page(comparison: dict[str, Any]) -> str:
    """The comparison as one self-contained page, with the loss curves of the first runs."""
    from resilient.telemetry.figure import loss_figure, svg

    runs = comparison["runs"]
    readable = [load_run(row["path"]) for row in runs if row["status"] != "missing"]
    baseline = next((run for run in readable if run.run_id == comparison["baseline"]), None)
    curves = [run for run in readable if run.steps or run.evaluations][:_CURVES]
    head = ["run", *_names(comparison["shown_keys"]), *_columns(comparison)]
    rows = []
    for row in runs:
        cells = [escape(str(cell)) for cell in _cells(row, comparison)]
        status = _status_at(comparison)
        cells[status] = f'<span class="chip {escape(row["status"])}">{escape(row["status"])}</span>'
        rows.append(cells)
    best = 0 if runs and math.isfinite(_loss(runs[0])) else None
    table = html.table(head, rows, numeric=range(_status_at(comparison) + 1, len(head)), best=best)
    subtitle = f"baseline: {comparison['baseline']}" if comparison["baseline"] else "sorted by evaluation loss"
    body = [html.header(f"{len(runs)} runs compared", subtitle), html.section("Runs", table)]
    if curves:
        body.append(html.section("Loss, as it stands in the end", svg(loss_figure(curves, baseline))))
    return html.page("resilient compare", body)


def _names(keys: Sequence[str]) -> list[str]:
    """The last part of a key where that says enough, its last two parts otherwise."""
    short = [key.rpartition(".")[2] for key in keys]
    clear = [short.count(name) == 1 and name not in _VAGUE for name in short]
    return [
        name if alone else ".".join(key.split(".")[-2:]) for name, key, alone in zip(short, keys, clear, strict=True)
    ]


def _columns(comparison: dict[str, Any]) -> list[str]:
    gaps = ["gap"] if comparison["baseline"] else []
    return ["status", "steps", "eval loss", *gaps, "lost", "skipped", "rollbacks", "incidents", "wall time"]


def _status_at(comparison: dict[str, Any]) -> int:
    return 1 + len(comparison["shown_keys"])


def _cells(row: dict[str, Any], comparison: dict[str, Any]) -> list[Any]:
    settings = [_setting(row["settings"].get(key, "-")) for key in comparison["shown_keys"]]
    gaps = [gap(row["gap"], 0.0)] if comparison["baseline"] else []
    name = f"{row['run']} *" if row["run"] == comparison["baseline"] else row["run"]
    return [
        name,
        *settings,
        row["status"],
        number(row["steps"]),
        number(row["eval_loss"], 5),
        *gaps,
        number(row["steps_lost"]),
        number(row["skipped"]),
        number(row["rollbacks"]),
        number(row["incidents"]),
        duration(row["wall_s"]),
    ]


def _setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _loss(row: dict[str, Any]) -> float:
    value = row.get("eval_loss")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.inf


def _jobs_without_run(folder: Path) -> list[Path]:
    """Run directories that a sweep's jobs/<num>/result.json names and that do not exist."""
    results = [read_json(path) for path in sorted(folder.glob("jobs/*/result.json"))]
    wanted = [
        folder / Path(str(result["run_directory"])).name for result in results if result and "run_directory" in result
    ]
    return [path for path in wanted if not path.exists()]


def _missing(folder: Path) -> dict[str, Any]:
    return {
        "run": folder.name,
        "path": str(folder),
        "status": "missing",
        "config": {},
        **dict.fromkeys(FIGURES),
        "incidents": None,
        "named_ranks": [],
        "wall_s": None,
    }
