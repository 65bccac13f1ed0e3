"""DDP against the contract, and what only DDP has: its hook, its default to compare with, a bare module."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilient.engines.base import Engine
from resilient.engines.ddp import DDPEngine
from tests.engines import contract
from tests.engines.models import Setup, build_model, build_optimizer, build_scheduler, loss_of
from tests.ranks import run_ranks


@dataclass(frozen=True)
class DDPAdapter:
    name: str = "ddp"
    precisions: tuple[str, ...] = ("fp32", "bf16")
    bookkeeping: tuple[str, ...] = ("skipped",)

    def make(self, setup: Setup, rank: int, world: int) -> Engine:
        module = build_model(setup)
        optimizer = build_optimizer(module, setup)
        scheduler = build_scheduler(optimizer, setup)
        model: nn.Module = module
        if world > 1:
            model = DistributedDataParallel(module, bucket_cap_mb=setup.bucket_mb, find_unused_parameters=setup.unused)
        return DDPEngine(model, optimizer, scheduler, clip=setup.clip, precision=setup.precision)

    def full_parameters(self, engine: Engine) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    def plain_step(self, engine: Engine, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        assert isinstance(engine, DDPEngine)
        loss = loss_of(engine.model(tokens), targets)
        loss.backward()
        engine.optimizer.step()
        assert engine.scheduler is not None
        engine.scheduler.step()
        engine.optimizer.zero_grad()
        return float(loss.detach())


@pytest.mark.timeout(180)
def test_contract() -> None:
    run_ranks(contract.run, 2, DDPAdapter(), contract.ALL)
