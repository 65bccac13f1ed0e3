"""How often state is captured, and how much of it is kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotConfig:
    """The memory ring. every: steps between snapshots (0: none); keep: how many, or fewer, but two, when that many take
    more than budget_mb of a rank's host memory (null: no limit).

    trust_after: clean steps after a snapshot before it may be a rollback target. Damage done by the step just before
    an alarm shows only in the next loss, so the newest snapshot may already carry it."""

    every: int = 5
    keep: int = 4
    budget_mb: float | None = None
    trust_after: int = 2


@dataclass(frozen=True)
class CheckpointConfig:
    """The filesystem store. every: steps between checkpoints (0: none); keep: how many complete ones. keep_best: and the
    one with the best evaluation, however old (BR-35); evaluate at multiples of `every`, for only weights that were both
    saved and evaluated can be it.

    on_failure: what all ranks do together when a save fails on any of them."""

    every: int = 25
    keep: int = 3
    keep_best: bool = True
    on_failure: str = "continue"  # continue | abort
