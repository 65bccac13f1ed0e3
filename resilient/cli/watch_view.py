"""How `resilient watch` shows what it sees: lines, a panel on a terminal, or JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from resilient.logs.analysis import Analysis
from resilient.logs.live import Source
from resilient.logs.rows import Row
from resilient.signals import StabilityLevel
from resilient.telemetry.files import json_line
from resilient.telemetry.messages import number

_STYLE = {"A": "green", "B": "green", "C": "yellow", "D": "bold yellow", "E": "bold red"}


class Display(Protocol):
    """Who shows it. `say` may be called from any thread."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: object) -> None: ...

    def begin(self, source: Source) -> None: ...

    def row(self, row: Row, level: StabilityLevel) -> None: ...

    def level(self, step: int, level: StabilityLevel) -> None: ...

    def alarm(self, fields: Mapping[str, Any]) -> None: ...

    def event(self, event: Mapping[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def status(self, text: str) -> None: ...

    def end(self, analysis: Analysis, status: str, code: int) -> None: ...


class JsonLines:
    """One object a line on stdout: kind alarm | level | event | end. Messages go to stderr."""

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def begin(self, source: Source) -> None: ...

    def row(self, row: Row, level: StabilityLevel) -> None: ...

    def level(self, step: int, level: StabilityLevel) -> None:
        self._print({"kind": "level", "step": step, **level_fields(level)})

    def alarm(self, fields: Mapping[str, Any]) -> None:
        self._print({"kind": "alarm", **fields})

    def event(self, event: Mapping[str, Any]) -> None:
        self._print({"kind": "event", "event": dict(event)})

    def say(self, text: str) -> None:
        print(f"resilient watch: {text}", file=sys.stderr, flush=True)

    def status(self, text: str) -> None: ...

    def end(self, analysis: Analysis, status: str, code: int) -> None:
        fields: dict[str, Any] = {
            "rows": analysis.rows,
            "verdict": analysis.verdict,
            "alarms": len(analysis.alarms),
            "exit_code": code,
        }
        fields |= {
            "onset_step": analysis.onset_step,
            "blowup_step": analysis.blowup_step,
            "last_step": analysis.last_step,
        }
        self._print({"kind": "end", "status": status or None, **fields, **level_fields(analysis.level)})

    def _print(self, record: Mapping[str, Any]) -> None:
        print(json_line({**record, "time": round(time.time(), 3)}), flush=True)


def text_display() -> Display:
    """A panel on a terminal, plain lines elsewhere."""
    console = Console(highlight=False, soft_wrap=True)
    return LiveView(console) if console.is_terminal else PlainLines(console)


class PlainLines:
    """A line for every alarm and every change of the level."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def begin(self, source: Source) -> None:
        self._line(f"watching {source.name}")

    def row(self, row: Row, level: StabilityLevel) -> None: ...

    def level(self, step: int, level: StabilityLevel) -> None:
        self._line(f"step {step}: level {level_text(level)}", _STYLE[level.letter])

    def alarm(self, fields: Mapping[str, Any]) -> None:
        self._line(alarm_text(fields), "bold red" if fields["severity"] == "act" else "yellow")

    def event(self, event: Mapping[str, Any]) -> None:
        self._line(event_text(event), "cyan")

    def say(self, text: str) -> None:
        self._line(text, "dim")

    def status(self, text: str) -> None: ...

    def end(self, analysis: Analysis, status: str, code: int) -> None:
        for note in analysis.remarks.notes:
            self._line(note, "dim")
        ended = f"the run ended: {status}; " if status else ""
        alarms = f"{len(analysis.alarms)} alarm{'' if len(analysis.alarms) == 1 else 's'}"
        self._line(f"{ended}{analysis.verdict}: {analysis.summary}; {analysis.rows} rows, {alarms}")

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))
        self._console.file.flush()


class LiveView(PlainLines):
    """The same lines scrolling by above a panel that stands: level, drivers, newest values. For a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._values: dict[str, float] = {}
        self._step: int | None = None  # of the newest training row
        self._level = StabilityLevel()
        self._name = self._status = ""

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def begin(self, source: Source) -> None:
        self._name = source.name
        super().begin(source)

    def row(self, row: Row, level: StabilityLevel) -> None:
        self._values.update(row.values)
        self._level = level
        if not row.evaluation:
            self._step = row.step

    def status(self, text: str) -> None:
        """Draws: once a look, however many rows it brought."""
        self._status = text
        self._live.update(self._panel(), refresh=True)

    def end(self, analysis: Analysis, status: str, code: int) -> None:
        self._live.stop()
        super().end(analysis, status, code)

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        if self._step is not None:
            table.add_row("step", f"{self._step:,}")
            table.add_row("level", Text(level_text(self._level), style=_STYLE[self._level.letter]))
            shown = list(self._values.items())[:12]
            table.add_row("values", "  ".join(f"{name} {number(value)}" for name, value in shown))
        if self._status:
            table.add_row("", Text(self._status, style="yellow"))
        return Panel(table, title=self._name or None, title_align="left", expand=False)


def level_fields(level: StabilityLevel) -> dict[str, Any]:
    """A level as JSON fields."""
    forecast = asdict(level.forecast) if level.forecast is not None else None
    drivers = [{"signal": name, "share": share} for name, share in level.drivers]
    return {"level": level.letter, "stability": level.number, "drivers": drivers, "forecast": forecast}


def level_text(level: StabilityLevel) -> str:
    """`C 64 (grad_norm/trend 70 %, loss/scale 30 %); blow-up in about 120 steps (80 to 200)`."""
    text = f"{level.letter} {level.number:.0f}"
    if level.drivers:
        text += f" ({', '.join(f'{name} {share:.0%}' for name, share in level.drivers[:3])})"
    ahead = level.forecast
    if ahead is not None and ahead.supported and ahead.steps is not None:
        text += f"; blow-up in about {ahead.steps:.0f} steps"
        if ahead.low is not None and ahead.high is not None:
            text += f" ({ahead.low:.0f} to {ahead.high:.0f})"
    return text


def alarm_text(fields: Mapping[str, Any]) -> str:
    onset = "" if fields["onset_step"] == fields["step"] else f"; began at step {fields['onset_step']}"
    ranks = (
        f" on rank {', '.join(map(str, fields['ranks']))}"
        if fields["ranks"] and "rank" not in fields["message"]
        else ""
    )
    what = fields["message"] or f"{fields['signal']}: {fields['statistic']}"
    return f"! step {fields['step']} {fields['severity']}: {what}{ranks}{onset}"


def event_text(event: Mapping[str, Any]) -> str:
    """A journal entry of the run in one line."""
    kind = event.get("kind")
    if kind == "incident":
        return (
            f"the run: step {event.get('step')}: {event.get('reason') or event.get('cause')} -> {event.get('action')}"
        )
    if kind == "request":
        return (
            f"the run: request {event.get('id')} {event.get('action')}: {event.get('outcome')}: {event.get('message')}"
        )
    return f"the run: {kind}: {event.get('message', '')}"
