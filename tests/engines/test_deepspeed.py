"""DeepSpeed ZeRO 0-3 in fp32, bf16 and fp16: the shared contract, and what only DeepSpeed has.

Few spawns with many checks each: starting DeepSpeed takes longer than the checks.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from resilient.checkpoint.rng import capture_rng, restore_rng
from resilient.engines.base import EngineConfig
from resilient.engines.deepspeed import DeepSpeedEngine, build
from resilient.engines.deepspeed.master_check import mismatched_weights
from resilient.engines.deepspeed.setup import compose, load_deepspeed
from resilient.errors import CheckpointError, ConfigError
from resilient.signals import Knobs
from tests.engines import contract
from tests.engines.contract import NEUTRAL, assert_same, grad_norm, leaves, train, window
from tests.engines.models import BATCH, VOCAB, Setup, batch, build_model, build_optimizer, build_scheduler, loss_of
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DeepSpeedAdapter:
    """One ZeRO stage under the contract. settings: merged into what deepspeed.initialize gets."""

    stage: int
    precisions: tuple[str, ...] = ("fp32",)
    settings: dict[str, Any] = field(default_factory=dict)
    scale_power: int = 8
    bookkeeping: tuple[str, ...] = ("skipped_steps", "micro_steps")

    @property
    def name(self) -> str:
        return f"DeepSpeed ZeRO {self.stage} {self.settings or ''}"

    def make(self, setup: Setup, rank: int, world: int) -> DeepSpeedEngine:
        return self.around(build_model(setup), setup)

    def around(self, module: nn.Module, setup: Setup, **other: Any) -> DeepSpeedEngine:
        zero = {"stage3_param_persistence_threshold": 32}  # vectors stay gathered, matrices do not
        settings = dict(self.settings)
        settings["zero_optimization"] = {**zero, **settings.get("zero_optimization", {})}
        config = EngineConfig(
            name="deepspeed",
            zero_stage=self.stage,
            precision=setup.precision,
            bucket_mb=setup.bucket_mb,
            initial_loss_scale_power=self.scale_power,
            deepspeed=settings,
        )
        how: dict[str, Any] = {
            "make_optimizer": lambda module: build_optimizer(module, setup),
            "make_scheduler": lambda optimizer: build_scheduler(optimizer, setup),
            "clip": setup.clip,
            "accumulation": setup.accumulation,
            "micro_batch": BATCH,
            "device": CPU,
        }
        return build(config, module, **{**how, **other})

    def full_parameters(self, engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        masters = {m.label: m.tensor for m in engine._stage.masters()}
        named = dict(engine.module.named_parameters())
        if named.keys() <= masters.keys():  # ZeRO 0: the masters carry the parameters' names
            return {name: masters[name].detach().float().clone() for name in named}
        if self.stage < 3 and all(p.dtype is torch.float32 for p in named.values()):
            return {
                name: p.detach().clone() for name, p in named.items()
            }  # the call below errs under round_robin_gradients
        return {name: safe_get_full_fp32_param(p).detach().clone() for name, p in named.items()}

    def plain_step(self, engine: DeepSpeedEngine, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(engine.engine(tokens), targets)
        engine.engine.backward(loss)
        engine.engine.step()
        return float(loss.detach())


PRECISIONS = ("fp32", "bf16", "fp16")
COMPUTES_ALIKE = (
    "check_norms",
    "check_true_skip",
    "check_replay",
    "check_fresh_engine",
    "check_weights_are_the_cast",
)


def warm_up() -> None:
    """Before the first engine. DeepSpeed writes parameters into messages that it then does not send: 8 % of these tests."""
    load_deepspeed(CPU, "fp16")
    torch.set_printoptions(threshold=1, edgeitems=1)


def everything(rank: int, world: int, stages: Sequence[int]) -> None:
    warm_up()
    for stage in stages:
        contract.run(rank, world, DeepSpeedAdapter(stage, ("fp32", "bf16")), contract.ALL)
        contract.run(rank, world, DeepSpeedAdapter(stage, ("fp16",)), COMPUTES_ALIKE)
        for precision in PRECISIONS:
            transparent(stage, precision, rank)
            refused_by_deepspeed(stage, precision, rank)
        if stage == 0:
            weights_behind_masters(rank)
        for check in (
            frozen_parameter,
            short_window,
            overflow,
            conditional_parameter,
            two_engines,
            other_schedules,
            foreign_states,
        ):
            check(stage, rank)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 1, 2), marks=pytest.mark.slow)], ids=str)
def test_stages(stages: tuple[int, ...]) -> None:
    """The contract (BR-09, 10, 18, 41, 44, 45) and all checks below, in every precision."""
    run_ranks(everything, 2, stages, timeout=290)


# --- what only DeepSpeed has --------------------------------------------------------------------------------------


def unguarded(engine: Any, setup: Setup, indices: Sequence[int], rank: int) -> None:
    """DeepSpeed's own documented loop: its own accumulation count, its own schedule."""
    for index in indices:
        for micro in range(setup.accumulation):
            tokens, targets = batch(index, micro, rank)
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            engine.step()


