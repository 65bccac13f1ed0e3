"""Per-rank observations for the detector tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.detectors import Detector
from resilient.signals import Finding, Observation, Severity


def feed(detector: Detector, observations: list[Observation]) -> list[list[Finding]]:
    found = []
    for observation in observations:
        findings = detector.observe(observation)
        detector.absorb(observation, findings, all(f.severity < Severity.ACT for f in findings))
        found.append(findings)
    return found


def ranks_at(step: int, norms: Sequence[float] | np.ndarray, losses: Sequence[float] | None = None) -> Observation:
    world = len(norms)
    return Observation(
        step,
        step,
        {"loss": 2.0, "grad_norm": float(np.sqrt(np.mean(np.square(norms))))},
        {
            "local_grad_norm": np.asarray(norms, dtype=float),
            "loss": np.asarray(losses or [2.0] * world),
            **{f"nonfinite_{p}": np.zeros(world) for p in ("forward", "loss", "backward")},
            "reduced_sq_share": np.ones(world),
        },
        (tuple(range(world)),),
    )
