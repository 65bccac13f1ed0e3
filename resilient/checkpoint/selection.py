"""Which state to go back to, or to start from: chosen by every rank alike from what all of them hold. Pure.

Each rank says in one vector of fixed size which snapshots it can reach and where (`encode`); one gather gives every rank all
vectors; `select` makes the same ordered list of targets of them everywhere, and says in words why newer ones are not in it.
A target that fails while it is loaded is followed by the next: no second exchange is needed to agree on that one.

Nearest tier first within one snapshot, the newest snapshot first among all: a copy from disk of step 90 is better than one from
memory of step 50. Tiers may differ by rank: where one host is new, it reads a peer's copy while the others copy from memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np

from resilient.checkpoint.trust import Key, Trust, TrustBook
from resilient.errors import CheckpointError, RankDisagreement

CAPACITY = 32  # snapshots a rank can offer; the newest that could be used go first
_FORMAT = 1.0
_HEADER = 5  # format, traces, onset, offers, offers left out
_FIELDS = 4  # step, attempt, copies, digest
_NO_ONSET = -1.0
_EXACT = 2**53  # integers in a float64

Start = Literal["fresh", "resume", "nothing usable"]


class Tier(IntEnum):
    """Nearest first."""

    MEMORY = 0  # this process's own ring
    PEER = 1  # another host's memory
    DISK = 2


class Copy(IntEnum):
    """What a rank knows of its own part of a snapshot in one tier."""

    ABSENT = 0
    THERE = 1  # complete by names and sizes, to be verified while it is loaded
    VERIFIED = 2  # every byte was compared with its digest
    REFUSED = 3  # missing, damaged, or restored to something else than was captured


@dataclass(frozen=True)
class Offer:
    """One snapshot as one rank can reach it. digest: 48 bits that ranks holding the same checkpoint have in common, 0:
    unknown. (A folder of one name may hold another commit where a directory listing is stale.)"""

    key: Key
    copies: Mapping[Tier, Copy]
    digest: int = 0

    @property
    def reachable(self) -> bool:
        return any(copy in (Copy.THERE, Copy.VERIFIED) for copy in self.copies.values())


@dataclass(frozen=True)
class Target:
    """tiers: from which each rank takes its part, in rank order."""

    key: Key
    tiers: tuple[Tier, ...]

    def __str__(self) -> str:
        chosen = np.array(self.tiers)
        names = [f"{tier.name.lower()} on {_ranks(chosen == tier)}" for tier in Tier if (chosen == tier).any()]
        return f"{self.key} from {', '.join(names)}"


@dataclass(frozen=True)
class Selection:
    """targets: to try in this order. refused: snapshots that are not among them, latest first, and why. traces: some rank
    sees that training has happened."""

    targets: tuple[Target, ...]
    refused: tuple[tuple[Key, str], ...]
    traces: bool

    @property
    def start(self) -> Start:
        """fresh: nothing was ever trained. nothing usable: something was, and it must not be thrown away in silence
        (BR-25): NothingUsable, exit code 77, unless run.on_no_valid_checkpoint says otherwise."""
        if self.targets:
            return "resume"
        return "nothing usable" if self.traces or self.refused else "fresh"

    def explain(self) -> str:
        """In words, for the journal: what comes first, what after it, and why nothing newer."""
        first = self.targets[0].key if self.targets else None
        lines = [f"target: {self.targets[0]}" if self.targets else f"no target: {self.start}"]
        lines += [f"then: {target}" for target in self.targets[1:]]
        lines += [f"not {key}: {why}" for key, why in self.refused if first is None or key.attempt > first.attempt]
        return "\n".join(lines)


# -- the vector ------------------------------------------------------------------------------------------------------


def width(capacity: int = CAPACITY) -> int:
    """Numbers in a rank's vector."""
    return _HEADER + _FIELDS * capacity


