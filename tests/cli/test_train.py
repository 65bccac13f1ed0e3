"""`resilient train` and `python -m resilient.cli.train` as processes see them (BR-59, BR-61, BR-64)."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resilient.cli import main as command
from resilient.cli import train
from resilient.errors import ConfigError, StopRequested
from tests.cli.commands import finish, start

TRAIN = ["-m", "resilient.cli.train"]


def two_ranks(arguments: list[str], cwd: Path) -> tuple[list[tuple[int, str, str]], float, float]:
    """The same command as ranks 0 and 1 of a job. Returns results, wall seconds and the CPU seconds of both together."""
    begin, used = time.monotonic(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    processes = [
        start(
            arguments,
            cwd,
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
            },
        )
        for rank in range(2)
    ]
    results = [finish(process) for process in processes]
    return results, time.monotonic() - begin, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - used


@pytest.mark.timeout(180)
def test_br64_bad_configuration_ends_all_ranks_alike_and_soon(tmp_path: Path) -> None:
    """One message, from rank 0; exit code 64 everywhere; under 5 s beyond imports."""
    _, import_wall, import_cpu = two_ranks(["-c", "import resilient.cli.compose, resilient.cli.check"], tmp_path)
    bad = ["--local_rank=0", "policy.rollback.skip_data='true'", "engine.precision=fp61", "+run.stepz=5"]
    results, wall, cpu = two_ranks([*TRAIN, *bad], tmp_path)
    assert [code for code, _, _ in results] == [64, 64]
    assert cpu - import_cpu < 5.0, "both ranks together, beyond the imports, on however busy a machine"
    assert wall < 2 * import_wall + 5.0, "nobody waited for anybody"
    (_, out, message), (_, *silence) = results
    assert out == ""
    assert silence == ["", ""]
    assert message.count("bad configuration") == 1
    for expected in (
        "policy.rollback.skip_data: found the text 'true', wanted true or false",
        "engine.precision: found the text 'fp61', wanted one of fp32, bf16, fp16; did you mean fp16?",
        "run.stepz: unknown key; did you mean run.steps?",
    ):
        assert expected in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(180)
def test_br59_unknown_option_ends_with_hydras_message_on_rank_0(tmp_path: Path) -> None:
    results, *_ = two_ranks([*TRAIN, "run.steps=3", "--local-rank", "0", "--typo"], tmp_path)
    assert [code for code, _, _ in results] == [64, 64]
    assert "unrecognized arguments: --typo" in results[0][2]
    assert results[1][1:] == ("", "")


@pytest.mark.timeout(180)
def test_hydras_own_options_work(tmp_path: Path) -> None:
    show = start([*TRAIN, "run.steps=7", "--cfg", "job", "--local_rank=0"], tmp_path)
    info = start([*TRAIN, "--info", "defaults"], tmp_path)
    usage = start(["-m", "resilient", "train", "--help"], tmp_path)
    code, out, _ = finish(show)
    assert code == 0
    assert "steps: 7\n" in out
    code, out, _ = finish(info)
    assert code == 0
    assert "engine/ddp" in out
    code, out, _ = finish(usage)
    assert code == 0
    assert "engine: ddp, deepspeed_zero0" in out
    assert list(tmp_path.iterdir()) == [], "asking leaves nothing behind"


def test_br61_multirun_inside_a_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert train.main(["-m", "policy=default,observe"]) == 64
        error = capsys.readouterr().err
        assert ("every rank would start the whole sweep" in error) == (rank == 0)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher around us, and no name for the run."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", train.RUN_ID):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("launcher", "start_of_command"),
    [
        ("deepspeed", ["--num_gpus", "2", "--master_port"]),
        ("torchrun", ["--standalone", "--nproc-per-node", "2", "-m", "resilient.cli.train"]),
    ],
)
def test_launchers_get_the_users_words_and_one_run_id(
    launcher: str, start_of_command: list[str], outside: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Path, list[str], dict[str, str]]] = []

    def execve(path: Path, argv: list[str], env: dict[str, str]) -> None:
        calls.append((path, argv, env))
        raise SystemExit(0)

    outside.setattr(os, "execve", execve)
    words = [f"launch={launcher}", "run.nproc=2", "run.steps=3", "--config-name", "config"]
    with pytest.raises(SystemExit):
        train.main(words)
    ((path, argv, env),) = calls
    assert path == Path(sys.executable).with_name(launcher)
    assert argv[1 : 1 + len(start_of_command)] == start_of_command
    assert argv[-len(words) :] == words
    assert len(env[train.RUN_ID]) == len("20260101-000000-abcd")
    assert env["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")


def test_local_ranks_are_started_as_modules(outside: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def spawn(command: list[str], nproc: int, *, env: dict[str, str]) -> int:
        calls.append((command, nproc, env[train.RUN_ID]))
        return 75

    outside.setattr("resilient.recovery.local.spawn", spawn)
    assert train.main(["run.nproc=2", "run.id=mine"]) == 75
    assert calls == [([sys.executable, "-m", "resilient.cli.train", "run.nproc=2", "run.id=mine"], 2, "mine")]


def test_run_id_comes_from_the_configuration_then_the_environment_then_is_fresh(outside: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run(resolved: dict[str, Any], runtime: Any) -> int:
        seen.append(resolved["run"]["id"])
        return 0

    outside.setattr("resilient.cli.job.run", run)
    outside.setattr(os, "environ", dict(os.environ))
    alone = "run.nproc=1"
    for words in (["run.id=mine"], [], []):
        assert train.main([alone, *words]) == 0
    os.environ[train.RUN_ID] = "theirs"
    assert train.main([alone]) == 0
    assert train.main([alone, "run.id=mine"]) == 0
    assert seen[0] == seen[4] == "mine"
    assert seen[3] == "theirs"
    assert seen[1] != seen[2]


def test_a_complete_configuration_as_json(
    tmp_path: Path, outside: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    path.write_text("[1]")
    assert train.main(["--config-json", str(path)]) == 64
    path.write_text(json.dumps({"engine": {"name": "ddp"}}))
    assert train.main(["--config-json", str(path)]) == 64
    assert "model: missing" in capsys.readouterr().err
    assert train.main(["--config-json", str(tmp_path / "none.json")]) == 64


def test_command_looks_up_the_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["trian"]) == 64
    assert "trian: unknown command; did you mean train?" in capsys.readouterr().err
    assert command.main([]) == 64
    assert command.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in command.COMMANDS)


def test_named_errors_become_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(error: BaseException) -> Any:
        def main(argv: list[str]) -> int:
            raise error

        return main

    cases = ((ConfigError("no"), 64), (StopRequested("enough"), 77), (KeyboardInterrupt(), 130), (SystemExit(2), 64))
    for error, code in cases:
        monkeypatch.setattr(train, "main", raises(error))
        assert command.main(["train"]) == code
    assert "StopRequested: enough" in capsys.readouterr().err
