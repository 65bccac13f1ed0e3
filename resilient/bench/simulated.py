"""Tables of simulated ranks: what a healthy run of any size would exchange, for the judge's cost and its false verdicts.

Ranks differ for good (data, hosts), share a trend and now and then a hard batch that hits all of them, and have noise of their
own; times jitter and stall; reductions round as theirs do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from resilient.signals import CheckPlan, StepTable
from resilient.signals.checks import LANE_COLUMNS
from resilient.signals.record import COLUMNS, INDEX, row_width

UNIT = 2.0**-24  # fp32
_UNUSED = ("eval_loss", "entropy", "repetition", "attention_entropy", "attention_logit_max", "update_sq_share")
_SHARED_SPIKE = 0.002  # chance a step that a batch is hard on all ranks
_STALL = 0.001  # chance a rank and step of a pause (a page fault, a garbage collection)


class SimulatedRun:
    """One healthy run. tails: "normal" or "t3", of the logarithm of what a rank measures of its own. cells: of the reduction
    check; 0: there is none. norms: (world,) what the last table's batches give on healthy machines, also when run again."""

    def __init__(self, world: int, *, cells: int = 8, tails: str = "normal", seed: int = 0) -> None:
        self.world, self.tails = world, tails
        receivers = tuple((r,) for r in range(world)) if world <= 64 else (tuple(range(world)),)
        self.plan = CheckPlan(tuple(f"bucket {i}" for i in range(cells)), receivers, UNIT) if cells else None
        self._rng, self._lane_rng = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        self._usual = np.exp(0.3 * self._rng.standard_normal(world))  # ranks differ for good
        self._spread = 0.08 * np.exp(0.3 * self._rng.standard_normal(world))
        self._cells = np.exp(self._rng.standard_normal(cells))
        self.norms = np.full(world, np.nan)

    def table(self, step: int) -> StepTable:
        """The table of attempt `step`."""
        rng, world = self._rng, self.world
        rows = np.full(
            (row_width(0, len(self._cells)), world), np.nan
        ).T  # a column's values lie together, as exchanged

        def put(name: str, values: Any) -> None:
            rows[:, INDEX[name]] = values

        for name in COLUMNS:
            if not name.startswith("digest_") and name not in _UNUSED:
                put(name, 0.0)
        for name, value in (
            ("kind", 1.0),
            ("step", step),
            ("attempt", step),
            ("tokens", 2048.0),
            ("loss_scale", 1.0),
            ("has_next", 1.0),
        ):
            put(name, value)
        hard = 3.0 if rng.random() < _SHARED_SPIKE else 1.0
        trend = 1.0 / (1.0 + step / 2000)
        norms = self.norms = hard * trend * self._usual * np.exp(self._spread * self._own(world))
        loss = (2.0 + 2.0 * trend) * (1 + 0.05 * (hard > 1)) * np.exp(0.01 * self._own(world))
        put("loss", loss)
        put("loss_max", loss)
        put("local_grad_norm", norms)
        put("reduced_sq_share", norms.mean() ** 2 * 0.5 / world)
        put("weight_sq_share", 100.0 / world)
        stalled = rng.random(world) < _STALL
        compute = 0.5 * np.exp(0.05 * rng.standard_normal(world)) + 0.4 * stalled
        put("compute_s", compute)
        put("collective_s", compute.max() - compute + 0.02 * np.exp(0.3 * rng.standard_normal(world)))
        if self.plan is not None:
            self._checks(self.plan, rows[:, len(COLUMNS) :], norms)
        return StepTable(rows, plan=self.plan)

    def _own(self, n: int) -> np.ndarray:
        return self._rng.standard_t(3, n) if self.tails == "t3" else self._rng.standard_normal(n)

    def _checks(self, plan: CheckPlan, tail: np.ndarray, norms: np.ndarray) -> None:
        """Contributions with partly common direction; what is received is their sum, rounded once per addition."""
        rng, world, cells = self._rng, self.world, len(self._cells)
        share = self._cells / np.linalg.norm(self._cells)
        size = norms[:, None] * share / world
        common = rng.standard_normal(cells)
        before = size * (0.7 * common + 0.7 * rng.standard_normal((world, cells)))
        sums = np.cumsum(before, axis=0)
        rounding = 0.43 * UNIT * np.sqrt((np.cumsum(size**2, axis=0) * np.arange(1, world + 1)[:, None]).sum(axis=0))
        received = sums[-1] + rounding * rng.standard_normal(cells)
        product = 3 * UNIT * np.linalg.norm(size, axis=0)
        if len(plan.receivers) == world:
            after = received + product * rng.standard_normal((world, cells))
        else:
            after = np.zeros((world, cells))
            after[0] = received + product * rng.standard_normal(cells)
        lanes = np.zeros((world, cells, len(LANE_COLUMNS)))  # their sums over the ranks are all that is looked at
        lanes[0] = (rounding + product)[:, None] * self._lane_rng.standard_normal((cells, len(LANE_COLUMNS)))
        whole = (0.7 * size.sum(axis=0)) ** 2 + 0.49 * (size**2).sum(axis=0)
        parts = [before, after, size**2, np.broadcast_to(whole / world, size.shape), *np.moveaxis(lanes, -1, 0)]
        for i, part in enumerate(parts):  # in the order of CHECK_COLUMNS
            tail[:, i * cells : (i + 1) * cells] = part
