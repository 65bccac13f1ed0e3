"""Faults as configuration: strict, and every file of conf/fault reads as what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from resilient.errors import ConfigError
from resilient.faults import (
    FaultSequence,
    KillRank,
    LrOvershoot,
    NanFault,
    NoFault,
    check_world,
    parse,
)
from resilient.faults.config import KINDS

CONF = Path(__file__).parents[2] / "conf" / "fault"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "demo"))
def test_every_file_names_every_key(name):
    mapping = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    fault = parse(mapping)
    assert fault.kind == {"nan_one_rank": "nan"}.get(name, name)
    assert fault.name == name
    assert set(mapping) == {*type(fault).__dataclass_fields__, "kind"}  # so that any of them can be overridden


def test_every_kind_has_a_file():
    kinds = {OmegaConf.load(path).kind for path in CONF.glob("*.yaml")}
    assert kinds == set(KINDS)


def test_no_mapping_is_no_fault():
    assert parse(None) == parse({}) == parse({"kind": "none"}) == NoFault()


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"kind": "poisond_window", "step": 1}, r"fault\.kind=poisond_window: unknown; did you mean poisoned_window\?"),
        ({"kind": "lr_overshoot", "step": 3, "windw": 2}, r"fault\.windw: unknown .*; did you mean fault\.window\?"),
        ({"kind": "nan", "step": 3, "window": 2}, r"fault\.window: unknown for kind nan; valid are .*place"),
        ({"kind": "nan", "rank": 1}, r"fault\.step: missing"),
        ({"step": 1}, r"fault\.kind: missing"),
        ({"kind": "nan", "step": "3"}, r"fault\.step='3': must be an integer"),
        ({"kind": "nan", "step": True}, r"fault\.step=True: must be an integer"),
        ({"kind": "kill_rank", "step": 3, "rank": None}, r"fault\.rank=None: must be an integer"),
        ({"kind": "nan", "step": 0}, r"fault\.step=0: must be at least 1"),
        ({"kind": "nan", "step": 1, "place": "backwards"}, r"fault\.place=backwards: unknown; did you mean backward\?"),
        (
            {"kind": "nan_in_module", "step": 1, "module": "x", "place": "loss"},
            r"fault\.place=loss: unknown; valid are",
        ),
        ({"kind": "bad_reduction", "step": 1, "how": "stale"}, r"fault\.step=1: a stale gradient"),
        ({"kind": "bad_reduction", "step": 2, "elements": 0}, r"fault\.elements=0: must be at least 1"),
        ({"kind": "bit_flip", "step": 2, "bit": 32}, r"fault\.bit=32: must be from 0 to 31"),
        ({"kind": "bit_flip", "step": 2, "element": "3"}, r"fault\.element='3': must be an integer or null"),
        ({"kind": "swapped_rng", "step": 2, "source": 1}, r"fault\.source=1: must be another rank"),
        ({"kind": "fp16_overflow", "step": 2, "times": 1}, r"fault\.times=1\.0: must be above 1"),
        ({"kind": "rank_grad_spike", "step": 1, "factor": "x"}, r"fault\.factor='x': must be a number"),
        (
            {"kind": "sequence", "faults": [{"kind": "nan", "step": 1}, {"kind": "nan"}]},
            r"fault\.faults\[1\]\.step: missing",
        ),
        ({"kind": "sequence", "faults": [{"kind": "nan", "step": 0}]}, r"fault\.faults\[0\]\.step=0"),
        ({"kind": "sequence", "faults": [{"kind": "sequence"}]}, r"fault\.faults\[0\]\.kind=sequence"),
        ({"kind": "sequence", "faults": {"kind": "nan"}}, r"fault\.faults=.*must be a list"),
    ],
)
def test_mistakes_name_the_full_key(mapping, message):
    with pytest.raises(ConfigError, match=message):
        parse(mapping)


def test_a_rank_that_does_not_exist_is_refused():
    check_world(NanFault(step=1, rank=None), 1)
    check_world(NanFault(step=1, rank=1), 2)
    with pytest.raises(ConfigError, match=r"fault\.rank=1: there are only 1"):
        check_world(NanFault(step=1, rank=1), 1)
    with pytest.raises(ConfigError, match=r"fault\.faults\[1\]\.rank=2"):
        check_world(FaultSequence(faults=(NoFault(), KillRank(step=1, rank=2))), 2)


def test_integers_are_accepted_where_numbers_are_due():
    fault = parse({"kind": "lr_overshoot", "step": 5, "window": 3, "factor": 8})
    assert fault == LrOvershoot(step=5, window=3, factor=8.0)
    assert isinstance(fault.factor, float)
