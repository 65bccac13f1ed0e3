"""Time across ranks: a rank that the others wait for, and a wire that all of them wait for (S19).

In a step that all ranks begin and end together, compute and wait add up to the same on each of them. So a rank is

    slow   when it computes longer than the median of its other peers, by a share and by seconds, and, where waits can be
           seen, is not itself among those that wait: the slowest rank computes longest and waits least;
    held   when its peers wait, and neither its own compute nor its own wait says what for: compute plus wait is shorter
           than the median of its other peers by as much. What it sends is late: its link, or whatever hands data to it.
           Where `reduce_s` is known, its excess over the wait is what the rank spent on handing its collectives over;
           a rank that merely began its step late (it logs, evaluates, saves) has spent nothing there and is not held.

It is named when it was so in `needed` of the last `window` attempts, and if such attempts went to any member of its group
alike, so many of them would be its own with a chance below 5e-5 only (sign test, Chernoff's bound of the binomial tail; two
ranks need 15 of 16 for that). So jitter, long batches that go around, a slow step, an
evaluation, a garbage collection or a checkpoint make none; nor does a slow-down of the whole group.

The rank that waits least waits for nobody: what it still waits is the transfer itself. When that shortest wait is several
times its usual value for as long, and no rank is named, the wire is suspected: a collective that the slow link is part of
takes as long on all ranks. Which link is for a probe to find out.

Time is no reason to refuse a step: these findings warn at most. On CUDA the host does not see waits (`collective_s` is NaN)
and compute alone decides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from resilient.detectors.config import StragglersConfig
from resilient.detectors.peers import Middles, PeerGroups
from resilient.signals import Finding, Observation, Severity
from resilient.signals.middle import median
from resilient.signals.sketch import SketchSummary

_SURE = 10.0  # nats: a chance of 5e-5; more where there are more than 8 ranks to be wrong about
_WAIT_SHARE = 0.25  # of its excess seconds by which a slow rank must wait less than its peers' median
_HANDED_OVER = 0.5  # share of what its peers wait for it that a held rank must have spent on its collectives
_WIRE_RATE = 1 / 32
_WIRE_START = 16  # attempts before the shortest wait has a usual value
_WIRE_ACCEPT = 256  # attempts in a row after which a slower wire is the usual one
_NAMED = 16  # ranks that one finding names at most
_ALONE = 4  # ranks with a finding of their own


class _Look:
    """One attempt's times, (world,). times: seconds. slow, held: bool. waits: seconds; None: not seen. shortest: median over
    peer groups of the shortest wait in each, seconds; NaN where waits are not seen on all ranks."""

    def __init__(self, times: np.ndarray, waits: np.ndarray | None, groups: PeerGroups) -> None:
        self.times, self.waits, self._groups = times, waits, groups
        self.valid = None if math.isfinite(times.sum()) and times.min() > 0.0 else np.isfinite(times) & (times > 0.0)
        self.slow = self.held = np.zeros(len(times), dtype=bool)
        self.shortest = math.nan

    @functools.cached_property
    def median(self) -> np.ndarray:
        """(world,) seconds that the other peers compute. Not needed while no rank's time is far from it."""
        return self._groups.middle_of_others(self.times, self.valid)


