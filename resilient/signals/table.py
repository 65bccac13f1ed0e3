"""All ranks' records of one attempt, with every rank's own values: what the exchange brings in table mode.

What the coordinator asks of a table it asks of a sketch too (signals/step_sketch.py), by the same methods: `own`, `ends`,
`total`, `largest`, `ranks_flagged`, `ranks_that`, `spread` and the properties. `column` and what is made of it are the table's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from resilient.signals.checks import CHECK_COLUMNS, CheckPlan, Checks
from resilient.signals.middle import median
from resilient.signals.record import (
    COLUMNS,
    DIGESTS,
    INDEX,
    LAYER_COLUMNS,
    Flag,
    Observation,
    row_width,
)

Peers = tuple[tuple[int, ...], ...]

_SMALL_WORLD = 256

_PER_RANK = (
    "loss",
    "local_grad_norm",
    "nonfinite_forward",
    "nonfinite_loss",
    "nonfinite_backward",
    "reduced_sq_share",
    "tokens",
    "compute_s",
    "wait_s",
    "collective_s",
    "reduce_s",
)


class StepTable:
    """All ranks' records of one attempt, bit-identical on every rank.

    rows: float64 (world, row_width(...)). Kept as one (columns, ranks) block, so that a column is contiguous: without a copy
        if `rows` is the transpose of such a block.
    peers: groups of ranks that are compared with each other; None: all ranks are one group.
    layers: names of the layer groups that the tail is about. plan: of the reduction check, whose cells follow.
    rank: whose process this is."""

    def __init__(
        self,
        rows: np.ndarray,
        peers: Sequence[Sequence[int]] | None = None,
        layers: Sequence[str] = (),
        plan: CheckPlan | None = None,
        rank: int = 0,
    ) -> None:
        width = row_width(len(layers), len(plan.names) if plan is not None else 0)
        if rows.ndim != 2 or rows.shape[1] != width:
            raise ValueError(f"a StepTable needs shape (world, {width}), got {rows.shape}")
        self.layers = tuple(layers)
        self.plan = plan
        self.block = np.ascontiguousarray(rows.T, dtype=np.float64)
        self.world_size = int(rows.shape[0])
        self.peers = as_peers(peers, self.world_size)
        self.rank = rank
        self._reduced: dict[np.ufunc, list[float]] = {}

    @property
    def rows(self) -> np.ndarray:
        """(world, row_width(...)), a view."""
        return self.block.T

    def column(self, name: str) -> np.ndarray:
        """(world,) float64 values of one column, in rank order."""
        return self.block[INDEX[name]]

    def checks(self) -> Checks | None:
        """The sums of the reduction check."""
        if self.plan is None:
            return None
        tail = self.block[row_width(len(self.layers)) :].reshape(len(CHECK_COLUMNS), len(self.plan.names), -1)
        before, after, sq, size = (part.T for part in tail[:4])
        return Checks(self.plan, before, after, sq, size, tail[4:].T)  # as Checks.read, without a copy

    # -- what a sketch answers too --------------------------------------------------------------------------------

    def own(self, name: str) -> float:
        """This rank's own value."""
        return float(self.block[INDEX[name], self.rank])

    def ends(self, name: str) -> tuple[float, float]:
        """Smallest and largest value over the ranks that told one; two NaN: none did. Equal: all of these agree."""
        values = self.column(name)
        told = values if not np.isnan(values).any() else values[~np.isnan(values)]
        return (float(told.min()), float(told.max())) if len(told) else (math.nan, math.nan)

    def total(self, name: str) -> float:
        """Sum over the ranks."""
        return self._over_ranks(np.add, name)

    def largest(self, name: str) -> float:
        """Largest value over the ranks; NaN if any is."""
        return self._over_ranks(np.maximum, name)

    def _over_ranks(self, reduction: np.ufunc, name: str) -> float:
        """In a small world all columns at once cost no more than one of them."""
        if self.world_size > _SMALL_WORLD:
            return float(reduction.reduce(self.column(name)))
        if reduction not in self._reduced:
            with np.errstate(invalid="ignore"):  # inf - inf
                self._reduced[reduction] = reduction.reduce(self.block[: len(COLUMNS)], axis=1).tolist()
        return self._reduced[reduction][INDEX[name]]

    def _told(self, name: str) -> bool:
        """Some rank has a value."""
        return not math.isnan(self.block[INDEX[name], 0]) or not math.isnan(self._over_ranks(np.fmax, name))

    def ranks_flagged(self, flag: int) -> tuple[int, ...]:
        """Ranks that have set a bit of Flag, ascending."""
        flags = self.column("flags")
        return self.ranks_where(flags.astype(np.int64) & flag != 0) if flags.any() else ()

    def ranks_that(self, fact: str) -> tuple[int, ...]:
        """Ranks for which one of FACTS holds, ascending."""
        return self.ranks_where(FACTS[fact](self))

    def spread(self, name: str) -> dict[str, Any]:
        """Median, median absolute deviation and at most four ranks that stand out; in a world of two, both ranks."""
        return _spread(self.column(name))

    @property
    def step(self) -> int:
        return int(self.column("step")[0])

    @property
    def attempt(self) -> int:
        return int(self.column("attempt")[0])

    @functools.cached_property
    def loss(self) -> float:
        """Mean loss over ranks, weighted by tokens when counts are known. Non-finite if any contributing rank's is."""
        loss, tokens = self.column("loss"), self.column("tokens")
        if self._over_ranks(np.minimum, "tokens") > 0:
            return float((loss * tokens).sum()) / self.tokens
        if not self.tokens > 0:
            return float(loss.mean())
        carrying = tokens > 0
        return float((loss[carrying] * tokens[carrying]).sum() / tokens[carrying].sum())

    @functools.cached_property
    def grad_norm(self) -> float:
        """Global L2 over all parameters, after reduction, before clipping, unscaled (BR-45)."""
        total = self.total("reduced_sq_share")
        return math.sqrt(total) if total >= 0 else math.nan  # NaN fails the comparison and stays NaN

    @property
    def tokens(self) -> float:
        return self.total("tokens")

    @property
    def next_tokens(self) -> float:
        return self.total("next_tokens")

    @property
    def all_have_next(self) -> bool:
        return self._over_ranks(np.minimum, "has_next") > 0

    @property
    def any_has_next(self) -> bool:
        return self.largest("has_next") > 0

    def ranks_where(self, mask: np.ndarray) -> tuple[int, ...]:
        """mask: (world,) bool."""
        return tuple(np.flatnonzero(mask).tolist())

    # -- as detectors read it -------------------------------------------------------------------------------------

    def observation(self) -> Observation:
        """The table as detectors read it: global signals plus per-rank columns."""
        column = self.column
        values = {
            "loss": self.loss,
            "loss_max": self.largest("loss_max"),
            "grad_norm": self.grad_norm,
            "loss_scale": float(column("loss_scale")[0]),
            "lr": float(column("lr")[0]),
        }
        for name in ("logit_max", "attention_logit_max"):
            peak = self._over_ranks(np.fmax, name)  # of the ranks that told one
            if peak == peak:
                values[name] = peak
        if self._told("attention_entropy"):
            entropy = column("attention_entropy")
            finite = np.isfinite(entropy)
            if finite.any():
                values["attention_entropy"] = float(entropy[finite].mean())
        for name, share in (("weight_norm", "weight_sq_share"), ("update_norm", "update_sq_share")):
            total = self.total(share)
            if math.isfinite(total):
                values[name] = math.sqrt(total)
        for name in ("eval_loss", "entropy", "repetition"):
            if self._told(name):
                values[name] = float(np.nanmean(column(name)))  # ranks that evaluated together told the same
                values["eval_step"] = float(self.step - 1)  # of the weights that were evaluated
        values["longest"] = self.largest("longest")
        values["padding"] = self.total("padding") / self.world_size
        if self.layers:
            start = len(COLUMNS)
            tail = self.block[start : start + len(LAYER_COLUMNS) * len(self.layers)]
            values.update(by_layer(self.layers, tail.sum(axis=1)))
        per_rank = {name: column(name) for name in _PER_RANK}
        per_rank.update((name, column(name)) for name in DIGESTS if self._told(name))
        return Observation(self.step, self.attempt, values, per_rank, self.peers, self.checks())


