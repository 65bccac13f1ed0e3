"""verdict.json: why a run ended, for the supervisor. Launchers hide the ranks' exit codes; this file does not.

job, rank 0     announce(run_dir, ...)        at the start: where its run directory is
                write_verdict(run_dir, ...)   at the end, whatever the end is
supervisor      read_announcement, read_verdict: counted only if written by the start that it has just watched
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from resilient.checkpoint.files import read_json, write_json

log = logging.getLogger(__name__)

VERDICT = "verdict.json"
RUN_ID = "RESILIENT_RUN_ID"  # names the run, the same over restarts
GENERATION = "RESILIENT_GENERATION"  # 0, 1, 2, ...: which start under this supervisor; the run directory counts its own
SUPERVISOR = "RESILIENT_SUPERVISOR"  # folder of the watching supervisor, unique to one `resilient launch`

_ANNOUNCEMENT = "run.json"
_LIMIT = 1 << 20


def fresh_run_id() -> str:
    """UTC time and four random hex digits: sorts by start, and two starts in one second differ."""
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@dataclass(frozen=True)
class Verdict:
    """Why a start ended. generation: the run directory's count of starts. code: an exit code of DESIGN 8. supervisor: token of the launch it ran under, "" for none.
    details: further JSON values (step, ranks, hosts to exclude)."""

    code: int
    reason: str
    generation: int
    supervisor: str
    written_at: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Announcement:
    """Where the run directory of the job under a supervisor is."""

    run_dir: Path
    run_id: str
    generation: int


def write_verdict(run_dir: Path | str, code: int, reason: str, generation: int, **details: Any) -> None:
    """Say why this start ends, by write-rename-fsync. Call on rank 0, or on any rank that knows rank 0 cannot.

    details: JSON values. Raises OSError when the run directory cannot be written."""
    content = {
        "code": int(code),
        "reason": reason,
        "generation": generation,
        "supervisor": supervisor_token(os.environ.get(SUPERVISOR, "")),
        "written_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "details": details,
    }
    write_json(Path(run_dir) / VERDICT, content, limit=_LIMIT)


def read_verdict(run_dir: Path | str) -> Verdict | None:
    """The verdict in a run directory; None when there is none that can be read."""
    path = Path(run_dir) / VERDICT
    try:
        content = read_json(path, limit=_LIMIT)
        return Verdict(
            code=int(content["code"]),
            reason=str(content["reason"]),
            generation=int(content["generation"]),
            supervisor=str(content["supervisor"]),
            written_at=str(content["written_at"]),
            details=dict(content["details"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("unreadable %s: %s", path, error)
        return None


def announce(run_dir: Path | str, run_id: str, generation: int) -> bool:
    """Tell the supervisor where this run lives. Call on rank 0 as soon as the run directory is known.

    False when no supervisor watches, or when its folder is not on this host: the job goes on all the same, and the
    supervisor then goes by the exit code alone."""
    folder = os.environ.get(SUPERVISOR)
    if not folder:
        return False
    try:
        content = {"run_dir": str(Path(run_dir).absolute()), "run_id": run_id, "generation": generation}
        write_json(Path(folder) / _ANNOUNCEMENT, content, limit=_LIMIT)
        return True
    except OSError as error:
        log.warning("cannot announce this run to the supervisor in %s: %s", folder, error)
        return False


def read_announcement(folder: Path | str) -> Announcement | None:
    """What the job told the supervisor whose folder this is; None when it has said nothing that can be read."""
    try:
        content = read_json(Path(folder) / _ANNOUNCEMENT, limit=_LIMIT)
        return Announcement(Path(content["run_dir"]), str(content["run_id"]), int(content["generation"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_announcement(folder: Path | str) -> None:
    """Before a start: what an earlier one announced is not this one's."""
    (Path(folder) / _ANNOUNCEMENT).unlink(missing_ok=True)


def supervisor_token(folder: str) -> str:
    """One `resilient launch` of a run, told from another."""
    return Path(folder).name if folder else ""
