"""Requests from outside to a live run, through files in its run directory (S10, S11).

    outside      write_request(run_dir, "checkpoint")      requests/<id>.json, by write-rename
    rank 0       RequestDesk.fill(record)                  at the gate: takes what has come in, puts it into its own row
    all ranks    granted(judgement, table, ...)            the same answer from the same table
    rank 0       RequestDesk.answer(...)                   journal event "request"; requests/done/<id>.json with the outcome

A request is moved away before it is carried out: should the job die in between, it is lost and not done twice. It is data:
one of five actions and a number, never code. Who may write into the run directory may ask.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args

from resilient.checkpoint.files import read_json, write_json
from resilient.coordinator.judge import Judgement
from resilient.errors import ConfigError
from resilient.signals import Decision, Exchanged, Flag, Severity, StepRecord, Verdict

RequestAction = Literal["checkpoint", "stop", "rollback", "lr", "note"]
ACTIONS: tuple[RequestAction, ...] = get_args(RequestAction)

LR_FACTORS = (1e-4, 10.0)  # smallest and largest factor that may be asked for

_FOLDER, _DONE = "requests", "done"
_LIMIT = 16 << 10  # bytes of a request
_PER_POLL = 16  # requests taken at one gate
_EVERY_S = 1.0
_ASKED = "a rollback was asked for from outside"


@dataclass(frozen=True)
class Request:
    """What somebody outside wants. value: the LR factor; the step before which to go back, 0 for the newest good
    snapshot. generation: the start of the run it is meant for; None: whichever reads it. time: unix seconds."""

    id: str
    action: RequestAction
    value: float = 0.0
    who: str = ""
    reason: str = ""
    time: float = 0.0
    generation: int | None = None


def parse_action(text: str) -> Request:
    """`checkpoint`, `stop`, `rollback`, `rollback=STEP`, `lr=FACTOR` or `note=TEXT` as a request that has yet to get an
    id. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if name == "note" and value:
        return Request("", "note", reason=value)
    fields: dict[str, Any] = {"id": "-", "action": name}
    if equals:
        try:
            fields["value"] = float(value)
        except ValueError:
            raise ConfigError(f"request {text}: {value!r} is not a number") from None
    try:
        return replace(_checked(fields), id="")
    except ValueError as error:
        raise ConfigError(f"request {text}: {error}") from None


def write_request(run_dir: Path | str, request: Request, *, reason: str = "") -> Request:
    """Put `request` before the run. Returns it as written: with id, time, who, and the run's present generation.

    Raises ConfigError when `run_dir` is no run directory or cannot be written."""
    run_dir = Path(run_dir)
    try:
        generation = int(read_json(run_dir / "generation.json", limit=_LIMIT)["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{run_dir} is not the directory of a run: it has no readable generation.json") from None
    request = replace(
        request,
        id=f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S-%f}-{secrets.token_hex(2)}",  # sorts by time
        time=time.time(),
        who=f"{_user()}@{socket.gethostname()}",
        reason=reason or request.reason,
        generation=generation,
    )
    folder = run_dir / _FOLDER
    try:
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{request.id}.json", asdict(request), limit=_LIMIT)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the request cannot be written to {folder}: {error}") from error
    return request


def read_outcome(run_dir: Path | str, request_id: str) -> tuple[str, str] | None:
    """(outcome, message) of an answered request; None while it waits. outcome: done | refused | failed."""
    try:
        content = read_json(Path(run_dir) / _FOLDER / _DONE / f"{request_id}.json", limit=2 * _LIMIT)
        return str(content["outcome"]), str(content["message"])
    except (OSError, ValueError, KeyError):
        return None


