"""`resilient bench detection`: public rules behave as published, truth is what was injected, scores count what they say.

Rows S1, S2, S10, S12, BR-44."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from resilient.bench.detection.baselines import BASELINES, BY_KEY, NAMED, SigmaSelf
from resilient.bench.detection.events import (
    CONFOUNDERS,
    EVENTS,
    HEALTHY,
    Streams,
    join,
    level_shift,
    make_event,
    make_healthy,
    nonfinite,
    norm_shift,
    worked_case,
)
from resilient.bench.detection.ours import judge
from resilient.bench.detection.protocol import (
    calibrate,
    false_alarms,
    longest_row,
    merged_starts,
    outcome,
    poisson_interval,
    poisson_quantile,
)
from resilient.bench.detection.run import OURS, Settings, run
from resilient.bench.detection.table import text
from resilient.bench.detection.traces import load_traces, score_traces
from resilient.cli.main import main
from resilient.errors import ConfigError
from tests.cli.commands import environment


def streams(loss: np.ndarray, **more: np.ndarray) -> Streams:
    """Runs as given, (runs, points), with no event."""
    nowhere = np.full(len(loss), -1)
    steps = np.broadcast_to(np.arange(loss.shape[1]), loss.shape)
    return Streams("given", steps, {"loss": loss, **more}, nowhere, nowhere, nowhere)


def flags(key: str, given: Streams) -> np.ndarray:
    return BY_KEY[key].alarms(BY_KEY[key].scores(given))


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


# -- the public rules, as read from their code ------------------------------------------------------------------------


def test_windows_that_keep_outliers_accept_the_fifth_of_a_row() -> None:
    """6 sigma over 128 takes 2.0 -> 7.4 for normal after 4 steps (research 1.2); a robust rule does not."""
    given = level_shift(rng(), "gauss", 3, before=600, after=300)
    after = flags("B6", given.only("loss"))[:, 600:]
    assert after.sum(axis=1).tolist() == [4, 4, 4]
    robust = flags("B12", given.only("loss"))[:, 600:]
    assert robust[:, :64].all() and not robust[:, 200:].any()  # three re-admissions of 64 move its median


def test_one_nan_costs_olmo_128_more_steps_and_switches_llm_c_and_zclip_off() -> None:
    given = nonfinite(rng(), "gauss", 2, before=400)
    assert flags("B6", given)[:, 400:].sum(axis=1).tolist() == [129, 129]
    assert np.isfinite(BY_KEY["B7"].scores(given)[:, 399]).all()
    for key in ("B7", "B9"):
        assert np.isneginf(BY_KEY[key].scores(given)[:, 400:]).all()
    assert flags("B0", given).sum(axis=1).tolist() == [1, 1]
    assert flags("B4", given)[:, 400].all() and not flags("B4", given)[:, 401:].any()
    assert not flags("B2", given).any()


def test_a_value_inside_its_own_window_is_capped() -> None:
    """z of llm.c cannot exceed sqrt(n - 1) = 11.3, however large the outlier."""
    rule = SigmaSelf(1, np.array([200]), np.array([7.0]))
    noise = rng().standard_normal(150)
    for x in noise:
        rule.score(np.array([x]), np.array([True]))
    z = rule.score(np.array([1e12]), np.array([True]))[0]
    assert z == pytest.approx(math.sqrt(127), rel=1e-3)


def test_ratio_rules_miss_the_bloom_spike() -> None:
    """2.2 -> 5.1 is a ratio of 2.3 for one step: neither 3x (Lightning) nor 2x on 5 steps (KillLossSpike)."""
    given = make_event("E2 BLOOM-176B", "gauss", 4, seed=1)
    assert not flags("B3", given).any()
    assert not flags("B4", given).any()
    lead = outcome(given, flags("B6", given)).lead
    assert (lead == 4).all()


def test_zclip_clips_for_ever_after_the_norm_has_trebled() -> None:
    given = norm_shift(rng(), "gauss", 2, before=400, after=1200)
    assert flags("B9", given)[:, 1400:].mean() > 0.95
    assert not flags("B6", given)[:, 600:].any()


def test_the_reference_rule_needs_three_in_a_row() -> None:
    """S10."""
    loss = 2.0 + 0.01 * rng().standard_normal((1, 300))
    loss[0, [200, 201]] += 1.0
    loss[0, [250, 251, 252]] += 5.0
    assert np.flatnonzero(flags("S10", streams(loss))[0]).tolist() == [252]


def test_kill_loss_spike_counts_five_in_a_row_and_knows_its_cap() -> None:
    loss = np.full((1, 1000), 2.0)
    loss[0, 300:304] = 5.0
    assert not flags("B3", streams(loss)).any()
    loss[0, 304] = 5.0
    assert np.flatnonzero(flags("B3", streams(loss))[0]).tolist() == [304]
    loss[0, 600:] = 2.5  # above the cap of 2.0, below 2x: half of the window of 100
    assert np.flatnonzero(flags("B3", streams(loss))[0])[1] == 649


def test_megatron_compares_with_its_first_hundred_samples() -> None:
    loss = np.concatenate([np.full(100, 11.0), np.full(100, 2.0)])[None]
    loss[0, 150], loss[0, 160] = 109.9, 110.0
    assert np.flatnonzero(flags("B2", streams(loss))[0]).tolist() == [160]


@pytest.mark.parametrize("rule", BASELINES, ids=lambda rule: rule.key)
def test_every_rule_is_causal_and_runs_do_not_touch_each_other(rule) -> None:
    """A score depends on its own run up to its step; missing points change nothing."""
    given = make_healthy("t5", 2, seed=3, split="test", points=560).only("loss", "grad_norm")
    limit = 4.0 if math.isnan(rule.threshold) else None
    whole = rule.scores(given, limit)
    half = {name: x[1:2, :500] for name, x in given.values.items()}
    alone = Streams("half", given.steps[1:2, :500], half, *(np.full(1, -1),) * 3)
    if rule.key != "B3":  # its window is 5 % of the planned run
        np.testing.assert_allclose(rule.scores(alone, limit)[0], whole[1, :500], rtol=1e-9)
    gap = np.zeros((1, 500), dtype=bool)
    gap[0, 450:470] = True
    spread = Streams("gap", alone.steps, half, *(np.full(1, -1),) * 3, missing={"loss": gap, "grad_norm": gap})
    assert np.isneginf(rule.scores(spread, limit)[0, 450:470]).all()


# -- truth ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVENTS)
def test_events_begin_where_they_say(name: str) -> None:
    """Before the onset nothing differs from a healthy run; at the blow-up the loss is broken, if the event breaks it."""
    given = make_event(name, "gauss", 4, seed=5)
    onset, blowup = given.onset[0], given.blowup[0]
    loss, norm = given.values["loss"], given.values["grad_norm"]
    assert 0 < onset <= blowup < given.points
    assert np.isfinite(loss[:, :onset]).all() and np.isfinite(norm[:, :onset]).all()
    level, spread = np.median(loss[:, :onset]), loss[:, :onset].std()
    assert np.abs(loss[:, :onset] - level).max() < 0.3 and spread < 0.05
    if name.startswith(("E1", "E2", "E4", "E9")) and name not in ("E4b", "E10 factor", "E10 flip", "E10 stale"):
        assert (loss[:, blowup] > level + 0.5).all()
        assert (loss[:, blowup - 1] < level + 0.5).all()


def test_worked_case_is_the_one_of_the_requirement() -> None:
    """S12: norm spread 0.15 -> 0.9, peak logit 12 -> 20, loss 2.08 -> 2.06 in steps 9000-9400, 2.04 -> 7.4 at 9448."""
    given = worked_case(rng(), "t3", 40)
    at = {step: int(np.flatnonzero(given.steps[0] == step)[0]) for step in (9000, 9400, 9447, 9448)}
    spread = np.log(given.values["grad_norm"]).std(axis=0)
    assert spread[: at[9000]].mean() == pytest.approx(0.15, rel=0.1)
    assert spread[at[9400] : at[9448]].mean() == pytest.approx(0.9, rel=0.15)
    loss = np.median(given.values["loss"], axis=0)
    assert loss[at[9000] : at[9000] + 10].mean() == pytest.approx(2.08, abs=0.01)
    assert loss[at[9400]] == pytest.approx(2.06, abs=0.01)
    assert loss[at[9447]] == pytest.approx(2.04, abs=0.01) and loss[at[9448]] == pytest.approx(7.4, abs=0.01)
    logit = np.median(given.values["logit_max"], axis=0)
    assert logit[at[9000]] == pytest.approx(12, abs=0.2) and logit[at[9400]] == pytest.approx(20, abs=0.2)
    assert (given.onset == at[9000]).all() and (given.due == at[9400]).all() and (given.blowup == at[9448]).all()


def test_seeds_are_apart_and_repeat() -> None:
    first = make_healthy("t3", 2, seed=0, split="test", points=300)
    same = make_healthy("t3", 2, seed=0, split="test", points=300)
    others = [
        make_healthy("t3", 2, seed=0, split="calibrate", points=300),
        make_healthy("t3", 2, seed=1, split="test", points=300),
        make_healthy("t5", 2, seed=0, split="test", points=300),
    ]
    np.testing.assert_array_equal(first.values["loss"], same.values["loss"])
    for other in others:
        assert not np.isclose(first.values["loss"], other.values["loss"]).any(axis=1).all()


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_never_break(name: str) -> None:
    given = make_healthy(name, 2, seed=2, split="test")
    present = given.present("loss")
    assert np.isfinite(given.values["loss"][present]).all()
    assert (given.onset == -1).all()
    marked = given.benign is not None and given.benign.any()
    assert marked == (name in CONFOUNDERS and name not in ("missing and stale", "every 10th step"))
    assert given.values["loss"][:, -500:].max() < 4.0
    if name == "every 10th step":
        assert (np.diff(given.steps[0]) == 10).all()
    if name == "resume":
        assert (np.diff(given.steps, axis=1) < 0).sum(axis=1).tolist() == [1, 1]


# -- scoring ----------------------------------------------------------------------------------------------------------


def test_alarms_are_merged_within_fifty_points() -> None:
    alarms = np.zeros(500, dtype=bool)
    alarms[[10, 60, 110, 161, 400]] = True
    assert merged_starts(alarms).tolist() == [10, 161, 400]
    assert merged_starts(np.zeros(5, dtype=bool)).size == 0


def test_lead_counts_alarms_that_begin_after_the_onset() -> None:
    given = level_shift(rng(), "gauss", 4, before=100, after=100)
    given.blowup = given.due = np.full(4, 150)
    alarms = np.zeros(given.steps.shape, dtype=bool)
    alarms[0, 120] = True
    alarms[1, 90:130] = True  # on since before: not a detection
    alarms[2, [90, 170]] = True  # the last point that counts, 20 late
    found = outcome(given, alarms)
    assert found.first.tolist() == [120, -1, 170, -1]
    assert found.recall(0) == 0.25 and found.recall(10) == 0.25 and found.recall(50) == 0.0
    assert found.caught == 0.5 and found.within(21) == 0.25 and found.within(20) == 0.0


def test_false_alarms_are_split_by_what_caused_them() -> None:
    given = make_healthy("single-batch bumps", 1, seed=0, split="test")
    assert given.benign is not None
    alarms = np.zeros(given.steps.shape, dtype=bool)
    alarms[0, np.argmax(given.benign[0])] = alarms[0, 300] = True
    found = false_alarms(given, alarms)
    assert (found.clean, found.benign, found.points) == (1, 1, 4000)
    assert found.per_10k == 5.0


@pytest.mark.parametrize(("count", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.39)])
def test_poisson_interval_is_the_exact_one(count: int, low: float, high: float) -> None:
    assert poisson_interval(count) == (pytest.approx(low, abs=1e-3), pytest.approx(high, rel=1e-3))


def test_poisson_interval_of_a_large_count_is_nearly_normal() -> None:
    low, high = poisson_interval(900)
    assert (low, high) == (pytest.approx(900 - 1.96 * 30, rel=0.01), pytest.approx(900 + 1.96 * 30, rel=0.01))


@pytest.mark.parametrize(("mean", "most"), [(0.01, 0), (1.0, 3), (10.0, 17), (2000.0, 2088)])
def test_poisson_quantile_is_where_the_sum_passes_it(mean: float, most: int) -> None:
    """Also for a mean so large that P(N = 0) is no float any more."""
    assert poisson_quantile(0.975, mean) == most


@pytest.mark.parametrize("key", ["B6", "B4", "B2"])
def test_calibrated_thresholds_keep_the_target_on_the_calibration_seeds(key: str) -> None:
    rule = BY_KEY[key]
    sample = make_healthy("t3", 6, seed=0, split="calibrate", points=1500)
    found = calibrate(rule, sample, (10.0, 3.0))
    assert found[10.0] <= found[3.0]
    for target, threshold in found.items():
        assert false_alarms(sample, rule.alarms(rule.scores(sample, threshold), threshold)).per_10k <= target
    lower = 0.9 * found[10.0]
    assert false_alarms(sample, rule.alarms(rule.scores(sample, lower), lower)).per_10k > 3.0


def test_longest_row() -> None:
    assert longest_row(np.array([[1, 1, 0, 1], [0, 1, 1, 1]], dtype=bool)) == 3


def test_join_keeps_each_run() -> None:
    parts = [make_healthy("t3", 2, seed=0, split="test", points=200), make_event("E9", "t3", 1, seed=0)]
    both = join("both", parts)
    assert both.lengths().tolist() == [200, 200, parts[1].points]
    np.testing.assert_array_equal(both.values["loss"][2], parts[1].values["loss"][0])
    assert not both.present("grad_norm/embedding")[:2].any() and both.present("grad_norm/embedding")[2].all()


# -- real logs --------------------------------------------------------------------------------------------------------


def trace_folder(folder: Path) -> Path:
    """Four logs: a spike with a later one, one that is too early, a NaN, and a healthy one with gaps."""
    rows = [
        "trace_id,source,label,onset_step,blowup_step,later_events",
        "spike,A,transient_spike,1000,1500,4000",
        "early,A,diverged,200,200,",
        "nan,B,nan,1200,1200,",
        "calm,C,healthy,,,",
    ]
    (folder / "index.csv").write_text("\n".join(rows) + "\n")
    draw = rng(1)
    for name in ("spike", "early", "nan", "calm"):
        lines = ["step,loss,grad_norm,lr,loss_scale"]
        for i in range(500):
            loss = f"{2 + 0.01 * draw.standard_normal():.5f}"
            if name == "nan" and i >= 120:
                loss = "nan"
            if name == "spike" and (i == 100 or i == 400):
                loss = "9.0"
            if name == "calm" and i % 3:
                loss = ""
            lines.append(f"{10 * i},{loss},1.0,,")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_traces_are_scored_by_the_published_rule(tmp_path: Path) -> None:
    traces = load_traces(trace_folder(tmp_path))
    assert [(e.trace, e.onset, e.first, e.last) for e in traces.events] == [
        ("spike", 100, 90, 160),  # 10 points after the blow-up at 150
        ("spike", 400, 390, 430),
        ("nan", 120, 110, 150),
    ]
    assert traces.healthy_points == 500
    assert np.isnan(traces.streams.values["loss"][2, 120:]).all()
    assert traces.streams.present("loss")[3].sum() == 167 and not traces.streams.present("lr").any()
    alarms = np.zeros(traces.streams.steps.shape, dtype=bool)
    alarms[0, [89, 160, 431]] = alarms[2, 110] = True
    alarms[3, [10, 40, 80, 200]] = True
    score = score_traces(traces, alarms)
    assert (score.hits, score.events, score.missed) == (2, 3, ("spike@400",))
    assert score.recall == pytest.approx(2 / 3) and score.by_source == pytest.approx(0.75)
    assert score.without_largest_source == 1.0
    assert score.false_alarms == 2 and score.false_per_10k == pytest.approx(40.0)
    found = score_traces(traces, flags("B6", traces.streams))
    assert found.hits == 3


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda f: (f / "index.csv").unlink(), "index.csv"),
        (lambda f: (f / "index.csv").write_text("a,b\n1,2\n"), "needs the columns"),
        (lambda f: (f / "nan.csv").unlink(), "nan.csv"),
        (lambda f: (f / "nan.csv").write_text("step,loss\n1,two\n"), "two"),
        (lambda f: (f / "nan.csv").write_text("step,loss\n1,\n"), "holds no values"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(spoil, complaint: str, tmp_path: Path) -> None:
    folder = trace_folder(tmp_path)
    spoil(folder)
    with pytest.raises(ConfigError, match=complaint):
        load_traces(folder)


# -- the command ------------------------------------------------------------------------------------------------------


def test_only_traces_as_json_without_torch(tmp_path: Path) -> None:
    folder = trace_folder(tmp_path)
    script = (
        "import sys\n"
        "from resilient.cli.main import main\n"
        f"code = main(['bench', 'detection', '--only-traces', '--traces', {str(folder)!r}, '--format', 'json', '--workers', '1'])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, env=environment(), cwd=tmp_path
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert set(found["traces"]["detectors"]) == {*NAMED, OURS}
    assert [set(check) for check in found["checks"]] == [{"name", "value", "bound", "ok"}] * 3
    assert done.returncode == (0 if all(check["ok"] for check in found["checks"]) else 1)


def test_wrong_words_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "detction"]) == 64
    assert "did you mean detection" in capsys.readouterr().err
    assert main(["bench"]) == 64
    assert main(["bench", "detection", "--only-traces"]) == 64
    assert main(["bench", "detection", "--only-traces", "--ours", "--traces", str(tmp_path)]) == 64
    assert "index.csv" in capsys.readouterr().err


def test_our_monitors_see_the_runs_step_by_step() -> None:
    """Positions, not step numbers; a point without any value is not observed; processes change nothing."""
    given = nonfinite(rng(), "gauss", 2, before=60)
    gone = np.zeros(given.steps.shape, dtype=bool)
    gone[1, 60] = True
    given.missing = {name: gone for name in ("loss", "grad_norm", "lr")}
    found = judge(given)
    assert found.flagged[0, 60] and not found.flagged[1, 60]
    heard = [alarm for alarm in found.alarms if alarm.statistic == "nonfinite"]
    assert [(alarm.run, alarm.at, alarm.severity) for alarm in heard] == [(0, 60, "act")]
    assert not found.matrix(lambda alarm: alarm.statistic != "nonfinite")[0, 60]
    assert judge(given, workers=2).alarms == found.alarms


@pytest.mark.slow
def test_the_whole_benchmark_in_small() -> None:
    settings = Settings(
        noises=("t3",), healthy=("t3",), rules=("B6", "B4"), healthy_runs=1, calibration_runs=1,
        events=("E1", "E2 BLOOM-176B", "E6"), event_runs=1, case_runs=1, both_targets=False,
    )  # fmt: skip
    found = run(settings)
    again = json.loads(json.dumps(found, allow_nan=False))
    assert set(again["events"]) == {OURS, "B6", "B4"}
    assert set(again["events"]["B6"]["as shipped"]) == {
        "E1/t3", "E1 without logits/t3", "E2 BLOOM-176B", "E6",
    }  # fmt: skip
    assert again["availability"]["B6"]["wrong_after_nan"] == 128.0
    assert {"none"} <= set(again["ablation"])
    assert all(check["ok"] in (True, False) for check in again["checks"])
    assert "E2 BLOOM-176B" in text(again) and "Bounds" in text(again)
