"""Configuration errors as a person wants to read them: all of them at once, the full key, the nearest valid one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from resilient.errors import ConfigError, ExitCode, ResilientError


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `word`, or None. The last part of a dotted key counts most: keys of one group look alike."""

    def likeness(candidate: str) -> float:
        whole = SequenceMatcher(None, word, candidate).ratio()
        last = SequenceMatcher(None, word.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1]).ratio()
        return 0.3 * whole + 0.7 * last

    best = max(sorted(candidates), key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.65 else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """'; did you mean X?', or a list of what there is when nothing is near and the list is short, or nothing."""
    pool = sorted(candidates)
    close = nearest(word, pool)
    if close:
        return f"; did you mean {close}?"
    return f"; there is: {', '.join(pool)}" if 0 < len(pool) <= 16 else ""


def all_in_one(problems: Sequence[str]) -> ConfigError:
    """One error for all problems, in the order given, without repetitions."""
    lines = list(dict.fromkeys(problems))
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError("\n".join([f"{len(lines)} problems:", *(f"  - {line}" for line in lines)]))


def fail(error: ResilientError, rank: int = 0) -> int:
    """Print the error on stderr, on rank 0 only. Returns the exit code, which is the same on all ranks."""
    if rank == 0:
        label = "bad configuration" if error.exit_code == ExitCode.BAD_CONFIG else type(error).__name__
        print(f"resilient: {label}: {error}", file=sys.stderr, flush=True)
    return int(error.exit_code)
