"""Telling the outside: a judged attempt as a StepReport or an Incident, and listeners that may fail without harm."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from resilient.coordinator.events import Incident, Listener, StepReport
from resilient.coordinator.judge import Judge, Judgement
from resilient.diagnosis.symptoms import causes
from resilient.engines.base import Engine
from resilient.signals import Exchanged

_SIGNALS = (
    "logit_max",
    "attention_entropy",
    "attention_logit_max",
    "loss_max",
    "update_norm",
    "adam_lag",
    "weight_norm",
    "longest",
    "padding",
    "eval_loss",
    "eval_step",
    "entropy",
    "repetition",
)


class Listeners:
    """All listeners of this rank. One that raises is dropped, loudly; `dropped` says that it has happened."""

    def __init__(self, listeners: Sequence[Listener], rank: int) -> None:
        self._listeners = list(listeners)
        self._rank = rank
        self.dropped = False

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def tell(self, method: str, *args: Any) -> None:
        """Call `method` (step | incident | event) on each."""
        for listener in list(self._listeners):
            try:
                getattr(listener, method)(*args)
            except Exception as error:
                self._listeners.remove(listener)
                self.dropped = True
                print(
                    f"resilient: WARNING: rank {self._rank}: {type(listener).__name__} failed and is dropped: {error}",
                    file=sys.stderr,
                    flush=True,
                )

    def close(self) -> None:
        for listener in self._listeners:
            try:
                listener.close()
            except Exception as error:
                print(f"resilient: closing {type(listener).__name__} failed: {error}", file=sys.stderr)
        self._listeners.clear()


def step_report(
    judgement: Judgement,
    table: Exchanged,
    judge: Judge,
    *,
    applied: bool,
    lr: float,
    time_s: float,
    position: int,
    attempts: int,
) -> StepReport:
    """What became of one judged attempt. lr: used, or that would have been. position: of the data window."""
    named = {k: v for k, v in judgement.observation.values.items() if k in _SIGNALS or "/" in k}
    level = judge.level()
    named["wait_s"] = table.largest("wait_s")
    return StepReport(
        step=table.step,
        attempt=table.attempt,
        applied=applied,
        action=judgement.decision.action,
        loss=table.loss,
        grad_norm=table.grad_norm,
        lr=lr,
        loss_scale=judgement.observation.values["loss_scale"],
        tokens=table.tokens,
        time_s=time_s,
        signals=named,
        ranks={name: table.spread(name) for name in ("loss", "local_grad_norm")},
        level=level.letter,
        stability=level.number,
        drivers=level.drivers,
        budget_left=judge.ladder.budget_left(attempts),
        position=position,
    )


def unguarded_report(
    engine: Engine, step: int, attempts: int, loss: float, tokens: float, seconds: float
) -> StepReport:
    """A sign of life: this rank's last micro-step's loss, and nothing that was not measured."""
    lr, scale = engine.lr(), engine.loss_scale()
    return StepReport(step, attempts, True, "apply", loss, math.nan, lr, scale, tokens, seconds, level="-")


def verdict_report(judgement: Judgement) -> dict[str, Any]:
    """What is behind a warning; empty where that cannot be said."""
    verdict = judgement.verdict
    if verdict is None or (verdict.cause == "unknown" and not verdict.ranks):
        return {}
    about = {k: v for k, v in asdict(verdict).items() if k not in ("findings", "severity", "scale_overflow")}
    return {"step": judgement.decision.step, "attempt": judgement.decision.attempt, **about}


def incident_report(judgement: Judgement, target: int | None, excluded: tuple[int, int] | None) -> Incident:
    """A verdict and what was done about it. target, excluded: of a rollback."""
    decision, verdict = judgement.decision, judgement.verdict
    assert verdict is not None
    knobs = {"lr_factor": decision.knobs.lr_factor, "clip_factor": decision.knobs.clip_factor}
    return Incident(
        step=decision.step,
        attempt=decision.attempt,
        cause=verdict.cause,
        ranks=verdict.ranks,
        action=f"would {decision.would}" if decision.would else decision.action,
        onset_step=decision.onset_step,
        place=verdict.place,
        target_step=target,
        skipped_windows=excluded,
        knobs={} if decision.knobs.neutral else knobs,
        confidence=verdict.confidence,
        evidence=verdict.evidence,
        reason=decision.reason,
        likely=tuple(
            f"{c.cause} ({c.confidence:.1f}): {c.detail}" + (f" -> {c.remedies[0]}" if c.remedies else "")
            for c in causes(verdict.findings, limit=3)
            if c.cause != "unknown"
        ),
    )
