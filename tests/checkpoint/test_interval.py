"""checkpoint/interval.py: Young and Daly in the calm, closer together when the run looks ill (S15)."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.checkpoint.interval import HAZARD, IntervalConfig, Intervals, daly, mtbf, young

MINUTE, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_daly_gives_the_optima_of_its_paper(mtbf_s: float, minutes: float):
    """Figures 3 to 5 of Daly 2006: dump time 5 minutes."""
    assert daly(5 * MINUTE, mtbf_s) / MINUTE == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def expected_overhead(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Wall time per second of training under Poisson failures, exactly (Daly 2006, equation 13)."""
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s


@settings(max_examples=200, deadline=None)
@given(st.floats(0.01, 600), st.floats(60, 1e7))
def test_daly_is_within_a_thousandth_of_the_true_optimum(cost_s: float, mtbf_s: float):
    """Where a save takes less than half the time between failures, as the formula wants it."""
    if cost_s >= mtbf_s / 2:
        return
    found = daly(cost_s, mtbf_s)
    grid = [found * math.exp(0.02 * i) for i in range(-200, 201)]
    best = min(expected_overhead(t, cost_s, mtbf_s) for t in grid)
    assert expected_overhead(found, cost_s, mtbf_s) <= best * 1.001
    assert daly(cost_s, mtbf_s) <= young(cost_s, mtbf_s) + 0.2 * cost_s


def test_daly_when_saving_takes_longer_than_anything_lasts():
    assert daly(100.0, 40.0) == 40.0


def test_the_mean_time_between_failures_learns_from_the_run():
    assert mtbf(1000.0, 0.0, 0) == 1000.0
    assert mtbf(1000.0, 9000.0, 0) == 10_000.0
    assert mtbf(1000.0, 1e6, 99) == pytest.approx(10_010.0)


def run(intervals: Intervals, letter: str, steps: int, step_s: float = 1.0) -> None:
    for _ in range(steps):
        intervals.step(letter, step_s)


def settled(world: int = 1024, stall_s: float = 0.5, **config: int) -> Intervals:
    """After a calm start: an interval that the bounds do not decide."""
    intervals = Intervals(IntervalConfig(**{"longest": 1000, **config}), world)
    intervals.saved(stall_s, 5.0)
    run(intervals, "A", 10)
    return intervals


def test_the_calm_interval_is_dalys():
    intervals = settled()
    prior_s = 50_000 * HOUR / 1024
    assert intervals.steps == round(daly(0.5, prior_s)) == 419
    assert "419 steps at level A: a save stalls 0.5 s, a step takes 1 s, a failure is expected every 48.8 h" in (
        intervals.reason()
    )


def test_s15_never_more_than_a_thousand_steps_apart():
    intervals = settled(world=8, stall_s=30.0)
    assert daly(30.0, 50_000 * HOUR / 8) > 30_000
    assert intervals.steps == 1000
    with pytest.raises(ValueError, match="<= 1000"):
        IntervalConfig(longest=1001)


def test_s15_each_letter_halves_it_at_once_and_e_is_as_d():
    found = {}
    for letter in HAZARD:
        intervals = settled()
        intervals.step(letter, 1.0)
        found[letter] = intervals.steps
    assert found == {"A": 419, "B": 209, "C": 104, "D": 52, "E": 52}


def test_before_any_save_was_measured_risk_counts_all_the_same():
    intervals = Intervals(IntervalConfig(shortest=10, longest=400), 8)
    assert intervals.steps == 400
    run(intervals, "C", 1)
    assert intervals.steps == 100
    assert "not known yet" in intervals.reason()


def test_it_grows_only_when_the_better_level_has_lasted():
    intervals = settled(calm_after=50)
    run(intervals, "D", 1)
    run(intervals, "A", 49)
    assert intervals.steps == 52
    run(intervals, "A", 1)  # 50 better ones
    assert intervals.steps == 419
    run(intervals, "D", 1)
    run(intervals, "B", 1)  # the worst of the next 50
    run(intervals, "A", 49)
    assert intervals.steps == 209
    run(intervals, "A", 50)
    assert intervals.steps == 419


