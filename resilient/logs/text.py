"""Bytes of a text log -> lines: any encoding, compressed or not, CRLF, NUL bytes, lines without end. Nothing is held
but the line at hand."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

from resilient.logs.rows import Remarks

MAX_LINE = 1 << 20  # characters; a longer line is cut, preferably where a progress bar returned to its start
_CHUNK = 1 << 16
_TEXT = bytes(range(32, 127)) + b"\t\r\n\x0b\x0c\x1b\x08\x07" + bytes(range(128, 256))
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def head_of(path: Path, size: int = 1 << 16) -> bytes:
    """The first bytes of the content (uncompressed). May raise OSError."""
    with _open(path) as file:
        try:
            return file.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return b""


def encoding_of(head: bytes) -> str:
    """By its mark, or by the zeros that UTF-16 leaves in plain text; else UTF-8."""
    for mark, name in _BOMS:
        if head.startswith(mark):
            return name
    sample = head[:2048]
    if len(sample) >= 64:
        even, odd = sample[::2].count(0), sample[1::2].count(0)
        if odd > len(sample) * 0.4 and even < len(sample) * 0.05:
            return "utf-16-le"
        if even > len(sample) * 0.4 and odd < len(sample) * 0.05:
            return "utf-16-be"
    return "utf-8"


def is_binary(head: bytes) -> bool:
    """True if this is no text, whatever the encoding. Zeros alone (a hole in a file) do not make it binary."""
    name = encoding_of(head)
    if name != "utf-8":
        return False
    rest = head.replace(b"\0", b"")
    if not rest:
        return bool(head)
    odd = len(rest.translate(None, _TEXT))
    if odd > len(rest) * 0.02:
        return True
    high = sum(byte >= 128 for byte in rest[:8192])
    if high > len(rest[:8192]) * 0.3:  # mostly beyond ASCII: fine if it is UTF-8
        broken = rest[:8192].decode("utf-8", "replace").count("\ufffd")
        return broken > high * 0.1
    return False


def lines_of(path: Path, remarks: Remarks) -> Iterator[str]:
    """Lines without their ends. May raise OSError."""
    with _open(path) as file:
        try:
            head = file.peek(4096)[:4096]
        except (EOFError, zlib.error, gzip.BadGzipFile):
            head = b""
        decoder = codecs.getincrementaldecoder(encoding_of(head))("replace")
        rest, cut = "", 0
        while True:
            try:
                data = file.read(_CHUNK)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                remarks.notes.append(f"the compressed file is damaged or cut off ({error}): read up to there")
                data = b""
            text = decoder.decode(data, not data)
            lines = (rest + text).split("\n")
            rest = lines.pop()
            yield from lines
            while len(rest) > MAX_LINE:
                at = rest.rfind("\r", 1, MAX_LINE) + 1 or MAX_LINE
                cut += at == MAX_LINE
                yield rest[:at]
                rest = rest[at:]
            if not data:
                if rest:
                    yield rest
                if cut:
                    remarks.notes.append(f"{cut} lines longer than {MAX_LINE:,} characters were cut")
                return


def _open(path: Path) -> io.BufferedReader:
    file = open(path, "rb")  # noqa: SIM115  (handed to the caller)
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    file.close()
    return io.BufferedReader(gzip.GzipFile(path, "rb"))  # type: ignore[arg-type]
