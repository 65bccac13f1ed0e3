"""Rows in which no rank stands out: data, optimizer, precision, or a norm that no reduction can make (S4, S18, T5, T8)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from resilient.diagnosis.case import NOT_CHECKED, NOT_PROBED, Case
from resilient.signals import Cause, Finding, Severity, Verdict

_STEP_SIZE = ("update_norm", "update_norm/*", "adam_lag", "adam_lag/*")
_WEIGHTS = ("weight_norm", "logit_max", "attention_logit_max", "attention_entropy")
_LR_ROSE = 1.5  # times the LR of the step before: a schedule does not do that
_IMPOSSIBLE = 1.5  # times the largest local norm: the norm of a mean is at most that, 1.5 for ranks that weigh unlike


def together(case: Case, leading: Sequence[Finding]) -> Verdict:
    """leading: the findings of the verdict's severity; all of them about all ranks."""
    worst = max(leading, key=lambda f: f.score)
    onset = worst.onset_step

    def verdict(
        cause: Cause, confidence: float, *evidence: str, begun: int = onset, unchecked: Sequence[str] = ()
    ) -> Verdict:
        return case.verdict(cause, confidence, evidence, onset=begun, unchecked=unchecked)

    drops = [f for f in case.findings if f.statistic == "drop" and f.severity >= Severity.WARN]
    if drops:
        first = min(f.onset_step for f in drops)
        beside = "" if worst in drops else worst.message
        return verdict("precision", 0.7, drops[0].message, beside, begun=min(first, onset))
    impossible = _impossible(case)
    if impossible:
        return verdict("communication", 0.6, worst.message, impossible, unchecked=(NOT_CHECKED, NOT_PROBED))
    first_off = _first(case, _STEP_SIZE, leading)
    if case.lr_change >= _LR_ROSE:
        told = f"the LR was {case.lr_change:.3g} times that of the step before when the weights last moved"
        beside = first_off.message if first_off is not None and first_off is not worst else ""
        return verdict("optimizer", 0.75, worst.message, beside, told, "all ranks together")
    if first_off is not None:
        told = f"the optimizer's update was off first, or with it: {first_off.message}"
        same = first_off is worst
        evidence = (worst.message, "" if same else told, "all ranks together")
        return verdict("optimizer", 0.65, *evidence, begun=min(onset, first_off.onset_step))
    growing = _first(case, _WEIGHTS, leading, strictly=True)
    if growing is not None:
        told = "" if growing is worst else f"what the weights make was off before: {growing.message}"
        return verdict(
            "optimizer", 0.5, worst.message, told, "all ranks together", begun=min(onset, growing.onset_step)
        )
    passed = next((f for f in leading if f.statistic == "passed"), None)
    if passed is not None:
        return verdict(
            "data",
            0.65,
            passed.message,
            "" if worst is passed else worst.message,
            "all ranks together, on the weights on which the windows before and after were as usual",
            begun=passed.onset_step,
        )
    if worst.statistic in ("point", "confirmed"):
        return _one_odd_attempt(case, worst)
    if worst.signal == "eval_loss":
        return verdict("data", 0.4, worst.message, "training loss falls meanwhile: the data are seen too often")
    if worst.statistic == "collapse" or fnmatchcase(worst.signal, "grad_norm*") or worst.signal == "layers":
        return verdict("optimizer", 0.4, worst.message, "all ranks together, over many steps")
    return verdict("unknown", 0.3, worst.message, "a slow change on all ranks: data and optimizer both make such")


def _one_odd_attempt(case: Case, worst: Finding) -> Verdict:
    """All ranks rose in this attempt. What differs from the attempt before is the batch, unless other batches were
    refused on the same weights just before."""
    weights_suspected = case.refused_in_a_row >= 2 and not case.weights_proven
    if case.weights_proven:
        note = "the weights were restored lately and have run cleanly since: a bad stretch of data"
    elif case.refused_in_a_row:
        note = f"{case.refused_in_a_row} other batches were refused on the same weights just before"
    else:
        note = "the same weights were fine one batch ago"
    return case.verdict(
        "optimizer" if weights_suspected else "data",
        0.6 if weights_suspected or case.weights_proven else 0.5,
        (worst.message, "all ranks rose together", note),
        onset=worst.onset_step,
    )


def _first(case: Case, signals: Sequence[str], leading: Sequence[Finding], strictly: bool = False) -> Finding | None:
    """The earliest finding on these signals, if nothing else that leads began before it; strictly: nor with it. The
    update in a row is the one before this attempt's batch, so it may share the onset of what it has caused."""
    found = [
        f
        for f in case.findings
        if f.severity >= Severity.WARN and not f.ranks and any(fnmatchcase(f.signal, s) for s in signals)
    ]
    if not found:
        return None
    first = min(found, key=lambda f: (f.onset_step, -f.score))
    rivals = [f.onset_step for f in leading if f is not first]
    return first if all(first.onset_step + strictly <= onset for onset in rivals) else None


def _impossible(case: Case) -> str:
    """The norm of a mean is at most the largest of the norms: more was made by the reduction."""
    most, norm = case.observation.largest("local_grad_norm"), case.observation.values.get("grad_norm")
    if case.check != "open" or norm is None or case.world < 2 or not math.isfinite(most):
        return ""
    if not most > 0 or not norm > _IMPOSSIBLE * most:
        return ""
    return f"the reduced gradient has norm {norm:.4g}, more than the largest that a rank has sent ({most:.4g})"
