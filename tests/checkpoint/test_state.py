"""Digests and RNG capture: exact, order-sensitive, complete (C3, T1, BR-14)."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resilient.checkpoint.config import SnapshotConfig
from resilient.checkpoint.digest import state_digest, state_digests, tensor_digest
from resilient.checkpoint.ring import MemoryRing
from resilient.checkpoint.rng import capture_rng, restore_rng
from resilient.checkpoint.snapshot import Snapshot


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_a_single_flipped_element_changes_the_digest(dtype: torch.dtype):
    tensor = torch.arange(2500).remainder(2).to(dtype)
    before = int(tensor_digest(tensor))
    for index in (0, 1, 1249, 2499):
        changed = tensor.clone()
        changed[index] = 1 - changed[index].to(torch.int64)
        assert int(tensor_digest(changed)) != before


def test_digest_sees_order_within_and_between_chunks():
    tensor = torch.arange(3_000_000, dtype=torch.int32)
    assert int(tensor_digest(tensor)) != int(tensor_digest(tensor.flip(0)))
    swapped = torch.cat([tensor[1 << 20 :], tensor[: 1 << 20]])
    assert int(tensor_digest(tensor)) != int(tensor_digest(swapped))


def test_negative_zero_and_nan_bits_count():
    assert int(tensor_digest(torch.tensor([0.0]))) != int(tensor_digest(torch.tensor([-0.0])))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=3), c, max_size=3),
        max_leaves=8,
    )
)
def test_state_digest_is_a_function_of_the_state(state):
    assert state_digest({"a": state}) == state_digest({"a": state})


def test_state_digests_name_the_leaf_that_differs():
    one = {"w": torch.ones(3), "opt": [{"step": 3}]}
    two = {"w": torch.ones(3), "opt": [{"step": 4}]}
    a, b = state_digests(one), state_digests(two)
    assert [path for path in a if a[path] != b[path]] == ["/opt/0/step"]


def draws() -> list[float]:
    return [
        random.random(),
        float(np.random.rand()),
        float(torch.rand(())),
        random.gauss(0, 1),
        float(np.random.normal()),
    ]


def test_all_streams_come_back_also_through_a_file():
    random.gauss(0, 1), np.random.normal()  # leaves a cached second value in both
    buffer = io.BytesIO()
    torch.save(capture_rng(), buffer)
    first = draws()
    buffer.seek(0)
    restore_rng(torch.load(buffer, weights_only=True))
    assert draws() == first


@pytest.mark.parametrize("stream", ["python", "numpy", "torch"])
def test_a_missing_stream_is_an_error_never_a_silent_reseed(stream: str):
    state = capture_rng()
    del state[stream]
    with pytest.raises(KeyError, match=stream):
        restore_rng(state)


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, step, step, 0.1, step, {})


def test_ring_keeps_the_newest():
    ring = MemoryRing(SnapshotConfig(every=5, keep=3))
    for step in (0, 5, 10, 15):
        ring.add(snapshot(step))
    assert ring.steps() == (5, 10, 15)
    ring.drop_after(10)
    assert ring.steps() == (5, 10)
