"""The reduction check by itself, and in DDP and FSDP2: what stays within rounding, what does not, and what it names.

The contract suite (`check_reduction`, `check_replicas`) holds what every engine must do; here is what only these do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from resilient.engines.base import Engine
from resilient.engines.buffers import local
from resilient.engines.ddp import DDPEngine
from resilient.engines.fsdp2 import FSDP2Engine
from resilient.engines.norms import sum_of_squares
from resilient.engines.projection import PART, PARTS, ROW, Signs
from resilient.engines.reduction_check import BucketLayout, ReductionCheck, Room, joined
from resilient.signals import CheckPlan
from resilient.signals.checks import LANES, MOST_CELLS
from tests.engines.contract import NEUTRAL
from tests.engines.reduction import SUMS, Compared, compared, off_by_row
from tests.ranks import run_pooled

CPU = torch.device("cpu")

# --- the check by itself ----------------------------------------------------------------------------------------


class Simulated:
    """Ranks in one process: each sends the same buckets, and receives its share of each mean."""

    def __init__(self, sizes: dict[int, int], world: int = 2, sharded: bool = False) -> None:
        self.sizes, self.world, self.sharded = sizes, world, sharded
        receivers = (tuple(range(world)),) if sharded else tuple((r,) for r in range(world))
        self.ranks = [ReductionCheck(CPU, receivers) for _ in range(world)]
        self.generator = torch.Generator().manual_seed(5)

    def window(
        self, *, micro: int = 1, bad: Callable[[int, int, torch.Tensor], None] = lambda rank, bucket, mean: None
    ) -> torch.Tensor:
        """(groups, cells) sent less received over what rounding may do; empty without a plan. bad(rank, bucket, what the
        rank holds of it) changes that."""
        plan = self.ranks[0].plan
        for check in self.ranks:
            check.begin_window()
        for bucket, size in self.sizes.items():
            sent = torch.randn(micro, self.world, size, generator=self.generator)
            for _, check in enumerate(self.ranks):
                for part in sent[:, _]:
                    square = check.sent(bucket, part, self.world)
                    torch.testing.assert_close(square, sum_of_squares([part], CPU), rtol=1e-6, atol=0)
            mean = sent.double().sum((0, 1)).div(self.world).float()
            half = -(-size // self.world)
            for rank, check in enumerate(self.ranks):
                start = rank * half if self.sharded else 0
                mine = mean[start : start + half].clone() if self.sharded else mean.clone()
                bad(rank, bucket, mine)
                cut = len(mine) // 3
                pieces = [(mine[cut:].clone(), start + cut), (mine[:cut], start)]
                check.received(
                    bucket, BucketLayout(f"b{bucket}", size, ((0, size // 2, "x"), (size // 2, size, "y"))), pieces
                )
        checks = [check.finish() for check in self.ranks]
        if plan is None:
            assert checks == [{}] * self.world
            return torch.empty(0)
        before = sum(c["check_before"] for c in checks)
        after = torch.stack([c["check_after"] for c in checks])
        scale = torch.stack([c["check_sq"] for c in checks]).sum(0).sqrt()
        return torch.stack([(before - after[list(group)].sum(0)) / (plan.unit * scale) for group in plan.receivers])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("micro", [1, 3])
def test_clean_windows_agree_and_one_element_does_not(sharded: bool, micro: int) -> None:
    """C2: slices that begin anywhere; several sends of a bucket add up. A change of one element moves the sum of its
    bucket by just that, on the rank that received it, and its row says where."""
    ranks = Simulated({0: 5000, 1: 200_001, 2: 70}, sharded=sharded)
    assert ranks.window(micro=micro).numel() == 0
    assert ranks.ranks[0].plan == CheckPlan(("b0", "b1", "b2"), ((0, 1),) if sharded else ((0,), (1,)), 2.0**-24)
    for _ in range(3):
        assert ranks.window(micro=micro).abs().max() < SUMS

    def bad(rank: int, bucket: int, mean: torch.Tensor) -> None:
        if (rank, bucket) == (1, 1):
            mean[50_000] += 3.0

    off = ranks.window(micro=micro, bad=bad)
    assert torch.nonzero(off.abs() > SUMS).tolist() == ([[0, 1]] if sharded else [[1, 1]])
    found = [check.rows(1)[0] for check in ranks.ranks]
    after = found[0].after + found[1].after if sharded else found[1].after
    difference = (after - found[0].before - found[1].before).norm(dim=1)
    row = int(difference.argmax())
    assert row == (50_000 + (100_001 if sharded else 0)) // ROW
    assert difference[row] == pytest.approx(3.0, rel=1e-4)
    assert found[1].held[row]
    assert bool(found[0].held[row]) is not sharded
    assert found[1].places(row) == ("y" if sharded else "x")
    assert found[1].places(100_000 // ROW) == "x, y"
    assert ranks.window(micro=micro).abs().max() < SUMS, "nothing of it is left in the next window"


def test_a_nan_stays_in_its_cell() -> None:
    """BR-03: also when a rank sends it: then both sides have it."""
    ranks = Simulated({0: 3000, 1: 3000})
    ranks.window()
    off = ranks.window(bad=lambda rank, bucket, mean: mean.fill_(math.nan) if (rank, bucket) == (0, 1) else None)
    assert off.isnan().tolist() == [[False, True], [False, False]]


def test_many_buckets_share_cells() -> None:
    """S19: no more than MOST_CELLS numbers ride along; the rows still tell the buckets of a cell apart."""
    ranks = Simulated({bucket: 100 + bucket for bucket in range(150)})
    ranks.window()
    off = ranks.window(bad=lambda rank, bucket, mean: mean.mul_(1.01) if (rank, bucket) == (1, 149) else None)
    plan = ranks.ranks[0].plan
    assert plan is not None
    assert off.shape == (2, 50)
    assert len(plan.names) <= MOST_CELLS
    assert plan.names[0] == "b0 to b2"
    assert torch.nonzero(off.abs() > SUMS).tolist() == [[1, 49]]
    assert [bucket.name for bucket in ranks.ranks[1].rows(49)] == ["b147", "b148", "b149"]


def test_a_new_bucket_counts_from_the_next_window_on() -> None:
    """The sums fit the plan that ranks agreed on before the window; a bucket that is not sent adds nothing."""
    ranks = Simulated({0: 3000})
    ranks.window()
    ranks.sizes = {0: 3000, 4: 2000}
    assert ranks.window().shape == (2, 1)
    assert ranks.window().shape == (2, 2)
    ranks.sizes = {4: 2000}
    off = ranks.window()
    assert off[:, 0].isnan().all()  # 0 / 0: nothing sent, nothing received
    assert off[:, 1].abs().max() < SUMS


def test_a_bucket_nobody_can_place_is_not_measured() -> None:
    check = ReductionCheck(CPU, ((0,), (1,)))
    layout = BucketLayout("b", 2000, ((0, 2000, "x"),))
    ones = torch.ones(2000)
    for sizes in ((2000,), (2000, 1000)):
        check.begin_window()
        for size in sizes:
            check.sent(0, ones[:size], 2.0)
        check.received(0, layout, [(ones, 0)])
        checks = check.finish()
    assert all(values.isnan().all() for values in checks.values())
    assert check.rows(0) == []


def test_places_in_shards() -> None:
    """A bucket of four parts, each with a share of three parameters; rows that cross from part to part."""
    layout = BucketLayout("unit", 4 * 1500, ((0, 500, "a"), (500, 510, "b"), (510, 1500, "c")), shards=4)
    assert layout.place(0) == "a, b, c"
    assert layout.place(1) == "c"  # no row belongs to two parts
    assert layout.place(2) == "a, b, c"
    assert (layout.rows, layout.place(7)) == (8, "c")
    assert [layout.aligned(start) for start in (0, 1499, 1500, 4500 + 7)] == [0, 1499, 2048, 3 * 2048 + 7]


def test_rows_of_parts_are_those_of_each_part_by_itself() -> None:
    """Few parts are taken one by one, many together: the same sums, and a shard's own sums are among them."""
    signs = Signs(torch.device("cpu"))
    for parts, size in ((3, 2500), (3, 1024), (40, 700), (40, 2048), (40, 1500)):
        flat = torch.randn(parts * size, generator=torch.Generator().manual_seed(parts + size))
        layout = BucketLayout("unit", parts * size, ((0, size, "a"),), shards=parts)
        sums = signs.parts(flat, parts).sums
        assert len(sums) == layout.rows
        for part in (0, 1, parts - 1):
            first, own, _ = signs.rows(flat[part * size : (part + 1) * size], layout.aligned(part * size))
            torch.testing.assert_close(own, sums[first : first + len(own)])
    many = BucketLayout("bucket", 1000, tuple((i * 10, i * 10 + 10, f"p{i}") for i in range(100)))
    assert many.place(0) == "p0 .. p99"


