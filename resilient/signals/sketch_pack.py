"""A summary of all ranks' records whose size does not depend on how many there are: for worlds where a table is too large.

Each rank packs its row into two arrays; the arrays of all ranks are merged by element-wise operations that an all-reduce
offers, SUM for one and MAX for the other, so the merged sketch is bit-identical on all ranks whatever the world.

    sums     float64   counts, sums and log-histograms
    largest  int64     extremes: ordered floats, and values packed together with the rank they belong to

    sums, in this order                          largest, in this order (absent: -2**63)
    ranks         1, counts ranks                ends      12 x 2  columns whose ends are asked for: x, then -x, ordered;
    totals        see TOTALS                                       absent where nobody has measured it
    named         26, ranks of each kind         peaks     see PEAKS, ordered
    layers        3 x groups                     named     26 x 16 lowest rank of each residue class
    checks        11 x cells                     checks    2 x cells  `check_after`, largest and smallest, ordered
    histograms    3 x 1024                       extremes  3 x 2 x 256  per signal: largest, smallest

Named: what ranks are found by, one bit of FLAGS, a place of PLACES or one of FACTS each (see NAMED). Of every kind the number of
ranks is known, and the lowest rank of each residue modulo 16: all of them in a world of 16, and wherever a few ranks
do not hide each other.

Ordered: a float64 as the int64 of the same order (NaN above all). Packed extremes, 63 bits: 24 of the value, 20 of
(2**20 - 1 - rank), so that ties go to the lowest rank, 19 of what the judge needs to know of that rank: its sigma, its
distance from its own level, and whether it has a past and was off before. An extreme is kept per class of sigma (16, a factor of sqrt(2) each)
and residue of the rank (16): inside a class the largest distance is the largest score to within that factor, and ranks of
different residues do not hide each other.

A sketch has no history of other ranks. Each rank keeps its own (SketchState, signals/history.py) and packs its value after
taking off its usual distance from its peers, so a rank that is always larger, or always noisier, stays no outlier.
All ranks are one peer group here: with several, a rank's usual distance is the one from the median of all.
What a sketch cannot do: compare batches pairwise, and name who disagrees in a column that must be equal; it says that
somebody does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.signals.checks import CheckPlan
from resilient.signals.history import STAYS, RankHistory
from resilient.signals.places import Place
from resilient.signals.record import CHECK_COLUMNS, COLUMNS, INDEX, LAYER_COLUMNS
from resilient.signals.sketch_codes import (
    ABSENT,
    BINS,
    LOG_SIGMA,
    MOST_RANKS,
    OWN,
    OWN_SHIFT,
    SIGMA_SHIFT,
    TOLD_BITS,
    VALUE,
    VALUE_SHIFT,
    bin_of,
    low_rank,
    ordered,
)
from resilient.signals.table import FACTS, StepTable

if TYPE_CHECKING:
    from resilient.signals.sketch import SketchSummary

MOST_BYTES = 64 * 1024

# Per-rank signals that are compared across ranks.
COMPARED = ("local_grad_norm", "loss", "compute_s")
# Of those, the ones whose rank is compared with its own past as well, and their smallest sigma (log units). A rank that has
# always been slow is a straggler all the same, so compute_s travels as it is.
WITH_PAST: Mapping[str, float] = {"local_grad_norm": 0.12, "loss": 0.04}

# Sums over ranks. The mean of what only some ranks measured is sum / count.
TOTALS = (
    "loss_tokens", "loss", "tokens", "next_tokens", "has_next", "padding", "asked",
    "reduced_sq_share", "weight_sq_share", "update_sq_share", "leftover_sq",
    "attention_entropy", "attention_entropy_count", "eval_loss", "eval_loss_count", "entropy", "entropy_count",
    "repetition", "repetition_count",
    "local_grad_norm", "nonfinite_forward", "nonfinite_loss", "nonfinite_backward",
)  # fmt: skip
_MEANS = ("attention_entropy", "eval_loss", "entropy", "repetition")
AGREE = ("kind", "step", "attempt", "digest", "lr", "loss_scale", "check_plan")
REPLICATED = ("digest_parameters", "digest_optimizer", "digest_buffers", "digest_rng_shared", "digest_sampler")
ENDS = (*AGREE, *REPLICATED)
PEAKS = ("loss_max", "logit_max", "attention_logit_max", "longest", "wait_s", "local_grad_norm")
_PLACES: tuple[tuple[Place, str], ...] = (
    ("forward", "nonfinite_forward"),
    ("loss", "nonfinite_loss"),
    ("backward", "nonfinite_backward"),
    ("reduction", "reduced_sq_share"),
)
_FLAGS = 16
NAMED: tuple[int | str, ...] = (*(1 << i for i in range(_FLAGS)), *(place for place, _ in _PLACES), *FACTS)
_RESIDUES, _CLASSES = 16, 16
_SLOTS = _RESIDUES * _CLASSES
_ZERO = 1e-30  # a value of exactly 0 counts as this: far below anything measured


class SketchLayout:
    """Where everything lies in the two arrays. The same on every rank; depends on layer groups and cells only."""

    def __init__(self, layers: Sequence[str] = (), plan: CheckPlan | None = None) -> None:
        self.layers, self.plan = tuple(layers), plan
        cells = len(plan.names) if plan is not None else 0
        self.sums = _sections(
            ranks=1, totals=len(TOTALS), named=len(NAMED), layers=len(LAYER_COLUMNS) * len(layers),
            checks=len(CHECK_COLUMNS) * cells, histograms=len(COMPARED) * BINS,
        )  # fmt: skip
        self.largest = _sections(
            ends=2 * len(ENDS), peaks=len(PEAKS), named=len(NAMED) * _RESIDUES, checks=2 * cells,
            extremes=len(COMPARED) * 2 * _SLOTS,
        )  # fmt: skip
        self.width_sums = max(s.stop for s in self.sums.values())
        self.width_largest = max(s.stop for s in self.largest.values())
        if self.bytes > MOST_BYTES:
            raise ValueError(f"a sketch of {self.bytes} bytes is too large: {len(layers)} layer groups, {cells} cells")

    @property
    def bytes(self) -> int:
        """Of both arrays together."""
        return 8 * (self.width_sums + self.width_largest)


@dataclass(frozen=True)
class Sketch:
    """sums: float64 (layout.width_sums,). largest: int64 (layout.width_largest,)."""

    sums: np.ndarray
    largest: np.ndarray


@dataclass(frozen=True)
class Past:
    """How a rank's own history of a signal is kept, as in RankHistory."""

    floor: float
    history: int = 128
    start: int = 12
    accept_after: int = 48


