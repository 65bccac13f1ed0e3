"""Outlier across ranks: one rank's value stands out from its peers *and* from its own past (C2, S19).

On x_r = log of a rank's value, with what is usual for the rank (signals/history.py):

    gap_r   = (x_r - offset_r) - median over the other peers of (x - offset)
    own_r   = x_r - level_r
    score_r = min(gap_r, 2 own_r) / (sigma_r * widening)

A rank that is always larger than the others (heterogeneous data) has a large offset and is no outlier; one that is always
noisier has a large sigma. With two ranks the gap is antisymmetric and cannot say whose fault it is: the rank must have
left its own past, too, by at least half as much. widening: the ranks' present spread against the usual one, when it is
wider; in a step in which all ranks scatter more, one of them is no outlier.

How far healthy values reach is learned from all ranks together (Exceedances), so that heavy-tailed noise raises the
thresholds. A rank that is off for the third step in a row needs to be less far off: healthy noise seldom comes back to one
rank. One odd step that is no further out than the run's noise may be, now and then, is `plausible`: it may be refused,
but does not tell a fault from noise by itself.

The other side, a value far too small for three steps in a row (a gradient that is scaled or lost), warns and never refuses
a step: one small value does no harm, and an easy batch is nobody's fault.

The table (`CrossRankOutlier`) and the sketch (`SketchOutlier`) are judged by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from resilient.detectors.config import CrossRankConfig, Targets
from resilient.detectors.peers import PeerGroups
from resilient.signals import Finding, Observation, Severity
from resilient.signals.history import STAYS, RankHistory
from resilient.signals.sketch import SketchSummary

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_UNCERTAIN = 4.0  # over the root of the ranks: how much wider than usual their spread must be to count as wide
_LEAST_GROUP = 5  # members from which one outlier does not widen the spread itself
_NAMED = 16  # ranks that one finding names at most
_ZERO = 1e-30  # a value of exactly 0 counts as this: far below anything measured


class Exceedances:
    """How far scores of healthy ranks reach: a Pareto tail beyond a score of 4 (Hill 1975), over all ranks together.

    A prior worth a few events speaks until there are events. A flagged score counts at most once in 4,096 steps and rank,
    no further than the threshold, and only if it was a lone one; of one that is not flagged, those of steps in a row count
    as the first: heavy tails visit all ranks, a fault comes back to its own."""

    START = 4.0
    CAUTIOUS = 0.2  # shape of a prior for who must not be wrong: t5, where that for thresholds is nearly normal
    _MEMORY = 16384.0  # steps: at two ranks a few thousand hold too few events to know a heavy tail's shape by
    _ONCE = 4096  # steps in which one rank's flagged scores count once
    _QUIET = 8  # steps without a further one after which a flagged score was a lone one
    _EVENTS, _STEPS = 1.0, 64.0  # of the prior
    _SHAPE, _WEIGHT = 0.12, 8.0

    def __init__(self) -> None:
        self._seen = [0.0, 0.0, 0.0]  # steps, events, sum of log(score / START); old ones fade
        self._step = 0
        self._flagged: dict[int, int] = {}  # rank -> step at which a flagged score of it has counted
        self._waiting: dict[int, tuple[int, int]] = {}  # rank -> first and last step of what may become one
        self._before: list[int] = []  # ranks beyond START in the step before

    @property
    def frequency(self) -> float:
        """Scores beyond START per step, of all ranks together."""
        steps, events, _ = self._seen
        return (events + self._EVENTS) / (steps + self._STEPS)

    def threshold(self, rate: float, shape: float = _SHAPE) -> float:
        """The score that one rank of the world exceeds with so many events per step. shape: the prior's, of the tail."""
        _, events, excess = self._seen
        shape = (excess + self._WEIGHT * shape) / (events + self._WEIGHT)
        return self.START * max(self.frequency / rate, 1.0) ** shape

    def learn(self, ranks: np.ndarray, scores: np.ndarray, flagged: Sequence[int], cap: float) -> None:
        """One step's scores beyond START and whose they are. flagged: ranks of this step's findings."""
        self._step += 1
        keep = 1.0 - 1.0 / self._MEMORY
        steps, events, excess = self._seen
        self._seen = [keep * steps + 1.0, keep * events, keep * excess]
        if self._waiting:
            self._settle(cap)
        before, self._before = self._before, ranks.tolist()
        if not len(ranks):
            return
        counts = scores < cap
        for i in np.flatnonzero(~counts):
            rank = int(ranks[i])
            if rank in flagged:
                first, _ = self._waiting.get(rank, (self._step, 0))
                self._waiting[rank] = (first, self._step)
        if flagged or before:  # a rank that stays off is flagged below the threshold, too
            known = {*flagged, *before}
            counts &= np.array([rank not in known for rank in self._before])
        self._seen[1] += float(counts.sum())
        self._seen[2] += float(np.log(np.minimum(scores[counts], cap) / self.START).sum())

    def _settle(self, cap: float) -> None:
        """Ranks that were flagged once and are quiet since: that is what noise may do, once in a memory for each rank. A
        rank that was flagged again meanwhile is off, and teaches nothing."""
        self._flagged = {r: s for r, s in self._flagged.items() if self._step - s < self._ONCE}
        for rank, (first, last) in list(self._waiting.items()):
            if self._step - last <= self._QUIET:
                continue
            del self._waiting[rank]
            if first == last and rank not in self._flagged:
                self._flagged[rank] = self._step
                self._seen[1] += 1.0
                self._seen[2] += math.log(cap / self.START)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": np.array(self._seen),
            "waiting": {str(rank): list(steps) for rank, steps in self._waiting.items()},
            "before": list(self._before),
            "step": self._step,
            "flagged": {str(rank): step for rank, step in self._flagged.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = np.asarray(state["seen"], dtype=np.float64).tolist()
        self._before = [int(rank) for rank in state["before"]]
        self._step = int(state["step"])
        self._flagged = {int(rank): int(step) for rank, step in state["flagged"].items()}
        self._waiting = {int(rank): (int(first), int(last)) for rank, (first, last) in state["waiting"].items()}


class OutlierJudge:
    """Scores of ranks -> findings, with the thresholds and the onsets that takes. The same for table and sketch."""

    def __init__(self, name: str, config: CrossRankConfig, targets: Targets) -> None:
        self.name, self.config = name, config
        per_step = 1e-4  # targets count per 10,000 steps
        # A finding about ranks leads to a verdict about a machine or a wire, so it may cost as little as `act`, and one that
        # refuses a step ten times less.
        self._rates = (per_step * targets.act, 0.1 * per_step * targets.act)
        self.high, self.low = Exceedances(), Exceedances()
        self._onset: dict[int, int] = {}

    def thresholds(self) -> tuple[float, float, float]:
        """Scores that warn, act, and warn on the low side."""
        warn, act = (self.high.threshold(rate) for rate in self._rates)
        low = max(self.low.threshold(self._rates[0]), self.config.act)
        return max(warn, self.config.warn), max(act, self.config.act), low

    def beyond_noise(self) -> float:
        """The score from which one step by itself tells a fault from noise."""
        return self.high.threshold(self._rates[1], Exceedances.CAUTIOUS)

    def again(self, world: float) -> float:
        """The score of a rank that has been off in the steps before, too. world: ranks compared.

        Of independent steps a rank's chance to be off once more is the share of ranks that are. Steps are not quite
        independent, so that of only one of the steps before counts, and never less than 1 in 1,000."""
        chance = min(max(self.high.frequency / max(world, 1.0), 1e-3), 1.0)
        return self.high.threshold(self._rates[0] / chance)

    def findings(
        self,
        step: int,
        ranks: np.ndarray,
        gap: np.ndarray,
        high: np.ndarray,
        low: np.ndarray,
        stays: np.ndarray,
        value: np.ndarray | None,
        world: float,
    ) -> list[Finding]:
        """At most `top` findings of one rank each, worst first; when more ranks are off, one finding that names the worst 16.

        ranks, gap, high, low: of the candidates, any order. stays: bool, off in the STAYS steps before. value: the signal
        itself, where it is known. world: ranks compared."""
        warn, act, least_low = self.thresholds()
        ratio = np.exp(np.clip(gap, -50.0, 50.0))
        least: np.ndarray | float = warn
        refused_from: np.ndarray | float = act
        if stays.any():
            again = self.again(world)
            least = np.where(stays, min(warn, max(again, self.config.warn)), warn)
            refused_from = np.where(stays, min(act, max(again, self.config.act)), act)
        refuses = (high >= refused_from) & (ratio >= self.config.min_ratio)
        falls = stays & (low >= least_low) & (ratio * self.config.min_ratio <= 1.0)
        off = np.flatnonzero((high >= least) | falls)
        if not len(off):
            return []
        plausible = ~stays & (high < self.beyond_noise())
        score = np.maximum(high, low)
        order = off[np.lexsort((ranks[off], -score[off], ~refuses[off]))]  # severity, score, lower rank first
        groups = np.split(order, len(order)) if len(order) <= self.config.top else [order[:_NAMED]]
        return [
            self._finding(step, ranks, gap, score, ratio, refuses, stays, plausible, value, g, len(order))
            for g in groups
        ]

    def _finding(
        self,
        step: int,
        ranks: np.ndarray,
        gap: np.ndarray,
        score: np.ndarray,
        ratio: np.ndarray,
        refuses: np.ndarray,
        stays: np.ndarray,
        plausible: np.ndarray,
        value: np.ndarray | None,
        group: np.ndarray,
        count: int,
    ) -> Finding:
        worst = int(group[0])
        named = tuple(int(r) for r in ranks[group])
        told = f"{self.config.signal} of rank {named[0]} is {ratio[worst]:.3g} times what its peers let expect ({score[worst]:.1f} sigmas)"
        if len(named) > 1:
            told = f"{count} ranks stand out, the worst {', '.join(map(str, named))}: {told}"
        known = None if value is None else float(value[worst])
        return Finding(
            detector=self.name,
            signal=self.config.signal,
            severity=Severity.ACT if refuses[worst] else Severity.WARN,
            score=float(score[worst]),
            step=step,
            onset_step=min(self._onset.get(r, step - STAYS * int(s)) for r, s in zip(named, stays[group], strict=True)),
            ranks=named,
            statistic="ranks",
            place="loss" if self.config.signal == "loss" else "backward",
            value=known,
            reference=None if known is None else float(known * math.exp(-gap[worst])),
            message=told,
            plausible=bool(plausible[group].all()),
        )

    def note(self, step: int, findings: Sequence[Finding]) -> list[int]:
        """Ranks of this detector's own findings; their onsets are remembered for as long as they stay off."""
        mine = {r: f.onset_step for f in findings if f.detector == self.name for r in f.ranks}
        self._onset = {rank: self._onset.get(rank, onset) for rank, onset in sorted(mine.items())}
        return list(self._onset)

    def learn(self, ranks: np.ndarray, high: np.ndarray, low: np.ndarray, flagged: Sequence[int]) -> None:
        """One step's scores of the candidates enter the tails."""
        warn, _, least_low = self.thresholds()
        for tail, scores, cap in ((self.high, high, warn), (self.low, low, least_low)):
            far = scores > Exceedances.START if len(scores) else slice(0)
            tail.learn(ranks[far], scores[far], flagged, cap)

    def state_dict(self) -> dict[str, Any]:
        return {
            "high": self.high.state_dict(),
            "low": self.low.state_dict(),
            "onset": {str(rank): step for rank, step in self._onset.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.high.load_state_dict(state["high"])
        self.low.load_state_dict(state["low"])
        self._onset = {int(rank): int(step) for rank, step in state["onset"].items()}


class _Look:
    """One attempt against the past, (world,) arrays; from `observe` to `absorb`."""

    def __init__(self, x: np.ndarray, valid: np.ndarray | None, gap: np.ndarray, share: np.ndarray | float) -> None:
        self.x, self.valid, self.gap, self.share = x, valid, gap, share
        self.ranks = np.empty(0, dtype=np.int64)  # those beyond Exceedances.START on either side
        self.high, self.low = np.empty(0), np.empty(0)  # their scores


class CrossRankOutlier:
    """One instance per per-rank column. O(world) work and memory, whatever the history; constant work on a sketch."""

    def __init__(self, config: CrossRankConfig, targets: Targets | None = None) -> None:
        self.config = config
        self.name = f"crossrank/{config.signal}"
        self._judge = OutlierJudge(self.name, config, targets or Targets())
        self.sketched = SketchOutlier(config, self._judge)
        self._history: RankHistory | None = None
        self._groups: PeerGroups | None = None
        self._looked: tuple[Observation, _Look | None] | None = (
            None  # at the attempt being judged, not part of the state
        )

    def observe(self, observation: Observation) -> list[Finding]:
        if observation.sketch is not None:
            return self.sketched.observe(observation.sketch)
        look = self._look(observation)
        if look is None or not len(look.ranks):
            return []
        values = observation.per_rank[self.config.signal]
        ranks = look.ranks
        stays = self._history.away[ranks] >= STAYS if self._history is not None else np.zeros(len(ranks), dtype=bool)
        world = float(len(values) if look.valid is None else look.valid.sum())
        return self._judge.findings(
            observation.step, ranks, look.gap[ranks], look.high, look.low, stays, values[ranks], world
        )

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        if observation.sketch is not None:
            self.sketched.absorb(observation.sketch, findings, applied)
            return
        flagged = self._judge.note(observation.step, findings)
        look = self._look(observation)
        self._looked = None
        if look is None:
            return
        if self._history is None or len(self._history) != len(look.x):
            self._history = self._new_history(len(look.x))
        if applied:
            self._judge.learn(look.ranks, look.high, look.low, flagged)
            teaches = look.valid
        else:  # a refused step teaches nothing, but a rank that stays off through refusals is being watched all the same
            teaches = np.zeros(len(look.x), dtype=bool)
        self._history.learn(look.x, look.gap, look.share, teaches)

    def _new_history(self, world: int) -> RankHistory:
        c = self.config
        return RankHistory(world, c.floor, c.history, c.min_history, c.accept_after)

    def _look(self, observation: Observation) -> _Look | None:
        if self._looked is None or self._looked[0] is not observation:
            self._looked = (observation, self._look_at(observation))
        return self._looked[1]

    def _look_at(self, observation: Observation) -> _Look | None:
        x, valid = self._log(observation)
        if x is None:
            return None
        world = len(x)
        if self._groups is None or not self._groups.fits(observation.peers, world):
            self._groups = PeerGroups(observation.peers, world)
        groups, history = self._groups, self._history
        if history is None or len(history) != world:
            history = self._new_history(world)
        gap = x - history.offset
        gap -= groups.middle_of_others(gap, valid)
        if valid is not None or not groups.covers:
            known = np.isfinite(gap)
            valid = known if valid is None else valid & known
            gap[~known] = 0.0
        look = _Look(x, valid, gap, groups.share)
        if history.points.max() < self.config.min_history:
            return look
        far = np.flatnonzero(np.abs(gap) > Exceedances.START * history.sigma)
        if len(far):
            far = far[history.points[far] >= self.config.min_history]
        if len(far):
            sigma = history.sigma[far] * self._widening(gap / history.sigma, valid)[far]
            z, own = gap[far] / sigma, 2.0 * (x[far] - history.level[far]) / sigma
            high, low = np.minimum(z, own), np.minimum(-z, -own)
            keep = np.maximum(high, low) > Exceedances.START
            look.ranks, look.high, look.low = far[keep], high[keep], low[keep]
        return look

    def _widening(self, z: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
        """(world,) present spread of each rank's group, from the median of |z|, whose usual value is 1 sigma, as far as it is
        surely larger than that; at least 1."""
        assert self._groups is not None
        sizes = self._groups.sizes
        spread = _MAD_TO_SIGMA * self._groups.median(np.abs(z), valid) / (1.0 + _UNCERTAIN / np.sqrt(sizes))
        return np.where((sizes >= _LEAST_GROUP) & (spread > 1.0), spread, 1.0)

    def _log(self, observation: Observation) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(logarithms, ranks that can be compared or None for all); (None, None) when there is nothing to compare.

        Non-finite values are another detector's business, and a rank without tokens has nothing to say."""
        values = observation.per_rank.get(self.config.signal)
        if values is None or len(values) < 2:
            return None, None
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.log(values)
        tokens = observation.per_rank.get("tokens")
        if tokens is not None and (tokens.min() > 0.0 or not tokens.any()):
            tokens = None  # all have some, or nobody knows: says nothing
        if tokens is None and math.isfinite(x.sum()):
            return x, None
        valid = np.isfinite(values) & (values >= 0.0)
        if tokens is not None:
            valid &= tokens > 0
        if valid.sum() < 2 or not values[valid].any():
            return None, None
        return np.log(np.where(valid, np.maximum(values, _ZERO), 1.0)), valid

    def state_dict(self) -> dict[str, Any]:
        return {
            "judge": self._judge.state_dict(),
            "history": {} if self._history is None else self._history.state_dict(),
            "usual": self.sketched.usual.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        c = self.config
        self._judge.load_state_dict(state["judge"])
        self.sketched.usual = np.array(state["usual"], dtype=np.float64)
        past = state["history"]
        self._history = (
            RankHistory.from_state(past, c.floor, c.history, c.min_history, c.accept_after) if past else None
        )
        self._looked = None


# (ranks, gap, high, low, stays) of the extremes that a sketch has kept
_SketchLook = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class SketchOutlier:
    """The same judgement on a sketch: constant work at any world size. The ranks' histories are kept by the ranks
    themselves (signals/sketch_pack.py); what all of them share is kept here and in `judge`. Silent about a signal that is not
    in a sketch.

    usual: (spread over ranks in healthy times, steps it is from)."""

    _USUAL_RATE = 1 / 64

    def __init__(self, config: CrossRankConfig, judge: OutlierJudge | None = None) -> None:
        self.config = config
        self._judge = judge or OutlierJudge(f"crossrank/{config.signal}", config, Targets())
        self.usual = np.zeros(2)
        self._looked: tuple[SketchSummary, _SketchLook] | None = (
            None  # at the attempt being judged, not part of the state
        )

    def observe(self, summary: SketchSummary) -> list[Finding]:
        if self.config.signal not in summary.extremes:
            return []
        ranks, gap, high, low, stays = self._look(summary)
        world = summary.compared(self.config.signal)
        return self._judge.findings(summary.step, ranks, gap, high, low, stays, None, world)

    def absorb(self, summary: SketchSummary, findings: Sequence[Finding], applied: bool) -> None:
        flagged = self._judge.note(summary.step, findings)
        if not applied or self.config.signal not in summary.extremes:
            return
        ranks, _, high, low, _ = self._look(summary)
        self._looked = None
        self._judge.learn(ranks, high, low, flagged)
        spread = summary.spread(self.config.signal)
        if math.isfinite(spread):
            self.usual[1] += 1.0
            rate = max(1.0 / self.usual[1], self._USUAL_RATE)
            most = np.inf if self.usual[1] == 1 else 2.0 * max(self.usual[0], self.config.floor)
            self.usual[0] += rate * (min(spread, most) - self.usual[0])

    def _look(self, summary: SketchSummary) -> _SketchLook:
        if self._looked is None or self._looked[0] is not summary:
            self._looked = (summary, self._look_at(summary))
        return self._looked[1]

    def _look_at(self, summary: SketchSummary) -> _SketchLook:
        extremes = summary.extremes[self.config.signal]
        gap = extremes.value - summary.middle_of_others(self.config.signal, extremes.value)
        known = np.isfinite(gap) & extremes.mature
        gap = gap[known]
        widening = 1.0
        count = summary.compared(self.config.signal)
        if count >= _LEAST_GROUP and self.usual[1] > 0:
            usual = max(self.usual[0], self.config.floor) * (1.0 + _UNCERTAIN / math.sqrt(count))
            widening = max(summary.spread(self.config.signal) / usual, 1.0)
        sigma = extremes.sigma[known] * widening
        z, own = gap / sigma, 2.0 * extremes.own[known] / sigma
        return extremes.ranks[known], gap, np.minimum(z, own), np.minimum(-z, -own), extremes.stays[known]
