"""Rows of a log that is still being written, whatever kind of log it is (S11).

    text file            followed line by line                                  logs/follow.py
    JSON document        written anew as a whole now and then: read again       trainer_state.json
    event files          read again when they have grown                        a folder of TensorBoard events
    our run directory    steps.jsonl as text; journal.jsonl and the files that say how the run ended beside it

A source never sleeps and never raises for what a file may do; it is polled. `open_source` may be called before anything
is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from resilient.checkpoint.files import read_json
from resilient.errors import ExitCode, ResilientError
from resilient.logs.follow import LineFollower
from resilient.logs.open import is_document, line_parser, newest_state, open_log
from resilient.logs.records import StepsParser
from resilient.logs.rows import LineParser, Remarks, Row
from resilient.logs.text import head_of

_RECHECK_EVERY = 15  # polls after which a document is read again though its size and time stayed the same
_ENOUGH = 20  # lines that show what the format is
_SMALL_FILE = 1 << 20  # bytes of summary.json and such
_ENDS = {ExitCode.DONE: "done", ExitCode.PREEMPTED: "preempted"}  # other verdicts: somebody has to look


class Source(Protocol):
    """Where rows come from.

    name: for people. remarks: what the reader wants to tell. problem: why nothing can be read now, "" for nothing.
    behind: more is there already, poll again without waiting. ended: how the run says it ended (done | stopped |
    preempted | failed), "" while it runs or when the log cannot say."""

    name: str

    @property
    def remarks(self) -> Remarks: ...

    @property
    def problem(self) -> str: ...

    @property
    def behind(self) -> bool: ...

    @property
    def ended(self) -> str: ...

    def poll(self) -> list[Row]:
        """Rows since the last poll, in the order of the log."""

    def finish(self) -> list[Row]:
        """Rows still held back; for when nobody writes any more."""

    def events(self) -> list[dict[str, Any]]:
        """Journal entries since the last call; run directories only."""

    def close(self) -> None: ...


def open_source(path: Path, *, patient: bool = True) -> Source | None:
    """The source in `path`; None while nothing is there to tell what it is.

    patient: the writer may still be at work, so what looks unfinished is waited for."""
    try:
        if path.is_dir():
            return _open_folder(path, patient)
        if not path.exists():
            return None
        if path.suffix == ".json" or is_document(head_of(path), growing=patient):
            return DocumentSource(path)
    except OSError:
        return None
    return TextSource(path, patient=patient)


def _open_folder(path: Path, patient: bool) -> Source | None:
    if (path / "generation.json").exists() or (path / "steps.jsonl").exists():
        return RunSource(path, patient=patient)
    if next(path.rglob("*tfevents*"), None) is not None:
        return EventSource(path)
    if newest_state(path) is not None:
        return DocumentSource(path, newest_state)
    return None


class TextSource:
    """A text log of any line format. What the format is shows after some lines; until then they are kept.

    parser: for a format that is known."""

    def __init__(self, path: Path, parser: LineParser | None = None, *, patient: bool = True) -> None:
        self.name = str(path)
        self.remarks = parser.remarks if parser is not None else Remarks()
        self.ended = ""
        self._follower = LineFollower(path, nul_patience=10 if patient else 0)
        self._parser = parser
        self._begun: list[str] = []  # the lines before the first row
        self._guess_at = 1  # lines with which to guess next
        self._line = 0  # number of the last line fed

    @property
    def problem(self) -> str:
        return self._follower.problem

    @property
    def behind(self) -> bool:
        return self._follower.behind

    def poll(self) -> list[Row]:
        return self._feed(self._follower.poll())

    def finish(self) -> list[Row]:
        rows = self._feed(self._follower.rest(), last=True)
        if self._parser is not None:
            rows += self._parser.finish()
        return rows

    def events(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        self._follower.close()

    def _feed(self, lines: list[str], last: bool = False) -> list[Row]:
        if self._parser is None:
            return self._begin(lines, last)
        rows: list[Row] = []
        for line in lines:
            self._line += 1
            rows += self._parser.feed(line, self._line)
        return rows

    def _begin(self, lines: list[str], last: bool) -> list[Row]:
        """Guess the format from all lines so far, when there are enough or no more come for now; again and again until a
        guess has given rows."""
        self._begun += lines
        count = len(self._begun)
        if not last and (count < self._guess_at or (lines and count < _ENOUGH)):
            return []
        self._guess_at = max(count + 1, count * 5 // 4)  # a long prelude is not read anew each time
        parser = line_parser(self._begun)
        rows = [row for number, line in enumerate(self._begun, 1) for row in parser.feed(line, number)]
        self.remarks = parser.remarks
        if rows or last:
            self._parser, self._line, self._begun = parser, count, []
        return rows


class DocumentSource:
    """A JSON document that is written anew as a whole. Read again when it has changed; rows that were there before are not
    told again. Where it says something else than before (a run that went back), it is told from there on.

    pick: the file inside a folder that counts now; None: the path is the file."""

    def __init__(self, path: Path, pick: Callable[[Path], Path | None] | None = None) -> None:
        self.name = str(path)
        self.remarks = Remarks()
        self.problem = ""
        self.behind = False
        self.ended = ""
        self._path = path
        self._pick = pick
        self._seen: object = None  # what the file looked like when it was read last
        self._polls = 0
        self._told: list[int] = []  # hashes of the rows told so far

    def poll(self) -> list[Row]:
        """See Source."""
        path = self._pick(self._path) if self._pick is not None else self._path
        self.problem, self._polls = "", self._polls + 1
        try:
            looks = self._look(path) if path is not None else None
            if path is None or (looks == self._seen and self._polls % _RECHECK_EVERY):
                return []
            log = open_log(path)
            rows = list(log.rows())
        except (OSError, ValueError, ResilientError) as error:  # absent for a moment, or half written
            self.problem = f"{self.name} cannot be read now: {error}"
            return []
        self._seen, self.remarks = looks, log.remarks
        return self._news(rows)

    def finish(self) -> list[Row]:
        """See Source."""
        return []

    def events(self) -> list[dict[str, Any]]:
        """See Source."""
        return []

    def close(self) -> None: ...

    def _look(self, path: Path) -> object:
        found = path.stat()
        return path, found.st_ino, found.st_size, found.st_mtime_ns

    def _news(self, rows: list[Row]) -> list[Row]:
        marks = [hash((row.step, row.evaluation, repr(sorted(row.values.items())))) for row in rows]
        same = next((i for i, (old, new) in enumerate(zip(self._told, marks, strict=False)) if old != new), None)
        if same is None:
            same = min(len(self._told), len(marks))
            if same == len(marks):
                return []  # nothing new; perhaps only the beginning of it was there to read
        self._told = marks
        return rows[same:]


class EventSource(DocumentSource):
    """A folder of TensorBoard event files. Its newest step may still lack some signals: it is held back until the next."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._held: list[Row] = []

    def finish(self) -> list[Row]:
        """See Source."""
        held, self._held = self._held, []
        return held

    def _look(self, path: Path) -> object:
        return sorted((str(file), file.stat().st_size) for file in path.rglob("*tfevents*"))

    def _news(self, rows: list[Row]) -> list[Row]:
        newest = rows[-1].step if rows else 0
        whole = len(rows)
        while whole and rows[whole - 1].step == newest:
            whole -= 1
        self._held = rows[whole:]
        return super()._news(rows[:whole])


