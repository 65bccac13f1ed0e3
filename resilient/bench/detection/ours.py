"""This project's detectors on the same streams: one monitor per run, fed step by step as a live run or a log would."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from resilient.bench.detection.events import Streams
from resilient.detectors import DetectorConfig, Monitor, build_monitor
from resilient.detectors.config import Targets
from resilient.signals import Observation, Severity


def our_monitor(target_per_10k: float) -> Monitor:
    """The default detectors, told how many warnings per 10,000 healthy steps they may cost. Watch and act keep their distance."""
    watch, act = Targets().watch / Targets().warn, Targets().act / Targets().warn
    return build_monitor(DetectorConfig(targets=Targets(watch * target_per_10k, target_per_10k, act * target_per_10k)))


@dataclass(frozen=True)
class Heard:
    """One alarm. at: position in the run, not the step number."""

    run: int
    at: int
    severity: str
    signal: str
    statistic: str
    onset_step: int


@dataclass(frozen=True)
class Judged:
    """What the monitors said. alarms: the news, as a person is told. flagged: bool (runs, points), any finding of warn or act,
    news or not. seconds: of all observe and absorb calls."""

    shape: tuple[int, int]
    alarms: tuple[Heard, ...]
    flagged: np.ndarray
    seconds: float
    steps: int

    def matrix(self, keep: Callable[[Heard], bool] = lambda heard: True) -> np.ndarray:
        """Alarms as bool (runs, points)."""
        out = np.zeros(self.shape, dtype=bool)
        for heard in self.alarms:
            if keep(heard):
                out[heard.run, heard.at] = True
        return out

    def statistics(self) -> tuple[str, ...]:
        """Families that alarmed at least once."""
        return tuple(sorted({heard.statistic for heard in self.alarms}))


@dataclass(frozen=True)
class _Run:
    run: int
    steps: np.ndarray
    values: dict[str, np.ndarray]
    present: dict[str, np.ndarray]
    per_rank: dict[str, np.ndarray]
    target: float


def observations(
    steps: np.ndarray,
    values: dict[str, np.ndarray],
    present: dict[str, np.ndarray],
    per_rank: dict[str, np.ndarray],
) -> Iterable[tuple[int, Observation]]:
    """(position, observation) of every point at which anything was logged."""
    names = list(values)
    ranks = next(iter(per_rank.values())).shape[1] if per_rank else 0
    peers = (tuple(range(ranks)),) if ranks else ()
    columns = {name: values[name].tolist() for name in names}
    for at, step in enumerate(steps.tolist()):
        here = {name: columns[name][at] for name in names if present[name][at]}
        if here:
            yield at, Observation(step, at + 1, here, {name: x[at] for name, x in per_rank.items()}, peers)


def _judge(task: _Run) -> tuple[list[Heard], np.ndarray, float]:
    monitor = our_monitor(task.target)
    alarms: list[Heard] = []
    flagged = np.zeros(len(task.steps), dtype=bool)
    spent = 0.0
    for at, observation in observations(task.steps, task.values, task.present, task.per_rank):
        started = time.perf_counter()
        findings = monitor.observe(observation)
        news = monitor.absorb(observation, findings)
        spent += time.perf_counter() - started
        flagged[at] = any(f.severity >= Severity.WARN for f in findings)
        for alarm in news:
            alarms.append(Heard(task.run, at, alarm.severity, alarm.signal, alarm.statistic, alarm.onset_step))
    return alarms, flagged, spent


def judge(
    streams: Streams, target_per_10k: float = 1.0, workers: int = 1, tick: Callable[[], None] = lambda: None
) -> Judged:
    """All runs, each under a fresh monitor. tick is called after every run."""
    lengths = streams.lengths()
    tasks = [
        _Run(
            i,
            streams.steps[i, : lengths[i]],
            {name: x[i, : lengths[i]] for name, x in streams.values.items()},
            {name: streams.present(name)[i, : lengths[i]] for name in streams.values},
            {name: x[i, : lengths[i]] for name, x in streams.per_rank.items()},
            target_per_10k,
        )
        for i in range(streams.runs)
    ]
    results = []
    for result in in_processes(_judge, tasks, workers):
        results.append(result)
        tick()
    flagged = np.zeros(streams.steps.shape, dtype=bool)
    for i, (_, flags, _) in enumerate(results):
        flagged[i, : len(flags)] = flags
    return Judged(
        (streams.runs, streams.points),
        tuple(heard for alarms, _, _ in results for heard in alarms),
        flagged,
        sum(spent for _, _, spent in results),
        int(lengths.sum()),
    )


def in_processes(work: Callable, tasks: Sequence, workers: int) -> Iterable:
    """Results in the order of the tasks; in this process if there is one worker."""
    if workers <= 1 or len(tasks) <= 1:
        yield from map(work, tasks)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(work, tasks)
