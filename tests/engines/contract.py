"""What every engine must do, independent of the engine. Each `check_*` runs inside spawned ranks:

    def test_x():
        run_ranks(contract.run, 2, MyAdapter(), ["check_norms", "check_true_skip"])

An adapter is a picklable object that builds the engine under test (see `Adapter`); it may narrow what is compared
(`bookkeeping`, `norm_bound`) but not what is checked. A check raises AssertionError on the rank that sees the fault.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from resilient.checkpoint.digest import state_digest, walk
from resilient.checkpoint.pieces import node, show
from resilient.checkpoint.reshape import SourcePart
from resilient.checkpoint.rng import capture_rng, restore_rng
from resilient.engines.base import Engine, EngineState, Taps
from resilient.engines.pieces import state_from
from resilient.errors import CheckpointError, ConfigError
from resilient.faults.reduced import reduced_pieces
from resilient.signals import Knobs
from tests.engines.models import Setup, batch, build_model, loss_of
from tests.engines.reduction import compared, off_by_row

NEUTRAL = Knobs()


class Adapter(Protocol):
    """One engine under test. Instances are pickled into the ranks.

    name: for messages.
    precisions: those the engine is checked in; the first one in every case, the others in the hardest one.
    bookkeeping: last path components of captured leaves that a skip may change (the skipped-step count and its kin).
    """

    name: str
    precisions: tuple[str, ...]
    bookkeeping: tuple[str, ...]

    def make(self, setup: Setup, rank: int, world: int) -> Engine:
        """A fresh engine, with fresh model, optimizer and schedule built by tests.engines.models."""

    def full_parameters(self, engine: Engine) -> dict[str, torch.Tensor]:
        """Whole float32 (master) parameters by module name, cloned, on every rank. May communicate."""

    def plain_step(self, engine: Engine, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """One training step the unguarded way, with the user's own objects only, after `engine.close()`. Returns the loss."""


def run(rank: int, world: int, adapter: Adapter, checks: Sequence[str]) -> list[str]:
    """Run the named checks in order on this rank; returns their names. The entry point for `run_ranks`."""
    for name in checks:
        try:
            globals()[name](adapter, rank, world)
        except Exception as error:
            raise AssertionError(f"{name} of {adapter.name}, rank {rank}: {error}") from error
    return list(checks)


# --- driving an engine ------------------------------------------------------------------------------------------


def window(
    engine: Engine,
    setup: Setup,
    index: int,
    rank: int,
    *,
    nan_on: int | None = None,
    scale: float = 1.0,
    reduced: Callable[[Engine], None] | None = None,
) -> tuple[Taps, float]:
    """All micro-steps of data window `index`: forward and backward, nothing applied. Returns (taps, mean loss).

    nan_on: rank whose last micro-step has a NaN loss. scale: multiplies the loss. reduced: called between the reduction
    and the taps.
    """
    total = 0.0
    for micro in range(setup.accumulation):
        tokens, targets = batch(index, micro, rank)
        engine.begin_micro_step(micro, setup.accumulation)
        loss = loss_of(engine(tokens), targets) * scale
        if nan_on == rank and micro == setup.accumulation - 1:
            loss = loss * math.nan
        engine.backward(loss)
        total += float(loss.detach())
    if reduced is not None:
        reduced(engine)
    return engine.taps(), total / setup.accumulation


def grad_norm(taps: Taps) -> float:
    """The global norm as the coordinator computes it: shares summed over ranks."""
    share = taps.reduced_sq_share.detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(share)
    return math.sqrt(float(share)) if float(share) >= 0 else math.nan


def train(engine: Engine, setup: Setup, indices: Sequence[int], rank: int, *, reseed: bool = False) -> list[float]:
    """Train on these data windows. reseed: torch's RNG depends on (window, rank) only, not on what ran before."""
    losses = []
    for index in indices:
        if reseed:
            torch.manual_seed(7919 * index + rank)
        taps, loss = window(engine, setup, index, rank)
        engine.apply(grad_norm(taps), NEUTRAL)
        losses.append(loss)
    return losses


def leaves(state: EngineState, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Flat copy of a captured state: path -> cloned tensor or plain value."""
    return {
        path: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in walk(state)
        if path.rsplit("/", 1)[-1] not in leave_out
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Paths at which two flat states are not bit-identical (a NaN equals the same NaN)."""
    found = [f"{path}: only on one side" for path in sorted(a.keys() ^ b.keys())]
    for path in sorted(a.keys() & b.keys()):
        x, y = a[path], b[path]
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            if x.dtype != y.dtype or x.shape != y.shape or state_digest(x) != state_digest(y):
                found.append(f"{path}: {tuple(x.shape)} {x.dtype} differs from {tuple(y.shape)} {y.dtype}")
        elif repr(x) != repr(y):
            found.append(f"{path}: {x!r} is not {y!r}")
    return found


def assert_same(a: dict[str, Any], b: dict[str, Any], what: str) -> None:
    found = differences(a, b)
    assert not found, f"{what}: {len(found)} of {len(a)} leaves differ:\n  " + "\n  ".join(found[:12])


# --- the reference ----------------------------------------------------------------------------------------------


def reference_norms(
    setup: Setup, parameters: dict[str, torch.Tensor], index: int, rank: int, world: int, per_micro_step: bool
) -> tuple[float, float]:
    """(local, global) gradient norm of one window in one process and float64, from whole parameters.

    per_micro_step: the local norm of an engine that reduces on every micro-step: sqrt of the sum over micro-steps of
    the squared norm of each micro-step's contribution loss/accumulation.
    """
    local_sq, reduced = reference_gradients(setup, parameters, index, rank, world, per_micro_step)
    return math.sqrt(local_sq), total_norm(reduced)


def total_norm(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))