# Of a rank's own row, (world,) bool: what all must know of single ranks besides their flags.
FACTS: Mapping[str, Callable[[StepTable], np.ndarray]] = {
    "leftover": lambda table: ~(table.column("leftover_sq") == 0),  # NaN is not 0
    "blind": lambda table: _unseen(table) & (table.column("tokens") > 0),
    "blind, no tokens": lambda table: _unseen(table) & ~(table.column("tokens") > 0),
    "no tokens": lambda table: ~(table.column("tokens") > 0),
    "no output": lambda table: _has(table, Flag.NO_OUTPUT) & np.isnan(table.column("logit_max")),
}


def _unseen(table: StepTable) -> np.ndarray:
    """No gradient has reached the guard there, now or before. NaN != 0: a NaN was received, too."""
    flagged = _has(table, Flag.BLIND)
    return flagged & (table.column("local_grad_norm") == 0) & ~(table.column("nonfinite_backward") > 0)


def _has(table: StepTable, flag: int) -> np.ndarray:
    return table.column("flags").astype(np.int64) & flag != 0


def by_layer(layers: Sequence[str], totals: np.ndarray) -> dict[str, float]:
    """grad_norm/<group> of this attempt, NaN where it is not finite; of the last applied step, where it was measured,
    update_norm/<group>, adam_lag/<group> (RMS of g^2/v) and adam_lag, the largest of them.

    totals: (3 * groups,) sums over the ranks of LAYER_COLUMNS."""
    values: dict[str, float] = {}
    with np.errstate(invalid="ignore"):  # shares of an overflow may add up to NaN
        norms = np.sqrt(totals).reshape(len(LAYER_COLUMNS), len(layers))
    measured = np.isfinite(norms).all(axis=1).tolist() if layers else [False] * len(LAYER_COLUMNS)
    for i, (signals, each) in enumerate(zip(_layer_signals(tuple(layers)), norms.tolist(), strict=True)):
        if i == 0 or measured[i]:
            values.update(zip(signals, each, strict=True))
            if i == 2:
                values["adam_lag"] = max(each)
    return values


