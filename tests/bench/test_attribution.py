"""The attribution benchmark: what counts as right, as false and as seen, and that its counters can count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resilient.bench.attribution import clean
from resilient.bench.attribution.clean import judge_clean
from resilient.bench.attribution.live import NONFINITE, RECORDED
from resilient.bench.attribution.local_rules import LocalChecks, SkipStep, heard_by_peers
from resilient.bench.attribution.peers import detected_by_peers
from resilient.bench.attribution.run import Kept, chosen, main
from resilient.bench.attribution.score import score, total
from resilient.bench.simulated import SimulatedRun
from resilient.signals.record import INDEX

TRUTH = {"kind": "rank_grad_spike", "cause": "compute", "ranks": [1], "step": 40}


def told(
    step: int = 40, cause: str = "compute", ranks: tuple[int, ...] = (1,), severity: str = "act"
) -> dict[str, Any]:
    return {"step": step, "cause": cause, "ranks": list(ranks), "severity": severity}


def run(*verdicts: dict[str, Any], truth: dict[str, Any] | None = TRUTH, **more: Any) -> dict[str, Any]:
    fixed = {"scenario": "s", "engine": "ddp", "world": 2, "seed": 0, "steps": 56, "excluded": [], "ended": ""}
    return {**fixed, "truth": truth, "told": list(verdicts), **more}


def test_a_verdict_is_right_by_rank_and_by_cause_separately():
    cases = {
        (True, True): told(),
        (False, True): told(ranks=(0,)),
        (True, False): told(cause="data"),
        (False, False): told(cause="unknown", ranks=(0, 1)),
    }
    for (rank, cause), verdict in cases.items():
        found = score(run(verdict))
        assert (found.detected, found.ranks, found.causes) == (1, rank, cause)
    assert score(run(told(cause="unknown"))).abstained == 1
    assert score(run()).detected == 0


def test_the_first_verdict_that_refuses_decides_and_the_delay_is_that_of_the_first_told():
    found = score(run(told(41, "data", (), "warn"), told(43)))
    assert (found.delays, found.causes, found.confusion) == ([1], 1, {"compute": 1})


def test_what_is_told_before_the_fault_or_in_a_clean_run_is_false_if_it_accuses():
    assert score(run(told(12), told(13, "data"), told())).false == 1
    assert score(run(told(12, "communication"), truth=None)).false == 1
    both = total([score(run(told(12))), score(run(truth=None))])
    assert (both.runs, both.false, both.clean_steps) == (2, 1, 39 + 56)


def test_data_left_out_for_a_machine_counts_against_and_a_pair_is_enough_where_two_look_alike():
    assert score(run(told(), excluded=[[3, 5]])).excluded == 1
    pair = {**TRUTH, "kind": "replica_drift"}
    assert score(run(told(ranks=(0, 1)), truth=pair)).ranks == 1
    assert score(run(told(ranks=(0, 1)))).ranks == 0
    assert score(run(told(ranks=()), truth={**TRUTH, "ranks": []})).ranks == 1
    link = {
        **TRUTH,
        "kind": "slow_link",
        "cause": "communication",
    }  # of two ranks both are its ends; of four, two are not
    assert [score(run(told(ranks=(0, 1)), truth=link, world=w)).ranks for w in (2, 4)] == [1, 0]


def test_every_engine_has_clean_controls_and_a_fault_of_each_cause():
    for engine in ("ddp", "zero3"):
        kinds = {s.fault["kind"] for s in chosen(engine, 2, "")}
        assert {"none", "rank_grad_spike", "bad_reduction", "bad_sample", "lr_overshoot"} <= kinds


class Spiked(SimulatedRun):
    """The control: rank 1 of a healthy run has a spike."""

    def table(self, step: int):  # type: ignore[no-untyped-def]
        table = super().table(step)
        if step == 150:
            table.rows[1, INDEX["local_grad_norm"]] *= 1000.0
        return table


class HeavyBatch(Spiked):
    """The same from a batch, which gives it on every machine."""

    def table(self, step: int):  # type: ignore[no-untyped-def]
        table = super().table(step)
        self.norms = table.rows[:, INDEX["local_grad_norm"]].copy()
        return table


@pytest.mark.parametrize("world", [2, 8])
def test_simulated_ranks_are_not_accused_and_the_counter_can_count(world: int, monkeypatch: pytest.MonkeyPatch):
    assert judge_clean(world, "normal", 200).accusing == 0
    monkeypatch.setattr(clean, "SimulatedRun", Spiked)
    assert judge_clean(world, "normal", 200).accusing >= 1
    monkeypatch.setattr(clean, "SimulatedRun", HeavyBatch)
    found = judge_clean(world, "normal", 200)
    assert found.suspected == 1 and found.accusing == 0 and found.refused == {"data": 1}


def test_public_rules_are_armed_before_the_fault_and_see_a_spike():
    rng = np.random.default_rng(0)
    series = [[s, 2.0 + 0.01 * rng.standard_normal(), 1.0 + 0.01 * rng.standard_normal()] for s in range(1, 57)]
    spiked = [[s, loss, norm * 1000 if s == 40 else norm] for s, loss, norm in series]
    rows = {row[0].split()[0]: row for row in detected_by_peers([run(series=spiked), run(series=series, truth=None)])}
    assert rows["B6"][1] == "1/1" and rows["B0"][1] == "0/1"


def recorded(world: int = 2, at: int = 40, **changes: tuple[int, float]) -> dict[str, Any]:
    """A run's tables: one value of one rank is multiplied in step `at`. A factor of NaN: a flag is set instead."""
    rng = np.random.default_rng(1)
    rows: dict[str, Any] = {"step": list(range(1, 57))}
    rows["grad_norm"] = (1.0 + 0.01 * rng.standard_normal(56)).tolist()
    for name in RECORDED:
        quiet = name in NONFINITE
        values = np.zeros((56, world)) if quiet else 2.0 + 0.01 * rng.standard_normal((56, world))
        if name in changes:
            rank, factor = changes[name]
            values[at - 1, rank] = 1.0 if quiet else values[at - 1, rank] * factor
            if name == "local_grad_norm":
                rows["grad_norm"][at - 1] *= factor
        rows[name] = values.tolist()
    return rows


