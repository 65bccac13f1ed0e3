"""The cost benchmark runs in every kind of engine, says what it measured, and fails when a bound is missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilient.bench.bounds import Check
from resilient.bench.overhead import MODES, Spent, checks, compared, judge_at, main, text


def test_the_judge_is_timed_on_simulated_ranks():
    assert judge_at(64, 5) > 0


def test_blocks_are_compared_in_pairs():
    """A machine that gets slower by half from block to block shows as no cost; a constant cost shows as itself."""
    off = [Spent(1.0 * 1.5**i, 0.5 * 1.5**i) for i in range(4)]
    row = compared([Spent(2 * s.wall, 1.01 * s.cpu) for s in off], off)
    assert row["extra_cpu_percent"] == pytest.approx(1.0) and row["extra_wall_percent"] == pytest.approx(100.0)
    assert row["extra_cpu_quartiles"] == pytest.approx([1.0, 1.0])


def found(extra: float, judge_us: float, collectives: float = 1.0) -> dict[str, object]:
    modes = {
        mode: {
            **{"cpu_ms": 700.0, "wall_ms": 750.0, "extra_cpu_percent": extra, "extra_wall_percent": extra},
            "extra_cpu_quartiles": [extra, extra],
        }
        for mode in MODES
    }
    one = {
        **{"settings": {"model": "gpt_3m", "seq_len": 128, "micro_batch": 16}, "world": 2, "modes": modes},
        **{"parts": {"taps": {"cpu_us": 900.0}}, "collectives": collectives, "exchange_bytes": 1504},
        **{"check_cells": 8, "snapshot_mb": 38.4},
    }
    return {"engines": {"ddp": one}, "judge_us": {"16384": judge_us}}


@pytest.mark.parametrize(
    ("extra", "judge_us", "collectives", "missed"),
    [(0.2, 1500.0, 1.0, []), (0.5, 1500.0, 1.0, [1]), (1.5, 2500.0, 2.0, [0, 1, 2, 3])],
)
def test_bounds_missed_are_said(extra: float, judge_us: float, collectives: float, missed: list[int]):
    held = checks(found(extra, judge_us, collectives), quick=False)
    assert len(held) == 4 and [i for i, check in enumerate(held) if not check.ok] == missed
    written = text(found(extra, judge_us, collectives), held)
    assert written.count("MISS") == len(missed) and "16,384 ranks" in written and "1504 bytes" in written
    assert [c.name for c in checks(found(extra, judge_us), quick=True)] == [held[0].name, held[3].name]


def test_the_exit_code_is_that_of_the_bounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("resilient.bench.overhead.launch", lambda settings, nproc: found(0.1, 0.0)["engines"]["ddp"])  # type: ignore[index]
    for us, code in ((1999.0, 0), (2001.0, 1)):
        monkeypatch.setattr("resilient.bench.overhead.judge_at", lambda world, steps, us=us: us)
        assert main(["--worlds", "16384", "--format", "json"]) == code
        told = json.loads(capsys.readouterr().out)
        assert list(told["engines"]) == ["ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"]
        assert told["checks"][-1] == Check("judge at 16,384 ranks, us", us, 2000.0, False).as_json()
    monkeypatch.setattr("resilient.bench.overhead.launch", lambda settings, nproc: 9)
    assert main(["--worlds"]) == 9
    assert main(["--out", "no/such/folder.json"]) == 64


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["fsdp2", "zero2"])
def test_a_quick_run(engine: str, tmp_path: Path):
    out = tmp_path / "found.json"
    words = [
        "--quick",
        "--model",
        "gpt_1m",
        "--engines",
        engine,
        "--worlds",
        "64",
        "--format",
        "json",
        "--out",
        str(out),
    ]
    assert main(words) == 0
    one = json.loads(out.read_text())["engines"][engine]
    assert tuple(one["modes"]) == MODES and all(mode["cpu_ms"] > 0 for mode in one["modes"].values())
    parts = {name: part["cpu_us"] for name, part in one["parts"].items()}
    assert all(
        parts[name] > 0 for name in ("taps", "record", "update", "exchange", "see", "conclude", "settle", "tell")
    )
    assert one["check_cells"] > 0 and parts["taps"] < parts["record"]
    assert ("before reduction" in parts) == (engine == "ddp")