def granted(
    judgement: Judgement, table: Exchanged, lr_factor: float, targets: Callable[[int], int]
) -> tuple[Judgement, float]:
    """The judgement with what rank 0's row asks for, and the LR factor in force from this attempt on. Pure, so that every
    rank decides alike. The judge's own rollback or stop comes before a request.

    lr_factor: in force so far. targets(onset_step): how many snapshots lie safely before that step."""
    asked, decision = table.total("asked"), judgement.decision
    if table.ranks_flagged(Flag.LR):
        lr_factor = asked
    if table.ranks_flagged(Flag.ROLLBACK) and decision.action in ("apply", "retry", "skip"):
        onset = min(int(asked), table.step) if asked else table.step
        if targets(onset) > 0:
            verdict = Verdict("unknown", Severity.ACT, (), onset, 0.0, (_ASKED,), judgement.findings)
            back = Decision(
                "rollback", table.step, table.attempt, reason=_ASKED, cause="unknown", onset_step=onset, incident=True
            )
            return replace(judgement, verdict=verdict, decision=back), lr_factor
    if decision.action == "apply" and lr_factor != 1.0:
        knobs = replace(decision.knobs, lr_factor=decision.knobs.lr_factor * lr_factor)
        judgement = replace(judgement, decision=replace(decision, knobs=knobs))
    return judgement, lr_factor


class RequestDesk:
    """Rank 0's side. A look into the folder at most once a second, and nothing here ever raises or waits.

    tell: takes the journal event ("request", fields) of every answer."""

    def __init__(self, run_dir: Path, generation: int, tell: Callable[[str, Mapping[str, Any]], None]) -> None:
        self.every_s = _EVERY_S
        self._folder = run_dir / _FOLDER
        self._generation = generation
        self._tell = tell
        self._next_look = -math.inf
        self._open: list[Request] = []  # taken and not yet answered
        self._unfinished: dict[str, tuple[int, int]] = {}  # name -> size and time of a file that is no JSON yet
        self._ignored: set[str] = set()  # names that cannot be moved away

    def fill(self, record: StepRecord) -> None:
        """Take what has come in and ask for it in this rank's row."""
        if not self._due():
            return
        for path in self._files():
            request = self._take(path, room_for_value=not record.flags & (Flag.ROLLBACK | Flag.LR))
            if request is None:
                continue
            if request.action == "note":
                self._answer(request, "done", request.reason, record.step)
                continue
            self._open.append(request)
            if request.action == "checkpoint":
                record.flags |= Flag.CHECKPOINT
            elif request.action == "stop":
                record.flags |= Flag.PREEMPTED
            else:
                record.flags |= Flag.ROLLBACK if request.action == "rollback" else Flag.LR
                record.asked = request.value

    def answer(self, decision: Decision, step: int, *, saved: bool, leaving: bool) -> None:
        """Say what became of the requests that were asked for at this gate. step: in force now; saved: a checkpoint of
        that step exists; leaving: all ranks leave now."""
        for request in self._open:
            done, message = True, ""
            if request.action == "checkpoint":
                done, message = saved, f"the state of step {step} is {'saved' if saved else 'not saved'}"
            elif request.action == "stop":
                done, message = (
                    leaving,
                    f"left at step {step}; {'the state is saved' if saved else 'nothing was saved'}",
                )
            elif request.action == "lr":
                message = f"LR x {request.value:g} from step {decision.step} on, until another request changes it"
            elif decision.reason == _ASKED:
                message = f"rolled back from step {decision.step} to step {step}"
            elif decision.action in ("rollback", "stop"):
                done, message = False, f"the policy took its own decision at step {decision.step}: {decision.action}"
            else:
                done, message = False, f"no snapshot lies safely before step {int(request.value) or decision.step}"
            self._answer(request, "done" if done else "failed", message, decision.step)
        self._open.clear()

    def refuse_all(self, why: str, step: int) -> None:
        """Nothing can be shared with the other ranks: answer what is open and what still comes in so."""
        for request in self._open:
            self._answer(request, "failed", why, step)
        self._open.clear()
        if self._due():
            for path in self._files():
                taken = self._take(path, room_for_value=True)
                if taken is not None:
                    self._answer(taken, "refused", why, step)

    def close(self, step: int) -> None:
        """The run ends: what was taken was not carried out; what still waits stays, and the next start refuses it."""
        for request in self._open:
            self._answer(request, "failed", f"the run ended first, at step {step}", step)
        self._open.clear()

    # -- files --------------------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + self.every_s
        return True

    def _files(self) -> list[Path]:
        """Requests that wait, oldest id first. A folder that is a link leads out of the run directory: not followed."""
        try:
            with os.scandir(self._folder) as entries:
                names = sorted(e.name for e in entries if e.name.endswith(".json") and e.name not in self._ignored)
            if not names or self._folder.is_symlink():
                return []
            return [self._folder / name for name in names[:_PER_POLL]]
        except OSError:  # no folder: nobody has asked for anything
            return []

    def _take(self, path: Path, room_for_value: bool) -> Request | None:
        """The request in `path`, moved to done/; None when it has to wait or was refused here."""
        problem, request, content = "", Request(path.stem, "note"), {}
        try:
            content = self._read(path)
            request = _checked({**content, "id": path.stem})
            if request.generation not in (None, self._generation):
                problem = f"meant for start {request.generation} of this run; this is start {self._generation}"
        except _Unfinished:
            return None
        except Exception as error:  # whatever it is made of, it must not hurt training
            problem = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        if not problem and request.action in ("rollback", "lr") and not room_for_value:
            return None  # one number a gate: it waits for the next one
        try:
            done = self._folder / _DONE
            done.mkdir(exist_ok=True)
            os.replace(path, done / path.name)
        except OSError as error:
            self._ignored.add(path.name)
            problem = (
                problem or f"it cannot be moved to {_DONE}/, so it would be done again and again: {error.strerror}"
            )
        if problem:
            action = str(content.get("action", ""))[:40]
            self._answer(request, "refused", problem, None, action=action)
            return None
        return request

    def _read(self, path: Path) -> dict[str, Any]:
        """Raises _Unfinished for what may be a file that is still being written, ValueError or OSError for the rest."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("not an ordinary file")
            data = file.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise ValueError(f"longer than {_LIMIT} bytes")
        try:
            content = json.loads(data)
        except ValueError as error:
            seen = (about.st_size, about.st_mtime_ns)
            if self._unfinished.get(path.name) != seen:
                self._unfinished[path.name] = seen
                raise _Unfinished from None
            raise ValueError(f"not JSON: {error}") from None
        finally:
            if len(self._unfinished) > 100:
                self._unfinished.clear()
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        return content

    def _answer(
        self,
        request: Request,
        outcome: Literal["done", "refused", "failed"],
        message: str,
        step: int | None,
        action: str = "",
    ) -> None:
        fields = {**asdict(request), "action": action or request.action, "outcome": outcome, "message": message}
        asked_at = fields.pop("time")
        if step is not None:
            fields["step"] = step
        try:
            self._tell("request", {**fields, "asked_at": asked_at})
            if f"{request.id}.json" not in self._ignored:
                write_json(self._folder / _DONE / f"{request.id}.json", {**fields, "time": asked_at})
        except Exception as error:  # a full disk must not hurt training
            print(f"resilient: WARNING: request {request.id}: the answer cannot be kept: {error}", file=sys.stderr)


class _Unfinished(Exception):
    """The file may still be in the writer's hands."""


