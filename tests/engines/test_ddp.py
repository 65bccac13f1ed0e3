"""DDP against the contract, and what only DDP has: its hook, its default to compare with, a bare module."""

from __future__ import annotations

import io
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from resilient.engines.base import Counters, Engine
from resilient.engines.ddp import DDPEngine
from resilient.errors import CheckpointError, ConfigError
from resilient.signals import Knobs
from tests.engines import contract
from tests.engines.models import Setup, batch, build_model, build_optimizer, build_scheduler, loss_of
from tests.ranks import run_pooled, run_ranks


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
    run_pooled(contract.run, 2, DDPAdapter(), contract.ALL, timeout=170)


# --- what only DDP has ------------------------------------------------------------------------------------------

SETUP = Setup(accumulation=2)


def without_a_guard(setup: Setup, indices: range, rank: int, *, first: int | None = None) -> dict[str, torch.Tensor]:
    """The textbook DDP loop on the same data: no hook, no engine. first: a window whose gradient is thrown away."""
    module = build_model(setup)
    model = DistributedDataParallel(module, bucket_cap_mb=setup.bucket_mb)
    optimizer = build_optimizer(module, setup)
    scheduler = build_scheduler(optimizer, setup)
    for index in ([first] if first is not None else []) + list(indices):
        for micro in range(setup.accumulation):
            tokens, targets = batch(index, micro, rank)
            with nullcontext() if micro == setup.accumulation - 1 else model.no_sync():
                (loss_of(model(tokens), targets) / setup.accumulation).backward()
        if index != first:
            optimizer.step()
            assert scheduler is not None
            scheduler.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def compare_with_plain_ddp(rank: int, world: int) -> None:
    """Two ranks: bit for bit. With more, DDP's own first backward rounds differently from its later ones; ours does
    not, so the plain run must have its first one behind it to agree."""
    engine = DDPAdapter().make(SETUP, rank, world)
    contract.train(engine, SETUP, range(4), rank)
    plain = without_a_guard(SETUP, range(4), rank, first=None if world == 2 else 99)
    contract.assert_same(plain, DDPAdapter().full_parameters(engine), f"plain DDP, {world} ranks")


def two_ranks(rank: int, world: int) -> None:
    compare_with_plain_ddp(rank, world)
    refuses_a_registered_hook(rank, world)
    runs_the_users_hook(rank, world)
    takes_over_a_closed_engine(rank, world)
    refuses_what_cannot_work(rank, world)
    variant = Variant("ddp with gradients as bucket views", gradient_as_bucket_view=True)
    contract.run(rank, world, variant, ["check_true_skip", "check_replay", "check_fresh_engine", "check_close"])


def three_ranks(rank: int, world: int) -> None:
    compare_with_plain_ddp(rank, world)
    adapter = DDPAdapter(precisions=("fp32",))
    contract.run(rank, world, adapter, ["check_restore_to_start", "check_fresh_engine"])


@dataclass(frozen=True)
class Variant(DDPAdapter):
    name: str = "ddp"
    precisions: tuple[str, ...] = ("fp32",)
    gradient_as_bucket_view: bool = False

    def make(self, setup: Setup, rank: int, world: int) -> Engine:
        module = build_model(setup)
        optimizer = build_optimizer(module, setup)
        model = DistributedDataParallel(
            module, bucket_cap_mb=setup.bucket_mb, gradient_as_bucket_view=self.gradient_as_bucket_view
        )
        return DDPEngine(model, optimizer, build_scheduler(optimizer, setup), clip=setup.clip)


def refuses_a_registered_hook(rank: int, world: int) -> None:
    model = DistributedDataParallel(build_model(SETUP))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ConfigError, match=r"allreduce_hook.*pass it as DDPEngine\(\.\.\., comm_hook="):
        DDPEngine(model, build_optimizer(model.module, SETUP))
    model = DistributedDataParallel(build_model(SETUP))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(ConfigError, match="built-in communication hook"):
        DDPEngine(model, build_optimizer(model.module, SETUP))


def doubling_hook(calls: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    calls.append(bucket.index())
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket).then(lambda f: f.value() * 2)


def runs_the_users_hook(rank: int, world: int) -> None:
    """The user's hook does the reduction (here: twice the mean); local norms are taken before it."""
    setup, calls = Setup(), []
    module = build_model(setup)
    model = DistributedDataParallel(module, bucket_cap_mb=setup.bucket_mb)
    engine = DDPEngine(model, build_optimizer(module, setup), comm_hook=(calls, doubling_hook))
    start = DDPAdapter().full_parameters(engine)
    taps, _ = contract.window(engine, setup, 0, rank)
    local, whole = contract.reference_norms(setup, start, 0, rank, world, False)
    assert calls
    assert math.sqrt(float(taps.local_sq)) == pytest.approx(local, rel=1e-5)
    assert contract.grad_norm(taps) == pytest.approx(2 * whole, rel=1e-5)


