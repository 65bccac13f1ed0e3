"""An analysis as one self-contained HTML page, in the look of the run report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from resilient.logs.analysis import Analysis
from resilient.logs.plot import analysis_figure
from resilient.logs.show import alarm_line, level_line, when
from resilient.telemetry import html
from resilient.telemetry.figure import svg

_CHIP = {"healthy": "done", "loss_spike": "preempted", "unclear": ""}  # of the page's colours; the rest is red
_ALARMS = 200  # rows of the table


def analysis_page(analyses: Sequence[Analysis]) -> str:
    """The whole page as HTML text; one part per file."""
    body = [piece for analysis in analyses for piece in _part(analysis)]
    title = analyses[0].file if len(analyses) == 1 else f"{len(analyses)} logs"
    return html.page(f"{title} - resilient analyze", body)


def _part(analysis: Analysis) -> list[str]:
    chip = f'<span class="chip {_CHIP.get(analysis.verdict, "failed")}">{escape(analysis.verdict)}</span>'
    head = f'<header><h1>{escape(analysis.file)}</h1>{chip}<div class="sub">{escape(analysis.summary)}</div></header>'
    told = "".join(f"<li>{escape(line)}</li>" for line in [*when(analysis), level_line(analysis)])
    parts = [
        head,
        html.tiles(_tiles(analysis)),
        html.section("What happened", f"<ul>{told}</ul>"),
        html.section("Course of the run", svg(analysis_figure([analysis]))),
    ]
    if analysis.causes:
        parts.append(html.section("Likely causes", _causes(analysis)))
    parts.append(html.section(f"Alarms ({len(analysis.alarms)})", _alarms(analysis)))
    parts.append(html.section("What was read", _reading(analysis)))
    return parts


def _tiles(analysis: Analysis) -> list[tuple[str, str]]:
    def step(value: int | None) -> str:
        return "-" if value is None else f"{value:,}"

    return [
        ("began at step", step(analysis.onset_step)),
        ("blew up at step", step(analysis.blowup_step)),
        ("first alarm at step", step(analysis.first_alarm_step)),
        ("alarms", f"{len(analysis.alarms):,}"),
        ("stability at the end", f"{analysis.level.letter} {analysis.level.number:.0f}"),
        ("rows", f"{analysis.rows:,}"),
    ]


def _causes(analysis: Analysis) -> str:
    rows = [
        [
            f'{escape(report.cause)} <span class="note">({report.confidence:.2f})</span>',
            escape(report.detail) + "".join(f'<div class="note">{escape(line)}</div>' for line in report.evidence),
            "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in report.remedies) + "</ul>",
            html.text(report.rows),
        ]
        for report in analysis.causes
    ]
    return html.table(("cause (confidence)", "why", "what to do", "rows"), rows)


def _alarms(analysis: Analysis) -> str:
    if not analysis.alarms:
        return "<p>None.</p>"
    rows = [
        [
            html.text(alarm.step),
            f'<span class="{"stop" if alarm.severity == "act" else "rollback"}">{alarm.severity}</span>',
            escape(f"{alarm.signal}/{alarm.statistic}"),
            html.text(alarm.onset_step),
            f"{alarm.score:.3g}",
            escape(alarm.message),
        ]
        for alarm in analysis.alarms[:_ALARMS]
    ]
    more = len(analysis.alarms) - _ALARMS
    note = (
        f'<p class="note">and {more} more, the last: {escape(alarm_line(analysis.alarms[-1]))}</p>' if more > 0 else ""
    )
    return html.table(("step", "severity", "signal", "off since", "score", "what"), rows, numeric=(0, 3, 4)) + note


def _reading(analysis: Analysis) -> str:
    lines = [f"{analysis.remarks.format or 'unknown format'}: {analysis.rows:,} rows; {', '.join(analysis.signals)}"]
    lines += [f"not read: {name}: {why}" for name, why in analysis.remarks.unread.items()]
    lines += analysis.remarks.notes
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
