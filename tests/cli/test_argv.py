"""Launcher arguments and who a rank is (BR-59)."""

from __future__ import annotations

import pytest

from resilient.cli.argv import Runtime, parse_arguments, strip_launcher_arguments
from resilient.errors import ConfigError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    "spelling", [["--local_rank=7"], ["--local-rank=7"], ["--local_rank", "7"], ["--local-rank", "7"]]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_br59_launcher_argument_is_removed_wherever_it_stands(spelling: list[str], place: int) -> None:
    words = ["engine=ddp", "run.steps=3"]
    argv = words[:place] + spelling + words[place:]
    runtime, rest = strip_launcher_arguments(argv, TORCHRUN)
    assert rest == words
    assert runtime == Runtime(rank=3, world=4, local_rank=1, launched=True), "the environment says who we are"


def test_br59_other_options_are_left_for_hydra_to_refuse() -> None:
    _, rest = strip_launcher_arguments(["--local_rankk=0", "--typo", "run.steps=3"], {})
    assert rest == ["--local_rankk=0", "--typo", "run.steps=3"]
    assert parse_arguments(rest).ask_hydra


def test_br59_without_environment_there_is_one_rank() -> None:
    runtime, _ = strip_launcher_arguments(["--local_rank=0", "run.steps=3"], {})
    assert runtime == Runtime(rank=0, world=1, local_rank=0, launched=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}, Runtime(2, 4, 0, True)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Runtime()),  # the batch script: srun starts the ranks later
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Runtime()),  # a shell under srun --pty
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            Runtime(1, 2, 1, True),
        ),
        ({**TORCHRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "9"}, Runtime(3, 4, 1, True)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Runtime(0, 1, 0, True)),
    ],
)
def test_rank_from_environment(environ: dict[str, str], expected: Runtime) -> None:
    assert strip_launcher_arguments([], environ)[0] == expected


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--local_rank=x"], {}, "--local_rank"),
        (["--local-rank"], {}, "--local-rank"),
        (["--local_rank", "run.steps=3"], {}, "--local_rank"),
        ([], {"RANK": "0"}, "WORLD_SIZE"),
        ([], {"RANK": "two", "WORLD_SIZE": "4"}, "RANK"),
        ([], {"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4"),
    ],
)
def test_unreadable_launcher_words_are_named(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        strip_launcher_arguments(argv, environ)


def test_export_tells_torch_what_slurm_said() -> None:
    environ: dict[str, str] = {}
    Runtime(2, 4, 0, True).export(environ)
    assert environ == {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}


def test_options_and_overrides_may_be_mixed() -> None:
    arguments = parse_arguments(["engine=ddp", "--config-dir", "here", "run.steps=3", "-m", "policy=a,b"])
    assert arguments.overrides == ("engine=ddp", "run.steps=3", "policy=a,b")
    assert (arguments.config_dir, arguments.multirun, arguments.ask_hydra) == ("here", True, False)


@pytest.mark.parametrize(
    "words", [["--cfg", "job"], ["--help"], ["--info"], ["--info", "defaults"], ["-c", "job", "--resolve"]]
)
def test_informational_options_go_to_hydra(words: list[str]) -> None:
    arguments = parse_arguments(["engine=ddp", *words])
    assert arguments.ask_hydra
    assert arguments.words == (*words, "engine=ddp")


def test_a_complete_configuration_takes_no_overrides() -> None:
    with pytest.raises(ConfigError, match="--config-json"):
        parse_arguments(["--config-json", "job.json", "run.steps=3"])
    with pytest.raises(ConfigError, match="--config-dir"):
        parse_arguments(["run.steps=3", "--config-dir"])
