"""FSDP2 against the contract, and what only FSDP2 has: padding, pre-division, HSDP, ignored parameters."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from resilient.engines.base import Engine
from resilient.engines.fsdp2 import FSDP2Engine
from tests.engines import contract
from tests.engines.models import Setup, build_model, build_optimizer, build_scheduler, loss_of
from tests.ranks import run_ranks


@dataclass(frozen=True)
class FSDP2Adapter:
    name: str = "fsdp2"
    precisions: tuple[str, ...] = ("fp32", "bf16")
    bookkeeping: tuple[str, ...] = ("skipped",)

    def make(self, setup: Setup, rank: int, world: int) -> Engine:
        module = build_model(setup)
        mesh = init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy()
        if setup.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in module.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        model = fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer = build_optimizer(model, setup)
        return FSDP2Engine(model, optimizer, build_scheduler(optimizer, setup), clip=setup.clip)

    def full_parameters(self, engine: Engine) -> dict[str, torch.Tensor]:
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in engine.module.named_parameters()
        }

    def plain_step(self, engine: Engine, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        assert isinstance(engine, FSDP2Engine)
        loss = loss_of(engine.model(tokens), targets)
        loss.backward()
        engine.optimizer.step()
        assert engine.scheduler is not None
        engine.scheduler.step()
        engine.optimizer.zero_grad()
        return float(loss.detach())


@pytest.mark.timeout(180)
def test_contract() -> None:
    run_ranks(contract.run, 2, FSDP2Adapter(), contract.ALL)
