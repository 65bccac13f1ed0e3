"""How much work a restart would lose now: the age of the newest checkpoint. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Age:
    """Since the newest checkpoint, or since the start where there is none: optimizer steps, seconds."""

    steps: int
    seconds: float


def checkpoint_age(step: int, now_s: float, newest: tuple[int, float]) -> Age:
    """step, now_s: where the run stands. newest: step of the checkpoint, and when its state was captured, by the same clock.

    After a rollback the newest checkpoint may be of a later step than the run: nothing would be lost then."""
    return Age(max(step - newest[0], 0), max(now_s - newest[1], 0.0))


def overdue(age: Age, every: int, intervals: int) -> bool:
    """Whether it is time to call somebody: so many intervals of `every` steps passed without a checkpoint. 0: never."""
    return every > 0 and intervals > 0 and age.steps > every * intervals
