"""BR-08: a restart that lacks something of the state shows in the steps that it trains again, which are on record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import resilient
from resilient.checkpoint.config import CheckpointConfig
from tests.scenarios.harness import Ear, seed
from tests.scenarios.test_own_loop import batches, build, guarded, run_loop

Damage = Callable[[nn.Module, torch.optim.Optimizer, Any], None]


def begun(folder: Path) -> tuple[resilient.Guard, nn.Module, torch.optim.Optimizer, Any, Ear]:
    model, optimizer, scheduler = build(1)
    guard, ear = guarded(
        model,
        optimizer,
        scheduler,
        batches(16, 0),
        run_dir=folder,
        checkpoint=CheckpointConfig(every=4, blocking=True),
    )
    return guard, model, optimizer, scheduler, ear


def restarted(folder: Path, died_at: int, damage: Damage | None = None) -> Ear:
    """A run that ends without a word after `died_at` steps, and its next start. damage: done once the state was loaded."""
    guard, model, *_ = begun(folder)
    run_loop(guard, model, steps=died_at)
    guard.close()
    guard, model, optimizer, scheduler, ear = begun(folder)
    seed(99)
    guard.start()
    if damage is not None:
        damage(model, optimizer, scheduler)
    run_loop(guard, model, steps=10)
    guard.finish("done")
    guard.close()
    return ear


def of(ear: Ear, kind: str) -> list[dict[str, Any]]:
    return [fields for found, fields in ear.events if found == kind]


@pytest.mark.parametrize(("died_at", "again"), [(7, [5, 6]), (5, [5]), (4, [])])
def test_steps_that_are_trained_again_are_what_they_were(tmp_path: Path, died_at: int, again: list[int]):
    ear = restarted(tmp_path / "run", died_at)
    assert [fields["step"] for fields in of(ear, "resume")] == [4]
    assert of(ear, "replay") == ([{"steps": again, "exact": True}] if again else [])
    assert not of(ear, "warning")


def other_weights(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)


def old_masters(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """The step goes somewhere else, as from moments or masters that were left behind."""
    for state in optimizer.state.values():
        state["exp_avg"].neg_().mul_(30)


@pytest.mark.parametrize(("damage", "step", "lacks"), [(other_weights, 5, "weights"), (old_masters, 6, "optimizer")])
def test_br08_a_load_that_lacks_something_is_told_within_two_steps(
    tmp_path: Path, damage: Damage, step: int, lacks: str
):
    ear = restarted(tmp_path / "run", 7, damage)
    assert of(ear, "replay") == [{"steps": [5, 6], "exact": False}]
    (warning,) = of(ear, "warning")
    assert f"step {step} is not what it was before the restart" in warning["message"] and lacks in warning["message"]


def test_another_lr_is_no_comparison(tmp_path: Path):
    def slower(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        scheduler.base_lrs = [lr / 10 for lr in scheduler.base_lrs]

    ear = restarted(tmp_path / "run", 7, slower)
    assert of(ear, "replay") == [{"steps": [5], "exact": True}] and not of(ear, "warning")
