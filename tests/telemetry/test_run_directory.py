"""Identity of a run (BR-63), what it records about itself (T1), and plain data at the border (BR-62)."""

from __future__ import annotations

import enum
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from resilient.errors import ConfigError, ExitCode
from resilient.telemetry.environment import describe_environment, selected_variables
from resilient.telemetry.files import TelemetryError, plain, read_json, write_json
from resilient.telemetry.run_directory import ABSENT, RunDirectory, StaleGeneration, is_live

CONFIG = {"optim": {"lr": 1e-3, "betas": [0.9, 0.95]}, "run": {"id": None, "steps": 10, "resume": "auto"}}

_HOLDER = """
import sys
from resilient.telemetry.run_directory import RunDirectory
run = RunDirectory.open(sys.argv[1], sys.argv[2], {"optim": {"lr": 1e-3}}, lock_wait_s=float(sys.argv[3]))
print("open", run.generation, flush=True)
sys.stdin.read()
"""


def holder(root: Path, run_id: str, wait_s: float = 0.0) -> subprocess.Popen[str]:
    """A real process that opens the run and keeps it open until its stdin is closed or it is killed."""
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(root), run_id, str(wait_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    """What the holder says first, with a deadline: a silent one is killed and gives an empty line."""
    assert process.stdout is not None
    timer = threading.Timer(20, process.kill)
    timer.start()
    try:
        return process.stdout.readline().strip()
    finally:
        timer.cancel()


def test_layout_and_attach(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, "one", CONFIG) as run:
        names = {p.name for p in run.path.iterdir()}
        assert {"config.yaml", "env.json", "generation.json", "incidents", "checkpoints"} <= names
        assert yaml.safe_load((run.path / "config.yaml").read_text()) == CONFIG
        assert (run.generation, run.resumed, run.differences) == (0, False, [])
        other = RunDirectory.attach(run.path)
        assert (other.run_id, other.generation, other.config, other.writable) == ("one", 0, CONFIG, False)
        other.assert_current_generation()
        with pytest.raises(TelemetryError, match="rank 0"):
            other.write_summary({"status": "done"})
    with pytest.raises(ConfigError, match=r"generation\.json"):
        RunDirectory.attach(tmp_path / "none")


@pytest.mark.timeout(60)
def test_br63_kill_and_start_again_continues_in_the_same_place(tmp_path: Path) -> None:
    """BR-63: the lock dies with its holder; the same id resumes, another id is fresh."""
    process = holder(tmp_path, "job")
    assert first_line(process) == "open 0"
    assert is_live(tmp_path / "job")
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=20) == -signal.SIGKILL
    assert not is_live(tmp_path / "job")
    with RunDirectory.open(tmp_path, "job", {"optim": {"lr": 1e-3}}) as again:
        assert (again.generation, again.resumed) == (1, True)
        assert again.path == tmp_path / "job"
    with RunDirectory.open(tmp_path, "job-2", CONFIG) as fresh:
        assert fresh.generation == 0


@pytest.mark.timeout(60)
def test_br63_second_live_start_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    process = holder(tmp_path, "job")
    try:
        assert first_line(process) == "open 0"
        with pytest.raises(ConfigError, match=rf"already running \(process {process.pid} on ") as refused:
            RunDirectory.open(tmp_path, "job", CONFIG, lock_wait_s=0.1)
        assert refused.value.exit_code == ExitCode.BAD_CONFIG
        assert read_json(tmp_path / "job" / "generation.json")["generation"] == 0  # type: ignore[index]
    finally:
        process.communicate("", timeout=20)


@pytest.mark.timeout(60)
def test_br63_two_starts_at_the_same_instant_one_refused(tmp_path: Path) -> None:
    pair = [holder(tmp_path, "same"), holder(tmp_path, "same")]
    lines = [first_line(process) for process in pair]
    errors = [process.communicate("", timeout=20)[1] for process in pair]
    assert sorted(lines) == ["", "open 0"], errors
    loser = lines.index("")
    assert pair[loser].returncode != 0
    assert "ConfigError" in errors[loser]
    assert "already running" in errors[loser]


