"""Analysis of a log: verdicts, onset and blow-up, causality, rewinding as in the live run, strict JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.detectors import DetectorConfig, build_monitor
from resilient.logs.analysis import Analysis, Analyzer, analyze
from resilient.logs.rows import Row
from resilient.logs.series import Series
from resilient.signals import Alarm, Observation
from tests.logs.curves import Rows, falling, norms, rows, warm_up


def look(made: list[Row]) -> Analysis:
    return analyze(Rows(made))


# -- verdicts ----------------------------------------------------------------------------------------------------------


def bumped(points: int = 600) -> np.ndarray:
    loss = falling(points, noise=0.02)
    loss[100::37] += 1.2  # a batch of other content, gone at the next point
    return loss


def spiked() -> np.ndarray:
    loss = falling(600)
    loss[400:415] += 3.0 * np.exp(-np.arange(15) / 5)
    return loss


def broken(at: int = 400) -> np.ndarray:
    loss = falling(600)
    loss[at:] = 7.0 + np.random.default_rng(3).normal(0, 0.1, 600 - at)
    return loss


def drifting() -> np.ndarray:
    """+1.2 nats in 400 points, too slow for any reference that moves along."""
    loss = falling(1200)
    loss[600:1000] += np.linspace(0, 1.2, 400)
    loss[1000:] += 1.2
    return loss


def shifted() -> np.ndarray:
    """Another data mix from step 300 on: higher, and as calm as before."""
    loss = falling(600, noise=0.05)
    loss[300:] += 0.75
    return loss


def with_nan(at: slice) -> np.ndarray:
    loss = falling(600)
    loss[at] = math.nan
    return loss


def two_kinds() -> np.ndarray:
    """Batches of two kinds (mixup): the loss jumps between two levels from point to point."""
    return falling(2000, noise=0.1) + 2.2 * (np.random.default_rng(5).random(2000) < 0.45)


CURVES: dict[str, tuple[np.ndarray, str]] = {
    "healthy": (falling(600), "healthy"),
    "starts_far_away": (falling(600, start=84.0), "healthy"),
    "single_batch_bumps": (bumped(), "healthy"),
    "two_kinds_of_batches": (two_kinds(), "healthy"),
    "level_shift": (shifted(), "healthy"),
    "negative": (np.random.default_rng(0).normal(-0.02, 0.01, 400), "healthy"),
    "small_losses": (falling(600, start=2.0, end=0.05, noise=0.01), "healthy"),
    "flat_and_noisy": (1.2 + np.random.default_rng(12).normal(0, 0.15, 600), "healthy"),
    "policy_gradient": (0.02 * np.cumsum(np.random.default_rng(4).normal(0, 0.1, 600)), "healthy"),
    "heavy_tails": (falling(600) + 0.03 * np.random.default_rng(9).standard_t(2.1, 600), "healthy"),
    "explodes_early_and_comes_back": (np.concatenate([[9.2, 7.3, 33.0, 90.0], 150 * np.exp(-np.arange(30) / 8) + 8, falling(400, start=8.0)]), "loss_spike"),
    "one_nan": (with_nan(slice(300, 301)), "healthy"),
    "spike": (spiked(), "loss_spike"),
    "jump": (broken(), "diverged"),
    "slow_drift": (drifting(), "diverged"),
    "exploding_at_the_start": (np.concatenate([[9.2, 9.1, 40.0, 80.0, 120.0], np.full(200, 50.0) + np.arange(200) % 7]), "diverged"),
    "nan_to_the_end": (with_nan(slice(300, None)), "nonfinite"),
    "nan_in_the_last_row": (with_nan(slice(599, None)), "nonfinite"),
    "many_nans_in_a_row": (with_nan(slice(300, 320)), "nonfinite"),
    "nan_from_the_first": (np.full(50, math.nan), "nonfinite"),
    "rises_from_the_start": (6.9 + 0.3 * (1 - np.exp(-np.arange(500) / 40)) + 0.01 * np.sin(np.arange(500)), "collapse"),
    "trivial_plateau": (np.concatenate([np.linspace(32, 5.6, 5), 5.45 - np.arange(700) * 1e-4 + 0.02 * np.sin(np.arange(700) * 1.7)]), "collapse"),
    "too_short": (falling(20), "unclear"),
    "constant": (np.zeros(500), "unclear"),
}  # fmt: skip


@pytest.mark.parametrize("name", CURVES)
def test_s1_verdicts(name: str) -> None:
    loss, verdict = CURVES[name]
    found = look(rows(loss))
    assert found.verdict == verdict, found.summary
    assert found.exit_code == (2 if verdict in ("diverged", "nonfinite", "collapse") else found.exit_code)
    if verdict == "loss_spike":
        assert found.exit_code == 1
    if verdict in ("healthy", "unclear") and not found.alarms:
        assert found.exit_code == 0


@pytest.mark.parametrize(("loss", "blowup"), [(spiked(), 400), (broken(), 400), (with_nan(slice(300, None)), 300)])
@pytest.mark.parametrize("every", [1, 100])
def test_blowup_and_onset_are_where_it_begins(loss: np.ndarray, blowup: int, every: int) -> None:
    found = look(rows(loss, every=every))
    assert found.blowup_step is not None and found.onset_step is not None
    assert abs(found.blowup_step - blowup * every) <= 2 * every
    assert found.onset_step <= found.blowup_step + every


def test_s12_onset_lies_before_the_blowup_when_the_gradient_leads() -> None:
    """The gradient norm leaves its range before the loss does: its alarms belong to the same trouble."""
    loss, norm = falling(600), norms(600)
    norm[470:] *= 4.0 * np.exp(np.linspace(0, 12, 130))
    loss[500:] += np.linspace(0.6, 6, 100)
    found = look(rows(loss, norm))
    assert found.verdict == "diverged"
    assert found.blowup_step is not None and abs(found.blowup_step - 500) <= 2
    assert found.onset_step is not None and 460 <= found.onset_step < 500
    assert found.first_alarm_step is not None and found.first_alarm_step < 500


def test_overflows_that_the_scaler_refuses_are_no_trouble() -> None:
    """S4, fp16: a refused row with an infinite gradient norm now and then is ordinary."""
    made = rows(falling(600), norms(600))
    for at in (5, 6, 7, 200, 400):
        made[at] = Row(at, {"loss": made[at].values["loss"], "grad_norm": math.inf}, applied=False)
    assert look(made).verdict == "healthy"


def test_gradients_that_stay_infinite_are() -> None:
    norm = norms(600)
    norm[585:] = math.inf
    found = look(rows(falling(600), norm))
    assert (found.verdict, found.exit_code) == ("nonfinite", 2)


def test_a_run_that_ends_in_refusals_is_broken() -> None:
    made = [Row(i + 1, r.values, attempt=i + 1) for i, r in enumerate(rows(falling(300)))]
    made += [Row(301, {"loss": math.nan}, applied=False, attempt=301 + i) for i in range(6)]
    assert look(made).verdict == "nonfinite"
    made[-6:] = [Row(301, {"loss": 9.0}, applied=False, attempt=301 + i) for i in range(6)]
    assert look(made).verdict == "diverged"


def test_silent_collapse_is_a_verdict_of_its_own() -> None:
    """S1, S9: the monitor says collapse, the loss says nothing."""

    class Silent:
        def observe(self, observation: Observation) -> tuple[Any, ...]:
            return ()

        def absorb(self, observation: Observation, findings: Any, applied: bool = True) -> tuple[Alarm, ...]:
            if observation.step != 300:
                return ()
            return (Alarm(300, "warn", "attention_entropy", "collapse", 9.0, 280, 0.7, "entropy fell from 3.1 to 0.4"),)

        def level(self) -> Any:
            return build_monitor(DetectorConfig()).level()

        def rates(self) -> dict[str, float]:
            return build_monitor(DetectorConfig()).rates()

        def state_dict(self) -> dict[str, Any]:
            return {}

    analyzer = Analyzer(Silent())  # type: ignore[arg-type]
    for row in rows(falling(600)):
        analyzer.add(row)
    found = analyzer.result("x", Rows([]).remarks)
    assert (found.verdict, found.onset_step, found.exit_code) == ("collapse", 280, 2)
    assert found.causes[0].symptom == "attention_entropy_jump" or "silent_collapse" in {c.symptom for c in found.causes}


def test_a_log_that_goes_on_from_an_earlier_one_may_be_flat() -> None:
    made = [Row(800_000 + 100 * i, {"loss": 2.0 + 0.004 * math.sin(i)}) for i in range(500)]
    assert look(made).verdict == "healthy"


def test_no_loss_at_all() -> None:
    found = look([Row(i, {"grad_norm": float(n)}) for i, n in enumerate(norms(100))])
    assert (found.verdict, found.onset_step, found.blowup_step) == ("unclear", None, None)
    assert look([]).verdict == "unclear"


# -- causality ---------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    spikes=st.lists(st.tuples(st.integers(10, 380), st.floats(0.2, 60.0), st.integers(1, 30)), max_size=4),
    lost=st.lists(st.tuples(st.integers(10, 380), st.sampled_from([math.nan, math.inf])), max_size=2),
    cut=st.integers(1, 399),
)
def test_cutting_the_log_changes_no_alarm_before_the_cut(
    seed: int, spikes: list[tuple[int, float, int]], lost: list[tuple[int, float]], cut: int
) -> None:
    """An alarm at step t depends only on rows up to t."""
    loss, norm = falling(400, seed), norms(400, seed)
    for at, height, length in spikes:
        loss[at : at + length] += height
        norm[at : at + length] *= 1 + height
    for at, value in lost:
        loss[at] = norm[at] = value
    made = rows(loss, norm)
    whole, part = look(made), look(made[:cut])
    assert part.alarms == tuple(alarm for alarm in whole.alarms if alarm.step < cut)


def test_the_causality_test_has_alarms_to_compare() -> None:
    loss, norm = falling(400), norms(400)
    loss[200:210] += 20.0
    norm[200:210] *= 20.0
    assert look(rows(loss, norm)).alarms


# -- going back --------------------------------------------------------------------------------------------------------


class Live:
    """What a coordinator does with its monitor: snapshots every few steps, refusals, rollbacks; and what it logs."""

    def __init__(self, every: int = 5) -> None:
        self.monitor = build_monitor(DetectorConfig())
        self.every = every
        self.step = self.attempt = self.generation = 0
        self.snapshots = {0: self.monitor.state_dict()}
        self.rows: list[Row] = []
        self.alarms: list[Alarm] = []

    def attempt_step(self, loss: float, norm: float, applied: bool = True) -> None:
        self.attempt += 1
        values = {"loss": loss, "grad_norm": norm}
        observation = Observation(self.step + 1, self.attempt, values)
        findings = self.monitor.observe(observation)
        self.alarms += self.monitor.absorb(observation, findings, applied)
        logged = {**values, "generation": float(self.generation)}
        self.rows.append(Row(self.step + 1, logged, applied=applied, attempt=self.attempt, line=self.attempt))
        if applied:
            self.step += 1
            if self.step % self.every == 0:
                self.snapshots[self.step] = self.monitor.state_dict()

    def roll_back(self, step: int) -> None:
        self.step = step
        self.monitor.load_state_dict(self.snapshots[step])
        self.snapshots = {at: state for at, state in self.snapshots.items() if at <= step}


def test_alarms_of_our_own_log_are_those_of_the_live_run() -> None:
    """Rollbacks, also over refused attempts, also further than one kept state, also a restart from nothing."""
    rng = np.random.default_rng(7)
    live = Live()

    def train(until: int, rise: float = 0.0) -> None:
        while live.step < until:
            level = 2.0 + 3.0 * math.exp(-live.step / 40)
            live.attempt_step(
                level + rise + float(rng.normal(0, 0.03)), 0.5 * math.exp(float(rng.normal(0, 0.15))) * (1 + rise)
            )

    train(60)
    for _ in range(3):
        live.attempt_step(9.0, 40.0, applied=False)
    train(90)
    for height in (0.6, 1.2, 2.4, 4.0):
        train(live.step + 1, rise=height)
    live.attempt_step(math.nan, math.nan, applied=False)
    live.roll_back(85)
    live.attempt_step(12.0, 70.0, applied=False)  # refused right after the rollback: not another one
    live.attempt_step(11.0, 60.0, applied=False)
    train(700)
    train(720, rise=1.0)
    live.roll_back(100)
    train(260)
    live.attempt_step(8.0, 30.0, applied=False)
    live.attempt_step(9.0, 35.0, applied=False)
    live.roll_back(260)  # killed here, and started from the checkpoint of step 260: only the refusals are lost
    live.generation = 1
    train(280)
    live.roll_back(0)
    train(60)
    for height in (1.2, 2.4, 4.0):
        train(live.step + 1, rise=height)

    analyzer = Analyzer()
    for row in live.rows:
        analyzer.add(row)
    assert len(live.alarms) >= 10
    assert analyzer.alarms == live.alarms
    assert str(analyzer.monitor.state_dict()) == str(live.monitor.state_dict())
    assert analyzer.monitor.level() == live.monitor.level()
    assert analyzer.restarts == [(94, 86), (720, 101), (260, 261), (280, 1)]
    assert analyzer.notes == [] and list(analyzer.signals) == ["loss", "grad_norm"]


def test_going_back_further_than_states_are_held_is_said() -> None:
    analyzer = Analyzer()
    for i in range(4700):
        analyzer.add(Row(i + 1, {"loss": 2.0 + 0.01 * math.sin(i)}, attempt=i + 1, line=i + 1))
    analyzer.add(Row(200, {"loss": 2.0}, attempt=4701, line=4701))
    assert len(analyzer.notes) == 1 and "step 200" in analyzer.notes[0]
    analyzer.add(Row(1, {"loss": 2.0}, attempt=4702, line=4702))  # but back to nothing is always exact
    assert len(analyzer.notes) == 1


def test_a_foreign_log_that_goes_back_restarted() -> None:
    """No alarm by itself, no note of trouble, and what was done again is drawn once."""
    made = rows(falling(600), norms(600))
    again = [Row(r.step, r.values, line=r.line + 200) for r in made[400:]]
    found = look([*made[:500], *again])
    assert found.restarts == ((499, 400),)
    assert found.verdict == "healthy" and not [alarm for alarm in found.alarms if alarm.step >= 400]
    drawn = [x for x, _ in found.series["loss"].points()]
    assert drawn == sorted(drawn) and len(drawn) == 600


def test_a_counter_that_begins_anew_is_drawn_behind() -> None:
    made = rows(falling(300))
    found = look([*made, *rows(falling(300, seed=4, start=2.1))])
    assert found.counter_began_anew and found.restarts == ((299, 0),)
    assert any("began anew" in note for note in found.remarks.notes)
    drawn = [x for x, _ in found.series["loss"].points()]
    assert drawn == sorted(drawn) and drawn[-1] == 599


def test_an_evaluation_row_is_no_restart_and_no_training_loss() -> None:
    made: list[Row] = []
    for row in rows(falling(300)):
        made.append(row)
        if row.step % 50 == 0:
            made.append(Row(max(row.step - 1, 0), {"eval_loss": row.values["loss"] + 0.1}, evaluation=True))
    found = look(made)
    assert found.restarts == () and found.verdict == "healthy"
    assert found.rows == 306 and found.signals == ("loss", "eval_loss")


# -- what it points to -------------------------------------------------------------------------------------------------


def symptoms(found: Analysis) -> list[str]:
    return [report.symptom for report in found.causes]


def test_t5_a_blow_up_in_warm_up_points_to_the_learning_rate() -> None:
    loss = falling(600)
    loss[60:] += 5.0
    found = look(rows(loss, lr=warm_up(600, until=100)))
    assert found.verdict == "diverged"
    assert found.causes[0].symptom == "lr_too_high" and found.causes[0].cause == "optimizer"
    assert any("warm-up" in remedy for remedy in found.causes[0].remedies)


def test_s20_a_cut_that_helped_briefly_points_to_the_data() -> None:
    loss, lr = falling(900), np.full(900, 1e-3)
    loss[400:412] += 3.0
    lr[415:] = 5e-4
    loss[600:612] += 3.0
    found = look(rows(loss, norms(900), lr=lr))
    assert "lr_cut_helped_briefly" in symptoms(found)
    report = next(c for c in found.causes if c.symptom == "lr_cut_helped_briefly")
    assert report.cause == "data" and "0.0005" in " ".join(report.evidence)


def test_t8_clipping_on_every_step_is_noted() -> None:
    found = look(rows(falling(300), 5.0 * norms(300)))
    assert symptoms(found) == ["every_step_clips"] and found.exit_code == 0


def test_t10_evaluation_that_rises_while_training_falls() -> None:
    made: list[Row] = []
    for row in rows(falling(600, end=0.5, noise=0.01)):
        made.append(row)
        if row.step % 60 == 59:
            made.append(Row(row.step, {"eval_loss": 2.0 + ((row.step - 300) / 300) ** 2}, evaluation=True))
    found = look(made)
    assert "overfitting" in symptoms(found)
    report = next(c for c in found.causes if c.symptom == "overfitting")
    assert "step 299" in report.evidence[0]


def test_t9_trouble_right_after_a_restart() -> None:
    made = rows(falling(600), norms(600))
    jumped = [
        Row(r.step, {"loss": r.values["loss"] + 4.0, "grad_norm": r.values["grad_norm"] * 30}) for r in made[400:]
    ]
    found = look([*made[:450], *jumped])
    assert found.verdict == "diverged"
    assert found.causes[0].symptom == "resume_mismatch" and "T9" in found.causes[0].rows


def test_t9_weights_initialised_again() -> None:
    found = look(rows(np.concatenate([falling(600, start=33.0, end=1.1), falling(600, seed=2, start=33.0, end=1.1)])))
    assert "reinitialised" in symptoms(found)


def test_t10_a_staircase_is_memorisation_and_no_fault() -> None:
    rng = np.random.default_rng(0)
    loss = np.repeat([1.6, 1.2, 0.9, 0.7], 150) + rng.normal(0, 0.02, 600)
    found = look(rows(loss))
    assert found.verdict == "healthy" and "epoch_staircase" in symptoms(found)


def test_t2_a_broken_logger_is_named() -> None:
    found = look(rows(falling(300), np.zeros(300)))
    assert found.causes[0].symptom == "broken_logger" and "grad_norm" in found.causes[0].evidence[0]


def test_s4_a_loss_scale_that_keeps_falling() -> None:
    scale = np.full(600, 65536.0)
    scale[560:] = 65536.0 / 2.0 ** np.minimum(np.arange(40) // 4 + 1, 12)
    loss = falling(600)
    loss[596:] = math.nan
    found = look(rows(loss, norms(600), loss_scale=scale))
    assert found.verdict == "nonfinite"
    assert found.causes[0].symptom == "loss_scale_falls" and found.causes[0].cause == "precision"


def test_a_healthy_run_has_no_cause() -> None:
    found = look(rows(falling(600), norms(600), lr=warm_up(600, until=60)))
    assert found.causes == () and found.exit_code == 0 and found.onset_step is None


# -- numbers and bounds ------------------------------------------------------------------------------------------------


def test_the_dictionary_is_strict_json() -> None:
    norm = norms(600)
    norm[300] = math.inf
    loss = with_nan(slice(590, None))
    found = look(rows(loss, norm)).as_dict()
    text = json.dumps(found, allow_nan=False)
    assert {
        "file",
        "rows",
        "signals",
        "verdict",
        "first_alarm_step",
        "onset_step",
        "blowup_step",
        "alarms",
        "causes",
    } <= set(found)
    alarm, cause = json.loads(text)["alarms"][0], json.loads(text)["causes"][0]
    assert {"step", "severity", "signal", "statistic", "score", "onset_step", "message"} <= set(alarm)
    assert {"cause", "confidence", "evidence", "remedies", "rows"} <= set(cause)
    assert any(a["score"] is None for a in found["alarms"])  # an infinite score


def test_a_series_is_bounded_and_keeps_every_spike() -> None:
    series = Series(limit=64)
    for i in range(100_000):
        series.add(i, 50.0 if i == 77_777 else math.nan if i == 33_333 else 1.0 + 0.001 * (i % 10))
    points = list(series.points())
    assert len(series.buckets) <= 64
    assert (77_777, 50.0) in points
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert len(series.nonfinite()) == 1
    series.cut(70_000)
    assert max(x for x, _ in series.points()) < 70_000
    assert max(y for _, y in series.points()) < 2.0
