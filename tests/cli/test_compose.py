"""From YAML and overrides to one plain dict, and what is said when that fails (BR-62, BR-64)."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from resilient.cli import compose as compose_module
from resilient.cli.argv import Runtime
from resilient.cli.check import check_job
from resilient.cli.compose import compose_job, plain
from resilient.errors import ConfigError
from resilient.train.config import JobConfig


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_job(compose_job(argv), Runtime())
    return str(caught.value)


def job(*argv: str) -> JobConfig:
    return check_job(compose_job(argv), Runtime())


class Colour(Enum):
    RED = 1


def test_br62_one_conversion_to_plain_values() -> None:
    config = OmegaConf.create(
        {
            "nested": {"list": [1, {"x": "${answer}"}, [2.5, None, True]]},
            "answer": 42,
            "colour": Colour.RED,
            "path": Path("a") / "b",
            "text": "the answer is ${answer}",
            "whole": "${nested.list}",
            3: "a number as key",
        }
    )
    result = plain(config)
    assert json.loads(json.dumps(result)) == result
    assert result["nested"]["list"] == [1, {"x": 42}, [2.5, None, True]]
    assert result["whole"] == result["nested"]["list"]
    assert (result["colour"], result["path"], result["text"]) == ("RED", "a/b", "the answer is 42")
    assert result["3"] == "a number as key"


def test_br62_all_bad_keys_in_one_error() -> None:
    config = OmegaConf.create(
        {
            "run": {"root": "???", "id": "${run.id}", "steps": 3},
            "a": "${b}",
            "b": "${a}",
            "list": [1, "${nowhere.at.all}", "???"],
            "env": "${oc.env:RESILIENT_NO_SUCH_VARIABLE}",
        }
    )
    with pytest.raises(ConfigError) as caught:
        plain(config)
    named = [line.split(":")[0].removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]
    assert named == ["run.root", "run.id", "a", "b", "list[1]", "list[2]", "env"]


def test_br62_missing_and_cyclic_from_the_command_line() -> None:
    text = refused("run.root=???", "run.id=${run.id}")
    assert text.startswith("2 problems:")
    assert "run.root: no value given (???)" in text
    assert "run.id: cannot resolve ${run.id}" in text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["run.stepz=5"], "run.stepz: unknown key; did you mean run.steps?"),
        (["+run.stepz=5"], "run.stepz: unknown key; did you mean run.steps?"),
        (["steps=5"], "steps: unknown key; did you mean run.steps?"),
        (["policy.rolback.budget=5"], "policy.rolback.budget: unknown key; did you mean policy.rollback.budget?"),
        (["enginee=ddp"], "enginee: unknown key; did you mean engine?"),
        (["+enginee=ddp"], "enginee: unknown key; did you mean engine?"),
        (["policy=observed"], "policy=observed: no such choice; did you mean policy=observe?"),
        (["experiment=smok"], "experiment=smok: no such choice; did you mean experiment=smoke?"),
        (
            ["policy.rollback.skip_data='true'"],
            "policy.rollback.skip_data: found the text 'true', wanted true or false",
        ),
        (["run.steps=2.5"], "run.steps: found the number 2.5, wanted a whole number"),
        (["run.steps=null"], "run.steps: found null, wanted a whole number"),
        (
            ["policy.mode=obsrve"],
            "policy.mode: found the text 'obsrve', wanted one of act, observe, off; did you mean observe?",
        ),
        (["engine=ddp", "engine.precision=fp16"], "engine.precision=fp16: ddp has no loss scaler"),
        (["engine=fsdp2", "engine.precision=fp16"], "engine.precision=fp16: fsdp2 has no loss scaler"),
        (["engine=ddp", "engine.deepspeed.any=1"], "engine.deepspeed: ddp does not read it"),
        (["engine.zero_stage=2"], "engine.zero_stage=2: only a deepspeed engine"),
        (["engine=deepspeed_zero3", "engine.zero_stage=4"], "engine.zero_stage=4: must be 0, 1, 2 or 3"),
        (["run.steps=0"], "run.steps=0: must be at least 1"),
        (["run.checkpoint.every=-1"], "run.checkpoint.every=-1: must not be negative"),
        (["data.micro_batch=0"], "data.micro_batch=0: must be at least 1"),
        (["fault=kill_rank", "fault.rank=2", "run.nproc=2"], "fault.rank=2"),
        (["policy=observe,default"], "policy=observe,default: several values need --multirun (-m)"),
        (["run.steps"], "cannot read the override 'run.steps'"),
        (["run.id=[a"], "cannot read the override 'run.id=[a'"),
        (["~engine"], "engine: missing"),
        (["--config-name", "confg"], "--config-name confg: no such file; did you mean config?"),
        (["--config-dir", "no/such/folder"], "--config-dir no/such/folder: no such folder"),
        (["+experiment=smoke"], "if the group has a place already, write experiment=smoke"),
    ],
)
def test_br64_one_readable_message(argv: list[str], expected: str) -> None:
    text = refused(*argv)
    assert expected in text
    assert "Traceback" not in text
    assert "HYDRA_FULL_ERROR" not in text


def test_br64_everything_wrong_on_the_command_line_at_once() -> None:
    assert refused("run.stepz=5", "polic=off", "engine=zero1", "optim.lr=1").splitlines()[0] == "3 problems:"


def test_br64_engine_section_passes_unknown_keys_through() -> None:
    config = job("engine=deepspeed_zero2", "engine.deepspeed.zero_optimization.round_robin_gradients=true")
    assert config.engine.deepspeed == {"zero_optimization": {"round_robin_gradients": True}}


def test_br64_deprecated_key_still_works_and_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(compose_module.DEPRECATED, "train.max_steps", "run.steps")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "old.yaml").write_text("# @package _global_\ntrain:\n  max_steps: 7\n")
    warnings: list[str] = []
    assert compose_job(["train.max_steps=9"], warnings.append)["run"]["steps"] == 9
    from_file = compose_job(["--config-dir", str(tmp_path), "experiment=old"], warnings.append)
    assert from_file["run"]["steps"] == 7
    assert warnings == ["train.max_steps is deprecated, use run.steps"] * 2


def test_deprecated_key_warns_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(compose_module.DEPRECATED, "train.max_steps", "run.steps")
    compose_job(["train.max_steps=9"])
    assert "train.max_steps is deprecated, use run.steps" in capsys.readouterr().err


def test_no_key_is_deprecated_in_favour_of_one_that_does_not_exist() -> None:
    resolved = compose_job([])
    for new in compose_module.DEPRECATED.values():
        node = resolved
        for part in new.split("."):
            node = node[part]


def test_config_dir_adds_choices_and_config_name_replaces_the_primary(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text("defaults: [default]\nname: mine\nskip:\n  budget: 3\n")
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nrun:\n  steps: 5\n")
    options = ["--config-dir", str(tmp_path)]
    policy = job(*options, "policy=mine").policy
    assert (policy.name, policy.skip.budget, policy.skip.window) == ("mine", 3, 500)
    assert job(*options, "--config-name", "mine").run.steps == 5
    assert "policy=minr: no such choice; did you mean policy=mine?" in refused(*options, "policy=minr")


def test_br64_broken_yaml_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "broken.yaml").write_text("name: [unclosed\n")
    assert "broken.yaml" in refused("--config-dir", str(tmp_path), "policy=broken")


def test_composition_leaves_the_working_directory_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose_job(["run.steps=3"])
    assert list(tmp_path.iterdir()) == []
