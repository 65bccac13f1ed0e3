"""`resilient compare`: every run of a sweep in one table, none dropped."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from resilient.cli.compare import main
from resilient.telemetry.listeners import RunRecorder
from resilient.telemetry.run_directory import RunDirectory
from tests.telemetry.stories import CONFIG, Story, eventful_run, quiet_run


def variant(policy: str, lr: float) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    config["policy"]["name"] = policy
    config["optim"]["lr"] = lr
    return config


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four jobs of a sweep in their own folders: two finished, one that stopped, one that was killed."""
    root = tmp_path_factory.mktemp("sweep")
    eventful_run(root / "0", "guarded", variant("default", 3e-4))
    quiet_run(root / "1", "undisturbed", variant("observe", 3e-4))
    with RunDirectory.open(root / "2", "stopped", variant("default", 1e-2)) as run:
        recorder = RunRecorder(run)
        story = Story([recorder])
        story.healthy(20)
        story.nan_on_rank(0)
        story.end("stopped", eval_loss=None)
        recorder.close()
    killed = RunDirectory.open(root / "3", "killed", variant("off", 1e-2))
    Story([RunRecorder(killed)]).healthy(5)
    killed.close()
    return root


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_whole_sweep_sorted_with_failures_shown(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(capsys, str(sweep))
    assert [(r["run"], r["status"]) for r in found["runs"]] == [
        ("undisturbed", "done"),
        ("guarded", "done"),
        ("stopped", "stopped"),
        ("killed", "failed"),
    ]
    assert found["differing_keys"] == ["optim.lr", "policy.name"]  # and not run.id, which names the run
    guarded = found["runs"][1]
    assert guarded["settings"] == {"optim.lr": 3e-4, "policy.name": "default"}
    assert (
        guarded["steps"],
        guarded["steps_lost"],
        guarded["skipped"],
        guarded["rollbacks"],
        guarded["incidents"],
    ) == (
        120,
        17,
        5,
        1,
        5,
    )
    assert found["runs"][3]["steps"] == 5
    assert all(r["gap"] is None for r in found["runs"])


def test_baseline_gap_and_missing_paths(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = sweep / "1" / "undisturbed"
    found = compare(capsys, str(sweep / "0"), str(sweep / "9"), "--baseline", str(baseline))
    assert found["baseline"] == "undisturbed"
    rows = {r["run"]: r for r in found["runs"]}
    assert rows["guarded"]["gap"] == pytest.approx(0.02)
    assert rows["undisturbed"]["gap"] == 0.0
    assert rows["9"]["status"] == "missing"
    assert rows["9"]["steps"] is None


def test_a_run_named_twice_is_one_row(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(capsys, str(sweep), str(sweep / "0" / "guarded"), str(sweep / "0"))
    assert len(found["runs"]) == 4


def test_text_table_and_page(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "compare.html"
    assert main([str(sweep), "--baseline", str(sweep / "1" / "undisturbed"), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if "guarded" in line]
    assert len(lines) == 1
    assert all(cell in lines[0] for cell in ("0.0003", "default", "done", "120", "2.19", "+0.0200", "17"))
    assert "\x1b" not in text
    html = page.read_text()
    assert html.count("<svg") == 1
    assert "http" not in html
    assert all(name in html for name in ("guarded", "undisturbed", "stopped", "killed"))


def test_out_takes_the_table_from_stdout(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    assert main([str(sweep), "--format", "json", "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert len(json.loads(out.read_text())["runs"]) == 4


def test_a_job_that_died_before_its_run_directory_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep's jobs/<num>/result.json is all that is left of it."""
    quiet_run(tmp_path, "0-optim.lr=0.001")
    for number, name in ((0, "0-optim.lr=0.001"), (1, "1-optim.lr=9")):
        folder = tmp_path / "jobs" / str(number)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"number": number, "run_directory": str(tmp_path / name)}))
    found = compare(capsys, str(tmp_path))
    assert [(r["run"], r["status"]) for r in found["runs"]] == [
        ("0-optim.lr=0.001", "done"),
        ("1-optim.lr=9", "missing"),
    ]


def test_settings_that_follow_from_a_name_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults: list[dict[str, Any]] = [
        {"name": "nan", "kind": "nan", "step": 5, "place": "forward"},
        {"name": "nan", "kind": "nan", "step": 9, "place": "forward"},
        {"name": "spike", "kind": "rank_grad_spike", "step": 5, "factor": 1000.0},
    ]
    for number, fault in enumerate(faults):
        with RunDirectory.open(tmp_path, str(number), {**CONFIG, "fault": fault}) as run:
            RunRecorder(run).close()
    found = compare(capsys, str(tmp_path))
    assert found["differing_keys"] == ["fault.name", "fault.kind", "fault.step", "fault.place", "fault.factor"]
    assert found["shown_keys"] == ["fault.name", "fault.step"]


def test_many_settings_are_named_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (0, 1):
        optim = {f"knob_{i}": number for i in range(9)}
        with RunDirectory.open(tmp_path, str(number), {**CONFIG, "optim": optim}) as run:
            RunRecorder(run).close()
    assert main([str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "also different: optim.knob_6, optim.knob_7, optim.knob_8" in text


def test_a_damaged_run_is_shown_not_dropped(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = quiet_run(tmp_path, "damaged")
    (path / "summary.json").write_text("{")
    (path / "config.yaml").write_text("[")
    found = compare(capsys, str(tmp_path), str(sweep / "0"))
    row = next(r for r in found["runs"] if r["run"] == "damaged")
    assert (row["status"], row["steps"], row["settings"]) == ("done", 120, {})


def test_nothing_readable_is_64(tmp_path: Path, sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "none")]) == 64
    assert "no run directory" in capsys.readouterr().err
    assert main([str(sweep), "--baseline", str(tmp_path)]) == 64
