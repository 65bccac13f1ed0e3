"""Several layers losing control together, and the layer where it began (S3).

Works on the findings of the series over `grad_norm/<layer>`: one layer that is odd is watched;
many within a short while, with a first one, are a finding of their own. Loss spikes start localised in single tensors
before the global norm shows them (OLMo issue 266, GLM-130B's embedding layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilient.signals import Finding, Observation, Severity

_TOGETHER = 16  # observations within which layers count as odd together
_LEAST = 3  # layers
_SHARE = 0.3  # of all layers


class Layers:
    """Combines findings of single layers. Not a detector by itself: the monitor hands it the others' findings."""

    name = "layers"

    def __init__(self) -> None:
        self._all: set[str] = set()  # layer signals
        self._odd: dict[str, tuple[int, int]] = {}  # layer signal -> (last odd observation, onset step)
        self._seen = 0

    def combine(self, observation: Observation, findings: Sequence[Finding]) -> list[Finding]:
        """Findings about layers together. Changes nothing."""
        odd = self._now(findings)
        if len(odd) < max(_LEAST, _SHARE * len(self._all)):
            return []
        fresh = {f.signal for f in findings if _is_layer(f.signal)}
        if not fresh:
            return []
        first = min(odd, key=lambda layer: (odd[layer][1], layer))
        return [
            Finding(
                detector=self.name,
                signal="layers",
                severity=Severity.WARN,
                score=float(len(odd)),
                step=observation.step,
                onset_step=odd[first][1],
                statistic="layers",
                onset_confidence=0.7,
                message=f"{len(odd)} of {len(self._all)} layers lose control together; it began in {first.partition('/')[2]}",
            )
        ]

    def _now(self, findings: Sequence[Finding]) -> dict[str, tuple[int, int]]:
        odd = {k: v for k, v in self._odd.items() if v[0] > self._seen - _TOGETHER}
        for finding in findings:
            if _is_layer(finding.signal):
                odd[finding.signal] = (
                    self._seen,
                    min(finding.onset_step, odd.get(finding.signal, (0, finding.onset_step))[1]),
                )
        return odd

    def absorb(self, observation: Observation, findings: Sequence[Finding]) -> None:
        self._odd = self._now(findings)
        self._seen += 1
        if not self._all or self._seen % 64 == 1:
            self._all.update(name for name in observation.values if _is_layer(name))

    def state_dict(self) -> dict[str, Any]:
        return {"all": sorted(self._all), "odd": {k: list(v) for k, v in self._odd.items()}, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._all, self._seen = set(state["all"]), int(state["seen"])
        self._odd = {k: (int(v[0]), int(v[1])) for k, v in state["odd"].items()}


def _is_layer(signal: str) -> bool:
    return signal.startswith("grad_norm/")
