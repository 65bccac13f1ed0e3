"""What is usual for a rank: its offset from its peers, how much that scatters, and its own level.

One array element per rank, O(ranks) per step and in memory. The table's detector holds all ranks here (detectors/crossrank.py);
in sketch mode each rank holds only itself (signals/sketch.py). The estimates are the same in both.

Recursive and clipped (Huber 1981, ch. 3): the memory is `history` steps, and no single step moves an estimate by more than
four scales. A rank that is off teaches nothing. Only when it has stayed off for `accept_after` steps in a row is its new
place taken for usual: a rank whose data has changed for good is no outlier for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

STAYS = 2  # steps in a row that a rank has been off, before one in which it still is: it is no single odd step

_ABS_TO_SIGMA = 1.2533  # of a normal distribution: sigma / E|x|
_CLIP = 4.0  # scales
_SUSPECT = 5.0  # scales beyond which a rank is off
_YOUNG_RATE = 0.3  # while there are few points: a bad first one is forgotten before the rank is judged
_PRIOR = 4  # steps that the first guess of the scale counts for
_LEVEL_RATE = 0.2  # of the own level: about the last 9 steps
_LEVEL_STEP = 1.0  # log units by which one step may move it at most


class RankHistory:
    """State of n ranks. All values are natural logarithms, shape (n,).

    offset: usual distance to the peers' median. sigma: what one robust sigma of the distance counts for now, never below
    `floor`. level: the rank's own value lately. points: steps learned from, at most `history`."""

    _ARRAYS = ("offset", "scale", "level", "points", "away", "moved")

    def __init__(self, ranks: int, floor: float, history: int, start: int, accept_after: int) -> None:
        self.floor, self.history, self.start, self.accept_after = floor, history, start, accept_after
        self.offset = np.zeros(ranks)
        self.scale = np.full(ranks, 2.0 * floor)
        self.level = np.zeros(ranks)
        self.points = np.zeros(ranks)
        self.away = np.zeros(ranks)  # steps in a row that a rank has been off
        self.moved = np.zeros(ranks)  # mean gap over those
        self._any_away = self._settled = False
        self._make_room()
        self._derive()

    def __len__(self) -> int:
        return len(self.offset)

    def learn(self, x: np.ndarray, gap: np.ndarray, share: np.ndarray | float, teaches: np.ndarray | None) -> None:
        """Take a step in. gap: x - offset - median over the rank's peers. share: (n - 1) / n of a group of n peers, which
        keeps the offsets of a small group from chasing each other. teaches: bool, ranks whose value may be learned from;
        None: all."""
        size = np.abs(gap, out=self._size)
        off = size > np.multiply(self.sigma, _SUSPECT, out=self._limit)
        if self._young:
            off &= self.points >= self.start
        any_off = bool(off.any())
        if any_off or self._any_away:
            self._stay_away(x, gap, share, off)
        if self._alike and not any_off and teaches is None:
            self._learn_all(x, gap, size, share)
        else:
            self._learn_some(x, gap, size, share, ~off if teaches is None else teaches & ~off)
        self._derive()

    def _learn_all(self, x: np.ndarray, gap: np.ndarray, size: np.ndarray, share: np.ndarray | float) -> None:
        """Every rank has learned from as many steps, and none is off: the usual case, in few passes over the arrays."""
        count = min(float(self.points[0]) + 1.0, float(self.history))
        rate = 1.0 / count
        if self._young and count <= self.start:
            rate = max(rate, _YOUNG_RATE)
        limit = np.multiply(self.sigma, _CLIP, out=self._limit)
        moved = np.minimum(gap, limit, out=self._moved)
        np.maximum(moved, np.negative(limit, out=self._spare), out=moved)
        self.offset += np.multiply(moved, rate * share, out=moved)
        np.minimum(size, limit, out=size)
        rate = 1.0 / min(count + _PRIOR, self.history)
        self.scale *= 1.0 - rate
        self.scale += np.multiply(size, rate * _ABS_TO_SIGMA, out=size)
        np.subtract(x, self.level, out=moved)
        np.minimum(np.maximum(moved, -_LEVEL_STEP, out=moved), _LEVEL_STEP, out=moved)
        self.level += np.multiply(moved, _LEVEL_RATE, out=moved)
        if not self._settled:
            self.points += 1.0

    def _learn_some(
        self, x: np.ndarray, gap: np.ndarray, size: np.ndarray, share: np.ndarray | float, calm: np.ndarray
    ) -> None:
        first = (self.points == 0) & calm
        self.points = np.minimum(self.points + calm, float(self.history))
        rate = calm / np.maximum(self.points, 1.0)
        if self._young:
            rate = np.where((self.points <= self.start) & calm, np.maximum(rate, _YOUNG_RATE), rate)
        size = np.minimum(size, _CLIP * self.sigma)
        self.offset += rate * share * np.where(first, gap, np.copysign(size, gap))  # the first value is all there is
        rate = (calm & ~first) / np.minimum(self.points + _PRIOR, self.history)  # and is no scatter
        self.scale += rate * (_ABS_TO_SIGMA * size - self.scale)
        moved = np.minimum(np.maximum(x - self.level, -_LEVEL_STEP), _LEVEL_STEP)
        self.level = np.where(first, x, self.level + _LEVEL_RATE * calm * moved)

    def _stay_away(self, x: np.ndarray, gap: np.ndarray, share: np.ndarray | float, off: np.ndarray) -> None:
        self.away = np.where(off, self.away + 1.0, 0.0)
        self.moved = np.where(off, self.moved + (gap - self.moved) / np.maximum(self.away, 1.0), 0.0)
        self._any_away = bool(off.any())
        stays = np.flatnonzero(self.away >= self.accept_after)
        if len(stays):
            self.offset[stays] += (self.moved * share)[stays]
            self.level[stays] = x[stays]
            self.points[stays] = np.minimum(self.points[stays], self.start)  # quick to settle in the new place
            self.away[stays] = self.moved[stays] = 0.0
            self._settled = False

    def _derive(self) -> None:
        if not self._settled:
            least, most = self.points.min(initial=self.history), self.points.max(initial=0.0)
            self._young, self._settled = bool(least < self.start), bool(least >= self.history)
            self._alike = bool(0.0 < least == most)
        few = 8.0 / max(float(self.points[0]), 8.0) if self._alike else 8.0 / np.maximum(self.points, 8.0)
        np.multiply(self.scale, 1.0 + few, out=self.sigma)  # few points: not so sure of the scale
        np.maximum(self.sigma, self.floor, out=self.sigma)

    def _make_room(self) -> None:
        """`sigma`, and arrays to work in: a large world's are written over and over in place."""
        room = np.empty((5, len(self.offset)))
        self.sigma, self._size, self._limit, self._moved, self._spare = room

    def state_dict(self) -> dict[str, Any]:
        """Copies of the arrays."""
        return {name: getattr(self, name).copy() for name in self._ARRAYS}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], floor: float, history: int, start: int, accept_after: int
    ) -> RankHistory:
        """Exactly the history that `state_dict` was taken of."""
        made = cls(len(state["offset"]), floor, history, start, accept_after)
        for name in cls._ARRAYS:
            setattr(made, name, np.array(state[name], dtype=np.float64))
        made._any_away = bool(made.away.any())
        made._make_room()
        made._derive()
        return made
