"""Findings -> likely causes with evidence and remedies, by the rows of symptom_table.py. Pure.

`causes(findings, facts)` is used by `resilient analyze` on the alarms of a log and by incidents on the findings of a
live run; `markdown()` renders the table for the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from resilient.diagnosis.symptom_table import FACTS, SYMPTOMS, Condition, Sign, Symptom
from resilient.signals import Alarm, Cause, Finding, Severity

_MOST = 0.95  # nothing read from curves alone is certain


@dataclass(frozen=True)
class CauseReport:
    """A likely cause. symptom: id of the row; detail: the cause in words; rows: requirement ids."""

    cause: Cause
    confidence: float  # 0..1
    detail: str
    evidence: tuple[str, ...]
    remedies: tuple[str, ...]
    rows: tuple[str, ...]
    symptom: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def causes(
    findings: Sequence[Finding | Alarm], facts: Mapping[str, str] | None = None, limit: int = 6
) -> tuple[CauseReport, ...]:
    """The rows that match, most confident first, at most `limit`. Empty: nothing is off.

    findings: those below `warn` are not looked at. facts: name of FACTS -> the sentence that supports it here; an unknown
    name raises ValueError. When something is off but no row explains it, one report with the cause `unknown` says so."""
    facts = dict(facts or {})
    unknown = sorted(facts.keys() - FACTS.keys())
    if unknown:
        raise ValueError(f"no such facts: {', '.join(unknown)}; there are: {', '.join(FACTS)}")
    loud = [f for f in findings if not isinstance(f, Finding) or f.severity >= Severity.WARN]
    reports = [report for row in SYMPTOMS if (report := _match(row, loud, facts)) is not None]
    if not reports and (loud or facts):
        return (_abstain(loud, facts),)
    return tuple(sorted(reports, key=lambda r: -r.confidence)[:limit])


def _match(row: Symptom, findings: Sequence[Finding | Alarm], facts: Mapping[str, str]) -> CauseReport | None:
    met = [_meets(condition, findings, facts) for condition in row.needs]
    some = [found for condition in row.either if (found := _meets(condition, findings, facts)) is not None]
    if any(shown is None for shown in met) or (row.either and not some):
        return None
    if any(_meets(condition, findings, facts) is not None for condition in row.unless):
        return None
    shown = [s for s in (*met, *some) if s is not None]
    confidence = row.confidence
    for condition, more in row.stronger:
        also = _meets(condition, findings, facts)
        if also is not None:
            confidence += more
            shown.append(also)
    evidence = []
    template = row.evidence or "{signal}/{statistic} from step {onset} on: {message}"
    for item in shown:
        if isinstance(item, str):
            evidence.append(item)
        else:
            evidence.append(_told(item, template))
            template = "{signal}/{statistic} from step {onset} on: {message}"
    return CauseReport(
        cause=row.cause,
        confidence=round(min(confidence, _MOST), 3),
        detail=row.detail,
        evidence=tuple(dict.fromkeys(evidence)),
        remedies=tuple(str(remedy) for remedy in row.remedies),
        rows=row.rows,
        symptom=row.id,
    )


def _meets(
    condition: Condition, findings: Sequence[Finding | Alarm], facts: Mapping[str, str]
) -> Finding | Alarm | str | None:
    """What shows the condition: the earliest such finding, or the sentence behind the fact; None if nothing does."""
    if isinstance(condition, str):
        return facts.get(condition)
    shown = [f for f in findings if _shows(condition, f)]
    if not shown:
        return None
    first = min(shown, key=lambda f: (f.onset_step, f.step))
    rivals = [f.onset_step for f in findings if f.signal in condition.before and f.signal != first.signal]
    return None if rivals and min(rivals) < first.onset_step else first


def _shows(sign: Sign, finding: Finding | Alarm) -> bool:
    if sign.ranks != "any" and bool(finding.ranks) != (sign.ranks == "some"):
        return False
    if sign.statistics and finding.statistic not in sign.statistics:
        return False
    return any(fnmatchcase(finding.signal, pattern) for pattern in sign.signals)


def _told(finding: Finding | Alarm, template: str) -> str:
    ranks = finding.ranks
    return template.format(
        signal=finding.signal,
        statistic=finding.statistic,
        step=finding.step,
        onset=finding.onset_step,
        score=f"{finding.score:.3g}",
        ranks=("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks)) if ranks else "all ranks",
        message=finding.message or f"score {finding.score:.3g}",
    )


def _abstain(findings: Sequence[Finding | Alarm], facts: Mapping[str, str]) -> CauseReport:
    told = [_told(f, "{signal}/{statistic} at step {step}: {message}") for f in findings[:3]]
    return CauseReport(
        cause="unknown",
        confidence=0.2,
        detail="no row of the symptom table explains this",
        evidence=(*told, *facts.values()),
        remedies=(
            "keep the newest checkpoint before the onset, and record more: gradient norm per rank, update norm, peak logit",
            "repeat the stretch with the same seed: does it recur, does it follow the batch? [T4]",
        ),
        rows=("S18", "T4"),
        symptom="unexplained",
    )


def markdown() -> str:
    """The table as a page of the documentation (docs/symptoms.md)."""
    lines = [
        "# Symptoms, causes, remedies",
        "",
        "What the findings of a run or of a log point to. `resilient analyze` and incidents read the same table. Generated",
        "from `resilient/diagnosis/symptom_table.py`; change it there.",
        "",
        "Confidence says how many checks stand behind a row; it is not a probability. 0.3: a place to look. 0.5: the usual",
        "cause. 0.7: well supported. When no row matches, the cause is `unknown`.",
        "",
        "| symptom | cause | confidence | requirements |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| [{row.symptom}](#{_anchor(row.symptom)}) | {row.cause} | {row.confidence:g} | {', '.join(row.rows)} |"
        for row in SYMPTOMS
    ]
    for row in SYMPTOMS:
        lines += ["", f"## {row.symptom}", "", f"`{row.id}`: {row.cause}. {_sentence(row.detail)}", ""]
        for label, conditions in (("Needs", row.needs), ("One of", row.either), ("Unless", row.unless)):
            if conditions:
                lines.append(f"- {label}: {'; '.join(map(_in_words, conditions))}.")
        if row.stronger:
            more = "; ".join(f"{_in_words(condition)} (+{delta:g})" for condition, delta in row.stronger)
            lines.append(f"- Stronger with: {more}.")
        lines += ["", *(f"{i}. {_sentence(str(remedy))}" for i, remedy in enumerate(row.remedies, start=1))]
    return "\n".join(lines) + "\n"


def _in_words(condition: Condition) -> str:
    return FACTS[condition] if isinstance(condition, str) else condition.in_words()


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "]")) else ".")


def _anchor(heading: str) -> str:
    """As the documentation's own links have it."""
    kept = "".join(c for c in heading.strip().lower() if c.isalnum() or c in "-_ ")
    return kept.replace(" ", "-")
