"""A DeepSpeed state is complete, and one that does not fit is refused before anything is touched, with a readable reason.
And where DeepSpeed's own checkpoints leave holes, ours do not."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from resilient.checkpoint.rng import capture_rng, restore_rng
from resilient.engines.deepspeed import DeepSpeedEngine
from resilient.errors import CheckpointError
from tests.engines.contract import NEUTRAL, assert_same, grad_norm, leaves, train, window, without
from tests.engines.models import Setup, build_model
from tests.engines.test_deepspeed import CPU, DeepSpeedAdapter, unguarded, warm_up
from tests.ranks import run_ranks

HYSTERESIS = {"fp16": {"hysteresis": 3, "consecutive_hysteresis": True, "loss_scale_window": 2, "min_loss_scale": 1}}


def complete(rank: int, world: int, folder: str) -> None:
    warm_up()
    for stage in (1, 3):
        full_scaler(stage, rank, world)
    for stage in (0, 2, 3):
        groups_by_name(stage, rank)
        parts_that_must_be_there(stage, rank, world)
    buffers_of_all_kinds(rank)
    for stage in (2, 3):
        random_streams(stage, rank, world, Path(folder, str(stage)))


def full_scaler(stage: int, rank: int, world: int) -> None:
    """T9, C4: hysteresis, its refill and the counters of the window, not only the scale, decide when the scale moves next."""
    setup = Setup(precision="fp16")
    adapter = DeepSpeedAdapter(stage, settings=HYSTERESIS)
    engine = adapter.make(setup, rank, world)
    train(engine, setup, [0], rank)
    for _ in range(2):
        engine.skip(overflow=True)
    scaler = engine._stage.scaler
    assert (scaler.cur_hysteresis, scaler.last_overflow_iter, scaler.cur_iter) == (1, 2, 3)
    fresh = adapter.make(setup.but(seed=9), rank, world)
    fresh.restore(engine.capture())
    assert vars(fresh._stage.scaler) == vars(scaler)
    scales = []
    for e in (engine, fresh):
        scales.append([])
        for overflow in (True, False, False, True, False, False, False):
            if overflow:
                e.skip(overflow=True)
            else:
                e.apply(grad_norm(window(e, setup, len(scales[-1]), rank)[0]), NEUTRAL)
            scales[-1].append(e.loss_scale())
    assert scales[0] == scales[1]
    assert scales[0][0] == 2.0**7, "the third overflow in a row takes the scale down"
    assert scales[0][-1] == 2.0**8, "and two good windows take it up again"
    assert_same(*(leaves(e.capture()) for e in (engine, fresh)), f"ZeRO {stage} after the scaler's moves")


def _grouped(stage: int, rank: int, *groups: tuple[str, ...]) -> DeepSpeedEngine:
    """The model with these parameters in groups of their own; the rest in the last."""
    setup = Setup(scheduled=False)
    module = build_model(setup)
    named = dict(module.named_parameters())
    rest = [p for name, p in named.items() if not any(name in group for group in groups)]
    members = [[named[name] for name in group] for group in groups] + [rest]
    return DeepSpeedAdapter(stage).around(
        module, setup, make_optimizer=lambda _: torch.optim.AdamW([{"params": m} for m in members]), make_scheduler=None
    )


def groups_by_name(stage: int, rank: int) -> None:
    """Groups of the same sizes with other parameters in them would load without a complaint, and step the wrong ones."""
    weight, bias = "blocks.0.norm.weight", "blocks.0.norm.bias"
    engine = _grouped(stage, rank, (weight,), (bias,))
    before = leaves(engine.capture())
    for groups, words in (
        (
            ((bias,), (weight,)),
            (f"parameter group 0: {bias} only in the state; {weight} only here", "parameter group 1"),
        ),
        (((weight, bias),), ("parameter group 2: missing in the state",)),
    ):
        with pytest.raises(CheckpointError) as caught:
            engine.restore(_grouped(stage, rank, *groups).capture())
        for word in words:
            assert word in str(caught.value), str(caught.value)
    same_group = _grouped(stage, rank, (weight, bias))
    with pytest.raises(CheckpointError, match="parameter group 0: the same parameters in another order"):
        same_group.restore(_grouped(stage, rank, (bias, weight)).capture())
    assert_same(before, leaves(engine.capture()), "refused states")


def parts_that_must_be_there(stage: int, rank: int, world: int) -> None:
    """T9: nothing is silently left out; masters and counters never may be."""
    setup = Setup()
    adapter = DeepSpeedAdapter(stage)
    engine, fresh = adapter.make(setup, rank, world), adapter.make(setup.but(seed=9), rank, world)
    train(engine, setup, [0, 1], rank)
    train(fresh, setup, [5], rank)
    state, before = engine.capture(), leaves(fresh.capture())
    for part in ("moments", "schedulers", "scaler", "masters", "counters"):
        with pytest.raises(CheckpointError, match=f"part '{part}' is missing"):
            fresh.restore(without(state, part))
    for part in ("masters", "counters"):
        with pytest.raises(CheckpointError, match=f"part '{part}' is missing"):
            fresh.restore(fresh.complete(without(state, part), fresh.optional_parts())[0])
    label = next(iter(state["moments"]))
    some = {key: value for key, value in state["moments"].items() if key != label}
    with pytest.raises(CheckpointError, match=f"moments of {re.escape(label)} are missing"):
        fresh.restore({**state, "moments": some})
    assert_same(before, leaves(fresh.capture()), "refused states")


class Buffered(nn.Module):
    """Buffers of all kinds: moving, integer, 0-dim, and one that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def buffers_of_all_kinds(rank: int) -> None:
    setup = Setup(scheduled=False)
    how = {"make_optimizer": lambda m: torch.optim.AdamW(m.parameters()), "make_scheduler": None}
    engine, fresh = (DeepSpeedAdapter(1).around(Buffered(), setup, **how) for _ in range(2))
    with torch.no_grad():
        for number, buffer in enumerate(engine.module.buffers()):
            buffer.fill_(number + 5)
    fresh.module.cache = torch.zeros(7)  # grown since: by declaration it can be rebuilt
    fresh.restore(engine.capture())
    found = {name: float(b.float().mean()) for name, b in fresh.module.named_buffers()}
    assert found == {"cache": 0.0, "norm.running_mean": 6, "norm.running_var": 7, "norm.num_batches_tracked": 8}