def test_neighbours_are_joined_without_a_copy_where_they_are_one() -> None:
    def told(*pieces: tuple[torch.Tensor, int]) -> list[tuple[torch.Tensor, int]]:
        return [(flat.clone(), start) for flat, start in joined(pieces, Room())]

    whole, other = torch.arange(1000.0), torch.arange(2000.0, 2300.0)
    pieces = told((whole[400:1000], 500), (other, 1100), (whole[:400], 100), (other[:0], 7))
    assert [(len(flat), start) for flat, start in pieces] == [(1300, 100)]
    assert torch.equal(pieces[0][0], torch.cat([whole, other]))
    ((flat, start),) = joined([(whole[400:], 400), (whole[:400], 0)], Room())
    assert (flat.data_ptr(), start) == (whole.data_ptr(), 0)
    assert [(len(flat), start) for flat, start in told((whole, 0), (other, 1001))] == [(1000, 0), (300, 1001)]
    long, longer = torch.arange(1 << 17).float(), torch.arange(1 << 18).float()
    pieces = told((other, 0), (long, 300), (longer, 300 + len(long)), (other, 300 + len(long) + len(longer)))
    assert torch.equal(torch.cat([flat for flat, _ in pieces]), torch.cat([other, long, longer, other]))
    assert [len(flat) for flat, _ in pieces] == [129 * ROW, 255 * ROW, 600]
    assert [start for _, start in pieces] == [0, 129 * ROW, 384 * ROW]