def encode(
    offers: Sequence[Offer], book: TrustBook, onset: int | None, *, traces: bool, capacity: int = CAPACITY
) -> np.ndarray:
    """(width(capacity),) float64: what this rank brings to the gather. The same onset and capacity on all ranks.

    onset: first step at which something was off, None at a start. traces: this rank sees that training has happened."""
    ordered = sorted(offers, key=lambda offer: _rank_of(offer.key, book, onset, offer.reachable), reverse=True)
    if len({offer.key for offer in offers}) < len(offers):
        raise CheckpointError(f"a snapshot is offered twice: {sorted(offer.key for offer in offers)}")
    vector = np.zeros(width(capacity), dtype=np.float64)
    some = ordered[:capacity]
    vector[:_HEADER] = (
        _FORMAT,
        float(traces),
        _NO_ONSET if onset is None else float(onset),
        float(len(some)),
        float(len(ordered) - len(some)),
    )
    for i, offer in enumerate(some):
        numbers = (*offer.key, _pack(offer.copies), offer.digest)
        if not all(0 <= number < _EXACT for number in numbers):
            raise CheckpointError(f"{offer.key} with digest {offer.digest} cannot be sent exactly")
        vector[_HEADER + _FIELDS * i : _HEADER + _FIELDS * (i + 1)] = numbers
    return vector


def decode(row: np.ndarray) -> list[Offer]:
    """The offers in one rank's vector. Raises RankDisagreement for one that `encode` did not write."""
    cells, counts = _cells(row[None])
    return [
        Offer(Key(int(step), int(attempt)), _unpack(int(copies)), int(digest))
        for step, attempt, copies, digest in cells[0, : counts[0]]
    ]