def takes_over_a_closed_engine(rank: int, world: int) -> None:
    """One engine per model at a time; after close() the model reduces by itself and a new engine can have it."""
    engine = DDPAdapter().make(SETUP, rank, world)
    assert isinstance(engine, DDPEngine)
    contract.train(engine, SETUP, [0], rank)
    with pytest.raises(ConfigError, match="close"):
        DDPEngine(engine.model, engine.optimizer)
    engine.close()
    second = DDPEngine(engine.model, engine.optimizer, engine.scheduler)
    contract.train(second, SETUP, range(1, 4), rank)
    plain = without_a_guard(SETUP, range(4), rank)
    contract.assert_same(plain, DDPAdapter().full_parameters(second), "a second engine on the same model")
    assert contract.window(second, SETUP, 5, rank)[0].buckets > 1
    assert (second.counters().steps, second.counters().schedule) == (3, 3)


def refuses_what_cannot_work(rank: int, world: int) -> None:
    module = build_model(SETUP)
    optimizer = build_optimizer(module, SETUP)
    with pytest.raises(ConfigError, match="nothing would reduce its gradients"):
        DDPEngine(module, optimizer)
    with pytest.raises(ConfigError, match="loss scaler"):
        DDPEngine(DistributedDataParallel(module), optimizer, precision="fp16")


@pytest.mark.timeout(180)
def test_ddp_itself_on_two_ranks() -> None:
    """Same bits as plain DDP; hooks refused, run and taken over; gradients as bucket views."""
    run_pooled(two_ranks, 2, timeout=170)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_three_ranks_replay_from_the_first_step() -> None:
    """A ring's order of addition must not depend on whether a backward is the process's first (see ddp_first.py)."""
    run_ranks(three_ranks, 3, timeout=170)


# --- the optimizer side, one process ----------------------------------------------------------------------------


def bare(setup: Setup = SETUP, **wanted: Any) -> DDPEngine:
    """An engine around a bare module; wanted: a `schedule` factory in place of the default one."""
    module = build_model(setup)
    optimizer = build_optimizer(module, setup)
    schedule = wanted.get("schedule", lambda o: build_scheduler(o, setup))
    return DDPEngine(module, optimizer, schedule(optimizer), clip=setup.clip)


class Factor:
    """A schedule as an object: LambdaLR puts its attributes into its state."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, step: int) -> float:
        return self.scale / (step + 1)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.LambdaLR(o, Factor()),
        lambda o: lr_scheduler.MultiStepLR(o, [2, 3]),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)], [3]
        ),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]),
    ],
    ids=["lambda", "multistep", "onecycle", "restarts", "sequential", "chained"],
)
@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step.*")
def test_schedules_replay_in_a_fresh_process(schedule: Any) -> None:
    """BR-09, BR-10: LR, momentum cycling and position continue exactly, through weights_only loading, and agree with
    the number of applied steps."""
    engine, fresh = bare(schedule=schedule), bare(schedule=schedule)
    contract.train(engine, SETUP, range(2), 0)
    file = io.BytesIO()
    torch.save(engine.capture(), file)
    contract.train(engine, SETUP, range(2, 6), 0)
    file.seek(0)
    fresh.restore(torch.load(file, weights_only=True))
    assert fresh.counters() == Counters(2, 0, 2)
    contract.train(fresh, SETUP, range(2, 6), 0)
    contract.assert_same(contract.leaves(engine.capture()), contract.leaves(fresh.capture()), "the resumed run")
    assert fresh.counters() == Counters(6, 0, 6)


def test_a_schedule_that_has_run_before_counts_from_there() -> None:
    """Training that went on unguarded for a while: the engine's schedule position starts at 0 with its step count."""
    module = build_model(SETUP)
    optimizer = build_optimizer(module, SETUP)
    schedule = build_scheduler(optimizer, SETUP)
    assert schedule is not None
    optimizer.step()
    schedule.step()
    engine = DDPEngine(module, optimizer, schedule)
    contract.train(engine, SETUP, range(2), 0)
    assert engine.counters() == Counters(2, 0, 2)
    state = engine.capture()
    contract.train(engine, SETUP, [2], 0)
    engine.restore(state)
    assert engine.counters() == Counters(2, 0, 2)


