"""Was what the ranks received what they had sent? The sums of the reduction check, judged at every step (C2, S19, BR-03).

For each cell (a bucket of gradients, see CheckPlan) and each of the LANES sign vectors: B = r.(what all ranks have sent)
against A = r.(what a receiver group holds), on the first lane for each group, on the others for the mean of the groups. What
healthy rounding may do to A - B, one standard deviation (`rounding`):

    sigma^2 = (0.43 u)^2 (sum_k |s_k|^2 + M^2 + S^2) + (5 * 2^-24)^2 (M^2 + S^2)

u       unit roundoff of the dtype of the reduction; the error of one rounding is 0.43 u of the value, RMS over mantissas
        that are uniform in the logarithm: sqrt(1/3 * 3 / (8 ln 2)) = 0.425
S, M    S^2 = sum of the ranks' `sq`; M^2 the squared L2 of the sum, which is measured (`size`) and at most world S^2
s_k     partial sums of a reduction that adds one rank after the other (the worst of all orders), rounding each. M and S
        tell a part that is common to the ranks and grows with k from the rest. The common part counts (1 + 4 u world)
        times: what is added falls below the last digit of the sum, and the errors no longer average out. Of the rest
        s_k^2 is the sum of the squares of the first k ranks: (world + 1) / 2 S^2 in all if the ranks are alike, and with
        the largest first at most world / sqrt(12) times their relative spread more (Cauchy and Schwarz)
M^2+S^2 one rounding where contributions or result are scaled; and in the second term the products themselves, which are
        taken in fp32: 5 * 2^-24 measured

A cell fails beyond `sigmas` (6) of these on any lane. Rounding errors of different elements are independent, so each lane is
close to normal, whatever the others are: the largest of 8 exceeds 6 sigma in at most 8 times as many windows as one would,
2e-8, also where a cell has but one row and they are not independent of each other. A change of relative size d is missed
if it stays below the limit on all lanes: never, if it is one element; with probability P(|z| < 6 sigma / d)^8, if it is spread.
Against sums that were really rounded (fp32, bf16, fp16; 2 to 1024 ranks) the residual has an RMS of 0.1 to 1.0 sigma.
Receivers that hold the same are moreover compared with each other: they received the same bits, so only the products may
differ, whatever the dtype of the reduction.

Unusual but steady rounding (fp8 transport, a compressing hook) does not alarm for ever: a cell's limit is at least 3.5
times the median of its last 16 healthy windows (the largest of 8 normal lanes has a median of 1.7: six sigma again). A median, and healthy windows only, so no corrupted step raises it. Where
the very first window under a plan is already beyond the limit, by less than a quarter of S and on all receivers alike, it
is told as a warning and taken as the transport's habit; later windows are not excused.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from resilient.signals import CheckPlan, Checks, Finding, Located, Observation, Severity

_ROUNDING = 0.43  # RMS of one rounding, in units of roundoff times the value
_PRODUCT = 5 * 2.0**-24  # of a product with the signs, relative to L2
_LEAST = 1e-15  # absolute: gradients below it mean nothing, and their squares vanish in fp32
_HEADROOM = 3.5  # times the usual residual of a cell
_PLAIN = 4.0  # times the limit: from here on a pattern that fits is no accident
_SHOWN = 3  # cells named in a message


@dataclass(frozen=True)
class _Sums:
    """One attempt's sums, all (cells,). usable: all ranks measured finite contributions. expected: B, 0 if not usable.
    low, high: smallest and largest A of the receiver groups. total: S. sigma, agree: one standard deviation of A - B, and
    of the difference between two receivers. off: largest |A - B| of any group and lane, in sigmas; spread: high - low in
    `agree`; both 0 where the cell says nothing or some A is not finite."""

    usable: np.ndarray
    expected: np.ndarray
    low: np.ndarray
    high: np.ndarray
    total: np.ndarray
    sigma: np.ndarray
    agree: np.ndarray
    off: np.ndarray
    spread: np.ndarray

    @property
    def lost(self) -> np.ndarray:
        """(cells,) something that is not finite came of finite contributions."""
        return self.usable & ~(np.isfinite(self.low) & np.isfinite(self.high))


@dataclass(frozen=True)
class _Name:
    """Who is named, and what it looks like. known: the pattern is a plain one, so no excuse as a habit of the transport."""

    ranks: tuple[int, ...]
    what: str
    known: bool = True


class ReductionCheck:
    """One per run; silent without `Observation.checks`. O(ranks * cells), vectorised.

    sigmas: of healthy rounding, beyond which a cell fails. window: healthy windows behind a cell's usual residual.
    lossy: share of S by which a transport may be off from the first window on."""

    name = "reduction"

    def __init__(self, sigmas: float = 6.0, window: int = 16, lossy: float = 0.25) -> None:
        self.sigmas = sigmas
        self.window = window
        self.lossy = lossy
        self._plan: tuple[tuple[str, ...], float, int] | None = None
        self._off: deque[np.ndarray] = deque(maxlen=window)  # (cells,) of healthy windows, largest over receivers
        self._spread: deque[np.ndarray] = deque(maxlen=window)
        self._before: np.ndarray | None = None  # (cells,) what was received in the attempt before
        self._onset: int | None = None
        self._latest: tuple[Checks, _Sums] | None = None

    def observe(self, observation: Observation) -> list[Finding]:
        checks = observation.checks
        if checks is None:
            return []
        sums, known = self._sums(checks), self._known(checks)
        if sums.lost.any():
            return [self._not_finite(observation, checks, sums.lost)]
        if max(sums.off.max(initial=0.0), sums.spread.max(initial=0.0)) <= self.sigmas:
            return []  # no limit is lower
        most, most_apart = self._limit(self._off, known), self._limit(self._spread, known)
        failed = (sums.off > most) | (sums.spread > most_apart)
        if not failed.any():
            return []
        named = self._named(checks, sums, np.flatnonzero(failed), most, most_apart, known)
        excused = not named.known and not (known and self._off) and self._like_a_habit(sums, most_apart)
        return [self._finding(observation, checks, sums, np.flatnonzero(failed), named, excused)]

    def failed_cells(self, observation: Observation) -> tuple[int, ...]:
        """Cells that fail in this attempt, worst first: what a second pass has to look into."""
        checks = observation.checks
        if checks is None:
            return ()
        sums, known = self._sums(checks), self._known(checks)
        apart = sums.spread / self._limit(self._spread, known)
        excess = np.where(sums.lost, np.inf, np.maximum(sums.off / self._limit(self._off, known), apart))
        return tuple(int(c) for c in np.argsort(-excess, kind="stable") if excess[c] > 1)

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        checks = observation.checks
        if checks is None:
            self._onset = None
            return
        mine = [f for f in findings if f.detector == self.name]
        self._onset = min((f.onset_step for f in mine), default=None)
        if not self._known(checks):
            self._plan = _key(checks.plan)
            self._off.clear()
            self._spread.clear()
            self._before = None
        sums = self._sums(checks)
        if sums.usable.all() and not sums.lost.any():
            higher = np.abs(sums.high - sums.expected) < np.abs(sums.low - sums.expected)
            self._before = np.where(higher, sums.high, sums.low)  # the nearer one, should they differ
        if any(f.severity >= Severity.ACT for f in mine) or not sums.usable.any():
            return
        self._off.append(sums.off)
        self._spread.append(sums.spread)

    def _sums(self, checks: Checks) -> _Sums:
        """Computed once for `observe` and `absorb`."""
        if self._latest is None or self._latest[0] is not checks:
            self._latest = checks, _sums(checks)
        return self._latest[1]

    # -- limits ---------------------------------------------------------------------------------------------------

    def _known(self, checks: Checks) -> bool:
        """The references are about these cells."""
        return self._plan == _key(checks.plan)

    def _limit(self, healthy: deque[np.ndarray], known: bool) -> np.ndarray | float:
        if not healthy or not known:
            return self.sigmas
        usual = np.sort(np.stack(healthy), axis=0)[(len(healthy) - 1) // 2]  # of an even number the smaller middle one
        return np.maximum(self.sigmas, _HEADROOM * usual)

    def _like_a_habit(self, sums: _Sums, most_apart: np.ndarray | float) -> bool:
        """Off by little, and on all receivers alike: it may be how this transport rounds."""
        small = sums.off * sums.sigma <= self.lossy * sums.total
        return bool((small | ~sums.usable).all()) and not bool((sums.spread > most_apart).any())

    # -- who ------------------------------------------------------------------------------------------------------

    def _named(
        self,
        checks: Checks,
        sums: _Sums,
        failed: np.ndarray,
        most: np.ndarray | float,
        most_apart: np.ndarray | float,
        known: bool,
    ) -> _Name:
        groups, world = checks.plan.receivers, checks.ranks
        before = self._before if known else None
        slack = np.broadcast_to(most * sums.sigma, sums.expected.shape)[failed]
        apart = np.broadcast_to(most_apart * sums.agree, sums.expected.shape)[failed]
        received, expected = _received(checks.plan, checks.after[:, failed]), sums.expected[failed]
        contributed = checks.before[:, failed]
        own = _own(checks, failed, self.sigmas)
        if own.all():
            return _Name((), "every rank has its own gradient back: it was not reduced")
        wrong = _disagreeing(received, expected, apart, slack)
        if wrong is not None:
            return self._receivers(groups, wrong, received, own, None if before is None else before[failed], apart)
        agreed = np.median(received, axis=0)
        if before is not None and (np.abs(agreed - before[failed]) <= apart).all():
            return _Name((), "it is that of the step before: a stale buffer")
        if not agreed.any():
            return _Name((), "it is zero")
        # A pattern that fits within the slack proves nothing where the slack is nearly as large as what is off, as in bf16.
        plain = bool((np.abs(agreed - expected) > _PLAIN * slack).any())
        for what, sign in (
            ()
            if not plain or len(checks.before) != world
            else (
                ("the contribution of rank {} is missing", -1),
                ("the contribution of rank {} counts twice", 1),
            )
        ):
            fits = np.flatnonzero((np.abs(agreed - (expected + sign * contributed)) <= slack).all(axis=1))
            if len(fits) == 1:
                return _Name((int(fits[0]),), what.format(int(fits[0])))
        for what, factor in (
            ("the sum where the mean was due", world),
            ("divided by the number of ranks twice", 1 / world),
        ):
            widely = 2 * len(failed) >= int(sums.usable.sum())  # a factor hits every bucket
            if (
                plain
                and widely
                and world > 1
                and (np.abs(agreed - factor * expected) <= max(factor, 1.0) * slack).all()
            ):
                return _Name((), f"it is {what}")
        if len(groups) == 1 and len(groups[0]) > 1:
            return _Name((), "which rank received it is for a second pass to name", known=False)
        return _Name((), "all receivers hold the same: what was sent or the reduction they share is wrong", known=False)

    def _receivers(
        self,
        groups: Sequence[Sequence[int]],
        wrong: np.ndarray,
        received: np.ndarray,
        own: np.ndarray,
        before: np.ndarray | None,
        apart: np.ndarray,
    ) -> _Name:
        """Some receivers hold something else than the others."""
        if any(len(groups[g]) > 1 for g in wrong):
            shown = "; ".join(_ranks(groups[g]) for g in wrong[:_SHOWN])
            return _Name((), f"the replica on {shown} holds something else; a second pass names the rank")
        ranks = tuple(sorted(groups[g][0] for g in wrong))
        if len(wrong) == len(groups):
            return _Name(ranks, "the receivers differ, and none can be told to be right")
        if own[list(ranks)].all():
            return _Name(ranks, f"{_ranks(ranks)} kept the gradient of its own: it was not reduced there")
        if before is not None and (np.abs(received[wrong] - before) <= apart).all():
            return _Name(ranks, f"on {_ranks(ranks)} it is that of the step before: a stale buffer")
        if not received[wrong].any():
            return _Name(ranks, f"on {_ranks(ranks)} it is zero")
        return _Name(ranks, f"{_ranks(ranks)} received something else than the others")

    # -- telling --------------------------------------------------------------------------------------------------

    def _not_finite(self, observation: Observation, checks: Checks, cells: np.ndarray) -> Finding:
        """BR-03. The ranks whose own part is not finite are known at once, sharded or not."""
        hit = np.flatnonzero(~np.isfinite(checks.after[:, cells]).all(axis=1))
        ranks = tuple(int(r) for r in hit) if len(hit) < len(checks.after) else ()
        where = _cells(checks.plan, np.flatnonzero(cells))
        who = f"on {_ranks(ranks)}" if ranks else "on every rank"
        message = f"{where}: the reduced gradient is not finite {who}, though all that was sent is"
        return self._make(observation, Severity.ACT, math.inf, ranks, message, None, None)

    def _finding(
        self,
        observation: Observation,
        checks: Checks,
        sums: _Sums,
        failed: np.ndarray,
        named: _Name,
        excused: bool,
    ) -> Finding:
        score = np.maximum(sums.off, sums.spread)
        worst = int(failed[np.argmax(score[failed])])
        apart = float(sums.off[worst] * sums.sigma[worst])
        size = max(float(sums.total[worst]), _LEAST)
        order = failed[np.argsort(-score[failed], kind="stable")]
        message = (
            f"{_cells(checks.plan, order)}: received and sent differ by {apart / size:.2g} of the gradient's size "
            f"({score[worst]:.3g} times what rounding does): {named.what}"
        )
        if excused:
            message += "; off from the first window on: if it stays like this, the transport rounds like this"
        severity = Severity.WARN if excused else Severity.ACT
        tolerance = self.sigmas * float(sums.sigma[worst]) / size
        return self._make(observation, severity, float(score[worst]), named.ranks, message, apart / size, tolerance)

    def _make(
        self,
        observation: Observation,
        severity: Severity,
        score: float,
        ranks: tuple[int, ...],
        message: str,
        value: float | None,
        reference: float | None,
    ) -> Finding:
        return Finding(
            detector=self.name,
            signal="reduction",
            severity=severity,
            score=score,
            step=observation.step,
            onset_step=self._onset if self._onset is not None else observation.step,
            ranks=ranks,
            place="reduction",
            value=value,
            reference=reference,
            message=message,
            statistic="check",
        )

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "plan": None if self._plan is None else [list(self._plan[0]), self._plan[1], self._plan[2]],
            "off": [v.tolist() for v in self._off],
            "spread": [v.tolist() for v in self._spread],
            "before": None if self._before is None else self._before.tolist(),
            "onset": self._onset,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        plan = state["plan"]
        self._plan = None if plan is None else (tuple(plan[0]), float(plan[1]), int(plan[2]))
        self._off = deque((np.asarray(v) for v in state["off"]), maxlen=self.window)
        self._spread = deque((np.asarray(v) for v in state["spread"]), maxlen=self.window)
        self._before = None if state["before"] is None else np.asarray(state["before"])
        self._onset = state["onset"]


def located(finding: Finding, places: Sequence[Located]) -> Finding:
    """The finding with what the second pass has found: receivers named, and the parameters that are off."""
    if not places:
        return replace(finding, message=f"{finding.message}; a second look, row by row, found nothing off")
    worst = sorted(places, key=lambda p: (-p.relative, p.rank, p.cell))
    told = "; ".join(
        f"rank {p.rank}, {p.cell}: {p.place} ({p.rows} rows, off by {p.relative:.2g})" for p in worst[:_SHOWN]
    )
    more = f" and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
    ranks = finding.ranks or tuple(sorted({p.rank for p in places}))
    return replace(finding, ranks=ranks, message=f"{finding.message}; row by row: {told}{more}")


def _key(plan: CheckPlan) -> tuple[tuple[str, ...], float, int]:
    return plan.names, plan.unit, len(plan.receivers)


@np.errstate(invalid="ignore", over="ignore")
def _sums(checks: Checks) -> _Sums:
    plan, world = checks.plan, checks.ranks
    expected, square = checks.before.sum(axis=0), checks.sq.sum(axis=0)
    usable = np.isfinite(expected) & np.isfinite(square)  # a NaN or Inf of any rank carries through
    expected, square = np.where(usable, expected, 0.0), np.where(usable, square, 0.0)
    received = _received(plan, checks.after)
    low, high = received.min(axis=0), received.max(axis=0)
    clear = usable & np.isfinite(low) & np.isfinite(high)
    size = np.full_like(square, math.inf) if checks.size is None else checks.size.sum(axis=0)
    uneven: np.ndarray | float = math.inf
    if len(checks.sq) == world:
        uneven = np.where(usable, checks.sq.std(axis=0), 0.0) * world / np.where(square > 0, square, 1.0)
    sigma = rounding(plan.unit, world, square, size, uneven) + _LEAST
    agree = _PRODUCT * np.sqrt(2 * np.maximum(np.minimum(_finite(size), world * square), square)) + _LEAST
    apart = np.maximum(high - expected, expected - low)
    if checks.lanes is not None:
        apart = np.maximum(apart, np.abs(checks.lanes.sum(axis=0)).max(axis=1, initial=0.0))
    off = np.where(clear, apart, 0.0) / sigma
    spread = np.where(clear, high - low, 0.0) / agree
    return _Sums(usable, expected, low, high, np.sqrt(square), sigma, agree, off, spread)


def rounding(
    unit: float, world: int, square: np.ndarray, size: np.ndarray, uneven: np.ndarray | float = math.inf
) -> np.ndarray:
    """One standard deviation of what healthy rounding does to a product of signs with a sum over `world` ranks: see above.

    square: S^2. size: M^2; not finite: the largest that it can be. uneven: standard deviation of the ranks' `sq`, relative
    to their mean; inf: not known."""
    together = np.minimum(_finite(size), world * square)  # the largest that M^2 can be
    common = np.maximum(together - square, 0.0) / max(world * (world - 1), 1)  # square of the part all ranks share
    single = np.maximum(square - world * common, 0.0)  # of the rest, all ranks'
    swallowed = (1 + 4 * unit * world) ** 2
    in_a_row = np.minimum((world + 1) / 2 + world / math.sqrt(12) * uneven, world - 1)
    steps = swallowed * common * (world * (world + 1) * (2 * world + 1) / 6 - 1) + single * in_a_row
    ends = together + square
    return np.sqrt((_ROUNDING * unit) ** 2 * (steps + ends) + _PRODUCT**2 * ends)


def _finite(size: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(size), size, math.inf)


def _received(plan: CheckPlan, after: np.ndarray) -> np.ndarray:
    """(groups, cells): each group's parts added up."""
    if len(plan.receivers) == len(after):  # each rank by itself
        return after[[group[0] for group in plan.receivers]]
    return np.stack([after[list(group)].sum(axis=0) for group in plan.receivers])


