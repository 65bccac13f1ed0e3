"""Any training log, opened: the format is guessed from the content, never from the name.

>>> log = open_log("run.out")
>>> for row in log.rows(): ...
>>> log.remarks.format
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from resilient.errors import UnreadableLog
from resilient.logs.console import ConsoleParser
from resilient.logs.documents import document_rows, load
from resilient.logs.events import event_rows, is_event_file
from resilient.logs.records import RecordParser, StepsParser, is_own, parse_object
from resilient.logs.rows import LineParser, Log, Remarks, Row
from resilient.logs.tables import TableParser, header_of, is_record
from resilient.logs.text import head_of, is_binary, lines_of

FORMATS = ("steps", "jsonl", "csv", "tsv", "table", "console", "json", "tensorboard")
"""What `format` may be: our own steps.jsonl, one JSON object a line, tables, program output, a JSON document (Hugging Face
trainer_state.json, golden values, lists), event files."""

_PARSERS: dict[str, Callable[[], LineParser]] = {
    "steps": StepsParser,
    "jsonl": RecordParser,
    "csv": TableParser,
    "tsv": lambda: TableParser("\t"),
    "table": lambda: TableParser(" "),
    "console": ConsoleParser,
}
_MAX_DOCUMENT = 2 << 30  # bytes
_SAMPLE = 400  # lines
_RUN_MARKS = ("steps.jsonl", "generation.json", "journal.jsonl")


def open_log(path: str | Path, format: str | None = None) -> Log:
    """The log at `path`: a file, a run directory of ours, a folder of TensorBoard event files, or the output folder of a
    Hugging Face Trainer or Lightning's CSVLogger. Text may be gzipped.

    format: one of FORMATS, to skip guessing. Raises UnreadableLog if there is nothing, or no point in it."""
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise UnreadableLog(f"{path}: {format!r} is no log format; one of {', '.join(FORMATS)}")
    try:
        try:
            return _Opened(path, *_source(path, format))
        except UnreadableLog:
            if format is not None or not path.is_file() or is_binary(head_of(path)):
                raise
            with contextlib.suppress(UnreadableLog):  # perhaps its first lines only looked like something else
                return _Opened(path, *_source(path, "console"))
            raise
    except OSError as error:
        raise UnreadableLog(f"{path}: cannot be read: {error.strerror or error}") from error


def line_parser(sample: Sequence[str]) -> LineParser:
    """A parser for a text format, picked from its first lines (which are not consumed: feed them again)."""
    lines = [line.strip("\0\ufeff \t\r\n") for line in sample[:_SAMPLE]]
    lines = [line for line in lines if line and line[0] != "#"]
    objects = [record for record in map(parse_object, lines) if record is not None]
    if objects and len(objects) * 2 >= min(len(lines), 8):
        return StepsParser() if any(map(is_own, objects)) else RecordParser()
    if lines:
        header = next(line for line in sample if line.strip("\0\ufeff \t\r\n") == lines[0])
        delimiter = header_of(header)
        if delimiter is not None and (
            len(lines) < 2 or any(is_record(line, header, delimiter) for line in lines[1:20])
        ):
            return TableParser(delimiter)
    return ConsoleParser()


class _Opened:
    """An opened log. The first row was read already: it is known that there is one."""

    def __init__(self, path: Path, remarks: Remarks, rows: Iterator[Row]) -> None:
        self.path = str(path)
        self.remarks = remarks
        try:
            first = next(rows, None)
        except OSError as error:
            raise UnreadableLog(f"{path}: cannot be read: {error.strerror or error}") from error
        if first is None:
            raise UnreadableLog(_nothing(path, remarks))
        self._rows = itertools.chain((first,), rows)

    def rows(self) -> Iterator[Row]:
        """Every row, once. Raises UnreadableLog if the file goes away meanwhile."""
        try:
            yield from self._rows
        except OSError as error:
            raise UnreadableLog(f"{self.path}: cannot be read further: {error.strerror or error}") from error


def _nothing(path: Path, remarks: Remarks) -> str:
    unread = [f"{name}: {why}" for name, why in remarks.unread.items()]
    said = "; ".join([*unread, *remarks.notes])
    return (
        f"{path}: no training step was found in it (read as {remarks.format or 'text'}{': ' + said if said else ''}). It needs "
        "lines with a step and a loss: output of a training program, a CSV or TSV with a header, JSON lines, a "
        "trainer_state.json, TensorBoard event files, or a run directory"
    )


def _source(path: Path, format: str | None) -> tuple[Remarks, Iterator[Row]]:
    if path.is_dir():
        return _folder(path, format)
    if not path.exists():
        raise UnreadableLog(
            f"{path}: no such file; give the file that the training program writes, or its run directory"
        )
    if not path.is_file():
        raise UnreadableLog(f"{path}: is no regular file; write its content to a file first")
    head = head_of(path)
    if not head:
        raise UnreadableLog(f"{path}: is empty; nothing has been logged yet, or it is the wrong file")
    if format == "tensorboard" or (format is None and is_event_file(head)):
        remarks = Remarks()
        return remarks, event_rows([path], remarks)
    if is_binary(head):
        raise UnreadableLog(f"{path}: is binary and no TensorBoard event file; give a log, not a checkpoint")
    remarks = Remarks()
    if format == "json" or (format is None and is_document(head)):
        return remarks, _document(path, remarks)
    return _text(path, format)


def _text(path: Path, format: str | None) -> tuple[Remarks, Iterator[Row]]:
    encoded = Remarks()
    lines = lines_of(path, encoded)
    if format is None:
        sample = list(itertools.islice(lines, _SAMPLE))
        lines = itertools.chain(sample, lines)
        parser = line_parser(sample)
    else:
        parser = _PARSERS[format]()
    encoded.format = parser.remarks.format
    parser.remarks.notes += encoded.notes
    encoded.notes = parser.remarks.notes  # one list: what is found on the way belongs to the same remarks
    return parser.remarks, _parsed(parser, lines)


def _parsed(parser: LineParser, lines: Iterator[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        yield from parser.feed(line, number)
    yield from parser.finish()


# -- JSON documents ---------------------------------------------------------------------------------------------


def is_document(head: bytes, *, growing: bool = False) -> bool:
    """True if this is one JSON value over many lines, or one object that holds the whole log in its only line.

    head: the first bytes of the file, see head_of. growing: the writer may still be at work: an object in the only line
    may be the first of many records, whole or not."""
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n\0")
    if text[:1] not in ("{", "["):
        return False
    first, _, rest = text.partition("\n")
    first = first.strip()
    if first in ("{", "["):
        return True
    if text[:1] == "[":
        return re.match(r"\[\s*[\[{]", text) is not None
    if parse_object(first) is not None and first[-1:] == "}":
        return not growing and not rest.strip() and _holds_log(first)
    if growing and not rest:
        return False
    if len(first) > 60_000 or not rest:  # one object longer than what was read
        return re.search(r'"(?:log_history|start_step|values)"\s*:', first) is not None or re.match(r'\{\s*"[^"]*"\s*:\s*[\[{]', first) is not None  # fmt: skip
    return re.match(r'\{\s*"[^"]*"\s*:\s*(?:[\[{]|[^,{}\[\]]*,?)\s*$', first) is not None


def _holds_log(line: str) -> bool:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and any(isinstance(value, list | dict) and value for value in document.values())


def _document(path: Path, remarks: Remarks) -> Iterator[Row]:
    if path.stat().st_size > _MAX_DOCUMENT:
        raise UnreadableLog(f"{path}: a JSON document of more than {_MAX_DOCUMENT >> 30} GiB; convert it to JSON lines")
    text = "\n".join(lines_of(path, remarks)).strip("\ufeff\0 \t\r\n")
    document = load(text, remarks)
    del text
    yield from document_rows(document, remarks)


# -- folders ----------------------------------------------------------------------------------------------------


def _folder(path: Path, format: str | None) -> tuple[Remarks, Iterator[Row]]:
    """What a folder holds: our run, event files, or the one file of a known kind."""
    if any((path / mark).exists() for mark in _RUN_MARKS):
        steps = path / "steps.jsonl"
        if not steps.exists() or not steps.stat().st_size:
            raise UnreadableLog(f"{path}: a run in which no step has been logged yet; try again later")
        return _text(steps, "steps")
    events, note = _event_files(path)
    state = newest_state(path)
    if events and format in (None, "tensorboard"):
        remarks = Remarks(notes=[note] if note else [])
        return remarks, event_rows(events, remarks)
    if state is not None:
        return _source(state, format)
    for name in (
        "metrics.csv",
        "trainer_log.jsonl",
        "logging.jsonl",
        "metrics.json",
        "metrics.jsonl",
        "log.txt",
        "main.log",
    ):
        if (path / name).is_file():
            return _source(path / name, format)
    raise UnreadableLog(
        f"{path}: is a folder, but neither a run directory (no steps.jsonl) nor one with TensorBoard event files or a "
        "trainer_state.json; give the log file itself"
    )


def _event_files(path: Path) -> tuple[list[Path], str]:
    """Event files of one run in the order they were begun, and a remark if there are other runs beside it."""
    own = sorted(file for file in path.glob("*tfevents*") if file.is_file())
    if own:
        return own, ""
    folders: dict[Path, int] = {}
    for pattern in ("*/*tfevents*", "*/*/*tfevents*", "*/*/*/*tfevents*"):
        for file in path.glob(pattern):
            if file.is_file():
                folders[file.parent] = folders.get(file.parent, 0) + file.stat().st_size
    if not folders:
        return [], ""
    chosen = max(sorted(folders), key=lambda folder: folders[folder])
    note = f"{len(folders)} folders with event files: the largest, {chosen.relative_to(path)}, was read" if len(folders) > 1 else ""  # fmt: skip
    return sorted(chosen.glob("*tfevents*")), note


def newest_state(path: Path) -> Path | None:
    """The trainer_state.json of a Trainer's output folder or of its newest checkpoint."""
    if (path / "trainer_state.json").is_file():
        return path / "trainer_state.json"
    numbered = []
    for state in path.glob("checkpoint-*/trainer_state.json"):
        number = state.parent.name.removeprefix("checkpoint-")
        if number.isdigit():
            numbered.append((int(number), state))
    return max(numbered)[1] if numbered else None
