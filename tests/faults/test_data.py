"""Faults that belong to the data: which samples, which labels, on which rank, and again when they are read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resilient.coordinator.fingerprints import split_of
from resilient.errors import ConfigError
from resilient.faults import BadSample, EmptyBatch, FaultConfig, NoFault, ShuffleMismatch, SwappedRng, install
from resilient.faults.data import first_sample
from resilient.train.data import IGNORED, DataConfig, TokenStream
from resilient.train.loop import Objective

DATA = DataConfig(name="synthetic", seq_len=16, micro_batch=2, accumulation=2, max_bytes=5_000)
WORLD = 2


def streams(fault: FaultConfig) -> list[Any]:
    """Of both ranks."""
    return [
        install(
            fault,
            engine=None,  # type: ignore[arg-type]  # not touched
            stream=TokenStream(DATA, seed=0, rank=rank, world=WORLD),
            objective=objective,
            step=lambda: 1,
            rank=rank,
            world=WORLD,
        )[1:]
        for rank in range(WORLD)
    ]


def objective(engine: Any, batch: Any) -> Objective:
    """A loss of 3.0 whose gradient is 1.0."""
    loss = torch.tensor(3.0, requires_grad=True)
    return Objective(loss * 1.0, 4, loss)


def read(stream: Any, windows: int) -> list[dict[str, Any]]:
    return [batch for _, batch in zip(range(windows * DATA.accumulation), stream, strict=False)]


def ids(batches: list[dict[str, Any]]) -> list[int]:
    return [int(i) for batch in batches for i in batch["ids"]]


CLEAN = [read(stream, 4) for stream, _ in streams(NoFault())]


def test_an_empty_batch_is_one_ranks_and_comes_again() -> None:
    """BR-40: windows 2 and 3 of rank 1 carry no loss, nothing else differs."""
    zero, one = (stream for stream, _ in streams(EmptyBatch(step=2, window=2)))
    assert isinstance(zero, TokenStream)
    start = one.state_dict()
    for _ in range(2):
        for i, (ours, theirs) in enumerate(zip(read(one, 4), CLEAN[1], strict=True)):
            assert torch.equal(ours["input_ids"], theirs["input_ids"])
            empty = i // DATA.accumulation in (1, 2)
            assert bool((ours["labels"] == IGNORED).all()) is empty
            assert empty or torch.equal(ours["labels"], theirs["labels"])
        one.rewind(start)


@pytest.mark.parametrize("loss", ["odd", "normal"])
def test_a_bad_sample_is_bad_on_whichever_rank_reads_it(loss: str) -> None:
    """BR-37: in an undisturbed run rank 1 reads it at step 2; handed to rank 0 it is as bad, and again."""
    fault = BadSample(step=2, rank=1, loss=loss, factor=30.0)  # type: ignore[arg-type]
    (stream0, objective0), (stream1, objective1) = streams(fault)
    batches = read(stream1, 4)
    sample = first_sample(stream1, fault.step, fault.rank)
    at = DATA.accumulation  # the first micro-step of step 2
    assert sample == int(CLEAN[1][at]["ids"][0])
    for ours, theirs in zip(batches, CLEAN[1], strict=True):
        wrong = (ours["labels"] != theirs["labels"]).any(1)
        assert wrong.tolist() == [loss == "odd" and int(i) == sample for i in ours["ids"]]
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(read(stream0, 4), CLEAN[0], strict=True))
    for judge in (objective0, objective1, objective0):
        for i, batch in enumerate(batches):
            result = judge(None, batch)
            gradient = torch.autograd.grad(result.loss_sum, result.logits)[0]
            hit = i == at
            assert float(gradient) == (30.0 if hit else 1.0)
            assert float(result.loss_sum.detach()) == (90.0 if hit and loss == "odd" else 3.0)
    with torch.no_grad():  # an evaluation that happens to meet it
        assert float(objective0(None, batches[at]).loss_sum) == 3.0


def test_a_rank_whose_sampler_has_another_rank_reads_the_samples_of_that_one() -> None:
    """S18: from step 2 on, and back in order after the window; the positions tell nothing."""
    zero, one = (stream for stream, _ in streams(ShuffleMismatch(step=2, window=2, differs="rank")))
    ours, others = read(one, 4), read(zero, 4)
    for i, batch in enumerate(ours):
        same = i // DATA.accumulation in (1, 2)
        assert ids([batch]) == ids([(CLEAN[0] if same else CLEAN[1])[i]])
        assert batch["position"] == CLEAN[1][i]["position"]
        assert set(batch) == set(CLEAN[1][i])
    assert ids(others) == ids(CLEAN[0])


@pytest.mark.parametrize("differs", ["seed", "epoch"])
def test_a_rank_with_another_order_reads_samples_of_others(differs: str) -> None:
    """S18. Over an epoch it meets samples that another rank reads as well, and leaves others out."""
    _, one = (stream for stream, _ in streams(ShuffleMismatch(step=2, differs=differs)))  # type: ignore[arg-type]
    clean = TokenStream(DATA, seed=0, rank=1, world=WORLD)
    windows = one.samples // one.global_batch
    ours, theirs = ids(read(one, windows)), ids(read(clean, windows))
    first = DATA.accumulation * DATA.micro_batch
    assert ours[:first] == theirs[:first]
    assert ours[first:] != theirs[first:]
    rank0 = set(ids(read(TokenStream(DATA, seed=0, rank=0, world=WORLD), windows)))
    assert not rank0 & set(theirs)
    assert rank0 & set(ours)
    # and its state tells the other seed as long as it is in force, but can be gone back to
    assert (one.state_dict()["seed"] != clean.state_dict()["seed"]) is (differs == "seed")
    state = one.state_at(0)
    for back in (one.state_dict(), state):
        one.rewind(back)
    assert ids(read(one, windows)) == ours


@pytest.mark.parametrize(
    ("differs", "told", "alike"),
    [("seed", True, False), ("epoch", True, False), ("seed", False, True), ("rank", True, True)],
)
def test_the_order_that_is_told_is_the_one_that_is_read(differs: str, told: bool, alike: bool) -> None:
    """S18: it rides in the row; a share of another rank is no other order, and a sampler may keep its seed to itself."""
    fault = ShuffleMismatch(step=2, window=2, differs=differs, told=told)  # type: ignore[arg-type]
    zero, one = (stream for stream, _ in streams(fault))
    assert split_of(zero).digest() == split_of(one).digest()  # window 1 comes next
    seen = []
    for _ in zip(range(4), iter(zero), iter(one), strict=False):
        seen.append(split_of(zero).digest() == split_of(one).digest())
    assert seen == [True, alike, alike, alike]  # two micro-batches a window
    if differs == "seed":
        order = TokenStream(DATA, seed=fault.seed, rank=1, world=WORLD)
        assert (split_of(one).digest() == split_of(order).digest()) is told  # exactly that of the order it has


def test_a_source_of_streams_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fault\.source=2: there are only 2"):
        streams(SwappedRng(step=1, rank=1, source=2))
