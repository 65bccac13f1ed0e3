"""Point outlier of one signal: this attempt against a robust, lagged reference (S2, S6, S7 in part; S10).

Score = (x - level) / scale on the log of the signal, upper side:
  level  median of the last `level` accepted values. Short, so a falling loss does not look like noise;
  scale  1.4826 * median |x - level| over the last `history` accepted residuals, at least `floor`.
Only accepted, finite values enter. That is what keeps the detector from blinding itself: rules that let outliers in
accept the fifth one in a row, and one NaN switches them off (research: OLMo-core, llm.c, ZClip).

It cannot lock in either: after `accept_after` alarms in a row the new level is accepted, with a warning.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from resilient.detectors.config import PointConfig
from resilient.signals import Finding, Observation, Severity

MAD_TO_SIGMA = 1.4826  # of a normal distribution


class PointOutlier:
    """See the module. One instance per signal."""

    def __init__(self, config: PointConfig) -> None:
        self.config = config
        self.name = f"point/{config.signal}"
        self._accepted: deque[float] = deque(maxlen=config.level)
        self._residuals: deque[float] = deque(maxlen=config.history)
        self._streak: list[float] = []  # flagged values in a row, on the detector's scale
        self._streak_onset = 0

    def observe(self, observation: Observation) -> list[Finding]:
        value = observation.values.get(self.config.signal)
        x = self._transform(value)
        if value is None or x is None or len(self._residuals) < self.config.min_history:
            return []
        level, scale = median(self._accepted), self._scale()
        score = (x - level) / scale
        if score < self.config.warn:
            return []
        accepting = len(self._streak) + 1 >= self.config.accept_after
        severe = score >= self.config.act and not accepting
        reference = math.exp(level) if self.config.log else level
        text = f"{self.config.signal} {value:.4g} against {reference:.4g}: {score:.1f} robust sigmas"
        if accepting:
            text += f"; accepted as the new level after {self.config.accept_after} in a row"
        return [
            Finding(
                detector=self.name,
                signal=self.config.signal,
                severity=Severity.ACT if severe else Severity.WARN,
                score=score,
                step=observation.step,
                onset_step=self._streak_onset if self._streak else observation.step,
                value=value,
                reference=reference,
                message=text,
            )
        ]

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        x = self._transform(observation.values.get(self.config.signal))
        if x is None:
            return
        if any(f.detector == self.name for f in findings):
            if not self._streak:
                self._streak_onset = observation.step
            self._streak.append(x)
            if len(self._streak) >= self.config.accept_after:
                self._accepted.extend(self._streak)  # the level moves; residuals and so the scale stay
                self._streak.clear()
            return
        if not applied:
            return  # refused for another reason: its values are no reference
        self._streak.clear()
        if self._accepted:
            self._residuals.append(abs(x - median(self._accepted)))
        self._accepted.append(x)

    def _scale(self) -> float:
        return max(MAD_TO_SIGMA * median(self._residuals), self.config.floor)

    def _transform(self, value: float | None) -> float | None:
        if value is None or not math.isfinite(value):
            return None
        if not self.config.log:
            return value
        return math.log(value) if value > 0 else None  # zero or below has no log: a placeholder, not a measurement

    def state_dict(self) -> dict[str, Any]:
        return {
            "accepted": list(self._accepted),
            "residuals": list(self._residuals),
            "streak": list(self._streak),
            "streak_onset": self._streak_onset,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accepted = deque(state["accepted"], maxlen=self.config.level)
        self._residuals = deque(state["residuals"], maxlen=self.config.history)
        self._streak = list(state["streak"])
        self._streak_onset = int(state["streak_onset"])
