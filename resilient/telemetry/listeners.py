"""Who listens to the coordinator on rank 0: the recorder, for the files, and the progress line, for the person.

Order and failure are independent: each keeps its own Summary, so losing one (disk full) does not silence the other.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from resilient.coordinator.events import Incident, StepReport
from resilient.telemetry.files import TelemetryError, plain, write_json
from resilient.telemetry.journal import JsonlWriter, step_record
from resilient.telemetry.messages import alarm_message, duration, incident_message, number, origin_message
from resilient.telemetry.run_directory import RunDirectory
from resilient.telemetry.summary import Summary

_SHOW_ALIKE = 2  # equal incidents in a row that are still shown after the first
_LEVEL_STYLE = {"A": "green", "B": "green", "C": "yellow", "D": "bold yellow", "E": "bold red"}
_STATUS_STYLE = {"done": "green", "stopped": "bold red", "preempted": "yellow", "failed": "bold red"}


class RunRecorder:
    """Writes steps.jsonl, journal.jsonl, incidents/ and, at the end, summary.json. Silent on ranks other than 0.

    Raises TelemetryError when something cannot be written; the coordinator then drops it or stops the job."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.summary = summary_of(run)
        self._clock = time.time() - time.monotonic()  # times in the files never go backwards within a generation
        self._steps = JsonlWriter(run.steps) if run.writable else None
        self._journal = JsonlWriter(run.journal) if run.writable else None

    def step(self, report: StepReport) -> None:
        self.summary.step(report)
        if self._steps is not None:
            self._steps.write({**step_record(report), **self._stamp()})

    def incident(self, incident: Incident) -> None:
        self.summary.incident(incident)
        if self._journal is None:
            return
        record = {**dataclasses.asdict(incident), **self._stamp()}
        self._journal.write({"kind": "incident", **record})
        write_json(self._incident_folder(incident) / "incident.json", record)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.summary.event(kind, fields)
        if self._journal is None:
            return
        own = {key if key not in ("kind", "time") else f"event.{key}": value for key, value in fields.items()}
        if kind == "start" and self.run.differences:
            own["kept_from_first_start"] = {key: [was, now] for key, was, now in self.run.differences}
        self._journal.write({**own, "kind": kind, **self._stamp()})
        if kind == "end":
            self.run.write_summary(self.summary.as_dict())

    def close(self) -> None:
        """Write summary.json if no `end` event did (status failed) and close the files. Idempotent."""
        if self._journal is None or self._steps is None:
            return
        steps, journal = self._steps, self._journal
        self._steps = self._journal = None
        self.summary.close()
        steps.close()
        journal.close()
        if self.run.writable and self.summary.status is None:
            self.run.write_summary(self.summary.as_dict())

    def _stamp(self) -> dict[str, Any]:
        return {"time": round(self._clock + time.monotonic(), 6), "generation": self.run.generation}

    def _incident_folder(self, incident: Incident) -> Any:
        """incidents/<step>-<cause>, or with a number behind it when the same thing comes back."""
        name = f"{incident.step}-{incident.cause}"
        for number_ in range(1, 10_000):
            folder = self.run.incidents / (name if number_ == 1 else f"{name}-{number_}")
            if not (folder / "incident.json").exists():
                break
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TelemetryError(f"cannot create {folder}: {error.strerror or error}") from error
        return folder


