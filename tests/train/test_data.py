"""The global sample order, its restore to the exact sample, and the held-out split (BR-11, BR-13, T1)."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.errors import ConfigError, DataPositionError
from resilient.train.data import DataConfig, TokenStream, load_corpus, permute, sample_ids

pytestmark = pytest.mark.timeout(60)

CONFIG = DataConfig(name="synthetic", seq_len=16, micro_batch=3, accumulation=2, max_bytes=4000, eval_fraction=0.1)
CORPUS = load_corpus(CONFIG)


def stream(rank: int = 0, world: int = 2, seed: int = 7, **changes: int) -> TokenStream:
    config = DataConfig(**{**CONFIG.__dict__, **changes})
    return TokenStream(config, seed=seed, rank=rank, world=world, corpus=CORPUS)


def ids(batches) -> list[list[int]]:
    return [batch["ids"].tolist() for batch in batches]


# -- order ------------------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(size, seed, epoch):
    assert sorted(permute(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


def test_permutation_looks_random_and_differs_by_seed_and_epoch():
    size = 5000
    first = permute(np.arange(size), size, 0, 0)
    for other in (permute(np.arange(size), size, 1, 0), permute(np.arange(size), size, 0, 1), np.arange(size)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.06  # 4 sigmas of independent orders
        assert (first == other).mean() < 0.01
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.06  # nor do neighbours stay neighbours


@given(start=st.integers(0, 500), length=st.integers(1, 300), cut=st.integers(0, 300), size=st.integers(1, 97))
@settings(max_examples=80, deadline=None)
def test_positions_add_up(start, length, cut, size):
    """Any stretch of the order equals its two halves, and each epoch holds every sample once."""
    cut = min(cut, length - 1)
    whole = sample_ids(start, length, size, seed=3).tolist()
    halves = sample_ids(start, cut, size, seed=3).tolist() if cut else []
    assert halves + sample_ids(start + cut, length - cut, size, seed=3).tolist() == whole
    epoch = start // size + 1
    assert sorted(sample_ids(epoch * size, size, size, seed=3).tolist()) == list(range(size))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_count_gives_the_same_global_order(world):
    """12 samples a window, whatever the number of ranks; the windows of a changed world continue the old ones."""
    micro = 12 // (world * 3)  # accumulation 3
    streams = [stream(rank, world, micro_batch=micro, accumulation=3) for rank in range(world)]
    assert {s.global_batch for s in streams} == {12}
    rows = [list(islice(s, 9)) for s in streams]
    order = [i for step in zip(*rows, strict=True) for batch in step for i in batch["ids"].tolist()]
    assert order == sample_ids(0, 36, streams[0].samples, seed=7).tolist()
    state = streams[-1].state_dict()
    assert all(s.state_dict() == state for s in streams)
    alone = stream(0, 1, micro_batch=4, accumulation=3)
    alone.load_state_dict(state)
    assert next(iter(alone))["ids"].tolist() == sample_ids(36, 4, alone.samples, seed=7).tolist()


def test_labels_are_the_next_bytes_of_the_named_sample():
    batch = next(iter(stream()))
    for row, sample in enumerate(batch["ids"].tolist()):
        text = torch.from_numpy(CORPUS.train[sample * 16 : sample * 16 + 17].astype(np.int64))
        assert torch.equal(batch["input_ids"][row], text[:-1])
        assert torch.equal(batch["labels"][row], text[1:])
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 16)


# -- restore ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["epoch 0 middle", "epoch 1 middle", "boundary", "last batch"])
def test_br11_ledger_of_sample_ids_over_a_stop(where):
    """Consumed ids of (run until k) + (resume) equal an uninterrupted run's, per rank, per epoch, order included."""
    per_epoch = stream().samples // 6  # micro-steps; an epoch ends inside the next one
    stop = {
        "epoch 0 middle": per_epoch // 2,
        "epoch 1 middle": per_epoch + per_epoch // 2,
        "boundary": per_epoch + 1,
        "last batch": 3 * per_epoch,
    }[where]
    for rank in range(2):
        whole = ids(islice(stream(rank), 3 * per_epoch + 4))
        first = stream(rank)
        head = ids(islice(first, stop))
        second = stream(rank)
        second.load_state_dict(first.state_dict())
        assert head + ids(islice(second, len(whole) - stop)) == whole


