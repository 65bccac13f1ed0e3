"""Judge and decide: detectors -> findings -> diagnosis -> policy, on one table. Pure, so identical on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from resilient.detectors import Monitor
from resilient.detectors.sketched import follow
from resilient.diagnosis import diagnose
from resilient.policies import Ladder
from resilient.signals import (
    Alarm,
    Confirmation,
    Decision,
    Exchanged,
    Finding,
    LinkReport,
    Observation,
    StabilityLevel,
    StepSketch,
    Verdict,
)
from resilient.signals.sketch_pack import SketchState


@dataclass(frozen=True)
class Judgement:
    """What was made of one attempt."""

    observation: Observation
    findings: tuple[Finding, ...]
    verdict: Verdict | None
    decision: Decision


class Judge:
    """The monitor (rewound with the weights) and the ladder (which outlives a rollback).

    sketch_state: the exchange's, in sketch mode: what this rank knows of itself. It learns and is rewound with the monitor,
    and is the only part of the judge that differs from rank to rank."""

    def __init__(self, monitor: Monitor, ladder: Ladder, sketch_state: SketchState | None = None) -> None:
        self.monitor = monitor
        self.ladder = ladder
        self._sketch_state = sketch_state
        self._seen: tuple[Observation, StepSketch] | None = None  # that is not settled yet
        if sketch_state is not None:
            follow(sketch_state, monitor.detectors)

    def see(self, table: Exchanged) -> tuple[Observation, tuple[Finding, ...]]:
        """What there is to be seen in what the exchange has brought."""
        observation = table.observation()
        self._seen = (observation, table) if isinstance(table, StepSketch) else None
        return observation, self.monitor.observe(observation)

    def conclude(
        self,
        observation: Observation,
        findings: tuple[Finding, ...],
        *,
        dynamic_scale: bool,
        targets: Callable[[int], int],
        hosts: Sequence[str] = (),
        links: LinkReport | None = None,
        confirmation: Confirmation | None = None,
        lr_change: float = 1.0,
    ) -> Judgement:
        """What it means and what to do. targets(onset_step): how many snapshots lie safely before that step. hosts: of
        the ranks. links, confirmation: what a second look has shown, the same on every rank. lr_change: LR of the last
        applied step over that of the one before."""
        verdict = diagnose(
            observation,
            findings,
            dynamic_scale=dynamic_scale,
            refused_in_a_row=self.ladder.refused_in_a_row,
            weights_proven=self.ladder.weights_proven,
            hosts=hosts,
            links=links,
            confirmation=confirmation,
            lr_change=lr_change,
        )
        available = targets(verdict.onset_step) if verdict is not None else 0
        step, attempt = observation.step, observation.attempt
        decision = self.ladder.decide(verdict, step=step, attempt=attempt, targets=available)
        return Judgement(observation, findings, verdict, decision)

    def settle(self, judgement: Judgement, applied: bool) -> tuple[Alarm, ...]:
        """Let the attempt into the references and book the decision. applied: the optimizer took the step.

        Returns what is worth telling a person. Before a rollback, which then rewinds the monitor."""
        alarms = self.monitor.absorb(judgement.observation, judgement.findings, applied)
        if self._seen is not None and self._seen[0] is judgement.observation:
            self._seen[1].learn(applied)
        self._seen = None
        self.ladder.settle(judgement.decision)
        return alarms

    def level(self) -> StabilityLevel:
        """Stability after the attempts settled so far."""
        return self.monitor.level()

    def state_dict(self) -> dict[str, Any]:
        """Of what is rewound together with the weights."""
        own = {} if self._sketch_state is None else {"sketch": self._sketch_state.state_dict()}
        return {**self.monitor.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A state without a sketch's part (another mode, a smaller world) leaves that part as it is at the start."""
        self.monitor.load_state_dict(state)
        self._seen = None
        if self._sketch_state is not None:
            self._sketch_state.load_state_dict(state.get("sketch"))
