"""T10, BR-35, BR-46: a gap between training and evaluation stops the run early if the policy says so, the best checkpoint
stays, and neither patience nor strikes begin anew at a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import resilient
from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.coordinator.config import GuardConfig
from resilient.errors import StopRequested
from resilient.policies import PolicyConfig, RollbackConfig, SkipConfig
from tests.scenarios.harness import Ear

pytestmark = pytest.mark.timeout(60)

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
EVERY = 4  # steps between evaluations and checkpoints


class Loader:
    """The same batch for ever: the training loss falls steadily."""

    def __iter__(self) -> Any:
        return iter([X] * 200)


def start(
    folder: Path,
    policy: PolicyConfig,
    *,
    steps: int,
    evaluation: Callable[[int], float] | None = None,
    bad: Callable[[int], bool] = lambda attempt: False,
    ear: Ear | None = None,
) -> tuple[Ear, str]:
    """One start of the run, up to `steps` or the stop; it ends like a kill, without a final checkpoint. bad: attempts
    whose loss is NaN."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    ear, stopped = ear or Ear(), ""
    guard = resilient.Guard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        data=Loader(),
        policy=policy,
        run_dir=folder,
        snapshot=SnapshotConfig(every=1, keep=4, trust_after=0),
        checkpoint=CheckpointConfig(every=EVERY, keep=2),
        guard=GuardConfig(nan_probes=0),
        listeners=[ear],
        progress=False,
    )
    with guard:
        try:
            for batch in guard.batches(steps=steps):
                loss = F.mse_loss(model(batch), torch.ones(16, 4))
                guard.backward(loss * torch.nan if bad(guard.counters.attempts + 1) else loss)
                if guard.step() and evaluation is not None and guard.applied % EVERY == 0:
                    guard.evaluated(guard.applied, loss=evaluation(guard.applied))
        except StopRequested as stop:
            stopped = str(stop)
    return ear, stopped


def worsening(step: int) -> float:
    """Best at step 16, then 5 % worse at each evaluation."""
    return 3.0 - 0.02 * step if step <= 16 else 2.68 * 1.05 ** ((step - 16) / EVERY)


STOP = PolicyConfig(on_collapse="stop")


def test_t10_the_run_stops_early_with_the_best_checkpoint_named_and_kept(tmp_path: Path):
    ear, stopped = start(tmp_path / "run", STOP, steps=100, evaluation=worsening)
    assert "early stop: evaluation loss" in stopped
    assert stopped.endswith("best evaluation at step 16 (2.68), checkpoint kept")
    kept = [json.loads(p.read_text()) for p in (tmp_path / "run" / "checkpoints").glob("step-*/manifest.json")]
    assert 16 in {manifest["step"] for manifest in kept}
    last = max(r.step for r in ear.reports)
    assert last < 100
    assert ear.incidents[-1].action == "stop"
    told, untold = start(tmp_path / "told", PolicyConfig(), steps=last + EVERY, evaluation=worsening)
    assert untold == ""  # continue is the default ...
    assert any(kind == "alarm" and f["statistic"] == "collapse" for kind, f in told.events)  # ... and says so


def test_br46_patience_goes_on_over_restarts(tmp_path: Path):
    """A restart at the checkpoint after every evaluation: the stop comes at the same step as without."""
    ear, _ = start(tmp_path / "whole", STOP, steps=100, evaluation=worsening)
    last = max(r.step for r in ear.reports)
    steps, stopped, starts = [], "", 0
    # each start ends two steps behind an evaluation: its value is in the state, its checkpoint on disk
    while not stopped and starts < 30:
        starts += 1
        ear, stopped = start(tmp_path / "run", STOP, steps=starts * EVERY + 2, evaluation=worsening)
        steps += [r.step for r in ear.reports]
    assert starts > 6
    assert "early stop" in stopped
    assert max(steps) == last


class Killed(Exception):
    """The process ends."""


def bad_until(last: int) -> Callable[[int], bool]:
    """Every attempt is bad, and the process ends behind attempt `last`."""

    def bad(attempt: int) -> bool:
        if attempt > last:
            raise Killed
        return True

    return bad


STRIKES = PolicyConfig(
    skip=SkipConfig(max_in_a_row=2, budget=10),
    rollback=RollbackConfig(budget=2, cooldown=0, lr_factor=1.0, clip_factor=1.0, skip_data=False),
)


def test_br46_three_strikes_separated_by_restarts_trigger(tmp_path: Path):
    """Two refusals in a row are skipped, the third rolls back: also when the process ends after each of them."""
    actions = []
    for last in (1, 2, 3):
        ear = Ear()
        with pytest.raises(Killed):
            start(tmp_path / "run", STRIKES, steps=5, bad=bad_until(last), ear=ear)
        actions.append([(i.attempt, i.action) for i in ear.incidents])
    assert actions == [[(1, "skip")], [(2, "skip")], [(3, "rollback")]]