def reference_gradients(
    setup: Setup, parameters: dict[str, torch.Tensor], index: int, rank: int, world: int, per_micro_step: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """As above: the square of the local norm, and the reduced gradients by name."""
    reduced: dict[str, torch.Tensor] = {}
    local_sq = 0.0
    for r in range(world):
        accumulated: dict[str, torch.Tensor] = {}
        for micro in range(setup.accumulation):
            model = build_model(setup.but(dropout=0.0)).double()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(parameters[name])
            tokens, targets = batch(index, micro, r)
            (loss_of(model(tokens), targets) / setup.accumulation).backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            if r == rank and per_micro_step:
                local_sq += sum(float(g.square().sum()) for g in grads.values())
            for name, g in grads.items():
                accumulated[name] = accumulated.get(name, 0) + g
        if r == rank and not per_micro_step:
            local_sq = sum(float(g.square().sum()) for g in accumulated.values())
        for name, g in accumulated.items():
            reduced[name] = reduced.get(name, 0) + g / world
    return local_sq, reduced


# relative bounds on norms against the float64 reference: float32 as BR-45 demands; 8 bits of mantissa otherwise
NORM_BOUND = {"fp32": 1e-5, "bf16": 4e-2, "fp16": 1e-2}


# --- the checks -------------------------------------------------------------------------------------------------


def layer_norms(values: torch.Tensor) -> list[float]:
    """Norms by layer group from this rank's shares of their squares."""
    total = values.detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt().tolist()


def check_norms(adapter: Adapter, rank: int, world: int) -> None:
    """BR-45: global and local gradient norms equal a single-process reference, at accumulation 1 and 4, on the first
    step and after training, tied head and several parameter groups included; there are several buckets. S3: so do the
    norms by layer group, whose squares add up to the global one."""
    for precision in adapter.precisions:
        bound = NORM_BOUND[precision]
        for accumulation, tied in ((1, False), (4, True)):
            setup = Setup(accumulation=accumulation, precision=precision, tied=tied, groups=True)  # type: ignore[arg-type]
            engine = adapter.make(setup, rank, world)
            for index in range(3):
                parameters = adapter.full_parameters(engine)
                taps, _ = window(engine, setup, index, rank)
                local_sq, reduced = reference_gradients(setup, parameters, index, rank, world, engine.per_micro_step)
                local, whole = math.sqrt(local_sq), total_norm(reduced)
                got_local, got_whole = math.sqrt(float(taps.local_sq)), grad_norm(taps)
                case = f"{precision}, accumulation {accumulation}, window {index}"
                assert abs(got_whole / whole - 1) < bound, f"{case}: grad_norm {got_whole}, reference {whole}"
                assert abs(got_local / local - 1) < bound, f"{case}: local norm {got_local}, reference {local}"
                assert taps.local_sq.ndim == 0
                assert taps.reduced_sq_share.ndim == 0
                for i, layer in enumerate(engine.layers.names):
                    got = layer_norms(taps.layer_sq_share)[i]
                    reference = total_norm({n: g for n, g in reduced.items() if engine.layers.of[n] == i})
                    assert abs(got / reference - 1) < 3 * bound, f"{case}: {layer} {got}, reference {reference}"
                assert math.isclose(float(taps.layer_sq_share.sum()), float(taps.reduced_sq_share), rel_tol=1e-12)
                enough = 1 if index == 0 else 2  # DDP learns its buckets in the first backward, which has one
                assert taps.buckets >= enough, f"{case}: taps saw {taps.buckets} buckets"
                engine.apply(got_whole, NEUTRAL)
            engine.close()


def check_reduction(adapter: Adapter, rank: int, world: int) -> None:
    """C2, S19: what all ranks send and what each receives agree within rounding in clean windows, accumulation 1 and 2,
    from the third window on at the latest, and a refused window leaves no trace in the next. A gradient that is another
    on one rank when the optimizer comes to it does not agree, and its rows name the parameter."""
    for precision in adapter.precisions:
        for accumulation in (1, 2) if precision == adapter.precisions[0] else (2,):
            setup = Setup(accumulation=accumulation, precision=precision, groups=True, width=40)  # type: ignore[arg-type]
            engine = adapter.make(setup, rank, world)
            for index in range(6):
                case = f"{precision}, accumulation {accumulation}, window {index}"
                plan = engine.check_plan()
                spoilt: list[str] = []
                taps, _ = window(engine, setup, index, rank, reduced=_spoil(spoilt, rank == world - 1 and index == 4))
                found = compared(plan, taps)
                if world == 1:
                    assert plan is None, f"{case}: nothing is reduced"
                elif found is None:
                    assert index < 2, f"{case}: no plan"
                elif index != 4:
                    assert not found.failed(), f"{case}: {found.plan.names}, off by {found.ratio.tolist()} roundings"
                else:
                    assert plan is not None
                    assert len(found.failed()) == 1, f"{case}: {found.ratio.tolist()}"
                    group, cell = found.failed()[0]
                    assert world - 1 in plan.receivers[group], f"{case}: {plan.receivers[group]} are said to be off"
                    (_, _, places), *others = off_by_row(engine, plan, group, cell)
                    assert not others
                    named = [*spoilt, ""][:1]
                    dist.broadcast_object_list(named, src=world - 1)
                    assert named[0] in places[0], f"{case}: {named} was spoilt, {places} said to be"
                if index in (3, 4):
                    engine.skip()
                else:
                    engine.apply(grad_norm(taps), NEUTRAL)
            engine.uncheck()
            unchecked, _ = window(engine, setup, 5, rank)
            assert engine.check_plan() is None and not unchecked.checks, "nothing is checked any more"
            assert float(unchecked.local_sq) > 0 and unchecked.buckets == taps.buckets, "what else is tapped stays"
            engine.close()


def _spoil(name: list[str], here: bool) -> Callable[[Engine], None]:
    """Adds a tenth of the gradient's norm to one element of the largest piece this rank holds, and notes its name."""

    def spoil(engine: Engine) -> None:
        piece = max(reduced_pieces(engine), key=lambda piece: piece.values.numel())
        with torch.no_grad():
            flat = piece.flat()
            flat[flat.numel() // 2] += 0.5 * flat.float().norm()
        name.append(piece.name)

    return spoil if here else lambda engine: None


def check_replicas(adapter: Adapter, rank: int, world: int) -> None:
    """S19: what ranks hold alike has the same digests on all of them, by name, before and after training; and they are
    digests of what is trained."""
    setup = Setup(groups=True)
    engine = adapter.make(setup, rank, world)
    groups = engine.replicas()
    assert set(groups) <= {"parameters", "optimizer", "buffers"}
    before: dict[str, dict[str, int]] = {}
    for index in range(3):
        if index:
            train(engine, setup, [index], rank)
        for kind, members in groups.items():
            assert sorted(r for group in members for r in group) == list(range(world)), f"{kind}: {members}"
            assert all(len(group) > 1 for group in members)
            digests = engine.replica_digests(kind)
            assert all(d.dtype == torch.int64 and d.ndim == 0 for d in digests.values())
            mine = {name: int(d) for name, d in digests.items()}
            every: list[dict[str, int]] = [{} for _ in range(world)]
            dist.all_gather_object(every, mine)
            for group in members:
                for other in group:
                    assert every[other] == every[group[0]], f"window {index}, {kind}: {every[other]}, {every[group[0]]}"
            if index and kind != "buffers":
                same = [name for name, digest in mine.items() if before[kind].get(name) == digest]
                assert not set(same) & set(engine.layers.names), f"{kind}: training did not change {same}"
            before[kind] = mine
    if world == 1:
        assert not groups
    engine.close()


def check_weight_norm(adapter: Adapter, rank: int, world: int) -> None:
    """T2: the shares of the weight norm add up to the norm of all parameters, fresh and trained."""
    for precision in adapter.precisions:
        setup = Setup(precision=precision, tied=True, groups=True)  # type: ignore[arg-type]
        engine = adapter.make(setup, rank, world)
        for index in range(2):
            whole = sum(float(p.double().square().sum()) for p in adapter.full_parameters(engine).values())
            share = engine.weight_sq_share().clone()
            assert share.ndim == 0
            if dist.is_initialized():
                dist.all_reduce(share)
            assert abs(math.sqrt(float(share)) / math.sqrt(whole) - 1) < 1e-6, (
                f"{precision}, {float(share)} for {whole}"
            )
            train(engine, setup, [index], rank)
        engine.close()


def check_updates(adapter: Adapter, rank: int, world: int) -> None:
    """BR-07: the measured change of a step, by layer group, is the difference of the parameters before and after it,
    clipping and an LR knob included; a skip measures nothing. BR-04: no gradient is left after a step or a skip, and one
    that nothing was decided about is seen."""
    for precision in adapter.precisions:
        setup = Setup(precision=precision, groups=True, clip=0.5)  # type: ignore[arg-type]
        engine = adapter.make(setup, rank, world)
        assert engine.layers.names == ("embedding", "blocks.0", "blocks.1", "head"), engine.layers.names
        for index, factor in enumerate((1.0, 1.0, 0.5)):
            before = adapter.full_parameters(engine)
            assert float(engine.leftover_sq() or 0.0) == 0.0, f"{precision}, window {index}"
            taps, _ = window(engine, setup, index, rank)
            engine.watch_update(with_lag=True)
            engine.apply(grad_norm(taps), Knobs(lr_factor=factor))
            update = engine.take_update()
            assert update is not None
            assert engine.take_update() is None
            wanted = dict.fromkeys(engine.layers.names, 0.0)
            for name, p in adapter.full_parameters(engine).items():
                wanted[engine.layers.names[engine.layers.of[name]]] += float((p - before[name]).double().square().sum())
            for name, got in zip(wanted, layer_norms(update.sq_share), strict=True):
                reference = math.sqrt(wanted[name])
                assert abs(got / reference - 1) < 1e-5, f"{precision}, {name}: {got}, reference {reference}"
            assert update.lag_share is not None
            lag = layer_norms(update.lag_share)
            if index == 0:  # the bias-corrected v of the first step is g^2 itself: 1, less for elements without
                # gradient; 1.4 where DeepSpeed had the optimizer step on zeros before (its half-precision ZeRO 0)
                assert all(0.2 < value < 1.4 for value in lag), f"{precision}: {lag}"
            assert all(0.0 < value < 5.0 for value in lag), f"{precision}: {lag}"
        taps, _ = window(engine, setup, 3, rank)
        left = engine.leftover_sq()
        assert left is not None
        assert float(left) == float(taps.reduced_sq_share)
        engine.watch_update(with_lag=False)
        engine.skip()
        assert engine.take_update() is None
        assert float(engine.leftover_sq() or 0.0) == 0.0, f"{precision}, after a skip"
        engine.close()


def check_true_skip(adapter: Adapter, rank: int, world: int) -> None:
    """A skip leaves no trace: what capture() returns is bit-identical to before the window, and training on equals
    training that never saw the batch, bit for bit; a NaN gradient on one rank or a finite one, accumulation 1 and 2."""
    for precision in adapter.precisions:
        cases = ((1, None), (1, world - 1), (2, world - 1))
        for accumulation, nan_on in cases if precision == adapter.precisions[0] else cases[-1:]:
            setup = Setup(accumulation=accumulation, precision=precision, dropout=0.1)  # type: ignore[arg-type]
            case = f"{precision}, accumulation {accumulation}, NaN on {nan_on}"
            engine, twin = adapter.make(setup, rank, world), adapter.make(setup, rank, world)
            train(engine, setup, [0, 1], rank, reseed=True)
            before, counted = leaves(engine.capture(), adapter.bookkeeping), engine.counters()
            taps, _ = window(engine, setup, 2, rank, nan_on=nan_on)
            if nan_on is not None:
                assert not math.isfinite(grad_norm(taps)), f"{case}: the NaN is not in the reduced norm"
                assert math.isfinite(float(taps.local_sq)) == (rank != nan_on), (
                    f"{case}: local norm names the wrong rank"
                )
            engine.skip()
            assert_same(before, leaves(engine.capture(), adapter.bookkeeping), f"{case}: the skip")
            now = engine.counters()
            assert (now.steps, now.schedule) == (counted.steps, counted.schedule), f"{case}: {counted} -> {now}"
            assert now.skipped == counted.skipped + 1, f"{case}: skipped {counted.skipped} -> {now.skipped}"
            after = train(engine, setup, [3, 4], rank, reseed=True)
            twin_after = train(twin, setup, [0, 1, 3, 4], rank, reseed=True)[2:]
            assert after == twin_after, f"{case}: losses after the skip {after}, without the batch {twin_after}"
            assert_same(
                leaves(twin.capture(), adapter.bookkeeping),
                leaves(engine.capture(), adapter.bookkeeping),
                f"{case}: training on after the skip",
            )
            engine.close()
            twin.close()


def check_replay(adapter: Adapter, rank: int, world: int) -> None:
    """capture -> train -> restore -> train is bitwise the same, dropout on, once the RNG is restored too; without the
    RNG it is not (the control). The captured state is frozen."""
    for precision in adapter.precisions:
        for accumulation in (1, 2) if precision == adapter.precisions[0] else (2,):
            setup = Setup(accumulation=accumulation, precision=precision, dropout=0.2, groups=True)  # type: ignore[arg-type]
            case = f"{precision}, accumulation {accumulation}"
            engine = adapter.make(setup, rank, world)
            torch.manual_seed(40 + rank)
            train(engine, setup, [0, 1], rank)
            state, rng = engine.capture(), capture_rng(engine.device)
            digest = state_digest(state)
            losses = train(engine, setup, [2, 3, 4], rank)
            end = leaves(engine.capture())
            assert state_digest(state) == digest, f"{case}: training changed a captured state"

            engine.restore(state)
            restore_rng(rng, engine.device)
            assert_same(leaves(state), leaves(engine.capture()), f"{case}: what a restore put back")
            assert train(engine, setup, [2, 3, 4], rank) == losses, f"{case}: the replay's losses differ"
            assert_same(end, leaves(engine.capture()), f"{case}: the replay")

            engine.restore(state)
            control = train(engine, setup, [2, 3, 4], rank)
            assert control != losses, f"{case}: the control without RNG replays too, so dropout proves nothing"
            assert state_digest(state) == digest, f"{case}: a restore changed the captured state"
            engine.close()


def check_restore_to_start(adapter: Adapter, rank: int, world: int) -> None:
    """State that did not exist at capture (moments before the first step) is dropped again by a restore."""
    for precision in adapter.precisions:
        setup = Setup(precision=precision)  # type: ignore[arg-type]
        engine = adapter.make(setup, rank, world)
        state = engine.capture()
        losses = train(engine, setup, [0, 1, 2], rank)
        end = leaves(engine.capture())
        engine.restore(state)
        assert_same(leaves(state), leaves(engine.capture()), f"{precision}: back at the start")
        assert train(engine, setup, [0, 1, 2], rank) == losses
        assert_same(end, leaves(engine.capture()), f"{precision}: replay from the start")
        engine.close()


def check_fresh_engine(adapter: Adapter, rank: int, world: int) -> None:
    """A state that went through torch.save and torch.load(weights_only=True) continues in new objects, bit for bit."""
    for precision in adapter.precisions:
        setup = Setup(precision=precision, dropout=0.2, groups=True, tied=True)  # type: ignore[arg-type]
        engine = adapter.make(setup, rank, world)
        torch.manual_seed(50 + rank)
        train(engine, setup, [0, 1], rank)
        file = io.BytesIO()
        torch.save({"engine": engine.capture(), "rng": capture_rng(engine.device)}, file)
        losses = train(engine, setup, [2, 3], rank)
        end, counted, lr = leaves(engine.capture()), engine.counters(), engine.lr()
        engine.close()

        fresh = adapter.make(setup.but(seed=2), rank, world)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        fresh.restore(loaded["engine"])
        restore_rng(loaded["rng"], fresh.device)
        assert train(fresh, setup, [2, 3], rank) == losses, f"{precision}: the resumed losses differ"
        assert_same(end, leaves(fresh.capture()), f"{precision}: the resumed run")
        assert (fresh.counters(), fresh.lr()) == (counted, lr)
        fresh.close()


def check_abandoned_window(adapter: Adapter, rank: int, world: int) -> None:
    """A restore in the middle of a window (first micro-step of two done) leaves no gradient behind."""
    for precision in adapter.precisions:
        setup = Setup(precision=precision, accumulation=2)  # type: ignore[arg-type]
        engine = adapter.make(setup, rank, world)
        train(engine, setup, [0], rank)
        state = engine.capture()
        losses = train(engine, setup, [1, 2], rank)
        end = leaves(engine.capture())
        tokens, targets = batch(9, 0, rank)
        engine.begin_micro_step(0, 2)
        engine.backward(loss_of(engine(tokens), targets))
        engine.restore(state)
        assert train(engine, setup, [1, 2], rank) == losses, f"{precision}: losses after an abandoned window"
        assert_same(end, leaves(engine.capture()), f"{precision}: training after an abandoned window")
        engine.close()


def check_lr_factor(adapter: Adapter, rank: int, world: int) -> None:
    """lr_factor scales exactly one step and never reaches a recursive schedule."""
    setup = Setup(groups=True)
    engine = adapter.make(setup, rank, world)
    train(engine, setup, [0], rank)
    state = engine.capture()
    start = adapter.full_parameters(engine)
    moves, rates = {}, {}
    for factor in (1.0, 0.25):
        engine.restore(state)
        norm = grad_norm(window(engine, setup, 1, rank)[0])
        engine.apply(norm, Knobs(lr_factor=factor))
        moves[factor] = {n: p - start[n] for n, p in adapter.full_parameters(engine).items()}
        train(engine, setup, [2, 3], rank)
        rates[factor] = engine.lr()
    for name, move in moves[1.0].items():
        assert move.abs().max() > 0, f"{name} did not move"
        error = (moves[0.25][name] - 0.25 * move).abs().max() / move.abs().max()
        assert error < 1e-3, f"{name}: a step with lr_factor 0.25 is off by {error}"
    assert rates[1.0] == rates[0.25], f"the LR factor leaked into the schedule: {rates}"
    assert abs(rates[1.0] / (setup.lr * setup.gamma**4) - 1) < 1e-12, rates
    engine.close()


def check_clip(adapter: Adapter, rank: int, world: int) -> None:
    """Clipping uses the given norm and clip * clip_factor, and only ever shrinks: the length of an SGD step tells."""
    setup = Setup(optimizer="sgd", clip=0.02, lr=1.0, scheduled=False)
    engine = adapter.make(setup, rank, world)
    assert engine.counters().schedule is None
    state, start = engine.capture(), adapter.full_parameters(engine)
    for factor in (1.0, 0.5, 1e9):
        engine.restore(state)
        norm = grad_norm(window(engine, setup, 0, rank)[0])
        assert norm > 0.1, f"the gradient ({norm}) would not be clipped"
        engine.apply(norm, Knobs(clip_factor=factor))
        moved = adapter.full_parameters(engine)
        length = math.sqrt(sum(float((moved[n] - start[n]).double().square().sum()) for n in start))
        expected = min(norm, 0.02 * factor)
        assert abs(length / expected - 1) < 2e-4, f"clip_factor {factor}: step length {length}, expected {expected}"
    engine.close()


def check_unmeasured_apply(adapter: Adapter, rank: int, world: int) -> None:
    """apply(None, ...) as an unguarded run calls it: the engine finds the norm itself and clips by it."""
    setup = Setup(optimizer="sgd", clip=0.02, lr=1.0)
    engine = adapter.make(setup, rank, world)
    state = engine.capture()
    norm = grad_norm(window(engine, setup, 0, rank)[0])
    engine.apply(norm, NEUTRAL)
    given = adapter.full_parameters(engine)
    engine.restore(state)
    window(engine, setup, 0, rank)
    engine.apply(None, NEUTRAL)
    for name, p in adapter.full_parameters(engine).items():
        torch.testing.assert_close(p, given[name], rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")
    engine.close()


def check_betas(adapter: Adapter, rank: int, world: int) -> None:
    """The betas knob holds for one step; the optimizer's own betas come back."""
    setup = Setup(groups=True)
    engine = adapter.make(setup, rank, world)
    train(engine, setup, [0, 1], rank)
    state = engine.capture()
    ends = []
    for betas in (None, (0.9, 0.95), (0.5, 0.6)):
        engine.restore(state)
        norm = grad_norm(window(engine, setup, 2, rank)[0])
        engine.apply(norm, Knobs(betas=betas))
        ends.append(leaves(engine.capture()))
    assert_same(ends[0], ends[1], "betas equal to the optimizer's own")
    assert differences(ends[0], ends[2]), "other betas changed nothing"
    plain = {p: v for p, v in ends[0].items() if not isinstance(v, torch.Tensor)}
    assert_same(plain, {p: v for p, v in ends[2].items() if not isinstance(v, torch.Tensor)}, "the betas knob leaked")
    engine.close()


def check_counters(adapter: Adapter, rank: int, world: int) -> None:
    """BR-18: the engine's count, the schedule and the number of applies agree, through skips and restores."""
    for precision in adapter.precisions:
        setup = Setup(accumulation=2, precision=precision)  # type: ignore[arg-type]
        engine = adapter.make(setup, rank, world)
        assert (engine.counters().steps, engine.counters().skipped, engine.counters().schedule) == (0, 0, 0)
        train(engine, setup, [0, 1], rank)
        state = engine.capture()
        for index in (2, 3):
            window(engine, setup, index, rank)
            engine.skip()
        train(engine, setup, [4], rank)
        counted = engine.counters()
        assert (counted.steps, counted.skipped, counted.schedule) == (3, 2, 3), counted
        assert abs(engine.lr() / (setup.lr * setup.gamma**3) - 1) < 1e-12
        engine.restore(state)
        counted = engine.counters()
        assert (counted.steps, counted.skipped, counted.schedule) == (2, 0, 2), counted
        engine.close()


def check_unused_parameter(adapter: Adapter, rank: int, world: int) -> None:
    """A parameter without a gradient is measured as nothing, captured, skipped and replayed like the others."""
    setup = Setup(unused=True, groups=True, accumulation=2)
    engine = adapter.make(setup, rank, world)
    parameters = adapter.full_parameters(engine)
    taps, _ = window(engine, setup, 0, rank)
    local, whole = reference_norms(setup, parameters, 0, rank, world, engine.per_micro_step)
    assert abs(grad_norm(taps) / whole - 1) < 1e-5
    assert abs(math.sqrt(float(taps.local_sq)) / local - 1) < 1e-5
    engine.apply(grad_norm(taps), NEUTRAL)
    state = engine.capture()
    assert any("spare.weight" in path for path in leaves(state)) or engine.name == "deepspeed"
    losses = train(engine, setup, [1, 2], rank)
    end = leaves(engine.capture(), adapter.bookkeeping)
    engine.restore(state)
    window(engine, setup, 7, rank)
    engine.skip()
    assert train(engine, setup, [1, 2], rank) == losses
    end_again = leaves(engine.capture(), adapter.bookkeeping)
    assert_same(end, end_again, "replay with an unused parameter")
    engine.close()


def check_refuses_foreign_state(adapter: Adapter, rank: int, world: int) -> None:
    """A state of another model is refused with a message that says what differs, before anything is touched."""
    setup = Setup()
    engine, other = adapter.make(setup, rank, world), adapter.make(setup.but(width=20), rank, world)
    train(engine, setup, [0], rank)
    before = leaves(engine.capture())
    try:
        engine.restore(other.capture())
    except CheckpointError as error:
        message = str(error)
    else:
        raise AssertionError("the state of a wider model was accepted")
    assert "embedding" in message or "shape" in message or "size" in message, message
    assert_same(before, leaves(engine.capture()), "a refused restore")
    engine.close()
    other.close()


def check_weights_are_the_cast(adapter: Adapter, rank: int, world: int) -> None:
    """BR-08: weights are the cast of their masters, fresh, trained and restored. A state in which a single element of a
    master or of a weight is off is named, on the rank that holds it, and on no other; NaN is no difference."""
    for precision in adapter.precisions:
        setup = Setup(precision=precision, tied=True, groups=True, unused=True)  # type: ignore[arg-type]
        engine = adapter.make(setup, rank, world)
        assert engine.mismatched_weights() == [], f"{precision}, fresh"
        start = engine.capture()
        train(engine, setup, [0, 1], rank)
        assert engine.mismatched_weights() == [], f"{precision}, trained"
        state = engine.capture()
        engine.restore(start)
        assert engine.mismatched_weights() == [], f"{precision}, back at the start"
        engine.restore(state)
        assert engine.mismatched_weights() == [], f"{precision}, restored"
        held = engine.pieces(state)
        masters = [piece for piece in held if piece.path[0] == "masters"]
        if not masters:
            with torch.no_grad():
                next(engine.module.parameters()).mul_(2.0)
            assert engine.mismatched_weights() == [], f"{precision}: there are no masters to be apart from"
            engine.close()
            continue
        for master in (masters[0], masters[-1]):
            name = master.name.removeprefix("masters/")
            weight = next(p for p in held if p.path[0] == "parameters" and p.name == f"parameters/{name}")
            last = master.elements - 1
            at = master.offset[0] + last
            places = {
                "master": (master.path, master.start + last),
                "weight": (weight.path, weight.start + at - weight.offset[0]),
            }
            for what, (path, place) in places.items():
                spoilt = engine.capture()
                if rank == world - 1:
                    values = node(spoilt, path).view(-1)
                    values[place] = values[place] * 1.25 + 0.25
                engine.restore(spoilt)
                lines = engine.mismatched_weights()
                case = f"{precision}, {what} of {name}: {lines}"
                assert len(lines) == (rank == world - 1), case
                for line in lines:
                    assert f"rank {rank}: the weights of {name} " in line, case
                    assert "1 of the " in line and f"first element {at} " in line, case
                engine.restore(state)
            spoilt = engine.capture()
            for path, place in places.values():
                node(spoilt, path).view(-1)[place] = math.nan
            _other_bits(node(spoilt, places["weight"][0]).view(-1), places["weight"][1])
            engine.restore(spoilt)
            assert engine.mismatched_weights() == [], f"{precision}: NaN"
            engine.restore(state)
        assert engine.mismatched_weights() == [], f"{precision}, restored again"
        engine.close()


def _other_bits(values: torch.Tensor, place: int) -> None:
    """The same NaN with another sign."""
    bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    bits[place] ^= torch.iinfo(bits.dtype).min


def without(state: EngineState, *parts: str) -> EngineState:
    """A state as if it had been saved without these parts, named as `Engine.optional_parts` does."""
    lacking = dict(state)
    for part in parts:
        name = part.removeprefix("buffers/")
        if name != part:
            lacking["buffers"] = {key: value for key, value in lacking["buffers"].items() if key != name}
            if "layout" in lacking:
                lacking["layout"] = {key: text for key, text in lacking["layout"].items() if key != f"buffer {name}"}
        elif part == "moments" and "optimizer" in lacking:
            lacking["optimizer"] = {key: value for key, value in lacking["optimizer"].items() if key != "state"}
        else:
            del lacking["schedule" if part == "schedulers" and "schedule" in lacking else part]
    return lacking


def another_world_may_lack(engine: Engine, sources: Sequence[SourcePart], rank: int, world: int) -> None:
    """Parts of another world that lack all they may: refused with a reason and nothing touched, or those stay as they are."""
    optional, before = engine.optional_parts(), leaves(engine.capture())
    places = tuple(path.lstrip("/") for part in optional for path in _PLACES[part])
    lacking = [
        SourcePart(
            s.rank, without(dict(s.state), *optional), [p for p in s.pieces if not show(p.path).startswith(places)]
        )
        for s in sources
    ]
    try:
        state_from(lacking, engine, rank, world, optional[1:])
    except CheckpointError as error:
        assert f"part '{optional[0]}' is missing" in str(error), error
    else:
        raise AssertionError(f"parts without {optional[0]} were accepted")
    assert_same(before, leaves(engine.capture()), "a refused state of another world")
    state = state_from(lacking, engine, rank, world, optional)
    whole, kept = engine.complete(state, optional)
    assert kept == optional, kept
    engine.restore(whole)
    after, weights = leaves(engine.capture()), leaves(state_from(sources, engine, rank, world))
    stays = tuple(path for part in optional for path in _PLACES[part])
    for path, value in after.items():
        assert_same({path: (before if path.startswith(stays) else weights)[path]}, {path: value}, "of another world")


_PLACES = {
    "moments": ("/optimizer/state/", "/moments/"),
    "schedulers": ("/schedule/", "/schedulers/"),
    "scaler": ("/scaler/",),
    "buffers/centre.mean": ("/buffers/centre.mean",),
}


def check_what_a_state_may_lack(adapter: Adapter, rank: int, world: int) -> None:
    """BR-09: a part that is missing is refused, with nothing touched, unless it was named: then it alone stays as it is."""
    for precision in dict.fromkeys((adapter.precisions[0], adapter.precisions[-1])):
        setup = Setup(precision=precision, groups=True)  # type: ignore[arg-type]
        engine, fresh = adapter.make(setup, rank, world), adapter.make(setup.but(seed=9), rank, world)
        train(engine, setup, [0, 1], rank)
        train(fresh, setup, [5], rank)
        state, start = engine.capture(), fresh.capture()
        wanted, before = leaves(state), leaves(start)
        optional = fresh.optional_parts()
        assert set(optional) == set(_PLACES) - ({"scaler"} - set(optional)), optional

        for wrong, near in (("schedular", "schedulers"), ("buffers/center.mean", "buffers/centre.mean")):
            try:
                fresh.complete(state, ("moments", wrong))
            except ConfigError as error:
                assert wrong in str(error) and f"did you mean '{near}'" in str(error), error
            else:
                raise AssertionError(f"{wrong} was accepted as the name of a part")
        assert fresh.complete(state, optional) == (state, ()), "what the state has is its own"

        for part in optional:
            others = tuple(name for name in optional if name != part)
            lacking, names = without(state, part), (part, part.removeprefix("buffers/"))
            for allowed in ((), others):
                try:
                    fresh.restore(fresh.complete(lacking, allowed)[0])
                except CheckpointError as error:
                    assert any(name in str(error) for name in names), error
                else:
                    raise AssertionError(f"a state without {part} was accepted where only {allowed} may be missing")
            assert_same(before, leaves(fresh.capture()), f"{precision}: a refused state without {part}")

        for parts in ((part,) for part in optional) if world == 1 else (optional,):
            whole, kept = fresh.complete(without(state, *parts), optional)
            assert kept == parts, (kept, parts)
            assert_same(before, leaves(fresh.capture()), "completing a state")
            train(fresh, setup, [6], rank)  # what was kept is frozen
            fresh.restore(whole)
            stays = tuple(place for part in parts for place in _PLACES[part])
            expected = {
                **{path: value for path, value in wanted.items() if not path.startswith(stays)},
                **{path: value for path, value in before.items() if path.startswith(stays)},
            }
            assert_same(expected, leaves(fresh.capture()), f"{precision}: restored without {parts}")
            train(fresh, setup, [7], rank)
            fresh.restore(start)
        engine.close()
        fresh.close()


def check_a_schedule_that_is_new(adapter: Adapter, rank: int, world: int) -> None:
    """A state that was saved without a schedule, where there is one now: refused, or the schedule stays where it is."""
    setup = Setup(groups=True)
    plain, fresh = adapter.make(setup.but(scheduled=False), rank, world), adapter.make(setup, rank, world)
    train(plain, setup, [0, 1], rank)
    state, before = plain.capture(), leaves(fresh.capture())
    try:
        fresh.restore(fresh.complete(state, ("moments",))[0])
    except CheckpointError as error:
        assert "none in the state, ExponentialLR here" in str(error), error
    else:
        raise AssertionError("a state without a schedule was accepted")
    assert_same(before, leaves(fresh.capture()), "a refused state without a schedule")
    whole, kept = fresh.complete(state, ("schedulers",))
    fresh.restore(whole)
    assert kept == ("schedulers",) and fresh.counters().steps == 2
    assert fresh.counters().schedule == 0 and fresh.lr() == setup.lr, (fresh.counters(), fresh.lr())
    a, b = adapter.full_parameters(plain), adapter.full_parameters(fresh)
    assert_same(a, b, "parameters of a state without a schedule")
    train(fresh, setup, [2], rank)
    assert fresh.counters().schedule == 1 and abs(fresh.lr() / (setup.lr * setup.gamma) - 1) < 1e-12, fresh.lr()
    plain.close()
    fresh.close()


def check_evaluation_between(adapter: Adapter, rank: int, world: int) -> None:
    """An evaluation pass between two steps changes nothing, wherever capture and restore fall around it."""
    setup = Setup()
    engine, twin = adapter.make(setup, rank, world), adapter.make(setup, rank, world)
    train(engine, setup, [0], rank)
    train(twin, setup, [0], rank)

    def evaluate() -> float:
        engine.module.eval()
        tokens, targets = batch(77, 0, rank)
        with torch.no_grad():
            loss = float(loss_of(engine(tokens), targets))
        engine.module.train()
        return loss

    evaluate()
    synced = ("centre.mean",)  # DDP copies rank 0's buffers to the others in every forward, this one included
    assert_same(leaves(twin.capture(), synced), leaves(engine.capture(), synced), "an evaluation pass")
    state = engine.capture()
    assert train(engine, setup, [1, 2], rank) == train(twin, setup, [1, 2], rank)
    end, value = leaves(engine.capture()), evaluate()
    engine.restore(state)
    assert evaluate() != value, "evaluation after a restore still sees the newer weights"
    train(engine, setup, [1, 2], rank)
    assert_same(end, leaves(engine.capture()), "replay around evaluation passes")
    assert evaluate() == value
    engine.close()
    twin.close()


def check_close(adapter: Adapter, rank: int, world: int) -> None:
    """close() is idempotent and leaves the user's objects working unguarded: they train on like before."""
    setup = Setup()
    engine, twin = adapter.make(setup, rank, world), adapter.make(setup, rank, world)
    train(engine, setup, [0, 1], rank)
    train(twin, setup, [0, 1], rank)
    engine.close()
    engine.close()
    plain = [adapter.plain_step(engine, *batch(index, 0, rank)) for index in (2, 3)]
    guarded = train(twin, setup, [2, 3], rank)
    assert plain == guarded, f"unguarded after close: {plain}, guarded: {guarded}"
    a, b = adapter.full_parameters(engine), adapter.full_parameters(twin)
    assert_same(b, a, "parameters trained unguarded after close")
    twin.close()


ALL = tuple(name for name in globals() if name.startswith("check_"))