def _checked(content: Mapping[str, Any]) -> Request:
    """The request in `content`; ValueError when it is none that may be granted."""
    unknown = sorted(set(content) - set(Request.__dataclass_fields__))
    if unknown:
        raise ValueError(f"unknown keys: {', '.join(unknown)[:200]}")
    action, value = content.get("action"), content.get("value", 0.0)
    if action not in ACTIONS:
        raise ValueError(f"action {str(action)[:40]!r} is not one of {', '.join(ACTIONS)}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("value is not a finite number")
    if action == "lr" and not LR_FACTORS[0] <= value <= LR_FACTORS[1]:
        raise ValueError(f"an LR factor must lie between {LR_FACTORS[0]:g} and {LR_FACTORS[1]:g}, found {value:g}")
    if action == "rollback" and not (value >= 0 and value == int(value)):
        raise ValueError(f"a rollback needs a step to go back before, found {value:g}")
    if action in ("checkpoint", "stop", "note") and value:
        raise ValueError(f"{action} takes no number")
    generation = content.get("generation")
    if generation is not None and not isinstance(generation, int):
        raise ValueError("generation is not a whole number")
    asked_at = content.get("time", 0.0)
    return Request(
        id=str(content["id"]),
        action=action,
        value=float(value),
        who=str(content.get("who", ""))[:200],
        reason=str(content.get("reason", ""))[:1000],
        time=float(asked_at) if isinstance(asked_at, int | float) else 0.0,
        generation=generation,
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this uid
        return str(os.getuid())
