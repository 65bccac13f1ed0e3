"""Runs told to real listeners: the calls a coordinator makes, with curves that look like training. Deterministic.

Nothing here writes a file: all that ends up on disk was written by RunRecorder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resilient.coordinator.events import Incident, Listener, StepReport
from resilient.telemetry.listeners import RunRecorder
from resilient.telemetry.run_directory import RunDirectory

CONFIG: dict[str, Any] = {
    "engine": {"name": "deepspeed", "zero_stage": 1, "precision": "bf16"},
    "model": {"name": "gpt_1m"},
    "optim": {"lr": 3e-4, "clip": 1.0, "betas": [0.9, 0.95]},
    "policy": {"name": "default", "mode": "act"},
    "run": {"root": "runs", "id": None, "steps": 120, "seed": 0, "resume": "auto"},
}


class Story:
    """Feeds listeners attempt by attempt and keeps the books a coordinator would keep."""

    def __init__(
        self, listeners: Sequence[Listener], *, step: int = 0, attempt: int = 0, total: int = 120, seed: int = 0
    ):
        self.listeners = list(listeners)
        self.done = step
        self.attempt = attempt
        self.position = step
        self.total = total
        self.budget = 20
        self.lr_factor = 1.0
        self._rng = np.random.default_rng(seed)

    def event(self, kind: str, **fields: Any) -> None:
        for listener in self.listeners:
            listener.event(kind, fields)

    def attempt_step(
        self, *, action: str = "apply", loss: float | None = None, norm: float | None = None, outlier: int | None = None
    ):
        """One attempt at the next step; `loss`/`norm` override the healthy curve."""
        step = self.done + 1
        self.attempt += 1
        healthy = 2.1 + 3.4 * math.exp(-step / 28) + float(self._rng.normal(0, 0.03))
        healthy_norm = (0.55 + 1.2 * math.exp(-step / 18)) * math.exp(float(self._rng.normal(0, 0.10)))
        local = healthy_norm * 1.25
        self.budget -= action != "apply"
        report = StepReport(
            step=step,
            attempt=self.attempt,
            applied=action == "apply",
            action=action,  # type: ignore[arg-type]
            loss=healthy if loss is None else loss,
            grad_norm=healthy_norm if norm is None else norm,
            lr=3e-4 * self.lr_factor * min(1.0, step / 12) * 0.5 * (1.05 + math.cos(math.pi * step / self.total)),
            loss_scale=1.0,
            tokens=16384.0,
            time_s=0.21,
            signals={"loss_max": healthy + 0.2, "logit_max": 8.0 + step / 50},
            ranks={
                "local_grad_norm": {
                    "median": local,
                    "spread": local * 0.12,
                    "outliers": {} if outlier is None else {outlier: local * 14},
                }
            },
            level="A" if action == "apply" else "D",
            budget_left=self.budget,
            position=self.position,
        )
        self.position += 1
        if action == "apply":
            self.done = step
            self.lr_factor = min(1.0, self.lr_factor + 0.7 / 20)
        for listener in self.listeners:
            listener.step(report)

    def incident(self, cause: str, action: str, **fields: Any) -> None:
        incident = Incident(
            step=self.done + 1,
            attempt=self.attempt,
            cause=cause,
            ranks=fields.pop("ranks", ()),
            action=action,
            onset_step=fields.pop("onset_step", self.done + 1),
            **fields,
        )
        for listener in self.listeners:
            listener.incident(incident)

    def healthy(self, until: int) -> None:
        while self.done < until:
            self.attempt_step()
            if self.done % 20 == 0:
                loss = 2.16 + 3.4 * math.exp(-self.done / 28)
                self.event("evaluation", step=self.done, loss=loss)

    def nan_on_rank(self, rank: int, place: str = "forward") -> None:
        self.attempt_step(action="skip", loss=math.nan, norm=math.nan)
        self.incident(
            "unknown",
            "skip",
            ranks=(rank,),
            place=place,
            confidence=0.5,
            evidence=("non-finite loss", "the other ranks were finite on the same weights"),
            reason="non-finite loss",
        )

    def spike_on_rank(self, rank: int) -> None:
        self.attempt_step(action="skip", norm=9.5, outlier=rank)
        self.incident(
            "communication",
            "skip",
            ranks=(rank,),
            confidence=0.6,
            evidence=(f"local_grad_norm of rank {rank} is 14 times its peers' (31.0 sigmas)",),
        )

    def poisoned_window(self, length: int = 8, back_to: int | None = None) -> None:
        """A loss that climbs, two refusals, then a rollback before the onset that skips the window."""
        onset, first = self.done + 1, self.position
        for i in range(length):
            self.attempt_step(loss=2.9 + 0.45 * i, norm=1.4 * 1.35**i)
        for i in range(2):
            self.attempt_step(action="skip", loss=7.5 + i, norm=30.0 + 9 * i)
            self.incident("data", "skip", onset_step=onset, confidence=0.5, reason="loss is 9.1 sigmas above its level")
        target = back_to if back_to is not None else (onset - 1) // 5 * 5
        self.attempt_step(action="rollback", loss=9.4, norm=52.0)
        self.incident(
            "data",
            "rollback",
            onset_step=onset,
            target_step=target,
            skipped_windows=(first, self.position),
            knobs={"lr_factor": 0.3, "clip_factor": 0.3},
            confidence=0.5,
            reason="loss is 12.4 sigmas above its level; 2 refusals in a row did not help",
        )
        self.event("rollback", from_step=self.done, step=target)
        self.done, self.lr_factor = target, 0.3

    def end(self, status: str = "done", eval_loss: float | None = 2.19) -> None:
        self.event("end", status=status, step=self.done, eval_loss=eval_loss, budget_left=self.budget)


def eventful_run(root: Path, run_id: str = "guarded", config: dict[str, Any] | None = None) -> Path:
    """A finished run with one of everything: NaN on a rank, a one-rank spike, a poisoned window, a kill and a restart."""
    with RunDirectory.open(root, run_id, config or CONFIG) as run:
        recorder = RunRecorder(run)
        story = Story([recorder])
        story.event("start", engine="deepspeed", policy="default", world=2)
        story.healthy(24)
        story.nan_on_rank(1)
        story.healthy(46)
        story.poisoned_window()
        story.healthy(73)
        story.spike_on_rank(0)
        story.healthy(88)
        attempts = story.attempt  # killed here: no end, no close
    with RunDirectory.open(root, run_id, config or CONFIG) as run:
        recorder = RunRecorder(run)
        story = Story([recorder], step=80, attempt=attempts, seed=1)
        story.event("start", engine="deepspeed", policy="default", world=2)
        story.event("resume", step=80, attempt=attempts)
        story.healthy(120)
        story.end()
        recorder.close()
    return run.path


def quiet_run(
    root: Path, run_id: str = "undisturbed", config: dict[str, Any] | None = None, eval_loss: float = 2.17
) -> Path:
    """An undisturbed run of the same length."""
    with RunDirectory.open(root, run_id, config or CONFIG) as run:
        recorder = RunRecorder(run)
        story = Story([recorder])
        story.event("start", engine="deepspeed", policy="default", world=2)
        story.healthy(120)
        story.end(eval_loss=eval_loss)
        recorder.close()
    return run.path
