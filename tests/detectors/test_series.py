"""Signals over time: what must alarm and when, what must not, and that nothing blinds or locks the detectors
(S2, S6-S9, S12, BR-04, BR-07; the must-pass list of the detection survey)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.detectors import DetectorConfig, SeriesConfig, build_monitor
from resilient.signals import Observation, Severity
from tests.detectors.curves import calm, noise, observations, run

ACCEPT = SeriesConfig().accept_after


def after(signals: dict[str, np.ndarray], **tails: list[float]) -> dict[str, np.ndarray]:
    return {
        name: np.concatenate([values, tails[name]]) if name in tails else values for name, values in signals.items()
    }


def warned(findings) -> bool:
    return any(f.severity >= Severity.WARN for f in findings)


@pytest.mark.parametrize("kind", ["gauss", "t3"])
def test_quiet_on_healthy_noise(kind: str):
    """10,000 steps at a target of 1 warn per 10,000 and signal: a handful at most, and none that acts."""
    _, _, alarms = run(observations(calm(10_000, seed=3, kind=kind)))
    assert len(alarms) <= 4 and not any(a.severity == "act" for a in alarms), alarms


@pytest.mark.parametrize("start", [11.0, 5.0])
def test_quiet_on_the_steep_start(start: float):
    rng, t = np.random.default_rng(1), np.arange(1200)
    loss = 2.2 + (start - 2.2) * np.exp(-t / 60) + 0.03 * rng.standard_normal(1200)
    norm = (1 + 6 * np.exp(-t / 40)) * np.exp(0.2 * rng.standard_normal(1200))
    assert not run(observations({"loss": loss, "grad_norm": norm}))[2]


def test_the_worked_case_is_seen_by_step_9200():
    """S12: the gradient norm's dispersion 0.15 -> 0.9 in 400 steps, the loss still falling; peak logit 12 -> 20."""
    rng, n = np.random.default_rng(5), 9400
    ramp = np.clip((np.arange(n) - 9000) / 400, 0, 1)
    sigma = 0.15 + 0.75 * ramp
    signals = {
        "loss": 2.08 - 0.02 * ramp + 0.02 * noise(rng, n, "t3"),
        "grad_norm": 0.25 * np.exp(sigma * noise(rng, n, "t3") - (sigma**2 - 0.15**2) / 2),
    }
    _, _, alarms = run(observations(signals, start=0))
    ours = [a for a in alarms if a.step >= 9000]
    assert ours and ours[0].step <= 9200 and ours[0].signal == "grad_norm" and ours[0].statistic == "scale"
    assert 8950 <= ours[0].onset_step <= ours[0].step
    logits = {**signals, "logit_max": (12 + 8 * ramp) * np.exp(0.02 * noise(rng, n, "t3"))}
    _, _, alarms = run(observations(logits, start=0))
    assert 9000 <= min(a.step for a in alarms if a.step >= 9000 and a.signal == "logit_max") <= 9100


def test_the_fast_cascade_is_seen_four_steps_ahead():
    """BLOOM-176B: gradient norm 0.24, 0.95, 2.4, 15.9, 145, 960 while the loss reads 2.20, then 5.10."""
    signals = after(
        calm(4000, seed=2, norm=0.2), grad_norm=[0.24, 0.95, 2.4, 15.9, 145, 960], loss=[2.2, 2.2, 2.2, 2.21, 2.25, 5.1]
    )
    _, found, _ = run(observations(signals))
    first = next(i for i in range(4000, 4006) if warned(found[i]))
    assert 4005 - first >= 4


def test_a_small_spike_that_does_not_recover_is_told_within_50_steps():
    """Marin 32B: 1.96 -> 2.02, back to 1.975 only, and lost later."""
    rng = np.random.default_rng(4)
    loss = np.concatenate(
        [np.full(1500, 1.96), np.linspace(1.96, 2.02, 6), np.linspace(2.02, 1.975, 20), np.full(60, 1.975)]
    )
    _, _, alarms = run(observations({"loss": loss + 0.008 * rng.standard_normal(len(loss))}))
    assert alarms and 1500 <= alarms[0].step <= 1550


def test_slow_drift_is_told():
    """+1.2 nats in 400 steps, a norm that only creeps: BR-04's drift, not a spike."""
    signals = calm(1900, seed=8)
    signals["loss"][1500:] += np.linspace(0, 1.2, 400)
    _, _, alarms = run(observations(signals))
    assert alarms and 1500 < alarms[0].step < 1650 and alarms[0].statistic in ("level", "drift", "trend")
    assert alarms[0].onset_step >= 1450


