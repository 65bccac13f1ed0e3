"""All detectors over one stream of attempts: the same code inside a run, over a log file, and in a simulation.

findings = monitor.observe(observation)           judges, changes nothing
...                                               (a live run decides here)
alarms = monitor.absorb(observation, findings, applied)   lets it in, returns what is news
monitor.level()                                   stability after it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from resilient.detectors.base import Detector
from resilient.detectors.config import Targets
from resilient.detectors.layers import Layers
from resilient.detectors.series import Series
from resilient.detectors.stability import MOST, Stability, fit_growth, fuse
from resilient.signals import Alarm, Finding, Forecast, Observation, Severity, StabilityLevel

_QUIET = 16  # observations without a finding that end an episode
_REMIND = 32  # observations after which an episode that goes on is told again
_RECENT_STEPS = 128


class Monitor:
    """Pure: no clock, no randomness, no I/O. State is saved, restored and rewound exactly.

    targets: false alarms per 10,000 steps that were asked for, for the record of what came of it."""

    def __init__(self, detectors: Sequence[Detector], targets: Targets | None = None) -> None:
        self.detectors = list(detectors)
        self.targets = targets or Targets()
        self._series = next((d for d in self.detectors if isinstance(d, Series)), None)
        self._layers = Layers()
        self._stability = Stability()
        self._seen = 0
        self._episodes: dict[str, list[int]] = {}  # signal -> [last observation, last told, severity told]
        self._told = {"warn": 0, "act": 0}  # episodes by the severity they began with
        self._steps: deque[int] = deque(maxlen=_RECENT_STEPS)
        self._forecast: Forecast | None = None

    def observe(self, observation: Observation) -> tuple[Finding, ...]:
        """Findings of all detectors on this attempt, judged against the past only."""
        findings = [f for d in self.detectors for f in d.observe(observation)]
        if not findings:
            return ()
        findings += self._layers.combine(observation, findings)
        return tuple(self._fused(observation, findings))

    def _fused(self, observation: Observation, findings: list[Finding]) -> list[Finding]:
        """Two signals that are both nearly beyond their warn threshold are a warning together."""
        if self._series is None or any(f.severity >= Severity.WARN or f.alone for f in findings):
            return findings
        ratios = {signal: ratio for signal, _, ratio in self._series.ratios(observation)}
        watched = [f for f in findings if ratios.get(f.signal, 0.0) >= 0.85]
        if len({f.signal.partition("/")[0] for f in watched}) < 2 or fuse(ratios.values()) < 1.0:
            return findings
        top = max(watched, key=lambda f: ratios[f.signal])
        others = ", ".join(sorted({f.signal for f in watched} - {top.signal}))
        raised = replace(top, severity=Severity.WARN, message=f"{top.message}; together with {others}")
        return [raised if f is top else f for f in findings]

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool = True) -> tuple[Alarm, ...]:
        """Let the attempt into the references. Returns the alarms it raises: of every episode of findings that are warn
        or worse the first, an escalation, and a reminder every 32 observations."""
        evidence = list(self._series.ratios(observation)) if self._series is not None else []
        evidence += [_evidence(f) for f in findings if f.detector != "series"]
        small = {f.signal for f in findings if f.detector == "series" and (f.severity is Severity.WATCH or f.alone)}
        self._stability.absorb((s, k, min(e, 0.95) if s in small else e) for s, k, e in evidence)
        alarms = () if ordinary_overflow(observation, findings) else self._news(findings)
        for detector in self.detectors:
            detector.absorb(observation, findings, applied)
        self._layers.absorb(observation, findings)
        self._steps.append(observation.step)
        self._seen += 1
        self._forecast = None
        return alarms

    def _news(self, findings: Sequence[Finding]) -> tuple[Alarm, ...]:
        if not findings:
            return ()
        alarms = []
        worst: dict[str, Finding] = {}
        for finding in findings:
            if finding.severity < Severity.WARN or finding.alone:
                continue
            key = finding.signal + (f"@{finding.ranks}" if finding.ranks else "")
            if key not in worst or finding.severity > worst[key].severity:
                worst[key] = finding
        whole = {f.signal for f in worst.values() if "/" not in f.signal}
        for key, finding in sorted(worst.items()):
            base, _, layer = finding.signal.partition("/")
            if layer and (base in whole or "layers" in whole):
                continue  # the sum says it already; the layers are in the findings
            last, told, severity = self._episodes.get(key, [-(10**9), -(10**9), 0])
            new = self._seen - last > _QUIET
            if new or finding.severity > severity or self._seen - told >= _REMIND:
                alarms.append(_alarm(finding))
                if new:
                    self._told[alarms[-1].severity] += 1
                told, severity = self._seen, max(int(finding.severity), 0 if new else severity)
            self._episodes[key] = [self._seen, told, severity]
        if len(self._episodes) > 256:
            self._episodes = {k: v for k, v in self._episodes.items() if self._seen - v[0] <= _QUIET}
        return tuple(alarms)

    def level(self) -> StabilityLevel:
        """Stability after the attempts absorbed so far; below C with a forecast, or why there is none."""
        level = self._stability.level()
        if level.letter in ("A", "B") or self._series is None:
            return level
        if self._forecast is None:
            self._forecast = self._fit(level)
        return replace(level, forecast=self._forecast)

    def _fit(self, level: StabilityLevel) -> Forecast:
        signal, _, statistic = level.drivers[0][0].rpartition("/") if level.drivers else ("", "", "")
        growth = self._series.growth(signal, statistic) if self._series is not None else None
        if growth is None or len(self._steps) < 2:
            return Forecast(False, "the leading evidence is no growing signal", signal)
        age, excess, limit = growth  # age: points before now
        steps = np.asarray(self._steps, dtype=np.float64)
        interval = max(float(np.median(np.diff(steps[-33:]))), 1.0)
        return fit_growth(signal, steps[-1] - age * interval, excess, limit)

    def rates(self) -> dict[str, float]:
        """Alarms per 10,000 steps: what was asked for of each severity, and what came of it."""
        per = 10_000 / max(self._seen, 1)
        return {
            "steps": self._seen,
            "predicted_warn": self.targets.warn,
            "predicted_act": self.targets.act,
            "realised_warn": round(per * (self._told["warn"] + self._told["act"]), 3),
            "realised_act": round(per * self._told["act"], 3),
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values and numpy arrays."""
        return {
            "detectors": {d.name: d.state_dict() for d in self.detectors},
            "layers": self._layers.state_dict(),
            "stability": self._stability.state_dict(),
            "seen": self._seen,
            "episodes": {k: list(v) for k, v in self._episodes.items()},
            "told": dict(self._told),
            "steps": list(self._steps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for detector in self.detectors:
            detector.load_state_dict(state["detectors"][detector.name])
        self._layers.load_state_dict(state["layers"])
        self._stability.load_state_dict(state["stability"])
        self._seen, self._told = int(state["seen"]), dict(state["told"])
        self._episodes = {k: list(v) for k, v in state["episodes"].items()}
        self._steps = deque(state["steps"], maxlen=_RECENT_STEPS)
        self._forecast = None


def ordinary_overflow(observation: Observation, findings: Sequence[Finding]) -> bool:
    """An fp16 overflow under a loss scale: the gradient is not finite, the loss is. The scaler's daily business: it
    refuses the step and halves the scale. What is not ordinary is a series of them: see drops.py."""
    scale = observation.values.get("loss_scale", 1.0)
    return scale > 1.0 and any(f.statistic == "nonfinite" and f.place == "backward" for f in findings)


def _alarm(finding: Finding) -> Alarm:
    return Alarm(
        step=finding.step,
        severity="act" if finding.severity is Severity.ACT else "warn",
        signal=finding.signal,
        statistic=finding.statistic,
        score=finding.score,
        onset_step=finding.onset_step,
        onset_confidence=finding.onset_confidence,
        message=finding.message,
        ranks=finding.ranks,
    )


def _evidence(finding: Finding) -> tuple[str, str, float]:
    """Evidence of a finding that has no threshold of its own, in warn thresholds."""
    if finding.statistic == "nonfinite":
        return finding.signal, finding.statistic, 0.75 if finding.place == "backward" else MOST
    return (
        finding.signal,
        finding.statistic,
        {Severity.WATCH: 0.75, Severity.WARN: 1.0, Severity.ACT: 1.35}[finding.severity],
    )
