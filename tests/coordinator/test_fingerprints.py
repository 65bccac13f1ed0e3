"""Fingerprints of batches, samplers and random streams (S18, BR-14): equal exactly where they should be."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from resilient.checkpoint.digest import tensor_digest
from resilient.checkpoint.rng import capture_rng, restore_rng, stream_digest
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.feed import WindowFeed
from resilient.coordinator.fingerprints import (
    SAMPLES,
    Fingerprints,
    _mixed,
    batch_digest,
    dropouts,
    rng_digests,
    sample_digests,
    split_of,
)
from resilient.signals import StepRecord
from tests.ranks import run_pooled

CPU = torch.device("cpu")
DATA = list(range(64))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 50_000, shape, generator=torch.Generator().manual_seed(seed))


# -- batches ------------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


def test_s18_the_same_tensors_look_alike_however_they_lie_there() -> None:
    x, y = tokens(4, 33), tokens(4, 33, seed=1)
    expected = batch_digest([{"x": x, "y": y}])
    assert isinstance(expected, float) and expected == int(expected) and 0 <= expected < 2**48
    for batches in (
        [{"y": y, "x": x}],
        [(x, y)],
        [x, y],
        [Sample(x, y)],
        [{"x": x.t().contiguous().t(), "y": y.clone()}],
        [{"x": torch.nn.Parameter(x.double(), requires_grad=False).long(), "y": y}],
        [{"x": x, "y": y, "position": 7, "worker": 3, "note": "rank 1"}],  # what is beside them may be the rank's own
    ):
        assert batch_digest(batches) == expected


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16, torch.bool])
def test_s18_what_differs_looks_different(kind: torch.dtype) -> None:
    x = (tokens(6, 37) % 2 if kind is torch.bool else tokens(6, 37)).to(kind)
    changed = x.clone()
    changed[5, 36] = 0 if changed[5, 36] else 1
    others = [
        [x],
        [changed],
        [x.flip(0)],
        [x.flip(1)],
        [x[:5]],
        [x.reshape(37, 6)],
        [x, x],
        [x[3:], x[:3]],
        [[x], [1.0]],
    ]
    digests = [batch_digest(batches) for batches in others]
    assert digests.pop() == digests[0]
    assert len(set(digests)) == len(digests)
    assert batch_digest([torch.zeros(8)]) != batch_digest([torch.zeros(8, dtype=torch.int32)])  # the same bytes


@settings(deadline=None)
@given(st.integers(0, 2999), st.integers(1, 2**31 - 1), st.sampled_from([np.int32, np.int64, np.float32]))
def test_s18_a_change_of_one_number_is_always_seen(at: int, to: int, kind: Any) -> None:
    """Also in the upper half of a 64-bit word, where multilinear hashing keeps the fewest bits."""
    x = np.zeros(3000, kind)
    y = x.copy()
    y[at] = to
    assert batch_digest([x]) != batch_digest([y])


def test_s18_no_two_of_many_structured_batches_look_alike() -> None:
    """One-hot rows and masks of zeros and ones: few different words, all in few bits."""
    ones = [torch.zeros(512).index_fill_(0, torch.tensor([i, j]), 1.0) for i in range(3, 512, 12) for j in range(i)]
    lengths = [torch.arange(300).lt(i).long() for i in range(300)]
    digests = {batch_digest([x]) for x in ones + lengths}
    assert len(digests) == len(ones) + len(lengths) > 10_000


def test_s18_of_a_very_large_tensor_rows_are_read_first_and_last_among_them() -> None:
    large = torch.zeros(3 * (1 << 19) + 5, dtype=torch.int64)  # 12 MiB, of which 2 are read
    digest = batch_digest([large])
    for at in (0, 1023, 6 * 1024, large.numel() - 6, large.numel() - 1):
        large[at] = 1
        assert batch_digest([large]) != digest, at
        large[at] = 0
    large[1024] = 1
    assert batch_digest([large]) == digest  # the price: two batches that differ in unread rows only


def test_s18_without_tensors_plain_values_count_and_the_unreadable_is_unknown() -> None:
    assert batch_digest([["a text", 3]]) == batch_digest([["a text", 3]]) != batch_digest([["a text", 4]])
    assert batch_digest([np.array(["a", "b"], dtype=object)]) == batch_digest(["a", "b"])
    assert batch_digest([torch.tensor(3)]) != batch_digest([torch.tensor(4)])
    for batches in ([], [{}], [object()], [tokens(3, 3).to_sparse()]):
        digest = batch_digest(batches)
        assert isinstance(digest, float) and math.isnan(digest), batches


def test_s18_digests_of_a_device_are_mixed_there_into_48_bits() -> None:
    """The arithmetic that follows tensor_digest, on this machine's only device."""
    digests = [tensor_digest(tokens(40, seed=seed)) for seed in range(50)]
    mixed = [_mixed(7, digests[i : i + 2]) for i in range(49)] + [_mixed(8, digests[:2]), _mixed(7, digests[1::-1])]
    assert all(m.dtype is torch.float64 and m.dim() == 0 and float(m) == int(m) and 0 <= m < 2**48 for m in mixed)
    assert len({float(m) for m in mixed}) == len(mixed)


