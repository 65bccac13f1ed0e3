"""T6: a refused window is run once more and the module in which its NaN began is named; training goes on as if nothing
had been looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import resilient
from resilient.checkpoint.config import SnapshotConfig
from resilient.coordinator.config import GuardConfig
from resilient.errors import StopRequested
from resilient.incidents.nan_origin import OriginProbe
from resilient.policies.config import PolicyConfig, RollbackConfig, SkipConfig
from resilient.telemetry.report import report_page
from resilient.telemetry.run_data import load_run
from tests.ranks import run_pooled, run_ranks
from tests.scenarios.harness import Ear, Job, Outcome, run_job, same_training

pytestmark = pytest.mark.timeout(120)

LOOK = GuardConfig(exchange_timeout_s=30.0)
NEVER = replace(LOOK, nan_probes=0)


def origins(outcome: Outcome) -> list[dict[str, Any]]:
    return [fields for kind, fields in outcome.events if kind == "nan_origin"]


def looked_and_not(rank: int, world: int, engine: str, precision: str) -> list[Outcome]:
    """Two modules, each from one batch: with dropout on and two micro-steps a window, once with a look and once without."""
    faults = [
        {"kind": "nan_in_module", "step": 3, "rank": 1, "module": "blocks.1.mlp.down", "place": "forward"},
        {"kind": "nan_in_module", "step": 5, "rank": 0, "module": "blocks.0.attention.qkv", "place": "backward"},
    ]
    job = Job(engine=engine, precision=precision, steps=5, accumulation=2, fault={"kind": "sequence", "faults": faults})
    return [run_job(job.with_(guard=guard), rank, world) for guard in (LOOK, NEVER)]


def several(rank: int, world: int, kinds: list[tuple[str, str]]) -> list[list[Outcome]]:
    return [looked_and_not(rank, world, *kind) for kind in kinds]


ZERO = [("zero1", "fp32"), ("zero1", "bf16"), ("zero3", "fp32"), ("zero3", "bf16")]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "kinds", [[("ddp", "fp32")], [("fsdp2", "fp32"), ("fsdp2", "bf16")], ZERO], ids=lambda k: k[0][0]
)
def test_t6_the_module_is_named_and_training_equals_the_twin_that_did_not_look(kinds: list[tuple[str, str]]):
    run = run_ranks if kinds is ZERO else run_pooled
    for outcomes in run(several, 2, kinds, timeout=230):
        for kind, (looked, twin) in zip(kinds, outcomes, strict=True):
            told = origins(looked)
            assert [(o["attempt"], o["ranks"], o["place"], o["module"], o["micro_step"]) for o in told] == [
                (3, [1], "forward", "blocks.1.mlp.down", 1),
                (5, [0], "backward", "blocks.0.attention.qkv", 1),
            ], (kind, told)
            assert all(o["reproduced"] and "problem" not in o and o["rank"] == o["ranks"][0] for o in told), kind
            assert origins(twin) == []
            assert same_training(looked, twin) == [], kind
            assert looked.leaves == twin.leaves, kind  # the engine's own counts, too
            assert looked.counters == twin.counters, kind
            assert [i.action for i in looked.incidents] == ["skip", "skip"], kind


def transient(rank: int, world: int, folder: str) -> Outcome:
    """Two NaNs that do not come back, and a budget of one look."""
    faults = [{"kind": "nan", "step": step, "rank": 1, "place": "forward"} for step in (3, 5)]
    guard = replace(LOOK, nan_probes=1)
    return run_job(Job(steps=6, fault={"kind": "sequence", "faults": faults}, guard=guard, run_dir=folder), rank, world)


def test_t6_a_nan_that_does_not_come_back_is_called_transient_and_the_budget_holds(tmp_path: Path):
    for outcome in run_pooled(transient, 2, str(tmp_path / "run")):
        assert [i.step for i in outcome.incidents] == [3, 5]
        (origin,) = origins(outcome)
        assert (origin["attempt"], origin["reproduced"], origin["ranks"]) == (3, False, [1])
        assert "did not recur on the same batch with the same random numbers" in origin["message"]
        assert outcome.applied == 6
    folder = tmp_path / "run" / "incidents" / "3-unknown"
    kept = json.loads((folder / "origin-00001-a00000003.json").read_text())
    assert kept["reproduced"] is False
    run = load_run(tmp_path / "run")
    assert [r["attempt"] for r in run.journal if r["kind"] == "nan_origin"] == [3]
    assert "run again: did not recur on the same batch" in report_page(run)


def without_a_skip(rank: int, world: int, engine: str, rollbacks: int) -> list[Outcome]:
    """A ladder that does not skip: it goes back at the first NaN, or stops where it may not go back."""
    fault = {"kind": "nan_in_module", "step": 5, "rank": 1, "module": "blocks.1.mlp.down", "place": "forward"}
    skip = SkipConfig(max_in_a_row=0, budget=64 if rollbacks else 0)
    policy = PolicyConfig(skip=skip, rollback=RollbackConfig(budget=rollbacks))
    job = Job(engine=engine, steps=7, policy=policy, snapshot=SnapshotConfig(every=2), fault=fault)
    ends = None if rollbacks else StopRequested
    return [run_job(job.with_(guard=guard), rank, world, raises=ends) for guard in (LOOK, NEVER)]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("rollbacks", "action"), [(2, "rollback"), (0, "stop")])
def test_t6_a_nan_is_looked_at_before_a_rollback_or_stop(engine: str, rollbacks: int, action: str):
    for looked, twin in run_pooled(without_a_skip, 2, engine, rollbacks):
        (origin,) = origins(looked)
        assert (origin["attempt"], origin["ranks"], origin["module"]) == (5, [1], "blocks.1.mlp.down"), origin
        assert origins(twin) == []
        assert (
            [(i.step, i.action) for i in looked.incidents]
            == [(5, action)]
            == [(i.step, i.action) for i in twin.incidents]
        )
        assert looked.error == twin.error and bool(looked.error) is (action == "stop")
        assert same_training(looked, twin) == []
        assert looked.leaves == twin.leaves and looked.counters == twin.counters


# -- one process, models of one's own ------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A model whose parts can be told to misbehave on a batch with a `bad` entry."""

    def __init__(self, bad: str) -> None:
        super().__init__()
        self.bad = bad
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), nn.Linear(8, 8)])
        self.softmax = nn.Softmax(-1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 16)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        bad = self.bad if "bad" in batch else ""
        x = self.norm(self.embed(batch["x"]))
        masked = (x @ x.T).masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)
        x = x + self.softmax(masked) @ x  # minus infinity where it belongs
        if "extra" in batch:
            x = x + batch["extra"]
        for part in self.parts:
            x = x + part(x)
            if bad == "between" and part is self.parts[0]:
                x = x / (x.sum() - x.sum())
            if bad == "hidden_root":  # the value is finite, its gradient at zero is not
                x = x + torch.where(x > 1e9, x, torch.zeros_like(x).sqrt() * 0 + (x - x).abs().sqrt())
        return self.head(self.drop(x))


