"""What speaks in sketch mode, where single ranks are not known to the detectors of tables.

An observation either has values of every rank or a sketch of them (`Observation.sketch`). Cross-rank outliers look at both by
themselves (crossrank.py); the series, drops, collapse and the reduction check need neither. The rest is here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from resilient.detectors.base import Detector
from resilient.detectors.crossrank import CrossRankOutlier
from resilient.detectors.nonfinite import NonFinite
from resilient.detectors.reduction import ReductionCheck, _Name
from resilient.detectors.replicas import _ALIKE, _EVERYWHERE, Replicas, _camps, _minority
from resilient.signals import PLACES, Checks, Finding, Observation
from resilient.signals.sketch import SketchSummary
from resilient.signals.sketch_pack import Past, SketchState


class OfSketches(Protocol):
    """As Detector, of sketches."""

    name: str

    def observe(self, summary: SketchSummary) -> list[Finding]: ...
    def absorb(self, summary: SketchSummary, findings: Sequence[Finding], applied: bool) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ByMode:
    """Two detectors under one name: one of tables, one of sketches. The observation says which one it is for."""

    def __init__(self, of_tables: Detector, of_sketches: OfSketches) -> None:
        self.name = of_tables.name
        self.of_tables, self.of_sketches = of_tables, of_sketches

    def observe(self, observation: Observation) -> list[Finding]:
        if observation.sketch is None:
            return self.of_tables.observe(observation)
        return self.of_sketches.observe(observation.sketch)

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        if observation.sketch is None:
            self.of_tables.absorb(observation, findings, applied)
        else:
            self.of_sketches.absorb(observation.sketch, findings, applied)

    def state_dict(self) -> dict[str, Any]:
        return {"tables": self.of_tables.state_dict(), "sketches": self.of_sketches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.of_tables.load_state_dict(state["tables"])
        self.of_sketches.load_state_dict(state["sketches"])


class NonFiniteByMode(NonFinite):
    """A sketch counts the ranks at every place and names up to 16 of them. When most ranks are hit and not all of those can be
    named, none is: that is about what they share."""

    def observe(self, observation: Observation) -> list[Finding]:
        sketch = observation.sketch
        if sketch is None:
            return super().observe(observation)
        for place in PLACES:
            if place in sketch.named:
                count, ranks = sketch.named[place]
                named = ranks if len(ranks) == count or 2 * count <= sketch.world else ()
                signal = "grad_norm" if place in ("backward", "reduction") else "loss"
                return [self._finding(observation, place, named, signal)]
        for signal, place in (("loss", "loss"), ("grad_norm", "backward")):  # inf - inf, over all of them
            if not math.isfinite(observation.values[signal]):
                return [self._finding(observation, place, (), signal)]
        return []


class ReplicasByMode(Replicas):
    """A sketch tells whether ranks disagree, not who: findings without ranks, until a second look has everybody's digest
    (`named`).

    Compared where all ranks together are one replica group. Digests of several groups, and what must differ from rank to
    rank, are not in a sketch."""

    def observe(self, observation: Observation) -> list[Finding]:
        sketch = observation.sketch
        if sketch is None:
            return super().observe(observation)
        findings = []
        for kind, (severity, place, what) in _ALIKE.items():
            signal = f"digest_{kind}"
            if self._told(sketch, kind) and sketch.differ(signal):
                message = f"{what} on some of {sketch.world} ranks{self._since(kind, observation)}"
                findings.append(self._finding(observation, signal, severity, place, (), message, kind))
        return findings

    def named(self, observation: Observation, finding: Finding, digests: np.ndarray) -> Finding:
        """The finding as a table would have told it. digests: (world,) of its signal."""
        kind = finding.signal.removeprefix("digest_")
        severity, place, what = _ALIKE[kind]
        ranks, who = _minority(_camps(digests, np.arange(len(digests))))
        message = f"{what}: {who}{self._since(kind, observation)}"
        return self._finding(observation, finding.signal, severity, place, ranks, message, kind)

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        sketch = observation.sketch
        if sketch is None:
            super().absorb(observation, findings, applied)
            return
        for kind in _ALIKE:
            signal = f"digest_{kind}"
            onsets = [f.onset_step for f in findings if f.detector == self.name and f.signal == signal]
            if onsets:
                self._onset.setdefault(signal, min(onsets))
            elif self._told(sketch, kind):
                self._alike[kind] = observation.step
                self._onset.pop(signal, None)

    def _told(self, sketch: SketchSummary, kind: str) -> bool:
        """There are digests of this kind, and all ranks must have the same."""
        groups = self.groups.get(kind, ())
        everywhere = len(groups) == 1 and len(groups[0]) == sketch.world if groups else kind in _EVERYWHERE
        return everywhere and not math.isnan(sketch.ends[f"digest_{kind}"][0])


class ReductionCheckByMode(ReductionCheck):
    """In a sketch no rank of the sums is known: the second pass names it."""

    def _named(self, checks: Checks, *rest: Any) -> _Name:
        if checks.world:
            return _Name((), "which rank received it is for a second pass to name", known=False)
        return super()._named(checks, *rest)

    def _not_finite(self, observation: Observation, checks: Checks, cells: np.ndarray) -> Finding:
        finding = super()._not_finite(observation, checks, cells)
        return replace(finding, ranks=()) if checks.world else finding


def follow(state: SketchState, detectors: Sequence[Detector]) -> None:
    """Have the ranks keep their own histories as these detectors would. Before the first step."""
    for detector in detectors:
        if isinstance(detector, CrossRankOutlier) and detector.config.signal in state.pasts:
            c = detector.config
            state.keep_past(c.signal, Past(c.floor, c.history, c.min_history, c.accept_after))
