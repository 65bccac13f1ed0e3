"""The first detectors: what must alarm, what must not, and that no value ever blinds them (T6, T12, S10, C2, BR-44)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from resilient.detectors import (
    CrossRankConfig,
    CrossRankOutlier,
    Detector,
    DetectorConfig,
    NonFinite,
    build_detectors,
)
from resilient.signals import Finding, Observation, Severity


def feed(detector: Detector, observations: list[Observation]) -> list[list[Finding]]:
    found = []
    for observation in observations:
        findings = detector.observe(observation)
        detector.absorb(observation, findings, all(f.severity < Severity.ACT for f in findings))
        found.append(findings)
    return found


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
    assert len(set(names)) == len(names) == 6
