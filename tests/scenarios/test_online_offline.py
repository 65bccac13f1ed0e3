"""Online and offline are the same code: the alarms of a live run, rollbacks and all, equal those of `analyze` on its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resilient.checkpoint.config import SnapshotConfig
from resilient.logs.analysis import analyze
from resilient.logs.open import open_log
from resilient.telemetry.journal import read_journal
from resilient.train.model import ModelConfig
from resilient.train.optim import OptimConfig
from tests.ranks import run_pooled
from tests.scenarios.harness import Job, Outcome, run_job

FAULTS: dict[str, dict[str, Any]] = {
    "rollback": {"kind": "poisoned_window", "step": 35, "window": 8},
    "nan": {"kind": "nan", "place": "loss", "step": 45, "rank": 1},
}


def guarded(rank: int, world: int, fault: dict[str, Any], folder: str) -> Outcome:
    job = Job(
        steps=60,
        schedule=60,
        model=ModelConfig(name="tiny", width=32, layers=2, heads=2, hidden=64, dropout=0.1, probe_every=0),
        optim=OptimConfig(lr=1e-2, warmup_steps=5),
        seq_len=32,
        micro_batch=8,
        snapshot=SnapshotConfig(every=5, keep=4),
        fault=fault,
    )
    return run_job(job.with_(run_dir=folder), rank, world)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FAULTS)
def test_a_live_run_and_its_files_raise_the_same_alarms(name: str, tmp_path: Path):
    folder = tmp_path / name
    outcome = run_pooled(guarded, 2, FAULTS[name], str(folder))[0]
    live = [
        record for record in read_journal(folder / "journal.jsonl") if record["kind"] == "alarm" and not record["ranks"]
    ]
    offline = analyze(open_log(folder)).alarms
    keys = ("step", "severity", "signal", "statistic", "onset_step", "onset_confidence")
    said = [tuple(record[key] for key in keys) for record in live]
    if name == "nan":  # the live run knows the rank
        said = [
            tuple(r[key] for key in keys)
            for r in read_journal(folder / "journal.jsonl")
            if r["kind"] == "alarm" and r["statistic"] != "ranks"
        ]
    assert said == [tuple(getattr(alarm, key) for key in keys) for alarm in offline]
    assert said and (name != "rollback" or outcome.counters["rollbacks"] >= 1)
    if name == "rollback":
        assert [record["score"] for record in live] == [alarm.score for alarm in offline]
