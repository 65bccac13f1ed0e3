"""Consecutive drops of the fp16 loss scale: gradients overflow again and again while the loss still looks fine (S4).

A dynamic scaler halves its scale at an overflow and doubles it after some thousand clean steps, so single drops are its
ordinary life, and so is a fall from the initial value while it finds its level. What is not: several drops within a
short window, to below everything the run had settled on. GLM-130B's scale fell 30 steps before the loss exploded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from resilient.detectors.config import DropsConfig
from resilient.signals import Finding, Observation, Severity


class LossScaleDrops:
    """One per run; silent when there is no loss scale or a constant one."""

    name = "drops"

    def __init__(self, config: DropsConfig) -> None:
        self.config = config
        self._first: int | None = None  # first step with a loss scale
        self._last = math.nan
        self._lowest = math.inf  # lowest scale that has held for a window without a drop
        self._drops: deque[int] = deque(maxlen=64)  # steps at which the scale fell

    def observe(self, observation: Observation) -> list[Finding]:
        scale = _scale(observation)
        if scale is None or self._first is None or not scale < self._last:
            return []
        step, c = observation.step, self.config
        if step - self._first < c.settle:
            return []
        recent = [s for s in self._drops if s > step - c.window] + [step]
        fell_below = scale < self._lowest
        if len(recent) < c.warn or not fell_below:
            return []
        severe = len(recent) >= c.act
        return [
            Finding(
                detector=self.name,
                signal="loss_scale",
                severity=Severity.ACT if severe else Severity.WARN,
                score=float(len(recent)),
                step=step,
                onset_step=recent[0],
                place="backward",
                value=scale,
                reference=self._lowest if math.isfinite(self._lowest) else None,
                statistic="drop",
                onset_confidence=0.9,
                message=f"loss scale fell {len(recent)} times in {step - recent[0] + 1} steps, to {scale:g}: "
                "gradients overflow again and again",
            )
        ]

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        scale = _scale(observation)
        if scale is None:
            return
        step = observation.step
        if self._first is None:
            self._first = step
        elif scale < self._last:
            self._drops.append(step)
        elif not self._drops or self._drops[-1] <= step - self.config.window:
            self._lowest = min(self._lowest, scale)
            if scale > 2 * self._lowest:  # it has held far above for long: that is the level now
                self._lowest = scale / 2
        self._last = scale

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "last": self._last, "lowest": self._lowest, "drops": list(self._drops)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first, self._last, self._lowest = state["first"], state["last"], state["lowest"]
        self._drops = deque(state["drops"], maxlen=64)


def _scale(observation: Observation) -> float | None:
    scale = observation.values.get("loss_scale")
    return scale if scale is not None and math.isfinite(scale) and scale > 0 else None
