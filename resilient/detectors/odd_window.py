"""One window of data that was off on all ranks at once, and passed with it (S5, S18).

A bad stretch that all ranks read in the same step raises every rank's loss above what any of them usually has, and with the
next window it is over: weights, optimizer and machines are the same, the data are not. Neither half says so alone. A single
odd step may be anything, so it is only watched; when the losses are back at once, on other data, the one that passed is
told, one attempt later.

    reference   median over the last 16 attempts of the largest loss over the ranks
    sigma       1.4826 * MAD of that, at least that of the smallest loss and 1 % of the reference
    off         the *smallest* loss over the ranks lies 10 sigma above the reference
    back        the largest loss of the next attempt lies at most 4 sigma above it

With few ranks a smallest loss is no rare thing by itself; the 10 sigma are what keeps chance out. The same window run again
(equal batch digests) says nothing about the data and is waited through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from resilient.signals import Finding, Observation, Severity

_WINDOW = 16
_START = 12  # attempts behind a reference
_OFF, _BACK = 10.0, 4.0
_MAD_TO_SIGMA = 1.4826
_LEAST = 0.01  # of the reference
_ACCEPT = 8  # attempts off in a row after which that is how it is


class OddWindow:
    """One per run; silent without per-rank losses, or with a single rank. O(world) work per attempt."""

    name = "odd_window"

    def __init__(self) -> None:
        self._ends = np.zeros((2, 0))  # smallest and largest loss of the last attempts that were not off
        self._off = 0  # attempts in a row, up to the last one, that were off
        self._odd: dict[str, Any] = {}  # about the first of them
        self._reference: tuple[float, float] | None = None  # what follows from `_ends`
        self._looked: tuple[Observation, tuple[float, float] | None] | None = None  # not part of the state

    def observe(self, observation: Observation) -> list[Finding]:
        ends = self._seen(observation)
        if ends is None or self._ends.shape[1] < _START:
            return []
        low, high = ends
        reference, sigma = self._usual()
        world = len(observation.per_rank["loss"])
        if low >= reference + _OFF * sigma:
            message = f"the loss of all {world} ranks is {low:.4g} or more, usually at most {reference:.4g}"
            return [self._finding(observation, Severity.WATCH, (low - reference) / sigma, message)]
        if self._off != 1 or self._again(observation) or high > reference + _BACK * sigma:
            return []
        step, was = int(self._odd["step"]), float(self._odd["low"])
        message = (
            f"the loss of all {world} ranks was {was:.4g} or more at step {step}, usually at most {reference:.4g}, and is "
            f"back on the next window ({high:.4g} at most): it was the data of that window"
        )
        found = self._finding(observation, Severity.WARN, (was - reference) / sigma, message)
        return [replace(found, onset_step=step, value=was, reference=reference, statistic="passed")]

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        ends = self._seen(observation)
        self._looked = None
        if ends is None or (self._off and self._again(observation)):
            return
        if self._ends.shape[1] >= _START:
            reference, sigma = self._usual()
            if ends[0] >= reference + _OFF * sigma:
                self._off += 1
                if self._off == 1:
                    digests = observation.per_rank.get("digest_batch")
                    self._odd = {"step": observation.step, "low": ends[0], "digests": _copy(digests)}
                if self._off <= _ACCEPT:
                    return
            else:
                self._off, self._odd = 0, {}
        self._ends = np.concatenate([self._ends, np.array(ends)[:, None]], axis=1)[:, -_WINDOW:]
        self._reference = None

    def _seen(self, observation: Observation) -> tuple[float, float] | None:
        """The ends of the attempt's losses, looked for once between `observe` and `absorb`."""
        if self._looked is None or self._looked[0] is not observation:
            self._looked = (observation, _ends(observation))
        return self._looked[1]

    def _usual(self) -> tuple[float, float]:
        """Of the largest loss over the ranks: reference and sigma."""
        if self._reference is None:
            middle = _middle(self._ends)
            spread = float(_middle(np.abs(self._ends - middle)).max())
            reference = float(middle[1, 0])
            self._reference = (reference, max(_MAD_TO_SIGMA * spread, _LEAST * abs(reference), 1e-12))
        return self._reference

    def _again(self, observation: Observation) -> bool:
        """The odd window itself, run once more."""
        digests, before = observation.per_rank.get("digest_batch"), self._odd.get("digests")
        return digests is not None and before is not None and bool((digests == before).all())

    def _finding(self, observation: Observation, severity: Severity, score: float, message: str) -> Finding:
        return Finding(self.name, "loss", severity, score, observation.step, observation.step, message=message)

    def state_dict(self) -> dict[str, Any]:
        odd = {k: _copy(v) if k == "digests" else v for k, v in self._odd.items()}
        return {"ends": self._ends.copy(), "off": self._off, "odd": odd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ends, self._off = np.array(state["ends"]), int(state["off"])
        self._reference = self._looked = None
        self._odd = {k: _copy(v) if k == "digests" else v for k, v in state["odd"].items()}


def _middle(rows: np.ndarray) -> np.ndarray:
    """(rows, 1) medians; of few numbers a sort is quicker than `np.median`."""
    ordered, n = np.sort(rows, axis=1), rows.shape[1]
    return 0.5 * (ordered[:, (n - 1) // 2, None] + ordered[:, n // 2, None])


def _copy(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else np.array(values)


def _ends(observation: Observation) -> tuple[float, float] | None:
    """Smallest and largest loss over the ranks that have tokens to learn from; None: unknown, or not finite."""
    losses = observation.per_rank.get("loss")
    if losses is None or len(losses) < 2:
        return None
    tokens = observation.per_rank.get("tokens")
    if tokens is not None and not tokens.min() > 0 and (tokens > 0).any():
        losses = losses[tokens > 0]
    low, high = float(losses.min()), float(losses.max())
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None
