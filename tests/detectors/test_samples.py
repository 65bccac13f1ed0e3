"""The same sample on two ranks: samplers that differ are told from chance (S18)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from resilient.detectors.samples import COLUMNS, SharedSamples
from resilient.signals import Finding, Observation, Severity

BATCH = 8
Reader = Callable[[int, int], np.ndarray]
"""(rank, step from 0) -> (BATCH,) samples."""


def digests(samples: np.ndarray) -> np.ndarray:
    """48 bits each, as good as random."""
    mixed = (samples.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(16)).astype(np.float64)


def read(
    reader: Reader, world: int, steps: int, detector: SharedSamples | None = None, first: int = 0
) -> list[Finding]:
    detector = detector or SharedSamples()
    found = []
    for step in range(first, first + steps):
        told = np.stack([np.sort(digests(reader(rank, step)))[: len(COLUMNS)] for rank in range(world)], axis=1)
        per_rank = dict(zip(COLUMNS, told, strict=True))
        observation = Observation(step + 1, step + 1, {}, per_rank, (tuple(range(world)),))
        findings = detector.observe(observation)
        detector.absorb(observation, findings, True)
        found += findings
    return found


@functools.cache
def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)


def shuffled(size: int, world: int, other: int | None = None, seed: int = 1) -> Reader:
    """A DistributedSampler, its epoch in every pass another one; rank `other` has a seed of its own."""

    def reader(rank: int, step: int) -> np.ndarray:
        steps = size // (world * BATCH)
        order = permutation(size, seed if rank == other else 0, step // steps)
        at = (step % steps) * world * BATCH + rank * BATCH
        return order[at : at + BATCH]

    return reader


@pytest.mark.parametrize("world", [2, 4, 16])
def test_s18_another_seed_on_one_rank_is_named_before_half_an_epoch_is_over(world: int) -> None:
    size = 4096 * world
    found = read(shuffled(size, world, other=1), world, steps=size // (world * BATCH) // 2)
    assert found and found[0].severity is Severity.WARN and found[0].statistic == "batch"
    assert found[0].ranks == ((0, 1) if world == 2 else (1,))
    assert 1 <= found[0].onset_step < found[0].step
    assert "the seed, epoch or share of a sampler differs" in found[0].message


@pytest.mark.parametrize("world", [2, 4, 16])
@pytest.mark.parametrize("what", ["shared out", "passes", "replacement", "copies", "own shards"])
def test_s18_samples_that_come_again_by_chance_name_nobody(what: str, world: int) -> None:
    rng = np.random.default_rng(7)
    size = 64 * world * BATCH
    readers: dict[str, Reader] = {
        "shared out": shuffled(100 * size, world),
        "passes": shuffled(size, world),  # several passes that nobody announced: each sample lands anywhere
        "replacement": lambda rank, step: rng.integers(0, size, BATCH),
        "copies": lambda rank, step: shuffled(100 * size, world)(rank, step) % size,
        "own shards": lambda rank, step: rank * size + rng.integers(0, size, BATCH),
    }
    assert read(readers[what], world, steps=200) == []


def test_s18_two_ranks_with_overlapping_shares_are_both_named() -> None:
    """No window is the same: rank 3 reads rank 2's share three steps later, in another grouping."""
    clean = shuffled(100_000, 4)

    def reader(rank: int, step: int) -> np.ndarray:
        if rank == 3 and step >= 4:
            return np.concatenate([clean(2, step - 3)[3:], clean(2, step - 2)[:3]])
        return clean(rank, step)

    found = read(reader, 4, steps=40)
    assert found and {f.ranks for f in found} == {(2, 3)}


def test_s18_one_sample_of_eight_on_two_ranks_in_every_window() -> None:
    clean = shuffled(100_000, 4)

    def reader(rank: int, step: int) -> np.ndarray:
        return np.concatenate([clean(0, step)[:2], clean(1, step)[2:]]) if rank == 1 else clean(rank, step)

    found = read(reader, 4, steps=60)
    assert found and found[0].ranks == (0, 1)


def test_a_window_that_is_run_again_is_no_meeting() -> None:
    clean = shuffled(100_000, 2)
    assert read(lambda rank, step: clean(rank, step // 2), 2, steps=400) == []


def test_only_peers_are_compared() -> None:
    """Ranks of two pipeline stages read the same on purpose."""
    clean, detector = shuffled(100_000, 2), SharedSamples()
    for step in range(60):
        told = np.stack([np.sort(digests(clean(rank // 2, step)))[:4] for rank in range(4)], axis=1)
        per_rank = dict(zip(COLUMNS, told, strict=True))
        observation = Observation(step + 1, step + 1, {}, per_rank, ((0, 2), (1, 3)))
        assert detector.observe(observation) == []
        detector.absorb(observation, [], True)


def test_nothing_is_told_without_digests_and_what_is_kept_is_bounded_and_rewinds() -> None:
    detector, twin = SharedSamples(), SharedSamples()
    log = Observation(1, 1, {"loss": 2.0})
    assert detector.observe(log) == []
    detector.absorb(log, [], True)
    reader = shuffled(40_000, 4, other=2)
    read(reader, 4, 40, detector)
    state = detector.state_dict()
    assert sum(v.nbytes for v in state.values()) < 250_000
    expected = read(reader, 4, 600, detector, first=40)
    twin.load_state_dict(state)
    assert expected and read(reader, 4, 600, twin, first=40) == expected
