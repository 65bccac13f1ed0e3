"""Named errors and the exit codes of DESIGN 8.

Every error a person can cause or must act on is one of these. `exit_code` is what the process ends
with when the error reaches the command line, on every rank alike.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.signals import LinkReport


class ExitCode(IntEnum):
    """What a supervisor may conclude from a process's exit status."""

    DONE = 0
    BAD_CONFIG = 64
    RESTART = 75
    RESTART_EXCLUDING = 76
    NEEDS_PERSON = 77
    PREEMPTED = 78


class ResilientError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_code: ExitCode = ExitCode.NEEDS_PERSON


class ConfigError(ResilientError):
    """The configuration cannot be used. The message names the full key and the nearest valid one."""

    exit_code = ExitCode.BAD_CONFIG


class UnreadableLog(ConfigError):
    """A training log that is missing, is no log, or holds no point. The message says what was tried and what to do."""


class GuardError(ResilientError):
    """The guard itself broke (exchange timed out, a detector raised, the journal cannot be written)."""


class ExchangeFailed(GuardError):
    """The ranks could not meet: one is gone, late beyond the deadline, or out of step. Raised to the loop only where
    going on unguarded would leave the ranks in different states (in the middle of a rollback, or at the start)."""

    exit_code = ExitCode.RESTART


class ProbeFailed(ExchangeFailed):
    """The link probe could not finish: a rank or a link did not answer in time, or its figures arrived damaged.

    report: what is known, with the links that did not answer among the slow ones. missing: ranks that did not answer at
    all. usable: the process group may still be used; False: operations on it have been given up half done."""

    def __init__(self, message: str, report: LinkReport, missing: tuple[int, ...] = (), usable: bool = False) -> None:
        super().__init__(message)
        self.report, self.missing, self.usable = report, missing, usable


class Interrupted(ResilientError):
    """Told to end after the guard had broken: probably a rank died and the launcher clears the rest away."""

    exit_code = ExitCode.RESTART


class RankDisagreement(ResilientError):
    """Two ranks decided differently on what should have been the same table."""


class ScheduleMismatch(ResilientError):
    """LR or schedule position is not what the optimizer-step count implies (BR-09, BR-10)."""


class CounterMismatch(ResilientError):
    """Step, engine, schedule and data positions do not agree at a quiescent point (BR-18, BR-19)."""


class DataPositionError(ResilientError):
    """The data position cannot be restored, or is not where it is said to be (BR-11, BR-13)."""


class MonitorBlind(ResilientError):
    """A registered statistic never received a value on some rank (BR-47)."""


class GradientsLeft(ResilientError):
    """Gradient buffers were not empty when a window began: the step would use old gradients, too (BR-04)."""


class CheckpointError(ResilientError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another run, world or engine."""


class NothingUsable(CheckpointError):
    """Traces of training but no usable checkpoint: never restarted from zero in silence (BR-25)."""


class StopRequested(ResilientError):
    """The policy decided to stop; the report says why."""


class Preempted(ResilientError):
    """The job was asked to leave (TERM, USR1) and left at a step boundary with its state saved; resumable."""

    exit_code = ExitCode.PREEMPTED
