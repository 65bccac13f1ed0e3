"""One JSON object a line: JSONL of any logger with common keys, and our own steps.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from resilient.logs.columns import Columns
from resilient.logs.points import Points, note
from resilient.logs.rows import Remarks, Row


class RecordParser:
    """JSONL. Lines that are no object (torn, or console output in between) are stepped over and counted."""

    def __init__(self) -> None:
        self.format = "JSONL"
        self.remarks = Remarks(self.format)
        self._columns = Columns(self.remarks)
        self._points = Points(self.remarks)
        self._torn = 0

    def feed(self, line: str, number: int) -> list[Row]:
        record = parse_object(line)
        if record is None:
            self._torn += bool(line.strip("\0 \t\r\n"))
            return []
        point = self._columns.point(record, number)
        return [] if point is None else self._points.add(point)

    def finish(self) -> list[Row]:
        if self._torn:
            note(self.remarks, f"{self._torn} lines are no JSON objects (torn, or something else)")
            self._torn = 0
        return self._points.finish()


_NO_SIGNAL = frozenset({"step", "attempt", "applied", "time", "position", "budget_left", "stability"})


class StepsParser:
    """Our own steps.jsonl. Every number is data as it stands: these are the values that the live detectors saw.

    NaN and Inf are null in the file and named under `nonfinite`; both become NaN. `signal.NAME` is NAME, where a reserved key
    was in its way. Keys that are no signals (who did what when) are left out, `generation` is kept."""

    def __init__(self) -> None:
        self.format = "resilient steps.jsonl"
        self.remarks = Remarks(self.format)
        self._torn = 0

    def feed(self, line: str, number: int) -> list[Row]:
        record = parse_object(line)
        if record is None or not _is_step(record):
            self._torn += bool(line.strip("\0 \t\r\n"))
            return []
        values: dict[str, float] = {}
        lost = record.get("nonfinite")
        lost = {name for name in lost if isinstance(name, str)} if isinstance(lost, list) else set()
        for key, value in record.items():
            name = key[7:] if key.startswith("signal.") and key[7:] not in values else key
            if key in _NO_SIGNAL:
                continue
            if value is None and key in lost:
                values[name] = math.nan
            elif isinstance(value, int | float) and not isinstance(value, bool):
                try:
                    values[name] = float(value)
                except OverflowError:
                    values[name] = math.inf
        return [
            Row(
                int(record["step"]),
                values,
                applied=record.get("applied") is not False,
                rolled_back=record.get("action") == "rollback",
                attempt=int(record["attempt"]),
                line=number,
            )
        ]

    def finish(self) -> list[Row]:
        if self._torn:
            note(self.remarks, f"{self._torn} torn lines were stepped over")
            self._torn = 0
        return []


def parse_object(line: str) -> dict[str, Any] | None:
    """The JSON object in a line, or None."""
    line = line.strip("\0\ufeff \t\r\n")
    if line[:1] != "{":
        return None
    try:
        record = json.loads(line.rstrip(","))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_step(record: Mapping[str, Any]) -> bool:
    return all(type(record.get(key)) is int and abs(record[key]) < 2**53 for key in ("step", "attempt"))


def is_own(record: Mapping[str, Any]) -> bool:
    """True if the object is a line of our own steps.jsonl."""
    return _is_step(record) and isinstance(record.get("applied"), bool)
