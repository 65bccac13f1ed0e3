"""Non-finite values: which ranks, and where in the step they began (T6, T12, BR-44)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from resilient.signals import Finding, Observation, Place, Severity

_COLUMNS: tuple[tuple[Place, str], ...] = (
    ("forward", "nonfinite_forward"),
    ("loss", "nonfinite_loss"),
    ("backward", "nonfinite_backward"),
)


class NonFinite:
    """NaN or Inf anywhere in the attempt. Stateless: the next attempt is judged by itself, so one NaN causes no later alarm.

    The earliest place in the step wins: a NaN in the output makes loss and gradient NaN too, and saying so thrice would
    hide where it began. `reduction` is claimed only if every rank's own gradient was finite (BR-03).
    """

    name = "nonfinite"

    def observe(self, observation: Observation) -> list[Finding]:
        for place, column in _COLUMNS:
            counts = observation.per_rank.get(column)
            if counts is not None and (counts > 0).any():
                ranks = tuple(int(r) for r in np.flatnonzero(counts > 0))
                return [self._finding(observation, place, ranks, "grad_norm" if place == "backward" else "loss")]
        shares = observation.per_rank.get("reduced_sq_share")
        if shares is not None and not np.isfinite(shares).all():
            return [
                self._finding(
                    observation, "reduction", tuple(np.flatnonzero(~np.isfinite(shares)).tolist()), "grad_norm"
                )
            ]
        for signal in ("loss", "grad_norm"):  # a log file has no ranks to name
            value = observation.values.get(signal)
            if value is not None and not math.isfinite(value):
                place = "loss" if signal == "loss" else "backward"
                return [self._finding(observation, place, (), signal)]
        return []

    def _finding(self, observation: Observation, place: Place, ranks: tuple[int, ...], signal: str) -> Finding:
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "the run"
        return Finding(
            detector=self.name,
            signal=signal,
            severity=Severity.ACT,
            score=math.inf,
            step=observation.step,
            onset_step=observation.step,
            ranks=ranks,
            statistic="nonfinite",
            place=place,
            message=f"non-finite value on {who}, first seen in {place}",
        )

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        """Nothing to remember."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
