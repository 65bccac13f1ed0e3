"""A summary of all ranks' records whose size does not depend on how many there are: for worlds where a table is too large.

Each rank packs its row into two arrays; the arrays of all ranks are merged by element-wise operations that an all-reduce
offers, SUM for one and MAX for the other, so the merged sketch is bit-identical on all ranks whatever the world.

    sums     float64   counts, sums and log-histograms
    largest  int64     extremes: ordered floats, and values packed together with the rank they belong to

    sums, in this order                          largest, in this order (absent: -2**63)
    ranks             1, counts ranks            agree     6 x 2   columns that must be equal: x, then -x, ordered
    totals            see TOTALS                 digests   5 x 2   replica digests, likewise; absent where not measured
    flags             16, ranks with each bit    peaks     see PEAKS, ordered
    nonfinite         4, ranks by place          flags     16      lowest rank with each bit
    layers            3 x groups                 nonfinite 4 x 16  lowest rank of each residue class, by place
    checks            3 x cells                  checks    2 x cells  `check_after`, largest and smallest, with rank
    histograms        3 x 1024                   extremes  3 x 2 x 256  per signal: largest, smallest

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

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from resilient.signals.checks import CheckPlan, Checks
from resilient.signals.history import STAYS, RankHistory
from resilient.signals.places import Place
from resilient.signals.record import CHECK_COLUMNS, INDEX, LAYER_COLUMNS, Observation, StepTable

MOST_BYTES = 64 * 1024
MOST_RANKS = 1 << 20

# Per-rank signals that are compared across ranks.
COMPARED = ("local_grad_norm", "loss", "compute_s")
# Of those, the ones whose rank is compared with its own past as well, and their smallest sigma (log units). A rank that has
# always been slow is a straggler all the same, so compute_s travels as it is.
WITH_PAST: Mapping[str, float] = {"local_grad_norm": 0.12, "loss": 0.04}

# Sums over ranks. The mean of what only some ranks measured is sum / count.
TOTALS = (
    "loss_tokens", "loss", "carrying", "tokens", "next_tokens", "has_next", "padding", "asked",
    "reduced_sq_share", "weight_sq_share", "update_sq_share", "leftover_sq",
    "attention_entropy", "attention_entropy_count", "eval_loss", "eval_loss_count", "entropy", "entropy_count",
    "repetition", "repetition_count",
)  # fmt: skip
_MEANS = ("attention_entropy", "eval_loss", "entropy", "repetition")
AGREE = ("kind", "step", "attempt", "digest", "lr", "loss_scale")
REPLICATED = ("digest_parameters", "digest_optimizer", "digest_buffers", "digest_rng_shared", "digest_sampler")
PEAKS = ("loss_max", "logit_max", "attention_logit_max", "longest")
_PLACES: tuple[tuple[Place, str], ...] = (
    ("forward", "nonfinite_forward"),
    ("loss", "nonfinite_loss"),
    ("backward", "nonfinite_backward"),
    ("reduction", "reduced_sq_share"),
)

_ABSENT, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_FLAGS = 16
_BINS = 1024
_RESIDUES, _CLASSES = 16, 16
_SLOTS = _RESIDUES * _CLASSES
_ZERO = 1e-30  # a value of exactly 0 counts as this: far below anything measured
_REACH = 20.0  # log units from the centre; beyond counts as this far
_FINE = 0.25  # log units around the centre in which bins are narrow: 0.0025 there, 0.06 at a factor of 400
_BIN_SCALE = (_BINS / 2 - 1) / math.asinh(_REACH / _FINE)
_VALUE_BITS, _RANK_BITS, _SIGMA_BITS, _OWN_BITS = 24, 20, 8, 9  # and one each for `stays` and `mature`
_TOLD_BITS = _SIGMA_BITS + _OWN_BITS + 2
_SIGMA_LOG = (-6.0, 3.0)  # natural logarithm of what the sigma's bits span
_OWN_REACH = 8.0


class SketchLayout:
    """Where everything lies in the two arrays. The same on every rank; depends on layer groups and cells only."""

    def __init__(self, layers: Sequence[str] = (), plan: CheckPlan | None = None) -> None:
        self.layers, self.plan = tuple(layers), plan
        cells = len(plan.names) if plan is not None else 0
        self.sums = _sections(
            ranks=1, totals=len(TOTALS), flags=_FLAGS, nonfinite=len(_PLACES), layers=len(LAYER_COLUMNS) * len(layers),
            checks=len(CHECK_COLUMNS) * cells, histograms=len(COMPARED) * _BINS,
        )  # fmt: skip
        self.largest = _sections(
            agree=2 * len(AGREE), digests=2 * len(REPLICATED), peaks=len(PEAKS), flags=_FLAGS,
            nonfinite=len(_PLACES) * _RESIDUES, checks=2 * cells, extremes=len(COMPARED) * 2 * _SLOTS,
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


class SketchState:
    """What the ranks packed here know of themselves, and what all ranks know together. One rank in a live run; a simulation
    packs many at once. state_dict / load_state_dict: rewound with the weights, like a detector."""

    def __init__(
        self, ranks: Sequence[int] | np.ndarray, history: int = 128, start: int = 12, accept: int = 48
    ) -> None:
        self.ranks = np.asarray(ranks, dtype=np.int64)
        if len(self.ranks) and (self.ranks.min() < 0 or self.ranks.max() >= MOST_RANKS):
            raise ValueError(
                f"a sketch names ranks from 0 to {MOST_RANKS - 1}, got {self.ranks.min()}..{self.ranks.max()}"
            )
        self._constants = (history, start, accept)
        self.histories = {
            name: RankHistory(len(self.ranks), floor, *self._constants) for name, floor in WITH_PAST.items()
        }
        self.centre = dict.fromkeys(COMPARED, 0.0)  # last median over all ranks: what the next histogram lies around

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.histories = {
            name: RankHistory.from_state(state["histories"][name], floor, *self._constants)
            for name, floor in WITH_PAST.items()
        }
        self.centre = {name: float(state["centre"][name]) for name in COMPARED}


def pack(layout: SketchLayout, table: StepTable, state: SketchState) -> Sketch:
    """The sketch of some ranks: `table` holds their rows in the order of `state.ranks` (one row in a live run)."""
    sums = np.zeros(layout.width_sums)
    largest = np.full(layout.width_largest, _ABSENT)
    ranks = state.ranks
    sums[layout.sums["ranks"]] = len(ranks)
    sums[layout.sums["totals"]] = _totals(table)
    bits = (table.column("flags").astype(np.int64)[:, None] >> np.arange(_FLAGS)) & 1
    sums[layout.sums["flags"]] = bits.sum(axis=0)
    low = MOST_RANKS - 1 - ranks  # larger for lower ranks
    largest[layout.largest["flags"]] = np.where(bits > 0, low[:, None], _ABSENT).max(axis=0)
    bad = _nonfinite(table)
    sums[layout.sums["nonfinite"]] = bad.sum(axis=0)
    by_residue = np.full((len(_PLACES), _RESIDUES), _ABSENT)
    for i in range(len(_PLACES)):
        np.maximum.at(by_residue[i], ranks[bad[:, i]] % _RESIDUES, low[bad[:, i]])
    largest[layout.largest["nonfinite"]] = by_residue.ravel()
    largest[layout.largest["agree"]] = _both_ends(table, AGREE)
    largest[layout.largest["digests"]] = _both_ends(table, REPLICATED)
    largest[layout.largest["peaks"]] = _peaks(table)
    if layout.layers:
        sums[layout.sums["layers"]] = np.concatenate([table.layer_column(name).sum(axis=0) for name in LAYER_COLUMNS])
    checks = table.checks()
    if layout.plan is not None and checks is not None:
        parts = (checks.before, checks.after, checks.sq)
        sums[layout.sums["checks"]] = np.concatenate([part.sum(axis=0) for part in parts])
        ends = [_with_rank(end, ranks).max(axis=0) for end in (checks.after, -checks.after)]
        largest[layout.largest["checks"]] = np.concatenate(ends)
    histograms = sums[layout.sums["histograms"]].reshape(len(COMPARED), _BINS)
    extremes = largest[layout.largest["extremes"]].reshape(len(COMPARED), 2, _SLOTS)
    for i, name in enumerate(COMPARED):
        _pack_compared(table, name, state, histograms[i], extremes[i])
    return Sketch(sums, largest)


def merge(first: Sketch, second: Sketch) -> Sketch:
    """What the two all-reduces do: SUM of the one, MAX of the other."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return Sketch(first.sums + second.sums, np.maximum(first.largest, second.largest))


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

    values: as in Observation. world: ranks that have sent. disagree: columns that must be equal on all ranks and are not.
    flags: bit -> (ranks that have it, the lowest of them). nonfinite: place -> (count, some of the ranks, lowest first).
    checks: the sums of the reduction check as of a single rank that sends and receives everything.
    check_ends: cell -> (rank with the largest, rank with the smallest `after`), where more than one is received."""

    step: int
    attempt: int
    world: int
    values: Mapping[str, float]
    disagree: tuple[str, ...]
    all_have_next: bool
    next_tokens: float
    flags: Mapping[int, tuple[int, int]]
    nonfinite: Mapping[Place, tuple[int, tuple[int, ...]]]
    checks: Checks | None
    check_ends: Mapping[str, tuple[int, int]]
    extremes: Mapping[str, Extremes]
    counts: Mapping[str, np.ndarray] = field(repr=False)  # (bins + 1,) cumulated, of each compared signal
    centre: Mapping[str, float] = field(repr=False)

    def observation(self) -> Observation:
        """Global signals only: what a detector over time reads. There are no per-rank values in a sketch."""
        return Observation(self.step, self.attempt, self.values, checks=self.checks)

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
        own = _bin(value - self.centre[signal])
        middle = np.zeros(len(value))
        for k in (low, high):
            at, after = self._smallest(signal, k), self._smallest(signal, k + 1)
            middle += 0.5 * np.where(own <= _bin(np.asarray(at - self.centre[signal])), after, at)
        return middle

    def spread(self, signal: str) -> float:
        """1.4826 * median over ranks of the distance from the median; NaN without any."""
        n = self.compared(signal)
        if n == 0:
            return math.nan
        occupied = np.diff(self.counts[signal])
        distance = np.abs(_MIDDLES - (self.median(signal) - self.centre[signal]))
        order = np.argsort(distance, kind="stable")
        return float(1.4826 * distance[order][np.searchsorted(np.cumsum(occupied[order]), 0.5 * n)])

    def _smallest(self, signal: str, k: int) -> float:
        """The k-th smallest value, from 0, to within its bin."""
        counts = self.counts[signal]
        i = min(int(np.searchsorted(counts, k, side="right")), _BINS) - 1
        inside = (k + 0.5 - counts[i]) / max(counts[i + 1] - counts[i], 1.0)
        return float(self.centre[signal] + _EDGES[i] + min(inside, 1.0) * (_EDGES[i + 1] - _EDGES[i]))


def read(layout: SketchLayout, sketch: Sketch, centre: Mapping[str, float]) -> SketchSummary:
    """A merged sketch. centre: SketchState.centre when it was packed. The work depends on the layout only."""
    sums, largest = sketch.sums, sketch.largest
    totals = dict(zip(TOTALS, sums[layout.sums["totals"]].tolist(), strict=True))
    equal = np.concatenate([largest[layout.largest[name]] for name in ("agree", "digests")]).reshape(-1, 2)
    ends = _unordered(equal)
    shared = dict(zip(AGREE, ends[:, 0].tolist(), strict=False))
    differ = (equal[:, 0] != _ABSENT) & (ends[:, 0] != -ends[:, 1])
    world = int(sums[layout.sums["ranks"]][0])
    cumulated = {}
    for name, counts in zip(COMPARED, sums[layout.sums["histograms"]].reshape(-1, _BINS), strict=True):
        cumulated[name] = np.concatenate([[0.0], np.cumsum(counts)])
    packed = largest[layout.largest["extremes"]].reshape(len(COMPARED), 2 * _SLOTS)
    checks, check_ends = _read_checks(layout, sums, largest)
    return SketchSummary(
        step=int(shared["step"]),
        attempt=int(shared["attempt"]),
        world=world,
        values=_values(layout, totals, shared, sums, largest, world),
        disagree=tuple(itertools.compress((*AGREE, *REPLICATED), differ)),
        all_have_next=totals["has_next"] == world,
        next_tokens=totals["next_tokens"],
        flags={
            1 << i: (int(n), int(MOST_RANKS - 1 - low))
            for i, (n, low) in enumerate(zip(sums[layout.sums["flags"]], largest[layout.largest["flags"]], strict=True))
            if n > 0
        },
        nonfinite={
            place: (int(n), tuple(sorted((MOST_RANKS - 1 - low[low != _ABSENT]).tolist())))
            for (place, _), n, low in zip(
                _PLACES,
                sums[layout.sums["nonfinite"]],
                largest[layout.largest["nonfinite"]].reshape(-1, _RESIDUES),
                strict=True,
            )
            if n > 0
        },
        checks=checks,
        check_ends=check_ends,
        extremes={name: _read_extremes(row, centre[name]) for name, row in zip(COMPARED, packed, strict=True)},
        counts=cumulated,
        centre=dict(centre),
    )


# -- packing -----------------------------------------------------------------------------------------------------------


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
        "carrying": carrying.sum(),
        "has_next": (column("has_next") > 0).sum(),
    }
    for name in _MEANS:
        values = column(name)
        told = np.isfinite(values) if name == "attention_entropy" else ~np.isnan(values)
        given[name], given[f"{name}_count"] = values[told].sum(), told.sum()
    return np.array([given[name] if name in given else column(name).sum() for name in TOTALS])


def _nonfinite(table: StepTable) -> np.ndarray:
    """(ranks, places) bool. The reduction is claimed by the judge only if nothing before it was off."""
    return np.stack(
        [
            ~np.isfinite(table.column(name)) if place == "reduction" else table.column(name) > 0
            for place, name in _PLACES
        ],
        axis=1,
    )


def _both_ends(table: StepTable, names: Sequence[str]) -> np.ndarray:
    """x, -x of each column, largest over the ranks; absent where no rank has measured it."""
    values = table.rows[:, [INDEX[name] for name in names]]
    ends = np.stack([values, -values], axis=2).reshape(len(values), 2 * len(names))
    return np.where(np.isnan(ends), _ABSENT, _ordered(ends)).max(axis=0)


def _peaks(table: StepTable) -> np.ndarray:
    """Largest over the ranks. NaN means not measured, except in loss_max, where it is one."""
    values = table.rows[:, [INDEX[name] for name in PEAKS]]
    values[:, 1:] = np.where(np.isnan(values[:, 1:]), -np.inf, values[:, 1:])
    return _ordered(values).max(axis=0)


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
    packed = (MOST_RANKS - 1 - state.ranks) << _TOLD_BITS
    if name in WITH_PAST:
        history = state.histories[name]
        distance = distance - history.offset
        octaves = np.log2(history.sigma / history.floor)
        slot = slot + _RESIDUES * np.clip(2.0 * octaves, 0, _CLASSES - 1).astype(np.int64)
        packed |= (_LOG_SIGMA(history.sigma) << (_OWN_BITS + 2)) | (_OWN(x - history.level) << 2)
        packed |= ((history.away >= STAYS) << 1) | (history.points >= history.start)
    histogram += np.bincount(_bin(distance[valid]), minlength=_BINS)
    for side, value in enumerate((distance, -distance)):
        np.maximum.at(extremes[side], slot[valid], ((_VALUE(value) << (_RANK_BITS + _TOLD_BITS)) | packed)[valid])


class _Steps:
    """Numbers between two ends as whole numbers of so many bits, and back."""

    def __init__(self, bits: int, low: float, high: float) -> None:
        self.most, self.low, self.width = (1 << bits) - 1, low, high - low

    def __call__(self, values: np.ndarray) -> np.ndarray:
        share = np.clip((values - self.low) / self.width, 0.0, 1.0)
        return np.rint(share * self.most).astype(np.int64)

    def back(self, steps: np.ndarray) -> np.ndarray:
        return self.low + (steps & self.most) / self.most * self.width


class _LogSteps(_Steps):
    def __call__(self, values: np.ndarray) -> np.ndarray:
        return super().__call__(np.log(values))

    def back(self, steps: np.ndarray) -> np.ndarray:
        return np.exp(super().back(steps))


_VALUE = _Steps(_VALUE_BITS, -_REACH, _REACH)
_OWN = _Steps(_OWN_BITS, -_OWN_REACH, _OWN_REACH)
_LOG_SIGMA = _LogSteps(_SIGMA_BITS, *_SIGMA_LOG)


def _bin(distance: np.ndarray) -> np.ndarray:
    """Bin of a distance from the centre, in log units."""
    return np.clip(np.floor(_BINS / 2 + _BIN_SCALE * np.arcsinh(distance / _FINE)), 0, _BINS - 1).astype(np.int64)


_EDGES = _FINE * np.sinh((np.arange(_BINS + 1) - _BINS / 2) / _BIN_SCALE)
_MIDDLES = 0.5 * (_EDGES[1:] + _EDGES[:-1])


def _ordered(values: np.ndarray) -> np.ndarray:
    """float64 -> int64 of the same order; every NaN is the same, and above all."""
    bits = np.where(np.isnan(values), np.nan, np.asarray(values, dtype=np.float64) + 0.0).view(np.int64)
    return np.where(bits < 0, bits ^ _MOST, bits)


def _unordered(bits: np.ndarray) -> np.ndarray:
    return np.where(bits < 0, bits ^ _MOST, bits).view(np.float64)


def _with_rank(values: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """(ranks, cells) of values rounded to float32, packed with their rank; NaN above all."""
    single = np.where(np.isnan(values), np.nan, values).astype(np.float32)
    bits = single.view(np.int32).astype(np.int64)
    ordered = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << _RANK_BITS) | (MOST_RANKS - 1 - ranks)[:, None]


# -- reading -----------------------------------------------------------------------------------------------------------


def _values(
    layout: SketchLayout,
    totals: Mapping[str, float],
    shared: Mapping[str, float],
    sums: np.ndarray,
    largest: np.ndarray,
    world: int,
) -> dict[str, float]:
    """The global signals, by the rules of StepTable.observation."""
    tokens = totals["tokens"]
    square = totals["reduced_sq_share"]
    peaks = dict(zip(PEAKS, _unordered(largest[layout.largest["peaks"]]).tolist(), strict=True))
    values = {
        "loss": totals["loss_tokens"] / tokens if tokens > 0 else totals["loss"] / max(world, 1),
        "grad_norm": math.sqrt(square) if square >= 0 else math.nan,
        "loss_scale": shared["loss_scale"],
        "lr": shared["lr"],
        "padding": totals["padding"] / max(world, 1),
        **{name: peak for name, peak in peaks.items() if peak != -math.inf or name == "loss_max"},
    }
    for name, share in (("weight_norm", "weight_sq_share"), ("update_norm", "update_sq_share")):
        if math.isfinite(totals[share]):
            values[name] = math.sqrt(totals[share])
    for name in _MEANS:
        if totals[f"{name}_count"] > 0:
            values[name] = totals[name] / totals[f"{name}_count"]
            if name != "attention_entropy":
                values["eval_step"] = shared["step"] - 1.0
    with np.errstate(invalid="ignore"):
        by_layer = np.sqrt(sums[layout.sums["layers"]].reshape(len(LAYER_COLUMNS), len(layout.layers)))
    for name, norms in zip(("grad_norm", "update_norm", "adam_lag"), by_layer, strict=True):
        if name == "grad_norm" or (len(norms) and np.isfinite(norms).all()):
            values.update(zip((f"{name}/{layer}" for layer in layout.layers), norms.tolist(), strict=True))
            if name == "adam_lag":
                values[name] = float(norms.max())
    return values


def _read_checks(
    layout: SketchLayout, sums: np.ndarray, largest: np.ndarray
) -> tuple[Checks | None, dict[str, tuple[int, int]]]:
    """Every group of receivers gets one whole gradient: the sum over all ranks, divided by the number of groups."""
    if layout.plan is None:
        return None, {}
    names, groups = layout.plan.names, max(len(layout.plan.receivers), 1)
    before, after, sq = sums[layout.sums["checks"]].reshape(len(CHECK_COLUMNS), 1, len(names))
    top, bottom = largest[layout.largest["checks"]].reshape(2, len(names))
    ranks = [(MOST_RANKS - 1 - (ends & (MOST_RANKS - 1))).tolist() for ends in (top, bottom)]
    ends = {name: (int(a), int(b)) for name, a, b in zip(names, *ranks, strict=True)} if groups > 1 else {}
    return Checks(replace(layout.plan, receivers=((0,),)), before, after / groups, sq), ends


def _read_extremes(packed: np.ndarray, centre: float) -> Extremes:
    sides = packed.reshape(2, _SLOTS)
    shift = _RANK_BITS + _TOLD_BITS
    distance = np.concatenate([_VALUE.back(sides[0] >> shift), -_VALUE.back(sides[1] >> shift)])
    ranks = MOST_RANKS - 1 - ((packed >> _TOLD_BITS) & (MOST_RANKS - 1))
    there = np.flatnonzero(packed != _ABSENT)
    ranks, first = np.unique(ranks[there], return_index=True)
    chosen = there[first]
    low = packed[chosen]
    return Extremes(
        ranks=ranks,
        value=centre + distance[chosen],
        sigma=_LOG_SIGMA.back(low >> (_OWN_BITS + 2)),
        own=_OWN.back(low >> 2),
        stays=(low & 2).astype(bool),
        mature=(low & 1).astype(bool),
    )
