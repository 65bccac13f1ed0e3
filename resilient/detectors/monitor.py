"""All detectors over one stream of attempts: the same code inside a run, over a log file, and in a simulation.

findings = monitor.observe(observation)           judges, changes nothing
...                                               (a live run decides here)
alarms = monitor.absorb(observation, findings, applied)   lets it in, returns what is news
monitor.level()                                   stability after it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilient.detectors.base import Detector
from resilient.signals import Alarm, Finding, Observation, Severity, StabilityLevel


class Monitor:
    """Pure: no clock, no randomness, no I/O. State is saved, restored and rewound exactly."""

    def __init__(self, detectors: Sequence[Detector]) -> None:
        self.detectors = list(detectors)

    def observe(self, observation: Observation) -> tuple[Finding, ...]:
        """Findings of all detectors on this attempt, judged against the past only."""
        return tuple(f for d in self.detectors for f in d.observe(observation))

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool = True) -> tuple[Alarm, ...]:
        """Let the attempt into the references. Returns the alarms it raises."""
        for detector in self.detectors:
            detector.absorb(observation, findings, applied)
        return tuple(
            Alarm(
                step=f.step,
                severity="act" if f.severity is Severity.ACT else "warn",
                signal=f.signal,
                statistic=f.statistic,
                score=f.score,
                onset_step=f.onset_step,
                onset_confidence=f.onset_confidence,
                message=f.message,
                ranks=f.ranks,
            )
            for f in findings
            if f.severity >= Severity.WARN
        )

    def level(self) -> StabilityLevel:
        """Stability after the attempts absorbed so far."""
        return StabilityLevel()

    def state_dict(self) -> dict[str, Any]:
        """Plain Python values only."""
        return {d.name: d.state_dict() for d in self.detectors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for detector in self.detectors:
            detector.load_state_dict(state[detector.name])
