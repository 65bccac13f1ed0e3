"""What a state may lack, and what is said where it does not fit: the same words from every engine."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from resilient.errors import ConfigError

BUFFER = "buffers/"
_SHOWN = 12  # lines of a report of differences


def refuse_unknown(allow_missing: Collection[str], optional: Collection[str], engine: str) -> None:
    """Raises ConfigError for names that no state of this engine could be without. optional: `Engine.optional_parts()`."""
    for name in allow_missing:
        if name in optional:
            continue
        parts = [part for part in optional if not part.startswith(BUFFER)]
        near = difflib.get_close_matches(name, optional, n=1)
        buffers = sum(part.startswith(BUFFER) for part in optional)
        raise ConfigError(
            f"run.checkpoint.allow_missing names {name!r}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
            + f": for {engine} it may name {', '.join(parts)} and {BUFFER}NAME, where NAME is one of the model's {buffers} "
            "persistent buffers"
        )


def group_difference(theirs: Sequence[str], ours: Sequence[str]) -> str:
    """How a parameter group of a state differs from the one here, by names of parameters; "" if it does not."""
    if list(theirs) == list(ours):
        return ""
    lines = []
    for only, where in ((set(theirs) - set(ours), "in the state"), (set(ours) - set(theirs), "here")):
        if only:
            more = f" and {len(only) - 4} more" if len(only) > 4 else ""
            lines.append(f"{', '.join(sorted(only)[:4])}{more} only {where}")
    return "; ".join(lines) or "the same parameters in another order"


def report(headline: str, lines: Sequence[str]) -> str:
    """A headline and the first of the lines below it."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n  ".join([headline, *lines[:_SHOWN], *more])