class _Often:
    """In which of the last `window` attempts each rank was so."""

    def __init__(self, window: int, world: int) -> None:
        self.hits = np.zeros((window, world), dtype=bool)
        self.count = np.zeros(world, dtype=np.int16)  # of them
        self.onset = np.zeros(world, dtype=np.int64)  # first step of the present run

    def with_this(self, now: np.ndarray, slot: int) -> np.ndarray:
        """(world,) how often, if `now` were the attempt in `slot`."""
        if not now.any() and not self.hits[slot].any():
            return self.count
        return self.count - self.hits[slot] + now

    def absorb(self, now: np.ndarray, slot: int, step: int) -> None:
        if now.any():
            self.onset[now & (self.count == 0)] = step
        elif not self.hits[slot].any():
            return
        self.count = self.count + now.astype(np.int16) - self.hits[slot]
        self.hits[slot] = now

    def state_dict(self) -> dict[str, Any]:
        return {"hits": self.hits.copy(), "onset": self.onset.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hits = np.array(state["hits"], dtype=bool)
        self.count = self.hits.sum(axis=0, dtype=np.int16)
        self.onset = np.array(state["onset"], dtype=np.int64)


class Stragglers:
    """O(world) work per attempt, O(world * window) bytes of memory."""

    name = "stragglers"

    def __init__(self, config: StragglersConfig) -> None:
        self.config = config
        self._groups: PeerGroups | None = None
        self._looked: tuple[Observation, _Look | None] | None = (
            None  # at the attempt being judged, not part of the state
        )
        self._attempts = 0
        self._start_anew(0)

    def _start_anew(self, world: int) -> None:
        window = self.config.window
        self._slow, self._held = _Often(window, world), _Often(window, world)
        self._wire = np.zeros(window, dtype=bool)
        self._wire_usual = np.zeros(2)  # seconds, attempts it is from
        self._wire_run = 0
        self._wire_onset = 0

    def observe(self, observation: Observation) -> list[Finding]:
        look = self._look(observation)
        if look is None or self._attempts < self.config.start or len(self._slow.count) != len(look.times):
            return []
        slot = self._attempts % self.config.window
        found = self._named(observation, look, self._slow, look.slow, slot, "compute_s", self._computes)
        found += self._named(observation, look, self._held, look.held, slot, "collective_s", self._is_waited_for)
        return found or self._wire_finding(observation.step, look.shortest, slot)

    def absorb(self, observation: Observation, findings: Sequence[Finding], applied: bool) -> None:
        look = self._look(observation)
        self._looked = None
        if look is None:
            return
        self._attempts += 1
        if self._attempts <= self.config.start:
            return
        if len(self._slow.count) != len(look.times):
            self._start_anew(len(look.times))
        slot = (self._attempts - 1) % self.config.window
        self._slow.absorb(look.slow, slot, observation.step)
        self._held.absorb(look.held, slot, observation.step)
        self._absorb_wire(observation.step, look.shortest, slot)

    def _look(self, observation: Observation) -> _Look | None:
        if self._looked is None or self._looked[0] is not observation:
            times = observation.per_rank.get("compute_s")
            known = times is not None and len(times) > 1 and len(observation.peers) > 0
            self._looked = (observation, self._compare(observation) if known else None)
        return self._looked[1]

    def _groups_of(self, observation: Observation) -> PeerGroups:
        world = len(observation.per_rank["compute_s"])
        if self._groups is None or not self._groups.fits(observation.peers, world):
            self._groups = PeerGroups(observation.peers, world)
        return self._groups

    def _compare(self, observation: Observation) -> _Look:
        times, waits = (observation.per_rank.get(name) for name in ("compute_s", "collective_s"))
        groups = self._groups_of(observation)
        look = _Look(np.ascontiguousarray(times), None if waits is None else np.ascontiguousarray(waits), groups)
        usual = groups.middles(look.times) if look.valid is None else None
        self._find_slow(look, usual)
        if look.waits is not None and math.isfinite(look.waits.sum()):
            look.shortest = median(groups.least(look.waits))
            self._find_held(observation, look, 0.0 if usual is None else usual.lowest)
        return look

    def _least(self, usual: np.ndarray | float) -> Any:
        """Seconds from which a time is far from the usual one."""
        return np.maximum(self.config.relative * usual, self.config.absolute_s)

    def _find_slow(self, look: _Look, usual: Middles | None) -> None:
        """usual: None where the times of some ranks are not known."""
        if usual is None:
            ranks, others = np.arange(len(look.times)), look.median
        elif look.times.max() < usual.lowest + self._least(usual.lowest):
            return
        else:  # few ranks: the others cannot be
            ranks = np.flatnonzero(look.times >= usual.lowest + self._least(usual.lowest))
            others = usual.of(ranks)
        seconds = look.times[ranks] - others
        slow = seconds >= self._least(others)  # NaN is not
        if look.waits is not None and slow.any():
            known = np.isfinite(look.waits)
            waits = self._others_wait(look, ranks, known)
            with np.errstate(invalid="ignore"):
                slow &= ~(look.waits[ranks] + _WAIT_SHARE * seconds > waits)  # unknown: compute alone decides
        look.slow = np.zeros(len(look.times), dtype=bool)
        look.slow[ranks] = slow

    def _others_wait(self, look: _Look, ranks: np.ndarray, known: np.ndarray) -> np.ndarray:
        """(len(ranks),) median wait of the other peers that are known."""
        assert look.waits is not None and self._groups is not None
        if known.all():
            return self._groups.middles(look.waits).of(ranks)
        return self._groups.middle_of_others(look.waits, known)[ranks]

    def _find_held(self, observation: Observation, look: _Look, usual: float) -> None:
        """The waits are known. usual: what the peers of every rank compute at least, seconds."""
        assert look.waits is not None and self._groups is not None
        total = look.times + look.waits
        if not math.isfinite(total.sum()):  # nobody can be, if a time is not known
            return
        together = self._groups.middles(total)
        if not together.highest - total.min() >= self._least(usual):
            return
        missing = self._groups.middle_of_others(total) - total
        look.held = missing >= self._least(look.median)
        spent = observation.per_rank.get("reduce_s")
        if spent is not None and look.held.any():
            look.held &= ~(spent - look.waits < _HANDED_OVER * missing)  # unknown: what the others wait for decides

    def _evidence(self, observation: Observation, count: np.ndarray) -> np.ndarray:
        """(world,) nats against the chance that so many of the group's attempts in the window fell to this rank."""
        groups = self._groups_of(observation)
        total = np.zeros(len(count))
        for index in groups.blocks:
            total[index] = count[index].sum(axis=1, keepdims=True)
        even = 1.0 / groups.sizes
        share = count / np.maximum(total, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = np.where(share < 1.0, (1.0 - share) * np.log((1.0 - share) / (1.0 - even)), 0.0)
            return np.where(share > even, total * (share * np.log(share / even) + rest), 0.0)

    # -- the rank ------------------------------------------------------------------------------------------------------

    def _named(
        self,
        observation: Observation,
        look: _Look,
        often: _Often,
        now: np.ndarray,
        slot: int,
        signal: str,
        words: Callable[[_Look, int, int], str],
    ) -> list[Finding]:
        """A finding for each of the worst, or one for all when they are many."""
        count = often.with_this(now, slot)
        if not (count >= self.config.needed).any():
            return []
        score = self._evidence(observation, count)
        ranks = np.flatnonzero((count >= self.config.needed) & (score >= _SURE + math.log(max(len(count) / 8, 1.0))))
        order = ranks[np.lexsort((ranks, -score[ranks]))]
        several = len(order) > _ALONE
        found = []
        for rank in map(int, order[:1] if several else order):
            named = tuple(int(r) for r in order[:_NAMED]) if several else (rank,)
            told = words(look, rank, int(count[rank]))
            if several:
                told = f"{len(order)} ranks are slow, the worst {', '.join(map(str, named))}: {told}"
            series = look.times if signal == "compute_s" or look.waits is None else look.waits
            found.append(
                Finding(
                    detector=self.name,
                    signal=signal,
                    severity=Severity.WARN,
                    score=float(score[rank]),
                    step=observation.step,
                    onset_step=int(often.onset[rank]),
                    ranks=named,
                    statistic="time",
                    value=float(series[rank]),
                    reference=float(look.median[rank] if signal == "compute_s" else np.median(series)),
                    message=told,
                )
            )
        return found

    def _computes(self, look: _Look, rank: int, times: int) -> str:
        seen = look.waits is not None and math.isfinite(look.waits[rank])
        told = (
            f"rank {rank} was the slow one in {times} of the last {self.config.window} attempts: it computes "
            f"{look.times[rank]:.3g} s, its peers {look.median[rank]:.3g} s"
        )
        if not seen or look.waits is None:
            return f"{told}; waits are not seen on this device"
        return f"{told}, and waits {look.waits[rank]:.3g} s"

    def _is_waited_for(self, look: _Look, rank: int, times: int) -> str:
        assert look.waits is not None
        others = float(np.median(np.delete(look.waits, rank)))
        return (
            f"the others waited for rank {rank} in {times} of the last {self.config.window} attempts: {others:.3g} s in the "
            f"reduction, rank {rank} itself {look.waits[rank]:.3g} s, and it computes no longer ({look.times[rank]:.3g} s, its "
            f"peers {look.median[rank]:.3g} s): what it sends is late"
        )

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _wire_slow(self, shortest: float) -> bool:
        usual, points = self._wire_usual
        c = self.config
        return bool(
            points >= _WIRE_START and shortest >= c.wire_ratio * usual and shortest >= usual + c.wire_absolute_s
        )

    def _wire_finding(self, step: int, shortest: float, slot: int) -> list[Finding]:
        slow = self._wire_slow(shortest)
        count = int(self._wire.sum()) - int(self._wire[slot]) + int(slow)
        if not slow or count < self.config.needed:
            return []
        usual = float(self._wire_usual[0])
        return [
            Finding(
                detector=self.name,
                signal="collective_s",
                severity=Severity.WARN,
                score=shortest / max(usual, 1e-6),
                step=step,
                onset_step=self._wire_onset if self._wire.any() else step,
                statistic="time",
                value=shortest,
                reference=usual,
                message=(
                    f"even the rank that waits least waits {shortest:.3g} s for the reduction, usually {usual:.3g} s, in {count} "
                    f"of the last {self.config.window} attempts, and no rank computes longer: the network is suspected"
                ),
            )
        ]

    def _absorb_wire(self, step: int, shortest: float, slot: int) -> None:
        slow = self._wire_slow(shortest)
        if not self._wire.any():
            self._wire_onset = step
        self._wire[slot] = slow
        self._wire_run = self._wire_run + 1 if slow else 0
        if not math.isfinite(shortest):
            return
        if self._wire_run >= _WIRE_ACCEPT:
            self._wire_usual[:] = shortest, _WIRE_START
            self._wire[:], self._wire_run = False, 0
        elif not slow:
            usual, points = self._wire_usual
            most = np.inf if points == 0 else 2.0 * usual + 0.01
            self._wire_usual[1] = points + 1.0
            self._wire_usual[0] += max(1.0 / (points + 1.0), _WIRE_RATE) * (min(shortest, most) - usual)

    def state_dict(self) -> dict[str, Any]:
        return {
            "attempts": self._attempts,
            "slow": self._slow.state_dict(),
            "held": self._held.state_dict(),
            "wire": self._wire.copy(),
            "wire_usual": self._wire_usual.copy(),
            "wire_run": self._wire_run,
            "wire_onset": self._wire_onset,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._attempts = int(state["attempts"])
        self._slow.load_state_dict(state["slow"])
        self._held.load_state_dict(state["held"])
        self._wire = np.array(state["wire"], dtype=bool)
        self._wire_usual = np.array(state["wire_usual"], dtype=np.float64)
        self._wire_run = int(state["wire_run"])
        self._wire_onset = int(state["wire_onset"])
        self._looked = None


class SketchStragglers:
    """The same question to a sketch: a rank among the slowest of its kind, by enough, in `needed` of the last `window`
    attempts. In a large world, jitter does not choose the same rank so often. Waits are not in a sketch."""

    name = "stragglers"

    def __init__(self, config: StragglersConfig) -> None:
        self.config = config
        self._attempts = 0
        self._slow: dict[int, list[list[int]]] = {}  # rank -> [attempt, step] of those in which it was slow

    def observe(self, summary: SketchSummary) -> list[Finding]:
        if self._attempts < self.config.start:
            return []
        found = []
        for rank, seconds, usual in self._slow_now(summary):
            before = self._recent(rank)
            if len(before) + 1 >= self.config.needed:
                found.append(
                    Finding(
                        detector=self.name,
                        signal="compute_s",
                        severity=Severity.WARN,
                        score=seconds / usual,
                        step=summary.step,
                        onset_step=before[0][1] if before else summary.step,
                        ranks=(rank,),
                        statistic="time",
                        value=seconds,
                        reference=usual,
                        message=f"rank {rank} was among the slow ones in {len(before) + 1} of the last {self.config.window} "
                        f"attempts: it computes {seconds:.3g} s, its peers {usual:.3g} s; waits are not in a sketch",
                    )
                )
        return sorted(found, key=lambda f: (-f.score, f.ranks))[:_ALONE]

    def absorb(self, summary: SketchSummary, findings: Sequence[Finding], applied: bool) -> None:
        self._attempts += 1
        if self._attempts <= self.config.start:
            return
        slow = {rank for rank, _, _ in self._slow_now(summary)}
        kept = {rank: self._recent(rank) for rank in self._slow}
        for rank in slow:
            kept[rank] = [*kept.get(rank, []), [self._attempts, summary.step]]
        self._slow = {rank: kept[rank] for rank in sorted(kept) if kept[rank]}

    def _recent(self, rank: int) -> list[list[int]]:
        """Earlier slow attempts that are in the window of the next one."""
        oldest = self._attempts + 1 - self.config.window
        return [told for told in self._slow.get(rank, []) if told[0] > oldest]

    def _slow_now(self, summary: SketchSummary) -> list[tuple[int, float, float]]:
        """(rank, seconds, median over the others) of the slow ones among the extremes."""
        extremes = summary.extremes["compute_s"]
        seconds = np.exp(extremes.value)
        median = np.exp(summary.middle_of_others("compute_s", extremes.value))
        slow = (seconds >= median * (1.0 + self.config.relative)) & (seconds - median >= self.config.absolute_s)
        return [(int(extremes.ranks[i]), float(seconds[i]), float(median[i])) for i in np.flatnonzero(slow)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "attempts": self._attempts,
            "slow": {str(rank): [list(told) for told in each] for rank, each in self._slow.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._attempts = int(state["attempts"])
        self._slow = {int(rank): [[int(v) for v in told] for told in each] for rank, each in state["slow"].items()}
