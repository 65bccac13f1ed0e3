"""journal.jsonl (events) and steps.jsonl (one line an attempt): written as they happen, only ever appended to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilient.coordinator.events import StepReport
from resilient.telemetry.files import TelemetryError, json_line

STEP_FIELDS = (
    "step",
    "attempt",
    "applied",
    "action",
    "loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "tokens",
    "time_s",
    "level",
    "stability",
    "drivers",
    "budget_left",
    "position",
)
"""Keys of every line of steps.jsonl, besides `time` (unix seconds), `generation`, `ranks` and the named signals."""

_RESERVED = {*STEP_FIELDS, "time", "generation", "ranks", "nonfinite"}


class JsonlWriter:
    """Appends one JSON object a line: one write each, no buffer, so a watcher sees it and a kill loses at most one.

    A torn last line of an earlier start is left as it is and closed by a newline; readers step over it.
    Every OSError surfaces as TelemetryError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._torn = _ends_torn(self._descriptor)
        except OSError as error:
            raise TelemetryError(f"cannot open {path}: {error.strerror or error}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`. Non-finite numbers become null and are named in a `nonfinite` list."""
        if self._descriptor is None:
            raise TelemetryError(f"{self.path} is closed")
        data = (("\n" if self._torn else "") + json_line(record) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
                self._torn = bool(data)
        except OSError as error:
            raise TelemetryError(f"cannot write {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def step_record(report: StepReport) -> dict[str, Any]:
    """A StepReport as a flat line: STEP_FIELDS, the named signals beside them, and `ranks` when there is any."""
    record: dict[str, Any] = {name: getattr(report, name) for name in STEP_FIELDS}
    for name, value in report.signals.items():
        record[f"signal.{name}" if name in _RESERVED else name] = value
    if report.ranks:
        record["ranks"] = report.ranks
    return record


def read_steps(path: Path, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Lines of a steps.jsonl in the order written; [] if there is no file. Torn lines are stepped over.

    last_bytes: only those of the end of the file."""
    return [record for record in _read(path, last_bytes) if "step" in record and "attempt" in record]


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Lines of a journal.jsonl in the order written; [] if there is no file. Torn lines are stepped over."""
    return [record for record in _read(path) if "kind" in record]


def _read(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            if last_bytes is not None:
                file.seek(max(os.fstat(file.fileno()).st_size - last_bytes, 0))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    records = []
    for line in text.split("\n"):
        try:
            record = json.loads(line) if line.strip() else None
        except ValueError:  # a write cut short by a kill or a full disk
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _ends_torn(descriptor: int) -> bool:
    """True if the file does not end in a newline. A device (such as /dev/full) has no size and is never torn."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
