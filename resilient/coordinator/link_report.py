"""What the figures of a link probe say. Pure: the same table gives the same report on every rank.

Links are compared with their like, within hosts or across, and never with a fixed figure. The reference is the median
over the ranks of each rank's best link: one bad rank spoils every link that it has, but not the best link of any other.
Slow is what even at its best is a multiple of that, and by more than the links' own jitter, and was so again when
measured a second and a third time: a busy host delays some messages, a slow link all of them. Wrong bits need no second look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from resilient.coordinator.link_schedule import IDLE, Pair
from resilient.signals import LinkReport

# Of one rank and round. us: least, median, 95th percentile. MB/s each way, both ways at once: greatest, median. wrong:
# 32-bit words received that were not as sent.
LINK_COLUMNS = ("latency_best", "latency", "latency_p95", "rate_best", "rate", "wrong")
# Of one rank. matmul in s, its wrong elements, in two runs; wrong words of the collectives; seconds the probe took.
MACHINE_COLUMNS = (
    *("matmul_best", "matmul", "matmul_wrong", "matmul_best_again", "matmul_again", "matmul_wrong_again"),
    *("reduce_wrong", "gather_wrong", "broadcast_wrong", "seconds"),
)
LOOKS = 2  # how often what seems slow is measured again
_LOOKED_AT_AGAIN = 4  # slow links per rank that are
_LINES = 12  # of each kind in `measured`


@dataclass(frozen=True)
class Limits:
    """How far beyond the reference is slow. link, matmul: factors. us, payload_s, matmul_s: and at least this much more."""

    link: float
    us: float
    payload_s: float
    matmul: float
    matmul_s: float


# On a CPU, ranks share cores with each other and with the data loader; a GPU has its clock to itself.
LIMITS = {"cpu": Limits(3.0, 1000.0, 5e-3, 3.0, 1e-3), "cuda": Limits(2.0, 100.0, 1e-3, 1.3, 1e-3)}


@dataclass(frozen=True)
class Stage:
    """Rounds that were played. partners: (rounds, world). figures: (world, rounds, LINK_COLUMNS), NaN where idle.
    payload_mb: the largest message."""

    partners: np.ndarray
    figures: np.ndarray
    payload_mb: float

    def followed_by(self, more: Stage) -> Stage:
        """Both, one after the other."""
        return Stage(
            np.concatenate([self.partners, more.partners]),
            np.concatenate([self.figures, more.figures], axis=1),
            self.payload_mb,
        )


@dataclass(frozen=True)
class Measured:
    """Everything that was measured, the same on all ranks. machines: (world, MACHINE_COLUMNS). first: the rounds that
    name a bad rank. rest: other pairs, in brief. again: LOOKS more looks at what had
    looked slow until then. pairs: that a full tournament has."""

    hosts: tuple[str, ...]
    device: str
    machines: np.ndarray
    first: Stage
    rest: Stage
    again: tuple[Stage, ...]
    pairs: int

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.first, self.rest, *self.again)

    def machine(self, column: str) -> np.ndarray:
        """(world,) of MACHINE_COLUMNS."""
        return self.machines[:, MACHINE_COLUMNS.index(column)]


@dataclass(frozen=True)
class Links:
    """The pairs of a stage. pairs: int64 (n, 2), low rank first, each once. inside: both on one host. The better figure
    of both ends and of all rounds for what is judged; wrong: float64 (n, 2), words that the low and the high rank
    received wrong, over all rounds."""

    pairs: np.ndarray
    inside: np.ndarray
    latency_best: np.ndarray
    latency: np.ndarray
    latency_p95: np.ndarray
    rate_best: np.ndarray
    rate: np.ndarray
    wrong: np.ndarray

    def index(self, pair: Pair) -> int:
        """Where `pair` is."""
        return int(np.flatnonzero((self.pairs == pair).all(axis=1))[0])

    def names(self, chosen: np.ndarray) -> list[Pair]:
        """The pairs where `chosen`, a mask or an index."""
        return [(int(a), int(b)) for a, b in self.pairs[chosen]]


def links_of(hosts: Sequence[str], *stages: Stage) -> Links:
    """The figures of stages by pair."""
    rows, pairs = [], []
    for stage in stages:
        rounds, low = np.nonzero(stage.partners > np.arange(len(hosts)))
        high = stage.partners[rounds, low]
        pairs.append(np.stack([low, high], axis=1))
        rows.append(np.stack([stage.figures[low, rounds], stage.figures[high, rounds]], axis=1))
    both = np.concatenate(rows)  # (meetings, two ends, columns)
    codes, index = np.unique(np.concatenate(pairs) @ [len(hosts), 1], return_inverse=True)
    unique = np.stack(np.divmod(codes, len(hosts)), axis=1)

    def best(column: str, pick: np.ufunc) -> np.ndarray:
        values = np.full(len(unique), np.nan)
        figures = pick.reduce(both[:, :, LINK_COLUMNS.index(column)], axis=1)
        pick.at(values, index, figures)
        return values

    wrong = np.zeros((len(unique), 2))
    np.add.at(wrong, index, both[:, :, LINK_COLUMNS.index("wrong")])
    places = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
    host = np.array([places[h] for h in hosts])
    return Links(
        pairs=unique,
        inside=host[unique[:, 0]] == host[unique[:, 1]],
        latency_best=best("latency_best", np.fmin),
        latency=best("latency", np.fmin),
        latency_p95=best("latency_p95", np.fmin),
        rate_best=best("rate_best", np.fmax),
        rate=best("rate", np.fmax),
        wrong=wrong,
    )


def reference(pairs: np.ndarray, values: np.ndarray, world: int) -> float:
    """The (lower) median over ranks of the least value among each rank's pairs. Inf if there is nothing to compare."""
    if len(pairs) < 2:
        return np.inf
    best = np.full(world, np.inf)
    for end in (0, 1):
        np.minimum.at(best, pairs[:, end], values)
    return _lower_median(best[np.isfinite(best)])


