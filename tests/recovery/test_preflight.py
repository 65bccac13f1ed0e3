"""The launch-time preflight (issue 4, item 6): a finding refuses the job or warns; a clean one is silent about it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from resilient.cli import launch
from resilient.recovery.preflight import preflight, probe_command


def exits(code: int) -> list[str]:
    return [sys.executable, "-c", f"raise SystemExit({code})"]


@pytest.mark.parametrize(
    ("mode", "found", "code", "said"),
    [
        ("refuse", 0, 0, "preflight: "),
        ("refuse", 1, 77, "ended with exit 1: see above for the ranks and hosts; the job was not started"),
        ("warn", 1, 0, "WARNING: the probe ended with exit 1"),
        ("warn", 64, 64, "the probe cannot be run like this"),
        ("refuse", 137, 77, "ended with exit 137 (SIGKILL)"),
    ],
)
def test_what_a_finding_does_to_the_job(mode: str, found: int, code: int, said: str) -> None:
    lines: list[str] = []
    assert preflight(mode, exits(found), 1.0, lines.append) == code  # type: ignore[arg-type]
    assert said in lines[-1]


def test_a_probe_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient.recovery.preflight._OVERTIME_S", 0.0)
    lines: list[str] = []
    assert preflight("refuse", [sys.executable, "-c", "import time; time.sleep(60)"], 0.1, lines.append) == 77
    assert "did not end within 0.2 s" in lines[-1]


def test_off_runs_nothing_and_a_command_that_does_not_exist_is_bad_configuration() -> None:
    lines: list[str] = []
    assert preflight("off", ["/nowhere/probe"], 1.0, lines.append) == 0
    assert lines == []
    assert preflight("warn", ["/nowhere/probe"], 1.0, lines.append) == 64
    assert "cannot start '/nowhere/probe'" in lines[-1]


def test_the_command_is_the_users_or_a_probe_of_these_seconds() -> None:
    assert probe_command("torchrun --nnodes 2 -m 'resilient.cli.probe'", 5.0)[-2:] == ["-m", "resilient.cli.probe"]
    assert probe_command(None, 5.0) == [sys.executable, "-m", "resilient.cli.probe", "--seconds", "5"]


def test_launch_does_not_start_a_job_that_the_preflight_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = tmp_path / "started"
    job = [sys.executable, "-c", f"open({str(started)!r}, 'w')"]
    options = ["--preflight", "refuse", "--preflight-command", shlex.join(exits(1))]
    assert launch.main([*options, "--", *job]) == 77
    assert not started.exists()
    assert "the job was not started" in capsys.readouterr().err