def test_many_short_pieces_are_copied_in_parts_and_to_the_same_memory() -> None:
    room, short = Room(), torch.arange(float(1 << 16))
    seen, at = [], set()
    for flat, start in joined([(short + i, i * len(short)) for i in range(10)], room):
        seen.append((start, flat.clone()))
        at.add(flat.data_ptr())
    assert [start for start, _ in seen] == [0, 4 << 16, 8 << 16]
    assert torch.equal(torch.cat([flat for _, flat in seen]), torch.cat([short + i for i in range(10)]))
    assert len(at) == 1, "fresh pages cost more than the copy"


def test_signs_are_the_same_for_every_slice() -> None:
    """Ranks hold different slices and draw as many signs as they need: they must be the same ones. Rows of slices add up
    to those of the whole, autocast or not, in any dtype."""
    assert torch.equal(Signs(CPU).of_rows(3, 5000)[:70], Signs(CPU).of_rows(3, 70))
    assert Signs(CPU).of_rows(3, 70).shape == (70, LANES)
    assert not torch.equal(Signs(CPU).of_rows(3, 70), Signs(CPU).of_rows(4, 70))
    signs, tensor = Signs(CPU), torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    whole = signs.rows(tensor).sums
    for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-4), (torch.bfloat16, 2.0)):
        together = torch.zeros_like(whole)
        for start, stop in ((0, 700), (700, 900), (900, 2048), (2048, 10_000)):
            with torch.autocast("cpu", torch.bfloat16):
                first, sums, _ = signs.rows(tensor[start:stop].to(dtype), start)
            together[first : first + len(sums)] += sums
        assert (together - whole).abs().max() < bound


def test_each_lane_is_a_product_with_signs_of_its_own() -> None:
    """C2: every element counts with +1 or -1 in every lane, and no two lanes are alike, nor are they within a row."""
    signs, n = Signs(CPU), 3 * ROW
    units = torch.eye(n)[:: PART // 2]  # two elements of each part
    of_rows = signs.of_rows(7, 3)
    found = torch.stack([signs.lanes(signs.rows(unit).sums, of_rows).sum(0) for unit in units])
    assert bool((found.abs() == 1).all())
    within = found[: 2 * PARTS : 2]  # one element of each part of the first row
    assert torch.equal((within.T @ within).abs(), PARTS * torch.eye(LANES, dtype=torch.float64))
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(2))
    exact = sum(
        gradient[i].double() * signs.lanes(signs.rows(unit).sums, of_rows).sum(0) for i, unit in enumerate(torch.eye(n))
    )
    torch.testing.assert_close(signs.lanes(signs.rows(gradient).sums, of_rows).sum(0), exact, rtol=0, atol=1e-4)


