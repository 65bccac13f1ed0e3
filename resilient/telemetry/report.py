"""The report on one run: what happened, when, to which rank, and what was done about it, beside the undisturbed twin."""

from __future__ import annotations

from html import escape
from typing import Any

import yaml

from resilient.coordinator.events import Incident
from resilient.telemetry import html
from resilient.telemetry.figure import run_figure, svg
from resilient.telemetry.files import flatten
from resilient.telemetry.messages import duration, number, origin_message, what_happened, what_was_done
from resilient.telemetry.run_data import RunData

_HIGHLIGHTS = (
    ("engine", ("engine.name", "engine.zero_stage", "engine.precision")),
    ("model", ("model.name",)),
    ("policy", ("policy.name",)),
    ("fault", ("fault.kind",)),
    ("lr", ("optim.lr",)),
    ("seed", ("run.seed",)),
)
_ROWS = (
    ("status", "status"),
    ("steps", "steps"),
    ("evaluation loss", "eval_loss"),
    ("final loss", "final_loss"),
    ("attempts", "attempts"),
    ("applied", "applied"),
    ("refused", "skipped"),
    ("run again", "retried"),
    ("rollbacks", "rollbacks"),
    ("steps lost", "steps_lost"),
    ("non-finite loss, attempts", "nonfinite_loss"),
    ("non-finite gradient, attempts", "nonfinite_grad"),
    ("ranks named", "named_ranks"),
    ("budget left", "budget_left"),
    ("restarts", "generation"),
    ("wall time", "wall_s"),
)


def report_page(run: RunData, twin: RunData | None = None) -> str:
    """The whole page as HTML text. No network access, and no torch."""
    body = [
        html.header(run.run_id, config_line(run.config), str(run.summary.get("status"))),
        html.tiles(_tiles(run, twin)),
        html.section("Course of the run", _course(run, twin)),
        html.section(f"Incidents ({len(run.incidents)})", _incident_table(run)),
    ]
    alarms = [record for record in run.journal if record["kind"] == "alarm"]
    if alarms:
        body.append(html.section(f"Alarms ({len(alarms)})", _alarm_table(alarms)))
    notes = _notes(run)
    if notes:
        body.append(
            html.section("Also noted", "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>")
        )
    body.append(html.section("Summary", _summary_table(run, twin)))
    body.append(html.section("Environment", _environment(run)))
    return html.page(f"{run.run_id} - resilient report", body)


def _course(run: RunData, twin: RunData | None) -> str:
    if not run.steps and not run.evaluations:
        return "<p>No step was recorded.</p>"
    note = "" if run.steps else '<p class="note">No steps were recorded (an unguarded run): evaluations only.</p>'
    return note + svg(run_figure(run, twin))


def config_line(config: dict[str, Any]) -> str:
    """The few settings by which a person recognises a run."""
    leaves = flatten(config)
    parts = []
    for name, keys in _HIGHLIGHTS:
        values = [
            f"ZeRO-{leaves[key]}" if key.endswith("zero_stage") else str(leaves[key])
            for key in keys
            if leaves.get(key) not in (None, "")
            and not (key.endswith("zero_stage") and leaves.get("engine.name") != "deepspeed")
        ]
        if values:
            parts.append(f"{name} {' '.join(values)}")
    return " · ".join(parts)


def _tiles(run: RunData, twin: RunData | None) -> list[tuple[str, str]]:
    summary = run.summary
    found = [("evaluation loss", number(summary.get("eval_loss"), 5))]
    if twin is not None:
        found.append(("against the twin", gap(summary.get("eval_loss"), twin.summary.get("eval_loss"))))
    ranks = ", ".join(str(r) for r in summary.get("named_ranks", ()))
    return [
        *found,
        ("steps", number(summary.get("steps"))),
        ("attempts refused", number(summary.get("skipped"))),
        ("attempts run again", number(summary.get("retried"))),
        ("rollbacks", number(summary.get("rollbacks"))),
        ("steps lost", number(summary.get("steps_lost"))),
        ("ranks named", ranks or "none"),
        ("lowest stability", _lowest(run)),
        ("wall time", duration(summary.get("wall_s"))),
    ]


def _lowest(run: RunData) -> str:
    """Lowest stability number of the run and its step."""
    known = [(r["stability"], r["step"]) for r in run.steps if isinstance(r.get("stability"), int | float)]
    if not known:
        return "-"
    value, step = min(known)
    return f"{value:.0f} at step {step}"


def gap(value: Any, reference: Any) -> str:
    """`value - reference` with its sign; a dash when one is missing."""
    if not isinstance(value, int | float) or not isinstance(reference, int | float):
        return "-"
    return f"{value - reference:+.4f}"


