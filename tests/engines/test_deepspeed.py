"""DeepSpeed ZeRO 0-3 in fp32, bf16 and fp16: the shared contract, and what only DeepSpeed has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from resilient.engines.base import EngineConfig
from resilient.engines.deepspeed import DeepSpeedEngine, build
from tests.engines import contract
from tests.engines.models import BATCH, Setup, build_model, build_optimizer, build_scheduler, loss_of
from tests.ranks import run_ranks


@dataclass(frozen=True)
class DeepSpeedAdapter:
    """One ZeRO stage under the contract."""

    stage: int
    precisions: tuple[str, ...] = ("fp32",)
    extra: Any = None
    bookkeeping: tuple[str, ...] = ("skipped_steps", "micro_steps")

    @property
    def name(self) -> str:
        return f"deepspeed zero {self.stage}"

    def make(self, setup: Setup, rank: int, world: int) -> DeepSpeedEngine:
        settings: dict[str, Any] = {"zero_optimization": {"stage3_param_persistence_threshold": 32}}
        config = EngineConfig(
            name="deepspeed",
            zero_stage=self.stage,
            precision=setup.precision,
            bucket_mb=setup.bucket_mb,
            initial_loss_scale_power=8,
            deepspeed={**settings, **(self.extra or {})},
        )
        return build(
            config,
            build_model(setup),
            make_optimizer=lambda module: build_optimizer(module, setup),
            make_scheduler=lambda optimizer: build_scheduler(optimizer, setup),
            clip=setup.clip or 0.0,
            accumulation=setup.accumulation,
            micro_batch=BATCH,
            device=torch.device("cpu"),
        )

    def full_parameters(self, engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        masters = {m.label: m.tensor for m in engine._stage.masters()}
        named = dict(engine.module.named_parameters())
        if named.keys() <= masters.keys():  # ZeRO 0: the masters carry the parameters' names
            return {name: masters[name].detach().float().clone() for name in named}
        return {name: safe_get_full_fp32_param(p).detach().clone() for name, p in named.items()}

    def plain_step(self, engine: DeepSpeedEngine, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(engine.engine(tokens), targets)
        engine.engine.backward(loss)
        engine.engine.step()
        return float(loss.detach())


STAGES = (0, 1, 2, 3)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("stage", STAGES)
def test_contract(stage: int) -> None:
    """The shared contract in fp32 and bf16 (BR-09, 10, 18, 41, 44, 45)."""
    run_ranks(contract.run, 2, DeepSpeedAdapter(stage, ("fp32", "bf16")), contract.ALL, timeout=140)