def slowness(links: Links, payload_mb: float, against: Links, limits: Limits, world: int) -> np.ndarray:
    """(n,) by how much each link exceeds what is allowed; 1 or more is slow, 0 where there is nothing to compare.

    against: the links that give the reference, measured in the same way."""
    found = np.zeros(len(links.pairs))
    for inside in (True, False):
        mine, theirs = links.inside == inside, against.inside == inside
        pairs = against.pairs[theirs]
        if not mine.any() or len(pairs) < 2:
            continue
        jitter = float(np.median(against.latency_p95[theirs] - against.latency[theirs]))  # us
        base = reference(pairs, against.latency_best[theirs], world)
        late = links.latency_best[mine] / max(limits.link * base, base + max(limits.us, jitter))
        base = reference(pairs, payload_mb / against.rate_best[theirs], world)
        long = payload_mb / links.rate_best[mine]
        long /= max(limits.link * base, base + max(limits.payload_s, jitter / 1e6))
        found[mine] = np.maximum(late, long)
    return found


def suspects(hosts: Sequence[str], device: str, first: Stage, rest: Stage) -> list[Pair]:
    """Links that look slow, the worst first, at most a few of each rank: to be measured again."""
    found: list[tuple[float, Pair]] = []
    for stage in (first, rest):
        if not len(stage.partners):
            continue
        links = links_of(hosts, stage)
        score = slowness(links, stage.payload_mb, links, LIMITS[device], len(hosts))
        slow = score >= 1
        found += [(-s, pair) for s, pair in zip(score[slow].tolist(), links.names(slow), strict=True)]
    taken: Counter[int] = Counter()
    chosen: list[Pair] = []
    for _, (a, b) in sorted(found):
        if (a, b) not in chosen and taken[a] < _LOOKED_AT_AGAIN and taken[b] < _LOOKED_AT_AGAIN:
            chosen.append((a, b))
            taken.update((a, b))
    return chosen


def still_slow(hosts: Sequence[str], device: str, first: Stage, again: Stage) -> list[Pair]:
    """Of the links that were measured again, those that are slow against what the first rounds have found usual."""
    if not len(again.partners):
        return []
    links = links_of(hosts, again)
    score = slowness(links, again.payload_mb, links_of(hosts, first), LIMITS[device], len(hosts))
    return links.names(score >= 1)


def judge(measured: Measured) -> LinkReport:
    """The report. A rank whose links are slow or wrong is the one that all these pairs have in common: `shared_ranks`."""
    hosts, limits = measured.hosts, LIMITS[measured.device]
    every = links_of(hosts, *measured.stages)
    wrong_pairs = every.names(every.wrong.sum(axis=1) > 0)
    slow_pairs = still_slow(hosts, measured.device, measured.first, measured.again[-1]) if measured.again else []
    slow_ranks = np.flatnonzero(_slow_matmul(measured, limits)).tolist()
    wrong = measured.machine("matmul_wrong") + measured.machine("matmul_wrong_again") > 0
    together = _wrong_together(measured)
    if not wrong_pairs:  # else the collectives are wrong because a link is
        wrong |= together > 0
    return LinkReport(
        slow_pairs=tuple(slow_pairs),
        wrong_pairs=tuple(wrong_pairs),
        slow_ranks=tuple(slow_ranks),
        wrong_ranks=tuple(int(r) for r in np.flatnonzero(wrong)),
        measured=tuple(_lines(measured, every, slow_pairs, wrong_pairs, slow_ranks)),
    )


def shared_ranks(pairs: Sequence[Pair]) -> tuple[int, ...]:
    """Ranks that explain several of the pairs each, the most first: a bad rank has a bad link to everyone. What no such
    rank explains is a bad link."""
    left, ranks = list(pairs), []
    while left:
        counts = Counter(rank for pair in left for rank in pair)
        rank, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
        if count < 2:
            break
        ranks.append(rank)
        left = [pair for pair in left if rank not in pair]
    return tuple(ranks)


