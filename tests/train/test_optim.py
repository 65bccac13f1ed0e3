"""Decay groups, the cosine schedule, and its state."""

from __future__ import annotations

import io

import pytest
import torch

from resilient.errors import ConfigError
from resilient.train.model import GPT, ModelConfig
from resilient.train.optim import OptimConfig, make_optimizer, make_scheduler

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_decay_and_norms_and_embeddings_do_not(tied):
    model = GPT(ModelConfig(width=32, layers=2, heads=2, hidden=48, tie_head=tied))
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.3))
    names = {id(p): n for n, p in model.named_parameters()}
    decay, rest = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert decay | rest == set(names.values())
    assert not decay & rest
    assert rest == {n for n in names.values() if "norm" in n or "embed" in n}
    assert ("head.weight" in decay) is not tied


def test_schedule_warms_up_peaks_and_ends_at_the_floor():
    model = torch.nn.Linear(4, 4)
    config = OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    optimizer = make_optimizer(model, config)
    scheduler = make_scheduler(optimizer, config, steps=50)
    seen = []
    for _ in range(60):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen[0] == pytest.approx(1 / 11)
    assert seen[:11] == sorted(seen[:11])
    assert seen[10] == pytest.approx(1.0)
    assert seen[30] == pytest.approx(0.55)  # half way down the cosine
    assert seen[50:] == pytest.approx([0.1] * 10)


def test_schedule_state_survives_a_strict_load():
    model = torch.nn.Linear(4, 4)
    config = OptimConfig(warmup_steps=3)
    optimizer = make_optimizer(model, config)
    scheduler = make_scheduler(optimizer, config, steps=20)
    for _ in range(7):
        optimizer.step()
        scheduler.step()
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = make_optimizer(model, config)
    again = make_scheduler(other, config, steps=20)
    other.load_state_dict(state["optimizer"])
    again.load_state_dict(state["scheduler"])
    for _ in range(5):
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        for opt, sch in ((optimizer, scheduler), (other, again)):
            opt.step()
            sch.step()


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"lr": 0.0}, "optim.lr"), ({"clip": -1.0}, "optim.clip"), ({"betas": (0.9, 1.0)}, "optim.betas")],
)
def test_bad_values_name_the_key(changes, key):
    with pytest.raises(ConfigError, match=key):
        OptimConfig(**changes)
