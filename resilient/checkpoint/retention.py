"""Which checkpoints may go. Pure: names in, names out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence


def to_delete(
    complete: Sequence[str],
    orphans: Sequence[str],
    *,
    keep: int,
    rejected: Collection[str] = (),
    best: str | None = None,
) -> list[str]:
    """Names to delete.

    complete, orphans: newest first. rejected: complete by size, but their content was refused at load, or is sick
    (weights or evaluation not finite, BR-35); they do not count as kept. best: stays whatever its age. The newest `keep`
    sound ones stay (at least one), and so does the newest broken one, for a person to look at. While there is no sound
    one, nothing is deleted.
    """
    sound = [name for name in complete if name not in rejected]
    if not sound:
        return []
    broken = [name for name in complete if name in rejected] + list(orphans)
    return [name for name in sound[max(keep, 1) :] if name != best] + broken[1:]


def best_of(losses: Mapping[str, float | None]) -> str | None:
    """The name with the smallest evaluation loss, the first of equals. NaN counts as worst, None was never evaluated."""
    known = {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(known, key=lambda name: known[name], default=None)
