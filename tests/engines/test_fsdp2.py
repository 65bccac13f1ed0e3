"""FSDP2 against the contract, and what only FSDP2 has: padding, division before reduction, HSDP, unsharded parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor

from resilient.engines.base import Engine
from resilient.engines.fsdp2 import FSDP2Engine
from resilient.errors import CheckpointError, ConfigError
from tests.engines import contract
from tests.engines.models import Setup, batch, build_model, build_optimizer, build_scheduler, loss_of
from tests.ranks import run_pooled, run_ranks


@dataclass(frozen=True)
class FSDP2Adapter:
    """replicas: HSDP, that many copies of the shards. nested: shard the blocks, too, not only the whole."""

    name: str = "fsdp2"
    precisions: tuple[str, ...] = ("fp32", "bf16")
    bookkeeping: tuple[str, ...] = ("skipped",)
    replicas: int = 1

    def make(self, setup: Setup, rank: int, world: int) -> Engine:
        mesh = init_device_mesh("cpu", (world,))
        if self.replicas > 1:
            shape = (self.replicas, world // self.replicas)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy()
        if setup.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = build_model(setup)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = build_optimizer(model, setup)
        return FSDP2Engine(model, optimizer, build_scheduler(optimizer, setup), clip=setup.clip)

    def full_parameters(self, engine: Engine) -> dict[str, torch.Tensor]:
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in engine.module.named_parameters()
        }

    def plain_step(self, engine: Engine, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        assert isinstance(engine, FSDP2Engine)
        loss = loss_of(engine.module(tokens), targets)
        loss.backward()
        engine.optimizer.step()
        assert engine.scheduler is not None
        engine.scheduler.step()
        engine.optimizer.zero_grad()
        return float(loss.detach())


@pytest.mark.timeout(180)
def test_contract() -> None:
    run_pooled(contract.run, 2, FSDP2Adapter(), contract.ALL, timeout=170)


# --- what only FSDP2 has ----------------------------------------------------------------------------------------

SETUP = Setup(accumulation=2)


def units(model: nn.Module) -> list[FSDPModule]:
    return [unit for unit in model.modules() if isinstance(unit, FSDPModule)]


def same_as_plain_fsdp2(rank: int, world: int) -> None:
    """The engine trains the same bits as the textbook loop; close() gives the default reduce-scatter back."""
    adapter = FSDP2Adapter()
    engine = adapter.make(SETUP, rank, world)
    contract.train(engine, SETUP, range(3), rank)
    model = build_model(SETUP)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = build_optimizer(model, SETUP)
    scheduler = build_scheduler(optimizer, SETUP)
    assert scheduler is not None
    for index in range(3):
        for micro in range(SETUP.accumulation):
            tokens, targets = batch(index, micro, rank)
            model.set_requires_gradient_sync(micro == SETUP.accumulation - 1)  # type: ignore[attr-defined]
            (loss_of(model(tokens), targets) / SETUP.accumulation).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    plain = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    contract.assert_same(plain, adapter.full_parameters(engine), "plain FSDP2")

    with pytest.raises(ConfigError, match="close"):
        FSDP2Engine(engine.module, engine.optimizer)  # type: ignore[attr-defined]
    engine.close()
    comms = [g._reduce_scatter_comm for u in units(engine.module) for g in u._get_fsdp_state()._fsdp_param_groups]
    assert [type(comm) for comm in comms] == [DefaultReduceScatter] * 3
    second = FSDP2Engine(engine.module, engine.optimizer)  # type: ignore[attr-defined]
    assert contract.window(second, SETUP, 5, rank)[0].buckets == 3


def predivided_gradients(rank: int, world: int) -> None:
    """FSDP2 halves float64 gradients before reducing them; the local norm must not show it. `factor` also divides
    what is reduced, by 4 in place of 2."""
    for factor in (None, 4.0):
        setup = Setup()
        whole = {name: p.detach().clone() for name, p in build_model(setup).named_parameters()}
        model = build_model(setup).double()
        fully_shard(model)
        if factor is not None:
            model.set_gradient_divide_factor(factor)  # type: ignore[attr-defined]
        engine = FSDP2Engine(model, build_optimizer(model, setup))
        taps, _ = contract.window(engine, setup, 0, rank)
        local, reduced = contract.reference_norms(setup, whole, 0, rank, world, False)
        assert math.sqrt(float(taps.local_sq)) == pytest.approx(local, rel=1e-6)  # rows are read in fp32
        assert contract.grad_norm(taps) == pytest.approx(
            reduced * (1.0 if factor is None else world / factor), rel=1e-9
        )


def unsharded_parameters(rank: int, world: int) -> None:
    """A parameter left to the user (`ignored_params`) counts 1/world on each rank, and is captured and restored."""
    setup = Setup()
    model = build_model(setup)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, ignored_params={model.head.weight})
    model.head.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(world)))
    engine = FSDP2Engine(model, build_optimizer(model, setup))
    state = engine.capture()
    taps, _ = contract.window(engine, setup, 0, rank)
    _, reduced = contract.reference_norms(setup, whole, 0, rank, world, False)
    assert contract.grad_norm(taps) == pytest.approx(reduced, rel=1e-5)
    engine.apply(contract.grad_norm(taps), contract.NEUTRAL)
    engine.restore(state)
    contract.assert_same(contract.leaves(state), contract.leaves(engine.capture()), "with an unsharded parameter")


def interrupted_passes(rank: int, world: int) -> None:
    """A restore after a forward without backward, and after an exception inside one, starts clean."""
    setup = Setup()
    engine = FSDP2Adapter().make(setup, rank, world)
    contract.train(engine, setup, [0], rank)
    state = engine.capture()
    losses = contract.train(engine, setup, [1, 2], rank)
    engine.restore(state)
    engine.begin_micro_step(0, 1)
    engine(batch(8, 0, rank)[0])
    engine.restore(state)
    assert contract.train(engine, setup, [1, 2], rank) == losses
    handle = engine.module.blocks[1].up.register_forward_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        contract.window(engine, setup, 8, rank)
    handle.remove()
    engine.restore(state)
    assert contract.train(engine, setup, [1, 2], rank) == losses


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def refuses_what_cannot_work(rank: int, world: int) -> None:
    setup = Setup()
    model = build_model(setup)
    early = build_optimizer(model, setup)
    for block in model.blocks:
        fully_shard(block)
    with pytest.raises(ConfigError, match="fully_shard was not applied to TinyLM itself"):
        FSDP2Engine(model, early)
    fully_shard(model)
    with pytest.raises(ConfigError, match="after wrapping or sharding"):
        FSDP2Engine(model, early)
    plain = build_model(setup)
    engine = FSDP2Adapter().make(setup, rank, world)
    state = engine.capture()
    state["params"] = {name: p.detach() for name, p in plain.named_parameters()}
    with pytest.raises(CheckpointError, match=r"shape \(23, 16\) torch.float32 in the state, \(1[12], 16\)"):
        engine.restore(state)


def two_ranks(rank: int, world: int) -> None:
    same_as_plain_fsdp2(rank, world)
    predivided_gradients(rank, world)
    unsharded_parameters(rank, world)
    interrupted_passes(rank, world)
    refuses_what_cannot_work(rank, world)


def replicas_of_shards(rank: int, world: int) -> None:
    adapter = FSDP2Adapter(name="HSDP 2x2", precisions=("fp32",), replicas=2)
    checks = ["check_norms", "check_reduction", "check_replicas", "check_unmeasured_apply", "check_fresh_engine"]
    contract.run(rank, world, adapter, checks)
    engine = adapter.make(SETUP, rank, world)
    assert engine.replicas()["parameters"] == engine.replicas()["optimizer"] == ((0, 2), (1, 3))
    contract.train(engine, SETUP, range(2), rank)
    plan = engine.check_plan()
    assert plan is not None
    assert plan.receivers == ((0, 1), (2, 3))
    model = build_model(SETUP)
    fully_shard(model, mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(ConfigError, match="replicates but does not shard"):
        FSDP2Engine(model, build_optimizer(model, SETUP))


@pytest.mark.timeout(180)
def test_fsdp2_itself_on_two_ranks() -> None:
    run_pooled(two_ranks, 2, timeout=170)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_hybrid_sharding_on_four_ranks() -> None:
    """BR-45: replicas of shards are counted once; capture and restore are local to each."""
    run_ranks(replicas_of_shards, 4, timeout=170)


@pytest.mark.timeout(120)
def test_one_rank() -> None:
    """FSDP2 calls no reduce-scatter then; the norms, the skip, the replay and the end hold all the same."""
    checks = ["check_norms", "check_true_skip", "check_fresh_engine", "check_unmeasured_apply", "check_close"]
    run_ranks(contract.run, 1, FSDP2Adapter(precisions=("fp32",)), checks)