def random_streams(stage: int, rank: int, world: int, folder: Path) -> None:
    """Hole of DeepSpeed: `load_checkpoint`, into a used engine too, restores no random stream of any rank, so that dropout
    goes on otherwise. Ours restores each rank's own, and replays bit for bit (C3)."""
    setup = Setup(dropout=0.3)
    adapter = DeepSpeedAdapter(stage)
    engine = adapter.make(setup, rank, world)
    torch.manual_seed(70 + rank)  # each rank has a stream of its own
    train(engine, setup, [0], rank)
    state, rng = engine.capture(), capture_rng(CPU)
    engine.engine.save_checkpoint(str(folder))
    losses, end = train(engine, setup, [1, 2], rank), leaves(engine.capture())
    train(engine, setup, [6, 7], rank)  # used
    engine.restore(state)
    restore_rng(rng, CPU)
    assert train(engine, setup, [1, 2], rank) == losses
    assert_same(end, leaves(engine.capture()), f"ZeRO {stage}: replay")
    engine.close()
    engine.engine.load_checkpoint(str(folder))
    unguarded(engine.engine, setup, [1, 2], rank)
    masters = [(end[f"/masters/{m.label}"], m.tensor.detach()) for m in engine._stage.masters()]
    assert not all(torch.equal(a, b) for a, b in masters), "DeepSpeed restores random streams now"
    assert all(math.isfinite(float(b.sum())) for _, b in masters)


@pytest.mark.timeout(150)
def test_complete_state(tmp_path: Path) -> None:
    """Deliver 5 of issue 5, and two of DeepSpeed's holes: random streams of each rank, reload into a used engine."""
    run_ranks(complete, 2, str(tmp_path), timeout=140)
