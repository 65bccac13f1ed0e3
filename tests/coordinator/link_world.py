"""A simulated world for the link probe: figures as ranks would measure them, with one thing broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resilient.coordinator.link_report import (
    LINK_COLUMNS,
    LOOKS,
    MACHINE_COLUMNS,
    Measured,
    Stage,
    judge,
    still_slow,
    suspects,
)
from resilient.coordinator.link_schedule import IDLE, Pair, follow_up, schedule
from resilient.signals import LinkReport

_FULL_MB, _SCREEN_MB = 1.0, 0.065536


@dataclass(frozen=True)
class Broken:
    """slow, corrupting: a rank, a pair, or a host's name. factor: of latency and time of a slow link."""

    slow: int | Pair | str | None = None
    corrupting: int | Pair | None = None
    factor: float = 20.0


def measured(hosts: Sequence[str], broken: Broken, *, seed: int = 0, rest: bool = True) -> Measured:
    """What `measure` would return. rest: there was time for the whole tournament."""
    random = np.random.default_rng(seed)
    plan = schedule(hosts)
    first = _play(hosts, plan.first, broken, random, _FULL_MB)
    others = _play(hosts, plan.rest if rest else plan.rest[:0], broken, random, _SCREEN_MB)
    again = []
    slow = suspects(hosts, "cpu", first, others)
    for _ in range(LOOKS):
        again.append(_play(hosts, follow_up(slow, len(hosts)), broken, random, _FULL_MB))
        slow = still_slow(hosts, "cpu", first, again[-1])
    machines = np.zeros((len(hosts), len(MACHINE_COLUMNS)))
    for name in ("matmul_best", "matmul", "matmul_best_again", "matmul_again"):
        machines[:, MACHINE_COLUMNS.index(name)] = 3e-3 * random.lognormal(0, 0.2, len(hosts))
    return Measured(
        hosts=tuple(hosts),
        device="cpu",
        machines=machines,
        first=first,
        rest=others,
        again=tuple(again),
        pairs=plan.pairs,
    )


def report(hosts: Sequence[str], broken: Broken, *, seed: int = 0, rest: bool = True) -> LinkReport:
    """The verdict on that world."""
    return judge(measured(hosts, broken, seed=seed, rest=rest))


def _play(
    hosts: Sequence[str], partners: np.ndarray, broken: Broken, random: np.random.Generator, payload_mb: float
) -> Stage:
    """Links across hosts: 600 us and 400 MB/s; within: 200 us, 1,200 MB/s; log-normal noise, a heavy tail in the p95."""
    world = len(hosts)
    rank = np.broadcast_to(np.arange(world), partners.shape)
    met = partners != IDLE
    other = np.where(met, partners, 0)
    places = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
    host = np.array([places[h] for h in hosts])
    inside = host[rank] == host[other]
    slow = _hit(broken.slow, rank, other, host, places) & (~inside if isinstance(broken.slow, str) else True)
    latency = np.where(inside, 200.0, 600.0) * np.where(slow, broken.factor, 1.0) * random.lognormal(0, 0.2, met.shape)
    rate = np.where(inside, 1200.0, 400.0) / np.where(slow, broken.factor, 1.0) * random.lognormal(0, 0.2, met.shape)
    figures = np.zeros((*partners.shape, len(LINK_COLUMNS)))
    figures[..., 0], figures[..., 1] = 0.9 * latency, latency
    figures[..., 2] = latency * (1 + random.exponential(0.5, met.shape))
    figures[..., 3], figures[..., 4] = 1.1 * rate, rate
    if isinstance(broken.corrupting, tuple):
        figures[..., 5] = _hit(broken.corrupting, rank, other, host, places) * 3
    elif broken.corrupting is not None:  # it sends wrong bits; what it receives is right
        figures[..., 5] = (other == broken.corrupting) * 3
    figures[~met] = np.nan
    return Stage(partners, figures.transpose(1, 0, 2), payload_mb)


def _hit(
    what: int | Pair | str | None, rank: np.ndarray, other: np.ndarray, host: np.ndarray, places: dict
) -> np.ndarray:
    if what is None:
        return np.zeros(rank.shape, dtype=bool)
    if isinstance(what, str):
        return (host[rank] == places[what]) | (host[other] == places[what])
    if isinstance(what, tuple):
        return ((rank == what[0]) & (other == what[1])) | ((rank == what[1]) & (other == what[0]))
    return (rank == what) | (other == what)
