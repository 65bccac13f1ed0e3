"""CSV, TSV and other tables with a header line: Lightning's CSVLogger, pandas, wandb and TensorBoard exports, notebooks."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from typing import Any

from resilient.logs.columns import Columns
from resilient.logs.names import meaning_of
from resilient.logs.numbers import number
from resilient.logs.points import Points, note
from resilient.logs.rows import Remarks, Row

_DELIMITERS = "\t,;|"
_BOM = "\ufeff"
_MAX_HEADER = 200_000  # characters
_VALUE = re.compile(r"[:=]\s*[-+]?\d|\s\d+\.\d|\d:\s")  # a cell that says a value is no name
_TELLING = {"signal", "evaluation", "step"}


class TableParser:
    """Header first, then one record a line. A repeated header (a resumed run) is stepped over."""

    def __init__(self, delimiter: str = ",") -> None:
        self.format = {"\t": "TSV", " ": "table"}.get(delimiter, "CSV")
        self.remarks = Remarks(self.format)
        self._delimiter = delimiter
        self._columns = Columns(self.remarks)
        self._points = Points(self.remarks)
        self._header: list[str] | None = None
        self._ragged = 0

    def feed(self, line: str, number: int) -> list[Row]:
        line = line.replace("\0", "").strip("\r\n")
        if not line.strip() or (self._header is None and line.lstrip(_BOM)[:1] == "#"):
            return []
        cells = split(line, self._delimiter)
        if self._header is None:
            if header_of(line) is not None:
                self._header = [cell.strip() for cell in cells]
                self._header[0] = self._header[0].lstrip(_BOM)
            return []
        if not _is_record(cells, self._header):
            if header_of(line) == self._delimiter and len(cells) > 1:
                self._header = [cell.strip() for cell in cells]  # again, or with other columns, after a resume
            else:
                self._ragged += 1
            return []
        record: dict[str, Any] = {}
        for name, cell in zip(self._header, cells, strict=False):
            if cell and name not in record:
                record[name] = cell
        point = self._columns.point(record, number)
        return [] if point is None else self._points.add(point)

    def finish(self) -> list[Row]:
        if self._ragged:
            note(self.remarks, f"{self._ragged} lines are no records of the table (torn, or something else)")
            self._ragged = 0
        return self._points.finish()


def split(line: str, delimiter: str) -> list[str]:
    """The cells of one line; quotes are honoured."""
    if delimiter == " ":
        return line.split()
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True))
    except (csv.Error, StopIteration):
        return line.split(delimiter)


def is_record(line: str, header: str, delimiter: str) -> bool:
    """True if `line` is a record under `header`."""
    return _is_record(split(line, delimiter), split(header.strip("\r\n"), delimiter))


def _is_record(cells: Sequence[str], header: Sequence[str]) -> bool:
    """As many cells as columns (a trailing delimiter aside), and a number among them."""
    if len(cells) > len(header) + 1 or len(cells) < min(len(header), 2):
        return False
    if len(cells) < len(header) and not (len(header) - len(cells) == 1 and header[-1] == ""):
        return False  # torn
    return any(number(cell) is not None for cell in cells)


def header_of(line: str) -> str | None:
    """The delimiter if the line is the header of a table that has a step or a known signal, else None.

    A header has at least two names and no number, and nothing of it is a sentence or code."""
    if len(line) > _MAX_HEADER or not line.strip():
        return None
    line = line.lstrip(_BOM).strip("\r\n")
    for delimiter in _DELIMITERS:
        if delimiter in line:
            cells = [cell.strip() for cell in split(line, delimiter)]
            return delimiter if _is_header(cells) else None
    cells = line.split()
    return " " if 2 <= len(cells) <= 64 and _is_header(cells) and all(meaning_of(c).kind in _TELLING | {"epoch"} for c in cells) else None  # fmt: skip


def _is_header(cells: list[str]) -> bool:
    named = [cell for cell in cells if cell]
    if len(cells) < 2 or not named or any(number(cell) is not None for cell in named):
        return False
    if any(len(cell) > 200 or cell[-1:] in "{}();=:" or cell[:1] in "{[(" or _VALUE.search(cell) for cell in named):
        return False
    kinds = [meaning_of(cell).kind for cell in named]
    telling = sum(kind in _TELLING for kind in kinds)
    if any(kind in ("signal", "evaluation") for kind in kinds):
        return telling >= 2 or len(named) <= 3 or telling * 8 >= len(named)
    return telling > 0 and any("loss" in cell.lower() or cell in ("Value", "value") for cell in named)
