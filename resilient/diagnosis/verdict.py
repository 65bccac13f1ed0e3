"""Findings -> verdict: the table of DESIGN 5, as far as this attempt's measurements support it.

| what was found | what else is known | verdict |
|---|---|---|
| not finite in backward, dynamic fp16 scale, loss finite | - | precision (an overflow: the scaler's business) |
| not finite only after the reduction | all that was sent is finite | communication; precision if fp16 sums may overflow |
| not finite on few ranks | no token to learn from there | data |
| not finite on few ranks | the window run again | as below; else unknown |
| not finite on most ranks at once | the update or the logits grew before | optimizer |
| not finite on most ranks at once | nothing grew | precision |
| the reduction check fails | a probe confirms | communication; a second pass names the receiver |
| replicas differ | the check holds / there is none | compute / communication suspected |
| the global norm or loss, and with it that of one rank | - | as for that rank |
| local norm of one rank, its loss too | - | data (that rank's batch) |
| local norm of one rank, its loss normal | the check holds | compute suspected |
| local norm of one rank, its loss normal | there is no check | communication suspected (the single-rank spike, S19) |
| ... either, one step within what this run's noise may reach | nothing else | unknown |
| ... any of these | run again there: normal | compute (passing) |
| ... any of these | off again there, clean on a peer | compute (that machine) |
| ... any of these | off on the peer too | data |
| all ranks together | the loss scale fell again and again | precision |
| all ranks together | the update was off first, or the LR was just raised | optimizer |
| all ranks together, a reduced norm that no mean can have | there is no check | communication suspected |
| all ranks together, and usual again with the next window | - | data |
| all ranks together, once | - | data suspected: the same weights were fine one batch ago |
| all ranks together, on several batches while the weights stood still | - | optimizer: the weights are the common factor |
| a rank that the others wait for | longest compute / compute as usual | compute / communication |
| all ranks wait longer than usual | a probe names slow links | communication, the rank that they share; of two ranks both |
| ranks fed alike, samplers or random streams that disagree | - | data (how it is set up) |

A verdict that is not supported says `unknown`. Confidence is a statement about how many checks stand behind the row,
not a probability; `unchecked` says what would have told more. A verdict of `communication` or `compute` is never a reason
to leave samples out: policies read the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from resilient.diagnosis import rerun
from resilient.diagnosis.case import NOT_PROBED, NOT_RERUN, Case, nothing_to_learn
from resilient.diagnosis.one_rank import outlier
from resilient.diagnosis.together import together
from resilient.diagnosis.wire import fed, reduction, replicas, slow
from resilient.signals import Confirmation, Finding, LinkReport, Observation, Severity, Verdict

_ABOUT_THE_ATTEMPT = {"nonfinite", "point", "confirmed", "ranks", "check", "replica"}
_GROWTH = ("update_norm", "adam_lag", "grad_norm", "weight_norm", "logit_max", "attention_logit_max")


def diagnose(
    observation: Observation,
    findings: Sequence[Finding],
    *,
    dynamic_scale: bool,
    refused_in_a_row: int,
    weights_proven: bool = False,
    confirmation: Confirmation | None = None,
    links: LinkReport | None = None,
    hosts: Sequence[str] = (),
    lr_change: float = 1.0,
) -> Verdict | None:
    """The verdict on one attempt, or None when nothing was found.

    dynamic_scale: the engine's loss scale adapts by itself. refused_in_a_row: attempts refused just before this one;
    the weights have not moved since. weights_proven: they were restored lately and have run cleanly since.
    confirmation: of a re-run, where one was made; links: of a probe. hosts: host name of each rank. lr_change: LR of the
    last applied step over that of the one before it."""
    if not findings:
        return None
    worst = max(map(_weight, findings))
    leading = [f for f in findings if _weight(f) is worst]
    case = Case(
        observation,
        tuple(findings),
        worst,
        dynamic_scale,
        refused_in_a_row,
        weights_proven,
        confirmation,
        links,
        hosts,
        lr_change,
    )
    by = {
        s: [f for f in leading if f.statistic == s] for s in ("nonfinite", "check", "replica", "ranks", "batch", "time")
    }
    nonfinite = [f for f in by["nonfinite"] if f.place != "reduction"]
    if nonfinite:
        return _nonfinite(case, nonfinite[0])
    if by["check"] or by["nonfinite"]:
        return reduction(case, [*by["check"], *by["nonfinite"]])
    if by["replica"] and worst >= Severity.ACT:
        return replicas(case, by["replica"])
    ranked = [f for f in by["ranks"] if f.ranks] or _behind_it(leading, findings)
    if ranked:
        return outlier(case, ranked)
    others = [f for f in leading if f.statistic not in ("replica", "batch", "time")]
    if others and worst >= Severity.ACT:
        return together(case, others)
    for found, row in ((by["replica"], replicas), (by["batch"], fed), (by["time"], slow)):
        if found:
            return row(case, found)
    return together(case, leading)


def wants_confirmation(verdict: Verdict) -> int | None:
    """The rank whose window is worth running again, there and on a peer, before anything is done; None: there is none."""
    if verdict.severity < Severity.ACT or NOT_RERUN not in verdict.unchecked:
        return None
    named = [f for f in verdict.findings if f.statistic in ("ranks", "nonfinite") and set(f.ranks) & set(verdict.ranks)]
    if not named:
        return None
    worst = max(named, key=lambda f: (_weight(f), f.score))
    return next(r for r in worst.ranks if r in verdict.ranks)


def wants_probe(verdict: Verdict) -> bool:
    """A probe of the links would tell more: the wire is suspected, or has failed, and was not looked at."""
    return verdict.severity >= Severity.WARN and NOT_PROBED in verdict.unchecked


def _behind_it(leading: Sequence[Finding], findings: Sequence[Finding]) -> list[Finding]:
    """Ranks whose own value is up, if all that leads is the global value of the same kind: it is up because of theirs."""
    signals = {f.signal.split("/")[0] for f in leading}
    own = (
        "local_grad_norm" if signals <= {"grad_norm", "layers"} else "loss" if signals <= {"loss", "loss_max"} else None
    )
    return [
        f for f in findings if f.statistic == "ranks" and f.ranks and f.signal == own and _weight(f) >= Severity.WARN
    ]


def _weight(finding: Finding) -> Severity:
    """Severity of a finding for the verdict on this attempt. What a slow statistic has seen (level, drift, trend, scale,
    drop, layers, collapse, time, batch, passed) is no fault of this attempt: refusing it would cure nothing, so it warns at most."""
    return finding.severity if finding.statistic in _ABOUT_THE_ATTEMPT else min(finding.severity, Severity.WARN)


def _nonfinite(case: Case, finding: Finding) -> Verdict:
    """Before the reduction, where each rank's values are its own (BR-37, T6)."""
    ranks, onset, place = finding.ranks, finding.onset_step, finding.place
    if place == "backward" and case.dynamic_scale:
        scale = case.observation.values.get("loss_scale", 1.0)
        told = f"loss is finite and the loss scale is {scale:g}: an overflow of the scaled gradient"
        return case.verdict(
            "precision", 0.8, (finding.message, told), ranks=ranks, onset=onset, place=place, scale_overflow=True
        )
    if 0 < 2 * len(ranks) <= case.world:
        unfed = nothing_to_learn(case, ranks)
        if unfed:
            return case.verdict("data", 0.8, (finding.message, unfed), ranks=ranks, onset=onset, place=place)
        again = rerun.read(case, ranks)
        told = "the other ranks were finite on the same weights: batch or machine"
        return case.verdict(
            again.cause or "unknown",
            again.confidence or 0.5,
            (finding.message, told, *again.evidence),
            ranks=ranks,
            onset=onset,
            place=place,
            unchecked=again.unchecked,
        )
    grown = [
        f
        for f in case.findings
        if f.statistic != "nonfinite"
        and f.severity >= Severity.WARN
        and f.signal.split("/")[0] in _GROWTH
        and not f.ranks
    ]
    if grown:
        first = min(grown, key=lambda f: (f.onset_step, -f.score))
        told = f"the weights were running away before: {first.message}"
        begun = min(onset, first.onset_step)
        return case.verdict("optimizer", 0.6, (finding.message, told), ranks=ranks, onset=begun, place=place)
    sketch = case.observation.sketch  # counts ranks that it cannot name
    count = len(ranks) if sketch is None or place is None else sketch.named.get(place, (0, ()))[0]
    if case.world > 1 and count:
        told = (
            f"on {count} of {case.world} ranks at once, each with its own batch: what they share is the weights and the "
            "number format"
        )
        doubt = ("whether the weights themselves are finite", "whether the same batches are finite in fp32")
        return case.verdict(
            "precision", 0.5, (finding.message, told), ranks=ranks, onset=onset, place=place, unchecked=doubt
        )
    unclear = ("batch, machine and number format were not told apart",)
    return case.verdict("unknown", 0.5, (finding.message,), ranks=ranks, onset=onset, place=place, unchecked=unclear)
