"""The reduction check and the digests of replicas under DeepSpeed (C2, S19): they hold in clean windows, in every stage,
precision and way through DeepSpeed's code, and a corruption between the bucket and the optimizer is seen and located.

Few spawns with many cases each: starting DeepSpeed takes longer than the checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resilient.engines.base import Taps
from resilient.engines.deepspeed import DeepSpeedEngine
from resilient.engines.deepspeed import rows as rows_module
from resilient.engines.deepspeed.replicas import COUNTS, SCALER
from resilient.engines.deepspeed.rows import Piece, Rows
from resilient.engines.layers import Layers
from resilient.engines.projection import PARTS, ROW
from resilient.engines.replicas import OPTIONS
from resilient.signals.checks import LANES
from tests.engines.contract import NEUTRAL, grad_norm, window
from tests.engines.models import Setup, build_model
from tests.engines.test_deepspeed import FP32_GRADIENTS, DeepSpeedAdapter, warm_up
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ZERO = "zero_optimization"

# In units of unit roundoff x sqrt(sum of squares). Seen in clean windows: 14 in fp32, 2.3 in bf16 and fp16.
TOLERANCE = {2.0**-24: 40.0, 2.0**-11: 8.0, 2.0**-8: 8.0}
CAUGHT = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}  # relative change of one cell that must be seen


@dataclass(frozen=True)
class Case:
    stage: int
    precision: str
    accumulation: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def setup(self) -> Setup:
        return Setup(precision=self.precision, accumulation=self.accumulation, unused=True, groups=True)  # type: ignore[arg-type]

    def make(self, rank: int, world: int) -> DeepSpeedEngine:
        return DeepSpeedAdapter(self.stage, settings=self.settings).make(self.setup, rank, world)


# --- what the coordinator does with it, in short ------------------------------------------------------------------


def from_all(tensor: torch.Tensor) -> torch.Tensor:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return torch.stack(found)


def misfits(engine: DeepSpeedEngine, taps: Taps) -> torch.Tensor:
    """(receivers, cells) difference between what was sent and what was received, in units of the tolerance."""
    plan = engine.check_plan()
    assert plan is not None
    before, after, sq = (from_all(taps.checks[f"check_{name}"]) for name in ("before", "after", "sq"))
    assert before.shape[1] == len(plan.names)
    allowed = TOLERANCE[plan.unit] * plan.unit * sq.sum(0).sqrt()
    return torch.stack([(before.sum(0) - after[list(group)].sum(0)).abs() / allowed for group in plan.receivers])


def located(engine: DeepSpeedEngine, group: int, cell: int) -> tuple[set[int], str]:
    """Ranks that may have received the worst row of a cell, and its place."""
    plan = engine.check_plan()
    assert plan is not None
    (rows,) = engine.check_rows(cell)
    assert rows.name == plan.names[cell]
    ranks = list(plan.receivers[group])
    before, after = from_all(rows.before).sum(0), from_all(rows.after)[ranks].sum(0)
    worst = int((before - after).norm(dim=1).nan_to_num(math.inf).argmax())
    holders = from_all(rows.held.long())[ranks, worst]
    return {rank for rank, held in zip(ranks, holders.tolist(), strict=True) if held}, rows.places(worst)


def assert_clean(engine: DeepSpeedEngine, taps: Taps, case: Case) -> None:
    off = misfits(engine, taps)
    assert bool((off <= 1).all()), f"{case}: {off}"
    assert float(from_all(taps.checks["check_before"]).abs().max()) > 0, f"{case}: nothing was sent"


# --- clean windows ------------------------------------------------------------------------------------------------


def clean(case: Case, rank: int, world: int, windows: int = 4) -> DeepSpeedEngine:
    """Applied, skipped and abandoned windows agree; one with a NaN does not, and leaves nothing behind."""
    engine, setup = case.make(rank, world), case.setup
    plan = engine.check_plan()
    assert plan is not None
    assert plan.names == engine.layers.names
    for index in range(windows):
        taps, _ = window(engine, setup, index, rank, nan_on=1 if index == 2 else None)
        norm = grad_norm(taps)
        if index == 2:
            assert bool(misfits(engine, taps).isnan().any())
            engine.skip()
            continue
        assert_clean(engine, taps, case)
        squares = from_all(taps.checks["check_sq"]).sum() * world**2
        if case.accumulation == 1 and not case.settings:  # otherwise rounding on the way is in it, too
            assert math.isclose(float(squares), float(from_all(taps.local_sq).sum()), rel_tol=1e-4), case
        if index == 0:
            engine.apply(norm, NEUTRAL)
        elif index == 1:
            engine.abandon()
        else:
            engine.skip()
    assert engine.check_plan() == plan
    return engine


# --- faults -------------------------------------------------------------------------------------------------------


def owned(engine: DeepSpeedEngine) -> list[tuple[str, Piece]]:
    """What lies ready for the optimizer here, of parameters with a gradient and in rows that no other rank has."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    alone = engine.check_plan().receivers[0] == (0,) or engine.engine.zero_optimization_stage() == 3  # type: ignore[union-attr]
    return [
        (names[id(piece.parameter)], piece)
        for piece in engine._stage.received()
        if (alone or piece.tensor.numel() == piece.parameter.numel()) and bool(piece.tensor.any())
    ]


