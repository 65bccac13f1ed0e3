"""Judge and decide: detectors -> findings -> diagnosis -> policy, on one table. Pure, so identical on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resilient.detectors import Monitor
from resilient.diagnosis import diagnose
from resilient.policies import Ladder
from resilient.signals import Alarm, Decision, Finding, Observation, StabilityLevel, StepTable, Verdict


@dataclass(frozen=True)
class Judgement:
    """What was made of one attempt."""

    observation: Observation
    findings: tuple[Finding, ...]
    verdict: Verdict | None
    decision: Decision


class Judge:
    """The monitor (rewound with the weights) and the ladder (which outlives a rollback)."""

    def __init__(self, monitor: Monitor, ladder: Ladder) -> None:
        self.monitor = monitor
        self.ladder = ladder

    def judge(self, table: StepTable, *, dynamic_scale: bool, targets: Callable[[int], int]) -> Judgement:
        """targets(onset_step): how many snapshots lie safely before that step."""
        observation = table.observation()
        findings = self.monitor.observe(observation)
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

    def settle(self, judgement: Judgement, applied: bool) -> tuple[Alarm, ...]:
        """Let the attempt into the references and book the decision. applied: the optimizer took the step.

        Returns what is worth telling a person. Before a rollback, which then rewinds the monitor."""
        alarms = self.monitor.absorb(judgement.observation, judgement.findings, applied)
        self.ladder.settle(judgement.decision)
        return alarms

    def level(self) -> StabilityLevel:
        """Stability after the attempts settled so far."""
        return self.monitor.level()

    def state_dict(self) -> dict[str, Any]:
        """Monitor state only: it is rewound together with the weights."""
        return self.monitor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.monitor.load_state_dict(state)
