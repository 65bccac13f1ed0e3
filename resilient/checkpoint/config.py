"""How often state is captured, and how much of it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from resilient.checkpoint.storage import location_problem
from resilient.errors import ConfigError


@dataclass(frozen=True)
class SnapshotConfig:
    """The memory ring. every: steps between snapshots (0: none); keep: how many, or fewer, but three, when that many take
    more than budget_mb of a rank's host memory (null: no limit).

    trust_after: clean steps after a snapshot before it may be a rollback target. Damage done by the step just before
    an alarm shows only in the next loss, so the newest snapshot may already carry it."""

    every: int = 5
    keep: int = 4
    budget_mb: float | None = None
    trust_after: int = 2


@dataclass(frozen=True)
class CheckpointConfig:
    """The filesystem store. every: steps between checkpoints (0: none); keep: how many good ones, and the newest that may
    become good. keep_every: and those of multiples of so many steps (0: none). keep_best: and the
    one with the best evaluation, however old (BR-35); evaluate at multiples of `every`, for only weights that were both
    saved and evaluated can be it.

    adaptive: the interval follows risk and cost instead of `every` (S15): between shortest and longest steps, see interval.py.
    location: a folder, or an fsspec URL without credentials, of which <run id> is added; of all ranks, or one for all ranks
        of each host. null: <run>/checkpoints.
    blocking: wait for each save before the next step, instead of writing in the background.
    when_busy: what happens when one is due while one is being written and one more waits: wait (for the first) | replace (the
        waiting one).
    deadline_s: longest time to write or read one rank's part; then it has failed, even if the storage never answers.
    on_failure: what all ranks do together when a save fails on any of them: continue (without it) | retry (up to `retries`
        times, `retry_wait_s` later, doubled each time; then continue) | abort.
    peer: copy every snapshot of the ring into this host's and another host's memory, too: there it outlives the processes, and
        one host may be lost. Takes twice a rank's state, for two snapshots, of peer_folder, which must be memory.
    elastic: start from a checkpoint that another number of ranks has saved, where every part can be had (docs/checkpoints.md);
        false: refuse it.
    allow_missing: parts that the state to start from may lack, and that then stay as they are in this process: moments,
        schedulers, scaler, buffers/NAME (docs/checkpoints.md). Anything else that is missing is refused.
    alarm_after: intervals without a new checkpoint after which that is told (0: never)."""

    every: int = 25
    adaptive: bool = False
    shortest: int = 5
    longest: int = 1000
    keep: int = 3
    keep_every: int = 0
    keep_best: bool = True
    location: str | None = None
    blocking: bool = False
    when_busy: Literal["wait", "replace"] = "wait"
    deadline_s: float = 600.0
    on_failure: Literal["continue", "retry", "abort"] = "continue"
    retries: int = 3
    retry_wait_s: float = 5.0
    alarm_after: int = 3
    peer: bool = False
    peer_folder: str = "/dev/shm/resilient"
    elastic: bool = True
    allow_missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problem = location_problem(self.location or "")
        if problem:  # here, before any of it can be written to a log
            raise ConfigError(problem)
        if isinstance(self.allow_missing, str):
            raise ConfigError(f"run.checkpoint.allow_missing={self.allow_missing}: must be a list of names")
