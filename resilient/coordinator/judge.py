"""Judge and decide: detectors -> findings -> diagnosis -> policy, on one table. Pure, so identical on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from resilient.detectors import Detector
from resilient.diagnosis import diagnose
from resilient.policies import Ladder
from resilient.signals import Decision, Finding, Observation, StepTable, Verdict

_LEVEL_MEMORY = 20  # attempts that the letter looks back on


@dataclass(frozen=True)
class Judgement:
    """What was made of one attempt."""

    observation: Observation
    findings: tuple[Finding, ...]
    verdict: Verdict | None
    decision: Decision


class Judge:
    """Detectors (rewound with the weights) and the ladder (which outlives a rollback)."""

    def __init__(self, detectors: Sequence[Detector], ladder: Ladder) -> None:
        self.detectors = list(detectors)
        self.ladder = ladder
        self._recent: deque[int] = deque(maxlen=_LEVEL_MEMORY)

    def judge(self, table: StepTable, *, dynamic_scale: bool, targets: Callable[[int], int]) -> Judgement:
        """targets(onset_step): how many snapshots lie safely before that step."""
        observation = table.observation()
        findings = tuple(f for d in self.detectors for f in d.observe(observation))
        verdict = diagnose(
            observation,
            findings,
            dynamic_scale=dynamic_scale,
            refused_in_a_row=self.ladder.refused_in_a_row,
            weights_proven=self.ladder.weights_proven,
        )
        available = targets(verdict.onset_step) if verdict is not None else 0
        decision = self.ladder.decide(verdict, step=table.step, attempt=table.attempt, targets=available)
        return Judgement(observation, findings, verdict, decision)

    def settle(self, judgement: Judgement) -> None:
        """Let the attempt into the references and book the decision."""
        for detector in self.detectors:
            detector.absorb(judgement.observation, judgement.findings)
        self.ladder.settle(judgement.decision)
        decision = judgement.decision
        worst = max((int(f.severity) for f in judgement.findings), default=0)
        if decision.overflow and not decision.incident:
            worst = 0
        self._recent.append(4 if decision.action in ("rollback", "stop") else worst)

    def level(self) -> str:
        """A: quiet; B: watched; C: warned; D: a step was refused; E: rolled back or stopped. Worst of the last 20
        attempts. The calibrated stability level replaces this letter's rule, not the letter."""
        return "ABCDE"[max(self._recent, default=0)] if self._recent else "A"

    def state_dict(self) -> dict[str, Any]:
        """Detector state only: it is rewound together with the weights."""
        return {d.name: d.state_dict() for d in self.detectors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for detector in self.detectors:
            detector.load_state_dict(state[detector.name])
