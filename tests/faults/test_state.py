"""A replica that drifts, a random stream that two ranks share: what changes where, and on whom."""

from __future__ import annotations

import pytest
import torch

from resilient.engines.base import EngineConfig
from resilient.errors import ConfigError
from resilient.faults import FaultConfig, NoFault, ReplicaDrift, SwappedRng
from resilient.signals import Knobs
from tests.faults.twins import MODEL, Run
from tests.ranks import run_pooled

pytestmark = pytest.mark.timeout(120)

DDP = EngineConfig(name="ddp")
WEIGHT = "blocks.1.mlp.down.weight"


def steps(rank: int, world: int, fault: FaultConfig) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(the weight, its second moment) after the gradients of steps 1, 2 and 3 are there and before they are applied."""
    run, seen = Run(DDP, fault, rank, world), []
    weight = run.engine.module.get_parameter(WEIGHT)
    for step in (1, 2, 3):
        run.window(step)
        moment = run.engine.optimizer.state[weight].get("exp_avg_sq", torch.zeros(()))
        seen.append((weight.detach().clone(), moment.clone()))
        run.engine.apply(1.0, Knobs())
    run.engine.close()
    return seen


def drifts(rank: int, world: int) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    return {
        "clean": steps(rank, world, NoFault()),
        "parameter": steps(rank, world, ReplicaDrift(step=2, parameter=WEIGHT, relative=0.25)),
        "moment": steps(rank, world, ReplicaDrift(step=2, what="moment", parameter=WEIGHT, relative=0.25)),
    }


def refused(rank: int, world: int) -> str:
    with pytest.raises(ConfigError) as caught:
        Run(EngineConfig(name="fsdp2"), ReplicaDrift(step=2), rank, world)
    return str(caught.value)


def test_one_replica_drifts_and_the_others_do_not() -> None:
    """BR-39: by the size that was asked for, when the step begins, in the tensor named and on rank 1 alone."""
    zero, one = run_pooled(drifts, 2)
    for i in range(2):  # weights and moments of both ranks are equal without a fault
        assert all(torch.equal(a, b) for a, b in zip(zero["clean"][i], one["clean"][i], strict=True))
    for what, at in (("parameter", 0), ("moment", 1)):
        for ours, theirs in ((zero[what][0], zero["clean"][0]), (one[what][0], one["clean"][0])):
            assert torch.equal(ours[at], theirs[at])
        right, wrong = zero[what][1], one[what][1]
        assert torch.equal(right[at], zero["clean"][1][at])
        assert torch.equal(right[1 - at], wrong[1 - at])
        off = (wrong[at] - right[at]).norm() / right[at].norm()
        assert 0.1 < off < 0.3  # less than 0.25 for a moment: what became negative is turned round
        if what == "parameter":
            torch.testing.assert_close(off, torch.tensor(0.25), rtol=1e-3, atol=0.0)


def test_without_a_second_copy_every_rank_refuses_it() -> None:
    zero, one = run_pooled(refused, 2)
    assert zero == one
    assert "fault.what=parameter: fsdp2 keeps no second copy" in zero


def draws(rank: int, world: int) -> list[tuple[float, float]]:
    """(a number that the rank would draw next, its loss under dropout) before each of three windows and a replay."""
    model = MODEL.__class__(**{**vars(MODEL), "dropout": 0.5})
    run, seen = Run(DDP, SwappedRng(step=2, rank=1, source=0), rank, world, model), []
    torch.manual_seed(100 + rank)
    for step in (1, 2, 3):
        run.window(step)
        run.engine.skip(False)
        state = torch.get_rng_state()
        seen.append((float(torch.rand(())), float(torch.randn(()))))
        torch.set_rng_state(state)
    torch.manual_seed(100 + rank)  # as a rollback puts the streams back
    run.window(2)
    run.engine.skip(False)
    run.engine.close()
    return [*seen, (float(torch.rand(())), float(torch.randn(())))]


def test_two_ranks_draw_alike_from_the_step_on_and_not_in_a_replay() -> None:
    """BR-14."""
    zero, one = run_pooled(draws, 2)
    assert [a == b for a, b in zip(zero, one, strict=True)] == [False, True, True, False]
