"""Verdicts against ground truth: was it seen, when, was the right rank named, and the right cause?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

CAUSES = ("data", "optimizer", "precision", "compute", "communication", "unknown")


@dataclass
class Score:
    """Of the runs of one fault. delays: steps from the fault to the first verdict. ranks, causes: right ones among the
    detected. confusion: cause named -> times. false: verdicts before the fault, and in clean runs. excluded: runs that
    left out data although machine or wire was to blame."""

    runs: int = 0
    detected: int = 0
    ranks: int = 0
    causes: int = 0
    delays: list[int] = field(default_factory=list)
    confusion: dict[str, int] = field(default_factory=dict)
    abstained: int = 0
    false: int = 0
    clean_steps: int = 0
    excluded: int = 0
    broken: list[str] = field(default_factory=list)

    def __iadd__(self, other: Score) -> Score:
        for name in ("runs", "detected", "ranks", "causes", "abstained", "false", "clean_steps", "excluded"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.delays += other.delays
        self.broken += other.broken
        for cause, times in other.confusion.items():
            self.confusion[cause] = self.confusion.get(cause, 0) + times
        return self


def score(run: dict[str, Any]) -> Score:
    """One run."""
    truth, told = run["truth"], run["told"]
    found = Score(runs=1)
    if run["ended"] and not run["ended"].startswith("StopRequested"):
        found.broken.append(f"{run['scenario']} on {run['engine']}, {run['world']} ranks: {run['ended']}")
    if truth is None:
        found.false = sum(_accuses(t) for t in told)
        found.clean_steps = run["steps"]
        return found
    before = [t for t in told if t["step"] < truth["step"]]
    after = [t for t in told if t["step"] >= truth["step"]]
    found.false = sum(_accuses(t) for t in before)
    found.clean_steps = truth["step"] - 1
    if not after:
        return found
    first = _leading(after)
    found.detected = 1
    found.delays = [after[0]["step"] - truth["step"]]
    found.ranks = int(_right_ranks(first, truth, run["world"]))
    found.confusion = {first["cause"]: 1}
    found.abstained = int(first["cause"] == "unknown")
    found.causes = int(first["cause"] == truth["cause"])
    found.excluded = int(bool(run["excluded"]) and truth["cause"] in ("compute", "communication"))
    return found


def _leading(after: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The verdict that decides: of the attempt that was the first to be refused, else the first that was told."""
    acting = [t for t in after if t["severity"] == "act"]
    return acting[0] if acting else after[0]


def _accuses(told: dict[str, Any]) -> bool:
    return told["cause"] in ("communication", "compute")


def _right_ranks(told: dict[str, Any], truth: dict[str, Any], world: int) -> bool:
    """The rank is named, and no other. A fault of all ranks needs no name, or all of them. Where two ranks look alike
    (the same samples or streams, a corrupted replica of two) a pair that holds the right one is right; so are both ends of
    the only link that there is, between two ranks."""
    named, hit = set(told["ranks"]), set(truth["ranks"])
    if not hit:
        return not named or len(named) == world
    alike = truth["kind"] in ("shuffle_mismatch", "swapped_rng", "replica_drift")
    ends = truth["kind"] == "slow_link" and world == 2
    return named == hit or ((alike or ends) and hit <= named and len(named) <= 2)


def total(scores: Iterable[Score]) -> Score:
    found = Score()
    for one in scores:
        found += one
    return found