# -- samples ------------------------------------------------------------------------------------------------------------


def test_s18_a_sample_has_one_digest_wherever_it_is_read() -> None:
    x = tokens(8, 33)
    expected = sample_digests([{"input_ids": x, "labels": x + 1}])
    assert len(expected) == SAMPLES and expected == sorted(expected)
    assert all(d == int(d) and 0 <= d < 2**48 for d in expected)
    padded = torch.cat([torch.cat([x[:4], torch.zeros(4, 1).long()], 1), torch.zeros(4, 34).long()])
    for batches in (
        [{"input_ids": x.flip(0)}],
        [{"input_ids": x[5:]}, {"input_ids": x[:5]}],
        [(x, torch.rand(8))],
        [{"a": torch.rand(8, 3), "ids": x.int()}],
        [{"input_ids": torch.cat([x, torch.full((3, 33), 7)])}],  # rows of one number are padding
    ):
        assert sample_digests(batches) == expected
    zeros = torch.cat([x[:4], torch.zeros(4, 2).long()], 1)
    assert sample_digests([zeros]) == sample_digests([padded])  # padding to another length
    assert not set(sample_digests([{"input_ids": x}], epoch=3)) & set(expected)  # a later pass is another thing
    few = sample_digests([x[:2]])
    assert few[:2] == sorted(few[:2]) and all(math.isnan(d) for d in few[2:])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_s18_any_number_of_a_short_sample_counts(kind: torch.dtype) -> None:
    x = (tokens(1, 40) % 200).to(kind)
    found = {sample_digests([x])[0]}
    for at in range(40):
        changed = x.clone()
        changed[0, at] += 1
        found.add(sample_digests([changed])[0])
    assert len(found) == 41


def test_s18_what_holds_no_samples_has_no_digests() -> None:
    for batches in ([], [torch.rand(4)], [{"input_ids": torch.zeros(3)}], ["text"], [torch.zeros(4, 4).to_sparse()]):
        assert all(math.isnan(d) for d in sample_digests(batches)), batches


# -- samplers -----------------------------------------------------------------------------------------------------------


def distributed(rank: int = 0, world: int = 2, data: Any = DATA, epoch: int = 0, **options: Any) -> DataLoader:
    sampler: DistributedSampler = DistributedSampler(data, world, rank, **options)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=4, sampler=sampler)


class Sharded(BatchSampler):
    """Accelerate's way: a batch sampler around a batch sampler around a sampler with a seed."""

    def __init__(self, inner: BatchSampler, num_processes: int, process_index: int) -> None:
        self.batch_sampler, self.num_processes, self.process_index = inner, num_processes, process_index

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(self.batch_sampler)[self.process_index :: self.num_processes])


class Seedable(RandomSampler):
    initial_seed, epoch = 3, 0