def test_br11_every_sample_once_per_epoch_over_all_ranks():
    streams = [stream(rank) for rank in range(2)]
    size = streams[0].samples
    steps = -(-2 * size // 6)
    rows = [list(islice(s, steps)) for s in streams]
    order = [i for step in zip(*rows, strict=True) for batch in step for i in batch["ids"].tolist()]
    for epoch in range(2):
        assert Counter(order[epoch * size : (epoch + 1) * size]) == Counter(range(size))
    assert order[:size] != order[size : 2 * size]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_br13_workers_change_nothing_and_restores_are_exact(workers):
    """Bit-identical batches for any worker count; the state counts what was delivered, not what was prefetched; the
    wrong order of restore and iteration raises; no draw from the global RNG; no process is left."""
    reference = list(islice(stream(1), 12))
    others = set(multiprocessing.active_children())
    before = torch.get_rng_state()
    live = stream(1, num_workers=workers)
    iterator = iter(live)
    got = [next(iterator) for _ in range(5)]
    state = live.state_dict()
    assert state["position"] == 5 * 6
    with pytest.raises(DataPositionError, match="after iteration began"):
        live.load_state_dict(state)
    got += [next(iterator) for _ in range(2)]
    for ours, theirs in zip(got, reference, strict=False):
        assert all(torch.equal(ours[k], theirs[k]) for k in ("input_ids", "labels", "ids"))

    resumed = stream(1, num_workers=workers)
    resumed.load_state_dict(state)
    assert ids(islice(resumed, 7)) == ids(reference[5:12])
    resumed.close()

    live.rewind(state)
    with pytest.raises(DataPositionError, match="iterator ended"):
        next(iterator)  # of before the rewind
    assert ids(islice(live, 7)) == ids(reference[5:12])
    live.close()
    assert live.position == 72
    assert torch.equal(torch.get_rng_state(), before)
    assert set(multiprocessing.active_children()) == others


def test_br13_created_but_not_advanced_iterator_counts_as_begun():
    live = stream()
    iter(live)
    with pytest.raises(DataPositionError, match="after iteration began"):
        live.load_state_dict(stream().state_dict())


def test_br13_first_batch_is_checked_against_the_position():
    """A loader that goes on from another place than the stream believes is found at the first batch."""
    live = stream()
    iterator = iter(live)
    live._position += 6
    with pytest.raises(DataPositionError, match="came where 6 was due"):
        next(iterator)
    live = stream()
    wrong = iter([{"position": 0, "ids": torch.tensor([0, 0, 0])}])
    with pytest.raises(DataPositionError, match="due were"):
        next(live._deliver(wrong, live._generation))


@pytest.mark.parametrize(
    ("changes", "names"), [({"seed": 8}, "seed: state 7, this run 8"), ({"seq_len": 8}, "seq_len")]
)
def test_state_of_another_order_is_refused_with_both_values(changes, names):
    with pytest.raises(DataPositionError, match=names):
        stream(**changes).load_state_dict(stream().state_dict())


def test_state_of_another_text_is_refused():
    state = {**stream().state_dict(), "text": "0" * 16}
    with pytest.raises(DataPositionError, match="text: state 0000"):
        stream().rewind(state)
    with pytest.raises(DataPositionError, match="lacks text"):
        stream().load_state_dict({k: v for k, v in state.items() if k != "text"})


# -- text -------------------------------------------------------------------------------------------------------------


def test_stdlib_text_is_the_same_twice_and_splits_without_overlap():
    config = DataConfig(max_bytes=300_000)
    one, two = load_corpus(config), load_corpus(config)
    assert one.digest == two.digest
    assert len(one.train) + len(one.held_out) >= 300_000
    assert 0.02 < len(one.held_out) / len(one.train) < 0.08
    train, held = one.train.tobytes(), one.held_out.tobytes()
    assert b"import" in train
    assert held[:500] not in train


def test_files_by_glob(tmp_path: Path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(name.encode() * 5000)
    corpus = load_corpus(DataConfig(name="files", glob=str(tmp_path / "**" / "*.txt"), seq_len=32))
    assert len(corpus.train) + len(corpus.held_out) == 10_001  # and the separator


@pytest.mark.parametrize("content", [None, b"too short"])
def test_unusable_files_name_the_key(tmp_path: Path, content):
    if content is not None:
        (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.glob="):
        load_corpus(DataConfig(name="files", glob=str(tmp_path / "*.txt")))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"name": "files"}, "data.glob"),
        ({"micro_batch": 0}, "data.micro_batch"),
        ({"eval_fraction": 1.0}, "data.eval_fraction"),
    ],
)
def test_bad_values_name_the_key(changes, key):
    with pytest.raises(ConfigError, match=key):
        DataConfig(**changes)
