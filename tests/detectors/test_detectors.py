"""The first detectors: what must alarm, what must not, and that no value ever blinds them (T6, T12, S10, C2, BR-44)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.detectors import (
    CrossRankConfig,
    CrossRankOutlier,
    Detector,
    DetectorConfig,
    NonFinite,
    PointConfig,
    PointOutlier,
    build_detectors,
)
from resilient.signals import Finding, Observation, Severity

LOSS = PointConfig(signal="loss", floor=0.02)


def loss_at(step: int, value: float) -> Observation:
    return Observation(step, step, {"loss": value})


def feed(detector: Detector, observations: list[Observation]) -> list[list[Finding]]:
    found = []
    for observation in observations:
        findings = detector.observe(observation)
        detector.absorb(observation, findings, all(f.severity < Severity.ACT for f in findings))
        found.append(findings)
    return found


def healthy(n: int, seed: int = 0, start: int = 1) -> list[Observation]:
    rng = np.random.default_rng(seed)
    return [loss_at(start + i, float(2.5 + 3 * math.exp(-i / 40) + 0.03 * rng.standard_normal())) for i in range(n)]


def ranks_at(step: int, norms: list[float], losses: list[float] | None = None) -> Observation:
    world = len(norms)
    return Observation(
        step,
        step,
        {"loss": 2.0, "grad_norm": float(np.sqrt(np.mean(np.square(norms))))},
        {
            "local_grad_norm": np.asarray(norms, dtype=float),
            "loss": np.asarray(losses or [2.0] * world),
            **{f"nonfinite_{p}": np.zeros(world) for p in ("forward", "loss", "backward")},
            "reduced_sq_share": np.ones(world),
        },
        (tuple(range(world)),),
    )


class TestPoint:
    def test_quiet_on_a_falling_noisy_loss(self):
        assert not any(feed(PointOutlier(LOSS), healthy(2000)))

    def test_one_spike_is_named_with_value_and_reference(self):
        detector = PointOutlier(LOSS)
        feed(detector, healthy(200))
        (finding,) = detector.observe(loss_at(201, 7.4))
        assert finding.severity is Severity.ACT and finding.onset_step == 201
        assert finding.value == 7.4 and 2.3 < finding.reference < 2.7

    def test_equal_giant_outliers_are_all_flagged_until_accepted_as_a_level(self):
        detector = PointOutlier(LOSS)
        feed(detector, healthy(200))
        found = feed(detector, [loss_at(201 + i, 7.4) for i in range(60)])
        flagged = [bool(f) for f in found]
        assert all(flagged[: LOSS.accept_after]) and not any(flagged[LOSS.accept_after :])
        assert found[LOSS.accept_after - 1][0].severity is Severity.WARN  # accepted with a warning, not in silence
        assert {f[0].onset_step for f in found[: LOSS.accept_after]} == {201}

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
    def test_one_bad_value_causes_no_later_alarm_and_does_not_blind(self, bad: float):
        detector = PointOutlier(LOSS)
        feed(detector, [*healthy(200), loss_at(201, bad)])
        assert not any(feed(detector, healthy(500, seed=1, start=202)[200:]))
        assert detector.observe(loss_at(999, 9.0))

    def test_an_attempt_refused_for_another_reason_is_no_reference(self):
        detector = PointOutlier(LOSS)
        feed(detector, healthy(50))
        before = detector.state_dict()
        other = Finding("nonfinite", "grad_norm", Severity.ACT, math.inf, 51, 51)
        detector.absorb(loss_at(51, 3.0), [other], False)
        assert detector.state_dict() == before

    @given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
    def test_never_raises_and_keeps_only_finite_values(self, values: list[float]):
        detector = PointOutlier(LOSS)
        feed(detector, [loss_at(i, v) for i, v in enumerate(values)])
        state = detector.state_dict()
        assert all(math.isfinite(v) for v in state["accepted"] + state["residuals"] + state["streak"])

    def test_rewinds_exactly(self):
        detector, twin = PointOutlier(LOSS), PointOutlier(LOSS)
        feed(detector, healthy(100))
        twin.load_state_dict(detector.state_dict())
        tail = [*healthy(30, seed=3), loss_at(131, 8.0), *healthy(30, seed=4)]
        assert feed(detector, tail) == feed(twin, tail)


class TestCrossRank:
    @pytest.mark.parametrize("world", [2, 3, 8])
    def test_names_the_rank_that_spikes(self, world: int):
        rng = np.random.default_rng(1)
        detector = CrossRankOutlier(CrossRankConfig())
        quiet = [ranks_at(i, list(np.exp(0.2 * rng.standard_normal(world)))) for i in range(200)]
        assert not any(f for found in feed(detector, quiet) for f in found if f.severity is Severity.ACT)
        for rank in range(world):
            norms = np.exp(0.2 * rng.standard_normal(world))
            norms[rank] *= 200
            acts = [f for f in detector.observe(ranks_at(300, list(norms))) if f.severity is Severity.ACT]
            assert [f.ranks for f in acts] == [(rank,)]

    def test_a_rank_that_is_always_larger_is_not_an_outlier(self):
        rng = np.random.default_rng(2)
        detector = CrossRankOutlier(CrossRankConfig())
        steps = [
            ranks_at(i, [1.0 * math.exp(0.2 * rng.standard_normal()), 20.0 * math.exp(0.2 * rng.standard_normal())])
            for i in range(200)
        ]
        assert not any(feed(detector, steps))

    def test_all_ranks_together_is_not_a_rank_outlier(self):
        detector = CrossRankOutlier(CrossRankConfig())
        feed(detector, [ranks_at(i, [1.0, 1.1, 0.9]) for i in range(50)])
        assert not detector.observe(ranks_at(51, [100.0, 110.0, 90.0]))

    def test_peer_groups_are_compared_inside_only(self):
        detector = CrossRankOutlier(CrossRankConfig())

        def at(step: int, norms: list[float]) -> Observation:
            plain = ranks_at(step, norms)
            return Observation(step, step, plain.values, plain.per_rank, ((0, 1), (2, 3)))

        feed(detector, [at(i, [1.0, 1.0, 50.0, 50.0]) for i in range(50)])
        acts = detector.observe(at(51, [1.0, 1.0, 50.0, 5000.0]))
        assert [f.ranks for f in acts] == [(3,)]

    def test_rewinds_exactly(self):
        rng = np.random.default_rng(5)
        steps = [ranks_at(i, list(np.exp(0.3 * rng.standard_normal(4)))) for i in range(80)]
        detector, twin = CrossRankOutlier(CrossRankConfig()), CrossRankOutlier(CrossRankConfig())
        feed(detector, steps[:40])
        twin.load_state_dict(detector.state_dict())
        tail = [*steps[40:], ranks_at(81, [1, 1, 900, 1])]
        assert feed(detector, tail) == feed(twin, tail)


class TestNonFinite:
    @pytest.mark.parametrize(
        ("column", "place"),
        [("nonfinite_forward", "forward"), ("nonfinite_loss", "loss"), ("nonfinite_backward", "backward")],
    )
    def test_rank_and_place(self, column: str, place: str):
        observation = ranks_at(7, [1.0, 1.0, 1.0])
        observation.per_rank[column][2] = 1  # type: ignore[index]
        (finding,) = NonFinite().observe(observation)
        assert (finding.place, finding.ranks, finding.severity) == (place, (2,), Severity.ACT)

    def test_reduction_only_when_every_own_gradient_was_finite(self):
        observation = ranks_at(7, [1.0, 1.0])
        observation.per_rank["reduced_sq_share"][1] = math.nan  # type: ignore[index]
        assert NonFinite().observe(observation)[0].place == "reduction"
        observation.per_rank["nonfinite_backward"][0] = 1  # type: ignore[index]
        finding = NonFinite().observe(observation)[0]
        assert finding.place == "backward" and finding.ranks == (0,)

    def test_quiet_when_finite(self):
        assert NonFinite().observe(ranks_at(1, [1.0, 2.0])) == []


def test_every_configured_detector_has_a_name_of_its_own():
    names = [d.name for d in build_detectors(DetectorConfig())]
    assert len(set(names)) == len(names) == 5