class Megatron:
    """A batch sampler in Megatron-LM's words."""

    def __init__(self, rank: int) -> None:
        self.total_samples, self.data_parallel_rank, self.data_parallel_size = 64, rank, 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1, 2]])


class Repeating:
    """DeepSpeed's RepeatingLoader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    @property
    def rank(self) -> int:
        raise RuntimeError("not started")


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


class Shard(IterableDataset):
    """transformers' IterableDatasetShard."""

    def __init__(self, process_index: int) -> None:
        self.num_processes, self.process_index, self.seed, self.epoch, self.drop_last = 2, process_index, 0, 0, False

    def __iter__(self) -> Iterator[int]:
        return iter(DATA[self.process_index :: self.num_processes])


class Ordered:
    """A loader that says so by itself."""

    def __init__(self, seed: int) -> None:
        self.order = {"text": "abc", "seed": seed}

    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


def accelerated(rank: int, sampler: Any) -> DataLoader:
    return DataLoader(DATA, batch_sampler=Sharded(BatchSampler(sampler, 4, False), 2, rank))


def seeded(sampler: type[RandomSampler], seed: int) -> RandomSampler:
    found = sampler(DATA, generator=torch.Generator().manual_seed(seed))
    if isinstance(found, Seedable):
        found.initial_seed = seed
    return found


@pytest.mark.parametrize(
    "make",
    [
        distributed,
        lambda rank, seed=0: Repeating(distributed(rank, seed=seed)),
        lambda rank, seed=0: accelerated(rank, seeded(Seedable, seed)),
        lambda rank, seed=0: accelerated(rank, seeded(RandomSampler, seed)),
    ],
    ids=["torch", "DeepSpeed", "Accelerate", "Accelerate with a generator"],
)
def test_s18_samplers_that_shuffle_alike_are_told_from_others_whatever_holds_them(make: Any) -> None:
    first, second = split_of(make(0)), split_of(make(1))
    assert (first.rank, second.rank, first.replicas) == (0, 1, 2)
    assert first.digest() == second.digest() != split_of(make(1, seed=5)).digest()
    assert first.digest() < 2**48
    assert not first.problem(0, 2) and not second.problem(1, 2)


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"epoch": 1}, {"shuffle": False}, {"drop_last": True}, {"world": 4}, {"data": DATA[:-2]}],
    ids=str,
)
def test_s18_whatever_decides_the_order_counts(other: dict[str, Any]) -> None:
    assert split_of(distributed(1, **other)).digest() != split_of(distributed(1)).digest()


def test_s18_a_loader_of_ones_own_may_say_what_its_order_depends_on() -> None:
    assert split_of(Ordered(1)).digest() == split_of(Ordered(1)).digest() != split_of(Ordered(2)).digest()
    assert split_of(DataLoader(DATA, batch_sampler=Megatron(1))).replicas == 2
    shards = [split_of(DataLoader(Shard(rank), batch_size=None)) for rank in range(2)]
    assert shards[0].digest() == shards[1].digest() and [shard.rank for shard in shards] == [0, 1]


@pytest.mark.parametrize(
    ("loader", "rank", "said"),
    [
        (distributed(0, 2), 0, "divides the data among 2 ranks, but 4 train on them"),
        (distributed(0, 4), 3, "rank 3 reads the share of rank 0"),
        (distributed(3, 4), 3, ""),
        (DataLoader(DATA), 1, "SequentialSampler does not divide the data among the 4 ranks"),
        (DataLoader(DATA, shuffle=True), 1, "RandomSampler does not divide"),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False)), 1, "does not divide"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), 1, ""),
        (DataLoader(DATA, batch_sampler=[[1], [2]]), 1, ""),  # whose sampler attribute is a dummy
        (DataLoader(Endless()), 1, ""),
        (Ordered(1), 1, ""),
        (DATA, 1, ""),
    ],
)
def test_s18_what_one_rank_can_tell_of_its_sampler(loader: Any, rank: int, said: str) -> None:
    problem = split_of(loader).problem(rank, 4)
    assert said in problem and bool(said) == bool(problem)
    if "not divide" in said:
        assert not split_of(loader).problem(0, 1)
        assert math.isnan(split_of(loader).digest())  # their data sets may be shares already: nothing has to be equal


