"""An analysis as text for people: what became of the run, when it began, what it points to; and the curves as characters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from textwrap import wrap

from resilient.logs.analysis import BROKEN, Analysis
from resilient.logs.series import Series
from resilient.signals import Alarm

_ALARMS = 6  # shown; the others are counted
_CAUSES = 3
_REMEDIES = 4
_HEIGHT = 7  # character rows of one curve
_LABEL = 10  # characters in front of a curve
_LOG_RATIO = 8.0  # beyond this range a positive curve is drawn on a log axis


def text_report(analysis: Analysis, width: int = 100, unicode: bool = True) -> str:
    """Everything a person needs, most important first. width: characters a line; unicode: the stream takes them."""
    lines = [*_verdict(analysis), "", *charts(analysis, width, unicode), *_causes(analysis), *_alarms(analysis)]
    lines += _reading(analysis)
    text = "\n".join(piece for line in lines for piece in _fold(line, width))
    return text if unicode else text.encode("ascii", "replace").decode("ascii")


def headline(analysis: Analysis) -> str:
    """One line: `diverged: the loss left its trend of 2.04 at step 9448 ...`."""
    return f"{analysis.verdict}: {analysis.summary}"


def when(analysis: Analysis) -> list[str]:
    """When it began, how sure that is, when it blew up, and what led. Empty for a run without trouble."""
    said = []
    onset, blowup, first = analysis.onset_step, analysis.blowup_step, analysis.first_alarm_step
    if onset is not None:
        sure = analysis.onset_confidence
        text = f"began at step {onset}" + (f" (confidence {sure:.1f})" if sure is not None else "")
        if blowup is not None:
            text += f", blew up {'first ' if analysis.away > 1 else ''}at step {blowup}"
            text += f", {blowup - onset} steps later" if blowup > onset else ""
        said.append(text)
    elif blowup is not None:
        said.append(f"blew up at step {blowup}")
    led = next((alarm for alarm in analysis.alarms if onset is not None and alarm.step >= onset), None)
    if led is not None:
        text = f"first seen at step {led.step}: {led.signal}/{led.statistic} ({led.severity})"
        text += f", {blowup - led.step} steps before the blow-up" if blowup is not None and led.step < blowup else ""
        if first is not None and first < led.step:
            text += f"; the first alarm of all was at step {first}"
        said.append(text)
    elif blowup is not None:
        said.append("no alarm was raised")
    if analysis.restarts:
        shown = "; ".join(f"from {before} to {at}" for before, at in analysis.restarts[:3])
        more = " ..." if len(analysis.restarts) > 3 else ""
        said.append(f"went back {_times(len(analysis.restarts))}: {shown}{more}")
    return said


def level_line(analysis: Analysis) -> str:
    """`level D, stability 31 of 100; driven by grad_norm/scale 64 %`, and the forecast if it is supported."""
    level = analysis.level
    text = f"level at the end: {level.letter}, stability {level.number:.0f} of 100"
    if level.drivers:
        text += "; driven by " + ", ".join(f"{name} {share:.0%}" for name, share in level.drivers[:3])
    forecast = level.forecast
    if forecast is not None and forecast.supported and forecast.steps is not None:
        low, high = forecast.low, forecast.high
        between = f" (80 %: {low:.0f} to {high:.0f})" if low is not None and high is not None else ""
        text += f"; {forecast.signal} grows ({forecast.model}): about {forecast.steps:.0f} steps to blow-up{between}"
    return text


def alarm_line(alarm: Alarm) -> str:
    began = f", off since {alarm.onset_step}" if alarm.onset_step != alarm.step else ""
    said = alarm.message or f"score {alarm.score:.3g}"
    return f"step {alarm.step} {alarm.severity} {alarm.signal}/{alarm.statistic}{began}: {said}"


# -- sections ----------------------------------------------------------------------------------------------------------


def _verdict(analysis: Analysis) -> list[str]:
    name = analysis.verdict.upper() if analysis.verdict in BROKEN else analysis.verdict
    return [f"verdict: {name}: {analysis.summary}", *(f"  {line}" for line in [*when(analysis), level_line(analysis)])]


def _causes(analysis: Analysis) -> list[str]:
    if not analysis.causes:
        return []
    lines = ["", "likely causes"]
    for number, report in enumerate(analysis.causes[:_CAUSES], start=1):
        lines.append(
            f"  {number}. {report.cause} ({report.confidence:.2f}): {report.detail} [{', '.join(report.rows)}]"
        )
        lines += [f"     seen: {line}" for line in report.evidence[:3]]
        lines += [f"     - {line}" for line in report.remedies[:_REMEDIES]]
    if len(analysis.causes) > _CAUSES:
        others = ", ".join(f"{r.symptom} ({r.confidence:.2f})" for r in analysis.causes[_CAUSES:])
        lines.append(f"  also possible: {others}")
    return lines


def _alarms(analysis: Analysis) -> list[str]:
    alarms, rates = analysis.alarms, analysis.rates
    if not alarms:
        return ["", "no alarms"]
    act = sum(alarm.severity == "act" for alarm in alarms)
    lines = [
        "",
        f"alarms: {len(alarms)}, {act} of them act; per 10,000 steps {rates['realised_warn']:.3g} episodes, of them "
        f"{rates['realised_act']:.3g} act (a healthy run: {rates['predicted_warn']:g} and {rates['predicted_act']:g})",
    ]
    lines += [f"  {alarm_line(alarm)}" for alarm in alarms[:_ALARMS]]
    if len(alarms) > _ALARMS:
        lines.append(f"  ... and {len(alarms) - _ALARMS} more, the last at step {alarms[-1].step}")
    return lines


def _reading(analysis: Analysis) -> list[str]:
    lines = ["", f"read: {analysis.rows:,} rows; {', '.join(analysis.signals) or 'no signal'}"]
    lines += [f"not read: {name}: {why}" for name, why in analysis.remarks.unread.items()]
    return lines + [f"note: {note}" for note in analysis.remarks.notes]


def _fold(line: str, width: int) -> list[str]:
    """Long lines over several, the rest indented; curves and short lines as they are."""
    if len(line) <= width:
        return [line]
    indent = len(line) - len(line.lstrip())
    return wrap(line, width, subsequent_indent=" " * (indent + 3), break_long_words=False, break_on_hyphens=False)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# -- curves ------------------------------------------------------------------------------------------------------------


def charts(analysis: Analysis, width: int, unicode: bool) -> list[str]:
    """Loss and gradient norm over the step, one below the other, with a row of marks between them and the axis."""
    drawn = [(name, analysis.series[name]) for name in ("loss", "grad_norm") if analysis.series.get(name)]
    drawn = [(name, series) for name, series in drawn if len(series.buckets) > 1]
    if not drawn:
        return []
    first = min(series.buckets[0].x for _, series in drawn)
    last = max(series.buckets[-1].last for _, series in drawn)
    if last <= first:
        return []
    columns = max(min(width, 160) - _LABEL - 1, 16)
    lines = []
    for name, series in drawn:
        lines += _chart(name, series, first, last, columns, unicode)
    marks = _marks(analysis, first, last, columns)
    if marks:
        lines += [" " * _LABEL + " " + marks[0], " " * _LABEL + " " + marks[1]]
    left, right = f"{'steps counted on, ' if analysis.counter_began_anew else 'step '}{first:.0f}", f"{last:.0f}"
    lines.append(" " * _LABEL + " " + left + right.rjust(columns - len(left)))
    return lines


def _chart(name: str, series: Series, first: float, last: float, columns: int, unicode: bool) -> list[str]:
    points = [(x, y) for x, y in series.points() if math.isfinite(y)]
    if not points:
        return [f"{name[: _LABEL - 1]:<{_LABEL}} (not finite throughout)"]
    low, high = min(y for _, y in points), max(y for _, y in points)
    log = low > 0 and high > _LOG_RATIO * low
    to = math.log if log else float
    bottom, top = to(low), to(high)
    across, down = (2, 4) if unicode else (1, 1)
    nx, ny = columns * across, _HEIGHT * down
    ranges = _ranges([((x - first) / (last - first), to(y)) for x, y in points], nx)
    grid = [[0] * columns for _ in range(_HEIGHT)]
    for column, (a, b) in ranges.items():
        for y in range(_row(a, bottom, top, ny), _row(b, bottom, top, ny) + 1):
            up = ny - 1 - y
            grid[up // down][column // across] |= _dot(column % across, up % down) if unicode else 1
    characters = [
        "".join((chr(0x2800 + cell) if unicode else ("*" if cell else " ")) for cell in row).rstrip("\u2800 ")
        for row in grid
    ]
    labels = [_short(high), *[""] * (_HEIGHT - 2), _short(low)]
    labels[_HEIGHT // 2] = name[: _LABEL - 1] if len(name) < _LABEL else name[: _LABEL - 2] + "."
    if log:
        labels[_HEIGHT // 2 + 1] = "(log)"
    edge = "\u2502" if unicode else "|"
    return [f"{label:>{_LABEL - 1}} {edge}{line}" for label, line in zip(labels, characters, strict=True)]


def _ranges(points: Iterable[tuple[float, float]], columns: int) -> dict[int, tuple[float, float]]:
    """Per column the lowest and highest value, joined to the column before. points: (0..1, value) in order."""
    found: dict[int, tuple[float, float]] = {}
    for share, y in points:
        column = min(max(int(share * columns), 0), columns - 1)
        low, high = found.get(column, (y, y))
        found[column] = (min(low, y), max(high, y))
    before: tuple[int, tuple[float, float]] | None = None
    joined = {}
    for column in sorted(found):
        low, high = found[column]
        if before is not None:
            for between in range(before[0] + 1, column):
                part = (between - before[0]) / (column - before[0])
                middle = sum(before[1]) / 2 * (1 - part) + (low + high) / 2 * part
                joined[between] = (middle, middle)
            if before[0] == column - 1:
                low, high = min(low, before[1][1]), max(high, before[1][0])
        joined[column] = (low, high)
        before = (column, found[column])
    return joined


def _row(value: float, bottom: float, top: float, rows: int) -> int:
    share = (value - bottom) / (top - bottom) if top > bottom else 0.5
    return min(max(int(share * rows), 0), rows - 1)


def _dot(x: int, y: int) -> int:
    """The bit of a braille character: two dots across, four down from the top."""
    return ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))[x][y]


def _marks(analysis: Analysis, first: float, last: float, columns: int) -> tuple[str, str] | None:
    """The row of marks and its legend; later kinds overwrite earlier ones."""
    row = [" "] * columns
    legend: list[str] = []
    loss = analysis.series.get("loss")
    kinds: Sequence[tuple[str, str, Sequence[float]]] = (
        ("^", "alarm", analysis.alarm_x),
        ("!", "not finite", loss.nonfinite() if loss else []),
        ("o", "began", _placed(analysis, analysis.onset_step)),
        ("X", "blew up", _placed(analysis, analysis.blowup_step)),
    )
    for mark, name, places in kinds:
        for x in places:
            if first <= x <= last:
                row[min(int((x - first) / (last - first) * columns), columns - 1)] = mark
        if places:
            legend.append(f"{mark} {name}")
    return ("".join(row).rstrip(), ", ".join(legend)) if legend else None


def _placed(analysis: Analysis, step: int | None) -> list[float]:
    """Where a step lies on the x axis; nowhere if the file's counter began anew, for it is not unique then."""
    return [float(step)] if step is not None and not analysis.counter_began_anew else []


def _short(value: float) -> str:
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.2e}"
