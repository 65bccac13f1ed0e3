"""TensorBoard event files, read without TensorBoard: TFRecord framing and the few protobuf fields of a scalar.

A record is: length (uint64, little endian), masked CRC-32C of the length, the bytes, masked CRC-32C of the bytes. The first
checksum is verified (it is what keeps a damaged file from being read as noise), the second is not: it costs a microsecond a
byte in Python. Formats: tensorflow/core/lib/io/record_writer.h, core/util/event.proto, core/framework/summary.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from resilient.logs.columns import Columns
from resilient.logs.points import Points, note
from resilient.logs.rows import Remarks, Row

_MAX_RECORD = 1 << 28
_MASK = 0xA282EAD8
_SIZES = {1: ("<f", 4), 2: ("<d", 8), 3: ("<i", 4), 9: ("<q", 8), 19: ("<e", 2), 14: ("", 2)}  # DataType -> scalar


def _crc_table() -> list[int]:
    table = []
    for i in range(256):
        for _ in range(8):
            i = (i >> 1) ^ (0x82F63B78 if i & 1 else 0)
        table.append(i)
    return table


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """Masked CRC-32C, as TFRecord files store it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


def is_event_file(head: bytes) -> bool:
    """True if the first bytes of a file are a record's header."""
    return len(head) >= 12 and masked_crc(head[:8]) == struct.unpack("<I", head[8:12])[0]


def event_rows(files: list[Path], remarks: Remarks) -> Iterator[Row]:
    """Rows of event files, one after the other. All scalars of a step that lie together make one row."""
    remarks.format = "TensorBoard event files" if len(files) > 1 else "TensorBoard event file"
    columns, points = Columns(remarks), Points(remarks, hold=True)
    for path in files:
        for index, (step, scalars) in enumerate(_events(path, remarks), 1):
            for tag, value in scalars:
                point = columns.point({tag: value}, index)
                if point is not None and point.step is None:
                    point.step = step
                    if tag.lower().startswith(("train/samples/", "train/eigenvalues/")):
                        note(remarks, "DeepSpeed counts samples in these files: steps are samples")
                    yield from points.add(point)
        yield from points.flush()
    yield from points.finish()


def _events(path: Path, remarks: Remarks) -> Iterator[tuple[int, list[tuple[str, float]]]]:
    """(step, scalars) of every event that has any."""
    with open(path, "rb") as file:
        index = 0
        while True:
            head = file.read(12)
            index += 1
            if len(head) < 12:
                if head:
                    note(remarks, f"{path.name}: record {index} is torn; read up to there")
                return
            length = struct.unpack("<Q", head[:8])[0]
            if not is_event_file(head) or length > _MAX_RECORD:
                note(remarks, f"{path.name}: record {index} is damaged; read up to there")
                return
            data = file.read(length + 4)
            if len(data) < length + 4:
                note(remarks, f"{path.name}: record {index} is torn; read up to there")
                return
            try:
                event = _event(data[:length])
            except (IndexError, struct.error, ValueError, OverflowError):
                note(remarks, f"{path.name}: records that are no events were left out")
                continue
            if event[1]:
                yield event


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(field, wire type, value) of a protobuf message. Raises IndexError or ValueError on nonsense."""
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield field, wire, value
            continue
        if wire == 1:
            size = 8
        elif wire == 5:
            size = 4
        elif wire == 2:
            size, position = _varint(data, position)
        else:
            raise ValueError(f"wire type {wire}")
        if position + size > end:
            raise IndexError("past the end")
        yield field, wire, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")


def _event(data: bytes) -> tuple[int, list[tuple[str, float]]]:
    step, scalars = 0, []
    for field, wire, value in _fields(data):
        if field == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >= 1 << 63 else value
        elif field == 5 and wire == 2:
            for inner, kind, summary in _fields(value):  # type: ignore[arg-type]
                if inner == 1 and kind == 2:
                    scalar = _scalar(summary)  # type: ignore[arg-type]
                    if scalar is not None:
                        scalars.append(scalar)
    return step, scalars


def _scalar(data: bytes) -> tuple[str, float] | None:
    """(tag, value) of a Summary.Value, or None if it is no scalar."""
    tag, found = "", None
    for field, wire, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif field == 2 and wire == 5:
            found = struct.unpack("<f", value)[0]  # type: ignore[arg-type]
        elif field == 8 and wire == 2:
            found = _tensor(value)  # type: ignore[arg-type]
    return None if found is None or not tag else (tag, float(found))


def _tensor(data: bytes) -> float | None:
    """The value of a TensorProto that holds one number."""
    dtype, values = 0, []
    for field, wire, value in _fields(data):
        if field == 1 and isinstance(value, int):
            dtype = value
        elif field == 4 and isinstance(value, bytes):
            form, size = _SIZES.get(dtype, ("", 0))
            if dtype == 14 and len(value) == 2:
                values.append(struct.unpack("<f", b"\0\0" + value)[0])
            elif form and len(value) == size:
                values.append(struct.unpack(form, value)[0])
        elif field in (5, 6) and isinstance(value, bytes):  # packed or not
            form, size = ("<f", 4) if field == 5 else ("<d", 8)
            values += [struct.unpack(form, value[i : i + size])[0] for i in range(0, min(len(value), 2 * size), size)]
        elif field in (7, 10) and wire == 0 and isinstance(value, int):
            values.append(value)
        elif field in (7, 10) and isinstance(value, bytes) and value:
            values.append(_varint(value, 0)[0])
    return float(values[0]) if len(values) == 1 else None