def as_incident(record: dict[str, Any]) -> Incident:
    """An `incident` line of the journal as what it was."""
    window = record.get("skipped_windows")
    return Incident(
        step=record["step"],
        attempt=record.get("attempt", 0),
        cause=record.get("cause", "unknown"),
        ranks=tuple(record.get("ranks") or ()),
        action=record.get("action", ""),
        onset_step=record.get("onset_step"),
        place=record.get("place"),
        target_step=record.get("target_step"),
        skipped_windows=(window[0], window[1]) if window else None,
        knobs=record.get("knobs") or {},
        confidence=record.get("confidence") or 0.0,
        evidence=tuple(record.get("evidence") or ()),
        reason=record.get("reason", ""),
        likely=tuple(record.get("likely") or ()),
    )


def _incident_table(run: RunData) -> str:
    if not run.incidents:
        return "<p>None: nothing was found that a person should know.</p>"
    rows = []
    origins = {(r.get("attempt"), r.get("generation")): r for r in run.journal if r["kind"] == "nan_origin"}
    for index, record in enumerate(run.incidents, start=1):
        incident = as_incident(record)
        happened = what_happened(incident)
        evidence = [line for line in incident.evidence if line not in happened]
        origin = origins.get((incident.attempt, record.get("generation")))
        if origin is not None:
            evidence.append(origin_message(origin))
        evidence += [f"likely: {line}" for line in incident.likely]
        rows.append(
            [
                f'<span class="badge">{index}</span>',
                html.text(incident.step),
                html.text(incident.onset_step),
                escape(happened) + "".join(f'<div class="note">{escape(line)}</div>' for line in evidence),
                f'{escape(incident.cause)} <span class="note">({incident.confidence:.1f})</span>',
                html.text(incident.ranks) if incident.ranks else "all",
                html.text(incident.place),
                f'<span class="action {escape(incident.action)}">{escape(what_was_done(incident))}</span>',
            ]
        )
    head = ("", "step", "onset", "what was seen", "cause (confidence)", "ranks", "place", "what was done")
    return html.table(head, rows, numeric=(1, 2))


def _alarm_table(alarms: list[dict[str, Any]]) -> str:
    """Early warnings; the first fifty, the journal has them all."""
    rows = [
        [
            html.text(record.get("step")),
            html.text(record.get("onset_step")),
            html.text(record.get("severity")),
            escape(f"{record.get('signal')} / {record.get('statistic')}"),
            escape(str(record.get("message", ""))),
        ]
        for record in alarms[:50]
    ]
    return html.table(("step", "onset", "severity", "signal", "what was seen"), rows, numeric=(0, 1))


def _notes(run: RunData) -> list[str]:
    """Warnings, failures of the guard itself and restarts, in the order they came."""
    notes = []
    for record in run.journal:
        said = record.get("message") or record.get("error") or record.get("reason") or ""
        if record["kind"] == "warning":
            notes.append(f"warning: {said}")
        elif record["kind"] == "guard_failed":
            notes.append(f"the guard itself failed: {said}")
        elif record["kind"] == "start" and record.get("kept_from_first_start"):
            kept = record["kept_from_first_start"].items()
            notes.extend(f"kept from the first start: {key} = {was} (asked for: {now})" for key, (was, now) in kept)
        elif record["kind"] == "resume":
            notes.append(f"start {record.get('generation', 0) + 1}: resumed from step {record.get('step', '?')}")
        elif record["kind"] == "end" and said:
            notes.append(f"ended: {said}")
    return notes


def _summary_table(run: RunData, twin: RunData | None) -> str:
    runs = [run] if twin is None else [run, twin]
    head = ["", *(r.run_id for r in runs)]
    rows = [[escape(name), *(_summary_cell(r.summary, key) for r in runs)] for name, key in _ROWS]
    return html.table(head, rows, numeric=range(1, len(head)))


def _summary_cell(summary: dict[str, Any], key: str) -> str:
    value = summary.get(key)
    if key == "wall_s":
        return escape(duration(value))
    return escape(number(value, 5)) if isinstance(value, int | float) else html.text(value)


def _environment(run: RunData) -> str:
    environment = run.environment
    packages = ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items())
    git = environment.get("git", {})
    commits = ", ".join(
        f"{where} {state['commit'][:12]}{' (changed)' if state.get('dirty') else ''}" for where, state in git.items()
    )
    rows = [
        ("python", environment.get("python")),
        ("packages", packages or None),
        ("platform", environment.get("platform")),
        ("host", environment.get("hostname")),
        ("device", environment.get("device")),
        ("git", commits or None),
        ("started as", " ".join(environment.get("argv", ())) or None),
        ("time of the newest start", environment.get("time")),
    ]
    known = [[escape(name), html.text(value)] for name, value in rows if value]
    config = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "not readable"
    variables = "\n".join(f"{name}={value}" for name, value in environment.get("variables", {}).items())
    parts = [html.table(("", ""), known), html.folded("Configuration", config)]
    return "".join([*parts, html.folded("Environment variables", variables)] if variables else parts)