class RunSource:
    """A run directory of ours. Rows are the lines of steps.jsonl, of all starts; the journal is followed beside it.

    It has ended when the newest start left its summary or a verdict, unless that verdict asks for a restart."""

    def __init__(self, path: Path, *, patient: bool = True) -> None:
        self.name = str(path)
        self._path = path
        self._steps = TextSource(path / "steps.jsonl", StepsParser(), patient=patient)
        self._journal = LineFollower(path / "journal.jsonl", nul_patience=10 if patient else 0)

    @property
    def remarks(self) -> Remarks:
        return self._steps.remarks

    @property
    def problem(self) -> str:
        return self._steps.problem

    @property
    def behind(self) -> bool:
        return self._steps.behind

    @property
    def ended(self) -> str:
        """How the newest start ended, "" while it runs."""
        generation = self._json("generation").get("generation")
        summary, verdict = self._json("summary"), self._json("verdict")
        if verdict.get("generation") == generation and isinstance(verdict.get("code"), int):
            if verdict["code"] == ExitCode.RESTART:
                return ""  # the next start follows
            return _ENDS.get(verdict["code"], "stopped")
        if summary.get("generation") == generation and generation is not None:
            return str(summary.get("status", "failed"))
        return ""

    def poll(self) -> list[Row]:
        """See Source."""
        return self._steps.poll()

    def finish(self) -> list[Row]:
        """See Source."""
        return self._steps.finish()

    def events(self) -> list[dict[str, Any]]:
        """Journal entries since the last call; a line that is no JSON object is stepped over, as everywhere."""
        entries = []
        for line in self._journal.poll():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                entries.append(entry)
        return entries

    def close(self) -> None:
        """See Source."""
        self._steps.close()
        self._journal.close()

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return read_json(self._path / f"{name}.json", limit=_SMALL_FILE)
        except (OSError, ValueError):  # absent, or being renamed
            return {}
