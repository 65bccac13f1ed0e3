"""The cost benchmark runs in every kind of engine and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilient.bench.overhead import MODES, judge_at, main


def test_the_judge_is_timed_on_simulated_ranks():
    assert judge_at(64, 5) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_a_quick_run(engine: str, tmp_path: Path):
    out = tmp_path / "found.json"
    words = [
        "--quick",
        "--model",
        "gpt_1m",
        "--engine",
        engine,
        "--worlds",
        "64",
        "--format",
        "json",
        "--out",
        str(out),
    ]
    assert main(words) == 0
    found = json.loads(out.read_text())
    assert tuple(found["modes"]) == MODES and all(mode["step_ms"] > 0 for mode in found["modes"].values())
    parts = found["parts"]
    assert all(
        parts[name] > 0 for name in ("taps_us", "record_us", "exchange_us", "see_us", "conclude_us", "settle_us")
    )
    assert parts["check_cells"] > 0 and parts["taps_us"] < parts["record_us"]
    assert main(["--out", str(tmp_path / "no" / "folder.json")]) == 64
