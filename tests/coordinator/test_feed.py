"""The data feed: windows, epoch tails, exclusion, and coming back to the exact batch (BR-11, BR-13, BR-18, BR-40)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from resilient.coordinator.feed import WindowFeed, count_tokens
from resilient.errors import DataPositionError


class Stateful:
    """A finite loader of integers with exact state."""

    def __init__(self, n: int) -> None:
        self.n, self.at, self.resume_at = n, 0, 0

    def __iter__(self):
        self.at, self.resume_at = self.resume_at, 0
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume_at = self.at = state["at"]


def drain(feed: WindowFeed, epochs: int = 1) -> list[list[Any]]:
    windows = []
    while feed.epoch < epochs:
        while feed.peek() is not None:
            windows.append(feed.take().batches)
        feed.next_epoch()
    return windows


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("drop", [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]),
        ("flush", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        ("carry", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]),
    ],
)
def test_epoch_tail_has_a_declared_policy(tail: Any, expected: list[list[int]]):
    assert drain(WindowFeed(range(10), 4, tail=tail), epochs=2) == expected


def shuffled(seed: int = 0) -> DataLoader:
    torch.manual_seed(seed)
    return DataLoader(list(range(17)), batch_size=2, shuffle=True)


@pytest.mark.parametrize(
    "make", [lambda: Stateful(11), lambda: list(range(11)), shuffled], ids=["stateful", "list", "shuffled"]
)
@pytest.mark.parametrize("tail", ["drop", "flush", "carry"])
def test_every_position_can_be_come_back_to(make: Any, tail: Any):
    feed = WindowFeed(make(), 3, tail=tail)
    states, rest = [], []
    while feed.epoch < 3:
        while True:
            feed.peek()
            states.append((feed.state_dict(), torch.get_rng_state()))
            if feed.peek() is None:
                break
            rest.append(feed.take().batches)
        feed.next_epoch()
    windows = [str(w) for w in rest]
    for state, rng in reversed(states):
        feed.load_state_dict(state)
        assert feed.position == state["window"]
        feed.peek()  # before RNG is restored, as the coordinator does: a shuffling sampler draws at its first batch
        torch.set_rng_state(rng)
        assert [str(w) for w in drain(feed, epochs=3)] == windows[state["window"] :], state


def test_excluded_windows_are_passed_over_and_positions_stay():
    feed = WindowFeed(list(range(10)), 2)
    start = feed.state_dict()
    feed.take()
    feed.load_state_dict(start)
    feed.exclude(1, 3)
    delivered = []
    while feed.peek() is not None:
        delivered.append(feed.take())
    assert [(w.index, w.batches) for w in delivered] == [(0, [0, 1]), (3, [6, 7]), (4, [8, 9])]
    assert feed.position == 5


def test_exclusion_outlives_a_rewind():
    feed = WindowFeed(list(range(10)), 2)
    start = feed.state_dict()
    feed.exclude(0, 1)
    assert feed.take().index == 1
    feed.load_state_dict(start)
    assert feed.take().index == 1


def test_another_accumulation_is_refused():
    state = WindowFeed(range(8), 2).state_dict()
    with pytest.raises(DataPositionError, match="2 micro-batches per step, now 4"):
        WindowFeed(range(8), 4).load_state_dict(state)


def test_a_loader_that_became_shorter_is_refused():
    feed = WindowFeed(list(range(8)), 1)
    for _ in range(6):
        feed.take()
    state = feed.state_dict()
    with pytest.raises(DataPositionError, match="ended after 3 of the 6"):
        WindowFeed(list(range(3)), 1).load_state_dict(state)


def test_sampler_epoch_is_set():
    class Sampled(list):
        class sampler:
            epochs: ClassVar[list[int]] = []

            @classmethod
            def set_epoch(cls, epoch: int) -> None:
                cls.epochs.append(epoch)

    drain(WindowFeed(Sampled([1, 2]), 1), epochs=3)
    assert Sampled.sampler.epochs == [0, 1, 2]


def test_padding_carries_no_loss():
    feed = WindowFeed([{"x": torch.ones(2), "labels": torch.tensor([3, 4])}], 1)
    assert feed.take().tokens == 2
    padding = feed.pad()
    assert padding.padding and padding.tokens == 0 and count_tokens(padding.batches[0]) == 0


def labelled(*labels: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([labels]), "labels": torch.tensor([labels])}


def test_s18_a_window_is_fingerprinted_when_it_is_fetched_and_the_same_when_it_comes_again():
    feed = WindowFeed(
        [labelled(1, 2), labelled(3, 4), labelled(1, 2), labelled(3, 4), labelled(5, 6), labelled(7, 8)], 2
    )
    start = feed.state_dict()
    first = feed.take()
    digest = first.digest
    first.batches[0].pop("labels")  # as some loops do
    first.batches[0]["labels"] = torch.tensor([[1, 2]])
    assert feed.take().digest == first.digest == digest != feed.take().digest
    feed.load_state_dict(start)
    assert feed.take().digest == digest


def test_s18_windows_without_loss_are_no_duplicates_of_each_other():
    feed = WindowFeed([labelled(1, 2), labelled(-100, -100)], 1)
    assert not math.isnan(feed.take().digest)
    assert math.isnan(feed.pad().digest)
    assert math.isnan(feed.take().digest)
    assert math.isnan(WindowFeed([labelled(1, 2)], 1, digests=False).take().digest)


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 5), st.sampled_from(["drop", "flush", "carry"]))
def test_nothing_is_delivered_twice_or_out_of_order(n: int, accumulation: int, tail: Any):
    flat = [b for w in drain(WindowFeed(list(range(n)), accumulation, tail=tail), epochs=1) for b in w]
    assert flat == list(range(len(flat)))
    if tail == "flush":
        assert len(flat) == n
    else:
        assert len(flat) == n - n % accumulation
