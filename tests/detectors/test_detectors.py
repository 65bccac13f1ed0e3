"""The first detectors: what must alarm, what must not, and that no value ever blinds them (T6, T12, S10, C2, BR-44)."""

from __future__ import annotations

import math

import pytest

from resilient.detectors import (
    DetectorConfig,
    NonFinite,
    build_detectors,
)
from resilient.signals import Severity
from tests.detectors.tables import ranks_at


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
    assert len(set(names)) == len(names) == 11