# -- random streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "active"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.1))), True),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.0), False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.5), True),
        (nn.Dropout2d(0.0), False),
        (nn.Linear(2, 2), False),
    ],
)
def test_br14_the_own_stream_counts_while_something_drops_by_it(module: nn.Module, active: bool) -> None:
    found = dropouts(module)
    assert math.isnan(rng_digests(found, CPU)[0])
    assert math.isnan(rng_digests(found, CPU)[1]) == (not active)
    assert math.isnan(rng_digests(found, CPU)[1] if module.eval() and found else math.nan)


def test_br14_a_stream_is_told_by_its_state() -> None:
    before = capture_rng()
    drop = dropouts(nn.Dropout(0.5))
    draws: dict[Any, Any] = {
        "python": random.random,
        "numpy": np.random.random,
        "torch": lambda: torch.rand(1),
        "device": lambda: torch.rand(1),
    }
    for stream, draw in draws.items():
        start = stream_digest(stream, CPU), rng_digests(drop, CPU, ("python", "numpy"))
        draw()
        assert stream_digest(stream, CPU) != start[0]
        common, own = rng_digests(drop, CPU, ("python", "numpy"))
        assert (common != start[1][0]) == (stream in ("python", "numpy"))
        assert (own != start[1][1]) == (stream in ("torch", "device"))
        restore_rng(before)
        assert (stream_digest(stream, CPU), rng_digests(drop, CPU, ("python", "numpy"))) == start


# -- in a row -----------------------------------------------------------------------------------------------------------


def rows(rank: int, world: int, fault: str) -> list[list[float]]:
    """(steps, 3 columns) of this rank's table, two ranks in two epochs of two windows; `rank 1` has the fault."""
    torch.manual_seed(0 if fault == "same stream" else rank)
    faulty = rank == 1
    sampler: DistributedSampler = DistributedSampler(
        DATA[:32], world, 0 if faulty and fault == "same share" else rank, seed=5 if faulty and fault == "seed" else 0
    )
    if faulty and fault == "epoch":
        sampler.set_epoch = lambda epoch: None  # type: ignore[method-assign]
    feed = WindowFeed(DataLoader([torch.tensor([i, i]) for i in DATA[:32]], batch_size=8, sampler=sampler))
    prints = Fingerprints(feed, nn.Dropout(0.1), CPU, rank=rank, world=world)
    exchange = Exchange(CPU, 60.0)
    found = []
    for step in range(1, 5):
        if feed.peek() is None:
            feed.next_epoch()
        record = StepRecord(step, step)
        prints.fill(record, feed.take(), due=step % 2 == 0)
        table = exchange.table(record)
        found.append([_alike(table.column(f"digest_{name}")) for name in ("batch", "sampler", "rng_own")])
    exchange.close()
    return found


def _alike(values: np.ndarray) -> float:
    """1 both ranks the same, 0 different, NaN unknown."""
    return math.nan if np.isnan(values).any() else float(values[0] == values[1])


@pytest.mark.parametrize(
    ("fault", "batch", "sampler", "own"),
    [
        ("none", [0, 0, 0, 0], [1, 1, 1, 1], 0),
        ("same share", [1, 1, 1, 1], [1, 1, 1, 1], 0),
        ("seed", [0, 0, 0, 0], [0, 0, 0, 0], 0),
        ("epoch", [0, 0, 0, 0], [1, 1, 0, 0], 0),  # seen in the first step of the epoch that it spoils
        ("same stream", [0, 0, 0, 0], [1, 1, 1, 1], 1),
    ],
)
def test_s18_seeds_and_splits_that_differ_between_ranks_show_in_the_table(
    fault: str, batch: list[int], sampler: list[int], own: int
) -> None:
    first, second = run_pooled(rows, 2, fault)
    np.testing.assert_array_equal(first, second)
    expected = np.array([batch, sampler, [math.nan, own, math.nan, own]]).T
    np.testing.assert_array_equal(first, expected)
