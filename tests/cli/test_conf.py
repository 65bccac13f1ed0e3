"""conf/: every file of every group converts, and the files say what the dataclasses say."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from resilient.cli.argv import Runtime
from resilient.cli.check import check_job
from resilient.cli.compose import compose_job, config_folder, group_options
from resilient.detectors.config import DetectorConfig
from resilient.policies.config import PolicyConfig
from resilient.train.config import RunConfig

GROUPS = group_options([config_folder()])
CHOICES = [(group, name) for group, names in sorted(GROUPS.items()) for name in sorted(names)]
FOUR_RANKS = Runtime(rank=0, world=4, local_rank=0, launched=True)
WHAT_A_CHOICE_NEEDS = {("data", "files"): ["data.glob=texts/*.txt"]}


def test_groups_that_others_rely_on() -> None:
    """The names of issue 2."""
    assert GROUPS["engine"] == {"ddp", "fsdp2", *(f"deepspeed_zero{stage}" for stage in range(4))}
    assert GROUPS["policy"] == {"default", "observe", "off"}
    assert GROUPS["detector"] == {"default", "nonfinite_only"}
    assert GROUPS["launch"] == {"local", "deepspeed", "torchrun"}
    assert GROUPS["model"] >= {"gpt_1m", "gpt_3m", "gpt_10m"}
    assert GROUPS["data"] >= {"stdlib", "files"}
    assert GROUPS["fault"] >= {
        "none",
        "nan_one_rank",
        "rank_grad_spike",
        "poisoned_window",
        "lr_overshoot",
        "kill_rank",
    }
    assert GROUPS["experiment"] >= {"smoke"}


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_converts_and_spells_out_every_key(group: str, name: str) -> None:
    """A key that a file leaves out could not be overridden without `+`, and nobody would know that it exists."""
    resolved = compose_job([f"{group}={name}", *WHAT_A_CHOICE_NEEDS.get((group, name), [])])
    job = check_job(resolved, FOUR_RANKS)
    if hasattr(job, group):
        _same_keys(asdict(getattr(job, group)), resolved[group], f"{group}={name}")


def _same_keys(wanted: object, found: object, path: str) -> None:
    if isinstance(wanted, dict) and isinstance(found, dict):
        assert set(found) == set(wanted), path
        for key in wanted:
            _same_keys(wanted[key], found[key], f"{path}.{key}")


def test_default_files_equal_the_dataclass_defaults() -> None:
    """A loop of one's own (resilient.Guard) and `resilient train` get the same constants."""
    job = check_job(compose_job([]), FOUR_RANKS)
    assert (job.policy, job.detector, job.run) == (PolicyConfig(), DetectorConfig(), RunConfig())


def test_observe_and_off_are_the_default_ladder_in_another_mode() -> None:
    policies = {name: compose_job([f"policy={name}"])["policy"] for name in ("default", "observe", "off")}
    assert [policies[name].pop("mode") for name in policies] == ["act", "observe", "off"]
    assert [policies[name].pop("name") for name in policies] == ["default", "observe", "off"]
    assert policies["observe"] == policies["off"] == policies["default"]


def test_every_file_is_commented() -> None:
    for path in config_folder().rglob("*.yaml"):
        assert "# " in path.read_text(encoding="utf-8"), f"{path.name} explains nothing"
