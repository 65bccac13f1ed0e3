"""Peer groups as arrays, and the median of a rank's peers: ranks are compared inside their group only (DESIGN 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from resilient.signals.middle import median, neighbours


class PeerGroups:
    """Groups of equal size are handled together; one group of all ranks in order needs no indexing.

    sizes: (world,) members of each rank's group; 1 for a rank in none. share: (size - 1) / size, one number if all are
    alike. covers: every rank has peers."""

    def __init__(self, peers: Sequence[Sequence[int]], world: int) -> None:
        self.peers, self.world = peers, world
        self.sizes = np.ones(world)
        by_size: dict[int, list[Sequence[int]]] = {}
        for group in peers:
            by_size.setdefault(len(group), []).append(group)
        self.blocks: list[np.ndarray] = []  # (groups, size) ranks
        for size, groups in sorted(by_size.items()):
            index = np.asarray(groups, dtype=np.int64)
            self.sizes[index] = size
            if size > 1:
                self.blocks.append(index)
        share = (self.sizes - 1.0) / self.sizes
        self.share: np.ndarray | float = float(share[0]) if (share == share[0]).all() else share
        self.covers = bool((self.sizes > 1).all())
        only = self.blocks[0] if len(self.blocks) == 1 else np.empty((0, 0), dtype=np.int64)
        self._whole = only.shape == (1, world) and bool((only[0] == np.arange(world)).all())

    def fits(self, peers: Sequence[Sequence[int]], world: int) -> bool:
        """These are the groups of `peers`. Quick when it is the same object as before."""
        return world == self.world and (peers is self.peers or peers == self.peers)

    def middle_of_others(self, values: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
        """(world,) median over the *other* valid members of each rank's group; NaN where there is none, or the rank is not
        valid itself. valid: (world,) bool, None: all."""
        if self._whole and valid is None:
            return _middle_of_others(values[None, :])[0]
        middle = np.full(self.world, np.nan)
        for index in self.blocks:
            middle[index] = _middle_of_others(values[index], None if valid is None else valid[index])
        return middle

    def median(self, values: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
        """(world,) median over all valid members of each rank's group; NaN for a rank without peers."""
        if self._whole and valid is None:
            return np.broadcast_to(median(values), (self.world,))
        middle = np.full(self.world, np.nan)
        for index in self.blocks:
            part = values[index] if valid is None else np.where(valid[index], values[index], np.nan)
            known = ~np.isnan(part).all(axis=1)
            middle[index[known]] = np.nanmedian(part[known], axis=1)[:, None]
        return middle

    def middles(self, values: np.ndarray) -> Middles:
        """Between which two numbers the median over the other members lies, for every rank with peers, and what it takes
        to know it for a few ranks. values: without NaN."""
        if self._whole:
            at = [float(k[0, 0]) for k in _around_the_middle(values[None, :])]
            return Middles(values, None, at, at[0], at[-1])
        ends = [_around_the_middle(values[index]) for index in self.blocks]
        lowest = min((float(at[0].min()) for at in ends), default=math.inf)
        highest = max((float(at[-1].max()) for at in ends), default=-math.inf)
        return Middles(values, self, [], lowest, highest)

    def least(self, values: np.ndarray) -> np.ndarray:
        """(groups,) smallest value in each group that has peers."""
        if self._whole:
            return values.min(keepdims=True)
        return np.concatenate([values[index].min(axis=1) for index in self.blocks])


class Middles(NamedTuple):
    """Medians over the others of one column, not worked out yet. lowest, highest: no rank's lies outside."""

    values: np.ndarray
    groups: PeerGroups | None  # where ranks are in several groups, or in none
    at: list[Any]
    lowest: float
    highest: float

    def of(self, ranks: np.ndarray) -> np.ndarray:
        """(len(ranks),) the median over the other members of each of these ranks' groups."""
        if self.groups is not None:
            return self.groups.middle_of_others(self.values)[ranks]
        return _without(self.at, self.values[None, ranks])[0]


def _around_the_middle(values: np.ndarray) -> list[Any]:
    """Of each row of (groups, size): the two or, of an odd size, three neighbours in the middle of the sorted row."""
    size = values.shape[1]
    low, high = (size - 2) // 2, (size - 1) // 2
    return neighbours(values, low, min(high + 1, size - 1))


def _without(at: list[Any], values: np.ndarray) -> np.ndarray:
    """Leave-one-out medians. Taking an element out of a sorted row moves what lies above its place down by one: the k-th
    smallest of the rest is the (k+1)-th of all if the element lies at or below the k-th. at: of the rows' middle.

    So it is the lowest of these, and for every one that the element lies at or below, half a step or a whole one up; by
    arithmetic, since a choice between two values by a mask takes ten times as long."""
    odd = len(at) == 3
    step = 0.5 if odd else 1.0
    middle = (values <= at[0]) * (step * (at[1] - at[0]))
    if odd:
        middle += (values <= at[1]) * (step * (at[2] - at[1]))
    middle += 0.5 * (at[0] + at[1]) if odd else at[0]
    return middle


def _middle_of_others(values: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """Leave-one-out medians along rows (groups, size)."""
    size = values.shape[1]
    if valid is None:
        at = _around_the_middle(values)
        if len(values) == 1:
            at = [float(k[0, 0]) for k in at]  # numbers: broadcasting arrays of one element is slow
        return _without(at, values)
    # What is not valid goes to the end, and the middle is of those before it.
    ordered = np.sort(np.where(valid, values, np.inf), axis=1)
    count = valid.sum(axis=1, keepdims=True)
    middle = np.zeros(values.shape)
    with np.errstate(invalid="ignore"):  # a row with one valid member has no middle of others
        for k in (np.maximum((count - 2) // 2, 0), np.maximum((count - 1) // 2, 0)):
            at_k, after = (np.take_along_axis(ordered, np.minimum(i, size - 1), axis=1) for i in (k, k + 1))
            middle += 0.5 * np.where(values <= at_k, after, at_k)
    return np.where(valid & (count > 1), middle, np.nan)
