"""`resilient watch RUN|FILE`: follow a run or a training log from outside, tell what goes wrong, call for help.

Imports neither torch nor hydra. The rows go through the same analysis as `resilient analyze`, so both see the same alarms.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from resilient.cli.argv import Parser, number
from resilient.cli.hooks import Command, Hook, Hooks, Webhook
from resilient.cli.watch_view import Display, JsonLines, text_display
from resilient.coordinator.requests import Request, parse_action, write_request
from resilient.errors import ConfigError, ExitCode
from resilient.logs.analysis import Analysis, Analyzer
from resilient.logs.live import Source, open_source
from resilient.logs.rows import Row
from resilient.signals import Alarm, StabilityLevel
from resilient.telemetry.files import finite, plain

_EXAMPLES = """examples:
  resilient watch runs/<id>                                    until the run ends
  resilient watch /scratch/job.out --until-idle 600            any log; until nothing has come for ten minutes
  resilient watch runs/<id> --on-alarm ./page-me --min-severity act
  resilient watch runs/<id> --on-alarm-request checkpoint      ask the live run for a checkpoint when an alarm comes
  resilient watch train.log --once --format json               what is there now, and no waiting

exit codes: 0 healthy; 1 warnings; 2 broken run; 64 bad usage, or nothing to read within --wait; 130 interrupted
"""
_BROKEN, _INTERRUPTED = 2, 130
_TOLD = ("incident", "request", "guard_failed", "warning")  # journal entries that are passed on


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilient watch",
        description="Follow a run directory, a training log of any kind, or a folder of TensorBoard events while it grows.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    seconds = number(float, 0)
    parser.add_argument("path", metavar="RUN|FILE", help="may appear later")
    parser.add_argument(
        "--interval", type=number(float, 0.05), default=2.0, metavar="S", help="between looks (default 2)"
    )
    parser.add_argument("--wait", type=seconds, metavar="S", help="longest wait for it to appear (default: any time)")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--once", action="store_true", help="read what is there, then end")
    ends.add_argument("--until-idle", type=seconds, metavar="S", help="end when nothing has come for so long")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one object a line")
    calls = parser.add_argument_group("on an alarm")
    calls.add_argument("--on-alarm", metavar="CMD", help="run a command: RESILIENT_ALARM_* set, JSON on its stdin")
    calls.add_argument("--shell", action="store_true", help="give CMD to /bin/sh instead of splitting it into words")
    calls.add_argument("--webhook", metavar="URL", help="POST the alarm as JSON")
    calls.add_argument(
        "--on-alarm-request", metavar="ACTION", help="ask the run: checkpoint, stop, rollback or lr=FACTOR"
    )
    calls.add_argument(
        "--min-severity", choices=("warn", "act"), default="warn", help="mildest alarm that calls (warn)"
    )
    calls.add_argument(
        "--new-only", action="store_true", help="do not call for what was there before the watching began"
    )
    calls.add_argument("--hook-timeout", type=number(float, 0.1), default=30.0, metavar="S", help="(default 30)")
    calls.add_argument(
        "--per-minute", type=number(int, 0), default=10, metavar="N", help="alarms passed on (default 10)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Watch until the run ends, or as told. Returns the exit code; raises SystemExit(64) for unusable arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    display: Display = JsonLines() if options.format == "json" else text_display()
    hooks: Hooks | None = None
    watch: Watch | None = None
    try:
        request = parse_action(options.on_alarm_request) if options.on_alarm_request else None
        hooks = Hooks(_hooks(options), display.say, severity=options.min_severity, per_minute=options.per_minute)
        watch = Watch(Path(options.path), display, hooks, request, new_only=options.new_only, patient=not options.once)
        with display:
            return _follow(watch, options)
    except ConfigError as error:
        print(f"resilient watch: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return watch.exit_code() if watch is not None else 0
    except KeyboardInterrupt:
        if hooks is not None:
            hooks.close(hurry=True)
        return _INTERRUPTED
    finally:
        if watch is not None:
            watch.close()
        if hooks is not None:
            hooks.close()


def _hooks(options: argparse.Namespace) -> list[Hook]:
    hooks: list[Hook] = []
    if options.on_alarm is not None:
        hooks.append(Command(options.on_alarm, shell=options.shell, timeout_s=options.hook_timeout))
    elif options.shell:
        raise ConfigError("--shell is for --on-alarm")
    if options.webhook is not None:
        hooks.append(Webhook(options.webhook, timeout_s=options.hook_timeout))
    return hooks


def _follow(watch: Watch, options: argparse.Namespace) -> int:
    """Look, sleep, look again."""
    wait = 0.0 if options.once else options.wait
    began = last = time.monotonic()
    while True:
        came = watch.look()
        now = time.monotonic()
        if came:
            last = now
        if watch.ended or (options.once and watch.source is not None and not watch.behind):
            return watch.finish()
        if watch.source is None and wait is not None and now - began >= wait:
            raise ConfigError(f"{options.path}: nothing to read appeared within {wait:g} s")
        if watch.source is not None and options.until_idle is not None and now - last >= options.until_idle:
            return watch.finish()
        if not watch.behind:
            time.sleep(options.interval)


class Watch:
    """One log, watched. `look` as often as wanted; it sleeps nowhere, so that it can be tested without waiting."""

    def __init__(
        self,
        path: Path,
        display: Display,
        hooks: Hooks,
        request: Request | None = None,
        *,
        new_only: bool = False,
        patient: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.source: Source | None = None
        self.analyzer = Analyzer()
        self.ended = False
        self._display = display
        self._hooks = hooks
        self._request = request
        self._new_only = new_only
        self._patient = patient
        self._clock = clock
        self._caught_up = False
        self._rank_alarms = 0
        self._letter = ""
        self._problem = ""
        self._last_request = -1e9

    @property
    def behind(self) -> bool:
        """More is there already."""
        return self.source is not None and self.source.behind

    def look(self) -> bool:
        """Take in what is new. True if something was."""
        if self.source is None:
            self.source = open_source(self.path, patient=self._patient)
            if self.source is None:
                self._tell_problem(f"{self.path} is not there yet")
                self._display.status(self._problem)
                return False
            self._display.begin(self.source)
        ended = bool(self.source.ended)  # asked first: what was written before the end is seen below
        rows = self.source.poll()
        self._take(rows)
        self._tell_problem(self.source.problem)
        if not rows and not self.behind:
            self._caught_up, self.ended = True, ended
        self._display.status(self.source.problem)
        return bool(rows)

    def finish(self) -> int:
        """Take in what was held back and say what it came to. Returns the exit code."""
        assert self.source is not None
        self._take(self.source.finish())
        if not self.analyzer.rows and not self.source.ended:
            raise ConfigError(self.source.problem or f"{self.path}: no training step was found in it")
        analysis, code = self.result(), self.exit_code()
        self._display.end(analysis, self.source.ended, code)
        return code

    def result(self) -> Analysis:
        """What `resilient analyze` would say of the same rows."""
        assert self.source is not None
        return self.analyzer.result(str(self.path), self.source.remarks)

    def exit_code(self) -> int:
        """0 healthy, 1 warnings, 2 a broken run."""
        if self.source is None:
            return 0
        if self.source.ended in ("failed", "stopped"):
            return _BROKEN
        return max(self.result().exit_code, int(self._rank_alarms > 0))

    def close(self) -> None:
        if self.source is not None:
            self.source.close()

    def _take(self, rows: Sequence[Row]) -> None:
        assert self.source is not None
        for row in rows:
            alarms = self.analyzer.add(row)
            level = self.analyzer.monitor.level()
            for alarm in alarms:
                self._alarm(alarm, level)
            if level.letter != self._letter:
                self._letter = level.letter
                self._display.level(row.step, level)
            self._display.row(row, level)
        for event in self.source.events():
            if event.get("kind") in _TOLD:
                self._display.event(event)
            elif event.get("kind") == "alarm" and event.get("statistic") == "ranks":
                self._rank_alarm(event)

    def _rank_alarm(self, event: Mapping[str, Any]) -> None:
        """Only the run itself can compare its ranks: what it says of them in its journal counts as an alarm here, too."""
        try:
            values = {field.name: event[field.name] for field in fields(Alarm)}
            alarm = Alarm(
                **{
                    **values,
                    "ranks": tuple(values["ranks"]),
                    "score": math.inf if values["score"] is None else values["score"],
                }
            )
        except (KeyError, TypeError):
            return
        self._rank_alarms += 1
        self._alarm(alarm, self.analyzer.monitor.level())

    def _alarm(self, alarm: Alarm, level: StabilityLevel) -> None:
        told = {**asdict(alarm), "level": level.letter, "stability": level.number, "source": str(self.path)}
        self._display.alarm(told)
        told = finite(plain(told), [])  # strict JSON for those who are called
        if (self._new_only and not self._caught_up) or not self._hooks.wants(told):
            return
        self._hooks.call(told)
        if self._request is not None and self._caught_up:  # an old alarm is no reason to stop a run now
            self._ask(alarm)

    def _ask(self, alarm: Alarm) -> None:
        assert self._request is not None
        now = self._clock()
        if now - self._last_request < 60.0:
            return
        self._last_request = now
        try:
            asked = write_request(
                self.path, self._request, reason=f"{alarm.severity} alarm at step {alarm.step}: {alarm.message}"
            )
            self._display.say(f"asked the run: {asked.action} (request {asked.id})")
        except ConfigError as error:
            self._display.say(str(error))

    def _tell_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            self._display.say(f"{problem}; waiting")
        self._problem = problem


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
