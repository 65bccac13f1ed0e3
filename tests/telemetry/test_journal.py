"""steps.jsonl and journal.jsonl: strict lines, torn lines, full disks (DESIGN 8)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.coordinator.events import Incident, StepReport
from resilient.errors import GuardError
from resilient.telemetry.files import TelemetryError
from resilient.telemetry.journal import STEP_FIELDS, JsonlWriter, read_journal, read_steps, step_record
from resilient.telemetry.listeners import RunRecorder
from resilient.telemetry.run_directory import RunDirectory
from tests.telemetry.stories import CONFIG


def report(step: int = 1, loss: float = 2.0, **fields: object) -> StepReport:
    return StepReport(
        step=step,
        attempt=step,
        applied=True,
        action="apply",
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        loss_scale=1.0,
        tokens=128.0,
        time_s=0.1,
        **fields,  # type: ignore[arg-type]
    )


def test_nan_and_inf_become_null_and_are_named(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "steps.jsonl")
    ranks = {"local_grad_norm": {"median": 1.0, "spread": math.inf, "outliers": {1: math.nan}}}
    writer.write(step_record(report(loss=math.nan, signals={"logit_max": -math.inf}, ranks=ranks)))
    writer.close()
    text = (tmp_path / "steps.jsonl").read_text()
    assert not any(word in text for word in ("NaN", "Infinity"))
    (line,) = read_steps(tmp_path / "steps.jsonl")
    assert line["loss"] is None
    assert line["ranks"]["local_grad_norm"] == {"median": 1.0, "spread": None, "outliers": {"1": None}}
    assert line["nonfinite"] == [
        "loss",
        "logit_max",
        "ranks.local_grad_norm.spread",
        "ranks.local_grad_norm.outliers.1",
    ]


def test_line_schema_and_signals_that_share_a_name(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        recorder = RunRecorder(run)
        recorder.step(report(signals={"logit_max": 3.0, "loss": 9.0}, level="A", position=4, budget_left=7))
        recorder.close()
    (line,) = read_steps(run.steps)
    assert set(STEP_FIELDS) <= set(line)
    assert (line["loss"], line["signal.loss"], line["logit_max"]) == (2.0, 9.0, 3.0)
    assert (line["level"], line["position"], line["budget_left"], line["generation"]) == ("A", 4, 7, 0)
    assert "ranks" not in line
    assert "nonfinite" not in line


def test_torn_last_line_is_stepped_over_and_never_glued_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = JsonlWriter(path)
    first.write({"kind": "start"})
    first.close()
    before = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"kind": "incident", "step": 1')  # a kill in the middle of a write
    assert [r["kind"] for r in read_journal(path)] == ["start"]
    again = JsonlWriter(path)
    again.write({"kind": "resume"})
    again.close()
    assert [r["kind"] for r in read_journal(path)] == ["start", "resume"]
    assert path.read_bytes().startswith(before)  # files only grow


def test_missing_file_reads_as_empty(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "none") == []
    assert read_journal(tmp_path / "none") == []


def test_every_line_is_visible_at_once(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "j")
    for i in range(3):
        writer.write({"kind": "event", "i": i})
        assert [r["i"] for r in read_journal(tmp_path / "j")] == list(range(i + 1))
    writer.close()
    with pytest.raises(TelemetryError, match="closed"):
        writer.write({"kind": "late"})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_surfaces_as_telemetry_error() -> None:
    writer = JsonlWriter(Path("/dev/full"))
    with pytest.raises(TelemetryError, match="No space left on device"):
        writer.write({"kind": "start"})
    writer.close()
    assert issubclass(TelemetryError, GuardError)


_FILLS_UP = """
import resource, signal, sys
from pathlib import Path
from resilient.telemetry.files import TelemetryError
from resilient.telemetry.journal import JsonlWriter, read_journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
writer = JsonlWriter(path)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
written = 0
try:
    while True:
        writer.write({"kind": "event", "i": written, "pad": "x" * 40})
        written += 1
except TelemetryError as error:
    print(type(error).__name__, written)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
writer.write({"kind": "after", "i": -1})
print([r["i"] for r in read_journal(path)] == [*range(written), -1])
"""


@pytest.mark.timeout(60)
def test_a_write_cut_short_by_a_full_disk_costs_one_line_only(tmp_path: Path) -> None:
    """A real partial write: the kernel takes part of the line (file size limit), then refuses. Later lines are whole."""
    done = subprocess.run(
        [sys.executable, "-c", _FILLS_UP, str(tmp_path / "j")], capture_output=True, text=True, timeout=40, check=True
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("TelemetryError ")
    assert int(first.split()[1]) > 5
    assert second == "True"
    assert (tmp_path / "j").read_text().count("\n") == int(first.split()[1]) + 2  # whole lines, the torn one, the last


def test_recorder_on_a_full_disk_raises_and_still_closes(tmp_path: Path) -> None:
    run = RunDirectory.open(tmp_path, "job", CONFIG)
    run.steps.symlink_to("/dev/full")
    recorder = RunRecorder(run)
    with pytest.raises(TelemetryError, match="No space left"):
        recorder.step(report())
    recorder.close()
    run.close()


def test_incident_folders_are_never_overwritten(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        recorder = RunRecorder(run)
        for attempt in (5, 6):
            recorder.incident(
                Incident(
                    step=5,
                    attempt=attempt,
                    cause="data",
                    ranks=(1,),
                    action="skip",
                    onset_step=5,
                    knobs={"lr": math.nan},
                )
            )
        recorder.close()
    first = json.loads((run.incidents / "5-data" / "incident.json").read_text())
    second = json.loads((run.incidents / "5-data-2" / "incident.json").read_text())
    assert (first["attempt"], second["attempt"]) == (5, 6)
    assert first["knobs"] == {"lr": None}


def test_start_event_keeps_the_changed_overrides(tmp_path: Path) -> None:
    """BR-63: a resumed run's journal says what was asked for and not followed."""
    RunDirectory.open(tmp_path, "job", CONFIG).close()
    changed = {**CONFIG, "optim": {**CONFIG["optim"], "lr": 1e-2}}
    with RunDirectory.open(tmp_path, "job", changed) as run:
        recorder = RunRecorder(run)
        recorder.event("start", {"engine": "ddp", "generation": 1, "kind": "own", "time": 0})
        recorder.close()
    (line,) = read_journal(run.journal)
    assert line["kept_from_first_start"] == {"optim.lr": [3e-4, 1e-2]}
    assert (line["kind"], line["event.kind"], line["event.time"], line["generation"]) == ("start", "own", 0, 1)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        names = sorted(p.name for p in run.path.rglob("*"))
        recorder = RunRecorder(RunDirectory.attach(run.path))
        recorder.step(report())
        recorder.event("end", {"status": "done"})
        recorder.close()
        assert sorted(p.name for p in run.path.rglob("*")) == names
