"""Score detectors on a folder of labelled training logs: index.csv and one CSV per log.

index.csv: trace_id, source, label, onset_step, blowup_step, later_events (`;`-separated steps). A log: step, loss, grad_norm,
lr, loss_scale; an empty field was not logged, `nan` was. An event is an onset at least 64 points after the start of a
transient_spike, diverged or nan log. It is hit by an alarm from 10 points before to 30 points after the onset; the first one also up to 10
points after its blow-up. Alarms on healthy logs are false; those within 50 points of the first of a group count once.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from resilient.bench.detection.events import Streams
from resilient.bench.detection.protocol import merged_starts
from resilient.errors import ConfigError

SIGNALS = ("loss", "grad_norm", "lr", "loss_scale")
FAILED = ("transient_spike", "diverged", "nan")
BASELINE_POINTS = 64  # before these an onset has no past to stand out from
EARLY, LATE, AFTER_BLOWUP = 10, 30, 10  # points around an onset in which an alarm hits


@dataclass(frozen=True)
class Event:
    """One labelled onset. first, last: positions between which an alarm hits it."""

    row: int
    trace: str
    source: str
    onset: int
    first: int
    last: int


@dataclass(frozen=True)
class TraceSet:
    """All logs of a folder in one batch, in the order of the index."""

    names: tuple[str, ...]
    sources: tuple[str, ...]
    labels: tuple[str, ...]
    streams: Streams
    events: tuple[Event, ...]

    @property
    def healthy(self) -> np.ndarray:
        """Rows of healthy logs."""
        return np.array([i for i, label in enumerate(self.labels) if label == "healthy"], dtype=int)

    @property
    def healthy_points(self) -> int:
        return int(self.streams.lengths()[self.healthy].sum())


def load_traces(folder: str | Path) -> TraceSet:
    """Read the folder. ConfigError: no index, or a log that it names is missing or has no usable column."""
    folder = Path(folder)
    index = folder / "index.csv"
    if not index.is_file():
        raise ConfigError(f"--traces: {index} does not exist; the folder needs an index.csv with a row per log")
    with index.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {"trace_id", "source", "label", "onset_step", "blowup_step", "later_events"}
    if not rows or not wanted <= set(rows[0]):
        raise ConfigError(f"--traces: {index} needs the columns {', '.join(sorted(wanted))}")
    logs = [_read(folder / f"{row['trace_id']}.csv") for row in rows]
    streams = _batch(logs)
    events = [e for i, row in enumerate(rows) for e in _events(i, row, logs[i][0])]
    return TraceSet(
        tuple(row["trace_id"] for row in rows),
        tuple(row["source"] for row in rows),
        tuple(row["label"] for row in rows),
        streams,
        tuple(events),
    )


def _read(path: Path) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """(steps, signal -> (values, present))."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        steps = np.array([int(float(row["step"])) for row in rows])
        signals = {}
        for name in SIGNALS:
            texts = [(row.get(name) or "").strip() for row in rows]
            present = np.array([bool(text) for text in texts], dtype=bool)
            if present.any():
                signals[name] = np.array([float(text) if text else 0.0 for text in texts]), present
    except OSError as error:
        raise ConfigError(f"--traces: {path}: {error.strerror}") from error
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"--traces: {path} is not a log with the columns step, {', '.join(SIGNALS)}: {error}"
        ) from error
    if not signals:
        raise ConfigError(f"--traces: {path} holds no values")
    return steps, signals


def _batch(logs: list[tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]]) -> Streams:
    runs, points = len(logs), max(len(steps) for steps, _ in logs)
    steps = np.zeros((runs, points), dtype=np.int64)
    values = {name: np.zeros((runs, points)) for name in SIGNALS}
    missing = {name: np.ones((runs, points), dtype=bool) for name in SIGNALS}
    for i, (numbers, signals) in enumerate(logs):
        steps[i, : len(numbers)] = numbers
        for name, (x, present) in signals.items():
            values[name][i, : len(x)], missing[name][i, : len(x)] = x, ~present
    nowhere = np.full(runs, -1)
    return Streams("traces", steps, values, nowhere, nowhere, nowhere, missing)


def _events(i: int, row: Mapping[str, str], steps: np.ndarray) -> list[Event]:
    if row["label"] not in FAILED:
        return []
    onsets = [row["onset_step"], *row["later_events"].split(";")]
    found = []
    for order, text in enumerate(onsets):
        if not text.strip():
            continue
        onset = int(np.searchsorted(steps, float(text)))
        last = onset + LATE
        if order == 0 and row["blowup_step"].strip():
            last = max(last, int(np.searchsorted(steps, float(row["blowup_step"]))) + AFTER_BLOWUP)
        if onset >= BASELINE_POINTS:
            found.append(Event(i, row["trace_id"], row["source"], onset, onset - EARLY, last))
    return found


@dataclass(frozen=True)
class TraceScore:
    """recall: of events; by_source: mean over sources of the recall within each; false_per_10k: merged false alarms."""

    events: int
    hits: int
    recall: float
    by_source: float
    without_largest_source: float
    false_alarms: int
    healthy_points: int
    false_per_10k: float
    missed: tuple[str, ...]
    false_by_trace: dict[str, int]


def score_traces(traces: TraceSet, alarms: np.ndarray) -> TraceScore:
    """alarms: bool (logs, points)."""
    hit = [bool(alarms[e.row, e.first : e.last + 1].any()) for e in traces.events]
    sources = sorted({e.source for e in traces.events})
    by_source = {s: [h for e, h in zip(traces.events, hit, strict=True) if e.source == s] for s in sources}
    recalls = {s: float(np.mean(hits)) for s, hits in by_source.items()}
    largest = max(sources, key=lambda s: len(by_source[s])) if sources else ""
    others = [h for s in sources if s != largest for h in by_source[s]]
    false = {traces.names[i]: len(merged_starts(alarms[i])) for i in traces.healthy}
    points, count = traces.healthy_points, sum(false.values())
    return TraceScore(
        events=len(hit),
        hits=sum(hit),
        recall=float(np.mean(hit)) if hit else float("nan"),
        by_source=float(np.mean(list(recalls.values()))) if recalls else float("nan"),
        without_largest_source=float(np.mean(others)) if others else float("nan"),
        false_alarms=count,
        healthy_points=points,
        false_per_10k=1e4 * count / points if points else float("nan"),
        missed=tuple(f"{e.trace}@{e.onset}" for e, h in zip(traces.events, hit, strict=True) if not h),
        false_by_trace={name: n for name, n in false.items() if n},
    )