def corrupted_results(engine: DeepSpeedEngine, case: Case, rank: int) -> None:
    """One element, one run of elements or a gradient of the window before, in the final gradients of rank 1."""
    setup = case.setup
    window(engine, setup, 10, rank)
    old = {name: piece.tensor.clone() for name, piece in owned(engine)}
    engine.skip()
    for kind in ("element", "row", "stale"):
        taps, _ = window(engine, setup, 11, rank)
        assert_clean(engine, taps, case)
        norms = from_all(taps.layer_sq_share).sum(0).sqrt() * engine.loss_scale()
        told: list[Any] = [None]
        if rank == 1:
            # signs may cancel in a change of many elements: a large one, then, for the difference to stand out all the same
            name, piece = max(owned(engine), key=lambda entry: float(entry[1].tensor.norm()))
            flat, told = piece.tensor.view(-1), [name]
            if kind == "element":
                flat[flat.numel() // 2] += CAUGHT[case.precision] * 1.1 * norms[engine.layers.of[name]].to(flat.dtype)
            elif kind == "row":
                flat[: flat.numel() // 2 + 1].neg_().mul_(2)
            else:
                piece.tensor.copy_(old[name])
        dist.broadcast_object_list(told, src=1)
        name = told[0]
        taps = engine.taps()
        off, cell = misfits(engine, taps), engine.layers.of[name]
        bad = (off > 1).nonzero().tolist()
        whole = engine._stage.whole
        assert bad == [[1 if whole else 0, cell]], f"{case} {kind} in {name}: {off}"
        assert located(engine, bad[0][0], cell) == ({1}, name), f"{case} {kind}"
        engine.skip()


@contextmanager
def wire(change: Callable[[Callable[[], Any], torch.Tensor], Any], first_only: bool) -> Iterator[list[int]]:
    """Stands between DeepSpeed and its collectives on gradients, or the first of them: `change(run, output)` runs it.
    Yields a list that then holds the elements of each output."""
    from deepspeed.comm import comm

    backend, seen = comm.cdb, []
    names = ("all_reduce", "reduce_scatter_tensor")
    originals = {name: getattr(backend, name) for name in names}

    def between(name: str) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            output = kwargs["output_tensor"] if "output_tensor" in kwargs else args[0]

            def run() -> Any:
                return originals[name](*args, **kwargs)

            if output.numel() < 16 or (seen and first_only):
                return run()
            seen.append(output.numel())
            return change(run, output)

        return collective

    for name in names:
        setattr(backend, name, between(name))
    try:
        yield seen
    finally:
        for name in names:
            delattr(backend, name)


def wrong_on_the_wire(engine: DeepSpeedEngine, case: Case, rank: int) -> None:
    """Rank 1 gets other results than were sent; then there is a bucket that no rank reduces."""

    def doubled(run: Callable[[], Any], output: torch.Tensor) -> Any:
        result = run()
        if rank == 1:
            output.mul_(2)
        return result

    for kind, change in (("doubled", doubled), ("skipped", lambda run, output: None)):
        with wire(change, first_only=kind == "skipped") as seen:
            taps, _ = window(engine, case.setup, 12, rank)
        assert seen, f"{case}: no collective was seen"
        off = misfits(engine, taps)
        bad = (off > 1).nonzero().tolist()
        assert bad, f"{case} {kind}: {off}"
        for group, cell in bad:
            ranks, place = located(engine, group, cell)
            assert engine.layers.of[place] == cell
            assert kind == "skipped" or 1 in ranks, f"{case} {kind}: {ranks} at {place}"
        engine.skip()
    taps, _ = window(engine, case.setup, 13, rank)
    assert_clean(engine, taps, case)
    engine.skip()


# --- replicas -----------------------------------------------------------------------------------------------------


def digests_differ(engine: DeepSpeedEngine, kind: str) -> set[str]:
    """Names whose digest is not the same on all ranks."""
    found = engine.replica_digests(kind)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(found))
    assert all(n == names[0] for n in names), names
    values = from_all(torch.stack(list(found.values())))
    return {name for name, column in zip(found, values.T, strict=True) if len(column.unique()) > 1}


def replicas(case: Case, rank: int, world: int) -> None:
    """Equal after training; a corruption on rank 1 shows in the part it is in, and in no other."""
    setup = case.setup
    module = build_model(setup)
    module.blocks[1].register_buffer("mask", torch.ones(5))
    engine = DeepSpeedAdapter(case.stage, settings=case.settings).around(module, setup)
    kinds = {"optimizer", "buffers"} if case.stage == 3 else {"parameters", "optimizer", "buffers"}
    assert set(engine.replicas()) == kinds
    assert set(engine.replicas().values()) == {(tuple(range(world)),)}
    for index in range(2):
        taps, _ = window(engine, setup, index, rank)
        engine.apply(grad_norm(taps), NEUTRAL)
    mean = engine.module.get_buffer("centre.mean")
    assert len(from_all(mean.float()).unique(dim=0)) == world, "each rank's running mean is its own"
    for kind in sorted(kinds):  # in the same order on all ranks
        assert digests_differ(engine, kind) == set(), (case, kind)

    base, scaler = engine._stage.base, engine._stage.scaler
    faults: list[tuple[str, str, torch.Tensor]] = [("buffers", "blocks", engine.module.get_buffer("blocks.1.mask"))]
    if case.stage < 3:
        faults.append(("parameters", "blocks.0", engine.module.get_parameter("blocks.0.up.weight").data))
    if engine._stage.replicated:
        master = engine._stage.masters()[0]
        layer = engine.layers.names[engine._stage.parts[id(master.tensor)][0].layer]
        faults.append(("optimizer", layer, base.state[master.tensor]["exp_avg_sq"]))
    for kind, name, tensor in faults:
        right = tensor.clone()
        if rank == 1:
            tensor.view(-1)[0] += 1
        assert digests_differ(engine, kind) == {name}, (case, kind)
        tensor.copy_(right)
    if rank == 1:
        base.param_groups[0]["lr"] *= 1 + 1e-15
        engine.engine.global_steps += 1
        if case.precision == "fp16":
            scaler.cur_scale *= 2
    expected = {OPTIONS, COUNTS} | ({SCALER} if case.precision == "fp16" else set())
    assert digests_differ(engine, "optimizer") == expected, case


# --- the tests ----------------------------------------------------------------------------------------------------

CASES = (
    Case(0, "fp32"),
    Case(0, "fp16", 4),
    Case(1, "bf16", 4, FP32_GRADIENTS),  # BF16_Optimizer
    Case(1, "fp16"),
    Case(2, "bf16", 4),
    Case(3, "fp32", 4),
)


def everything(rank: int, world: int, cases: Sequence[Case], with_faults: bool) -> None:
    warm_up()
    for case in cases:
        try:
            engine = clean(case, rank, world)
            if with_faults:
                corrupted_results(engine, case, rank)
                wrong_on_the_wire(engine, case, rank)
                replicas(case, rank, world)
        except Exception as error:
            raise AssertionError(f"{case}, rank {rank}: {error}") from error


@pytest.mark.timeout(200)
def test_stages() -> None:
    """C2, S19: clean windows hold; a changed element, row, stale gradient, wrong or missing collective is seen in the same
    window, before the optimizer, and the receiver, layer and parameter are named. Replicas are compared part by part."""
    run_ranks(everything, 2, CASES, True, timeout=190)


VARIANTS = tuple(
    Case(stage, precision, accumulation, settings)
    for accumulation in (1, 4)
    for stage, precision, settings in (
        (0, "bf16", {"communication_data_type": "fp32"}),
        (0, "fp32", {"prescale_gradients": True, "communication_data_type": "bf16"}),
        (0, "fp32", {"gradient_predivide_factor": 2.0}),
        (0, "fp32", {"gradient_allreduce_op": "sum"}),
        (1, "fp32", {"gradient_allreduce_op": "sum"}),
        (1, "fp32", {"communication_data_type": "bf16"}),
        (1, "fp32", {ZERO: {"reduce_scatter": False}, "prescale_gradients": True}),
        (1, "bf16", {ZERO: {"contiguous_gradients": False}}),
        (1, "fp16", FP32_GRADIENTS),
        (2, "bf16", FP32_GRADIENTS),
        (2, "fp16", {}),
        (2, "fp32", {ZERO: {"overlap_comm": True, "round_robin_gradients": True}}),
        (2, "fp32", {ZERO: {"reduce_scatter": False}, "gradient_predivide_factor": 2.0}),
        (2, "fp32", {ZERO: {"use_multi_rank_bucket_allreduce": False}}),
        (3, "bf16", FP32_GRADIENTS),
        (3, "fp16", {}),
        (3, "bf16", {"communication_data_type": "fp32"}),
        (3, "fp32", {ZERO: {"sub_group_size": 500, "overlap_comm": False}}),
        (3, "fp32", {ZERO: {"reduce_scatter": False, "contiguous_gradients": True}}),
        # deepspeed 0.19.8 makes these gradients too small by the number of ranks; the check knows
        (3, "fp32", {ZERO: {"reduce_scatter": False}, "gradient_predivide_factor": 2.0}),
    )
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_variants() -> None:
    """DeepSpeed's other ways from a bucket to the optimizer, with and without accumulation."""
    run_ranks(everything, 2, VARIANTS, False, timeout=290)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_ranks() -> None:
    """More ranks than two: uneven shards, rows of several holders, rounding at every hop."""
    run_ranks(everything, 4, CASES, True, timeout=290)


# --- rows, without a process group -----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [4096, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_how_a_gradient_is_cut(
    blocks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any cuts of the parameters, in any order, give the same sums by row, each row once per call; squares by layer are
    those of the elements; a NaN stays in its row and its layer."""
    monkeypatch.setattr(rows_module, "_BLOCKS", blocks)
    sizes = {"a.0.w": 5000, "a.0.b": 7, "a.1.w": 70_003, "a.1.b": 1024, "e": 200_000, "none": 0, "h": 40_000}
    segments = {**{name: max(size, 1) for name, size in sizes.items()}, "a.1.b": 300, "a.0.b": 2, "h": 20_000}
    layers = Layers(sizes, CPU)
    parameters = {name: torch.zeros(size) for name, size in sizes.items()}
    rows = Rows(layers, {name: (p, sizes[name], segments[name]) for name, p in parameters.items()}, CPU)
    generator = torch.Generator().manual_seed(1)
    gradients = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}

    def collect(pieces: list[Piece], into: torch.Tensor) -> None:
        numbers, sums, squares = rows.sums(pieces)
        assert len(numbers.unique()) == len(numbers)
        into.index_add_(0, numbers, torch.cat((sums, squares[:, None]), 1))

    whole, cut = torch.zeros(rows.count, PARTS + 1), torch.zeros(rows.count, PARTS + 1)
    collect([Piece(gradients[name], parameters[name]) for name in reversed(sizes)], whole)
    steps = (1, 5, 1000, ROW, 3000, 40_000)
    for name, gradient in gradients.items():
        at, turn = 0, 0
        while at < len(gradient):
            step = steps[turn % len(steps)]
            collect([Piece(gradient[at : at + step], parameters[name], at)], cut)
            at, turn = at + step, turn + 1
    assert torch.allclose(whole, cut, rtol=1e-4, atol=1e-3)
    by_layer = rows.cells(whole[:, -1])
    for i, layer in enumerate(layers.names):
        expected = sum(
            float(g.double().square().sum()) for n, g in gradients.items() if layers.names[layers.of[n]] == layer
        )
        assert math.isclose(float(by_layer[i]), expected, rel_tol=1e-5, abs_tol=1e-12), layer
    torch.testing.assert_close(rows.lanes(whole[:, :-1]), rows.lanes(cut[:, :-1]), rtol=0, atol=1e-2)
    unit = torch.zeros(rows.count, PARTS)
    unit[rows.spans[-1][1] - 1, 3] = 1.0
    assert rows.lanes(unit)[-1].abs().tolist() == [1.0] * LANES, "every sum counts with a sign in every lane"

    gradients["h"][12_345] = math.nan
    spoiled = torch.zeros(rows.count, PARTS + 1)
    collect([Piece(gradients[name], parameters[name]) for name in sizes], spoiled)
    (bad,) = spoiled.isnan().any(1).nonzero().flatten().tolist()
    assert rows.place(bad) == "h"
    assert rows.lanes(spoiled[:, :-1]).isnan().all(1).tolist() == [name == "h" for name in layers.names]
