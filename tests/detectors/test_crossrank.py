"""One rank against the others: who is named, who is not, how often it is wrong, and what it costs (C2, S19)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.detectors import CrossRankConfig, CrossRankOutlier, Targets
from resilient.detectors.crossrank import Exceedances, OutlierJudge
from resilient.detectors.peers import PeerGroups
from resilient.signals import Finding, Observation, Severity
from tests.detectors.tables import feed, ranks_at


def trained(world: int, *, sigma: float = 0.1, steps: int = 160, seed: int = 0) -> tuple[CrossRankOutlier, np.ndarray]:
    """A detector after healthy steps, and the usual norm of each rank."""
    rng = np.random.default_rng(seed)
    usual = np.exp(rng.normal(0.0, 1.0, world))
    detector = CrossRankOutlier(CrossRankConfig())
    found = feed(detector, [ranks_at(i, usual * np.exp(sigma * rng.standard_normal(world))) for i in range(steps)])
    assert not any(found)
    return detector, usual


def acts(findings: list[Finding]) -> list[tuple[int, ...]]:
    return [f.ranks for f in findings if f.severity is Severity.ACT]


class TestWhoIsNamed:
    @pytest.mark.parametrize("world", [2, 3, 4, 8])
    def test_names_the_rank_that_spikes(self, world: int):
        detector, usual = trained(world, steps=200)
        rng = np.random.default_rng(1)
        for rank in range(world):
            for factor in (10.0, 1000.0):
                norms = usual * np.exp(0.1 * rng.standard_normal(world))
                norms[rank] *= factor
                findings = detector.observe(ranks_at(300, norms))
                assert [f.ranks for f in findings] == [(rank,)]
                assert findings[0].severity is Severity.ACT or factor < 100.0
                assert findings[0].value == pytest.approx(norms[rank])

    def test_a_rank_that_stays_off_is_named_in_every_step_from_a_short_history_too(self):
        detector, usual = trained(2, steps=40)
        rng = np.random.default_rng(5)
        broken = usual * np.array([1.0, 10.0])
        steps = [ranks_at(40 + i, broken * np.exp(0.1 * rng.standard_normal(2))) for i in range(12)]
        assert [[f.ranks for f in found] for found in feed(detector, steps)] == [[(1,)]] * 12

    def test_a_lone_outlier_teaches_what_noise_may_do_once_it_is_over(self):
        (detector, usual), (calm, _) = trained(8, steps=100), trained(8, steps=100)

        def both_see(steps: range, spiked: float = 1.0) -> float:
            """How much higher the detector's threshold is than that of the one that saw no outlier."""
            for step in steps:
                norms = usual.copy()
                norms[3] *= spiked
                found = feed(detector, [ranks_at(step, norms)])[0]
                assert [f.severity for f in found] == ([Severity.WARN] if spiked > 1 else [])
                feed(calm, [ranks_at(step, usual)])
            return detector._judge.thresholds()[0] - calm._judge.thresholds()[0]

        assert both_see(range(100, 101), 4.0) == 0  # it may be the first of many
        assert both_see(range(101, 109)) == 0
        assert both_see(range(109, 111)) > 0.1

    def test_a_rank_that_is_always_larger_is_not_an_outlier(self):
        rng = np.random.default_rng(2)
        detector = CrossRankOutlier(CrossRankConfig())
        steps = [
            ranks_at(i, [1.0 * math.exp(0.2 * rng.standard_normal()), 20.0 * math.exp(0.2 * rng.standard_normal())])
            for i in range(200)
        ]
        assert not any(feed(detector, steps))

    def test_a_rank_that_is_noisier_is_not_an_outlier(self):
        rng = np.random.default_rng(3)
        sigma = np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.9])
        detector = CrossRankOutlier(CrossRankConfig())
        assert not any(feed(detector, [ranks_at(i, np.exp(sigma * rng.standard_normal(6))) for i in range(600)]))

    def test_all_ranks_together_is_not_a_rank_outlier(self):
        detector = CrossRankOutlier(CrossRankConfig())
        feed(detector, [ranks_at(i, [1.0, 1.1, 0.9]) for i in range(50)])
        assert not detector.observe(ranks_at(51, [100.0, 110.0, 90.0]))

    def test_a_step_in_which_all_ranks_scatter_has_no_outlier(self):
        detector, usual = trained(32)
        rng = np.random.default_rng(4)
        wild = usual * np.exp(1.5 * rng.standard_normal(32))
        assert not acts(detector.observe(ranks_at(200, wild)))

    def test_peer_groups_are_compared_inside_only(self):
        detector = CrossRankOutlier(CrossRankConfig())

        def at(step: int, norms: list[float]) -> Observation:
            plain = ranks_at(step, norms)
            return Observation(step, step, plain.values, plain.per_rank, ((0, 1), (2, 3)))

        feed(detector, [at(i, [1.0, 1.0, 50.0, 50.0]) for i in range(50)])
        assert acts(detector.observe(at(51, [1.0, 1.0, 50.0, 5000.0]))) == [(3,)]
        assert not detector.observe(at(51, [90.0, 90.0, 50.0, 50.0]))  # the whole group: nothing to compare it with

    def test_a_gradient_that_stays_too_small_is_told_and_not_its_peer(self):
        """Scaled down or lost: a warning from the third step on, which never refuses one."""
        for factor in (0.02, 0.0):
            detector, usual = trained(3)
            found = feed(detector, [ranks_at(200 + i, usual * np.array([1.0, factor, 1.0])) for i in range(5)])
            assert [[(f.ranks, f.severity) for f in each] for each in found] == [[]] * 2 + [[((1,), Severity.WARN)]] * 3

    def test_a_rank_without_tokens_is_not_compared(self):
        detector, usual = trained(4)
        for i in range(5):
            observation = ranks_at(200 + i, usual * np.array([1.0, 1.0, 0.0, 1.0]))
            observation.per_rank["tokens"] = np.array([9.0, 9.0, 0.0, 9.0])  # type: ignore[index]
            assert feed(detector, [observation]) == [[]]

    def test_a_rank_that_is_not_finite_does_not_blind_it_for_the_others(self):
        detector, usual = trained(4)
        norms = usual * np.array([math.nan, 1.0, 1.0, 50.0])
        assert acts(detector.observe(ranks_at(200, norms))) == [(3,)]
        norms = usual * np.array([math.inf, 1e200, 1.0, 1.0])
        assert acts(detector.observe(ranks_at(200, norms))) == [(1,)]

    def test_many_are_told_in_one_finding_worst_first_and_ties_by_rank(self):
        detector, usual = trained(64, sigma=0.01)
        norms = usual.copy()
        norms[40:50] *= 20.0
        norms[45] *= 50.0
        (finding,) = detector.observe(ranks_at(200, norms))
        assert finding.ranks[0] == 45 and set(finding.ranks) == set(range(40, 50)) and "10 ranks" in finding.message
        norms = np.ones(64)
        even = CrossRankOutlier(CrossRankConfig())
        feed(even, [ranks_at(i, norms) for i in range(160)])
        norms[[7, 3]] = 30.0
        assert [f.ranks for f in even.observe(ranks_at(200, norms))] == [(3,), (7,)]


