"""The vocabulary between detectors, diagnosis and policies: Finding -> Verdict -> Decision.

It lives with the signals because detectors, diagnosis and policies all speak it and never import each other.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Literal

from resilient.signals.digest import short_digest
from resilient.signals.places import Place

Cause = Literal["data", "optimizer", "precision", "compute", "communication", "unknown"]
Action = Literal["apply", "retry", "skip", "rollback", "stop"]
"""retry: refuse the attempt and run the same window again, as it was: for a fault that was not the data's."""


class Severity(IntEnum):
    """How much a finding matters: watch (noted), warn (tell a person), act (a policy may refuse the step)."""

    WATCH = 1
    WARN = 2
    ACT = 3


@dataclass(frozen=True)
class Finding:
    """What one detector reports about one attempt."""

    detector: str
    signal: str
    severity: Severity
    score: float  # in the detector's own unit, usually robust sigmas; may be inf
    step: int
    onset_step: int  # first step at which this was off
    ranks: tuple[int, ...] = ()  # empty: all ranks together
    place: Place | None = None
    value: float | None = None
    reference: float | None = None
    message: str = ""
    statistic: str = (
        "point"  # nonfinite | point | confirmed | level | drift | trend | scale | drop | layers | collapse | ranks |
        # check (reduction) | replica (digests) | batch (fingerprints) | time (stragglers) | passed (one odd window)
    )
    alone: bool = False  # one odd step by itself: may be refused, but is no alarm until another one confirms it
    onset_confidence: float = 1.0  # 0..1: how sure the onset step is; a sharp jump is sure, a slow drift is not
    plausible: bool = False  # no further out than healthy noise of this run may be, now and then: no fault by itself


@dataclass(frozen=True)
class Alarm:
    """A finding of severity warn or act that is news: the first of its episode, an escalation, or a reminder.

    What a person is told, in the journal of a live run and by `resilient analyze` alike."""

    step: int
    severity: Literal["warn", "act"]
    signal: str
    statistic: str
    score: float
    onset_step: int
    onset_confidence: float
    message: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """Growth law fitted to a deteriorating signal, and the steps left until it blows up.

    supported False: the fit does not justify a number; `reason` says why and the steps are None."""

    supported: bool
    reason: str
    signal: str = ""
    model: Literal["power", "exponential", ""] = ""
    steps: float | None = None  # to blow-up, from this step on
    low: float | None = None  # 80 % interval of `steps`
    high: float | None = None


@dataclass(frozen=True)
class StabilityLevel:
    """How stable the run is at one step (S2). number: 100 calm .. 0 broken. letter: A calm, B watched, C warned,
    D acting, E broken. drivers: (signal/statistic, share of the missing stability 0..1), largest first."""

    number: float = 100.0
    letter: Literal["A", "B", "C", "D", "E"] = "A"
    drivers: tuple[tuple[str, float], ...] = ()
    forecast: Forecast | None = None


@dataclass(frozen=True)
class Verdict:
    """What the findings of one attempt mean."""

    cause: Cause
    severity: Severity
    ranks: tuple[int, ...]
    onset_step: int
    confidence: float  # 0..1
    evidence: tuple[str, ...]
    findings: tuple[Finding, ...]
    place: Place | None = None
    hosts: tuple[str, ...] = ()  # of the ranks
    unchecked: tuple[str, ...] = ()  # what was not established and would have told more
    scale_overflow: bool = False  # an ordinary fp16 loss-scale overflow: the scaler's business, not an incident


@dataclass(frozen=True)
class Knobs:
    """What is in effect for one optimizer step, on top of the schedule and the configured clip."""

    lr_factor: float = 1.0
    clip_factor: float = 1.0
    betas: tuple[float, float] | None = None

    @property
    def neutral(self) -> bool:
        return self == Knobs()


@dataclass(frozen=True)
class Decision:
    """What to do with the attempt. Taken by every rank for itself from the same table."""

    action: Action
    step: int
    attempt: int
    knobs: Knobs = field(default_factory=Knobs)
    reason: str = ""
    cause: Cause | None = None
    ranks: tuple[int, ...] = ()
    place: Place | None = None
    onset_step: int | None = None
    skip_data: bool = False  # rollback: do not train on the window from onset to now again
    overflow: bool = False  # skip: tell the loss scaler that this was an overflow
    incident: bool = False  # something a person wants to know
    would: Action | None = None  # observe mode: what would have been done

    def digest(self) -> float:
        """48 bits of the decision, exact in a float64: a column of the next table, compared on all ranks."""
        return short_digest(json.dumps(asdict(self), sort_keys=True, default=str).encode())

    def as_event(self) -> dict[str, Any]:
        """Plain JSON types for the journal."""
        return json.loads(json.dumps(asdict(self), default=str))