def test_it_does_not_flap_between_two_letters():
    intervals = settled(calm_after=50)
    seen = []
    for i in range(400):
        intervals.step("C" if i % 20 == 0 else "B", 1.0)
        seen.append(intervals.steps)
    assert len(set(seen)) == 1


def test_noise_of_times_moves_nothing_and_a_real_change_does():
    intervals = settled()
    seen = set()
    for i in range(300):
        intervals.step("A", 1.0 + 0.3 * math.sin(i))
        intervals.saved(0.5 * (1 + 0.4 * math.cos(i)), 5.0)
        seen.add(intervals.steps)
    assert len(seen) <= 2
    for _ in range(9):
        intervals.saved(5.0, 5.0)
    assert intervals.steps > 1.25 * 419


def test_one_slow_write_is_no_reason():
    intervals = settled()
    for _ in range(8):
        intervals.saved(0.5, 5.0)
    intervals.saved(600.0, 900.0)
    assert intervals.steps == 419


def test_a_save_is_written_before_the_next_one_begins():
    intervals = settled(stall_s=0.01)
    for _ in range(9):
        intervals.saved(0.01, 300.0)
    run(intervals, "D", 1)
    assert intervals.steps == 300


def test_small_changes_wait_but_not_for_a_level_nor_for_a_save_that_is_not_done():
    intervals = settled(longest=440, shortest=400)
    run(intervals, "D", 1)  # 4 % closer, and at once
    assert intervals.steps == 400
    intervals = settled()
    for _ in range(9):
        intervals.saved(0.5, 480.0)
    assert intervals.steps == 480  # 13 % farther: the one before is still being written


def test_failures_bring_it_down_and_time_without_brings_it_back():
    intervals = settled()
    intervals.failed(8)
    assert intervals.steps == round(daly(0.5, (50_000 * HOUR / 1024 + 10) / 9))
    before = intervals.steps
    for _ in range(200):
        intervals.step("A", 5000.0)
    assert intervals.steps != before  # steps are longer: fewer of them between saves


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_was_not_measured_leaves_everything_as_it_was(value: float):
    intervals = settled()
    before = intervals.state_dict()
    intervals.saved(value, value)
    intervals.step("A", value)
    intervals.failed(0)
    assert intervals.state_dict() == before


def test_due():
    intervals = settled()
    assert intervals.due(0, None)
    assert not intervals.due(418, 0) and intervals.due(419, 0)
    assert intervals.due(50, 80)  # that one belongs to a course given up


LETTERS = st.sampled_from("ABCDE")
EVENTS = st.one_of(
    st.tuples(st.just("step"), LETTERS, st.floats(allow_nan=True, allow_infinity=True, width=32)),
    st.tuples(st.just("step"), LETTERS, st.floats(0.01, 100)),
    st.tuples(st.just("saved"), st.floats(0, 1000), st.floats(0, 10_000)),
    st.tuples(st.just("failed"), st.integers(0, 3)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.integers(0, 60), st.integers(1, 100_000))
def test_always_within_bounds_and_a_restart_changes_nothing(events: list[tuple], cut: int, world: int):
    config = IntervalConfig(shortest=7, longest=500, calm_after=5)
    one, other = Intervals(config, world), Intervals(config, world)
    for i, (name, *arguments) in enumerate(events):
        getattr(one, name)(*arguments)
        getattr(other, name)(*arguments)
        assert 7 <= one.steps <= 500
        if i == cut:
            other = Intervals(config, world)
            other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
    assert one.steps == other.steps and one.reason() == other.reason()


def test_s15_each_letter_halves_the_interval_where_saving_costs_next_to_nothing():
    """Then only the bound says how far apart, and it must not hide the risk."""
    found = []
    for letter in "ABCD":
        intervals = Intervals(IntervalConfig(shortest=5, longest=800), world=2)
        intervals.saved(0.01, 0.1)
        intervals.step(letter, 1.0)
        found.append(intervals.steps)
    assert found == [800, 400, 200, 100]
