"""The benchmark of saving runs in every kind of engine, says what it measured, and fails when a bound is missed (C3)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient.bench.checkpoint import arguments, cells, checks, main, text
from resilient.bench.checkpoint_job import Settings, Spent, bytes_below, copier, summary
from resilient.bench.ranks import ENGINES


def row(lowest: float) -> dict[str, float]:
    return {"lowest_ms": lowest, "median_ms": 2 * lowest, "cpu_ms": lowest}


def found(save: float) -> dict[str, Any]:
    return {
        "settings": {"engine": "zero2", "model": "gpt_3m", "rounds": 8},
        **{"world": 2, "bytes": 38_400_000, "native": "save_checkpoint"},
        "ways": {"copy": row(8.0), "save": row(save), "save_checkpoint": row(40.0)},
        "written": {"save_checkpoint": 51_200_000, "save": 78_000_000},
        "following": {"steps": 6, "without_ms": 600.0, "extra_ms": 30.0, "cpu_without_ms": 590.0, "extra_cpu_ms": 12.0},
    }


@pytest.mark.parametrize(("save", "missed"), [(10.0, []), (11.0, [1]), (13.0, [0, 1])])
def test_bounds_missed_are_said(save: float, missed: list[int]):
    held = checks([found(save)])
    assert [check.bound for check in held] == [1.5, 0.25]
    assert [i for i, check in enumerate(held) if not check.ok] == missed
    written = text([found(save)], held)
    assert written.count("MISS") == len(missed) and "38.4 MB a rank" in written and "6 steps of 100 ms" in written


def test_the_lowest_round_is_the_one_that_was_disturbed_least():
    assert summary([Spent(0.004, 0.001), Spent(0.002, 0.003), Spent(0.009, 0.002)]) == {
        "lowest_ms": pytest.approx(2.0),
        "median_ms": pytest.approx(4.0),
        "cpu_ms": pytest.approx(2.0),
    }


def test_the_plain_copy_copies_everything():
    live = [torch.arange(5.0), torch.ones(2, 3, requires_grad=True), torch.tensor(7)]
    kept = [torch.zeros_like(tensor) for tensor in live]
    copier(kept, live)()
    assert all(torch.equal(a, b) for a, b in zip(kept, live, strict=True))


def test_bytes_are_those_of_all_files_below(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(bytes(3))
    (tmp_path / "a" / "b" / "two").write_bytes(bytes(4))
    assert bytes_below(tmp_path) == 7


def test_the_exit_code_is_that_of_the_bounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    asked: list[Settings] = []

    def launched(save: float) -> Callable[[str, Settings, int], dict[str, Any]]:
        return lambda module, settings, nproc: asked.append(settings) or found(save)

    for save, code in ((9.0, 0), (19.0, 1)):
        monkeypatch.setattr("resilient.bench.checkpoint.launch", launched(save))
        assert main(["--models", "gpt_3m", "--seed", "5", "--format", "json"]) == code
        told = json.loads(capsys.readouterr().out)
        assert [check["ok"] for check in told["checks"][:2]] == [not code, not code]
    assert [settings.engine for settings in asked[:6]] == list(ENGINES) and {settings.seed for settings in asked} == {5}
    monkeypatch.setattr("resilient.bench.checkpoint.launch", lambda module, settings, nproc: 9)
    assert main([]) == 9
    assert main(["--out", "no/such/folder.json"]) == 64


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_a_quick_run(engine: str, tmp_path: Path):
    out = tmp_path / "found.json"
    assert main(["--quick", "--engines", engine, "--format", "json", "--out", str(out)]) == 0
    one = json.loads(out.read_text())["found"][0]
    own = {"save_checkpoint"} if engine == "zero3" else {"dcp.save", "dcp.async_save", "dcp.async_save, done"}
    ours = {"copy", "clone", "snapshot", "snapshot, new memory", "save", "save, committed", "save, blocking"}
    assert set(one["ways"]) == own | ours and all(r["lowest_ms"] > 0 for r in one["ways"].values())
    assert one["ways"]["save"]["lowest_ms"] < one["ways"]["save, committed"]["lowest_ms"]
    assert one["written"]["save"] > one["bytes"], "the parts of two ranks"
    assert all(size > one["bytes"] / 2 for size in one["written"].values())


def test_all_engines_and_two_models_are_measured_unless_asked_otherwise():
    parser = arguments("checkpoint", None)
    whole = cells(parser.parse_args([]))
    assert len(whole) == 12 and {settings.model for settings in whole} == {"gpt_3m", "gpt_28m"}
    assert cells(parser.parse_args(["--quick"])) == [Settings(engine="ddp", model="gpt_1m", rounds=2)]
