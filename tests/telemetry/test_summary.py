"""summary.json: counters that add up (BR-44), across rollbacks, restarts and kills."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from resilient.telemetry.journal import read_journal, read_steps
from resilient.telemetry.listeners import RunRecorder
from resilient.telemetry.run_data import load_summary
from resilient.telemetry.run_directory import RunDirectory
from resilient.telemetry.summary import Summary
from tests.telemetry.stories import CONFIG, Story, eventful_run, quiet_run

KEYS = [
    "run_id",
    "status",
    "steps",
    "final_loss",
    "eval_loss",
    "attempts",
    "applied",
    "skipped",
    "retried",
    "rollbacks",
    "steps_lost",
    "incidents",
    "budget_left",
    "wall_s",
]


def test_br44_counters_add_up_over_every_kind_of_trouble(tmp_path: Path) -> None:
    path = eventful_run(tmp_path)
    summary = json.loads((path / "summary.json").read_text())
    assert list(summary)[: len(KEYS)] == KEYS
    lines = read_steps(path / "steps.jsonl")
    assert summary["attempts"] == len(lines) == summary["applied"] + summary["skipped"]
    assert summary["applied"] == sum(line["applied"] for line in lines) == summary["steps"] + summary["steps_lost"]
    # 24, NaN, 46, eight poisoned steps, three refusals, back to 45, one-rank spike at 74, killed at 88, resumed from 80
    assert (summary["steps"], summary["skipped"], summary["rollbacks"]) == (120, 5, 1)
    assert summary["steps_lost"] == (54 - 45) + (88 - 80)
    assert (summary["nonfinite_loss"], summary["nonfinite_grad"]) == (1, 1)
    assert (summary["status"], summary["generation"], summary["named_ranks"]) == ("done", 1, [0, 1])
    assert [i["action"] for i in summary["incidents"]] == ["skip", "skip", "skip", "rollback", "skip"]
    assert set(summary["incidents"][0]) == {"step", "cause", "ranks", "action", "onset_step"}
    assert summary["final_loss"] == pytest.approx(lines[-1]["loss"])
    assert (summary["engine"], summary["policy"]) == ("deepspeed", "default")


def test_br44_small_repro(tmp_path: Path) -> None:
    """NaN loss at steps 4 and 9: named at once, counted, and the sums hold."""
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        recorder = RunRecorder(run)
        story = Story([recorder])
        for until in (3, 8, 12):
            story.healthy(until)
            if until < 12:
                story.nan_on_rank(1, "loss")
                at = [r["step"] for r in read_journal(run.journal) if r["kind"] == "incident"]
                assert at[-1] == until + 1  # in the journal now, not at the next logging interval
        story.end()
        recorder.close()
    summary = json.loads((run.path / "summary.json").read_text())
    assert (summary["nonfinite_loss"], summary["skipped"], summary["applied"], summary["attempts"]) == (2, 2, 12, 14)


def test_files_alone_give_the_same_summary(tmp_path: Path) -> None:
    path = eventful_run(tmp_path)
    written = json.loads((path / "summary.json").read_text())
    rebuilt = Summary.replay(path).as_dict()
    assert rebuilt.pop("wall_s") == pytest.approx(written.pop("wall_s"), abs=0.5)
    assert rebuilt == written


def test_wall_time_is_the_sum_over_generations_without_the_gaps(tmp_path: Path) -> None:
    path = quiet_run(tmp_path, "job")
    journal, steps = path / "journal.jsonl", path / "steps.jsonl"
    for file in (journal, steps):  # make the first generation last 100 s, an hour ago
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        last = max(line["time"] for line in lines)
        for i, line in enumerate(lines):
            line["time"] = last - 3600 + 100 * i / (len(lines) - 1)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        recorder = RunRecorder(run)
        Story([recorder], step=120, attempt=120, total=130).healthy(125)
        recorder.event("end", {"status": "done"})
        recorder.close()
    summary = json.loads((run.path / "summary.json").read_text())
    assert 100 <= summary["wall_s"] < 130
    assert summary["steps"] == 125


def test_killed_before_its_end_is_failed_and_still_counted(tmp_path: Path) -> None:
    run = RunDirectory.open(tmp_path, "job", CONFIG)
    recorder = RunRecorder(run)
    Story([recorder]).healthy(7)
    assert load_summary(run.path)["status"] == "running"
    run.close()  # what the kernel does for a killed process
    assert not (run.path / "summary.json").exists()
    summary = load_summary(run.path)
    assert (summary["status"], summary["steps"], summary["attempts"]) == ("failed", 7, 7)


def test_close_without_end_says_failed(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        recorder = RunRecorder(run)
        Story([recorder]).healthy(3)
        recorder.close()
        recorder.close()
    assert json.loads((run.path / "summary.json").read_text())["status"] == "failed"


def test_an_old_end_does_not_speak_for_a_new_generation(tmp_path: Path) -> None:
    path = quiet_run(tmp_path, "job")
    run = RunDirectory.open(tmp_path, "job", CONFIG)
    recorder = RunRecorder(run)
    story = Story([recorder], step=120, attempt=120, total=200)
    story.event("start", engine="ddp")
    story.event("resume", step=120)
    story.healthy(130)
    run.close()
    assert load_summary(path)["status"] == "failed"
    assert load_summary(path)["steps"] == 130


def test_an_unguarded_run_is_counted_from_the_coordinator_counters(tmp_path: Path) -> None:
    """policy=off, or a guard that broke on the way: no steps are reported, the end tells the counters."""
    counters = {"attempts": 51, "applied": 48, "skipped": 2, "retried": 1, "rollbacks": 1, "steps_lost": 8}
    counters |= {"nonfinite_loss": 3, "nonfinite_grad": 4}
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        recorder = RunRecorder(run)
        Story([recorder]).healthy(10)
        recorder.event("guard_failed", {"message": "exchange timed out"})
        recorder.event("evaluation", {"step": 40, "loss": 2.5})
        recorder.event("end", {"status": "done", "counters": counters, "eval_loss": 2.5})
        recorder.close()
    summary = json.loads((run.path / "summary.json").read_text())
    assert {key: summary[key] for key in counters} == counters
    assert (summary["steps"], summary["final_loss"], summary["eval_loss"]) == (40, None, 2.5)
    rebuilt = Summary.replay(run.path).as_dict()
    assert {key: rebuilt[key] for key in counters} == counters


def test_non_finite_values_are_null(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        recorder = RunRecorder(run)
        story = Story([recorder])
        story.attempt_step(loss=math.nan)  # an unguarded run that trained on it
        story.end(eval_loss=math.inf)
        recorder.close()
    text = (run.path / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert (summary["final_loss"], summary["eval_loss"], summary["nonfinite_loss"]) == (None, None, 1)


def test_order_of_step_and_incident_does_not_matter() -> None:
    """The coordinator may report the refused attempt before or after the rollback it led to."""
    from resilient.coordinator.events import Incident, StepReport

    def step(n: int, attempt: int, action: str) -> StepReport:
        return StepReport(n, attempt, action == "apply", action, 2.0, 1.0, 1e-3, 1.0, 8.0, 0.1)  # type: ignore[arg-type]

    back = Incident(step=9, attempt=9, cause="data", ranks=(), action="rollback", onset_step=7, target_step=5)
    totals = []
    for order in ("step first", "incident first"):
        summary = Summary("job")
        for n in range(1, 9):
            summary.step(step(n, n, "apply"))
        if order == "step first":
            summary.step(step(9, 9, "rollback"))
            summary.incident(back)
        else:
            summary.incident(back)
            summary.step(step(9, 9, "rollback"))
        assert summary.steps == 5
        for n in range(6, 11):
            summary.step(step(n, n + 4, "apply"))
        totals.append((summary.steps, summary.steps_lost, summary.attempts, summary.applied, summary.rollbacks))
    assert totals == [(10, 3, 14, 13, 1)] * 2
