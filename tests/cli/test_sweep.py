"""`resilient train -m`: every job in a process tree of its own (BR-61)."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from resilient.cli import sweep as module
from resilient.cli.argv import Runtime, parse_arguments
from resilient.cli.sweep import job_name, run_alone, sweep, tagged
from resilient.errors import ConfigError
from tests.cli.commands import finish, start

SMALL = ["data=synthetic", "model.layers=1", "model.width=32", "model.heads=2", "run.steps=2", "run.eval_batches=1"]


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that mention the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


@pytest.mark.timeout(300)
def test_br61_a_failed_job_stops_no_other_and_leaves_nothing(tmp_path: Path) -> None:
    """Two jobs of two ranks; the first loses rank 1 to SIGKILL."""
    (tmp_path / "conf" / "fault").mkdir(parents=True)
    (tmp_path / "conf" / "fault" / "dies.yaml").write_text("kind: kill_rank\nstep: 2\nrank: 1\n")
    work = tmp_path / "work"
    work.mkdir()
    words = ["--config-dir", str(tmp_path / "conf"), "fault=dies,none", "run.nproc=2", "run.root=here", *SMALL]
    code, out, err = finish(start(["-m", "resilient", "train", "-m", *words], work), timeout=280)

    assert code == 77, out + err
    assert [path.name for path in work.iterdir()] == ["here"], "nothing but the root in the working directory"
    (folder,) = (work / "here").iterdir()
    runs = sorted(path for path in folder.iterdir() if (path / "config.yaml").exists())
    assert [path.name for path in runs] == ["0-fault=dies", "1-fault=none"]
    results = [json.loads((folder / "jobs" / str(n) / "result.json").read_text()) for n in range(2)]
    assert results[0]["status"].startswith("failed")
    assert (results[1]["exit_code"], results[1]["status"]) == (0, "done")
    assert results[1]["eval_loss"] == json.loads((runs[1] / "summary.json").read_text())["eval_loss"]
    for number in range(2):
        assert "2 ranks" in (folder / "jobs" / str(number) / "output.log").read_text()
    assert "sweep: 2 jobs, 1 failed" in out
    assert f"resilient compare {folder.relative_to(work)}" in out
    assert processes_of(tmp_path) == []


def test_a_bad_choice_is_refused_before_any_job_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        sweep(parse_arguments(["-m", "policy=default,observed", "run.steps=3,0"]), Runtime())
    assert "policy=observed: no such choice; did you mean policy=observe?" in str(caught.value)
    assert "run.steps=0: must be at least 1" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_run_alone_takes_down_what_a_job_leaves_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child in a session of its own, deaf to SIGTERM, that holds the job's output open."""
    monkeypatch.setattr(module, "_GRACE_S", 0.5)
    leftover = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    job = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {leftover!r}], start_new_session=True, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        f"other = subprocess.Popen([sys.executable, '-c', {leftover!r}], start_new_session=True)\n"
        "print('pids', child.pid, other.pid, flush=True)\n"
        "sys.exit(3)\n"
    )
    begin = time.monotonic()
    assert run_alone([sys.executable, "-c", job], 7, tmp_path / "log") == 3
    assert time.monotonic() - begin < 30
    line = next(line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("pids"))
    for pid in map(int, line.split()[1:]):
        assert _gone(pid), f"{pid} is still there"


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_tagged_finds_nothing_that_is_not_tagged() -> None:
    assert tagged("no such tag") == []


@pytest.mark.parametrize(
    ("dirname", "expected"),
    [
        ("policy=observe,run.steps=3", "policy=observe,run.steps=3"),
        ("data.glob=/a/**/*.txt", "data.glob=_a_.txt"),
        ("", ""),
        ("x=" + "y" * 200, "x=" + "y" * 98),
    ],
)
def test_job_names_are_folder_names(dirname: str, expected: str) -> None:
    assert job_name(dirname) == expected