@pytest.mark.parametrize(
    ("changes", "skipped", "named"),
    [
        ({"local_grad_norm": (1, 1000.0)}, 1, 1),
        ({"local_grad_norm": (1, 5.0)}, 1, 0),  # not ten times the largest of the first 100
        ({"local_grad_norm": (0, 1000.0)}, 1, 0),  # it names a rank, and that is another one
        ({"nonfinite_backward": (1, 1.0)}, 0, 1),
        ({}, 0, 0),
    ],
)
def test_peers_are_fed_with_the_same_tables(changes: dict[str, Any], skipped: int, named: int):
    runs = [run(rows=recorded(**changes)), run(rows=recorded(), truth=None)]
    heard = heard_by_peers(runs)["s"]
    assert (heard.runs, heard.skipped, heard.named) == (1, skipped, named)
    assert (heard.skipped_clean, heard.fired_clean, heard.clean) == (0, 0, 20 + 37)


def test_the_rules_of_peers_behave_as_theirs_do():
    """OLMo-core: silent for 64 values, a NaN skips and stays in the window. Megatron: the largest of 100 is kept for good."""
    rng = np.random.default_rng(0)
    skip = SkipStep()
    said = [skip.skips(9.0 if i == 40 else 2.0 + 0.01 * rng.standard_normal(), 1.0) for i in range(63)]
    assert not any(said)
    skip = SkipStep()
    values = 2.0 + 0.01 * rng.standard_normal(400)
    values[[150, 200]] = 9.0, np.nan
    said = [skip.skips(v, 1.0) for v in values.tolist()]
    assert np.flatnonzero(said).tolist() == [150, *range(200, 329)]
    checks = LocalChecks()
    assert not any(checks.fires(2.0, 1.0) for _ in range(99)) and not checks.fires(2.0, 1.0)
    assert [checks.fires(2.0, n) for n in (9.9, 10.0, 11.0, float("nan"))] == [False, True, True, True]


def test_what_was_interrupted_goes_on_and_a_line_that_was_cut_off_is_dropped(tmp_path: Path):
    path = tmp_path / "found.json.runs.jsonl"
    kept = Kept(path)
    kept.add(run(seed=0))
    kept.add(run(seed=1))
    with path.open("a") as file:
        file.write('{"scenario": "s", "engi')
    again = Kept(path, resume=True)
    assert [r["seed"] for r in again.runs] == [0, 1]
    assert again.has("ddp", 2, "s", 1) and not again.has("ddp", 2, "s", 2) and not again.has("ddp", 4, "s", 1)
    again.add(run(seed=2))
    assert [r["seed"] for r in Kept(path, resume=True).runs] == [0, 1, 2]
    assert Kept(path).runs == [] and path.read_text() == ""
    assert main(["--resume"]) == 64


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_one_scenario_from_the_command_line(tmp_path: Path):
    words = ["--engines", "zero1", "--worlds", "2", "--seeds", "1", "--only", "spike x1000", "--simulated", "0"]
    assert main([*words, "--format", "json", "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    (one,) = found["runs"]
    assert one["told"][0]["cause"] == "compute" and one["told"][0]["ranks"] == [1]
    assert all(check["ok"] for check in found["checks"])
    resumed = [*words, "--resume", "--format", "text", "--out", str(tmp_path / "found.json")]
    assert main(resumed) == 0  # nothing is left to run
    assert "spike x1000" in (tmp_path / "found.json").read_text()
    assert main(["--out", str(tmp_path / "no" / "folder.json")]) == 64