class TestWhatItLearns:
    def test_a_rank_that_is_off_teaches_nothing_until_it_has_stayed(self):
        """Also through refused steps, or a rank whose data has changed for good would be refused for ever."""
        detector, usual = trained(4)
        moved = usual * np.array([1.0, 1.0, 1.0, 30.0])
        found = feed(detector, [ranks_at(200 + i, moved) for i in range(80)])
        off = [bool(f) for f in found]
        assert off == [True] * 48 + [False] * 32
        assert {f.onset_step for each in found for f in each} == {200}
        assert len({f.score for each in found[:48] for f in each}) == 1  # the references have stood still

    def test_one_outlier_leaves_the_others_their_lesson(self):
        rng = np.random.default_rng(6)
        detector, usual = trained(8)
        for i in range(30):  # rank 0 is off in every other step while the others drift by 5 % a step
            norms = usual * np.exp(0.05 * i + 0.1 * rng.standard_normal(8))
            norms[0] *= 1.0 if i % 2 else 100.0
            observation = ranks_at(200 + i, norms)
            findings = detector.observe(observation)
            detector.absorb(observation, findings, True)
            assert [f.ranks for f in findings] == ([] if i % 2 else [(0,)])

    def test_a_bad_first_step_is_forgotten(self):
        rng = np.random.default_rng(7)
        detector = CrossRankOutlier(CrossRankConfig())
        first = ranks_at(0, [1.0, 1.0, 500.0, 1.0])
        assert not any(
            feed(detector, [first, *(ranks_at(i, np.exp(0.1 * rng.standard_normal(4))) for i in range(1, 90))])
        )
        assert acts(detector.observe(ranks_at(91, [1.0, 1.0, 500.0, 1.0]))) == [(2,)]

    def test_rewinds_exactly(self):
        rng = np.random.default_rng(5)
        steps = [ranks_at(i, np.exp(0.3 * rng.standard_normal(4))) for i in range(80)]
        detector, twin = CrossRankOutlier(CrossRankConfig()), CrossRankOutlier(CrossRankConfig())
        feed(detector, [*steps[:40], ranks_at(39, [1, 900, 1, 1])])
        state = detector.state_dict()
        twin.load_state_dict(state)
        tail = [*steps[40:], ranks_at(81, [1, 1, 900, 1])]
        expected = feed(detector, tail)
        assert expected[-1] and feed(twin, tail) == expected
        detector.load_state_dict(state)  # it has not changed under the feet of whoever keeps it
        assert feed(detector, tail) == expected

    def test_another_world_size_starts_anew(self):
        detector, _ = trained(4)
        assert not any(feed(detector, [ranks_at(i, [1.0, 5.0]) for i in range(200, 260)]))
        assert acts(detector.observe(ranks_at(260, [1.0, 500.0]))) == [(1,)]


