"""nan_in_module: what it refuses. What it does is seen in tests/scenarios/test_nan_origin.py (T6)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resilient import faults
from resilient.errors import ConfigError
from resilient.faults.engine import ModuleFault
from resilient.train.model import GPT, ModelConfig


def bare(model: GPT) -> Any:
    """As much of an engine as the fault looks at."""
    return SimpleNamespace(
        name="bare",
        module=model,
        device=torch.device("cpu"),
        per_micro_step=False,
        per_rank=(),
        layers=None,
        close=lambda: None,
    )


def test_a_module_that_the_model_does_not_have_is_named_with_the_nearest():
    model = GPT(ModelConfig(width=16, layers=2, heads=2, hidden=32))
    engine = bare(model)
    fault = faults.parse({"kind": "nan_in_module", "step": 3, "module": "blocks.1.mlp.dwn"})
    assert isinstance(fault, faults.NanInModule)
    with pytest.raises(ConfigError, match=r"fault\.module=blocks\.1\.mlp\.dwn: .* did you mean blocks\.1\.mlp\.down\?"):
        ModuleFault(engine, lambda: 0, fault, lambda engine, batch: None, position=0, sample=None)
    assert not any(part._forward_hooks for part in model.modules())


def test_a_module_makes_no_bad_loss():
    with pytest.raises(ConfigError, match=r"fault\.place=loss"):
        faults.parse({"kind": "nan_in_module", "step": 3, "module": "head", "place": "loss"})


def test_the_nan_follows_the_batch_to_whichever_rank_runs_it() -> None:
    """BR-37: a peer that runs the batch again gets the NaN as well; the other rank's part of that position is clean."""
    model = GPT(ModelConfig(width=16, layers=2, heads=2, hidden=32))
    engine = bare(model)
    fault = faults.NanInModule(step=3, module="blocks.0")

    def objective(engine: Any, batch: Any) -> Any:
        return bool(model(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all())

    hit = ModuleFault(engine, lambda: 0, fault, objective, position=8, sample=5)
    for position, ids, finite in ((8, [5, 6], False), (8, [7, 9], True), (12, [5, 1], True), (8, [5, 6], False)):
        batch = {"position": position, "ids": torch.tensor(ids)}
        assert hit.objective(engine, batch) is finite  # type: ignore[arg-type]
    hit.close()
