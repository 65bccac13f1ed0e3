"""`resilient probe` from the command line: real ranks, tables and JSON, and how bad usage and missing ranks end."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from resilient.cli import probe
from resilient.cli.main import main
from resilient.recovery.process import free_port
from tests.cli.commands import finish, start
from tests.coordinator.link_world import Broken, measured

_MODULE = ["-m", "resilient.cli.probe"]


def test_two_ranks_of_this_machine_and_json(tmp_path: Path) -> None:
    words = ["--nproc", "2", "--seconds", "1", "--size-mb", "0.1", "--json"]
    code, out, err = finish(start([*_MODULE, *words], tmp_path))
    assert code == 0, err
    said = json.loads(out)
    assert (said["world"], said["exit"], len(said["hosts"])) == (2, 0, 2)
    (link,) = said["links"]
    assert link["ranks"] == [0, 1] and link["one_host"]
    assert 0 < link["latency_us"] <= link["latency_p95_us"] and link["mb_per_s"] > 0
    assert link["wrong_words"] == [0, 0] and said["matmul_wrong"] == [0, 0]


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code, out, err = finish(start([*_MODULE, "--wait", "2"], tmp_path, launcher))
    assert code == 1, err
    assert "ranks [1] of 2 did not come within 2 s" in out


@pytest.mark.parametrize("words", [["--seconds", "x"], ["--seconds", "0"], ["--nproc", "-1"], ["--what"], ["more"]])
def test_bad_usage_is_64(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["probe", *words])
    assert end.value.code == 64
    assert "resilient probe: " in capsys.readouterr().err


def test_ranks_without_an_address_to_meet_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under srun, which sets neither."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setattr(probe.Runtime, "export", lambda runtime, environ: None)  # leave this process's own as it is
    assert main(["probe"]) == 64
    assert "MASTER_ADDR and MASTER_PORT not set" in capsys.readouterr().err


def test_what_is_found_is_shown_and_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [f"node{i // 2}" for i in range(8)]
    world = measured(hosts, Broken(slow=5, corrupting=(0, 2)))
    assert probe._show(world, argparse.Namespace(json=False)) == 1
    text = capsys.readouterr().out
    assert "slow: rank 5 (node2) is in several of these links" in text
    assert "wrong bits: rank 0 (node0) received " in text and " wrong words from rank 2 (node1)" in text
    assert text.endswith("found: see above\n")
    assert probe._show(world, argparse.Namespace(json=True)) == 1
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["wrong_pairs"] == [[0, 2]] and all(5 in pair for pair in report["slow_pairs"])


def test_a_large_world_is_shown_by_its_worst(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe._show(measured(["one"] * 64, Broken()), argparse.Namespace(json=False)) == 0
    text = capsys.readouterr().out
    assert "the 28 with the longest latency of 2016" in " ".join(text.split())
    assert len(text.splitlines()) < 80
    assert text.endswith("nothing slow, nothing wrong\n")
