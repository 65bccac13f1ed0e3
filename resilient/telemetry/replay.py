"""A restart trains some steps again: are they what they were the first time (BR-08)?

What was loaded is proven to be what was saved. Whether that was everything, nobody can prove: weights that are cached
elsewhere, a masked-out part of the state, code that has changed meanwhile. But the run's own record says what loss the same
weights, data and random streams gave before. The first step after the restart shows the weights, the second one what the
optimizer made of them: its moments and masters. Both were recorded anyway, so this costs a look into a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from resilient.coordinator.events import Incident, Listener, StepReport
from resilient.telemetry.journal import read_steps
from resilient.telemetry.messages import number
from resilient.telemetry.run_directory import RunDirectory

_STEPS = 2  # held against the record: before and after the first optimizer step
_APART = 5e-3  # of a loss, more than other kernels and another order of sums do in two steps
_TAIL = 1 << 24  # bytes of the record that are read: some 10,000 steps


class ReplayCheck:
    """A listener. Tells `replay` once: the steps that were trained again, and whether their losses are bit for bit those of
    the record; and `warning` for a step whose loss is another one. It says nothing where the record does not go beyond the
    state that was resumed from, or where the steps had other data, another LR or another number of ranks.

    run: resumed, on rank 0. others: listeners that are told."""

    def __init__(self, run: RunDirectory, others: Sequence[Listener]) -> None:
        self._run = run
        self._others = others
        self._expected: dict[int, Mapping[str, Any]] = {}
        self._seen: list[tuple[StepReport, float]] = []  # step as it is now, loss as it was

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "resume":
            self._seen, self._expected = [], {}
            if not fields.get("changes") and not fields.get("absent"):
                self._expected = _recorded(read_steps(self._run.steps, last_bytes=_TAIL), int(fields["step"]))

    def step(self, report: StepReport) -> None:
        was = self._expected.pop(report.step, None)
        if was is None:
            return
        alike = report.applied and all(getattr(report, key) == was.get(key) for key in ("position", "lr", "tokens"))
        if not alike or not math.isfinite(report.loss):
            self._expected.clear()  # what follows does not start from the same weights
        else:
            self._seen.append((report, float(was["loss"])))
        if not self._expected and self._seen:
            seen, self._seen = self._seen, []
            self._compare(seen)

    def _compare(self, seen: Sequence[tuple[StepReport, float]]) -> None:
        steps = [report.step for report, _ in seen]
        self._tell("replay", {"steps": steps, "exact": all(report.loss == was for report, was in seen)})
        for report, was in seen:
            if abs(report.loss - was) > _APART * max(abs(was), abs(report.loss)):
                part = (
                    "weights, buffers, data or random streams" if report.step == steps[0] else "the optimizer's state"
                )
                message = (
                    f"step {report.step} is not what it was before the restart: loss {number(report.loss)}, it was "
                    f"{number(was)} with the same data and LR; what was resumed from lacks something ({part}), or the code "
                    "or machine has changed"
                )
                return self._tell("warning", {"message": message})

    def _tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        for listener in self._others:
            listener.event(kind, fields)

    def incident(self, incident: Incident) -> None:
        """Nothing: a step that was refused is no comparison, `step` sees it."""

    def close(self) -> None:
        """Nothing is held."""


def _recorded(rows: Sequence[Mapping[str, Any]], resumed_from: int) -> dict[int, Mapping[str, Any]]:
    """Step -> its newest row, of the steps right after that one which were applied with a finite loss, without a gap."""
    newest = {int(row["step"]): row for row in rows}
    found = {}
    for step in range(resumed_from + 1, resumed_from + 1 + _STEPS):
        row = newest.get(step)
        if row is None or not row.get("applied") or not isinstance(row.get("loss"), float | int):
            break
        found[step] = row
    return found
