"""How often state is captured, and how much of it is kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotConfig:
    """The memory ring. every: steps between snapshots (0: none); keep: how many."""

    every: int = 5
    keep: int = 4


@dataclass(frozen=True)
class CheckpointConfig:
    """The filesystem store. every: steps between checkpoints (0: none); keep: how many complete ones.

    on_failure: what all ranks do together when a save fails on any of them."""

    every: int = 50
    keep: int = 3
    on_failure: str = "continue"  # continue | abort
