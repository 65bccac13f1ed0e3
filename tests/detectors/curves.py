"""Signals for the detector tests: healthy noise and what is done to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from resilient.detectors import DetectorConfig, Monitor, build_monitor
from resilient.signals import Alarm, Finding, Observation


def noise(rng: np.random.Generator, n: int, kind: str = "gauss", rho: float = 0.3) -> np.ndarray:
    """Unit-variance AR(1) noise, normal or Student-t3."""
    e = rng.standard_normal(n) if kind == "gauss" else rng.standard_t(3, n) / np.sqrt(3)
    out = np.empty(n)
    out[0] = e[0]
    for i in range(1, n):
        out[i] = rho * out[i - 1] + np.sqrt(1 - rho * rho) * e[i]
    return out


def calm(n: int, seed: int = 0, kind: str = "gauss", loss: float = 2.2, norm: float = 0.24) -> dict[str, np.ndarray]:
    """A settled run: loss with 1 % noise, gradient norm with 15 %."""
    rng = np.random.default_rng(seed)
    return {
        "loss": loss * np.exp(0.01 * noise(rng, n, kind)),
        "grad_norm": norm * np.exp(0.15 * noise(rng, n, kind)),
    }


def observations(
    signals: Mapping[str, np.ndarray | Sequence[float]], *, every: int = 1, start: int = 1
) -> list[Observation]:
    n = len(next(iter(signals.values())))
    return [
        Observation(start + i * every, start + i, {name: float(values[i]) for name, values in signals.items()})
        for i in range(n)
    ]


def run(
    stream: Sequence[Observation], monitor: Monitor | None = None
) -> tuple[Monitor, list[tuple[Finding, ...]], list[Alarm]]:
    """(monitor, findings of each observation, alarms) of a stream in which every step was applied."""
    monitor = monitor or build_monitor(DetectorConfig())
    found, alarms = [], []
    for observation in stream:
        findings = monitor.observe(observation)
        found.append(findings)
        alarms += monitor.absorb(observation, findings, True)
    return monitor, found, alarms
