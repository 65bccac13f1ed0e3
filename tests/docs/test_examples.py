"""The example scripts, run as a reader would: through the real launchers, and a second time to go on (T9, C5)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
FIRST, MORE = 12, 20

TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]


def launch(command: list[str], script: str, run: Path, steps: int) -> None:
    """Run one example to its end, as the leader of a session that is ended with it. A deadline of 120 s."""
    program = Path(sys.executable).with_name(command[0])
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RESILIENT_RUN_ID")
    env = {key: value for key, value in os.environ.items() if key not in launcher}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen(
        [str(program), *command[1:], str(EXAMPLES / script), "--run-dir", str(run), "--steps", str(steps)],
        cwd=run.parent,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_two_starts(run: Path, second: list[str], first: list[str], script: str) -> None:
    launch(first, script, run, FIRST)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["steps"] == summary["applied"] == FIRST
    assert summary["generation"] == 0
    before = summary["eval_loss"]

    launch(second, script, run, MORE)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["generation"] == 1
    assert summary["steps"] == summary["applied"] == summary["attempts"] == MORE, "no step was trained twice"
    assert summary["steps_lost"] == 0
    assert summary["eval_loss"] < before < 1.5, "ln 4 = 1.39 is what guessing gives"
    resumed = [event["step"] for event in lines(run / "journal.jsonl") if event["kind"] == "resume"]
    assert resumed == [FIRST]
    assert [line["step"] for line in lines(run / "steps.jsonl")] == [*range(1, MORE + 1)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.timeout(260)
@pytest.mark.parametrize("script", ["ddp.py", pytest.param("fsdp2.py", marks=pytest.mark.slow)])
def test_example_runs_and_goes_on(script: str, tmp_path: Path) -> None:
    check_two_starts(tmp_path / "run", TORCHRUN, TORCHRUN, script)


@pytest.mark.timeout(260)
@pytest.mark.slow
def test_deepspeed_example_runs_under_torchrun_and_goes_on_under_deepspeed(tmp_path: Path) -> None:
    deepspeed = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port())]
    check_two_starts(tmp_path / "run", deepspeed, TORCHRUN, "deepspeed_zero.py")


@pytest.mark.timeout(130)
def test_ddp_example_needs_no_launcher(tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch([Path(sys.executable).name], "ddp.py", run, FIRST)
    assert json.loads((run / "summary.json").read_text())["steps"] == FIRST


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"ddp.py", "fsdp2.py", "deepspeed_zero.py"}