def test_a_refused_state_says_what_differs() -> None:
    engine = bare(Setup(groups=True))
    cases = {
        r"parameter embedding.weight: shape \(23, 20\) torch.float32 in the state, \(23, 16\)": bare(Setup(width=20)),
        r"optimizer: SGD in the state, AdamW here": bare(Setup(groups=True, optimizer="sgd")),
        r"LR schedule: none in the state, ExponentialLR here": bare(Setup(groups=True, scheduled=False)),
        r"parameter groups: 1 in the state, 2 here": bare(Setup()),
        r"parameter spare.weight: only in the state": bare(Setup(groups=True, unused=True)),
        r"parameter head.weight: not in the state": bare(Setup(groups=True, tied=True)),
        r"LR schedule: CosineAnnealingLR in the state, ExponentialLR here": bare(
            Setup(groups=True), schedule=lambda o: lr_scheduler.CosineAnnealingLR(o, 9)
        ),
    }
    for message, other in cases.items():
        with pytest.raises(CheckpointError, match=message):
            engine.restore(other.capture())
    with pytest.raises(CheckpointError, match="part 'optimizer' is missing"):
        engine.restore({key: value for key, value in engine.capture().items() if key != "optimizer"})


def test_parameter_groups_are_told_apart_by_name() -> None:
    """Groups of the same sizes with other parameters in them would load without a complaint, and step the wrong ones."""

    def grouped(*groups: tuple[str, ...]) -> DDPEngine:
        module = build_model(SETUP)
        named = dict(module.named_parameters())
        members = [[named[name] for name in group] for group in groups]
        rest = [p for name, p in named.items() if not any(name in group for group in groups)]
        return DDPEngine(module, torch.optim.AdamW([{"params": m} for m in (*members, rest)]))

    weight, bias = "blocks.0.norm.weight", "blocks.0.norm.bias"
    engine = grouped((weight,), (bias,))
    before = contract.leaves(engine.capture())
    with pytest.raises(CheckpointError) as caught:
        engine.restore(grouped((bias,), (weight,)).capture())
    for words in (
        f"parameter group 0: {bias} only in the state; {weight} only here",
        f"parameter group 1: {weight} only in the state; {bias} only here",
    ):
        assert words in str(caught.value), str(caught.value)
    with pytest.raises(CheckpointError, match="parameter group 0: the same parameters in another order"):
        grouped((weight, bias)).restore(grouped((bias, weight)).capture())
    contract.assert_same(before, contract.leaves(engine.capture()), "refused states")


def test_parameters_outside_the_groups_and_frozen_ones() -> None:
    """They are captured; a gradient nobody steps on still counts in the norm and does not pile up."""
    module = build_model(SETUP)
    module.embedding.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(module.blocks.parameters(), lr=1e-2)
    engine = DDPEngine(module, optimizer)
    norms = []
    for _ in range(2):
        taps, _ = contract.window(engine, SETUP, 0, 0)
        norms.append(float(taps.reduced_sq_share))
        engine.skip()
    assert norms[0] == norms[1]
    state = engine.capture()
    assert set(state["params"]) == {name for name, _ in module.named_parameters()}
    contract.train(engine, SETUP, range(2), 0)
    engine.restore(state)
    contract.assert_same(contract.leaves(state), contract.leaves(engine.capture()), "restored")


def test_buffers_that_are_not_persistent_may_change_shape() -> None:
    """A cache that grew since the capture is left alone; the rest is restored."""
    engine, grown = bare(), bare()
    for module, length in ((engine.module, 4), (grown.module, 8)):
        module.register_buffer("cache", torch.full((length,), float(length)), persistent=False)
    engine.restore(grown.capture())
    assert engine.module.cache.tolist() == [4.0] * 4
    engine.module.cache.fill_(7)
    state = engine.capture()
    engine.module.cache.fill_(9)
    engine.restore(state)
    assert engine.module.cache.tolist() == [7.0] * 4


def test_objects_that_do_not_fit_together_are_refused() -> None:
    module, other = build_model(SETUP), build_model(SETUP)
    optimizer, foreign = build_optimizer(module, SETUP), build_optimizer(other, SETUP)
    with pytest.raises(ConfigError, match="not the model's"):
        DDPEngine(module, foreign)
    with pytest.raises(ConfigError, match="another optimizer"):
        DDPEngine(module, optimizer, build_scheduler(foreign, SETUP))
    with pytest.raises(ConfigError, match="metric"):
        DDPEngine(module, optimizer, lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(ConfigError, match="clip=0"):
        DDPEngine(module, optimizer, clip=0.0)
    engine = DDPEngine(module, torch.optim.SGD(module.parameters(), lr=0.1))
    contract.window(engine, SETUP, 0, 0)
    before = contract.leaves(engine.capture())
    with pytest.raises(ConfigError, match="SGD has none"):
        engine.apply(1.0, Knobs(betas=(0.9, 0.9)))
    contract.assert_same(before, contract.leaves(engine.capture()), "a refused knob")