def transparent(stage: int, precision: str, rank: int) -> None:
    """C1: a guarded run that nothing happens to equals DeepSpeed's own loop, bit for bit.

    Not under ZeRO 0 in fp16, where deepspeed 0.19.8 divides by a loss scale that it never multiplied with: there the
    guarded gradient is right and the plain one is 2**8 times too small."""
    adapter = DeepSpeedAdapter(stage)
    for accumulation in (1, 4) if precision == "fp32" else (4,):
        setup = Setup(precision=precision, accumulation=accumulation, clip=0.5, groups=True)  # type: ignore[arg-type]
        guarded, plain = adapter.make(setup, rank, 2), adapter.make(setup, rank, 2)
        plain.close()
        train(guarded, setup, [0, 1, 2], rank)
        unguarded(plain.engine, setup, [0, 1, 2], rank)
        a, b = leaves(guarded.capture()), leaves(plain.capture())
        if (stage, precision) == (0, "fp16"):
            moments = [(a[path], b[path]) for path in a if path.endswith("exp_avg")]
            ratio = max(float(x.norm() / y.norm()) for x, y in moments)
            assert ratio > 2**7, f"DeepSpeed scales this loss by itself now (ratio {ratio}): drop HalfStage.scale_loss"
        else:
            assert_same(b, a, f"ZeRO {stage} {precision}, accumulation {accumulation}: guarded against plain")
        guarded.close()


def weights_behind_masters(rank: int) -> None:
    """Why ZeRO 0 in half precision proves nothing before its first step: DeepSpeed moves the masters alone when it is
    built. A step later the weights are their cast."""
    setup = Setup(precision="fp16")
    engine = DeepSpeedAdapter(0).make(setup, rank, 2)
    assert mismatched_weights(engine._stage), "deepspeed leaves its masters alone now: drop Stage.begins_cast"
    train(engine, setup, [0], rank)
    assert mismatched_weights(engine._stage) == []
    engine.close()


def frozen_parameter(stage: int, rank: int) -> None:
    """BR-08: a parameter that is not trained has no masters to be the cast of; one beside it has."""
    setup = Setup(precision="bf16")
    module = build_model(setup)
    module.blocks[0].up.weight.requires_grad_(False)
    engine = DeepSpeedAdapter(stage).around(module, setup)
    train(engine, setup, [0, 1], rank)
    engine.restore(engine.capture())
    for name, lines in (("blocks.0.up.weight", 0), ("blocks.0.down.weight", 1)):
        state = engine.capture()
        state["parameters"][name] *= 1.5
        engine.restore(state)
        found = engine.mismatched_weights()
        held = any(name in line for line in found)
        other = [held]
        dist.broadcast_object_list(other, src=0)
        if rank == 1:  # a rank of ZeRO 1 or 2 may hold no master of it
            assert (held or other[0]) == bool(lines), f"ZeRO {stage}, {name}: {found}"
        assert len(found) <= lines, f"ZeRO {stage}, {name}: {found}"
    engine.close()