def blame(notes: Mapping[int, Mapping[str, Any]], world: int) -> tuple[list[Pair], list[int]]:
    """(links, ranks) that did not answer, from what each rank was waiting for when it gave up (`peer`, `waited` s; empty:
    it had finished). A rank without a note is silent. Most wait for a rank that waits itself; the fault is where two
    wait for each other, or one for a silent rank."""
    missing = [rank for rank in range(world) if rank not in notes]
    waits = {rank: (note["peer"], note["waited"]) for rank, note in notes.items() if note}
    longest = max((waited for _, waited in waits.values()), default=0.0)
    pairs = []
    for rank, (peer, waited) in sorted(waits.items()):
        other, other_waited = waits.get(peer, (IDLE, 0.0))
        # a healthy pair may be caught in the middle of a message when all is torn down: it had not waited for long
        if rank < peer and other == rank and min(waited, other_waited) >= longest / 4:
            pairs.append((rank, peer))
    return pairs, missing


def _slow_matmul(measured: Measured, limits: Limits) -> np.ndarray:
    """bool (world,): slow in both runs, against what the ranks can do at their best."""
    best = np.minimum(measured.machine("matmul_best"), measured.machine("matmul_best_again"))
    base = _lower_median(best)
    return best > max(limits.matmul * base, base + limits.matmul_s)


def _wrong_together(measured: Measured) -> np.ndarray:
    return sum(measured.machine(f"{name}_wrong") for name in ("reduce", "gather", "broadcast"))  # type: ignore[return-value]


def _lower_median(values: np.ndarray) -> float:
    """Of two values the lower one: a slow half must not be its own reference."""
    return float(np.sort(values)[(len(values) - 1) // 2]) if len(values) else np.inf


# -- lines for a person ------------------------------------------------------------------------------------------------


def _lines(
    measured: Measured, every: Links, slow: Sequence[Pair], wrong: Sequence[Pair], slow_ranks: Sequence[int]
) -> list[str]:
    hosts = measured.hosts

    def rank_name(rank: int) -> str:
        return f"rank {rank} ({hosts[rank]})"

    def named(pairs: Sequence[Pair], what: str) -> list[str]:
        return [f"{what}: {rank_name(rank)} is in several of these links" for rank in shared_ranks(pairs)]

    lines = _summary(measured, every)
    for pair in slow[:_LINES]:
        i = every.index(pair)
        lines.append(
            f"slow link: {rank_name(pair[0])} to {rank_name(pair[1])}: latency {every.latency[i]:,.0f} us, "
            f"{every.rate[i]:,.1f} MB/s"
        )
    lines += named(slow, "slow")
    for pair in wrong[:_LINES]:
        for end, words in enumerate(every.wrong[every.index(pair)]):
            if words:
                lines.append(
                    f"wrong bits: {rank_name(pair[end])} received {words:,.0f} wrong words from {rank_name(pair[1 - end])}"
                )
    lines += named(wrong, "wrong bits")
    spent = measured.machine("matmul")
    lines += [f"slow matmul: {rank_name(r)}: {spent[r] * 1e3:.1f} ms" for r in slow_ranks[:_LINES]]
    wrong_elements = measured.machine("matmul_wrong") + measured.machine("matmul_wrong_again")
    for rank in np.flatnonzero(wrong_elements)[:_LINES]:
        lines.append(f"wrong matmul: {rank_name(rank)}: {wrong_elements[rank]:,.0f} elements of a known product")
    for rank in np.flatnonzero(_wrong_together(measured))[:_LINES]:
        counts = [f"{measured.machine(f'{c}_wrong')[rank]:,.0f} in {n}" for c, n in _COLLECTIVES.items()]
        lines.append(f"wrong words in collectives of all ranks: {rank_name(rank)}: {', '.join(counts)}")
    return lines


_COLLECTIVES = {"reduce": "all-reduce", "gather": "all-gather", "broadcast": "broadcast"}


def _summary(measured: Measured, every: Links) -> list[str]:
    lines = []
    for inside, where in ((True, "within hosts"), (False, "across hosts")):
        chosen = every.inside == inside
        if chosen.any():
            full = links_of(measured.hosts, measured.first)
            rates = full.rate[full.inside == inside]
            lines.append(
                f"{'1 link' if chosen.sum() == 1 else f'{int(chosen.sum())} links'} {where}: latency {np.median(every.latency[chosen]):,.0f} us (95th percentile "
                f"{np.median(every.latency_p95[chosen]):,.0f}), {np.median(rates):,.1f} MB/s each way"
                + (", nothing to compare it with" if chosen.sum() == 1 else "")
            )
    if len(every.pairs) < measured.pairs:
        lines.append(
            f"{measured.pairs - len(every.pairs)} of {measured.pairs} links were not measured for want of time"
        )
    spent = measured.machine("matmul_best")
    lines.append(f"matmul self-test: {np.median(spent) * 1e3:.2f} ms, slowest {spent.max() * 1e3:.2f} ms")
    return lines