class TestHowOftenItIsWrong:
    @pytest.mark.parametrize("kind", ["normal", "t3"])
    @pytest.mark.parametrize("world", [2, 8])
    def test_hardly_an_alarm_in_healthy_steps(self, world: int, kind: str):
        """Ranks of different size and noise, a common trend, common noise, and spikes that hit all of them."""
        rng = np.random.default_rng(world)
        detector = CrossRankOutlier(CrossRankConfig())
        usual, sigma = rng.normal(0.0, 1.0, world), 0.1 * np.exp(rng.uniform(-0.7, 0.7, world))
        steps = []
        for i in range(2000):
            noise = rng.standard_normal(world) if kind == "normal" else rng.standard_t(3, world) / math.sqrt(3)
            common = 1.5 * math.exp(-i / 300) + 0.3 * rng.standard_normal() + (rng.random() < 0.01) * rng.uniform(1, 7)
            spread = np.where(noise > 0, 1.0 + sigma * noise, np.exp(sigma * noise))
            steps.append(ranks_at(i, np.exp(common + usual) * spread))
        found = [f for each in feed(detector, steps) for f in each]
        assert not acts(found)
        assert len(found) <= (0 if kind == "normal" else 2)  # until the tail is known

    @pytest.mark.parametrize("world", [2, 4, 8, 1024])
    def test_a_factor_of_five_is_seen_in_its_step(self, world: int):
        detector, usual = trained(world)
        rng = np.random.default_rng(9)
        hits = []
        for _ in range(200):
            norms, rank = usual * np.exp(0.1 * rng.standard_normal(world)), int(rng.integers(world))
            norms[rank] *= 5.0
            hits.append([f.ranks for f in detector.observe(ranks_at(500, norms))] == [(rank,)])
        assert np.mean(hits) >= 0.99

    def test_heavy_tails_raise_the_threshold_and_a_faulty_rank_does_not(self):
        rng = np.random.default_rng(10)
        heavy, faulty = Exceedances(), Exceedances()
        before = heavy.threshold(1e-5)
        none = np.empty(0, dtype=np.int64)
        for step in range(3000):
            scores = np.abs(rng.standard_t(3, 8)) / 0.8
            far = np.flatnonzero(scores > Exceedances.START)
            heavy.learn(far, scores[far], far.tolist(), 8.0)
            if step % 10:
                faulty.learn(none, np.empty(0), (), 8.0)
            else:
                faulty.learn(np.array([3]), np.array([500.0]), (3,), 8.0)
        assert heavy.threshold(1e-5) > 2.0 * before
        assert faulty.threshold(1e-5) < before