def test_update_norm_leads_the_loss():
    """BR-07: the update norm doubles a few steps before the loss moves, while the gradient norm stays as it was."""
    rng = np.random.default_rng(9)
    signals = calm(1010, seed=9) | {"update_norm": 0.05 * np.exp(0.03 * rng.standard_normal(1010))}
    signals["update_norm"][1000:] *= np.array([1.3, 1.7, 2.1, 2.3, 2.4, 2.4, 2.4, 2.4, 2.4, 2.4])
    signals["loss"][1005:] += np.array([0.3, 0.8, 1.5, 2.0, 2.2])
    _, _, alarms = run(observations(signals))
    first = {a.signal: a.step for a in reversed(alarms)}
    assert first["update_norm"] < first["loss"] and "grad_norm" not in first


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_one_bad_value_causes_no_later_alarm_and_blinds_nothing(bad: float):
    signals = calm(900, seed=1)
    signals["grad_norm"][500] = bad
    _, found, _ = run(observations(signals))
    assert not any(warned(f) for f in found[501:])
    spike = after(signals, loss=[9.0, 9.0], grad_norm=[5.0, 5.0])
    assert warned(run(observations(spike))[1][-1])


def test_equal_giant_outliers_are_all_flagged_until_accepted_as_a_level():
    signals = calm(600, seed=6)
    shifted = {
        name: np.concatenate([v, calm(300, seed=7)[name] * (3 if name == "loss" else 1)]) for name, v in signals.items()
    }
    _, found, alarms = run(observations(shifted))
    loss = [[f for f in fs if f.signal == "loss"] for fs in found[600:]]
    assert all(any(f.severity is Severity.ACT for f in fs) for fs in loss[: ACCEPT - 1])
    assert any("accepted as the new level" in f.message for f in loss[ACCEPT - 1])
    assert not any(warned(fs) for fs in loss[ACCEPT + 64 :])
    assert {f.onset_step for fs in loss[:ACCEPT] for f in fs if f.statistic == "point"} == {601}
    assert all(a.severity in ("warn", "act") for a in alarms)


def test_a_gradient_norm_three_times_as_large_locks_nothing():
    signals = calm(600, seed=6)
    shifted = {"loss": np.concatenate([signals["loss"], calm(800, seed=7)["loss"]])}
    shifted["grad_norm"] = np.concatenate([signals["grad_norm"], 3 * calm(800, seed=7)["grad_norm"]])
    _, found, alarms = run(observations(shifted))
    assert alarms and alarms[0].step <= 640
    assert not any(warned(f) for f in found[-500:])


def test_a_run_that_stays_wider_is_accepted_after_a_while():
    """Twice the noise for good: told, and not told for ever."""
    rng = np.random.default_rng(31)
    norm = 0.3 * np.exp(np.concatenate([0.1 * noise(rng, 1500), 0.3 * noise(rng, 2500)]))
    _, found, alarms = run(observations({"grad_norm": norm}))
    assert alarms and 1500 < alarms[0].step < 1600 and alarms[0].statistic == "scale"
    assert not any(warned(f) for f in found[-1500:])


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["loss"].__imul__(np.where(np.arange(3000) >= 2000, 0.93, 1.0)),  # an LR step, an epoch staircase
        lambda s: s["grad_norm"].__imul__(np.where(np.arange(3000) >= 2000, 0.6, 1.0)),  # a larger batch
        lambda s: s["loss"].__setitem__(
            [1000, 1400, 1900, 2500], s["loss"][[1000, 1400, 1900, 2500]] * 1.2
        ),  # odd batches
    ],
    ids=["loss falls", "norm falls", "single odd batches"],
)
def test_ordinary_changes_are_no_alarm(change):
    signals = calm(3000, seed=10)
    change(signals)
    assert not run(observations(signals))[2]


def test_one_giant_batch_may_be_refused_but_is_no_alarm_until_a_second_confirms_it():
    signals = calm(700, seed=23)
    signals["loss"][600] *= 2.5
    signals["grad_norm"][600] *= 8
    _, found, alarms = run(observations(signals))
    assert not alarms and any(f.severity is Severity.ACT and f.alone for f in found[600])
    signals["loss"][601] *= 2.5
    _, _, alarms = run(observations(signals))
    assert [(a.step, a.signal, a.severity, a.onset_step) for a in alarms if a.signal == "loss"] == [
        (602, "loss", "act", 601)
    ]


def test_one_logged_point_counts_for_more_where_steps_are_not_logged():
    """A lone point at +20 %: of one step it is one odd batch, of ten it is a spike."""
    signals = calm(800, seed=11)
    signals["loss"][700] *= 1.2
    assert not run(observations(signals))[2]
    assert [a.step for a in run(observations(signals, every=10))[2]] == [7001]


def test_a_loss_that_is_not_positive_is_judged_as_it_is():
    """A policy-gradient loss hovers around zero."""
    rng = np.random.default_rng(12)
    loss = 0.01 * rng.standard_normal(800)
    monitor, _, alarms = run(observations({"loss": loss}))
    assert not alarms
    assert run(observations({"loss": [0.4, 0.5, 0.6]}, start=801), monitor)[2]


