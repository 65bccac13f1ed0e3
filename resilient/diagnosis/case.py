"""What a verdict is made from, and the sentences that several rows of the table share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from resilient.signals import Cause, Confirmation, Finding, LinkReport, Observation, Place, Severity, Verdict

NOT_RERUN = (
    "the window was not run again on that rank and on a peer: its batch and its machine are not told apart for good"
)
NOT_PROBED = "the links were not probed"
NOT_CHECKED = "the reduction was not checked"


@dataclass(frozen=True)
class Case:
    """One attempt, and what has been looked into. As the arguments of `diagnose`; severity: of the verdict."""

    observation: Observation
    findings: tuple[Finding, ...]
    severity: Severity
    dynamic_scale: bool
    refused_in_a_row: int
    weights_proven: bool
    confirmation: Confirmation | None
    links: LinkReport | None
    hosts: Sequence[str]
    lr_change: float

    @property
    def world(self) -> int:
        """Number of ranks; 0 if the observation has no ranks."""
        return self.observation.world

    @property
    def check(self) -> Literal["holds", "fails", "open"]:
        """Of the reduction. open: there is none, or it cannot say."""
        found = [f for f in self.findings if f.statistic == "check"]
        if any(f.severity >= Severity.ACT for f in found):
            return "fails"
        checks = self.observation.checks
        if found or checks is None or not checks.plan.names:
            return "open"
        finite = all(np.isfinite(part).all() for part in (checks.before, checks.after, checks.sq))
        return "holds" if finite else "open"

    def verdict(
        self,
        cause: Cause,
        confidence: float,
        evidence: Sequence[str],
        *,
        ranks: Sequence[int] = (),
        onset: int,
        place: Place | None = None,
        unchecked: Sequence[str] = (),
        scale_overflow: bool = False,
    ) -> Verdict:
        """hosts are filled in; empty sentences are left out."""
        ranks = tuple(sorted(ranks))
        named = tuple(dict.fromkeys(self.hosts[r] for r in ranks if r < len(self.hosts)))
        told = [e for e in evidence if e]
        if len(named) == 1 and len(ranks) > 1 and len(set(self.hosts)) > 1:
            told.append(f"all of these ranks are on {named[0]}")
        return Verdict(
            cause=cause,
            severity=self.severity,
            ranks=ranks,
            onset_step=onset,
            confidence=round(confidence, 3),
            evidence=tuple(told),
            findings=self.findings,
            place=place,
            hosts=named,
            unchecked=tuple(dict.fromkeys(u for u in unchecked if u)),
            scale_overflow=scale_overflow,
        )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Such as `rank 3` or `ranks 1, 2, 3, 4 and 9 more`."""
    shown = ", ".join(map(str, sorted(ranks)[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + shown


def nothing_to_learn(case: Case, ranks: Sequence[int]) -> str:
    """Says so if none of these ranks' tokens carries loss while others' do; else empty."""
    observation = case.observation
    empty = bool(ranks) and observation.unfed(ranks) and observation.total("tokens") > 0
    return f"no token carries loss on {ranks_in_words(ranks)}: an empty batch, or all of it padding" if empty else ""