class SketchState:
    """What the ranks packed here know of themselves, and what all ranks know together. One rank in a live run; a simulation
    packs many at once. state_dict / load_state_dict: rewound with the weights, like a detector."""

    def __init__(self, ranks: Sequence[int] | np.ndarray) -> None:
        self.ranks = np.asarray(ranks, dtype=np.int64)
        if len(self.ranks) and (self.ranks.min() < 0 or self.ranks.max() >= MOST_RANKS):
            raise ValueError(
                f"a sketch names ranks from 0 to {MOST_RANKS - 1}, got {self.ranks.min()}..{self.ranks.max()}"
            )
        self.pasts: dict[str, Past] = {}
        self.histories: dict[str, RankHistory] = {}
        for name, floor in WITH_PAST.items():
            self.keep_past(name, Past(floor))
        self.centre = dict.fromkeys(COMPARED, 0.0)  # last median over all ranks: what the next histogram lies around

    def keep_past(self, name: str, past: Past) -> None:
        """Keep a signal's history like this from now on; what was known of it is forgotten."""
        self.pasts[name] = past
        self.histories[name] = RankHistory(len(self.ranks), past.floor, past.history, past.start, past.accept_after)

    def learn(self, table: StepTable, summary: SketchSummary, applied: bool) -> None:
        """Take a step in. table: the rows that were packed, in the order of `ranks`."""
        for name, history in self.histories.items():
            x, valid = _logarithm(table, name)
            value = x - history.offset
            gap = value - summary.middle_of_others(name, value)
            valid &= np.isfinite(gap)
            count = max(summary.compared(name), 1.0)
            history.learn(x, np.where(valid, gap, 0.0), (count - 1.0) / count, valid & applied)
        for name in COMPARED:
            middle = summary.median(name)
            if math.isfinite(middle):
                self.centre[name] = middle

    def state_dict(self) -> dict[str, Any]:
        return {
            "histories": {name: history.state_dict() for name, history in self.histories.items()},
            "centre": dict(self.centre),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """None: that of the beginning."""
        if state is None:
            for name, past in self.pasts.items():
                self.keep_past(name, past)
            self.centre = dict.fromkeys(COMPARED, 0.0)
            return
        self.histories = {
            name: RankHistory.from_state(state["histories"][name], p.floor, p.history, p.start, p.accept_after)
            for name, p in self.pasts.items()
        }
        self.centre = {name: float(state["centre"][name]) for name in COMPARED}


def pack(layout: SketchLayout, table: StepTable, state: SketchState) -> Sketch:
    """The sketch of some ranks: `table` holds their rows in the order of `state.ranks` (one row in a live run)."""
    sums = np.zeros(layout.width_sums)
    largest: np.ndarray = np.full(layout.width_largest, ABSENT)
    ranks = state.ranks
    sums[layout.sums["ranks"]] = len(ranks)
    sums[layout.sums["totals"]] = _totals(table)
    found = _named(table)
    sums[layout.sums["named"]] = found.sum(axis=1)
    if found.any():
        low = low_rank(ranks)
        by_residue = largest[layout.largest["named"]].reshape(len(NAMED), _RESIDUES)
        for kind in np.flatnonzero(found.any(axis=1)):
            np.maximum.at(by_residue[kind], ranks[found[kind]] % _RESIDUES, low[found[kind]])
    largest[layout.largest["ends"]] = _both_ends(table)
    largest[layout.largest["peaks"]] = _peaks(table)
    with np.errstate(invalid="ignore"):  # inf - inf
        tail = table.block[len(COLUMNS) :].sum(axis=1)
    if layout.layers:
        sums[layout.sums["layers"]] = tail[: len(LAYER_COLUMNS) * len(layout.layers)]
    if layout.plan is not None and table.plan is not None:
        sums[layout.sums["checks"]] = tail[len(LAYER_COLUMNS) * len(layout.layers) :]
        after = table.checks().after  # type: ignore[union-attr]
        largest[layout.largest["checks"]] = np.concatenate([ordered(after), ordered(-after)], axis=1).max(axis=0)
    histograms = sums[layout.sums["histograms"]].reshape(len(COMPARED), BINS)
    extremes = largest[layout.largest["extremes"]].reshape(len(COMPARED), 2, _SLOTS)
    for i, name in enumerate(COMPARED):
        _pack_compared(table, name, state, histograms[i], extremes[i])
    return Sketch(sums, largest)


def merge(first: Sketch, second: Sketch) -> Sketch:
    """What the two all-reduces do: SUM of the one, MAX of the other."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return Sketch(first.sums + second.sums, np.maximum(first.largest, second.largest))


def _sections(**sizes: int) -> dict[str, slice]:
    sections, start = {}, 0
    for name, size in sizes.items():
        sections[name] = slice(start, start + size)
        start += size
    return sections


def _totals(table: StepTable) -> np.ndarray:
    column = table.column
    tokens, loss = column("tokens"), column("loss")
    carrying = tokens > 0
    given = {
        "loss_tokens": (loss[carrying] * tokens[carrying]).sum(),  # a rank without tokens says nothing about the loss
        "loss": loss.sum(),
        "has_next": (column("has_next") > 0).sum(),
    }
    for name in _MEANS:
        values = column(name)
        told = np.isfinite(values) if name == "attention_entropy" else ~np.isnan(values)
        given[name], given[f"{name}_count"] = values[told].sum(), told.sum()
    return np.array([given[name] if name in given else column(name).sum() for name in TOTALS])


def _named(table: StepTable) -> np.ndarray:
    """(NAMED, ranks) bool. A reduction that is not finite is claimed by the judge only if nothing before it was off."""
    flags = table.column("flags").astype(np.int64)
    return np.concatenate(
        [
            (flags >> np.arange(_FLAGS)[:, None]) & 1 > 0,
            [
                ~np.isfinite(table.column(name)) if place == "reduction" else table.column(name) > 0
                for place, name in _PLACES
            ],
            [fact(table) for fact in FACTS.values()],
        ]
    )


_END_COLUMNS = [INDEX[name] for name in ENDS]
_PEAK_COLUMNS = [INDEX[name] for name in PEAKS]


def _both_ends(table: StepTable) -> np.ndarray:
    """x, -x of each column, largest over the ranks; absent where no rank has measured it."""
    values = table.block[_END_COLUMNS]
    ends = np.stack([values, -values], axis=1).reshape(2 * len(ENDS), -1)
    return np.where(np.isnan(ends), ABSENT, ordered(ends)).max(axis=1)


def _peaks(table: StepTable) -> np.ndarray:
    """Largest over the ranks. NaN means not measured, except in loss_max and local_grad_norm, where it is one."""
    values = table.block[_PEAK_COLUMNS]
    values[1:-1] = np.where(np.isnan(values[1:-1]), -np.inf, values[1:-1])
    return ordered(values).max(axis=1)


def _logarithm(table: StepTable, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(log of the column, which of them can be compared)."""
    values, tokens = table.column(name), table.column("tokens")
    valid = np.isfinite(values) & (values >= 0.0) & ((tokens > 0) | (name == "compute_s"))
    return np.log(np.where(valid, np.maximum(values, _ZERO), 1.0)), valid


def _pack_compared(
    table: StepTable, name: str, state: SketchState, histogram: np.ndarray, extremes: np.ndarray
) -> None:
    x, valid = _logarithm(table, name)
    distance = x - state.centre[name]
    slot = state.ranks % _RESIDUES
    packed = low_rank(state.ranks) << TOLD_BITS
    if name in state.histories:
        history = state.histories[name]
        distance = distance - history.offset
        octaves = np.log2(history.sigma / history.floor)
        slot = slot + _RESIDUES * np.clip(2.0 * octaves, 0, _CLASSES - 1).astype(np.int64)
        packed |= (LOG_SIGMA(history.sigma) << SIGMA_SHIFT) | (OWN(x - history.level) << OWN_SHIFT)
        packed |= ((history.away >= STAYS) << 1) | (history.points >= history.start)
    histogram += np.bincount(bin_of(distance[valid]), minlength=BINS)
    for side, value in enumerate((distance, -distance)):
        np.maximum.at(extremes[side], slot[valid], ((VALUE(value) << VALUE_SHIFT) | packed)[valid])
