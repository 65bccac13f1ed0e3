"""nan_in_module: what it refuses. What it does is seen in tests/scenarios/test_nan_origin.py (T6)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from resilient import faults
from resilient.errors import ConfigError
from resilient.faults.engine import ModuleFault
from resilient.train.model import GPT, ModelConfig


def test_a_module_that_the_model_does_not_have_is_named_with_the_nearest():
    model = GPT(ModelConfig(width=16, layers=2, heads=2, hidden=32))
    engine = SimpleNamespace(
        name="bare", module=model, device=torch.device("cpu"), per_micro_step=False, layers=None, close=lambda: None
    )
    fault = faults.parse({"kind": "nan_in_module", "step": 3, "module": "blocks.1.mlp.dwn"})
    assert isinstance(fault, faults.NanInModule)
    with pytest.raises(ConfigError, match=r"fault\.module=blocks\.1\.mlp\.dwn: .* did you mean blocks\.1\.mlp\.down\?"):
        ModuleFault(engine, lambda: 0, fault, lambda engine, batch: None, position=0)  # type: ignore[arg-type]
    assert not any(part._forward_hooks for part in model.modules())


def test_a_module_makes_no_bad_loss():
    with pytest.raises(ConfigError, match=r"fault\.place=loss"):
        faults.parse({"kind": "nan_in_module", "step": 3, "module": "head", "place": "loss"})
