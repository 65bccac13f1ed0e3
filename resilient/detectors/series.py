"""Signals over time: what the four families of statistics say about each signal, with thresholds the run calibrates
itself, the step at which it began, and a level that moves on when the new one stays (S2, S3, S6-S9, BR-04, BR-07).

One instance judges all signals: the arithmetic is vectorised over them (detectors/statistics.py), the thresholds come
from the run's own healthy history (detectors/tail.py), what counts as bad from a table (detectors/specs.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from resilient.detectors.config import SeriesConfig, Targets
from resilient.detectors.specs import LOSS, Spec, spec_of
from resilient.detectors.statistics import (
    CONFIRMED,
    COUNT,
    DRIFT,
    LEVEL,
    LINEAR,
    POINT,
    SCALE,
    STATISTICS,
    TREND,
    Look,
    Statistics,
    Windows,
)
from resilient.detectors.tail import Tail
from resilient.signals import Finding, Observation, Severity

_SEVERITIES = (Severity.WATCH, Severity.WARN, Severity.ACT)
_INTERVAL_KNOWN = 16  # points after which it is known whether every step is logged

# Prior of the block maximum (64 points) of a healthy run: of its logarithm for single points, else of itself.
_SINGLE = np.array([True, True, False, False, False, False])
_PRIOR_MEAN = np.array([math.log(4.5), math.log(2.0), 2.6, 2.6, 2.6, 0.33])
_PRIOR_STD = np.array([0.35, 0.22, 0.7, 0.7, 0.7, 0.2])
_PRIOR_WEIGHT = np.array([16.0, 16.0, 16.0, 16.0, 16.0, 6.0])  # blocks
_SHARES = (0.25, 0.15, 0.1, 0.1, 0.1, 0.3)  # of the false alarms that a signal may cost
_LOWEST_POINT, _LOWEST_SCALE = 3.0, 0.18  # block maxima count as at least this
_HISTORY = 128
_HUGE = 1e30  # larger values would overflow in the arithmetic, and say no more
_RUN = 2.5  # robust sigmas: a point beyond belongs to the run of odd points that a finding may begin with


@dataclass
class _Judged:
    """One observation as this detector saw it: kept between observe and absorb."""

    observation: Observation
    look: Look
    ratios: np.ndarray  # (n, COUNT) score / warn threshold; 0 where a statistic does not speak
    high: list[int]  # places in ratios, flat, of those worth a look
    largest: float  # of them, 0 if there are none
    names: list[str]


class Series:
    """All signals of a run or a log, judged over time. See the module."""

    name = "series"
    _ROW_ARRAYS = ("sign", "linear", "odd", "cool", "held", "sparse", "nonpositive")
    _ROW_WINDOWS = ("steps", "scores")

    sign: np.ndarray  # (rows,) +1 or -1: up is bad after multiplying
    linear: np.ndarray  # (rows,) judged as it is instead of its logarithm
    odd: np.ndarray  # (rows,) odd points in a row, more or less
    cool: np.ndarray  # (rows,) points until healthy history counts again
    held: np.ndarray  # (rows,) points in a row, more or less, at which alarms froze the references
    sparse: np.ndarray  # (rows,) of 15 gaps between points, those longer than a step; -1: not known yet
    nonpositive: np.ndarray  # (rows,) values without a logarithm so far
    steps: Windows  # (rows, 128) of the last values
    scores: Windows  # (rows, 128) `point` at those steps
    _statistics: Statistics
    _tail: Tail
    _inverse: np.ndarray  # (rows, COUNT) 1 / warn threshold; 0 where a statistic does not speak yet
    _watch_from: float  # below this share of its warn threshold nothing is worth watching
    _look_from: float  # below this share nothing is worth a look, nor for the stability level
    _trouble: bool  # some row is odd or cooling down
    _settled: bool  # the logging interval of all rows is known
    _mirrored: bool  # some sign is -1
    _any_linear: bool

    def __init__(self, config: SeriesConfig, targets: Targets) -> None:
        self.config = config
        self._rates = tuple(rate / 10_000 for rate in (targets.watch, targets.warn, targets.act))
        self._rows: dict[str, tuple[int, ...]] = {}  # signal -> its row, or two rows when both directions are bad
        self._names: list[str] = []
        self._specs: list[Spec] = []
        self._keys: tuple[str, ...] = ()  # names of the last observation, and where its values go
        self._places: tuple[np.ndarray, np.ndarray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._strangers: list[str] = []  # names that are not known yet
        self._unusable = False  # the last observation had a value that could not be judged
        self._last: _Judged | None = None
        self._allocate([], [])

    # -- judging ------------------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> list[Finding]:
        judged = self._judge(observation)
        if judged is None or judged.largest < self._watch_from:
            return []
        return self._findings(judged)

    def ratios(self, observation: Observation) -> list[tuple[str, str, float]]:
        """(signal, statistic, score / warn threshold) of the largest statistic of each signal where it exceeds 0.5, for
        the stability level."""
        judged = self._judge(observation)
        if judged is None or judged.largest <= 0.5:
            return []
        flat = judged.ratios.ravel()
        best: dict[int, int] = {}  # row -> where its largest ratio is
        for place in judged.high:
            row = place // COUNT
            if flat[place] > 0.5 and (row not in best or flat[place] > flat[best[row]]):
                best[row] = place
        return [(judged.names[row], STATISTICS[place % COUNT], float(flat[place])) for row, place in best.items()]

    def growth(self, signal: str, statistic: str) -> tuple[np.ndarray, np.ndarray, float] | None:
        """What grows behind a finding: (age in points before now, excess over the reference, excess that is a blow-up).

        `scale`: step-to-step differences in blocks of 8 against their reference; they are clipped at 4 times it, so 3.8 times
        counts as blown up. Other statistics: the last 32 values against those before; blown up is 10 times, a loss 1.25."""
        rows = self._rows.get(signal, ())
        if not rows:
            return None
        row = rows[0]
        if statistic == STATISTICS[SCALE]:
            blocks = self._statistics.ratios.now[row].reshape(-1, 8).mean(axis=1)
            return np.arange(len(blocks) - 1, -1, -1) * 8 + 3.5, blocks - 1.0, 2.8
        recent = self._statistics.recent.now[row, -32:]
        began = np.median(self._statistics.window.now[row][:64])
        excess = recent - began if self.linear[row] else np.expm1(np.minimum(recent - began, 50.0))
        if self.linear[row]:
            excess = excess / max(abs(float(began)), 1e-12)
        return np.arange(len(recent) - 1, -1, -1.0), excess, 0.25 if signal.startswith("loss") else 9.0

    def _judge(self, observation: Observation) -> _Judged | None:
        """Every known signal that has a value, against its past. Computed once per observation."""
        if self._last is not None and self._last.observation is observation:
            return self._last
        rows, values = self._values(observation)
        if not len(rows):
            return None
        first, end = int(rows[0]), int(rows[-1]) + 1
        selected: Any = slice(first, end) if end - first == len(rows) else rows  # a slice is a view, indices copy
        everyone = len(rows) == len(self._names)
        look = self._statistics.look(selected, values, everyone)
        ratios = look.scores * (self._inverse if everyone else self._inverse[selected])
        names = self._names if everyone else [self._names[r] for r in rows]
        flat = ratios.ravel()
        high = np.flatnonzero(flat > self._look_from).tolist()
        self._last = _Judged(observation, look, ratios, high, max((float(flat[h]) for h in high), default=0.0), names)
        return self._last

    def _values(self, observation: Observation) -> tuple[np.ndarray, np.ndarray]:
        """Rows with a usable value, ascending, and the values as judged: signed, logarithm where the spec says so.

        Non-finite values are another detector's business and never enter a window; what is not positive has no logarithm
        and counts as not measured."""
        keys = tuple(observation.values)
        if keys != self._keys:
            self._keys = keys
            self._strangers = [key for key in keys if key not in self._rows]
            pairs = sorted((row, i) for i, key in enumerate(keys) for row in self._rows.get(key, ()))
            self._places = (
                np.array([row for row, _ in pairs], dtype=np.int64),
                np.array([i for _, i in pairs], dtype=np.int64),
            )
        rows, places = self._places
        self._unusable = False
        if not len(rows):
            return rows, np.zeros(0)
        values = np.fromiter(observation.values.values(), np.float64, len(keys))[places]
        if not self._any_linear:
            with np.errstate(all="ignore"):
                logs = np.log(values)
            if math.isfinite(logs @ logs):  # the usual case: all values are positive and finite
                return rows, self.sign[rows] * logs if self._mirrored else logs
        plain = self.linear[rows]
        good = np.isfinite(values) & (plain | (values > 0))
        if not good.all():
            self._unusable = True
            rows, values, plain = rows[good], values[good], plain[good]
        if plain.any():
            values = np.where(plain, np.clip(values, -_HUGE, _HUGE), np.log(np.where(plain, 1.0, values)))
        else:
            values = np.log(values)
        return rows, self.sign[rows] * values

    def _findings(self, judged: _Judged) -> list[Finding]:
        look = judged.look
        index = np.arange(len(self._names))[look.rows]
        thresholds = self._tail.thresholds[look.rows]
        loss = judged.names.index("loss") if "loss" in judged.names else None
        odd_batch = loss is not None and float(look.scores[loss, POINT]) > self.config.suspect
        over = (look.scores >= thresholds[:, :, 0]) & (self._statistics.speaks[look.rows] > 0)
        findings = []
        for i in np.flatnonzero(over.any(axis=1)):
            candidates = [
                self._finding(judged, int(i), int(index[i]), int(k), thresholds[i, k], odd_batch)
                for k in np.flatnonzero(over[i])
            ]
            findings.append(
                max(candidates, key=lambda f: (f.severity, judged.ratios[i, STATISTICS.index(f.statistic)]))
            )
        return findings

    def _finding(
        self, judged: _Judged, i: int, row: int, statistic: int, thresholds: np.ndarray, odd_batch: bool
    ) -> Finding:
        """The finding of one statistic of one signal; its severity is cut where the change is too small to matter.

        odd_batch: the loss of this very step is odd. A loss or a norm that is odd with it, once, is that batch's doing."""
        look, observation, spec = judged.look, judged.observation, self._specs[row]
        score = float(look.scores[i, statistic])
        severity = _SEVERITIES[int((score >= thresholds).sum()) - 1]
        if statistic == POINT:
            change = float(look.residual[i])
        elif statistic == SCALE:
            change = math.inf
        else:
            change = float(look.linear[i, statistic - LEVEL] if statistic != CONFIRMED else score) * float(
                self._statistics.sigma_now[row]
            )
        least = spec.jump
        if statistic == POINT:
            least = 0.05 if self._coarse(row) else spec.single
        if not self.linear[row] and change < least:
            severity = Severity.WATCH
        refusable = statistic in (POINT, CONFIRMED)
        if refusable and severity is Severity.ACT and (spec.refuse is None or self.linear[row] or change < spec.refuse):
            severity = Severity.WARN
        accepting = self.held[row] + 1 >= self.config.hold or (
            self.odd[row] + 1 >= self.config.accept_after and look.scores[i, POINT] > self.config.suspect
        )
        if accepting:
            severity = min(severity, Severity.WARN)
        onset, sure = self._onset(row, statistic, observation.step, float(look.scores[i, POINT]))
        name = judged.names[i]
        value, reference = observation.values[name], self._plain(row, float(look.level[i]))
        return Finding(
            detector=self.name,
            signal=name,
            severity=severity,
            score=score,
            step=observation.step,
            onset_step=onset,
            value=value,
            reference=reference,
            statistic=STATISTICS[statistic],
            alone=statistic == POINT and not self._coarse(row) and (odd_batch or spec is LOSS),
            onset_confidence=sure,
            message=_words(name, statistic, value, reference, score)
            + ("; accepted as the new level: it has stayed" if accepting else ""),
        )

    def _onset(self, row: int, statistic: int, step: int, point: float) -> tuple[int, float]:
        """First step that was off, and how sure that is. A jump is seen at once: the run of odd points this one ends. A slow
        change is dated by where the CUSUM of the recent scores (or differences) last left zero (Page 1954)."""
        steps = [*self.steps.now[row].tolist(), step]
        if statistic in (POINT, CONFIRMED):
            first = len(steps) - 1
            while first > 0 and self.scores.now[row, first - 1] > _RUN:
                first -= 1
            return int(steps[first]), 0.95 if point > self.config.suspect else 0.8
        if statistic == SCALE:
            excess = (self._statistics.ratios.now[row] - 1.25).tolist()
            steps = steps[-len(excess) - 1 :]
        else:
            excess = (np.clip(self.scores.now[row], -2.0, 4.0) - 0.5).tolist()
        total, first = 0.0, len(excess)
        for i, more in enumerate(excess):
            if total <= 0.0:
                first = i
            total = max(total + more, 0.0)
        return int(steps[first if total > 0 else -1]), {LEVEL: 0.7, DRIFT: 0.5, TREND: 0.5, SCALE: 0.5}[statistic]

    def _plain(self, row: int, y: float) -> float:
        """A judged value in the signal's own unit."""
        y = float(self.sign[row]) * y
        return y if self.linear[row] else math.exp(min(y, 700.0))

    def _coarse(self, row: int) -> bool:
        """One logged point stands for several steps, so that a single odd point is more than one odd batch."""
        return self._specs[row] is LOSS and bool(self.sparse[row] >= _INTERVAL_KNOWN // 2)

    # -- learning -----------------------------------------------------------------------------------------------

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        judged = self._judge(observation)
        if judged is not None:
            self._learn(judged, applied)
        self._last = None
        strangers, self._strangers = self._strangers, []
        if strangers:
            self._meet(strangers)
        if strangers or self._unusable:
            self._mind_signs(observation)

    def _learn(self, judged: _Judged, applied: bool) -> None:
        look, rows = judged.look, judged.look.rows
        point = look.scores[:, POINT]
        if applied and not self._trouble and judged.largest < 1.0 and point.max() <= self.config.suspect:
            calm = healthy = None  # the usual case: nothing is off anywhere
        else:
            calm, healthy = self._sort_out(judged, applied)
        self._tail.add(rows, healthy, look.scores)
        self.scores.push(rows, point, look.everyone)
        self.steps.push(rows, judged.observation.step, look.everyone)
        self._statistics.learn(look, calm)
        if self._statistics.kept[0] == 0:  # the references have moved
            moved = self._tail.flush()
            if not self._settled:
                moved |= self._count_interval()
            if moved:
                self._thresholds_moved()
            np.divide(self._statistics.speaks, self._tail.thresholds[:, :, 1], out=self._inverse)
        if self._trouble:
            for row in np.flatnonzero(self.odd >= self.config.accept_after):
                self._statistics.rebase(int(row))
                self.odd[row] = 0
            for row in np.flatnonzero(self.held >= self.config.hold):
                self._statistics.rebase(int(row))
                self._statistics.accept_widening(int(row))
                self.held[row] = 0

    def _sort_out(self, judged: _Judged, applied: bool) -> tuple[np.ndarray, np.ndarray]:
        """(calm, healthy) of each row: may its value enter the references; does its score count as healthy history? A lone
        odd point does, so that a run with many of them learns to expect them, even if it was alarmed (a lone point of a
        loss that stands for several steps is no lone step, and teaches nothing); one in a run of them does not."""
        look, rows = judged.look, judged.look.rows
        speaks = self._statistics.speaks[rows, POINT] > 0
        odd = (look.scores[:, POINT] > self.config.suspect) & speaks
        lone = odd & (self.odd[rows] == 0) & (judged.ratios[:, CONFIRMED:] < 1.0).all(axis=1)
        lesson = lone & np.array([self._specs[row] is not LOSS for row in np.arange(len(self._names))[rows]])
        alarming = (judged.ratios >= 1.0).any(axis=1)
        calm = ~(odd | alarming) if applied else np.zeros(len(odd), dtype=bool)
        self.odd[rows] = count = np.where(odd, self.odd[rows] + 1, np.maximum(self.odd[rows] - 1, 0))
        trouble = (alarming & ~lesson) | (count > 2)
        self.cool[rows] = cool = np.where(trouble, self.config.cooldown, np.maximum(self.cool[rows] - 1, 0))
        self.held[rows] = np.where(alarming, self.held[rows] + 1, np.maximum(self.held[rows] - 1, 0))
        self._trouble = bool(self.odd.any() or self.cool.any() or self.held.any())
        if (alarming & ~lesson).any():
            alarmed = np.arange(len(self._names))[rows][alarming & ~lesson]
            self._statistics.forget_recent(alarmed)
            self._tail.forget_recent(alarmed)
        return calm, (cool == 0) & (calm | ((lone & (~alarming | lesson)) & applied))

    def _count_interval(self) -> bool:
        """Whether a signal is logged every step is known after a few points; the prior of `point` follows. True if a
        threshold may have moved."""
        known = np.flatnonzero((self._statistics.points >= _INTERVAL_KNOWN) & (self.sparse < 0))
        for row in known:
            gaps = np.diff(self.steps.now[row, -_INTERVAL_KNOWN:])
            self.sparse[row] = int((gaps > 1).sum())
            self._set_prior(int(row))
        self._settled = bool((self.sparse >= 0).all())
        return bool(len(known))

    def _mind_signs(self, observation: Observation) -> None:
        """A signal that keeps being zero or negative has no logarithm: judge it as it is, from now on."""
        for name, value in observation.values.items():
            if value <= 0:
                for row in self._rows.get(name, ()):
                    if not self.linear[row]:
                        self.nonpositive[row] += 1
                        if self.nonpositive[row] > max(2, 0.05 * int(self._statistics.points[row])):
                            self._restart_row(row)

    # -- rows ---------------------------------------------------------------------------------------------------

    def _meet(self, names: Sequence[str]) -> None:
        """Give rows to signals seen for the first time."""
        new: list[tuple[str, Spec, float]] = []
        for name in names:
            spec = spec_of(name)
            if spec is None:
                self._rows[name] = ()
                continue
            signs = {"up": (1.0,), "down": (-1.0,), "both": (1.0, -1.0)}[spec.direction]
            new += [(name, spec, sign) for sign in signs]
        if new:
            self._allocate(
                self._names + [name for name, _, _ in new],
                [*self.sign.tolist(), *(sign for _, _, sign in new)],
            )

    def _allocate(self, names: list[str], signs: list[float]) -> None:
        """Room for these rows; what is known of the first ones is kept."""
        known = len(self._names)
        old_rows = self._row_arrays() if known else {}
        old_statistics, old_tail = (self._statistics, self._tail) if known else (None, None)
        n = len(names)
        self._names = list(names)
        self._specs = [spec_of(name) or Spec() for name in names]
        self.sign = np.asarray(signs, dtype=np.float64)
        self.linear = np.zeros(n, dtype=bool)
        self.odd = np.zeros(n, dtype=np.int64)
        self.cool = np.zeros(n, dtype=np.int64)
        self.held = np.zeros(n, dtype=np.int64)
        self.sparse = np.full(n, -1, dtype=np.int64)
        self.nonpositive = np.zeros(n, dtype=np.int64)
        self.steps = Windows(n, _HISTORY, -1, np.int64)
        self.scores = Windows(n, _HISTORY)
        self._trouble = False
        self._settled = False
        c = self.config
        floors = np.array([spec.floor for spec in self._specs], dtype=np.float64)
        self._statistics = Statistics(floors, c.start, c.trend_after, c.scale_after)
        prior_mean = np.tile(_PRIOR_MEAN, (n, 1))
        lowest = np.where(_SINGLE, np.exp(prior_mean), prior_mean)
        lowest[:, POINT], lowest[:, SCALE] = _LOWEST_POINT, _LOWEST_SCALE
        self._tail = Tail(
            prior_mean,
            np.tile(_PRIOR_STD, (n, 1)),
            _PRIOR_WEIGHT,
            _SINGLE,
            lowest,
            np.zeros((n, COUNT, 3)),
            self._rates,
            _SHARES,
        )
        mine = self._row_arrays()
        for key, array in old_rows.items():
            mine[key][: len(array)] = array
        if known:
            assert old_statistics is not None and old_tail is not None
            for new, old in (
                (self._statistics.arrays(), old_statistics.arrays()),
                (self._tail.arrays(), old_tail.arrays()),
            ):
                for key, array in old.items():
                    new[key][: len(array)] = array
            self._statistics.changed()
            self._trouble = True
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            rows.setdefault(name, []).append(row)
        unjudged = {name: found for name, found in self._rows.items() if not found}
        self._rows = {**unjudged, **{name: tuple(found) for name, found in rows.items()}}
        for row in range(known, n):
            self._set_prior(row)
        self._inverse = self._statistics.speaks / self._tail.thresholds[:, :, 1] if n else np.zeros((0, COUNT))
        self._thresholds_moved()
        self._note_scales()

    def _set_prior(self, row: int) -> None:
        """Smallest thresholds of a row, and the prior of `point` that fits its logging interval."""
        c, spec = self.config, self._specs[row]
        coarse = self._coarse(row)
        least = np.full(COUNT, c.least_trend * spec.strictness)
        least[POINT] = c.least_point if coarse or spec is not LOSS else c.least_single
        least[CONFIRMED] = c.least_confirmed * spec.strictness
        least[SCALE] = spec.least_scale if spec.least_scale is not None else c.least_scale
        usual = 1e-4  # false alarms per step that the `least` values stand for
        grow = np.array([1.0 + 0.35 * math.log10(usual / rate) for rate in self._rates])
        self._tail.least[row] = least[:, None] * np.maximum(grow, 0.5)
        if coarse:
            self._tail.prior_mean[row, POINT], self._tail.prior_std[row, POINT] = math.log(3.0), 0.2
            self._tail.lowest[row, POINT] = 3.0
        self._tail.refresh(np.array([row]))

    def _thresholds_moved(self) -> None:
        self._watch_from = self._tail.watch_from
        self._look_from = min(0.5, self._watch_from)

    def _note_scales(self) -> None:
        """Signs and scales of the rows may have changed."""
        self._keys = ()
        self._mirrored, self._any_linear = bool((self.sign < 0).any()), bool(self.linear.any())

    def _restart_row(self, row: int) -> None:
        """Begin this row anew on the plain scale."""
        fresh = Statistics(np.array([1e-12]), self.config.start, self.config.trend_after, self.config.scale_after)
        mine = self._statistics.arrays()
        for key, array in fresh.arrays().items():
            if key != "kept":
                mine[key][row] = array[0]
        self._statistics.changed()
        self.linear[row] = True
        self.odd[row] = self.cool[row] = 0
        self.steps.now[row], self.scores.now[row] = -1, 0.0
        self._inverse[row] = 0.0
        self._note_scales()

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": list(self._names),
            "unjudged": [name for name, rows in self._rows.items() if not rows],
            "rows": _copies(self._row_arrays()),
            "statistics": _copies(self._statistics.arrays()),
            "tail": _copies(self._tail.arrays()),
        }

    def _row_arrays(self) -> dict[str, np.ndarray]:
        """What this class keeps of each row, by name, as live views."""
        windows = {name: getattr(self, name).now for name in self._ROW_WINDOWS}
        return {**{name: getattr(self, name) for name in self._ROW_ARRAYS}, **windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names, signs = list(state["names"]), np.asarray(state["rows"]["sign"])
        judged = {name: rows for name, rows in self._rows.items() if rows}
        self._rows = {name: () for name in state["unjudged"]}
        if names == self._names and np.array_equal(signs, self.sign):
            self._rows |= judged  # the usual case: the rows are there, and all that is known of them is overwritten
        else:
            self._names = []
            self._allocate(names, signs.tolist())
        parts = {"rows": self._row_arrays(), "statistics": self._statistics.arrays(), "tail": self._tail.arrays()}
        for part, arrays in parts.items():
            for name, array in arrays.items():
                array[...] = np.asarray(state[part][name])
        self._statistics.changed()
        self._note_scales()
        np.divide(self._statistics.speaks, self._tail.thresholds[:, :, 1], out=self._inverse)
        self._thresholds_moved()
        self._trouble, self._settled = True, False
        self._last = None


def _copies(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in arrays.items()}


def _words(name: str, statistic: int, value: float, reference: float, score: float) -> str:
    told = {
        POINT: f"{name} {value:.4g} against {reference:.4g}: {score:.1f} robust sigmas",
        CONFIRMED: f"{name} {value:.4g} against {reference:.4g}: two of three points are {score:.1f} robust sigmas up or more",
        LEVEL: f"{name} has moved: mean of 8 points {score:.1f} sigmas above the 56 before (now {value:.4g})",
        DRIFT: f"{name} drifts: mean of 32 points {score:.1f} sigmas above the 96 before (now {value:.4g})",
        TREND: f"{name} grows steadily: {score:.1f} sigmas over 64 points (now {value:.4g})",
        SCALE: f"{name} jumps {100 * score:.0f} % more from step to step than it used to (now {value:.4g})",
    }
    return told[statistic]


assert slice(LEVEL, SCALE) == LINEAR
