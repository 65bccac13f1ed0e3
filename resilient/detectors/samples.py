"""The same sample on two ranks, in one window or in different ones: a sampler that differs from the others' (S18).

Every row brings the smallest digests of its window's samples (`digest_sample_*`). A sample that comes again came either by
chance (copies in the data, drawing with replacement, a second pass over them that nobody announced), or because two ranks
do not share the data out between them. Chance has no favourites: of the pairs (rank that read it before, rank that reads it
now) among w ranks, a part of 1/w is a rank with itself, and a part of 2 (w - 1) / w^2 is a given rank with another one. A
rank whose sampler has another seed, epoch or share meets samples of the others, never its own; two ranks with the same
share meet each other. So a rank is named when so many of the pairs are its own with another one that chance would bring
that about less than once in 20,000 times (Chernoff's bound of the binomial tail; 15 pairs of two ranks, 11 of four).

What is remembered are the smallest digests of all ranks and windows, so many that it takes 200 KiB: of common samples as
large a share is found as of all samples is remembered. When nearly every sample of an attempt has been there before, a
new pass over the data has begun: what was remembered is of the last one and is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from resilient.signals import Finding, Observation, Severity

COLUMNS = tuple(f"digest_sample_{i}" for i in range(4))
_SURE = 10.0  # nats: a chance of 5e-5; more where there are more than 8 ranks to be wrong about
_REMEMBERED = 16_384
_NEW_PASS = 0.75  # share of an attempt's samples that have been there before
_FADE = 1024  # pairs after which all counts are halved
_NAMED = 16


class SharedSamples:
    """One per run; silent where no sample is told. O(world) work per attempt."""

    name = "samples"

    def __init__(self) -> None:
        self._start_anew(0)

    def _start_anew(self, world: int) -> None:
        self._keys = np.empty(0)  # ascending
        self._owners = np.empty(0, dtype=np.int32)
        self._last = np.empty(0)  # keys of the attempt before
        self._pairs = np.zeros(world)  # of the rank's peer group, its own among them
        self._mine = np.zeros(world)  # of them, those of this rank with another
        self._onset = np.zeros(world, dtype=np.int64)  # step of the first of those

    def observe(self, observation: Observation) -> list[Finding]:
        keys, owners = self._told(observation)
        world = self._world(observation)
        if not len(keys) or len(self._pairs) != world:
            return []
        before, now = self._meetings(keys, owners)
        if not len(now):  # what is known already was told when it came
            return []
        pairs, mine = self._counted(before, now, self._groups(observation, world))
        sizes = np.zeros(world)
        for group in observation.peers:
            sizes[list(group)] = len(group)
        evidence = _evidence(mine, pairs, sizes)
        ranks = np.flatnonzero(evidence >= _SURE + math.log(max(world / 8, 1.0)))
        if not len(ranks):
            return []
        order = ranks[np.lexsort((ranks, -evidence[ranks]))][:_NAMED]
        named = tuple(sorted(int(r) for r in order))
        worst = int(order[0])
        onset = self._onset[list(named)]
        return [
            Finding(
                detector=self.name,
                signal="digest_sample",
                severity=Severity.WARN,
                score=float(evidence[worst]),
                step=observation.step,
                onset_step=int(onset[onset > 0].min()) if (onset > 0).any() else observation.step,
                ranks=named,
                statistic="batch",
                message=(
                    f"of {int(pairs[worst])} samples that came again lately, {int(mine[worst])} were read by rank {worst} "
                    f"and by another rank, by chance about {float(pairs[worst]) * _even(float(sizes[worst])):.0f} would be: the seed, epoch or "
                    f"share of a sampler differs ({', '.join(map(str, named))})"
                ),
            )
        ]

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        keys, owners = self._told(observation)
        world = self._world(observation)
        if not len(keys):
            return
        if len(self._pairs) != world:
            self._start_anew(world)
        if np.array_equal(keys, self._last):  # the same windows run again
            return
        before, now = self._meetings(keys, owners)
        self._last = keys
        if len(now) >= _NEW_PASS * max(int(np.count_nonzero(keys <= self._bound())), 1) and len(now) > 1:
            self._keys, self._owners = np.empty(0), np.empty(0, dtype=np.int32)
        elif len(now):
            had = self._mine > 0
            self._pairs, self._mine = self._counted(before, now, self._groups(observation, world))
            self._onset = np.where(had, self._onset, np.where(self._mine > 0, observation.step, 0))
            if self._pairs.max() >= _FADE:
                self._pairs, self._mine = self._pairs / 2, self._mine / 2
        self._remember(keys, owners)

    def _told(self, observation: Observation) -> tuple[np.ndarray, np.ndarray]:
        """Digests and whose they are, by size."""
        columns = [observation.per_rank[name] for name in COLUMNS if name in observation.per_rank]
        if not columns or len(columns[0]) < 2 or not observation.peers:
            return np.empty(0), np.empty(0, dtype=np.int32)
        values = np.stack(columns)
        bound = self._bound()
        _, owners = np.nonzero(values <= bound)  # NaN is not
        keys = values[values <= bound]
        order = np.lexsort((owners, keys))
        return keys[order], owners[order].astype(np.int32)

    def _world(self, observation: Observation) -> int:
        return len(observation.per_rank.get(COLUMNS[0], ()))

    def _groups(self, observation: Observation, world: int) -> np.ndarray:
        group_of = np.full(world, -1)
        for i, group in enumerate(observation.peers):
            group_of[list(group)] = i
        return group_of

    def _bound(self) -> float:
        """A digest beyond it is not remembered."""
        return float(self._keys[-1]) if len(self._keys) >= _REMEMBERED else math.inf

    def _meetings(self, keys: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ranks that had read it, ranks that read it now), one entry a sample; in one window the lower rank was first."""
        if np.array_equal(keys, self._last):
            return owners[:0], owners[:0]
        twice = np.flatnonzero(keys[1:] == keys[:-1])
        before, now = [owners[twice]], [owners[twice + 1]]
        if len(self._keys):
            at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            known = self._keys[at] == keys
            before.append(self._owners[at[known]])
            now.append(owners[known])
        return np.concatenate(before), np.concatenate(now)

    def _counted(self, before: np.ndarray, now: np.ndarray, group_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The counts with these meetings, as far as the two ranks are peers."""
        peers = group_of[before] == group_of[now]
        before, now = before[peers], now[peers]
        in_group = np.bincount(group_of[now], minlength=int(group_of.max()) + 1)
        apart = before != now
        world = len(group_of)
        mine = np.bincount(before[apart], minlength=world) + np.bincount(now[apart], minlength=world)
        return self._pairs + np.where(group_of >= 0, in_group[group_of], 0), self._mine + mine

    def _remember(self, keys: np.ndarray, owners: np.ndarray) -> None:
        merged = np.concatenate([self._keys, keys])
        order = np.argsort(merged, kind="stable")  # of equal ones the one that was there first
        merged = merged[order]
        first = np.concatenate([[True], merged[1:] != merged[:-1]])
        self._keys = merged[first][:_REMEMBERED]
        self._owners = np.concatenate([self._owners, owners])[order][first][:_REMEMBERED]

    def state_dict(self) -> dict[str, Any]:
        return {
            "keys": self._keys.copy(),
            "owners": self._owners.copy(),
            "last": self._last.copy(),
            "pairs": self._pairs.copy(),
            "mine": self._mine.copy(),
            "onset": self._onset.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._keys, self._owners = np.array(state["keys"]), np.array(state["owners"], dtype=np.int32)
        self._last = np.array(state["last"])
        self._pairs, self._mine = np.array(state["pairs"]), np.array(state["mine"])
        self._onset = np.array(state["onset"], dtype=np.int64)


def _even(size: Any) -> Any:
    """Share of pairs among `size` ranks that are of a given one with another."""
    return 2.0 * (size - 1.0) / np.maximum(size, 1.0) ** 2


def _evidence(mine: np.ndarray, pairs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """(world,) nats against the chance that so many pairs are the rank's own with another."""
    even = _even(sizes)
    share = np.minimum(mine / np.maximum(pairs, 1.0), 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.where(share < 1.0, (1.0 - share) * np.log((1.0 - share) / (1.0 - even)), 0.0)
        return np.where((share > even) & (sizes > 1), pairs * (share * np.log(share / even) + rest), 0.0)
