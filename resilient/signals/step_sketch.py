"""All ranks' records of one attempt, summed up: what the exchange brings in sketch mode, at any world size.

Answers what the coordinator asks of a table by the same names (signals/table.py). Exact: own, ends, total, the global signals,
how many ranks there are of each kind. To within a bin of a histogram: medians. Named are up to 16 ranks of each kind, and those
that are far out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from resilient.signals.record import INDEX, Observation
from resilient.signals.sketch import SketchSummary
from resilient.signals.sketch_pack import SketchState
from resilient.signals.table import Peers, StepTable, as_peers

_SHOWN = 4
_FAR = 4.0  # spreads from the median


class StepSketch:
    """summary: of all ranks, bit-identical on every rank. own: the table of this rank's row alone. state: with which it was
    packed."""

    def __init__(self, summary: SketchSummary, own: StepTable, state: SketchState) -> None:
        self.summary, self.state = summary, state
        self._row = own
        self.world_size = summary.world
        self.rank = int(state.ranks[0])

    @property
    def peers(self) -> Peers:
        """All ranks are one group."""
        return as_peers(None, self.world_size)

    def own(self, name: str) -> float:
        """This rank's own value."""
        return float(self._row.block[INDEX[name], 0])

    def ends(self, name: str) -> tuple[float, float]:
        """As StepTable.ends; of sketch_pack.ENDS."""
        return self.summary.ends[name]

    def total(self, name: str) -> float:
        """As StepTable.total; of sketch_pack.TOTALS."""
        return self.summary.totals[name]

    def largest(self, name: str) -> float:
        """As StepTable.largest; of sketch_pack.PEAKS. Of a peak logit, of the ranks that have one; -inf: none has."""
        return self.summary.peaks[name]

    def ranks_flagged(self, flag: int) -> tuple[int, ...]:
        """Ranks that have set a bit of Flag, ascending; some of them, where there are many."""
        return self.summary.named.get(flag, (0, ()))[1]

    def ranks_that(self, fact: str) -> tuple[int, ...]:
        """Ranks for which one of FACTS holds, ascending; some of them, where there are many."""
        return self.summary.named.get(fact, (0, ()))[1]

    def spread(self, name: str) -> dict[str, Any]:
        """As StepTable.spread, of loss and local_grad_norm: of values less each rank's usual distance from its peers."""
        summary, extremes = self.summary, self.summary.extremes[name]
        middle, deviation = summary.median(name), summary.spread(name) / 1.4826
        if math.isnan(middle):
            return {"median": math.nan, "spread": math.nan, "outliers": {}}
        distance = np.abs(extremes.value - middle)
        far = (
            np.flatnonzero(distance > _FAR * max(deviation, 1e-12)) if self.world_size > 2 else np.arange(len(distance))
        )
        shown = far[np.argsort(-distance[far], kind="stable")][:_SHOWN]
        return {
            "median": math.exp(middle),
            "spread": math.exp(middle) * math.expm1(min(deviation, 50.0)),
            "outliers": {str(int(extremes.ranks[i])): float(np.exp(extremes.value[i])) for i in shown},
        }

    @property
    def step(self) -> int:
        return self.summary.step

    @property
    def attempt(self) -> int:
        return self.summary.attempt

    @property
    def loss(self) -> float:
        return self.summary.values["loss"]

    @property
    def grad_norm(self) -> float:
        return self.summary.values["grad_norm"]

    @property
    def tokens(self) -> float:
        return self.total("tokens")

    @property
    def next_tokens(self) -> float:
        return self.total("next_tokens")

    @property
    def all_have_next(self) -> bool:
        return self.total("has_next") == self.world_size

    @property
    def any_has_next(self) -> bool:
        return self.total("has_next") > 0

    def observation(self) -> Observation:
        """As detectors read it: the global signals, and the summary."""
        return self.summary.observation()

    def learn(self, applied: bool) -> None:
        """Let the attempt into this rank's own history. applied: the optimizer took the step."""
        self.state.learn(self._row, self.summary, applied)


Exchanged = StepTable | StepSketch
"""What an exchange brings of all ranks."""
