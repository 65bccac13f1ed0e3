"""Which checkpoints may go. Pure: what is held in, names out.

One rule comes before all others: what can be gone back to is never deleted to save space. And one is easily forgotten:
the next snapshot to become good must be allowed to, or a run that saves faster than trust grows never has a good one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from resilient.checkpoint.trust import Trust

AT_RISK = 2  # good ones kept when risk is high (S15)


@dataclass(frozen=True)
class Held:
    """One checkpoint, as far as keeping it is concerned.

    name: how the caller calls it. sound: weights and evaluation were finite (BR-35) and nobody refused its content.
    in_force: training has come through it; not of a course that was given up. loss: of its evaluation, None: there was
    none. pinned: a person or an incident wants it kept."""

    name: str
    step: int
    trust: Trust = Trust.PROVISIONAL
    sound: bool = True
    in_force: bool = True
    loss: float | None = None
    pinned: bool = False

    @property
    def good(self) -> bool:
        return self.sound and self.trust is Trust.GOOD

    @property
    def young(self) -> bool:
        return self.sound and self.trust is Trust.PROVISIONAL

    @property
    def broken(self) -> bool:
        return not (self.good or self.young)


@dataclass(frozen=True)
class Retention:
    """last: newest good ones kept, at least one. every: and good ones at multiples of so many steps, 0: none. best: and
    the one with the best evaluation. young: newest provisional ones kept; the next to become good always is."""

    last: int = 3
    every: int = 0
    best: bool = True
    young: int = 2


def expendable(
    held: Sequence[Held], orphans: Sequence[str] = (), rules: Retention = Retention(), *, at_risk: bool = False
) -> list[str]:
    """Names to delete, of `held` (complete ones, newest commit first) and `orphans` (names of folders without a usable
    manifest, newest first, without those still being written).

    Kept are: the newest `last` good ones (of a course given up only when there are no others), at least two when `at_risk` (stability level C or worse), filled up with provisional
    ones while there are not so many; good ones at every K-th step; the best by evaluation; pinned ones; the newest
    provisional ones and the next to become good; and the newest broken one (tainted, quarantined, unsound or an orphan),
    for a person to look at. While there is neither a good nor a provisional one, nothing is deleted."""
    good, young = _by_course(h for h in held if h.good), _by_course(h for h in held if h.young)
    if not good and not young:
        return []
    least = max(rules.last, AT_RISK if at_risk else 1)
    kept = {h.name for h in good[:least]}
    kept.update(h.name for h in young[: max(least - len(good), 0)])
    kept.update(h.name for h in young[: rules.young] if h.in_force)
    kept.update(next_good(held))
    kept.update(h.name for h in held if h.pinned)
    if rules.every > 0:
        kept.update(h.name for h in good if h.step % rules.every == 0)
    if rules.best:
        best = best_of({h.name: h.loss for h in held if not h.broken})
        kept.update([best] if best is not None else [])
    broken = [h.name for h in held if h.broken] + list(orphans)
    kept.update(broken[:1])
    return [name for name in [*(h.name for h in held), *orphans] if name not in kept]


def next_good(held: Iterable[Held]) -> list[str]:
    """The oldest provisional one in force that is newer than every good one: the next to become good. None or one name.
    held: newest first."""
    waiting: list[str] = []
    for h in held:
        if h.good and h.in_force:
            break
        if h.young and h.in_force:
            waiting = [h.name]
    return waiting


def _by_course(held: Iterable[Held]) -> list[Held]:
    """Those that training came through first, each kind newest first as it was: a course given up keeps no newer one alive
    at the cost of the one that training goes on from."""
    return sorted(held, key=lambda h: not h.in_force)


def best_of(losses: Mapping[str, float | None]) -> str | None:
    """The name with the smallest evaluation loss, the first of equals. NaN counts as worst, None was never evaluated."""
    known = {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(known, key=lambda name: known[name], default=None)
