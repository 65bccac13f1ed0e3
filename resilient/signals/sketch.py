"""A merged sketch, read: what is known of all ranks where a table would be too large. See signals/sketch_pack.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from resilient.signals.checks import Checks
from resilient.signals.record import CHECK_COLUMNS, Observation
from resilient.signals.sketch_codes import (
    ABSENT,
    BINS,
    EDGES,
    LOG_SIGMA,
    MIDDLES,
    MOST_RANKS,
    OWN,
    OWN_SHIFT,
    SIGMA_SHIFT,
    TOLD_BITS,
    VALUE,
    VALUE_SHIFT,
    bin_of,
    low_rank,
    unordered,
)
from resilient.signals.sketch_pack import COMPARED, ENDS, NAMED, PEAKS, TOTALS, Sketch, SketchLayout
from resilient.signals.table import by_layer

_MEANS = ("attention_entropy", "eval_loss", "entropy", "repetition")
_PEAK_SIGNALS = ("loss_max", "logit_max", "attention_logit_max", "longest")


@dataclass(frozen=True)
class Extremes:
    """Ranks far out in one signal, each once, in rank order.

    value: logarithm less the rank's usual distance from its peers. sigma: its own. own: distance from its own level.
    stays: bool, it was off in the steps before. mature: bool, it has a past to speak of. All but the value mean nothing for a signal that is not in WITH_PAST."""

    ranks: np.ndarray
    value: np.ndarray
    sigma: np.ndarray
    own: np.ndarray
    stays: np.ndarray
    mature: np.ndarray


@dataclass(frozen=True)
class SketchSummary:
    """A merged sketch, read.

    values: as in Observation. world: ranks that have sent. totals, peaks: of TOTALS and PEAKS, by column. ends: column of ENDS
    -> (smallest, largest), NaN where nobody has measured it. named: of NAMED -> (how many ranks, some of them, lowest first).
    checks: the sums of the reduction check, over all ranks."""

    step: int
    attempt: int
    world: int
    values: Mapping[str, float]
    totals: Mapping[str, float]
    peaks: Mapping[str, float]
    ends: Mapping[str, tuple[float, float]]
    named: Mapping[int | str, tuple[int, tuple[int, ...]]]
    checks: Checks | None
    extremes: Mapping[str, Extremes]
    counts: Mapping[str, np.ndarray] = field(repr=False)  # (bins + 1,) cumulated, of each compared signal
    centre: Mapping[str, float] = field(repr=False)
    _spreads: dict[str, float] = field(default_factory=dict, repr=False, compare=False)  # those asked for so far

    def differ(self, name: str) -> bool:
        """Ranks disagree in a column of ENDS."""
        low, high = self.ends[name]
        return low < high

    def observation(self) -> Observation:
        """Global signals only: what a detector over time reads. There are no per-rank values in a sketch."""
        return Observation(self.step, self.attempt, self.values, checks=self.checks, sketch=self)

    def compared(self, signal: str) -> float:
        """Ranks whose value could be compared."""
        return float(self.counts[signal][-1])

    def median(self, signal: str) -> float:
        """Median over ranks of the logarithm less each rank's usual distance; NaN without any."""
        n = int(self.compared(signal))
        return math.nan if n == 0 else 0.5 * (self._smallest(signal, (n - 1) // 2) + self._smallest(signal, n // 2))

    def middle_of_others(self, signal: str, value: np.ndarray) -> np.ndarray:
        """Median over all ranks but the one a value belongs to, for each value; NaN without others."""
        n = int(self.compared(signal))
        if n < 2:
            return np.full(len(value), np.nan)
        low, high = (n - 2) // 2, (n - 1) // 2
        own = bin_of(value - self.centre[signal])
        middle = np.zeros(len(value))
        for k in (low, high):
            at, after = self._smallest(signal, k), self._smallest(signal, k + 1)
            middle += 0.5 * np.where(own <= bin_of(np.asarray(at - self.centre[signal])), after, at)
        return middle

    def spread(self, signal: str) -> float:
        """1.4826 * median over ranks of the distance from the median; NaN without any."""
        if signal not in self._spreads:
            self._spreads[signal] = self._spread(signal)
        return self._spreads[signal]

    def _spread(self, signal: str) -> float:
        n = self.compared(signal)
        if n == 0:
            return math.nan
        occupied = np.diff(self.counts[signal])
        distance = np.abs(MIDDLES - (self.median(signal) - self.centre[signal]))
        order = np.argsort(distance, kind="stable")
        return float(1.4826 * distance[order][np.searchsorted(np.cumsum(occupied[order]), 0.5 * n)])

    def _smallest(self, signal: str, k: int) -> float:
        """The k-th smallest value, from 0, to within its bin."""
        counts = self.counts[signal]
        i = min(int(np.searchsorted(counts, k, side="right")), BINS) - 1
        inside = (k + 0.5 - counts[i]) / max(counts[i + 1] - counts[i], 1.0)
        return float(self.centre[signal] + EDGES[i] + min(inside, 1.0) * (EDGES[i + 1] - EDGES[i]))


def read(layout: SketchLayout, sketch: Sketch, centre: Mapping[str, float]) -> SketchSummary:
    """A merged sketch. centre: SketchState.centre when it was packed. The work depends on the layout only."""
    sums, largest = sketch.sums, sketch.largest
    totals = dict(zip(TOTALS, sums[layout.sums["totals"]].tolist(), strict=True))
    peaks = dict(zip(PEAKS, unordered(largest[layout.largest["peaks"]]).tolist(), strict=True))
    both = largest[layout.largest["ends"]].reshape(-1, 2)
    low_and_high = np.where(both == ABSENT, np.nan, unordered(both))
    ends = {name: (-low, high) for name, (high, low) in zip(ENDS, low_and_high.tolist(), strict=True)}
    world = int(sums[layout.sums["ranks"]][0])
    cumulated = {}
    for name, counts in zip(COMPARED, sums[layout.sums["histograms"]].reshape(-1, BINS), strict=True):
        cumulated[name] = np.concatenate([[0.0], np.cumsum(counts)])
    packed = largest[layout.largest["extremes"]].reshape(len(COMPARED), -1)
    values = _values(layout, totals, peaks, ends, sums, world)
    return SketchSummary(
        step=int(ends["step"][0]),
        attempt=int(ends["attempt"][0]),
        world=world,
        values=values,
        totals=totals,
        peaks=peaks,
        ends=ends,
        named=_read_named(sums[layout.sums["named"]], largest[layout.largest["named"]].reshape(len(NAMED), -1)),
        checks=_read_checks(layout, sums, largest, world),
        extremes={name: _read_extremes(row, centre[name]) for name, row in zip(COMPARED, packed, strict=True)},
        counts=cumulated,
        centre=dict(centre),
    )


def _read_named(counts: np.ndarray, lowest: np.ndarray) -> dict[int | str, tuple[int, tuple[int, ...]]]:
    there = np.flatnonzero(counts > 0)
    return {NAMED[i]: (int(counts[i]), tuple(sorted(low_rank(lowest[i][lowest[i] != ABSENT]).tolist()))) for i in there}


def _values(
    layout: SketchLayout,
    totals: Mapping[str, float],
    peaks: Mapping[str, float],
    ends: Mapping[str, tuple[float, float]],
    sums: np.ndarray,
    world: int,
) -> dict[str, float]:
    """The global signals, by the rules of StepTable.observation."""
    tokens = totals["tokens"]
    square = totals["reduced_sq_share"]
    values = {
        "loss": totals["loss_tokens"] / tokens if tokens > 0 else totals["loss"] / max(world, 1),
        "grad_norm": math.sqrt(square) if square >= 0 else math.nan,
        "loss_scale": ends["loss_scale"][0],
        "lr": ends["lr"][0],
        "padding": totals["padding"] / max(world, 1),
        **{n: peaks[n] for n in _PEAK_SIGNALS if peaks[n] != -math.inf or n == "loss_max"},
    }
    for name, share in (("weight_norm", "weight_sq_share"), ("update_norm", "update_sq_share")):
        if math.isfinite(totals[share]):
            values[name] = math.sqrt(totals[share])
    for name in _MEANS:
        if totals[f"{name}_count"] > 0:
            values[name] = totals[name] / totals[f"{name}_count"]
            if name != "attention_entropy":
                values["eval_step"] = ends["step"][0] - 1.0
    values.update(by_layer(layout.layers, sums[layout.sums["layers"]]) if layout.layers else {})
    return values


def _read_checks(layout: SketchLayout, sums: np.ndarray, largest: np.ndarray, world: int) -> Checks | None:
    """As of a single rank that sends and receives everything. Where every group of receivers gets a whole gradient of its
    own, as of two: one that received the largest and one that received the smallest `check_after` of each cell."""
    plan = layout.plan
    if plan is None:
        return None
    cells, groups = len(plan.names), len(plan.receivers)
    parts = sums[layout.sums["checks"]].reshape(len(CHECK_COLUMNS), 1, cells)
    columns = dict(zip(CHECK_COLUMNS, parts, strict=True))
    if groups < world or world == 1:  # shards: only their sum means something; of replicas of shards, the mean
        columns["check_after"] = columns["check_after"] / max(groups, 1)
        return Checks.read(replace(plan, receivers=((0,),)), columns, world)
    top, bottom = unordered(largest[layout.largest["checks"]]).reshape(2, 1, cells)
    both = {name: np.concatenate([part, np.zeros_like(part)]) for name, part in columns.items()}
    both["check_after"] = np.concatenate([top, -bottom])
    return Checks.read(replace(plan, receivers=((0,), (1,))), both, world)


def _read_extremes(packed: np.ndarray, centre: float) -> Extremes:
    """packed: (2 * slots,), those of the largest, then those of the smallest."""
    there = np.flatnonzero(packed != ABSENT)
    ranks, first = np.unique(low_rank((packed[there] >> TOLD_BITS) & (MOST_RANKS - 1)), return_index=True)
    chosen = there[first]
    told = packed[chosen]
    distance = VALUE.back(told >> VALUE_SHIFT)
    return Extremes(
        ranks=ranks,
        value=centre + np.where(chosen < len(packed) // 2, distance, -distance),
        sigma=LOG_SIGMA.back(told >> SIGMA_SHIFT),
        own=OWN.back(told >> OWN_SHIFT),
        stays=(told & 2).astype(bool),
        mature=(told & 1).astype(bool),
    )
