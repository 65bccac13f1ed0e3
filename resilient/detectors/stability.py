"""The stability level: one number and a letter per step, what drives it, and how long there may be left (S2).

Evidence is measured in warn thresholds: 1.0 is what may happen by chance once in 10,000 healthy steps (the target). The
largest statistic counts in full, the largest of another signal by a quarter; evidence fades by 3 % a step. The number
falls from 100 (calm) to 0 (broken) along the line below, the letter follows the number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from resilient.signals import Forecast, StabilityLevel

_LINE = ((0.5, 100.0), (0.75, 80.0), (1.0, 60.0), (1.35, 40.0), (2.7, 20.0), (6.0, 0.0))
"""(evidence in warn thresholds, number): B from watching on, C from warn on, D from act on, E from twice act on."""

_EVIDENCE = [evidence for evidence, _ in _LINE]
_NUMBER = [number for _, number in _LINE]

FADE = 0.97
MOST = 6.0  # evidence beyond this says no more
_SECOND = 0.25
_SECOND_FROM = 0.6


class Stability:
    """Evidence of every signal with its memory. O(signals) a step."""

    def __init__(self) -> None:
        self._evidence: dict[str, float] = {}  # signal -> faded evidence
        self._statistic: dict[str, str] = {}  # signal -> the statistic that showed it

    def absorb(self, seen: Iterable[tuple[str, str, float]]) -> None:
        """seen: (signal, statistic, evidence in warn thresholds) of this step, above 0.5."""
        for signal in list(self._evidence):
            self._evidence[signal] *= FADE
            if self._evidence[signal] < 0.3:
                del self._evidence[signal], self._statistic[signal]
        for signal, statistic, evidence in seen:
            evidence = min(evidence, MOST)
            if evidence >= self._evidence.get(signal, 0.0):
                self._evidence[signal], self._statistic[signal] = evidence, statistic

    @property
    def fused(self) -> float:
        """Evidence of all signals together, in warn thresholds."""
        return fuse(self._evidence.values())

    def level(self) -> StabilityLevel:
        """Without the forecast."""
        number = round(float(np.interp(self.fused, _EVIDENCE, _NUMBER)), 1)
        letter: Literal["A", "B", "C", "D", "E"] = "ABCDE"[sum(number <= edge for edge in (80, 60, 40, 20))]  # type: ignore[assignment]
        total = sum(self._evidence.values())
        drivers: tuple[tuple[str, float], ...] = ()
        if number < 100 and total > 0:
            ordered = sorted(self._evidence.items(), key=lambda item: -item[1])[:4]
            drivers = tuple((f"{s}/{self._statistic[s]}", round(e / total, 3)) for s, e in ordered)
        return StabilityLevel(number, letter, drivers)

    def state_dict(self) -> dict[str, Any]:
        return {"evidence": dict(self._evidence), "statistic": dict(self._statistic)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evidence, self._statistic = dict(state["evidence"]), dict(state["statistic"])


def fuse(evidence: Iterable[float]) -> float:
    """The largest counts in full; a second signal that is suspicious too adds a quarter of its own."""
    ordered = sorted(evidence, reverse=True)[:2]
    if not ordered:
        return 0.0
    second = ordered[1] if len(ordered) > 1 and ordered[1] >= _SECOND_FROM else 0.0
    return ordered[0] + _SECOND * second


def fit_growth(signal: str, t: np.ndarray, excess: np.ndarray, limit: float) -> Forecast:
    """Growth law of a deterioration, extrapolated to `limit`.

    t: steps, increasing, the last one is now. excess: value / reference - 1 at those steps. limit: excess that counts as
    blown up. Fits log excess = a + b t (exponential) and log excess = a + b log(t - t0) (power) by least squares and
    takes the better one; the interval is 80 %, from the standard errors of a and b (delta method). Not supported when
    fewer than 8 points are above the reference, the fit explains less than 60 % or the growth is not significant."""
    keep = excess > 1e-6
    if keep.sum() < 8 or keep[-4:].sum() < 3:
        return Forecast(False, f"{signal}: fewer than 8 points above its usual level", signal)
    if excess[keep][-1] >= limit:
        return Forecast(False, f"{signal}: already beyond the point that counts as blown up", signal)
    x, y = t[keep].astype(float), np.log(excess[keep])
    start = x[0] - max(float(np.median(np.diff(x))), 1.0)
    fits = []
    for model, u in (("exponential", x - start), ("power", np.log(x - start))):
        design = np.stack([np.ones_like(u), u], 1)
        solution, *_ = np.linalg.lstsq(design, y, rcond=None)
        rest = y - design @ solution
        spread = float(((y - y.mean()) ** 2).sum())
        explained = 1.0 - float(rest @ rest) / spread if spread > 0 else 0.0
        covariance = np.linalg.pinv(design.T @ design) * float(rest @ rest) / max(len(y) - 2, 1)
        fits.append((explained, model, solution, covariance))
    explained, model, (a, b), covariance = max(fits, key=lambda fit: fit[0])
    if explained < 0.6:
        return Forecast(
            False, f"{signal}: growth law explains only {100 * max(explained, 0):.0f} % of the rise", signal
        )
    if b <= 3.0 * math.sqrt(max(covariance[1, 1], 0.0)):
        return Forecast(False, f"{signal}: no significant growth", signal)
    at = (math.log(limit) - a) / b  # in the model's own time
    gradient = np.array([-1.0 / b, -at / b])
    error = 1.28 * math.sqrt(max(float(gradient @ covariance @ gradient), 0.0))
    now = x[-1] - start

    def steps(u: float) -> float:
        return max((math.exp(min(u, 50.0)) if model == "power" else u) - now, 0.0)

    law: Literal["power", "exponential"] = "power" if model == "power" else "exponential"
    reason = f"{law} growth of {signal} explains {100 * explained:.0f} % of its rise"
    return Forecast(True, reason, signal, law, steps(at), steps(at - error), steps(at + error))
