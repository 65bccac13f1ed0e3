"""Silent collapse: the training loss looks fine, the model does not (S1, S9, T10).

    gap          evaluation loss climbs from its best for several evaluations while training loss keeps falling
    repetition   sampled text repeats itself
    entropy      the entropy of the output distribution has fallen to a fraction of what it was

Each is counted in evaluations, not steps, and only while the training loss itself is not rising: a diverging run is no
silent one. Attention entropy is watched every step it is measured, by the series (`attention_entropy`, both directions).
The finding names the step of the best evaluation: that checkpoint is worth going back to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from resilient.detectors.config import CollapseConfig
from resilient.signals import Finding, Observation, Severity

_TRAINING = 32  # training losses behind "is it falling"
_LEAST_EVALUATIONS = 3


class Collapse:
    """Silent until evaluations are reported (`eval_loss`, `entropy`, `repetition`)."""

    name = "collapse"

    def __init__(self, config: CollapseConfig) -> None:
        self.config = config
        self._loss: deque[float] = deque(maxlen=_TRAINING)
        self._evaluations = 0
        self._best = math.inf
        self._best_step = 0
        self._loss_at_best = math.inf  # training loss when evaluation was best
        self._worse = 0  # evaluations in a row beyond the gap
        self._worse_since = 0
        self._entropy = 0.0  # largest output entropy seen
        self._repetition = math.inf  # smallest repetition seen
        self._off: dict[str, int] = {}  # signal -> first evaluation step at which it was off

    def observe(self, observation: Observation) -> list[Finding]:
        if self._evaluations < _LEAST_EVALUATIONS:
            return []
        found = []
        evaluation, step = observation.values.get("eval_loss"), observation.step
        evaluated = _evaluated(observation)
        training = self._training()
        if evaluation is not None and math.isfinite(evaluation) and self._beyond(evaluation, training):
            row = self._worse + 1
            if row >= self.config.patience:
                message = (
                    f"evaluation loss {evaluation:.4g} is {100 * (evaluation / self._best - 1):.0f} % above its best "
                    f"({self._best:.4g} at step {self._best_step}) for {row} evaluations, while training loss fell from "
                    f"{self._loss_at_best:.4g} to {training:.4g}: stop early or go back to the best checkpoint"
                )
                since = self._worse_since if self._worse else evaluated
                found.append(self._finding("eval_loss", step, since, evaluation, self._best, float(row), message))
        repetition, entropy = observation.values.get("repetition"), observation.values.get("entropy")
        if repetition is not None and repetition >= max(self.config.repetition, 2 * self._repetition):
            message = (
                f"{100 * repetition:.0f} % of the sampled text repeats itself (it was {100 * self._repetition:.0f} %)"
            )
            found.append(self._off_finding("repetition", step, repetition, self._repetition, repetition, message))
        if entropy is not None and math.isfinite(entropy) and entropy < self.config.entropy_share * self._entropy:
            message = f"output entropy {entropy:.3g} nats has fallen from {self._entropy:.3g}"
            found.append(
                self._off_finding("entropy", step, entropy, self._entropy, self._entropy / max(entropy, 1e-9), message)
            )
        return found

    def _beyond(self, evaluation: float, training: float) -> bool:
        margin = self.config.gap * abs(self._best)
        return evaluation > self._best + margin and training < self._loss_at_best

    def _off_finding(
        self, signal: str, step: int, value: float, reference: float, score: float, message: str
    ) -> Finding:
        return self._finding(signal, step, self._off.get(signal, step), value, reference, score, message)

    def _finding(
        self, signal: str, step: int, onset: int, value: float, reference: float, score: float, message: str
    ) -> Finding:
        return Finding(
            detector=self.name,
            signal=signal,
            severity=Severity.WARN,
            score=score,
            step=step,
            onset_step=onset,
            value=value,
            reference=reference,
            statistic="collapse",
            onset_confidence=0.6,
            message=message,
        )

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        values, step = observation.values, _evaluated(observation)
        loss = values.get("loss")
        if applied and loss is not None and math.isfinite(loss):
            self._loss.append(loss)
        evaluation = values.get("eval_loss")
        if evaluation is not None and math.isfinite(evaluation):  # a NaN is never the best
            self._evaluations += 1
            training = self._training()
            if evaluation < self._best:
                self._best, self._best_step, self._loss_at_best = evaluation, step, training
            if self._beyond(evaluation, training):
                self._worse_since = self._worse_since if self._worse else step
                self._worse += 1
            else:
                self._worse = 0
        off = {f.signal for f in findings if f.detector == self.name}
        for signal, seen in (("repetition", values.get("repetition")), ("entropy", values.get("entropy"))):
            if seen is None or not math.isfinite(seen):
                continue
            if evaluation is None:
                self._evaluations += 1
            if signal in off:
                self._off.setdefault(signal, step)
                continue
            self._off.pop(signal, None)
            if signal == "repetition":
                self._repetition = min(self._repetition, seen)
            else:
                self._entropy = max(self._entropy, seen)

    def _training(self) -> float:
        ordered = sorted(self._loss)
        return ordered[len(ordered) // 2] if ordered else math.inf

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": list(self._loss),
            "evaluations": self._evaluations,
            "best": self._best,
            "best_step": self._best_step,
            "loss_at_best": self._loss_at_best,
            "worse": self._worse,
            "worse_since": self._worse_since,
            "entropy": self._entropy,
            "repetition": self._repetition,
            "off": dict(self._off),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loss = deque(state["loss"], maxlen=_TRAINING)
        self._evaluations, self._best, self._best_step = state["evaluations"], state["best"], state["best_step"]
        self._loss_at_best, self._worse, self._worse_since = state["loss_at_best"], state["worse"], state["worse_since"]
        self._entropy, self._repetition, self._off = state["entropy"], state["repetition"], dict(state["off"])


def _evaluated(observation: Observation) -> int:
    """Step of the weights that were evaluated: a live run hears of it one attempt later and says which; a log row is its own."""
    return int(observation.values.get("eval_step", observation.step))