def _cells(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(world, capacity, _FIELDS) and (world,) int64: all offers, and how many of them each rank made."""
    world, numbers = matrix.shape
    capacity = max((numbers - _HEADER) // _FIELDS, 0)
    whole = numbers == width(capacity) and bool(np.isfinite(matrix).all() and (matrix >= _NO_ONSET).all())
    if not whole or not ((matrix[:, 0] == _FORMAT) & (matrix[:, 3] <= capacity)).all():
        raise RankDisagreement(f"a list of snapshots in another format: {matrix[:, :_HEADER].tolist()[:4]}")
    return matrix[:, _HEADER:].reshape(world, capacity, _FIELDS).astype(np.int64), matrix[:, 3].astype(np.int64)


def _pack(copies: Mapping[Tier, Copy]) -> int:
    return sum(int(copy) * len(Copy) ** int(tier) for tier, copy in copies.items())


def _unpack(number: int) -> dict[Tier, Copy]:
    return {tier: Copy(number // len(Copy) ** int(tier) % len(Copy)) for tier in Tier}


# -- the choice --------------------------------------------------------------------------------------------------------


def select(matrix: np.ndarray, book: TrustBook, onset: int | None = None) -> Selection:
    """The targets, the same on all ranks. matrix: (world, width) float64, what `encode` gave on each rank. book: equal on
    all ranks. onset: as it was given to `encode`.

    Going back (an onset): good snapshots first, then provisional ones; in each, those that training came through before
    those of a course given up, and the latest attempt first. Starting (none): provisional ones count as good, for nothing
    speaks against them. Raises RankDisagreement when the ranks did not ask the same."""
    wanted = _NO_ONSET if onset is None else float(onset)
    cells, counts = _cells(matrix)
    others = np.flatnonzero(matrix[:, 2] != wanted)
    if len(others):
        rank = int(others[0])
        raise RankDisagreement(
            f"rank {rank} looks for a snapshot before step {matrix[rank, 2]:.0f}, this rank {wanted:.0f}"
        )
    made = np.arange(cells.shape[1]) < counts[:, None]
    keys = [Key(int(step), int(attempt)) for step, attempt in np.unique(cells[made][:, :2], axis=0)]
    usable: dict[Key, _Held] = {}
    refused: list[tuple[Key, str]] = []
    for key in sorted(keys, key=lambda key: key.attempt, reverse=True):
        held = _Held.of(key, cells, made, matrix[:, 4] > 0)
        why = _why_not(key, held, book, onset)
        if why:
            refused.append((key, why))
        else:
            usable[key] = held
    ordered = sorted(usable, key=lambda key: _rank_of(key, book, onset, True), reverse=True)
    targets = [target for key in ordered for target in _assignments(key, usable[key])]
    return Selection(tuple(targets), tuple(refused), bool((matrix[:, 1] > 0).any()))


@dataclass(frozen=True)
class _Held:
    """One snapshot on all ranks. offered, cut: (world,) bool, cut for a rank that had more to offer than there was room for.
    copies: (world, tiers) of Copy, digests: (world,); both mean something where it is offered."""

    offered: np.ndarray
    cut: np.ndarray
    copies: np.ndarray
    digests: np.ndarray

    @classmethod
    def of(cls, key: Key, cells: np.ndarray, made: np.ndarray, cut: np.ndarray) -> _Held:
        found = made & (cells[:, :, 0] == key.step) & (cells[:, :, 1] == key.attempt)
        offered = found.any(axis=1)
        own = cells[np.arange(len(cells)), found.argmax(axis=1)]
        copies = own[:, 2, None] // len(Copy) ** np.arange(len(Tier)) % len(Copy)
        return cls(offered, cut, copies, own[:, 3])

    @property
    def readable(self) -> np.ndarray:
        """(world, tiers) bool."""
        return (self.copies == Copy.THERE) | (self.copies == Copy.VERIFIED)


def _rank_of(key: Key, book: TrustBook, onset: int | None, reachable: bool) -> tuple[bool, int, bool, int]:
    """Sorts snapshots from useless to best; see `select` for the order."""
    level, in_force = book.level(key), book.in_force(key)
    usable = reachable and level >= Trust.PROVISIONAL and (onset is None or key.step < onset)
    if onset is None:
        return usable, int(in_force), in_force or level is Trust.GOOD, key.attempt
    return usable, int(level), in_force, key.attempt


def _why_not(key: Key, held: _Held, book: TrustBook, onset: int | None) -> str:
    """An empty text for a snapshot that can be a target."""
    level = book.level(key)
    if level < Trust.PROVISIONAL:
        return f"{level.word}: {'; '.join(book.reasons(key)) or 'no reason was kept'}"
    if onset is not None and key.step >= onset:
        return f"at or after the onset at step {onset}"
    if not held.offered.all():
        full = ~held.offered & held.cut
        more = f" ({_ranks(full)} held more than could be listed)" if full.any() else ""
        return f"{_ranks(~held.offered)} cannot reach it in any tier{more}"
    lost = held.readable.sum(axis=1) == 0
    if lost.any():
        bad = (held.copies[lost] == Copy.REFUSED).any(axis=0)
        why = "; ".join(book.refused(key).values())
        tiers = ", ".join(tier.name.lower() for tier in Tier if bad[tier])
        what = f" (refused: {tiers}{': ' + why if why else ''})" if tiers else ""
        return f"{_ranks(lost)} cannot read it in any tier{what}"
    digests = np.unique(held.digests[held.digests > 0])
    if len(digests) > 1:
        sides = [_ranks(held.digests == digest) for digest in digests[:3]]
        return f"ranks hold different checkpoints under this name: {' against '.join(sides)}"
    return ""


def _assignments(key: Key, held: _Held) -> list[Target]:
    """The ways to load one snapshot: each rank from its nearest tier; if that fails, from its nearest beyond memory; then
    from disk. A rank that has nothing farther stays with what it has."""
    readable, all_tiers = held.readable, list(Tier)
    farthest = len(Tier) - 1 - readable[:, ::-1].argmax(axis=1)
    found: dict[tuple[Tier, ...], None] = {}
    for floor in Tier:
        beyond = readable[:, floor:]
        tiers = np.where(beyond.any(axis=1), floor + beyond.argmax(axis=1), farthest)
        found.setdefault(tuple(all_tiers[tier] for tier in tiers.tolist()))
    return [Target(key, tiers) for tiers in found]


def _ranks(mask: np.ndarray) -> str:
    """Of a (world,) bool: "all ranks", "rank 3", "ranks 1, 2, 5", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"."""
    ranks = np.flatnonzero(mask).tolist()
    if len(ranks) == len(mask):
        return "all ranks" if len(mask) > 1 else "this rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more}"
