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

from resilient.signals import Finding, Observation, Severity, Verdict


def diagnose(
    observation: Observation,
    findings: Sequence[Finding],
    *,
    dynamic_scale: bool,
    refused_in_a_row: int,
    weights_proven: bool = False,
) -> Verdict | None:
    """The verdict on one attempt, or None when nothing was found.

    dynamic_scale: the engine's loss scale adapts by itself. refused_in_a_row: attempts refused just before this one;
    the weights have not moved since. weights_proven: they were restored lately and have run cleanly since."""
    if not findings:
        return None
    worst = max(map(_weight, findings))
    leading = [f for f in findings if _weight(f) is worst]
    nonfinite = next((f for f in leading if f.detector == "nonfinite"), None)
    if nonfinite is not None:
        return _nonfinite(observation, nonfinite, tuple(findings), dynamic_scale)
    ranked = [f for f in leading if f.ranks]
    if ranked:
        return _one_rank(observation, max(ranked, key=lambda f: f.score), tuple(findings), worst)
    return _all_ranks(max(leading, key=lambda f: f.score), tuple(findings), worst, refused_in_a_row, weights_proven)


_ABOUT_THE_ATTEMPT = {"nonfinite", "point", "confirmed", "ranks"}


def _weight(finding: Finding) -> Severity:
    """Severity of a finding for the verdict on this attempt. What a slow statistic has seen (level, drift, trend, scale,
    drop, layers, collapse) is no fault of this attempt: refusing it would cure nothing, so it warns at most."""
    return finding.severity if finding.statistic in _ABOUT_THE_ATTEMPT else min(finding.severity, Severity.WARN)


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
        "batch and machine were not told apart at the gate; see nan_origin if the window was run again",
    )
    return Verdict(cause="unknown", confidence=0.5, evidence=suspicion, **common)  # type: ignore[arg-type]


def _one_rank(observation: Observation, finding: Finding, findings: tuple[Finding, ...], severity: Severity) -> Verdict:
    """One rank stands out. Its loss tells whether its batch is odd too: by the cross-rank detector of the loss, which
    knows how far ranks' losses usually lie apart."""
    rank = finding.ranks[0]
    loss = next((f for f in findings if f.signal == "loss" and rank in f.ranks), None)
    if loss is not None:
        evidence: tuple[str, ...] = (finding.message, f"its batch is odd too: {loss.message}")
    else:
        evidence = (
            finding.message,
            f"its loss {float(observation.per_rank['loss'][rank]):.4g} is as usual: its batch looks normal",
            "the links were not probed and the reduction was not checked",
        )
    return Verdict(
        cause="communication" if loss is None else "data",
        severity=severity,
        ranks=finding.ranks,
        onset_step=finding.onset_step,
        confidence=0.6 if loss is None else 0.7,
        evidence=evidence,
        findings=findings,
        place=finding.place,
    )


def _all_ranks(
    finding: Finding, findings: tuple[Finding, ...], severity: Severity, refused_in_a_row: int, weights_proven: bool
) -> Verdict:
    weights_suspected = refused_in_a_row >= 2 and not weights_proven
    if weights_proven:
        note = "the weights were restored lately and have run cleanly since: a bad stretch of data"
    elif refused_in_a_row:
        note = f"{refused_in_a_row} other batches were refused on the same weights just before"
    else:
        note = "the same weights were fine one batch ago"
    return Verdict(
        cause="optimizer" if weights_suspected else "data",
        severity=severity,
        ranks=(),
        onset_step=finding.onset_step,
        confidence=0.6 if weights_suspected or weights_proven else 0.5,
        evidence=(finding.message, "all ranks rose together", note),
        findings=findings,
    )