def test_state_is_saved_restored_and_rewound_exactly():
    signals = calm(900, seed=13)
    signals["loss"][700:705] *= 2
    stream = observations(signals)
    monitor, *_ = run(stream[:650])
    state = monitor.state_dict()
    ahead = run(stream[650:], monitor)[1:]
    monitor.load_state_dict(state)
    assert run(stream[650:], monitor)[1:] == ahead
    other = build_monitor(DetectorConfig())
    other.load_state_dict(state)
    assert run(stream[650:], other)[1:] == ahead


def test_alarms_depend_on_the_past_only():
    signals = calm(700, seed=14)
    signals["loss"][500:540] *= 1.5
    stream = observations(signals)
    whole = run(stream)[2]
    for cut in (510, 530, 600):
        assert run(stream[:cut])[2] == [a for a in whole if a.step <= cut]


def test_a_refused_attempt_is_no_reference():
    stream = observations(calm(300, seed=15))
    monitor, *_ = run(stream)
    level = monitor.state_dict()["detectors"]["series"]["statistics"]["accepted"]
    observation = Observation(301, 301, {"loss": 2.25, "grad_norm": 0.25})
    monitor.absorb(observation, monitor.observe(observation), applied=False)
    assert (monitor.state_dict()["detectors"]["series"]["statistics"]["accepted"] == level).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_never_raises_and_keeps_only_finite_values(values: list[float]):
    monitor, *_ = run(observations({"loss": values, "grad_norm": values[::-1]}) if values else [])
    series = monitor.state_dict()["detectors"]["series"]
    for part in ("statistics", "tail"):
        for name, array in series[part].items():
            assert np.isfinite(array).all(), name


class TestLevel:
    def test_calm_is_a_and_falls_as_the_evidence_grows(self):
        signals = calm(1200, seed=16)
        monitor, *_ = run(observations(signals))
        assert monitor.level().letter in ("A", "B")
        trouble = {"loss": np.linspace(2.2, 6.0, 40), "grad_norm": np.geomspace(0.24, 50, 40)}
        numbers = []
        for observation in observations(trouble, start=1201):
            monitor.absorb(observation, monitor.observe(observation))
            numbers.append(monitor.level().number)
        assert numbers[-1] <= 20 and monitor.level().letter == "E"
        assert {driver.split("/")[0] for driver, _ in monitor.level().drivers} == {"loss", "grad_norm"}
        calm_again = run(observations(calm(300, seed=17), start=1241), monitor)[0]
        assert calm_again.level().number > numbers[-1]

    def test_growth_is_extrapolated_with_its_uncertainty(self):
        signals = calm(1000, seed=18)
        monitor, *_ = run(observations(signals))
        growth = 0.24 * np.exp(np.arange(30) * 0.06)
        for observation in observations({"loss": calm(30, seed=19)["loss"], "grad_norm": growth}, start=1001):
            monitor.absorb(observation, monitor.observe(observation))
        forecast = monitor.level().forecast
        assert forecast is not None and forecast.supported, forecast
        assert forecast.signal == "grad_norm" and forecast.low <= forecast.steps <= forecast.high
        true = math.log(10) / 0.06 - 30  # steps until ten times the usual norm
        assert forecast.steps == pytest.approx(true, abs=15)

    def test_a_jump_supports_no_forecast(self):
        monitor, *_ = run(observations(after(calm(600, seed=20), loss=[9.0, 9.1], grad_norm=[4.0, 4.1])))
        forecast = monitor.level().forecast
        assert forecast is not None and not forecast.supported and forecast.steps is None and forecast.reason


class TestTogether:
    def test_many_layers_and_the_first_of_them(self):
        """S3: twelve layers; the embedding leads, the others follow."""
        rng, n = np.random.default_rng(21), 700
        layers = {
            f"grad_norm/{name}": 0.1 * np.exp(0.1 * rng.standard_normal(n))
            for name in ["embedding", *map(str, range(11))]
        }
        signals = calm(n, seed=21) | layers
        signals["grad_norm/embedding"][690:] *= 8
        for i in range(11):
            signals[f"grad_norm/{i}"][694:] *= 6
        _, _, alarms = run(observations(signals))
        together = [a for a in alarms if a.statistic == "layers"]
        assert together and "began in embedding" in together[0].message and together[0].onset_step == 691

    def test_realised_alarm_rates_are_reported_beside_the_target(self):
        monitor, *_ = run(observations(after(calm(998, seed=22), loss=[9.0, 9.0], grad_norm=[5.0, 5.0])))
        rates = monitor.rates()
        assert (
            rates["predicted_warn"] == 1.0 and rates["realised_warn"] == pytest.approx(20.0) and rates["steps"] == 1000
        )