@functools.lru_cache(maxsize=8)
def _layer_signals(layers: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Names of what LAYER_COLUMNS become."""
    return tuple(tuple(f"{name}/{layer}" for layer in layers) for name in ("grad_norm", "update_norm", "adam_lag"))


def as_peers(peers: Sequence[Sequence[int]] | None, world: int) -> Peers:
    """Peer groups as tuples, the same object again for what is one already: comparing them is quick then."""
    if peers is None:
        return _everyone(world)
    if isinstance(peers, tuple) and all(isinstance(group, tuple) for group in peers):
        return peers
    return tuple(tuple(group) for group in peers)


@functools.lru_cache(maxsize=8)
def _everyone(world: int) -> Peers:
    return (tuple(range(world)),)


def _spread(values: np.ndarray) -> dict[str, Any]:
    """Constant size at any world size."""
    finite = values if math.isfinite(values.sum()) else values[np.isfinite(values)]
    if not len(finite):
        return {"median": math.nan, "spread": math.nan, "outliers": {}}
    middle = median(finite)
    deviation = median(np.abs(finite - middle))
    distance = np.abs(values - middle)
    far = np.arange(len(values))
    if len(values) > 2:
        far = np.flatnonzero(~(distance <= 4 * max(deviation, 1e-12)))  # NaN is far
        far = far[np.argsort(-np.nan_to_num(distance[far], nan=np.inf), kind="stable")][:4]
    return {"median": middle, "spread": deviation, "outliers": {str(int(r)): float(values[r]) for r in far}}