def _own(checks: Checks, failed: np.ndarray, sigmas: float) -> np.ndarray:
    """(ranks,) bool: what the rank received is what it had itself, divided by the number of ranks or not."""
    world, after, before = len(checks.before), checks.after[:, failed], checks.before[:, failed]
    if world < 2 or world != checks.ranks or any(len(group) > 1 for group in checks.plan.receivers):
        return np.zeros(world, dtype=bool)  # a part of it cannot be told from a part of anything else
    slack = sigmas * (_ROUNDING * checks.plan.unit + _PRODUCT) * np.sqrt(checks.sq[:, failed]) + _LEAST
    kept = [(np.abs(after - factor * before) <= factor * slack).all(axis=1) for factor in (1, world)]
    return (kept[0] | kept[1]) & before.any(axis=1)


def _disagreeing(received: np.ndarray, expected: np.ndarray, apart: np.ndarray, slack: np.ndarray) -> np.ndarray | None:
    """Receiver groups that hold something else than the right ones; all of them if none can be told to be right; None if
    all hold the same."""
    if len(received) < 2 or (received.max(axis=0) - received.min(axis=0) <= apart).all():
        return None
    distance = np.abs(received - expected)
    if len(received) > 2:
        other = (np.abs(received - np.median(received, axis=0)) > apart).any(axis=1)
        if 2 * other.sum() < len(received):
            return np.flatnonzero(other)
    fits = (distance <= slack).all(axis=1)
    if fits.any() and not fits.all():
        return np.flatnonzero(~fits)
    worst = (distance / slack).max(axis=1)
    near = worst <= max(4 * float(worst.min()), 0.25)  # within what rounding does anyway, none is the better one
    return np.flatnonzero(~near) if near.any() and not near.all() else np.arange(len(received))


def _cells(plan: CheckPlan, cells: Sequence[int] | np.ndarray) -> str:
    shown = ", ".join(plan.names[int(c)] for c in cells[:_SHOWN])
    return f"{shown} and {len(cells) - _SHOWN} more" if len(cells) > _SHOWN else shown


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
