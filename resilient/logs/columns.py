"""Named numbers of one record -> a Point: which of a file's columns is the step, the loss, the gradient norm ..."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from resilient.logs.names import EVALUATION_WORDS, Meaning, meaning_of, without_run, words_of
from resilient.logs.numbers import count, number
from resilient.logs.points import Point, note
from resilient.logs.rows import Remarks

_SPLITS = ("mode", "split", "phase", "stage", "subset", "set", "type", "kind")
_NAMES = ("name", "metric", "tag", "key", "metric_name", "variable")
_MAX_DEPTH = 4


class Columns:
    """Remembers which column stands for which signal, so that a series never changes its source half-way.

    The best named column of the first record that has the signal is taken; others keep their own name. A file without
    any column that is surely a loss takes its first `..._loss` as one, and says so."""

    def __init__(self, remarks: Remarks) -> None:
        self.remarks = remarks
        self._locked: dict[str, str] = {}  # signal -> column
        self._step: str | None = None
        self._epochs: bool | None = None  # epochs are the counter: decided with the first record
        self._last_epoch = -1
        self._run: str | None = None
        self._other_runs: set[str] = set()

    def point(self, record: Mapping[str, Any], line: int) -> Point | None:
        """The record as a Point, or None if it is a summary or holds no numbers."""
        if "train_runtime" in record or "train_num_updates" in record:
            note(self.remarks, "summaries at the end of a run or an epoch are no points and were left out")
            return None
        record = _long_format(record)
        point = Point(None, {}, line=line)
        steps: list[tuple[int, str, Any]] = []
        chosen: dict[str, tuple[int, str, float]] = {}
        others: dict[str, float] = {}
        evaluation = self._is_evaluation(record)
        for key, value in flatten(record):
            if value is None or value == "":
                continue
            meaning = self._meaning(key)
            kind = meaning.kind
            if kind == "ignore":
                continue
            if kind == "step":
                steps.append((meaning.rank, key, value))
                continue
            try:
                found = float(value) if type(value) is str else number(value)
            except ValueError:
                found = number(value)
            if found is None:
                continue
            if kind == "signal" and evaluation:
                name = "eval_loss" if meaning.name == "loss" else meaning.name
                point.evaluation.setdefault(name, found)
            elif kind == "signal":
                self._choose(chosen, others, meaning, key, found * meaning.factor)
            elif kind == "evaluation":
                self._choose_evaluation(point, meaning, key, found)
            elif kind == "epoch":
                point.epoch = found
            elif kind == "skipped":
                point.refused = int(found) if 0 < found < 1e9 else 0
            elif kind == "nan_count":
                point.nans = int(found) if 0 < found < 1e9 else 0
            elif not evaluation and key == self._locked.get("loss"):
                point.values["loss"] = found
            elif not evaluation:
                others[meaning.name or key] = found
        self._count(point, steps)
        if point.step is None and point.epoch is not None and (chosen or point.evaluation):
            self._count_epochs(point)
        for name, (_, key, found) in chosen.items():
            self._locked.setdefault(name, key)
            point.values[name] = found
        if not chosen.keys() & {"loss"} and "loss" not in self._locked and not evaluation:
            self._some_loss(point, others)
        for name, found in others.items():
            point.values.setdefault(name, found)
        return point if point.values or point.evaluation else None

    def _meaning(self, key: str) -> Meaning:
        meaning = meaning_of(key)
        if " - " in key and meaning.kind not in ("ignore", "step"):
            run = key.rsplit(" - ", 1)[0]
            if self._run is None:
                self._run = run
            if run != self._run:
                if run not in self._other_runs and len(self._other_runs) < 16:
                    self._other_runs.add(run)
                    note(self.remarks, f"several runs in one file: {self._run!r} was read, {run!r} was not")
                return Meaning("ignore")
            if meaning.kind == "own":
                return Meaning("own", without_run(key))
        return meaning

    def _choose(self, chosen: dict[str, tuple[int, str, float]], others: dict[str, float], meaning: Meaning, key: str, found: float) -> None:  # fmt: skip
        name = meaning.name
        locked = self._locked.get(name)
        if locked is not None:
            if locked == key:
                chosen[name] = (0, key, found)
            else:
                others[key] = found
            return
        before = chosen.get(name)
        if before is None or meaning.rank < before[0]:
            if before is not None:
                others[before[1]] = before[2]
            chosen[name] = (meaning.rank, key, found)
        else:
            others[key] = found

    def _choose_evaluation(self, point: Point, meaning: Meaning, key: str, found: float) -> None:
        if meaning.name == "eval_loss":
            if self._locked.setdefault("eval_loss", key) == key:
                point.evaluation["eval_loss"] = found
            else:
                point.evaluation[key] = found
        else:
            point.evaluation[meaning.name] = found

    def _count(self, point: Point, steps: list[tuple[int, str, Any]]) -> None:
        """The best counter of the record. Once a counter was used, it is kept where the record has it."""
        steps.sort(key=lambda found: (found[1] != self._step, found[0]))
        for _, key, value in steps:
            read = count(value)
            if read is not None:
                point.step, point.total = read
                if self._step is None:
                    self._step = key
                return

    def _count_epochs(self, point: Point) -> None:
        """Without another counter, whole epochs are one, as long as there is one record an epoch."""
        assert point.epoch is not None
        whole = point.epoch == int(point.epoch) if abs(point.epoch) < 1e9 else False
        if self._epochs is None:
            self._epochs = whole
            if whole:
                note(self.remarks, "no step counter: epochs are counted")
        self._epochs = self._epochs and whole and point.epoch > self._last_epoch
        if self._epochs:
            point.step = self._last_epoch = int(point.epoch)
            point.epoch = None

    def _some_loss(self, point: Point, others: dict[str, float]) -> None:
        for key in others:
            words = words_of(key)
            if words[-1:] in (["loss"], ["losses"]) and not {
                "aux",
                "auxiliary",
                "balancing",
                "balance",
                "router",
                "z",
            } & set(words):
                self._locked["loss"] = key
                point.values["loss"] = others.pop(key)
                note(self.remarks, f"no column is surely the training loss: {key!r} was taken for it")
                return
        if set(others) == {"Value"}:  # what TensorBoard saves as CSV
            self._locked["loss"] = "Value"
            point.values["loss"] = others.pop("Value")
            note(self.remarks, "the column has no name but 'Value': it was taken for the training loss")

    def _is_evaluation(self, record: Mapping[str, Any]) -> bool:
        for key in _SPLITS:
            value = record.get(key)
            if isinstance(value, str) and EVALUATION_WORDS & set(words_of(value[:40])):
                return True
        return False


def flatten(record: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(key, value) of all leaves; nested keys are joined by `/`."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            if depth < _MAX_DEPTH:
                yield from flatten(value, f"{name}/", depth + 1)
        else:
            yield name, value


def _long_format(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """One metric a record, `{"step": 1, "name": "loss", "value": 2.3}`, as `{"step": 1, "loss": 2.3}`."""
    if "value" not in record:
        return record
    for key in _NAMES:
        name = record.get(key)
        if isinstance(name, str) and name:
            return {**{k: v for k, v in record.items() if k not in ("value", key)}, name: record["value"]}
    return record
