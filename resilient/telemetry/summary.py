"""summary.json: what a run came to, over all its generations.

Accumulated from the same calls whether they come live from the coordinator or again from a run's files, so that a
restarted run, a killed one and a finished one are counted by one rule.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilient.coordinator.events import Incident, StepReport
from resilient.telemetry.journal import read_journal, read_steps

STATUSES = ("done", "stopped", "preempted", "failed")

_MEMORY = 10_000  # steps behind the newest whose loss is kept, for final_loss after a rollback


class Summary:
    """A Listener that counts.

    attempts = applied + skipped + retried, where skipped are all refused attempts (also those that led to a rollback or a
    stop) but those whose window was run again at once, the retried;
    applied also counts steps that were undone later. steps: where training stands. steps_lost: applied steps that a
    rollback or a restart undid, so that applied = steps + steps_lost for a run that began at step 0.
    An unguarded stretch reports no steps: there the coordinator's own counters, told at the end, are taken.
    final_loss: of the last applied attempt that still stands. eval_loss: the newest evaluation. wall_s: time during
    which some generation was writing. nonfinite_loss, nonfinite_grad: attempts whose raw value was not finite, or the
    coordinator's counts of the same over ranks and micro-steps where it tells them (BR-44)."""

    def __init__(self, run_id: str, *, engine: str = "", policy: str = "") -> None:
        self.run_id = run_id
        self.engine = engine
        self.policy = policy
        self.generation = 0
        self.status: str | None = None
        self.steps = 0
        self.attempts = 0
        self.applied = 0
        self.retried = 0
        self.rollbacks = 0
        self.steps_lost = 0
        self.nonfinite_loss = 0
        self.nonfinite_grad = 0
        self.final_loss: float | None = None
        self.eval_loss: float | None = None
        self.budget_left: int | None = None
        self.incidents: list[dict[str, Any]] = []
        self._losses: dict[int, float] = {}  # applied step -> loss, the last _MEMORY of them
        self._earlier_wall_s = 0.0
        self._started = time.monotonic()
        self._frozen_wall_s: float | None = None

    @classmethod
    def replay(cls, path: Path, *, before_generation: int | None = None) -> Summary:
        """The summary of the run directory `path` from its steps.jsonl and journal.jsonl alone.

        before_generation: only what earlier starts wrote; the clock of this start then runs on top."""
        summary = cls(path.name)
        records = [*read_journal(path / "journal.jsonl"), *read_steps(path / "steps.jsonl")]
        records = [r for r in records if before_generation is None or r.get("generation", 0) < before_generation]
        records.sort(key=lambda r: (r.get("generation", 0), r.get("time", 0.0)))  # stable inside ties
        spans: dict[int, tuple[float, float]] = {}
        for record in records:
            generation, now = int(record.get("generation", 0)), float(record.get("time", 0.0))
            first, last = spans.get(generation, (now, now))
            spans[generation] = (min(first, now), max(last, now))
            if generation != summary.generation:  # a new start: how the last one ended no longer counts
                summary.generation, summary.status = generation, None
            summary._feed(record)
        wall = sum(last - first for first, last in spans.values())
        if before_generation is None:
            summary._frozen_wall_s = wall
        else:
            summary._earlier_wall_s, summary.generation, summary.status = wall, before_generation, None
        return summary

    def _feed(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        if kind is None:
            self._step(
                int(record["step"]),
                str(record.get("action", "")),
                bool(record.get("applied")),
                _number(record.get("loss")),
                _number(record.get("grad_norm")),
            )
            self.budget_left = record.get("budget_left", self.budget_left)
        elif kind == "incident":
            self._incident(record)
        else:
            self.event(kind, record)

    # -- Listener -----------------------------------------------------------------------------------------------

    def step(self, report: StepReport) -> None:
        self._step(report.step, report.action, report.applied, report.loss, report.grad_norm)
        self.budget_left = report.budget_left

    def incident(self, incident: Incident) -> None:
        self._incident(
            {
                "step": incident.step,
                "cause": incident.cause,
                "ranks": list(incident.ranks),
                "action": incident.action,
                "onset_step": incident.onset_step,
                "target_step": incident.target_step,
            }
        )

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Reads: start (engine, policy), resume (step), evaluation (loss), end (status, eval_loss, counters)."""
        if kind == "start":
            self.engine = str(fields.get("engine") or self.engine)
            self.policy = str(fields.get("policy") or self.policy)
        elif kind == "resume" and fields.get("step") is not None:
            self._go_back_to(int(fields["step"]))
        elif kind == "evaluation":
            self.eval_loss = _json_number(fields.get("loss", fields.get("eval_loss")))
        elif kind == "end":
            status = fields.get("status")
            self.status = status if status in STATUSES else "failed"
            if fields.get("eval_loss") is not None:
                self.eval_loss = _json_number(fields["eval_loss"])
            self._count_at_least(fields.get("counters") or {})

    def close(self) -> None:
        """Stop the clock."""
        self._frozen_wall_s = self.wall_s

    # -- counting -----------------------------------------------------------------------------------------------

    def _step(self, step: int, action: str, applied: bool, loss: float, grad_norm: float) -> None:
        self.attempts += 1
        self.retried += action == "retry"
        self.nonfinite_loss += not math.isfinite(loss)
        self.nonfinite_grad += not math.isfinite(grad_norm)
        if step <= self.steps and action != "rollback":  # standing further back than we knew: a restart
            self._go_back_to(step - 1)
        if applied:
            self.applied += 1
            self.steps = step
            self._losses[step] = loss
            self._losses.pop(step - _MEMORY, None)
            self.final_loss = _json_number(loss)

    def _incident(self, record: Mapping[str, Any]) -> None:
        self.incidents.append({key: record.get(key) for key in ("step", "cause", "ranks", "action", "onset_step")})
        if record.get("action") == "rollback":
            self.rollbacks += 1
            if record.get("target_step") is not None:
                self._go_back_to(int(record["target_step"]))

    def _go_back_to(self, step: int) -> None:
        if step < self.steps:
            self.steps_lost += self.steps - step
            for undone in range(step + 1, self.steps + 1):
                self._losses.pop(undone, None)
            self.final_loss = _json_number(self._losses.get(step))
            self.steps = step

    def _count_at_least(self, counters: Mapping[str, Any]) -> None:
        """Take over the coordinator's counters where they saw more than was reported step by step (policy=off, or the
        guard broke). They never count less, except after a kill, when the files know the attempts that were lost."""
        if counters.get("attempts", 0) > self.attempts:
            self.attempts, self.applied = int(counters["attempts"]), int(counters["applied"])
            self.rollbacks, self.steps_lost = int(counters["rollbacks"]), int(counters["steps_lost"])
            self.retried = int(counters["retried"])
            self.steps = self.applied - self.steps_lost
            self.final_loss = None  # nobody told it
        self.nonfinite_loss = max(self.nonfinite_loss, int(counters.get("nonfinite_loss", 0)))
        self.nonfinite_grad = max(self.nonfinite_grad, int(counters.get("nonfinite_grad", 0)))

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        return self.attempts - self.applied - self.retried

    @property
    def wall_s(self) -> float:
        if self._frozen_wall_s is not None:
            return self._frozen_wall_s
        return self._earlier_wall_s + time.monotonic() - self._started

    @property
    def named_ranks(self) -> list[int]:
        """Every rank that some incident named."""
        return sorted({int(rank) for incident in self.incidents for rank in incident["ranks"] or ()})

    def as_dict(self) -> dict[str, Any]:
        """summary.json. A run that never reported its end counts as failed."""
        return {
            "run_id": self.run_id,
            "status": self.status or "failed",
            "steps": self.steps,
            "final_loss": self.final_loss,
            "eval_loss": self.eval_loss,
            "attempts": self.attempts,
            "applied": self.applied,
            "skipped": self.skipped,
            "retried": self.retried,
            "rollbacks": self.rollbacks,
            "steps_lost": self.steps_lost,
            "incidents": self.incidents,
            "budget_left": self.budget_left,
            "wall_s": round(self.wall_s, 3),
            "nonfinite_loss": self.nonfinite_loss,
            "nonfinite_grad": self.nonfinite_grad,
            "named_ranks": self.named_ranks,
            "generation": self.generation,
            "engine": self.engine,
            "policy": self.policy,
        }


def _number(value: Any) -> float:
    """A number from a file, where null stands for what was not finite."""
    return float(value) if isinstance(value, int | float) else math.nan


def _json_number(value: Any) -> float | None:
    number = _number(value)
    return number if math.isfinite(number) else None