@pytest.mark.timeout(60)
def test_br63_a_dying_predecessor_is_waited_for(tmp_path: Path) -> None:
    first = holder(tmp_path, "job")
    assert first_line(first) == "open 0"
    second = holder(tmp_path, "job", wait_s=20.0)
    first.kill()
    try:
        assert first_line(second) == "open 1"
    finally:
        second.communicate("", timeout=20)
        first.wait(timeout=20)


@pytest.mark.timeout(60)
def test_br63_a_forked_child_does_not_keep_the_run_locked(tmp_path: Path) -> None:
    """A data worker that outlives its killed parent for a moment must not block the restart."""
    run = RunDirectory.open(tmp_path, "forks", CONFIG)
    release_read, release_write = os.pipe()
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release_write)
        os.write(ready_write, b".")
        os.read(release_read, 1)
        os._exit(0)
    try:
        os.close(release_read)
        assert os.read(ready_read, 1) == b"."
        run.close()
        with RunDirectory.open(tmp_path, "forks", CONFIG, lock_wait_s=0.0) as again:
            assert again.generation == 1
            assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it was alive all the time
    finally:
        for descriptor in (release_write, ready_read, ready_write):
            os.close(descriptor)
        os.waitpid(child, 0)


def test_br63_changed_override_is_listed_and_the_original_kept(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, "job", CONFIG).close()
    changed = {
        "optim": {"lr": 2e-3, "betas": (0.9, 0.95), "clip": 1.0},
        "run": {"id": "job", "steps": 10, "resume": "must"},
    }
    with RunDirectory.open(tmp_path, "job", changed, resume="must") as run:
        assert run.differences == [("optim.lr", 1e-3, 2e-3), ("optim.clip", ABSENT, 1.0)]
        assert run.config["optim"] == CONFIG["optim"]
        assert run.config["run"]["resume"] == "must"  # how to start is today's business
    assert yaml.safe_load((tmp_path / "job" / "config.yaml").read_text()) == CONFIG
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.001 -> 0\.002"):
        RunDirectory.open(tmp_path, "job", changed, on_config_change="refuse")
    with RunDirectory.open(tmp_path, "job", CONFIG, on_config_change="refuse") as same:
        assert same.differences == []