# --- in DDP and FSDP2 -------------------------------------------------------------------------------------------


class Forked(nn.Module):
    """Two branches of which a forward takes one or both; a norm with running statistics and a constant table."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 48, 3, padding=1)
        self.norm = nn.BatchNorm2d(48, affine=False)
        self.left = nn.Linear(48, 65)
        self.right = nn.Linear(48, 65)
        self.register_buffer("table", torch.linspace(0, 1, 65))

    def forward(self, x: torch.Tensor, branches: str) -> torch.Tensor:
        x = self.stem(x)
        x = self.norm(x.float()).to(x.dtype).tanh().mean((2, 3))
        outs = [getattr(self, name)(x) for name in ("left", "right") if name[0] in branches]
        return (sum(outs) * self.table).square().mean()  # type: ignore[operator]


def forked() -> Forked:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return Forked()


def images(index: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(100 * index + rank))


def run_window(
    engine: Engine,
    index: int,
    rank: int,
    branches: str = "lr",
    bad: Callable[[Engine], None] | None = None,
    micro_steps: int = 2,
) -> tuple[CheckPlan | None, Compared | None]:
    """One window, not applied. Returns the plan before it, and what the ranks have."""
    plan = engine.check_plan()
    for micro in range(micro_steps):
        engine.begin_micro_step(micro, micro_steps)
        engine.backward(engine(images(2 * index + micro, rank), branches))
    if bad is not None:
        bad(engine)
    return plan, compared(plan, engine.taps())


def clean(
    engine: Engine,
    rank: int,
    *,
    windows: int = 4,
    branches: Callable[[int], str] = lambda index: "lr",
    micro_steps: int = 2,
    first: int = 2,
) -> Compared:
    """Some windows, all of them within rounding; there is a plan from the `first` on. Returns the last."""
    for index in range(windows):
        _, found = run_window(engine, index, rank, branches(index), micro_steps=micro_steps)
        assert found is not None or index < first, f"no plan in window {index}"
        assert found is None or not found.failed(), f"window {index}: {found.ratio.tolist()}"
        engine.apply(1.0, NEUTRAL)
    assert found is not None
    return found


def ddp(*, hook: Any = None, **options: Any) -> DDPEngine:
    module = forked()
    module.stem.to(memory_format=torch.channels_last)  # in a bucket as it lies in memory
    model = DistributedDataParallel(module, bucket_cap_mb=0.006, **options)
    return DDPEngine(model, torch.optim.AdamW(module.parameters(), lr=1e-2), comm_hook=hook)


def fsdp2(policy: MixedPrecisionPolicy | None = None, **options: Any) -> FSDP2Engine:
    model = forked()
    for part in (model.left, model.right):
        fully_shard(part, mp_policy=policy or MixedPrecisionPolicy(), **options)
    fully_shard(model, mp_policy=policy or MixedPrecisionPolicy())
    return FSDP2Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def ddp_variants(rank: int, world: int) -> None:
    """Bucket views, a static graph, parameters unused on some rank or on all, torch's hooks; then what is not known."""
    clean(ddp(), rank)
    clean(ddp(gradient_as_bucket_view=True), rank)
    # torch cuts the buckets of a static graph anew only in the third forward, and cannot accumulate in its first window
    clean(ddp(static_graph=True), rank, micro_steps=1, windows=5, first=3)
    turns = ["lr", "l", "r", "lr"]
    clean(ddp(find_unused_parameters=True), rank, branches=lambda index: turns[index])
    clean(ddp(find_unused_parameters=True), rank, branches=lambda index: turns[(index + rank) % 4])
    for hook, unit in (("allreduce_hook", 2**-24), ("bf16_compress_hook", 2**-8), ("fp16_compress_hook", 2**-11)):
        assert clean(ddp(hook=(None, getattr(default_hooks, hook))), rank).plan.unit == unit
    engine = ddp(hook=(None, lambda state, bucket: default_hooks.allreduce_hook(state, bucket)))
    assert [run_window(engine, index, rank)[1] for index in range(3)] == [None] * 3


