"""One rank stands out before the reduction: its batch, its machine, or (as far as nobody checked) the wire (C2, S19)."""

from __future__ import annotations

from collections.abc import Sequence

from resilient.diagnosis import rerun
from resilient.diagnosis.case import NOT_CHECKED, NOT_PROBED, Case, nothing_to_learn, ranks_in_words
from resilient.signals import Cause, Finding, Verdict

_LOSSES = ("loss", "loss_max")
_SUSPECTED = 0.6  # confidence of what nothing but the size of one odd step speaks for


def outlier(case: Case, leading: Sequence[Finding]) -> Verdict:
    """leading: findings of the verdict's severity that name ranks. The worst of them decides; ranks that look like it
    are named with it."""
    worst = max(leading, key=lambda f: f.score)
    losses = {r: f for f in case.findings if f.signal in _LOSSES and f.statistic == "ranks" for r in f.ranks}
    odd = worst.ranks[0] in losses
    ranks = sorted({r for f in leading for r in f.ranks if (r in losses) == odd})
    onset = min(f.onset_step for f in leading if set(f.ranks) & set(ranks))
    evidence = [worst.message, _others(leading, worst, ranks)]
    unchecked: list[str] = []
    cause: Cause
    unfed = nothing_to_learn(case, ranks)
    if unfed:
        return case.verdict("data", 0.8, (*evidence, unfed), ranks=ranks, onset=onset, place=worst.place)
    if odd:
        cause, confidence = "data", 0.7
        if losses[worst.ranks[0]] is not worst:
            evidence.append(f"its batch is odd too: {losses[worst.ranks[0]].message}")
    else:
        evidence.append(_usual_loss(case, worst.ranks[0]))
        if case.check == "holds":
            cause, confidence = "compute", 0.6
            evidence.append("the reduction check holds: what was received is what this rank sent, so it was off before")
        else:
            cause, confidence = "communication", 0.5
            unchecked.append(NOT_CHECKED)
    again = rerun.read(case, ranks)
    if again.cause is not None:
        cause, confidence = again.cause, again.confidence
        if case.check != "holds" and cause == "compute":
            unchecked.append("parameters that reached this rank damaged would look the same")
    evidence += again.evidence
    unchecked += again.unchecked
    if cause in ("communication", "compute"):
        cause, confidence = probed(case, ranks, cause, confidence, evidence, unchecked)
        if worst.plausible and again.cause is None and confidence <= _SUSPECTED:
            cause, confidence = "unknown", 0.4
            evidence.append(
                "one step, no further out than the noise of such a run may reach: no fault is shown by it alone"
            )
    return case.verdict(cause, confidence, evidence, ranks=ranks, onset=onset, place=worst.place, unchecked=unchecked)


def probed(
    case: Case, ranks: Sequence[int], cause: Cause, confidence: float, evidence: list[str], unchecked: list[str]
) -> tuple[Cause, float]:
    """Cause and confidence with what a probe of links and machines has found about these ranks; adds its sentences."""
    links = case.links
    if links is None:
        if cause == "communication":
            unchecked.append(NOT_PROBED)
        return cause, confidence
    suspects = set(ranks)
    machines = suspects & set(links.wrong_ranks)
    if machines:
        evidence.append(f"{ranks_in_words(sorted(machines))}: wrong result in the matmul self-test")
        return "compute", 0.95
    wrong = [p for p in links.wrong_pairs if suspects & set(p) or not suspects]
    if wrong:
        evidence.append(f"the probe got other bits over the link{_pairs(wrong)}")
        return "communication", 0.95
    slow = [p for p in links.slow_pairs if suspects & set(p) or not suspects]
    if slow and cause == "communication":
        evidence.append(f"the probe found the slow link{_pairs(slow)}")
        return cause, max(confidence, 0.75)
    if cause == "communication":
        evidence.append("the probe found the links in order afterwards: a passing fault of the wire, or of the program")
        return cause, confidence if case.check == "fails" else min(confidence, 0.4)
    return cause, confidence


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    return ("s " if len(pairs) > 1 else " ") + ", ".join(f"{a}-{b}" for a, b in pairs[:4])


def _others(leading: Sequence[Finding], worst: Finding, ranks: Sequence[int]) -> str:
    others = [r for r in ranks if r not in worst.ranks]
    return f"{ranks_in_words(others)} likewise" if others else ""


def _usual_loss(case: Case, rank: int) -> str:
    losses = case.observation.per_rank.get("loss")
    value = f" {float(losses[rank]):.4g}" if losses is not None and rank < len(losses) else ""
    return f"its loss{value} is as usual: its batch looks normal"
