"""One window that is off on all ranks and passes: the data (S5, S18); nothing else is called so."""

from __future__ import annotations

import numpy as np
import pytest

from resilient.detectors.odd_window import OddWindow
from resilient.diagnosis import diagnose
from resilient.signals import Finding, Observation, Severity


def observe_all(
    losses: np.ndarray, detector: OddWindow | None = None, digests: np.ndarray | None = None, first: int = 1
) -> dict[int, list[Finding]]:
    """losses: (steps, ranks). Findings by step."""
    detector, found = detector or OddWindow(), {}
    for i, each in enumerate(losses):
        per_rank = {"loss": each, "tokens": np.full(len(each), 100.0)}
        if digests is not None:
            per_rank["digest_batch"] = digests[i]
        observation = Observation(
            first + i, first + i, {"loss": float(each.mean())}, per_rank, (tuple(range(len(each))),)
        )
        findings = detector.observe(observation)
        detector.absorb(observation, findings, True)
        if findings:
            found[first + i] = findings
    return found


def falling(world: int, steps: int = 60, noise: float = 0.1, seed: int = 0) -> np.ndarray:
    """A loss from 5.5 to about 3, as in the first steps of a run."""
    at = np.arange(1, steps + 1)[:, None]
    return 3.0 + 2.5 * np.exp(-at / 10) + noise * np.random.default_rng(seed).standard_normal((steps, world))


@pytest.mark.parametrize("world", [2, 4, 64])
def test_one_bad_window_is_the_datas_one_attempt_later(world: int) -> None:
    losses = falling(world)
    losses[39] += 4.0  # step 40
    found = observe_all(losses)
    (watched,), (told,) = found[40], found[41]
    assert set(found) == {40, 41} and (watched.severity, told.severity) == (Severity.WATCH, Severity.WARN)
    assert (told.statistic, told.onset_step, told.ranks) == ("passed", 40, ())
    verdict = diagnose(Observation(41, 41, {}), [told], dynamic_scale=False, refused_in_a_row=0)
    assert verdict is not None and (verdict.cause, verdict.onset_step, verdict.ranks) == ("data", 40, ())


@pytest.mark.parametrize(
    "what", ["stays", "two windows", "comes down slowly", "one rank", "all but one", "clean", "steep"]
)
def test_what_is_no_bad_window(what: str) -> None:
    losses = falling(4)
    if what == "stays":
        losses[39:] += 4.0
    elif what == "two windows":
        losses[39:41] += 4.0
    elif what == "comes down slowly":  # an optimizer's: the weights were moved
        losses[39:, :] += 4.0 * np.exp(-np.arange(21) / 6)[:, None]
    elif what == "one rank":
        losses[39, 1] += 4.0
    elif what == "all but one":
        losses[39, 1:] += 4.0
    elif what == "steep":
        losses = np.linspace(9.0, 2.0, 60)[:, None] + np.zeros((1, 4))
    assert not any(f.severity >= Severity.WARN for findings in observe_all(losses).values() for f in findings)


def test_the_same_window_run_again_says_nothing_about_the_data() -> None:
    losses = falling(2)
    losses[39] += 4.0  # a fault that passes: the window itself is as usual when it is run again
    digests = np.arange(120.0).reshape(60, 2)
    digests[40] = digests[39]
    again = observe_all(losses, digests=digests)
    assert set(again) == {40, 42}  # the next one, on other data, is what tells
    digests[41:] = digests[39]
    assert set(observe_all(losses, digests=digests)) == {40}


def test_a_thousand_heavy_tailed_steps_make_no_alarm() -> None:
    for world in (2, 8):
        noise = np.random.default_rng(world).standard_t(3, (3000, world))
        found = observe_all(2.5 + 0.02 * noise)
        assert not any(f.severity >= Severity.WARN for findings in found.values() for f in findings)


def test_a_new_level_is_learned_and_the_state_rewinds() -> None:
    losses = falling(2, steps=120)
    losses[39:] += 4.0
    losses[99] += 4.0
    detector, twin = OddWindow(), OddWindow()
    assert set(observe_all(losses[:80], detector)) <= set(range(40, 56))
    twin.load_state_dict(detector.state_dict())
    expected = observe_all(losses[80:], detector, first=81)
    assert 101 in expected and observe_all(losses[80:], twin, first=81) == expected


def test_ranks_without_tokens_and_values_that_are_not_finite_are_left_out() -> None:
    losses = falling(3)
    losses[39] += 4.0
    losses[45, 1] = np.nan
    assert set(observe_all(losses)) == {40, 41}
    assert observe_all(falling(1)) == {}
    assert OddWindow().observe(Observation(1, 1, {"loss": 2.0})) == []