def own_gradients(module: nn.Module, index: int, rank: int) -> dict[str, torch.Tensor]:
    """This rank's gradients of a window as they are before anything is reduced."""
    twin = forked()
    twin.load_state_dict(module.state_dict())
    for micro in range(2):
        (twin(images(2 * index + micro, rank), "lr") / 2).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def ddp_faults(rank: int, world: int) -> None:
    """S19: each on one rank, which is named, and where its bucket allows the parameter. Finite changes: a thousandth of
    what the bucket holds in fp32, a twentieth in bf16."""
    for hook, relative in ((None, 1e-3), ((None, default_hooks.bf16_compress_hook), 5e-2)):
        engine = ddp(hook=hook)
        grads = {name: p for name, p in engine.module.named_parameters()}
        last: dict[str, torch.Tensor] = {}

        def size(parts: tuple[str, ...], grads: dict[str, nn.Parameter] = grads) -> float:
            return math.sqrt(sum(float(grads[name].grad.square().sum()) for name in parts))

        def element(own: dict, parts: tuple[str, ...]) -> None:
            grads["left.weight"].grad.view(-1)[2000] += relative * size(parts)  # noqa: B023

        def scaled(own: dict, parts: tuple[str, ...]) -> None:
            for name in parts:
                grads[name].grad.mul_(1 + 10 * relative)  # noqa: B023

        def stale(own: dict, parts: tuple[str, ...]) -> None:
            for name in parts:
                grads[name].grad.copy_(last[name])  # noqa: B023

        def skipped(own: dict, parts: tuple[str, ...]) -> None:
            for name in parts:
                grads[name].grad.copy_(own[name])  # noqa: B023

        clean(engine, rank, windows=3)
        for index, fault in enumerate((element, scaled, stale, skipped), 10):
            last.update({name: g for name, g in own_gradients(engine.module, index - 1, rank).items()})
            own = own_gradients(engine.module, index, rank)
            plan = engine.check_plan()
            assert plan is not None
            cell = next(i for i, name in enumerate(plan.names) if "left.weight" in name)
            parts = tuple(name for name in grads if name in _members(engine, cell))
            hit = (lambda _, fault=fault, own=own, parts=parts: fault(own, parts)) if rank == 1 else None
            _, found = run_window(engine, index, rank, bad=hit)
            assert found is not None
            assert found.failed() == [(1, cell)], f"{fault.__name__}, {relative}: {found.ratio.tolist()}"
            ((name, _, places),) = off_by_row(engine, plan, 1, cell)
            assert name == plan.names[cell]
            assert any("left.weight" in place for place in places), f"{fault.__name__}: {places}"
            assert len(places) <= 2 or fault is not element
            engine.skip()
        clean(engine, rank, windows=2)


def _members(engine: DDPEngine, cell: int) -> set[str]:
    bucket = engine.check_rows(cell)[0]
    return {name for row in range(len(bucket.before)) for name in bucket.places(row).split(", ")}


def ends_of_a_window(rank: int, world: int) -> None:
    """Abandoned in the middle, refused, restored, replayed: the next window is measured by itself. close() ends it."""
    for engine in (ddp(), fsdp2()):
        clean(engine, rank, windows=3)
        state = engine.capture()
        engine.begin_micro_step(0, 2)
        engine.backward(engine(images(50, rank), "lr"))
        engine.abandon()
        clean(engine, rank, windows=1)
        run_window(engine, 51, rank)
        engine.skip()
        clean(engine, rank, windows=1)
        run_window(engine, 52, rank)
        engine.restore(state)
        clean(engine, rank, windows=2)
        engine.close()
        assert engine.check_plan() is None


def fsdp2_variants(rank: int, world: int) -> None:
    """Dtypes of the reduction, resharding or not, sums in place of means, a module or part of one without a gradient,
    parameters left to the user; then hooks of which nothing is known."""
    clean(fsdp2(), rank)
    clean(fsdp2(reshard_after_forward=False), rank)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert clean(fsdp2(half), rank).plan.unit == 2**-8
    assert clean(fsdp2(MixedPrecisionPolicy(param_dtype=torch.bfloat16)), rank).plan.unit == 2**-8
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert clean(fsdp2(mixed), rank).plan.unit == 2**-24
    clean(fsdp2(MixedPrecisionPolicy(reduce_dtype=torch.float16)), rank)
    engine = fsdp2()
    for unit in (engine.module, engine.module.left, engine.module.right):
        unit.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    clean(engine, rank)
    turns = ["lr", "l", "r", "lr"]
    clean(fsdp2(), rank, branches=lambda index: turns[index])
    model = forked()
    fully_shard(model, ignored_params={model.left.weight})
    model.left.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    clean(FSDP2Engine(model, torch.optim.AdamW(model.parameters())), rank, branches=lambda index: turns[index])
    engine = fsdp2()
    clean(engine, rank)
    engine.module.left.set_all_reduce_hook(lambda reduced: None)  # type: ignore[operator]
    run_window(engine, 9, rank)
    assert engine.check_plan() is None