def data(bad: dict[str, Any] | None, at: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for i in range(8):
        x, labels = torch.randint(0, 16, (2, 6), generator=generator)
        made.append({"x": x, "labels": labels} | ((bad or {}) if i == at else {}))
    return made


def own_loop(
    bad: str = "",
    extra: dict[str, Any] | None = None,
    *,
    probes: int = 3,
    before: Callable[[Any, int], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[int]]:
    """A loop around a plain module whose fourth batch is bad. Returns origins, state and the steps at which it was
    looked at again."""
    torch.manual_seed(0)
    model = Odd(bad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ear, again = Ear(), []
    guard = resilient.Guard(
        model,
        optimizer,
        data=data({"bad": torch.ones(())} if extra is None else extra),
        listeners=[ear],
        progress=False,
        guard=GuardConfig(nan_probes=probes),
        snapshot=SnapshotConfig(every=0),
    )
    with guard:
        for batch in guard.batches():
            if guard.rerunning:
                again.append(guard.step_index)
            if before is not None:
                before(guard, guard.step_index)
            loss = F.cross_entropy(model(batch), batch["labels"])
            if bad == "loss" and "bad" in batch:
                loss = loss / (loss - loss)
            guard.backward(loss)
            assert guard.step() is not guard.rerunning
    state = {"rng": torch.get_rng_state(), **{k: v.clone() for k, v in model.state_dict().items()}}
    return [fields for kind, fields in ear.events if kind == "nan_origin"], state, again


@pytest.mark.parametrize(
    ("bad", "extra", "place", "module", "said"),
    [
        ("between", None, "forward", "", "code of its own, before parts.1"),
        ("hidden_root", None, "backward", "", "on the way back in code of its own"),
        ("loss", None, "loss", "", "the model's output is finite, the loss is"),
        ("", {"extra": torch.full((6, 8), torch.nan)}, "batch", "", "`extra` of the batch is not finite"),
        ("", {"labels": torch.full((6,), -100)}, "batch", "", "no position of `labels` of the batch carries loss"),
    ],
)
def test_t6_places_other_than_a_module_and_no_trace_in_buffers_or_rng(
    bad: str, extra: dict[str, Any] | None, place: str, module: str, said: str
):
    told, state, again = own_loop(bad, extra)
    (origin,) = told
    assert (origin["step"], origin["place"], origin["module"], origin["reproduced"]) == (4, place, module, True), origin
    assert said in origin["message"], origin
    assert "problem" not in origin
    assert again == [4]
    untold, twin, never = own_loop(bad, extra, probes=0)
    assert (untold, never) == ([], [])
    assert all(torch.equal(state[k], twin[k]) for k in twin)
    assert bool(torch.isfinite(state["norm.running_mean"]).all())


def test_t6_weights_that_are_broken_already_are_named():
    def break_weights(guard: Any, step: int) -> None:
        if step == 4 and not guard.rerunning:
            with torch.no_grad():
                guard.engine.module.parts[1].weight[0, 0] = torch.nan

    told, *_ = own_loop(extra={}, before=break_weights)
    assert (told[0]["place"], told[0]["module"]) == ("weights", "parts.1")
    assert told[0]["weights"] == ["parts.1.weight"]


def test_t6_a_failure_of_the_search_is_told_and_training_goes_on(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        raise RuntimeError("no view of this one")

    monkeypatch.setattr(OriginProbe, "_look_at_output", broken)
    told, state, again = own_loop("between")
    assert again == [4]
    assert (told[0]["reproduced"], told[0]["problem"]) == (False, "RuntimeError: no view of this one")
    assert "the search broke off" in told[0]["message"]
    _, twin, _ = own_loop("between", probes=0)
    assert all(torch.equal(state[k], twin[k]) for k in twin)


def test_t6_a_loop_left_in_the_middle_of_a_second_look_leaves_no_hooks():
    model = Odd("between")
    guard = resilient.Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data=data({"bad": torch.ones(())}), progress=False
    )
    with guard:
        for batch in guard.batches():
            if guard.rerunning:
                assert any(part._forward_pre_hooks for part in model.modules())
                break
            guard.backward(F.cross_entropy(model(batch), batch["labels"]))
            guard.step()
        assert not any(part._forward_pre_hooks for part in model.modules())
        assert not guard.rerunning
        applied = guard.applied
        for batch in guard.batches(steps=applied + 2):
            guard.backward(F.cross_entropy(model(batch), batch["labels"]))
            guard.step()
        assert guard.applied == applied + 2
