"""Findings -> verdict: the table of DESIGN 5, as far as this attempt's measurements support it.

| local norm of one rank | its loss | verdict |
| non-finite, dynamic fp16 scale, loss finite | - | precision (an overflow: the scaler's business) |
| non-finite only after the reduction | finite | communication |
| outlier | outlier | data (that rank's batch) |
| outlier | normal | communication suspected (the classic single-rank spike, S19) |
| all ranks together, once | - | data suspected: the same weights were fine one batch ago |
| all ranks together, on several batches while the weights stood still | - | optimizer: the weights are the common factor |

A verdict that is not supported says `unknown`. Confidence is a statement about how many checks stand behind the row,
not a probability.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.signals import Finding, Observation, Severity, Verdict

_RANK_LOSS_RATIO = 1.25  # a rank's loss this far above its peers' median counts as "its batch is odd"


def diagnose(
    observation: Observation, findings: Sequence[Finding], *, dynamic_scale: bool, refused_in_a_row: int
) -> Verdict | None:
    """The verdict on one attempt, or None when nothing was found.

    dynamic_scale: the engine's loss scale adapts by itself. refused_in_a_row: attempts refused just before this one;
    the weights have not moved since."""
    if not findings:
        return None
    worst = max(f.severity for f in findings)
    leading = [f for f in findings if f.severity is worst]
    nonfinite = next((f for f in leading if f.detector == "nonfinite"), None)
    if nonfinite is not None:
        return _nonfinite(observation, nonfinite, tuple(findings), dynamic_scale)
    ranked = [f for f in leading if f.ranks]
    if ranked:
        return _one_rank(observation, max(ranked, key=lambda f: f.score), tuple(findings), worst)
    return _all_ranks(max(leading, key=lambda f: f.score), tuple(findings), worst, refused_in_a_row)


def _nonfinite(
    observation: Observation, finding: Finding, findings: tuple[Finding, ...], dynamic_scale: bool
) -> Verdict:
    common = {
        "severity": Severity.ACT,
        "ranks": finding.ranks,
        "onset_step": finding.onset_step,
        "findings": findings,
        "place": finding.place,
    }
    if finding.place == "backward" and dynamic_scale:
        scale = observation.values.get("loss_scale", 1.0)
        evidence = (
            finding.message,
            f"loss is finite and the loss scale is {scale:g}: an overflow of the scaled gradient",
        )
        return Verdict(cause="precision", confidence=0.8, evidence=evidence, scale_overflow=True, **common)  # type: ignore[arg-type]
    if finding.place == "reduction":
        evidence = (finding.message, "every rank's own gradient was finite before the reduction")
        return Verdict(cause="communication", confidence=0.8, evidence=evidence, **common)  # type: ignore[arg-type]
    world = len(next(iter(observation.per_rank.values()), ()))
    alone = 0 < len(finding.ranks) < max(world, 1)
    suspicion = (
        finding.message,
        "the other ranks were finite on the same weights: that rank's batch or machine"
        if alone
        else "seen on all ranks",
        "batch and machine were not told apart: no re-run was made",
    )
    return Verdict(cause="unknown", confidence=0.5, evidence=suspicion, **common)  # type: ignore[arg-type]


def _one_rank(observation: Observation, finding: Finding, findings: tuple[Finding, ...], severity: Severity) -> Verdict:
    rank = finding.ranks[0]
    losses = observation.per_rank["loss"]
    group = next((g for g in observation.peers if rank in g), tuple(range(len(losses))))
    others = np.asarray([losses[r] for r in group if r != rank])
    ratio = float(losses[rank] / np.median(others)) if len(others) and np.median(others) > 0 else 1.0
    odd_batch = ratio >= _RANK_LOSS_RATIO
    evidence = (
        finding.message,
        f"its loss is {ratio:.2f} times its peers': {'its batch is odd too' if odd_batch else 'its batch looks normal'}",
        *(() if odd_batch else ("the links were not probed and the reduction was not checked",)),
    )
    return Verdict(
        cause="data" if odd_batch else "communication",
        severity=severity,
        ranks=finding.ranks,
        onset_step=finding.onset_step,
        confidence=0.7 if odd_batch else 0.6,
        evidence=evidence,
        findings=findings,
        place=finding.place,
    )


def _all_ranks(finding: Finding, findings: tuple[Finding, ...], severity: Severity, refused_in_a_row: int) -> Verdict:
    weights_suspected = refused_in_a_row >= 2
    note = (
        f"{refused_in_a_row} other batches were refused on the same weights just before"
        if refused_in_a_row
        else "the same weights were fine one batch ago"
    )
    return Verdict(
        cause="optimizer" if weights_suspected else "data",
        severity=severity,
        ranks=(),
        onset_step=finding.onset_step,
        confidence=0.6 if weights_suspected else 0.5,
        evidence=(finding.message, "all ranks rose together", note),
        findings=findings,
    )
