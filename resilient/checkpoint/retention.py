"""Which checkpoints may go. Pure: names in, names out."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def to_delete(
    complete: Sequence[str], orphans: Sequence[str], *, keep: int, rejected: Collection[str] = ()
) -> list[str]:
    """Names to delete.

    complete, orphans: newest first. rejected: complete by size, but their content was refused at load; they do not
    count as kept. The newest `keep` sound ones stay (at least one), and so does the newest broken one, for a person
    to look at. While there is no sound one, nothing is deleted.
    """
    sound = [name for name in complete if name not in rejected]
    if not sound:
        return []
    broken = [name for name in complete if name in rejected] + list(orphans)
    return sound[max(keep, 1) :] + broken[1:]