def fsdp2_faults(rank: int, world: int) -> None:
    """S19: what a rank holds of the reduced gradient is another by a thousandth (a twentieth in bf16); the rows say which
    rank holds them. Its gradient may have become a tensor of its own meanwhile."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for policy, relative in ((None, 1e-3), (half, 5e-2)):
        engine = fsdp2(policy)
        weight = engine.module.left.weight

        def element(_: Engine, weight: Any = weight, relative: float = relative) -> None:
            size = sum(p.grad.full_tensor().square().sum() for p in engine.module.left.parameters()).sqrt()  # noqa: B023
            if rank == 1:
                weight.grad = weight.grad.clone()
                local(weight.grad).view(-1)[-1] += relative * size

        clean(engine, rank, windows=3)
        plan, found = run_window(engine, 10, rank, bad=element)
        assert plan is not None
        assert found is not None
        assert found.failed() == [(0, plan.names.index("left"))], found.ratio.tolist()
        ((_, difference, places),) = off_by_row(engine, plan, 0, plan.names.index("left"))
        assert len(places) == 1
        assert "left.weight" in places[0]
        held = engine.check_rows(plan.names.index("left"))[0].held[int(difference.argmax())]
        assert bool(held) == (rank == 1)


def replica_digests(rank: int, world: int) -> None:
    """S19: one changed bit of a weight, a moment or a constant buffer on one rank shows in its layer group and nowhere
    else. Running statistics, each rank's own between broadcasts, are no difference; a sharded model has no replicas."""
    engine = ddp()
    assert engine.replicas() == dict.fromkeys(("parameters", "optimizer", "buffers"), ((0, 1),))
    clean(engine, rank, windows=3)
    assert _different(engine) == {"parameters": [], "optimizer": [], "buffers": []}
    moments = engine.optimizer.state[engine.module.right.bias]
    for kind, tensor, group in (
        ("parameters", engine.module.left.weight, "left"),
        ("optimizer", moments["exp_avg_sq"], "right"),
        ("optimizer", moments["step"], "right"),
        ("buffers", engine.module.table, "table"),
    ):
        if rank == 1:
            _flip(tensor)
        assert _different(engine) == {"parameters": [], "optimizer": [], "buffers": [], kind: [group]}, group
        if rank == 1:
            _flip(tensor)
    if rank == 1:
        engine.optimizer.param_groups[0]["lr"] *= 1 + 1e-15
    assert _different(engine)["optimizer"] == ["options"]
    sharded = fsdp2()
    clean(sharded, rank, windows=2)
    assert sharded.replicas() == {"buffers": ((0, 1),)}
    assert _different(sharded) == {"buffers": []}


@torch.no_grad()
def _flip(tensor: torch.Tensor) -> None:
    """The lowest bit of the last element, and back."""
    words = tensor.detach().reshape(-1).view(torch.int32)
    words[-1] ^= 1


def _different(engine: Engine) -> dict[str, list[str]]:
    """Collective: names whose digest is not the same on both ranks, by kind."""
    found = {}
    for kind in engine.replicas():
        every: list[dict[str, int]] = [{}, {}]
        dist.all_gather_object(every, {name: int(d) for name, d in engine.replica_digests(kind).items()})
        assert every[0].keys() == every[1].keys()
        found[kind] = [name for name, digest in every[0].items() if every[1][name] != digest]
    return found


CASES = (ddp_variants, ddp_faults, ends_of_a_window, fsdp2_variants, fsdp2_faults, replica_digests)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_two_ranks(case: Callable[[int, int], None]) -> None:
    """C2, S19."""
    run_pooled(case, 2, timeout=110)
