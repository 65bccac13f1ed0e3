"""The benchmark of going back runs in every kind of engine, kills and restarts a real job, and fails when a bound is missed
(C3, C5)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilient.bench.rollback import checks, conf_name, main, text
from resilient.bench.rollback_relaunch import _lines, _process_of
from resilient.cli.bench import BENCHES


def row(lowest: float) -> dict[str, float]:
    return {"lowest_ms": lowest, "median_ms": 2 * lowest, "cpu_ms": lowest}


def found(memory: float, relaunch_s: float | None = 10.0) -> dict[str, Any]:
    again = {"next_step_s": relaunch_s, "regained_s": 11.0}
    return {
        "settings": {"engine": "fsdp2", "model": "gpt_3m", "rounds": 8},
        **{"world": 2, "bytes": 20_000_000},
        "ways": {"copy": row(8.0), "memory": row(memory), "dcp.load": row(90.0)},
    } | ({"relaunch": again} if relaunch_s is not None else {})


@pytest.mark.parametrize(("memory", "relaunch_s", "missed"), [(20.0, 10.0, []), (20.0, 0.9, [1]), (25.0, 1.2, [0, 1])])
def test_bounds_missed_are_said(memory: float, relaunch_s: float, missed: list[int]):
    held = checks([found(memory, relaunch_s)])
    assert [check.bound for check in held] == [3.0, 50.0]
    assert [i for i, check in enumerate(held) if not check.ok] == missed
    written = text([found(memory, relaunch_s)], held)
    assert written.count("MISS") == len(missed) and f"{relaunch_s:.1f} s to the next step" in written
    assert len(checks([found(memory, None)])) == 1, "nothing is said of a new start that was not made"


def test_the_exit_code_is_that_of_the_bounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("resilient.bench.rollback.relaunch", lambda *job: {"next_step_s": 9.0, "regained_s": 9.5})
    for memory, code in ((20.0, 0), (30.0, 1)):
        one = found(memory, None)
        monkeypatch.setattr("resilient.bench.checkpoint.launch", lambda module, settings, nproc, one=one: dict(one))
        assert main(["--models", "gpt_3m", "--engines", "zero2", "--format", "json"]) == code
        assert len(json.loads(capsys.readouterr().out)["checks"]) == 2
    assert main(["--models", "gpt_3m", "--engines", "zero2", "--no-relaunch", "--format", "json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["checks"]) == 1
    monkeypatch.setattr("resilient.bench.checkpoint.launch", lambda module, settings, nproc: 9)
    assert main([]) == 9
    assert main(["--out", "no/such/folder.json"]) == 64


def test_the_killed_process_is_the_rank_itself():
    """A rank's children inherit its environment: the one that was started first is the rank."""
    code = "import subprocess, sys; p = subprocess.Popen(['cat']); print(p.pid, flush=True); sys.stdin.read()"
    env = {**os.environ, "RESILIENT_RUN_ID": "of-this-test", "RANK": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None and rank.stdin is not None
        child = int(rank.stdout.readline())
        try:
            assert _process_of("of-this-test", 1) == rank.pid != child
            with pytest.raises(RuntimeError, match="no process of rank 0"):
                _process_of("of-this-test", 0)
        finally:
            rank.kill()


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path):
    path = tmp_path / "steps.jsonl"
    assert list(_lines(path)) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [line["step"] for line in _lines(path)] == [1, 2]


def test_engines_have_their_names_in_conf():
    conf = Path(__file__).parents[2] / "conf" / "engine"
    assert all((conf / f"{conf_name(engine)}.yaml").exists() for engine in ("ddp", "fsdp2", "zero0", "zero3"))
    assert {"checkpoint", "rollback"} <= set(BENCHES)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_a_quick_run(engine: str, tmp_path: Path):
    """Every restore in it is proven; the new start is one by `resilient launch`, under DDP alone to save time."""
    out = tmp_path / "found.json"
    words = ["--quick", "--engines", engine, "--format", "json", "--out", str(out)]
    assert main(words + ([] if engine == "ddp" else ["--no-relaunch"])) == 0
    one = json.loads(out.read_text())["found"][0]
    native = "load_checkpoint" if engine == "zero3" else "dcp.load"
    assert set(one["ways"]) == {"copy", "memory", "peer, own", "peer, fetched", "disk", native}
    assert all(r["lowest_ms"] > 0 for r in one["ways"].values())
    if engine == "ddp":
        assert 0 < one["relaunch"]["next_step_s"] <= one["relaunch"]["regained_s"]
