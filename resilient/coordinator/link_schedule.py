"""Who measures the link to whom, and when: rounds of disjoint pairs, the same on every rank. Pure.

A round is a row of partners: `partners[round, rank]` is the rank to play with, IDLE for nobody. All pairs of a round are
measured at once. `first` is short, 3 + log2 of the players per kind of link, and gives every rank several partners: a
rank that is slow or corrupts is bad with all of them, a single bad link only with one. It begins with the neighbours,
because ring collectives live on those links. `rest` holds the other rounds of a full tournament (the circle method of
round-robin schedules, Lucas 1883): every pair that `first` has left out, for as long as there is time.

When ranks lie on several hosts, hosts play against hosts, lane against lane (the ranks with the same place in their
host, as rail-optimised networks are built), and the ranks within each host play among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IDLE = -1
Pair = tuple[int, int]


@dataclass(frozen=True)
class Schedule:
    """first, rest: partners, int64 (rounds, world)."""

    first: np.ndarray
    rest: np.ndarray

    @property
    def pairs(self) -> int:
        """How many different pairs meet."""
        partners = np.concatenate([self.first, self.rest])
        world = partners.shape[1]
        return len(np.unique((partners + world * np.arange(world))[partners > np.arange(world)]))


def schedule(hosts: Sequence[str]) -> Schedule:
    """The tournament of len(hosts) ranks; hosts[rank] is the rank's host."""
    players = lanes(hosts)
    inside = [[_among(table, ranks, len(hosts)) for table in _tables(len(ranks))] for ranks in players]
    first, rest = (_together([halves[part] for halves in inside], len(hosts)) for part in (0, 1))
    if len(players) > 1:
        across_first, across_rest = (_across(table, players, len(hosts)) for table in _tables(len(players)))
        if len(players) == 2 and len(hosts) > 2:  # one round only: a second, lanes crossed, gives ranks another partner
            across_first = np.concatenate([across_first, _across(circle(2), players, len(hosts), shift=1)])
        first, rest = np.concatenate([across_first, first]), np.concatenate([rest, across_rest])
    return Schedule(_played(first), _played(rest))


def lanes(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first rank."""
    players: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        players.setdefault(host, []).append(rank)
    return list(players.values())


def circle(n: int) -> np.ndarray:
    """A full tournament of n players: n - 1 rounds (n if n is odd, with one player idle in each), (rounds, n).

    In round t the players i and j with i + j = t modulo the odd number m of seats meet; with an even n the last
    player meets whoever would have met himself."""
    m = n if n % 2 else n - 1
    if n < 2:
        return np.empty((0, n), dtype=np.int64)
    t, i = np.arange(m)[:, None], np.arange(m)[None, :]
    partners = (t - i) % m
    alone = partners == i
    if n % 2:
        return np.where(alone, IDLE, partners)
    last = np.argmax(alone, axis=1)[:, None]
    return np.concatenate([np.where(alone, m, partners), last], axis=1)


def ring(n: int) -> np.ndarray:
    """Every player with both of its neighbours: 2 rounds, 3 if n is odd, 1 for two players, (rounds, n)."""
    if n <= 2:
        return circle(n)
    rows = []
    for start in (0, 1) if n % 2 == 0 else (0, 1, n - 1):
        row = np.full(n, IDLE, dtype=np.int64)
        for left in range(start, start + n - n % 2, 2):
            a, b = left % n, (left + 1) % n
            row[a], row[b] = b, a
        rows.append(row)
    return np.stack(rows)


def follow_up(pairs: Sequence[Pair], world: int) -> np.ndarray:
    """Rounds in which just these pairs meet, in the order given: the first round in which both are free."""
    rows: list[np.ndarray] = []
    for a, b in pairs:
        row = next((row for row in rows if row[a] == IDLE and row[b] == IDLE), None)
        if row is None:
            row = np.full(world, IDLE, dtype=np.int64)
            rows.append(row)
        row[a], row[b] = b, a
    return np.stack(rows) if rows else np.empty((0, world), dtype=np.int64)


def pairs_of(partners: np.ndarray) -> set[Pair]:
    """All pairs (low, high) that meet."""
    low = np.broadcast_to(np.arange(partners.shape[1]), partners.shape)
    met = partners > low
    return set(zip(low[met].tolist(), partners[met].tolist(), strict=True))


def _tables(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(first, rest) of n players: neighbours and a few rounds of the tournament; its other rounds."""
    everything = circle(n)
    if n <= 3:
        return everything, everything[:0]
    count = (n - 1).bit_length()
    chosen = np.linspace(0, len(everything) - 1, count).round().astype(int)
    return np.concatenate([ring(n), everything[chosen]]), np.delete(everything, chosen, axis=0)


def _among(table: np.ndarray, ranks: Sequence[int], world: int) -> np.ndarray:
    """A table of len(ranks) players, played by these ranks."""
    names = np.array([*ranks, IDLE])
    rounds = np.full((len(table), world), IDLE, dtype=np.int64)
    rounds[:, list(ranks)] = names[table]
    return rounds


def _across(table: np.ndarray, players: Sequence[Sequence[int]], world: int, shift: int = 0) -> np.ndarray:
    """A table of hosts, played lane by lane. On a larger host the lanes take turns, so that none is left out."""
    rounds = np.full((len(table), world), IDLE, dtype=np.int64)
    for t, row in enumerate(table):
        for a, b in enumerate(row):
            if b <= a:  # idle, or entered from the other side
                continue
            few, many = sorted((players[a], players[b]), key=len)
            turn = shift + (t if len(few) < len(many) else 0)
            for lane, rank in enumerate(few):
                other = many[(lane + turn) % len(many)]
                rounds[t, rank], rounds[t, other] = other, rank
    return rounds


def _together(tables: Sequence[np.ndarray], world: int) -> np.ndarray:
    """Tables of disjoint ranks, played at the same time."""
    together = np.full((max(map(len, tables)), world), IDLE, dtype=np.int64)
    for table in tables:
        together[: len(table)] = np.maximum(together[: len(table)], table)
    return together


def _played(rounds: np.ndarray) -> np.ndarray:
    return rounds[(rounds != IDLE).any(axis=1)]
