"""From what single lines and records say to rows: one per step, without placeholders, in the order of the file."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from resilient.logs.placeholders import Placeholders
from resilient.logs.rows import SIGNALS, Remarks, Row

_CANONICAL = frozenset(SIGNALS)
_POINTS = frozenset({"loss", "grad_norm", "eval_loss"})
_BESIDE = frozenset({"lr", "loss_scale", "tokens", "time_s"})  # alone they make no log: a configuration has them, too
_RECENT_STEPS = 4


def is_signal(name: str) -> bool:
    """A canonical signal, or one of a layer or group."""
    return name in _CANONICAL or name.startswith(("grad_norm/", "update_norm/"))


@dataclass
class Point:
    """What one line or record says.

    step: None if it has no counter. epoch: where it has one, to notice counters that start again with each epoch.
    total: of the counter (`10/100`). refused: optimizer steps refused since the last report, as far as the file says.
    nans: non-finite iterations since then. evaluation: values of an evaluation in the same line."""

    step: int | None
    values: dict[str, float]
    evaluation: dict[str, float] = field(default_factory=dict)
    epoch: float | None = None
    total: int | None = None
    refused: int = 0
    nans: int = 0
    line: int = 0


class Points:
    """Merges, numbers and cleans points.

    hold: always wait for the next step before a row is given out, for formats that spread a step over several records.
    Otherwise a row with a loss goes out at once, until the file shows that more of the same step follows."""

    def __init__(self, remarks: Remarks, *, hold: bool = False) -> None:
        self.remarks = remarks
        self.last_step: int | None = None  # of the last training point, as given out
        self._hold = hold
        self._clean = Placeholders(remarks)
        self._pending: Point | None = None
        self._given: tuple[int, frozenset[str]] | None = None  # step and names of the row given out last
        self._recent: deque[tuple[int, frozenset[str]]] = deque(maxlen=_RECENT_STEPS)
        self._doubles = 0
        self._unnumbered = 0
        self._offset = 0  # of counters that begin again with each epoch
        self._raw: tuple[int, float | None] | None = None  # counter and epoch of the last point, as written
        self._interval_from: int | None = None  # step of the last row, for refused steps in between
        self._last_evaluation: dict[str, float] = {}
        self._own_only = 0
        self.rows_given = 0

    def add(self, point: Point) -> list[Row]:
        """Rows completed by this point."""
        rows: list[Row] = []
        if point.evaluation:
            self._fill_gaps(point)
        if point.values:
            point.step = self._number(point)
            rows += self._training(point)
        if point.evaluation:
            rows += self._evaluation(point)
        return rows

    def flush(self) -> list[Row]:
        """The row held back, if any."""
        pending, self._pending = self._pending, None
        return [] if pending is None else self._give(pending)

    def finish(self) -> list[Row]:
        """At the end of the file: what is held back, and the last remarks."""
        rows = self.flush()
        self._clean.finish()
        if self._doubles:
            self._note(
                f"{self._doubles} repeated lines of a step left out (several ranks or loggers print the same step)"
            )
        if self._own_only and not self.rows_given:
            self._note("there are numbers, but none is a loss, a gradient norm or another known signal")
        return rows

    # -- counters -----------------------------------------------------------------------------------------------

    def _number(self, point: Point) -> int:
        """The step of a training point."""
        if point.step is None:
            self._unnumbered += 1
            if self._unnumbered == 1:
                self._note("no step counter: rows are numbered as they come")
            return self.last_step + 1 if self.last_step is not None else 1
        raw, epoch = point.step, point.epoch
        if self._raw is not None and epoch is not None and self._raw[1] is not None and int(epoch) > int(self._raw[1]):
            before = self._raw[0]
            if raw < before or (raw == before and point.total is not None):
                first = not self._offset
                # the total if the counter ran (almost) through it, else the last value seen
                self._offset += (
                    point.total if point.total and point.total >= before else before + (1 if raw == 0 else 0)
                )
                if first:
                    self._note("the step counter starts again with each epoch: it was continued")
        elif self._raw is not None and raw < self._raw[0] and (epoch is None or epoch < (self._raw[1] or 0)):
            self._offset = 0 if epoch is not None and epoch <= 1 else self._offset
        self._raw = (raw, epoch if epoch is not None else (self._raw[1] if self._raw else None))
        return raw + self._offset

    # -- training rows ------------------------------------------------------------------------------------------

    def _training(self, point: Point) -> list[Row]:
        step, names = point.step, frozenset(point.values)
        assert step is not None
        pending = self._pending
        if pending is not None and pending.step == step:
            clash = names & pending.values.keys()
            if not clash:
                pending.values.update(point.values)
                pending.refused = max(pending.refused, point.refused)
                pending.nans = max(pending.nans, point.nans)
                return self._maybe_give()
            if _POINTS & clash:
                self._doubles += 1
                return []
            for name in names - clash:
                pending.values[name] = point.values[name]
            return self._maybe_give()
        if pending is None and self._repeats(step, names):
            self._doubles += 1
            return []
        rows = self.flush()
        if self._given is not None and self._given[0] == step and not names & self._given[1]:
            self._hold = True  # the file spreads a step over several lines: wait for them from now on
        self._pending = point
        return rows + self._maybe_give()

    def _repeats(self, step: int, names: frozenset[str]) -> bool:
        """True if this step was just given out with the same points: another rank prints it, too."""
        if self._given is None:
            return False
        if self._given[0] == step:
            return bool(names & self._given[1] & _POINTS)
        if self._doubles:  # ranks that are a little behind
            return any(step == before and names & had & _POINTS for before, had in self._recent)
        return False

    def _maybe_give(self) -> list[Row]:
        if self._hold or self._pending is None or not _POINTS & self._pending.values.keys():
            return []
        return self.flush()

    def _give(self, point: Point) -> list[Row]:
        step = point.step
        assert step is not None
        values, names = point.values, frozenset(point.values)
        applied = self._applied(point)
        if point.nans and "loss" not in values:
            values["loss"] = math.nan  # the file says that iterations were NaN and gives no loss for them
        if point.refused:
            values["skipped"] = float(point.refused)
        if point.nans:
            values["nan_iterations"] = float(point.nans)
        values = self._clean.clean(values, applied)
        self._given = (step, names)
        self._recent.append(self._given)
        self.last_step = step
        if (
            not _POINTS & names
            and applied
            and not any(is_signal(name) and (self.rows_given or name not in _BESIDE) for name in values)
        ):
            self._own_only += 1
            return []
        self.rows_given += 1
        return [Row(step, values, applied=applied, line=point.line)]

    def _applied(self, point: Point) -> bool:
        """False if every optimizer step since the last row was refused."""
        assert point.step is not None
        before, self._interval_from = self._interval_from, point.step
        if not point.refused:
            return True
        if before is None or point.step <= before:
            loss = point.values.get("loss")
            return loss is not None and loss == loss and point.refused < max(point.step, 1)
        return point.refused < point.step - before

    # -- evaluation rows ----------------------------------------------------------------------------------------

    def _fill_gaps(self, point: Point) -> None:
        """NaN that only fills a gap of a wide table is no data."""
        finite = any(name in _POINTS and math.isfinite(v) for name, v in point.values.items())
        if finite:
            point.evaluation = {name: v for name, v in point.evaluation.items() if v == v}
        elif any(name == "eval_loss" and math.isfinite(v) for name, v in point.evaluation.items()) and point.values:
            point.values = {name: v for name, v in point.values.items() if v == v or name not in _POINTS}
            if not _POINTS & point.values.keys():
                point.values = {}
        if (
            point.values
            and point.evaluation
            and all(self._last_evaluation.get(name) == value for name, value in point.evaluation.items())
        ):
            point.evaluation = {}  # the last evaluation, repeated on every row

    def _evaluation(self, point: Point) -> list[Row]:
        step = point.step if point.step is not None else self.last_step
        self._last_evaluation = {**self._last_evaluation, **point.evaluation} if len(self._last_evaluation) < 256 else dict(point.evaluation)  # fmt: skip
        rows = self.flush() if self._pending is not None and self._pending.step != step else []
        values = self._clean.clean(point.evaluation, True)
        if not values:
            return rows
        if step is None:
            step = 0
        if not point.values:
            step += self._offset if point.step is not None else 0
        self.rows_given += 1
        return [*rows, Row(step, values, evaluation=True, line=point.line)]

    def _note(self, text: str) -> None:
        if text not in self.remarks.notes:
            self.remarks.notes.append(text)


def note(remarks: Remarks, text: str) -> None:
    """Add a sentence to `remarks` once."""
    if text not in remarks.notes:
        remarks.notes.append(text)