def test_br63_resume_must_and_never(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.resume=must"):
        RunDirectory.open(tmp_path, "new", CONFIG, resume="must")
    assert not (tmp_path / "new").exists()
    RunDirectory.open(tmp_path, "old", CONFIG).close()
    with pytest.raises(ConfigError, match=r"run\.resume=never"):
        RunDirectory.open(tmp_path, "old", CONFIG, resume="never")
    with RunDirectory.open(tmp_path, "old", CONFIG) as run:  # the refused start left no trace and no lock
        assert run.generation == 1


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "x" * 300])
def test_bad_ids_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.id"):
        RunDirectory.open(tmp_path, name, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_traces_without_identity_are_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / "steps.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="traces of training"):
        RunDirectory.open(tmp_path, "stray", CONFIG)


def test_older_generations_are_refused(tmp_path: Path) -> None:
    old = RunDirectory.open(tmp_path, "job", CONFIG)
    old.write_summary({"status": "preempted"})
    write_json(old.path / "verdict.json", {"code": ExitCode.RESTART})
    stale = RunDirectory.attach(old.path)
    old.close()
    new = RunDirectory.open(tmp_path, "job", CONFIG)
    for name in ("verdict", "summary"):  # what an old start said is never read as the new one's
        assert not (new.path / f"{name}.json").exists()
        assert (new.path / f"{name}.0.json").exists()
    with pytest.raises(StaleGeneration, match=rf"generation 0, but generation 1 was started by process {os.getpid()}"):
        stale.assert_current_generation()
    old.writable = True  # a process that hung through its own restart and still believes that it owns the run
    with pytest.raises(StaleGeneration):
        old.write_summary({"status": "done"})
    new.write_summary({"status": "done"})
    assert read_json(new.path / "summary.json") == {"status": "done"}
    new.close()


def test_t1_environment_is_recorded_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("RESILIENT_API_KEY", "hidden-1")
    monkeypatch.setenv("HYDRA_AUTH_TOKEN", "hidden-2")
    monkeypatch.setenv("WANDB_API_KEY", "hidden-3")
    monkeypatch.setenv("TORCH_STORE", "tcp://user:hidden-4@host:1")
    monkeypatch.setattr(sys, "argv", ["train", "optim.lr=1", "tracker.api_key=hidden-5"])
    RunDirectory.open(tmp_path, "job", CONFIG).close()
    text = (tmp_path / "job" / "env.json").read_text()
    environment = json.loads(text)
    assert "hidden" not in text
    assert (
        environment["packages"]["torch"] == torch.__version__.split("+")[0]
        or environment["packages"]["torch"] == torch.__version__
    )
    assert {"deepspeed", "numpy", "hydra-core"} <= set(environment["packages"])
    assert environment["variables"]["NCCL_DEBUG"] == "WARN"
    assert environment["argv"] == ["train", "optim.lr=1", "tracker.api_key=***"]
    monkeypatch.setattr(sys, "argv", ["train", "again"])
    RunDirectory.open(tmp_path, "job", CONFIG).close()
    second = json.loads((tmp_path / "job" / "env.json").read_text())
    assert second["generation"] == 1
    assert second["earlier"][0]["argv"] == environment["argv"]
    assert "platform" not in second["earlier"][0]  # only what changed


def test_t1_git_commit_and_dirty_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=20)

    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    (tmp_path / "train.py").write_text("x = 1\n")
    git("add", "train.py")
    git("commit", "-q", "-m", "one")
    clean = describe_environment()["git"]["cwd"]
    assert re.fullmatch(r"[0-9a-f]{40}", clean["commit"])
    assert clean["dirty"] is False
    (tmp_path / "train.py").write_text("x = 2\n")
    assert describe_environment()["git"]["cwd"] == {"commit": clean["commit"], "dirty": True}


def test_selected_variables_are_few() -> None:
    assert selected_variables({"HOME": "/h", "PATH": "/p", "LS_COLORS": "x", "RANK": "1"}) == {"RANK": "1"}


class Colour(enum.Enum):
    RED = object()


class Mode(str, enum.Enum):
    FAST = "fast"


def test_br62_config_becomes_plain_data(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "path": Path("a/b"),
        "dtype": torch.bfloat16,
        "colour": Colour.RED,
        "mode": Mode.FAST,
        "code": ExitCode.RESTART,
        "nested": [{"a": (1, 2)}, {"b": {3}}],
        "scalar": np.float32(0.5),
        "tensor": torch.tensor(3),
        "huge": math.inf,
    }
    with RunDirectory.open(tmp_path, "job", config) as run:
        assert run.config == {
            "path": "a/b",
            "dtype": "torch.bfloat16",
            "colour": "RED",
            "mode": "fast",
            "code": 75,
            "nested": [{"a": [1, 2]}, {"b": [3]}],
            "scalar": 0.5,
            "tensor": 3,
            "huge": math.inf,
        }
    with RunDirectory.open(tmp_path, "job", config) as again:  # survives the trip through YAML
        assert (again.differences, again.config) == ([], run.config)
    with pytest.raises(ConfigError, match=r"model\.0\.hook: a builtins\.function"):
        plain({"model": [{"hook": lambda: None}]})


def test_json_files_are_strict_and_replaced_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "s.json", {"loss": math.nan, "deep": [math.inf, 1.5]})
    assert json.loads((tmp_path / "s.json").read_text()) == {"loss": None, "deep": [None, 1.5]}
    with pytest.raises(TelemetryError, match="cannot write"):
        write_json(tmp_path / "missing" / "s.json", {})
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]  # no temporary file left