def short_window(stage: int, rank: int) -> None:
    """A last window of two micro-steps under accumulation 4 is a mean over two, and the next full one is in step."""
    adapter = DeepSpeedAdapter(stage)
    long, short = (Setup(accumulation=n) for n in (4, 2))
    engine, reference = adapter.make(long, rank, 2), adapter.make(short, rank, 2)
    for decide in ("apply", "skip"):
        norms = [grad_norm(window(e, short, 0, rank)[0]) for e in (engine, reference)]
        assert norms[0] == norms[1], f"ZeRO {stage}: {norms}"
        for e in (engine, reference):
            e.apply(norms[0], NEUTRAL) if decide == "apply" else e.skip()
        assert engine.engine.micro_steps % 4 == 0
    for name, p in adapter.full_parameters(reference).items():
        assert torch.equal(p, adapter.full_parameters(engine)[name]), name
    train(engine, long, [1], rank)
    engine.close()
    unguarded(engine.engine, long, [2], rank)  # DeepSpeed's own count takes over where the guard left it
    assert engine.engine.global_steps == 3
    assert engine.engine.was_step_applied()


def refused_by_deepspeed(stage: int, precision: str, rank: int) -> None:
    """An apply that DeepSpeed itself refuses is counted as skipped, not as a step, and leaves nothing behind."""
    if stage == 0 and precision == "fp32":
        return  # it refuses nothing: it would step on the NaN
    setup = Setup(precision=precision)  # type: ignore[arg-type]
    adapter = DeepSpeedAdapter(stage, settings={"bf16": {"check_grad_overflow": True}})
    engine, twin = adapter.make(setup, rank, 2), adapter.make(setup, rank, 2)
    train(engine, setup, [0], rank)
    train(twin, setup, [0], rank)
    before = adapter.full_parameters(engine)
    window(engine, setup, 1, rank, nan_on=1)
    engine.apply(math.nan, NEUTRAL)
    counted = engine.counters()
    assert (counted.steps, counted.skipped, counted.schedule) == (1, 1, 1), counted
    assert_same(before, adapter.full_parameters(engine), "a refused step")
    train(engine, setup, [2], rank)
    assert engine.counters().steps == 2
    assert engine.engine.global_steps == 3
    if precision != "fp16":  # there the scaler has moved on, and the twin's has not
        train(twin, setup, [2], rank)
        assert_same(adapter.full_parameters(twin), adapter.full_parameters(engine), "after a refused step")


