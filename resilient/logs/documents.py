"""JSON documents, which have to be parsed whole: trainer_state.json, golden values, lists of records, lists by column."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from resilient.logs.columns import Columns
from resilient.logs.numbers import count, number
from resilient.logs.points import Points, note
from resilient.logs.rows import Remarks, Row

_HISTORIES = ("log_history", "history", "logs", "metrics", "records", "data", "steps", "train", "training", "results")


def load(text: str, remarks: Remarks) -> Any:
    """The document, or what can be saved of one that is cut off. None if there is nothing."""
    try:
        return json.loads(text)
    except RecursionError:
        return None
    except ValueError as error:
        records = _salvage(text)
        if records:
            note(
                remarks,
                f"the JSON is damaged or cut off ({error}): the {len(records)} records that are whole were read",
            )
        return records


def _salvage(text: str) -> list[dict[str, Any]]:
    """Whole objects of the first list of objects."""
    decoder, records = json.JSONDecoder(), []
    position = text.find("[", max(text.find('"log_history"'), 0)) + 1
    while 0 < position < len(text):
        start = text.find("{", position)
        if start < 0 or text[position:start].strip(" \t\r\n,"):
            break
        try:
            record, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            break
        records.append(record)
    return records


def document_rows(document: Any, remarks: Remarks) -> Iterator[Row]:
    """Rows of a parsed document. Nothing if it is of no kind that is known."""
    if isinstance(document, dict):
        history = document.get("log_history")
        if isinstance(history, list):
            remarks.format = "Hugging Face trainer_state.json"
            yield from _records(history, remarks)
            return
        golden = _golden(document, remarks)
        if golden:
            remarks.format = "Megatron golden values"
            yield from _records(golden, remarks)
            return
        columns = {k: v for k, v in document.items() if isinstance(v, list) and v and number(v[-1]) is not None}
        if any("loss" in str(key).lower() for key in columns):
            remarks.format = "JSON, a list for each column"
            yield from _records(_by_column(columns), remarks)
            return
        by_step = [(count(key), value) for key, value in document.items()]
        if by_step and all(step is not None and isinstance(value, dict) for step, value in by_step):
            remarks.format = "JSON, an object for each step"
            yield from _records(({"step": step[0], **value} for step, value in by_step if step), remarks)
            return
        for key in _HISTORIES:
            inner = document.get(key)
            if isinstance(inner, dict) or (isinstance(inner, list) and inner and isinstance(inner[0], dict)):
                found = list(document_rows(inner, remarks))
                if found:
                    yield from found
                    return
        remarks.format = remarks.format or "JSON"
        yield from _records([document], remarks)
    elif isinstance(document, list):
        if document and all(isinstance(row, list) and len(row) == 3 for row in document):  # TensorBoard's JSON download
            document = [{"step": row[1], "Value": row[2]} for row in document]
        remarks.format = remarks.format or "JSON, a list of records"
        yield from _records(document, remarks)


def _records(records: Iterable[Any], remarks: Remarks) -> Iterator[Row]:
    columns, points, nulls = Columns(remarks), Points(remarks), 0
    for line, record in enumerate(records, 1):
        if not isinstance(record, dict):
            continue
        nulls += "loss" in record and record["loss"] is None
        point = columns.point(record, line)
        if point is not None:
            yield from points.add(point)
    if nulls:
        note(remarks, f"loss is null in {nulls} records: not taken as data")
    yield from points.finish()


def _by_column(columns: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for i in range(max(len(column) for column in columns.values())):
        yield {name: column[i] for name, column in columns.items() if i < len(column)}


def _golden(document: Mapping[str, Any], remarks: Remarks) -> list[dict[str, Any]]:
    """{metric: {start_step, end_step, step_interval, values}} as records by step.

    values: {step: value}, or in older files a list. The text "nan" stands for a step without a value."""
    series = {k: v for k, v in document.items() if isinstance(v, dict) and isinstance(v.get("values"), dict | list)}
    if not series or len(series) * 2 < len(document):
        return []
    records: dict[int, dict[str, Any]] = {}
    gaps = 0
    for name, described in series.items():
        values = described["values"]
        if isinstance(values, list):
            start, every = count(described.get("start_step")), count(described.get("step_interval"))
            first, step = (start[0] if start else 0), (every[0] if every else 1)
            pairs: Iterable[tuple[Any, Any]] = ((first + i * step, value) for i, value in enumerate(values))
        else:
            pairs = values.items()
        for key, value in pairs:
            at = count(key)
            if at is None:
                continue
            if isinstance(value, str) and number(value) != number(value):
                gaps += 1
                continue
            records.setdefault(at[0], {"step": at[0]})[name] = value
    if gaps:
        note(remarks, f'{gaps} values are the text "nan", which stands for a step without a value: left out')
    return [records[step] for step in sorted(records)]
