"""Outlier across ranks: one rank's value stands out from its peers *and* from its own past (C2, S19).

d_r = log x_r - median over the other peers of log x. With two ranks d is antisymmetric and cannot say whose fault it
is, so a rank must also stand out from its own history by the same margin: h_r = (log x_r - its own running median).
Score = min(d_r - usual d_r, h_r) / scale, with one scale per rank from its own accepted residuals. A rank that is
always larger than the others (heterogeneous data) has a large usual d_r and is not an outlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from resilient.detectors.config import CrossRankConfig
from resilient.signals import Finding, Observation, Severity

MAD_TO_SIGMA = 1.4826  # of a normal distribution
_LEVEL = 9  # accepted values behind a rank's own running median


class CrossRankOutlier:
    """One instance per per-rank column. Cost O(world) vectorised; memory O(world * history)."""

    def __init__(self, config: CrossRankConfig) -> None:
        self.config = config
        self.name = f"crossrank/{config.signal}"
        self._own: deque[np.ndarray] = deque(maxlen=_LEVEL)  # accepted log values, (world,)
        self._gap: deque[np.ndarray] = deque(maxlen=config.history)  # accepted d, (world,)
        self._onset: dict[int, int] = {}

    def observe(self, observation: Observation) -> list[Finding]:
        x = self._log(observation)
        if x is None or len(self._gap) < self.config.min_history:
            return []
        gap, score = self._scores(x, observation.peers)
        ratio = np.exp(np.clip(gap, -50, 50))
        findings = []
        for rank in np.flatnonzero(score >= self.config.warn):
            severe = score[rank] >= self.config.act and ratio[rank] >= self.config.min_ratio
            value = float(observation.per_rank[self.config.signal][rank])
            findings.append(
                Finding(
                    detector=self.name,
                    signal=self.config.signal,
                    severity=Severity.ACT if severe else Severity.WARN,
                    score=float(score[rank]),
                    step=observation.step,
                    onset_step=self._onset.get(int(rank), observation.step),
                    ranks=(int(rank),),
                    statistic="ranks",
                    place="loss" if self.config.signal == "loss" else "backward",
                    value=value,
                    reference=float(np.exp(x[rank] - gap[rank])),
                    message=f"{self.config.signal} of rank {rank} is {ratio[rank]:.3g} times its peers' ({score[rank]:.1f} sigmas)",
                )
            )
        return findings

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        mine = {r for f in findings if f.detector == self.name for r in f.ranks}
        for rank in mine:
            self._onset.setdefault(rank, observation.step)
        for rank in [r for r in self._onset if r not in mine]:
            del self._onset[rank]
        x = self._log(observation)
        if x is None or mine or not applied:
            return
        self._gap.append(_gap_to_peers(x, observation.peers))
        self._own.append(x)

    def _scores(self, x: np.ndarray, peers: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        gap = _gap_to_peers(x, peers)
        past = np.stack(self._gap)
        usual = np.median(past, axis=0)
        scale = np.maximum(MAD_TO_SIGMA * np.median(np.abs(past - usual), axis=0), self.config.floor)
        own = x - np.median(np.stack(self._own), axis=0)
        return gap, np.minimum(gap - usual, own) / scale

    def _log(self, observation: Observation) -> np.ndarray | None:
        values = observation.per_rank.get(self.config.signal)
        if values is None or len(values) < 2 or not np.isfinite(values).all() or (values <= 0).any():
            return None  # non-finite is another detector's business and must not enter a window
        return np.log(values)

    def state_dict(self) -> dict[str, Any]:
        return {
            "own": [v.tolist() for v in self._own],
            "gap": [v.tolist() for v in self._gap],
            "onset": {str(k): v for k, v in self._onset.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._own = deque((np.asarray(v) for v in state["own"]), maxlen=_LEVEL)
        self._gap = deque((np.asarray(v) for v in state["gap"]), maxlen=self.config.history)
        self._onset = {int(k): int(v) for k, v in state["onset"].items()}


def _gap_to_peers(x: np.ndarray, peers: Sequence[Sequence[int]]) -> np.ndarray:
    """d_r: each rank's log value minus the median of the *other* members of its peer group. 0 for a rank without peers.

    Leave-one-out medians from one sort per group: removing an element shifts the middle by at most one place."""
    gap = np.zeros_like(x)
    for group in peers:
        members = np.asarray(group)
        n = len(members)
        if n < 2:
            continue
        order = np.argsort(x[members], kind="stable")
        ordered = x[members][order]
        position = np.empty(n, dtype=np.int64)
        position[order] = np.arange(n)
        m = n - 1  # size of the group without the rank
        lower = _without(ordered, position, (m - 1) // 2)
        upper = _without(ordered, position, m // 2)
        gap[members] = x[members] - 0.5 * (lower + upper)
    return gap


def _without(ordered: np.ndarray, position: np.ndarray, k: int) -> np.ndarray:
    """The k-th smallest of `ordered` after removing the element at each `position`."""
    return ordered[np.where(position <= k, k + 1, k)]