def overflow(stage: int, rank: int) -> None:
    """C4, S10: a real fp16 overflow, refused by us with the real scaler told, ends exactly as if DeepSpeed had refused
    it in its own step: same scale through its hysteresis, weights and moments bit-identical to before, one skip."""
    setup = Setup(precision="fp16")
    adapter = DeepSpeedAdapter(stage, scale_power=24)  # 2**24 x gradient is beyond fp16's 65504
    ours, theirs = adapter.make(setup, rank, 2), adapter.make(setup, rank, 2)
    assert ours.dynamic_loss_scale()
    assert ours.loss_scale() == 2.0**24
    before = leaves(
        ours.capture(), (*adapter.bookkeeping, "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    )
    scales = [ours.loss_scale()]
    while scales[-1] > 2.0**8 and len(scales) < 30:
        taps, _ = window(ours, setup, 0, rank)
        if math.isfinite(grad_norm(taps)):
            break
        ours.skip(overflow=True)
        window(theirs, setup, 0, rank)
        theirs.apply(math.inf, NEUTRAL)
        assert vars(ours._stage.scaler) == vars(theirs._stage.scaler)
        scales.append(ours.loss_scale())
        now = leaves(
            ours.capture(), (*adapter.bookkeeping, "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        )
        assert_same(before, now, f"ZeRO {stage}: overflow skip at scale {scales[-2]}")
    assert len(scales) > 3, scales
    assert scales[-1] == scales[-2] / 2, scales
    assert ours.counters().skipped == theirs.counters().skipped == len(scales) - 1
    assert ours.counters().steps == theirs.counters().steps == 0
    ours.skip()  # the finite window that ended the loop; without the flag the scale stays
    assert ours.loss_scale() == scales[-1]
    assert train(ours, setup, [1, 2], rank) == train(theirs, setup, [1, 2], rank)
    assert_same(adapter.full_parameters(theirs), adapter.full_parameters(ours), "after the overflows")


class Conditional(nn.Module):
    """A layer that takes part only when the first token is even."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.sometimes = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: torch.Tensor, with_it: bool) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.sometimes(x) if with_it else x)


def conditional_parameter(stage: int, rank: int) -> None:
    """A NaN gradient that was skipped never returns through a parameter that gets no gradient in the next window.
    (ZeRO 3 keeps such a parameter's slice of its gradient buffer from the window before.)"""
    setup = Setup()
    adapter = DeepSpeedAdapter(stage)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = Conditional()
    engines = [adapter.around(m, setup) for m in (module, _copy_of(module))]

    def one(engine: DeepSpeedEngine, index: int, with_it: bool, factor: float = 1.0) -> float:
        tokens, targets = batch(index, 0, rank)
        engine.begin_micro_step(0, 1)
        engine.backward(loss_of(engine(tokens, with_it), targets) * factor)
        return grad_norm(engine.taps())

    for engine in engines:
        engine.apply(one(engine, 0, True), NEUTRAL)
    assert math.isnan(one(engines[0], 1, True, math.nan))
    engines[0].skip()
    for index in (2, 3):
        norms = [one(engine, index, False) for engine in engines]
        assert norms[0] == norms[1], norms
        assert math.isfinite(norms[0]), norms
        for engine in engines:
            engine.apply(norms[0], NEUTRAL)
    assert_same(*(adapter.full_parameters(e) for e in engines), "with and without the skipped NaN")  # type: ignore[misc]


def _copy_of(module: Conditional) -> Conditional:
    other = Conditional()
    other.load_state_dict(module.state_dict())
    return other


def two_engines(stage: int, rank: int) -> None:
    """Engines in one process measure their own gradients only, however their windows interleave."""
    setup, other = Setup(), Setup(seed=5, width=12)
    adapter = DeepSpeedAdapter(stage)
    a, b, alone = adapter.make(setup, rank, 2), adapter.make(other, rank, 2), adapter.make(setup, rank, 2)
    expected, _ = window(alone, setup, 0, rank)
    tokens, targets = batch(0, 0, rank)
    a.begin_micro_step(0, 1)
    b.begin_micro_step(0, 1)
    loss = loss_of(a(tokens), targets)
    b.backward(loss_of(b(tokens), targets))
    a.backward(loss)
    taps = a.taps()
    assert torch.equal(taps.local_sq, expected.local_sq)
    assert taps.buckets == expected.buckets
    assert torch.equal(taps.reduced_sq_share, expected.reduced_sq_share)
    alone.skip()
    with pytest.raises(RuntimeError, match="complete window"):
        alone.apply(1.0, NEUTRAL)
    for engine in (a, b):
        engine.skip()


def other_schedules(stage: int, rank: int) -> None:
    """A schedule that DeepSpeed does not know, and one of its own, move once per applied step and are restored."""
    setup = Setup(scheduled=False)
    adapter = DeepSpeedAdapter(stage)
    raw = adapter.make(setup, rank, 2)
    raw.close()
    schedule = ExponentialLR(raw._stage.base, 0.5)
    engine = DeepSpeedEngine(raw.engine, scheduler=schedule)
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01, "warmup_type": "linear"}}
    builtin = replace(adapter, settings={"scheduler": warmup}).around(build_model(setup), setup, make_scheduler=None)
    for e in (engine, builtin):
        state, rates = e.capture(), [e.lr()]
        for index in (0, 1):
            norm = grad_norm(window(e, setup, index, rank)[0])
            e.apply(norm, Knobs(lr_factor=0.5))
            rates.append(e.lr())
        window(e, setup, 2, rank)
        e.skip()
        assert (e.counters().steps, e.counters().schedule) == (2, 2), e.counters()
        e.restore(state)
        assert (e.counters().steps, e.counters().schedule, e.lr()) == (0, 0, rates[0]), e.counters()
        train(e, setup, [0, 1], rank)
        assert e.lr() == rates[2] != rates[0]
    assert engine.lr() == setup.lr / 4


def foreign_states(stage: int, rank: int) -> None:
    """A state of another stage, rank or precision, or of no DeepSpeed engine, is refused by name."""
    setup = Setup()
    engine = DeepSpeedAdapter(stage).make(setup, rank, 2)
    other = DeepSpeedAdapter((stage + 1) % 4).make(setup.but(precision="bf16"), rank, 2)
    before = leaves(engine.capture())
    mine = engine.capture()
    rank_differs = {**mine, "layout": {**mine["layout"], "rank": "7"}}
    for state, words in (
        (other.capture(), ("zero stage", "bfloat16")),
        (rank_differs, ("rank: 7",)),
        ({}, ("layout",)),
    ):
        with pytest.raises(CheckpointError) as caught:
            engine.restore(state)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    assert_same(before, leaves(engine.capture()), "refused states")


# --- other ways through DeepSpeed's code ---------------------------------------------------------------------------

FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
VARIANTS: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (1, "bf16", FP32_GRADIENTS),  # BF16_Optimizer
    (2, "bf16", FP32_GRADIENTS),  # compact fp32 gradient partitions
    (1, "fp16", FP32_GRADIENTS),
    (3, "bf16", FP32_GRADIENTS),
    (1, "fp32", {"zero_optimization": {"contiguous_gradients": False}}),
    (2, "fp32", {"zero_optimization": {"overlap_comm": True, "round_robin_gradients": True}}),
    (2, "fp32", {"zero_optimization": {"reduce_scatter": False}}),
    (3, "fp32", {"zero_optimization": {"reduce_scatter": False, "contiguous_gradients": True}}),
    (3, "fp32", {"zero_optimization": {"sub_group_size": 500, "overlap_comm": False}}),
    (0, "fp32", {"prescale_gradients": True, "communication_data_type": "fp32"}),
    (0, "bf16", {"communication_data_type": "fp32"}),
)


def variants(rank: int, world: int) -> None:
    warm_up()
    for stage, precision, settings in VARIANTS:
        checks = COMPUTES_ALIKE if settings is FP32_GRADIENTS else COMPUTES_ALIKE[:2]
        contract.run(rank, world, DeepSpeedAdapter(stage, (precision,), settings), checks)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_variants() -> None:
    """BR-44, BR-45: norms and true skip on each of DeepSpeed's other reduction paths, replay and resume where the
    gradients live elsewhere."""
    run_ranks(variants, 2, timeout=230)


def alone(rank: int, world: int) -> None:
    warm_up()
    for stage in (0, 1, 2, 3):
        contract.run(
            rank, world, DeepSpeedAdapter(stage, ("fp32", "fp16")), ("check_norms", "check_replay", "check_counters")
        )
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(ConfigError, match="offload_optimizer"):
        DeepSpeedAdapter(1, settings=offload).make(Setup(), rank, world)
    with pytest.raises(ConfigError, match="DS_ACCELERATOR=cuda"):
        load_deepspeed(torch.device("cuda"), "fp32")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_one_rank() -> None:
    """World size 1, and what is refused at construction."""
    run_ranks(alone, 1, timeout=110)


# --- a new process ---------------------------------------------------------------------------------------------------

RESUMED = Setup(dropout=0.2, groups=True, accumulation=2)


def first_life(rank: int, world: int, folder: str) -> list[Any]:
    warm_up()
    results: list[Any] = []
    for stage in (0, 1, 2, 3):
        for precision in PRECISIONS:
            setup = RESUMED.but(precision=precision)
            engine = DeepSpeedAdapter(stage).make(setup, rank, world)
            torch.manual_seed(60 + rank)
            train(engine, setup, [0, 1], rank)
            engine_state, rng = engine.capture(), capture_rng(CPU)
            torch.save({"engine": engine_state, "rng": rng}, Path(folder, f"{stage}-{precision}-{rank}.pt"))
            losses = train(engine, setup, [2, 3], rank)
            end = io.BytesIO()
            torch.save(leaves(engine.capture()), end)
            results.append((losses, engine.counters(), engine.lr(), end.getvalue()))
    return results


def second_life(rank: int, world: int, folder: str) -> list[Any]:
    warm_up()
    results: list[Any] = []
    for stage in (0, 1, 2, 3):
        for precision in PRECISIONS:
            setup = RESUMED.but(precision=precision)
            engine = DeepSpeedAdapter(stage).make(setup.but(seed=9), rank, world)
            saved = torch.load(Path(folder, f"{stage}-{precision}-{rank}.pt"), weights_only=True)
            engine.restore(saved["engine"])
            restore_rng(saved["rng"], CPU)
            losses = train(engine, setup, [2, 3], rank)
            end = io.BytesIO()
            torch.save(leaves(engine.capture()), end)
            results.append((losses, engine.counters(), engine.lr(), end.getvalue()))
    return results


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_new_process(tmp_path: Path) -> None:
    """C3: a state saved by one process continues in another one, bit for bit, for every stage and precision."""
    before = run_ranks(first_life, 2, str(tmp_path), timeout=95)
    after = run_ranks(second_life, 2, str(tmp_path), timeout=95)
    for rank, (lives, resumed) in enumerate(zip(before, after, strict=True)):
        for i, (was, now) in enumerate(zip(lives, resumed, strict=True)):
            case = f"rank {rank}, ZeRO {i // 3} {PRECISIONS[i % 3]}"
            assert now[:3] == was[:3], case
            ends = [torch.load(io.BytesIO(end), weights_only=True) for end in (was[3], now[3])]
            assert_same(ends[0], ends[1], case)


# --- configuration (no process group) -----------------------------------------------------------------------------


def test_compose_merges_at_every_depth() -> None:
    """Pass-through keys win over ours without wiping their neighbours; unknown keys reach DeepSpeed untouched."""
    config = EngineConfig(
        name="deepspeed",
        zero_stage=2,
        precision="fp16",
        bucket_mb=0.5,
        deepspeed={"zero_optimization": {"overlap_comm": True}, "fp16": {"hysteresis": 4}, "my_key": {"x": 1}},
    )
    composed = compose(config, clip=None, accumulation=3, micro_batch=5)
    assert composed["zero_optimization"]["stage"] == 2
    assert composed["zero_optimization"]["overlap_comm"] is True
    assert composed["zero_optimization"]["reduce_bucket_size"] == 2**18  # elements of two bytes
    assert composed["fp16"] == {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 4}
    assert composed["my_key"] == {"x": 1}
    assert composed["gradient_clipping"] == 0.0
    assert (composed["gradient_accumulation_steps"], composed["train_micro_batch_size_per_gpu"]) == (3, 5)
    assert (
        compose(EngineConfig("deepspeed", bucket_mb=1e-9), clip=1.0, accumulation=1, micro_batch=1)[
            "zero_optimization"
        ]["allgather_bucket_size"]
        % 2
        == 0
    )
