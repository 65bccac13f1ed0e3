"""The exchange on real ranks: a sketch answers as a table does, alike on every rank, in a size that does not grow, and in time
(C2, S19)."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from resilient.coordinator.exchange import SKETCH_FROM, Exchange
from resilient.errors import ExchangeFailed
from resilient.signals import CheckPlan, Exchanged, Flag, Kind, StepRecord, StepSketch, StepTable
from resilient.signals.checks import CHECK_COLUMNS
from resilient.signals.record import COLUMNS
from resilient.signals.sketch_pack import ENDS, MOST_BYTES, PEAKS, TOTALS, SketchLayout
from resilient.signals.table import FACTS
from tests.ranks import run_pooled

CPU = torch.device("cpu")
MEANS = ("attention_entropy", "eval_loss", "entropy", "repetition")  # only of the ranks that measured them
SUMMED = [name for name in TOTALS if name in COLUMNS and name not in MEANS]
LAYERS = ("embedding", "block 0", "head")


def record(rank: int, step: int = 7, **values: Any) -> StepRecord:
    """Of a healthy rank; device scalars as an engine would leave them."""
    made = StepRecord(
        step,
        step + 1,
        loss=torch.tensor(2.0 + 0.1 * rank),
        loss_max=3.0 + rank,
        tokens=100.0 + rank,
        lr=1e-3,
        digest=5.0,
    )
    made.local_grad_norm, made.reduced_sq_share = torch.tensor(1.0 + rank), 0.25
    made.next_tokens, made.wait_s, made.compute_s, made.logit_max = 50.0, 0.01 * rank, 0.5, 4.0 + rank
    made.layers = {"layer_sq_share": torch.full((len(LAYERS),), 1.0 + rank)}
    made.checks = {name: torch.full((2,), 0.5 * (1 + rank)) for name in CHECK_COLUMNS}
    return replace(made, **values)


def answers(brought: Exchanged) -> dict[str, Any]:
    """All that the coordinator asks of a table or a sketch."""
    return {
        "ends": {name: brought.ends(name) for name in ENDS},
        "totals": {name: brought.total(name) for name in SUMMED},
        "peaks": {name: brought.largest(name) for name in PEAKS if not name.endswith("logit_max")},
        "flags": {1 << i: brought.ranks_flagged(1 << i) for i in range(16)},
        "facts": {fact: brought.ranks_that(fact) for fact in FACTS},
        "own": {name: brought.own(name) for name in ("flags", "local_grad_norm", "has_next", "logit_max")},
        "step": (brought.step, brought.attempt, brought.world_size, brought.rank, brought.peers),
        "global": (brought.loss, brought.grad_norm, brought.tokens, brought.next_tokens),
        "next": (brought.all_have_next, brought.any_has_next),
        "signals": dict(brought.observation().values),
        "world": brought.observation().world,
    }


def cases(rank: int, world: int) -> list[StepRecord]:
    last = rank == world - 1
    return [
        record(rank),
        record(
            rank,
            flags=Flag.BLIND | Flag.NO_OUTPUT | (Flag.CHECKPOINT if last else 0),
            local_grad_norm=0.0 if rank == 0 else 1.0,
            logit_max=math.nan if rank == 0 else 1.0,
            leftover_sq=torch.tensor(4.0 if last else 0.0),
            has_next=0.0 if last else 1.0,
            tokens=0.0 if rank == 0 else 9.0,
            digest=float(2**48 - 1 - rank),
            eval_loss=2.5 if rank == 0 else math.nan,
            attention_entropy=1.5,
        ),
        record(
            rank,
            loss=math.nan if last else 1.0,
            loss_max=math.nan if last else 1.0,
            nonfinite_forward=2.0 if last else 0.0,
            nonfinite_backward=0.0,
            local_grad_norm=math.inf if last else 1.0,
            reduced_sq_share=math.nan,
            digest_parameters=7.0 if last else 8.0,
        ),
        record(rank, kind=Kind.HELLO, tokens=0.0, loss=0.0, loss_max=0.0),
    ]


def exchanging(rank: int, world: int) -> dict[str, Any]:
    table, sketch = Exchange(CPU, 30.0), Exchange(CPU, 30.0, mode="sketch")
    plan = CheckPlan(("a", "b"), tuple((r,) for r in range(world)), 2.0**-24)
    found: dict[str, Any] = {"answers": [], "alike": [], "every": []}
    for i, made in enumerate(cases(rank, world)):
        if i:
            table.layers = sketch.layers = LAYERS
            table.plan = sketch.plan = plan
        brought = table.table(made), sketch.table(made)
        assert isinstance(brought[0], StepTable) and isinstance(brought[1], StepSketch)
        found["answers"].append([answers(b) for b in brought])
        summary = brought[1].summary
        found["alike"].append(
            repr((summary.values, summary.totals, summary.peaks, summary.ends, summary.named, summary.centre))
            + repr([summary.counts[name].tobytes() for name in summary.counts])
            + repr([e.ranks.tobytes() + e.value.tobytes() + e.sigma.tobytes() for e in summary.extremes.values()])
        )
        every = sketch.every_row(made)
        found["every"].append(np.array_equal(every.block, brought[0].block, equal_nan=True))
    found["votes"] = [sketch.vote(True), sketch.vote(rank == 0), sketch.vote(rank != 0)]
    sent: list[tuple[int, Any]] = []
    original = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append((tensor.numel() * tensor.element_size(), args[0] if args else dist.ReduceOp.SUM))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        sketch.table(record(rank))
    finally:
        dist.all_reduce = original
    found["sent"] = [size for size, _ in sent]
    found["kinds"] = [
        _raised(lambda e=e: e.table(record(rank, kind=Kind.HELLO if rank == 0 else Kind.STEP))) for e in (table, sketch)
    ]
    broken = record(rank, kind=Kind.HELLO if rank == 0 else Kind.STEP, flags=Flag.GUARD_FAILED if rank == 0 else 0)
    found["broken"] = [e.table(broken).ranks_flagged(Flag.GUARD_FAILED) for e in (table, sketch)]
    hasty = Exchange(CPU, 1.0, mode="sketch")
    began = time.monotonic()
    found["late"] = _raised(lambda: hasty.table(record(rank))) if rank == 0 else "ExchangeFailed"
    found["late_s"] = time.monotonic() - began
    return found


def _raised(act: Any) -> str:
    try:
        act()
    except ExchangeFailed as error:
        return f"ExchangeFailed: {error}"
    return "nothing"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, 4])
def test_c2_a_sketch_answers_as_a_table_alike_on_every_rank(world: int):
    results = run_pooled(exchanging, world, timeout=110)
    for found in results:
        for by_table, by_sketch in found["answers"]:
            for question, answer in by_table.items():
                told = by_sketch[question]
                if isinstance(answer, dict):
                    assert told.keys() == answer.keys(), question
                    for name in answer:
                        assert told[name] == pytest.approx(answer[name], rel=1e-12, nan_ok=True), (question, name)
                elif question == "global":
                    assert told == pytest.approx(answer, rel=1e-12, nan_ok=True)
                else:
                    assert told == answer, question
        assert found["alike"] == results[0]["alike"]  # to the last bit
        assert found["every"] == [True] * 4
        assert found["votes"] == [True, False, False]
        assert len(found["sent"]) == 2 and sum(found["sent"]) <= MOST_BYTES
        plan = CheckPlan(("a", "b"), ((0,),), 2.0**-24)
        assert sum(found["sent"]) == SketchLayout(LAYERS, plan).bytes  # says nothing of the world
        assert all("out of step" in told for told in found["kinds"])
        assert found["broken"] == [(0,), (0,)]
        assert found["late"].startswith("ExchangeFailed") and found["late_s"] < 20.0


def test_auto_takes_a_sketch_where_a_table_is_too_large(monkeypatch: pytest.MonkeyPatch):
    def mode_of(world: int, **options: Any) -> str:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        monkeypatch.setattr(Exchange, "another_group", lambda self, timeout_s: None)
        return "table" if Exchange(CPU, 1.0, **options).sketch_state is None else "sketch"

    assert mode_of(SKETCH_FROM - 1, mode="auto") == "table"
    assert mode_of(SKETCH_FROM, mode="auto") == "sketch"
    halves = [range(SKETCH_FROM // 2), range(SKETCH_FROM // 2, SKETCH_FROM)]
    assert mode_of(SKETCH_FROM, mode="auto", peers=halves) == "table"  # a sketch compares all ranks
    assert mode_of(2, mode="sketch") == "sketch" and mode_of(SKETCH_FROM) == "table"
