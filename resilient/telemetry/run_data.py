"""A run as it can be read from its folder by anyone, finished or not: for the report and the comparison."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient.errors import ConfigError
from resilient.telemetry.files import read_json
from resilient.telemetry.journal import read_journal, read_steps
from resilient.telemetry.run_directory import is_live, read_config
from resilient.telemetry.summary import Summary

MARKS = ("generation.json", "summary.json", "steps.jsonl", "journal.jsonl")
"""Any of these makes a folder a run."""


@dataclass(frozen=True)
class RunData:
    """Everything read from one run directory.

    summary: summary.json of the newest generation, or the same rebuilt from the journals when a run is still going
    (status `running`) or ended without a word (status `failed`). steps, journal: in the order they were written."""

    path: Path
    run_id: str
    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    journal: list[dict[str, Any]]

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return [record for record in self.journal if record["kind"] == "incident"]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """(step, loss) of every evaluation, in the order they were made."""
        found = [record for record in self.journal if record["kind"] == "evaluation"]
        return [(record["step"], self.value(record, "loss")) for record in found if record.get("step") is not None]

    def value(self, record: dict[str, Any], key: str) -> float:
        """A number of a line; NaN where the file says null or nothing."""
        found = record.get(key)
        return float(found) if isinstance(found, int | float) else math.nan


def load_run(path: str | os.PathLike[str]) -> RunData:
    """Read a run directory. Raises ConfigError if `path` is none."""
    folder = Path(path).expanduser().absolute()
    if not any((folder / name).exists() for name in MARKS):
        raise ConfigError(f"{folder} is not a run directory (none of {', '.join(MARKS)})")
    try:
        config = read_config(folder)
    except ConfigError:
        config = {}  # a damaged run is still shown
    return RunData(
        path=folder,
        run_id=folder.name,
        config=config,
        environment=read_json(folder / "env.json") or {},
        summary=load_summary(folder),
        steps=read_steps(folder / "steps.jsonl"),
        journal=read_journal(folder / "journal.jsonl"),
    )


def load_summary(folder: Path) -> dict[str, Any]:
    """summary.json, or what it would say now if the newest start has not written it."""
    summary = read_json(folder / "summary.json")
    if summary is None:
        summary = Summary.replay(folder).as_dict()
        if is_live(folder):
            summary["status"] = "running"
    return summary


def find_runs(path: Path) -> Iterator[Path]:
    """Run directories at or below `path`, in name order; a run's own folders are not searched."""
    for folder, names, files in os.walk(path):
        if any(name in files for name in MARKS):
            names.clear()
            yield Path(folder)
        names[:] = sorted(name for name in names if not name.startswith("."))
