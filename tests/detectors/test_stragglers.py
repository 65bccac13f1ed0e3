"""Time across ranks: who is a straggler, what is none, and when the wire is suspected (S19)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from resilient.detectors import Stragglers, StragglersConfig
from resilient.signals import Finding, Observation, Severity

Times = Callable[[int, np.ndarray, np.random.Generator], None]


def observe_all(
    detector: Stragglers,
    change: Times = lambda step, compute, rng: None,
    *,
    world: int = 8,
    steps: int = 120,
    first: int = 1,
    jitter: float = 0.05,
    transfer: Callable[[int], float] = lambda step: 0.02,
    seen: bool = True,
    peers: tuple[tuple[int, ...], ...] | None = None,
) -> dict[int, list[Finding]]:
    """Findings by step. A rank waits for the slowest of its group, and all of them for the transfer."""
    rng = np.random.default_rng(world)
    found = {}
    groups = peers or (tuple(range(world)),)
    for step in range(first, first + steps):
        compute = np.exp(jitter * rng.standard_normal(world))
        change(step, compute, rng)
        wait = np.full(world, math.nan)
        if seen:
            for group in groups:
                members = list(group)
                wait[members] = compute[members].max() - compute[members] + transfer(step)
        observation = Observation(step, step, {}, {"compute_s": compute, "collective_s": wait}, groups)
        findings = detector.observe(observation)
        detector.absorb(observation, findings, True)
        if findings:
            found[step] = findings
    return found


def slow(rank: int, factor: float, start: int = 40) -> Times:
    def change(step: int, compute: np.ndarray, rng: np.random.Generator) -> None:
        if step >= start:
            compute[rank] *= factor

    return change


class TestStragglers:
    @pytest.mark.parametrize("seen", [True, False])
    @pytest.mark.parametrize("world", [2, 3, 8, 1000])
    def test_a_slow_rank_is_named_within_the_window(self, world: int, seen: bool):
        found = observe_all(Stragglers(StragglersConfig()), slow(1, 1.6), world=world, steps=80, seen=seen)
        assert min(found) in range(46, 56) and set(range(56, 81)) <= set(found)
        for each in found.values():
            assert [(f.ranks, f.severity, f.signal, f.statistic) for f in each] == [
                ((1,), Severity.WARN, "compute_s", "time")
            ]
            assert ("waits are not seen" in each[0].message) is not seen
        assert {f.onset_step for each in found.values() for f in each} == {40}

    def test_slow_from_the_first_step_on_is_a_straggler_too(self):
        found = observe_all(Stragglers(StragglersConfig()), slow(2, 1.6, start=0), steps=30)
        assert found and {f.ranks for each in found.values() for f in each} == {(2,)}

    def test_peer_groups_are_compared_inside_only(self):
        """A stage of a pipeline that has more to do than another is no straggler."""
        peers = ((0, 1, 2, 3), (4, 5, 6, 7))

        def change(step: int, compute: np.ndarray, rng: np.random.Generator) -> None:
            compute[4:] *= 3.0
            if step >= 40:
                compute[6] *= 1.7

        found = observe_all(Stragglers(StragglersConfig()), change, peers=peers, steps=80)
        assert {f.ranks for each in found.values() for f in each} == {(6,)} and min(found) > 40

    def test_a_host_of_slow_ranks_is_one_finding(self):
        def change(step: int, compute: np.ndarray, rng: np.random.Generator) -> None:
            compute[8:16] *= 2.0

        found = observe_all(Stragglers(StragglersConfig()), change, world=64, steps=40)
        assert found
        for (finding,) in found.values():
            assert set(finding.ranks) == set(range(8, 16)) and "8 ranks" in finding.message

    @pytest.mark.parametrize("world", [2, 8])
    @pytest.mark.parametrize("what", ["jitter", "single", "pause", "first", "all", "turns", "small"])
    def test_what_is_no_straggler(self, what: str, world: int):
        def change(step: int, compute: np.ndarray, rng: np.random.Generator) -> None:
            if what == "single" and step % 10 == 0:  # garbage collection
                compute[1] *= 5.0
            elif what == "pause" and step % 50 == 0:  # rank 0 evaluates or writes a checkpoint
                compute[0] += 60.0
            elif what == "first" and step <= 8:  # compilation
                compute[1] += 100.0
            elif what == "all" and step >= 100:
                compute *= 3.0
            elif what == "turns":  # the longest batch is somewhere else each time
                compute[rng.integers(world)] *= 2.0
            elif what == "small":
                compute[1] *= 1.2

        jitter = 0.3 if what == "jitter" else 0.05
        assert not observe_all(Stragglers(StragglersConfig()), change, world=world, steps=250, jitter=jitter)

    def test_a_rank_that_waits_itself_is_not_the_one(self):
        """Its host says it was busy for long, but it has waited as long as the others: they did not wait for it."""
        detector = Stragglers(StragglersConfig())
        for step in range(1, 60):
            compute, wait = np.ones(4), np.full(4, 2.0)
            compute[1] = 1.8
            observation = Observation(step, step, {}, {"compute_s": compute, "collective_s": wait}, ((0, 1, 2, 3),))
            assert not detector.observe(observation)
            detector.absorb(observation, [], True)

    def test_times_that_are_missing_say_nothing(self):
        def change(step: int, compute: np.ndarray, rng: np.random.Generator) -> None:
            compute[3] = math.nan
            compute[5] = 0.0

        assert not observe_all(Stragglers(StragglersConfig()), change, steps=40)
        detector = Stragglers(StragglersConfig())
        log = Observation(1, 1, {"loss": 2.0})
        assert detector.observe(log) == []
        detector.absorb(log, [], True)

    def test_rewinds_exactly(self):
        detector, twin = Stragglers(StragglersConfig()), Stragglers(StragglersConfig())
        observe_all(detector, slow(1, 1.6), steps=45)
        state = detector.state_dict()
        twin.load_state_dict(state)
        expected = observe_all(detector, slow(1, 1.6), first=46, steps=30)
        assert expected and observe_all(twin, slow(1, 1.6), first=46, steps=30) == expected
        twin.load_state_dict(state)
        assert observe_all(twin, slow(1, 1.6), first=46, steps=30) == expected


class TestTheWire:
    def test_long_waits_everywhere_with_compute_alike(self):
        found = observe_all(Stragglers(StragglersConfig()), steps=100, transfer=lambda step: 0.02 if step < 60 else 0.5)
        assert min(found) == 67
        for (finding,) in found.values():
            assert (finding.signal, finding.ranks, finding.severity) == ("collective_s", (), Severity.WARN)
            assert finding.reference == pytest.approx(0.02, rel=0.01) and finding.onset_step == 60

    def test_waiting_for_a_slow_rank_is_not_the_wire(self):
        found = observe_all(Stragglers(StragglersConfig()), slow(1, 3.0))
        assert {f.signal for each in found.values() for f in each} == {"compute_s"}

    def test_a_few_slow_transfers_are_nothing(self):
        spikes = observe_all(
            Stragglers(StragglersConfig()), steps=200, transfer=lambda step: 2.0 if step % 5 == 0 else 0.02
        )
        assert not spikes

    def test_a_slower_wire_that_stays_is_accepted(self):
        found = observe_all(Stragglers(StragglersConfig()), steps=400, transfer=lambda step: 0.02 if step < 60 else 0.5)
        assert max(found) == 60 + 255


Change = Callable[[int, np.ndarray, np.ndarray, np.ndarray], None]
"""(step, compute, waits, reduction) of all ranks, to be changed in place."""


def watch(
    change: Change, *, world: int = 4, steps: int = 80, spent: bool = True, jitter: float = 0.05
) -> list[Finding]:
    """All ranks begin and end a step together; compute takes 0.1 s."""
    detector, rng, found = Stragglers(StragglersConfig()), np.random.default_rng(world), []
    for step in range(1, steps + 1):
        compute = 0.1 * np.exp(jitter * rng.standard_normal(world))
        waits = compute.max() - compute + 0.005 * np.exp(0.3 * rng.standard_normal(world))
        reduction = waits + 0.002
        change(step, compute, waits, reduction)
        per_rank = {"compute_s": compute, "collective_s": waits}
        if spent:
            per_rank["reduce_s"] = reduction
        observation = Observation(step, step, {}, per_rank, (tuple(range(world)),))
        findings = detector.observe(observation)
        detector.absorb(observation, findings, True)
        found += findings
    return found


def held(rank: int, seconds: float, start: int = 30, handing_over: bool = True) -> Change:
    """What `rank` sends comes late: all others wait for it, and it for nobody."""

    def change(step: int, compute: np.ndarray, waits: np.ndarray, reduction: np.ndarray) -> None:
        if step >= start:
            others = np.arange(len(waits)) != rank
            waits[others] += seconds
            reduction[others] += seconds
            reduction[rank] += seconds if handing_over else 0.0

    return change


class TestTheLinkOfOneRank:
    @pytest.mark.parametrize("spent", [True, False])
    @pytest.mark.parametrize("world", [2, 3, 4, 64])
    def test_the_rank_that_waits_least_while_the_others_wait_is_named(self, world: int, spent: bool):
        found = watch(held(1, 0.3), world=world, spent=spent)
        assert found and {(f.signal, f.ranks, f.severity, f.statistic) for f in found} == {
            ("collective_s", (1,), Severity.WARN, "time")
        }
        assert found[0].step <= 30 + 15 and found[0].onset_step == 30
        assert found[0].value is not None and found[0].reference is not None and found[0].value < found[0].reference

    def test_a_rank_that_begins_late_is_none(self):
        """It logs, evaluates or saves between two steps: it has spent no time on handing its collectives over."""
        assert not watch(held(0, 0.3, handing_over=False))

    def test_a_slow_computer_is_one_of_compute(self):
        def change(step: int, compute: np.ndarray, waits: np.ndarray, reduction: np.ndarray) -> None:
            if step >= 30:
                compute[1] += 0.3
                waits[:] += 0.3
                waits[1] -= 0.3
                reduction[:] = waits + 0.002

        assert {f.signal for f in watch(change)} == {"compute_s"}

    def test_a_wire_that_all_wait_for_names_nobody(self):
        def change(step: int, compute: np.ndarray, waits: np.ndarray, reduction: np.ndarray) -> None:
            if step >= 30:
                waits += 0.5
                reduction += 0.5

        assert {(f.signal, f.ranks) for f in watch(change)} == {("collective_s", ())}

    @pytest.mark.parametrize("world", [2, 4])
    def test_load_on_the_machine_names_nobody(self, world: int):
        """Any rank is put to sleep for a third of a second in every other step, wherever it is; 2,000 steps."""
        rng = np.random.default_rng(5)

        def change(step: int, compute: np.ndarray, waits: np.ndarray, reduction: np.ndarray) -> None:
            if rng.random() < 0.5:
                held(int(rng.integers(world)), 0.3 * rng.random(), start=0)(step, compute, waits, reduction)

        assert not watch(change, world=world, steps=2000, jitter=0.3)

    def test_rewinds_exactly(self):
        detector, twin = Stragglers(StragglersConfig()), Stragglers(StragglersConfig())

        def run(one: Stragglers, first: int, last: int) -> list[list[Finding]]:
            found = []
            for step in range(first, last):
                waits = np.array([0.4, 0.0, 0.4]) if step >= 20 else np.full(3, 0.01)
                per_rank = {"compute_s": np.full(3, 0.1), "collective_s": waits}
                observation = Observation(step, step, {}, per_rank, ((0, 1, 2),))
                found.append(one.observe(observation))
                one.absorb(observation, found[-1], True)
            return found

        run(detector, 1, 25)
        twin.load_state_dict(detector.state_dict())
        expected = run(detector, 25, 40)
        assert any(expected) and run(twin, 25, 40) == expected