class Progress:
    """A live line when the stream is a terminal, one plain line every `log_every` steps when it is not.

    run: the run's directory; ranks other than 0 (attached) print nothing. None: print, without earlier generations.
    total_steps: applied steps to come to. stream: default stdout, or stderr when only that is a terminal."""

    def __init__(
        self,
        run: RunDirectory | None = None,
        *,
        total_steps: int | None = None,
        log_every: int = 10,
        stream: IO[str] | None = None,
    ) -> None:
        self.enabled = run is None or run.writable
        self.summary = summary_of(run) if run is not None else Summary("")
        self._run = run
        self._total = total_steps
        self._log_every = max(log_every, 1)
        self._console = Console(file=stream or _default_stream(), highlight=False, soft_wrap=True)
        self._live = self.enabled and self._console.is_terminal
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._drawn = 0.0
        self._tokens = self._seconds = 0.0
        self._said: int | None = None
        self._budget: int | None = None
        self._last_incident: tuple[Any, ...] = ()
        self._alike = 0  # incidents like the last one that followed it

    def step(self, report: StepReport) -> None:
        self.summary.step(report)
        self._budget = report.budget_left
        if not self.enabled:
            return
        if report.applied:
            self._tell_alike()
        decay = 0.9  # about the last ten attempts
        self._tokens = decay * self._tokens + report.tokens
        self._seconds = decay * self._seconds + report.time_s
        if self._live:
            self._draw(report)
        elif report.applied and report.step % self._log_every == 0 and report.step != self._said:
            self._said = report.step
            self._say(self._line(report))

    def incident(self, incident: Incident) -> None:
        self.summary.incident(incident)
        kind = (incident.step, incident.cause, incident.action, incident.ranks)
        if kind == self._last_incident:
            self._alike += 1
            if self._alike > _SHOW_ALIKE:
                return
        else:
            self._tell_alike()
            self._last_incident = kind
        if incident.action == "rollback":
            self._said = None
        style = {"skip": "yellow", "retry": "yellow", "rollback": "bold red", "stop": "bold red"}.get(
            incident.action, "cyan"
        )
        self._say(f"! {incident_message(incident, self._budget)}", style)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.summary.event(kind, fields)
        if kind == "start":
            self._say(self._start_line(fields))
        elif kind == "resume":
            self._say(f"resumed from step {fields.get('step', '?')}", "cyan")
        elif kind == "evaluation":
            step = fields.get("step", self.summary.steps)
            written = [f"{name} {number(fields[name])}" for name in ("entropy", "repetition") if name in fields]
            self._say(", ".join([f"evaluation at step {step}: loss {number(self.summary.eval_loss)}", *written]))
        elif kind == "alarm":
            self._say(f"~ {alarm_message(fields)}", "yellow" if fields.get("severity") == "warn" else "bold yellow")
        elif kind == "request":
            self._say(f"request {fields.get('action')}: {fields.get('outcome')}: {fields.get('message')}", "cyan")
        elif kind == "warning":
            self._say(f"warning: {_text(fields)}", "yellow")
        elif kind == "nan_origin":
            self._say(f"! {origin_message(fields)}", "yellow")
        elif kind == "guard_failed":
            self._say(f"!! the guard itself failed: {_text(fields)}", "bold red")
        elif kind == "end":
            self._stop_bar()
            if self.enabled:
                self._console.print(summary_table(self.summary.as_dict()))

    def close(self) -> None:
        self._tell_alike()
        self._stop_bar()

    def _tell_alike(self) -> None:
        """A long row of equal refusals is one line, not twenty; the journal has them all."""
        hidden = self._alike - _SHOW_ALIKE
        self._alike, self._last_incident = 0, ()
        if hidden > 0:
            self._say(f"! and {hidden} more like it; budget left {self._budget}", "yellow")

    # -- drawing ------------------------------------------------------------------------------------------------

    def _say(self, line: str, style: str = "") -> None:
        if self.enabled:
            (self._bar.console if self._bar is not None else self._console).print(Text(line, style=style))

    def _start_line(self, fields: Mapping[str, Any]) -> str:
        names = [f"{key} {fields[key]}" for key in ("engine", "precision", "policy", "fault") if fields.get(key)]
        world = fields.get("world")
        ranks = [f"{world} rank{'s' if world != 1 else ''}"] if world else []
        again = [f"start {self._run.generation + 1}"] if self._run is not None and self._run.resumed else []
        head = f"run {self._run.run_id}" if self._run is not None else "run"
        return ", ".join([head, *names, *ranks, *again])

    def _line(self, report: StepReport) -> str:
        total = f"/{self._total}" if self._total else ""
        return (
            f"step {report.step}{total}  loss {report.loss:.4f}  grad norm {report.grad_norm:.3g}  "
            f"lr {report.lr:.3g}  {self._rate()} tokens/s  level {_level(report)}  budget {report.budget_left}"
        )

    def _rate(self) -> str:
        return f"{self._tokens / self._seconds:,.0f}" if self._seconds > 0 else "-"

    def _draw(self, report: StepReport) -> None:
        if self._bar is None:
            self._bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}" if self._total else "step {task.completed:.0f}"),
                TextColumn("{task.fields[status]}"),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
            name = self._run.run_id if self._run is not None else "training"
            self._task = self._bar.add_task(name, total=self._total, status="")
        style = _LEVEL_STYLE.get(report.level, "dim")
        status = (
            f"loss {report.loss:.4f}  grad {report.grad_norm:.3g}  {self._rate()} tok/s  "
            f"level [{style}]{_level(report)}[/]  budget {report.budget_left}"
        )
        self._bar.update(self._task, completed=self.summary.steps, status=status)
        if time.monotonic() - self._drawn >= 0.1:
            self._bar.refresh()
            self._drawn = time.monotonic()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _level(report: StepReport) -> str:
    """Letter and number; below B what drives it, too."""
    text = report.level or "-"
    if report.stability is not None:
        text += f" {report.stability:.0f}"
    if report.level in ("C", "D", "E") and report.drivers:
        text += f" ({', '.join(signal for signal, _ in report.drivers[:2])})"
    return text


def summary_of(run: RunDirectory) -> Summary:
    """An empty summary for a first start, the earlier generations' counts for a further one."""
    first = run.generation == 0
    summary = Summary(run.run_id) if first else Summary.replay(run.path, before_generation=run.generation)
    summary.engine = summary.engine or _config_name(run.config, "engine")
    summary.policy = summary.policy or _config_name(run.config, "policy")
    return summary


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The closing table: what a person wants to know first, first."""
    status = summary["status"]
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    title = f"run {summary['run_id']}" if summary["run_id"] else "run"
    table.add_row(title, Text(status, style=_STATUS_STYLE.get(status, "")))
    table.add_row("steps", f"{summary['steps']} ({summary['applied']} applied, {summary['steps_lost']} lost)")
    table.add_row("final loss", number(summary["final_loss"]))
    table.add_row("evaluation loss", number(summary["eval_loss"]))
    table.add_row("attempts", f"{summary['attempts']} ({summary['skipped']} refused)")
    table.add_row("rollbacks", str(summary["rollbacks"]))
    ranks = ", ".join(str(r) for r in summary.get("named_ranks", ()))
    table.add_row("incidents", f"{len(summary['incidents'])}" + (f" (ranks named: {ranks})" if ranks else ""))
    table.add_row("budget left", number(summary["budget_left"]))
    table.add_row("wall time", duration(summary["wall_s"]))
    return table


def _default_stream() -> IO[str]:
    return sys.stderr if sys.stderr.isatty() and not sys.stdout.isatty() else sys.stdout


def _config_name(config: Mapping[str, Any], group: str) -> str:
    section = config.get(group)
    return str(section.get("name", "")) if isinstance(section, Mapping) else ""


def _text(fields: Mapping[str, Any]) -> str:
    for key in ("message", "error", "reason"):
        if fields.get(key):
            return str(fields[key])
    return ", ".join(f"{key} {plain(value)}" for key, value in fields.items())
