"""What the coordinator tells the outside: one report a step and named events. Telemetry listens; nothing listens back.

A listener may fail; it is then dropped loudly (or the job stops jointly, `on_guard_failure: stop`). It never delays a vote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from resilient.signals import Action


@dataclass(frozen=True)
class StepReport:
    """One attempt, as rank 0 writes it to steps.jsonl. All numbers are plain floats and may be NaN."""

    step: int
    attempt: int
    applied: bool
    action: Action
    loss: float
    grad_norm: float
    lr: float  # what the optimizer used (knobs included), or would have used
    loss_scale: float
    tokens: float
    time_s: float  # wall time of the attempt
    signals: Mapping[str, float] = field(default_factory=dict)  # further named signals
    ranks: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # signal -> {median, spread, outliers: {rank: value}}
    level: str = ""  # stability letter, A-E
    stability: float | None = None  # 100 calm .. 0 broken; None: not judged
    drivers: tuple[tuple[str, float], ...] = ()  # (signal/statistic, share) behind a stability below 100
    budget_left: int = 0
    position: int = 0  # data windows consumed so far


@dataclass(frozen=True)
class Incident:
    """A verdict and what was done about it."""

    step: int
    attempt: int
    cause: str
    ranks: tuple[int, ...]
    action: str
    onset_step: int | None
    place: str | None = None
    target_step: int | None = None  # rollback: the step gone back to
    skipped_windows: tuple[int, int] | None = None  # rollback: [first, last) data windows never trained on again
    knobs: Mapping[str, Any] = field(default_factory=dict)
    confidence: float = 0.0
    evidence: tuple[str, ...] = ()
    reason: str = ""
    likely: tuple[str, ...] = ()  # rows of the symptom table that fit, most confident first, each with a remedy


class Listener(Protocol):
    """Called on every rank; implementations that write files do so on rank 0 only."""

    def step(self, report: StepReport) -> None: ...

    def incident(self, incident: Incident) -> None: ...

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """kind: start | resume | replay | snapshot | checkpoint | rollback | evaluation | alarm | nan_origin |
        warning | guard_failed | end."""

    def close(self) -> None: ...
