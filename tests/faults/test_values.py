"""What exactly faults write: bits, sizes, and the values of the step before. One process."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from resilient.engines.base import EngineConfig
from resilient.errors import ConfigError
from resilient.faults import (
    BadReduction,
    Beta2Shock,
    BitFlip,
    FaultConfig,
    Fp16Overflow,
    GradNoise,
    GradStuck,
    NoFault,
    SecondMomentLost,
    SlowCompute,
    SlowLink,
)
from resilient.faults.gradient import flip_bit
from resilient.signals import Knobs
from tests.faults.twins import Run

DDP = EngineConfig(name="ddp")
WEIGHT = "blocks.1.mlp.down.weight"


@pytest.fixture(autouse=True)
def one_rank_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(fault: FaultConfig, *steps: int) -> list[dict[str, torch.Tensor]]:
    """Every gradient at each step, nothing applied."""
    run, found = Run(DDP, fault, 0, 1), []
    for step in steps:
        run.window(step)
        found.append({name: p.grad.clone() for name, p in run.engine.module.named_parameters()})
        run.engine.skip(False)
    run.engine.close()
    return found


def test_a_flipped_bit_is_that_bit_and_no_other() -> None:
    values = torch.tensor([[1.0, -3.5], [0.0, 2.0**-20]])
    for dtype, bits in ((torch.float32, range(32)), (torch.bfloat16, range(16)), (torch.float16, range(16))):
        word = torch.int32 if dtype is torch.float32 else torch.int16
        for bit in bits:
            before = values.to(dtype).t()  # not contiguous
            after = flip_bit(before, 2, bit)
            difference = after.contiguous().view(word) ^ before.contiguous().view(word)
            assert [int(x) % 2 ** (8 * dtype.itemsize) for x in difference.flatten()] == [0, 0, 2**bit, 0]
            assert torch.equal(flip_bit(after, 2, bit), before)


def test_a_seed_chooses_the_same_place_every_time_and_another_seed_another_one() -> None:
    clean = gradients(NoFault(), 1)[0]
    places = []
    for seed in (3, 3, 4):
        hit = gradients(BitFlip(step=1, rank=0, seed=seed, bit=30), 1)[0]
        where = [(n, int(i)) for n in clean for i in (hit[n] != clean[n]).flatten().nonzero().flatten()]
        assert len(where) == 1
        places += where
    assert places[0] == places[1] != places[2]


def test_noise_and_stuck_values_have_the_size_that_was_asked_for() -> None:
    clean = gradients(NoFault(), 1)[0]
    noisy = gradients(GradNoise(step=1, rank=0, relative=2.0), 1)[0]
    # independent noise in two micro-steps, whose gradients have about the norm of their sum or more
    assert 1.5 < (noisy[WEIGHT] - clean[WEIGHT]).norm() / clean[WEIGHT].norm() < 6
    stuck = gradients(GradStuck(step=1, rank=0, parameter=WEIGHT, value=0.25), 1)[0]
    assert torch.equal(stuck.pop(WEIGHT), torch.full_like(clean[WEIGHT], 0.25))
    assert all(torch.equal(stuck[name], clean[name]) for name in stuck)


def test_what_is_received_wrongly() -> None:
    """finite: off by the given share of the layer group's norm; stale: of the step before, bit for bit; nan: that many."""
    one, two = gradients(NoFault(), 1, 2)
    group = [name for name in two if name.startswith("blocks.0.")]
    norm = torch.stack([two[name].norm() for name in group]).norm()
    for elements in (1, 7):
        fault = BadReduction(step=2, rank=0, how="finite", layer="blocks.0", relative=1e-2, elements=elements)
        hit = gradients(fault, 1, 2)[1]
        error = torch.cat([(hit[name] - two[name]).flatten() for name in two])
        assert int((error != 0).sum()) == elements
        torch.testing.assert_close(error.norm(), norm * 1e-2, rtol=1e-4, atol=0.0)
    stale = gradients(BadReduction(step=2, rank=0, how="stale", layer="blocks.0", elements=None), 1, 2)[1]
    for name in two:
        assert torch.equal(stale[name], one[name] if name in group else two[name])
    hit = gradients(BadReduction(step=2, rank=0, how="nan", layer="blocks.0", elements=4), 1, 2)[1]
    assert {name for name in two if hit[name].isnan().any()} <= set(group)
    assert sum(int(hit[name].isnan().sum()) for name in two) == 4