def noisy(steps: int, seed: int = 0) -> tuple[CrossRankOutlier, np.random.Generator]:
    """Two ranks whose own norms jump now and then, as small batches' do."""
    rng = np.random.default_rng(seed)
    detector = CrossRankOutlier(CrossRankConfig())
    for step in range(steps):
        norms = np.exp(0.1 * rng.standard_normal(2))
        if step % 80 == 40:
            norms[step // 80 % 2] *= 2.5
        feed(detector, [ranks_at(step, norms)])
    return detector, rng


class TestOneStepOrMore:
    """A heavy tail reaches as far as a fault does. What tells them apart is that the fault comes back to its rank."""

    def test_a_rank_that_spikes_while_its_only_peer_does_is_named_when_it_stays(self):
        """As in a run of two ranks with a heavy tail: rank 1 is x10 from step 200 on, and rank 0 just then x7, once."""
        detector, rng = noisy(200)
        usual = [np.exp(0.1 * rng.standard_normal(2)) for _ in range(6)]
        factors = [np.array([7.0, 10.0]), *[np.array([1.0, 10.0])] * 5]
        found = feed(detector, [ranks_at(200 + i, u * f) for i, (u, f) in enumerate(zip(usual, factors, strict=True))])
        named = [[(f.ranks, f.severity, f.plausible) for f in each] for each in found]
        assert named[0] == []  # both are up: nothing says whose fault it is
        assert named[3:] == [[((1,), Severity.ACT, False)]] * 3
        assert {f.onset_step for each in found[3:] for f in each} == {201}

    def test_the_same_jump_once_is_not_told_from_noise(self):
        detector, _ = noisy(200)
        for factor in (6.0, 9.0):
            assert all(f.plausible for f in detector.observe(ranks_at(200, [1.0, factor])))
        calm, usual = trained(2, steps=3000)
        (finding,) = calm.observe(ranks_at(3000, usual * np.array([1.0, 10.0])))
        assert finding.ranks == (1,) and not finding.plausible

    def test_scores_of_steps_in_a_row_teach_the_tail_once(self):
        """Or a fault below the threshold would raise it until it is noise."""
        rows, apart = Exceedances(), Exceedances()
        nobody, rank, score = np.empty(0, dtype=np.int64), np.array([1]), np.array([7.0])
        for step in range(100):
            for tail, off in ((rows, step < 20), (apart, step % 5 == 0)):
                tail.learn(rank if off else nobody, score if off else score[:0], (), 8.0)
        assert rows.threshold(1e-5) < 20.0 < apart.threshold(1e-5)
        assert rows.frequency < 0.2 * apart.frequency

    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 2**31), world=st.integers(2, 16), rank=st.integers(0, 15), factor=st.floats(8.0, 100.0))
    def test_a_rank_that_is_off_is_named_by_the_third_step_and_no_other_ever(
        self, seed: int, world: int, rank: int, factor: float
    ):
        rank %= world
        detector, usual = trained(world, steps=40, sigma=0.1, seed=3)
        rng = np.random.default_rng(seed)
        broken = usual * np.where(np.arange(world) == rank, factor, 1.0)
        steps = [ranks_at(40 + i, broken * np.exp(0.1 * rng.standard_normal(world))) for i in range(4)]
        named = [[f.ranks for f in found] for found in feed(detector, steps)]
        assert named[2:] == [[(rank,)]] * 2
        assert all(each in ([], [(rank,)]) for each in named)

    @pytest.mark.parametrize("world", [2, 8])
    @pytest.mark.parametrize("tails", ["normal", "t3"])
    def test_one_step_of_healthy_noise_is_hardly_ever_beyond_it(self, tails: str, world: int):
        """In 4 runs of 50,000 steps. The control: what warns is far more often seen on heavy tails."""
        warned = beyond = 0
        for seed in range(4):
            rng = np.random.default_rng(seed)
            judge = OutlierJudge("crossrank/local_grad_norm", CrossRankConfig(), Targets())
            scores = rng.standard_t(3, (50_000, world)) if tails == "t3" else rng.standard_normal((50_000, world))
            nobody = np.empty(0, dtype=np.int64)
            for step in scores:
                far = np.flatnonzero(step > Exceedances.START) if step.max() > Exceedances.START else nobody
                flagged = [int(r) for r in far if step[r] >= judge.thresholds()[0]] if len(far) else []
                warned += bool(flagged)
                beyond += any(step[r] >= judge.beyond_noise() for r in flagged)
                judge.high.learn(far, step[far], flagged, judge.thresholds()[0])
        assert beyond <= (0 if tails == "normal" else 2)
        assert (warned > 2) == (tails == "t3")


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9])
def test_leave_one_out_medians_are_those_of_numpy(size: int):
    rng = np.random.default_rng(size)
    for draw in range(20):
        values = rng.integers(0, 4, 2 * size).astype(float) if draw % 2 else rng.standard_normal(2 * size)
        valid = rng.random(2 * size) < 0.8
        ranks = rng.permutation(2 * size)
        peers = (tuple(ranks[:size].tolist()), tuple(ranks[size:].tolist()))
        groups = PeerGroups(peers, 2 * size)
        every = groups.middle_of_others(values)
        some = groups.middle_of_others(values, valid)
        for group in peers:
            for rank in group:
                others = [r for r in group if r != rank]
                assert every[rank] == pytest.approx(np.median(values[others]), abs=1e-12)
                there = [r for r in others if valid[r]]
                if valid[rank] and there:
                    assert some[rank] == pytest.approx(np.median(values[there]), abs=1e-12)
                else:
                    assert math.isnan(some[rank])
        whole = PeerGroups((tuple(range(2 * size)),), 2 * size)
        expected = [np.median(np.delete(values, r)) for r in range(2 * size)]
        np.testing.assert_allclose(whole.middle_of_others(values), expected, atol=1e-12)
