"""What `resilient watch` calls on an alarm: a command or a webhook, beside the watching and never in its way.

Each alarm at most once, no more than so many a minute, a deadline on everything. A hook that fails is reported and
forgotten: it ends neither the watching nor the run.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol
from urllib.parse import urlsplit

from resilient.errors import ConfigError

_AT_ONCE = 4  # hooks running
_WAITING = 32  # hooks that may wait for their turn
_SAID = 500  # bytes of its output that are shown
_RETRIES = 2
_RETRY_AFTER_S = 1.0  # doubling
_ENVIRONMENT = "RESILIENT_ALARM_"


class Hook(Protocol):
    """Something to call. Runs in a thread of its own."""

    name: str

    def __call__(self, alarm: Mapping[str, Any]) -> str:
        """What is worth telling the person, "" for nothing. Raises OSError when it failed."""


class Command:
    """Run a program: the alarm's fields in RESILIENT_ALARM_<FIELD>, the alarm as JSON on its standard input. No shell
    unless asked for: the words are split as a shell would, and nothing in an alarm is ever part of them."""

    name = "--on-alarm"

    def __init__(self, command: str, *, shell: bool = False, timeout_s: float = 30.0) -> None:
        """Raises ConfigError when the command has no words or open quotes."""
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--on-alarm {command!r}: {error}") from None
        if not words:
            raise ConfigError("--on-alarm: no command given")
        self._words: list[str] = ["/bin/sh", "-c", command] if shell else words
        self._timeout_s = timeout_s

    def __call__(self, alarm: Mapping[str, Any]) -> str:
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as said,
        ):  # no pipe that a child could keep open
            given.write(json.dumps(alarm).encode())
            given.seek(0)
            process = subprocess.Popen(
                self._words,
                stdin=given,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=os.environ | _variables(alarm),
                start_new_session=True,  # its children end with it at the deadline, and Ctrl-C is ours alone
            )
            try:
                code = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                raise OSError(f"still running after {self._timeout_s:g} s: ended") from None
            finally:
                _end(process)
            said.seek(max(said.seek(0, os.SEEK_END) - _SAID, 0))
            text = said.read(_SAID).decode("utf-8", "replace").strip()
        if code:
            raise OSError(f"exit code {code}" + (f": {text}" if text else ""))
        return text


class Webhook:
    """POST the alarm as one JSON object; `text` in it is what chat services show. The URL is never printed: it may hold
    a secret in its path."""

    def __init__(self, url: str, *, timeout_s: float = 30.0, pause: Callable[[float], object] = time.sleep) -> None:
        """Raises ConfigError for anything but an http or https URL."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise ConfigError("--webhook: not an http or https URL")
        self.name = f"--webhook {host}"
        self._url = url
        self._timeout_s = timeout_s
        self._pause = pause

    def __call__(self, alarm: Mapping[str, Any]) -> str:
        text = f"resilient: {alarm['severity']} alarm at step {alarm['step']} of {alarm['source']}: {alarm['message']}"
        body = json.dumps({"text": text, **alarm}).encode()
        request = urllib.request.Request(self._url, data=body, headers={"Content-Type": "application/json"})
        for attempt in range(_RETRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s):
                    return ""
            except urllib.error.HTTPError as error:
                problem = f"answered {error.code}"
                error.close()
                if error.code < 500 and error.code != 429:
                    break  # it will not like it better the second time
            except urllib.error.URLError as error:
                problem = str(error.reason)
            except (OSError, http.client.HTTPException) as error:
                problem = type(error).__name__
            if attempt < _RETRIES:
                self._pause(_RETRY_AFTER_S * 2**attempt)
        raise OSError(problem)


class Hooks:
    """Calls each hook for each alarm that is bad enough.

    severity: the mildest that counts, warn or act. per_minute: calls of one hook. say: takes a line for the person; from
    any thread. clock: monotonic seconds."""

    def __init__(
        self,
        hooks: list[Hook],
        say: Callable[[str], None],
        *,
        severity: str = "warn",
        per_minute: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hooks = hooks
        self._say = say
        self._severity = severity
        self._per_minute = per_minute
        self._clock = clock
        self._told: set[tuple[Any, ...]] = set()
        self._calls: deque[float] = deque(maxlen=max(per_minute, 1))
        self._held_back = 0
        self._slots = threading.BoundedSemaphore(_AT_ONCE + _WAITING)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="hook") if hooks else None

    def wants(self, alarm: Mapping[str, Any]) -> bool:
        """True the first time this alarm is seen, if it is bad enough and the minute is not full."""
        key = tuple(alarm[name] for name in ("step", "severity", "signal", "statistic"))
        if key in self._told or (self._severity == "act" and alarm["severity"] != "act"):
            return False
        self._told.add(key)
        now = self._clock()
        if len(self._calls) >= self._per_minute and (not self._calls or now - self._calls[0] < 60.0):
            self._held_back += 1
            return False
        self._calls.append(now)
        return True

    def call(self, alarm: Mapping[str, Any]) -> None:
        """Start every hook for `alarm`. Returns at once."""
        for hook in self._hooks:
            assert self._pool is not None
            if self._slots.acquire(blocking=False):
                self._pool.submit(self._run, hook, alarm)
            else:
                self._held_back += 1

    def _run(self, hook: Hook, alarm: Mapping[str, Any]) -> None:
        try:
            said = hook(alarm)
            if said:
                self._say(f"{hook.name}: {said}")
        except Exception as error:
            self._say(f"{hook.name} failed for step {alarm['step']}: {error}")
        finally:
            self._slots.release()

    def close(self, hurry: bool = False) -> None:
        """Wait for the hooks that run, each of which has its deadline. hurry: drop those that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=hurry)
            self._pool = None
        if self._held_back:
            self._say(f"{self._held_back} alarms were not passed on: more than {self._per_minute} a minute")
            self._held_back = 0


def _variables(alarm: Mapping[str, Any]) -> dict[str, str]:
    def text(value: Any) -> str:
        if isinstance(value, list | tuple):
            return ",".join(map(str, value))
        return "" if value is None else str(value).replace("\0", "")

    return {f"{_ENVIRONMENT}{name.upper()}": text(value) for name, value in alarm.items()}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a hook that is past its deadline, with all that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