def test_what_is_not_there_is_refused_with_the_nearest_name() -> None:
    for fault, message in (
        (
            BitFlip(step=1, rank=0, parameter="blocks.1.mlp.dwn.weight"),
            r"fault\.parameter=.*did you mean blocks\.1\.mlp\.down",
        ),
        (BitFlip(step=1, rank=0, parameter=WEIGHT, element=1536), r"fault\.element=1536: .* 0 to 1535"),
        (GradNoise(step=1, rank=0, parameter="x"), r"fault\.parameter=x"),
        (BadReduction(step=1, rank=0, layer="block.1"), r"fault\.layer=block\.1: .*did you mean blocks\.1\?"),
    ):
        with pytest.raises(ConfigError, match=message):
            Run(DDP, fault, 0, 1)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_overflow_of_fp16(place: str) -> None:
    """BR-02: infinite behind a finite loss, or in the output and so in the loss; clean when tried again."""
    fault = Fp16Overflow(step=2, place=place)
    run = Run(DDP, fault, 0, 1)
    losses, finite = [], []
    for step in (1, 2, 2):
        losses.append(run.window(step))
        finite.append(bool(run.engine.taps().local_sq.isfinite()))
        run.engine.skip(True)
    run.engine.close()
    assert finite == [True, False, True]
    assert (losses[1] == losses[2]) is (place == "backward")
    assert losses[0] < float("inf")


def updates(fault: FaultConfig) -> list[float]:
    """L2 of what each of four steps changes in a weight."""
    run, sizes = Run(DDP, fault, 0, 1), []
    weight = run.engine.module.get_parameter(WEIGHT)
    for step in (1, 2, 3, 4):
        run.window(step)
        before = weight.detach().clone()
        run.engine.apply(float(run.engine.taps().reduced_sq_share.sqrt()), Knobs())
        sizes.append(float((weight.detach() - before).norm()))
    assert run.engine.optimizer.param_groups[0]["betas"][1] > 0.9  # it is the configured one again
    run.engine.close()
    return sizes


def test_shocks_of_the_second_moment_change_the_update_from_their_step_on() -> None:
    plain = updates(NoFault())
    lost = updates(SecondMomentLost(step=3))
    shock = updates(Beta2Shock(step=3, window=1, value=0.5))
    assert lost[:2] == shock[:2] == plain[:2]
    assert lost[2] > 1.3 * plain[2]
    assert shock[2] != plain[2]


def test_a_slow_rank_computes_longer_in_its_steps_and_in_a_replay() -> None:
    """C4: by at least what was asked for, and the same numbers."""
    run, clean = Run(DDP, SlowCompute(step=2, window=1, rank=0, ms=60.0), 0, 1), Run(DDP, NoFault(), 0, 1)
    for step, least in ((1, 0.0), (2, 0.06), (2, 0.06), (3, 0.0)):
        started = time.perf_counter()
        loss = run.window(step)
        assert time.perf_counter() - started >= least
        assert loss == clean.window(step)
        run.engine.skip(False)
        clean.engine.skip(False)
    run.engine.close()
    clean.engine.close()


def test_a_slow_link_holds_the_collectives_of_a_backward_back_and_no_others() -> None:
    """C4. One collective in the backward, one outside of it, in each window."""
    run = Run(DDP, SlowLink(step=2, window=1, rank=0, ms=60.0), 0, 1)
    original, inside = vars(dist.ProcessGroup)["allreduce"], []
    weight = run.engine.module.get_parameter(WEIGHT)
    for run.now in (1, 2, 2, 3):
        run.engine.begin_micro_step(0, 1)
        loss = weight.sum() * 1.0
        loss.register_hook(lambda grad: dist.all_reduce(torch.ones(1)))
        started = time.perf_counter()
        run.engine.backward(loss)
        inside.append(time.perf_counter() - started)
        run.engine.skip(False)
        assert vars(dist.ProcessGroup)["allreduce"] is original
        dist.all_reduce(torch.ones(1))  # and it still works
    run.engine.close()
    assert min(inside[1], inside[2]) >= 0.06  # a replay is as slow


def test_a_slow_link_holds_messages_to_a_single_rank_back_while_it_is_slow() -> None:
    """S19: a probe of the links measures what the training feels. Between its backwards as well, and not after `close`."""
    run = Run(DDP, SlowLink(step=2, window=1, rank=0, ms=60.0), 0, 1)
    original = vars(dist.ProcessGroup)["send"]
    for run.now in (1, 2, 2, 3, 2):
        run.engine.begin_micro_step(0, 1)
        send = vars(dist.ProcessGroup)["send"]
        assert (send is not original) is (run.now == 2)
        if run.now == 2:
            started = time.perf_counter()
            with pytest.raises(TypeError):  # torch's own, which is asked after the wait
                send("no group")
            assert time.perf_counter() - started >= 0.06
        run.engine.skip(False)
    run.engine.close()
    assert vars(dist.ProcessGroup)["send"] is original
