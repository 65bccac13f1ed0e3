"""Rows about what lies between the ranks: the reduction check, replicas that differ, time, and what ranks are fed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from resilient.diagnosis.case import NOT_CHECKED, Case, ranks_in_words
from resilient.diagnosis.one_rank import probed
from resilient.signals import Cause, Finding, Severity, Verdict

_LARGEST_FP16 = 65504.0


def reduction(case: Case, found: Sequence[Finding]) -> Verdict:
    """The check fails, or the reduced gradient is not finite although all that was sent is (BR-03)."""
    worst = max(found, key=lambda f: (f.statistic == "check", f.score))
    evidence = [worst.message, *(f.message for f in found if f is not worst)]
    ranks = sorted({r for f in found if f.statistic == worst.statistic for r in f.ranks})
    if len(ranks) == case.world:
        ranks = []  # all of them: nobody in particular
    onset = min(f.onset_step for f in found)
    if worst.severity < Severity.ACT:
        doubt = ("whether something else than the transport's rounding is in it",)
        return case.verdict("precision", 0.4, evidence, onset=onset, place="reduction", unchecked=doubt)
    overflow = _may_overflow(case) if math.isinf(worst.score) else ""
    if overflow:
        evidence.append(overflow)
        return case.verdict(
            "precision", 0.6, evidence, ranks=ranks, onset=onset, place="reduction", scale_overflow=True
        )
    if worst.statistic != "check":
        evidence.append("every rank's own gradient was finite before the reduction")
    beside = [f for f in case.findings if f.signal == "local_grad_norm" and f.statistic == "ranks"]
    evidence += [f"before the reduction: {f.message}" for f in beside[:1]]
    unchecked: list[str] = [] if ranks else ["which rank received it wrong was not named"]
    confidence = 0.9 if worst.statistic == "check" else 0.8
    cause, confidence = probed(case, ranks, "communication", confidence, evidence, unchecked)
    if cause == "compute":  # by the self-test of the machine; the wire is what failed here all the same
        cause = "communication"
    return case.verdict(cause, confidence, evidence, ranks=ranks, onset=onset, place="reduction", unchecked=unchecked)


def _may_overflow(case: Case) -> str:
    """fp16 with a dynamic scale: finite contributions whose sum leaves the range are the scaler's business."""
    norms = case.observation.total("local_grad_norm")
    scale = case.observation.values.get("loss_scale", 1.0)
    if not case.dynamic_scale or not math.isfinite(norms):
        return ""
    most = norms * scale
    if most < _LARGEST_FP16:
        return ""
    return f"the ranks' norms add up to {most:.3g} with the loss scale {scale:g}: their sum may leave fp16's range"


def replicas(case: Case, found: Sequence[Finding]) -> Verdict:
    """Ranks that must hold the same do not (BR-39): parameters and optimizer state, or random streams (BR-14)."""
    worst = max(found, key=lambda f: (f.severity, f.signal == "digest_parameters"))
    same = [f for f in found if f.severity is worst.severity]
    ranks = sorted({r for f in same for r in f.ranks})
    onset = min(f.onset_step for f in same)
    evidence = [f.message for f in sorted(same, key=lambda f: f is not worst)]
    unchecked: list[str] = []
    if worst.severity < Severity.ACT:
        if all(f.signal.startswith("digest_rng") for f in same):
            evidence.append(
                "seeds, or random states that were restored to the wrong rank: nothing in the machine is broken"
            )
            return case.verdict("data", 0.7, evidence, ranks=ranks, onset=onset, place=worst.place)
        return case.verdict("unknown", 0.4, evidence, ranks=ranks, onset=onset, place=worst.place)
    cause: Cause
    if case.check == "holds":
        cause, confidence = "compute", 0.7
        evidence.append("the reduction check holds: they received the same, so memory or the optimizer step made it")
    else:
        cause, confidence = "communication", 0.4
        unchecked.append(NOT_CHECKED + ": a lost reduction and damaged memory look the same")
    if any("none can be told to be right" in f.message or "no majority" in f.message for f in same):
        unchecked.append("which of them is wrong")
    cause, confidence = probed(case, ranks, cause, confidence, evidence, unchecked)
    return case.verdict(cause, confidence, evidence, ranks=ranks, onset=onset, place="optimizer", unchecked=unchecked)


def fed(case: Case, found: Sequence[Finding]) -> Verdict:
    """Two ranks on the same samples, or samplers that disagree (S18)."""
    ranks = sorted({r for f in found for r in f.ranks})
    confidence = 0.85 if case.severity >= Severity.WARN else 0.4
    evidence = [f.message for f in found]
    return case.verdict("data", confidence, evidence, ranks=ranks, onset=min(f.onset_step for f in found))


def slow(case: Case, found: Sequence[Finding]) -> Verdict:
    """A rank that the others wait for, or a wire that all wait for."""
    computing = [f for f in found if f.signal == "compute_s"]
    named = computing or list(found)
    ranks = sorted({r for f in named for r in f.ranks})
    evidence = [f.message for f in named]
    unchecked: list[str] = []
    cause: Cause
    if computing:
        cause, confidence = "compute", 0.7
        if case.links is not None and set(ranks) & set(case.links.slow_ranks):
            evidence.append(f"{ranks_in_words(sorted(set(ranks) & set(case.links.slow_ranks)))}: slow in the self-test")
            confidence = 0.9
        elif case.links is None:
            unchecked.append("the machine's speed was not tested: more work (longer batches) looks the same")
    else:
        if not ranks and case.links is not None:
            ranks = _common(case.links.slow_pairs)
        if not ranks and case.world == 2:
            ranks = [0, 1]
            evidence.append("of two ranks there is one link, and both are at its ends")
        cause, confidence = probed(case, ranks, "communication", 0.6, evidence, unchecked)
    return case.verdict(
        cause, confidence, evidence, ranks=ranks, onset=min(f.onset_step for f in named), unchecked=unchecked
    )


def _common(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The rank that all slow links have in common, else both ends of the only one."""
    if not pairs:
        return []
    shared = set(pairs[0]).intersection(*map(set, pairs))
    return sorted(shared)
