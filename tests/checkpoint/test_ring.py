"""The memory ring: what is frozen stays frozen, memory is used again, and the budget leaves two (S15)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resilient.checkpoint.config import SnapshotConfig
from resilient.checkpoint.ring import MemoryRing
from resilient.checkpoint.snapshot import Snapshot, freeze


def snapshot(step: int, elements: int = 256) -> Snapshot:
    parts = {"engine": {"w": torch.full((elements,), float(step))}, "rng": {}, "data": {}, "judge": {}}
    return Snapshot(step, step, step, 0.1, step, parts, Snapshot.digest_parts(parts))


def test_frozen_state_is_nobody_elses():
    live = {
        "w": torch.arange(6.0).reshape(2, 3).T,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.empty(0),
        "group": [{"betas": (0.9, 0.99), "lr": 1e-3}],
        "milestones": Counter({10: 1}),
    }
    frozen = freeze(live)
    digest = Snapshot.digest_parts(dict.fromkeys(("engine", "rng", "data", "judge"), frozen))
    live["w"].add_(1)
    live["half"].zero_()
    live["group"][0]["lr"] = 0.0
    live["milestones"][10] = 2
    assert torch.equal(frozen["w"], torch.arange(6.0).reshape(2, 3).T)
    assert frozen["group"] == [{"betas": (0.9, 0.99), "lr": 1e-3}] and frozen["milestones"] == Counter({10: 1})
    assert Snapshot.digest_parts(dict.fromkeys(("engine", "rng", "data", "judge"), frozen)) == digest


def test_memory_is_used_again_only_where_it_fits():
    old = freeze({"a": torch.zeros(4), "b": torch.zeros(4), "c": [torch.zeros(2), 1], "gone": torch.zeros(1)})
    new = freeze({"a": torch.ones(4), "b": torch.ones(5), "c": [torch.ones(2), 2], "more": torch.ones(1)}, into=old)
    assert new["a"].data_ptr() == old["a"].data_ptr() and new["c"][0].data_ptr() == old["c"][0].data_ptr()
    assert new["b"].data_ptr() != old["b"].data_ptr() and "gone" not in new
    assert new["a"].sum() == 4 and new["b"].sum() == 5 and new["c"][1] == 2 and new["more"] == 1
    assert freeze({"a": torch.ones(4, dtype=torch.float64)}, into=new)["a"].data_ptr() != new["a"].data_ptr()


def test_what_falls_out_is_spare_unless_it_is_lent():
    ring = MemoryRing(SnapshotConfig(keep=2))
    first, second, third, fourth = (snapshot(step) for step in (1, 2, 3, 4))
    for one in (first, second, third):
        ring.add(one)
    assert ring.spare() is first and ring.spare() is None, "given away once"
    ring.lend(second)
    ring.add(fourth)
    assert ring.spare() is None, "its reader may not be done with it"
    ring.lend(second)
    ring.give_back(second)
    assert ring.spare() is None, "one of two readers is"
    ring.give_back(second)
    assert ring.spare() is second
    ring.lend(third)
    ring.give_back(third)
    assert ring.spare() is None, "it is still held"
    ring.drop_after(3)
    assert ring.steps() == (3,) and ring.spare() is fourth


def test_s15_a_budget_leaves_two_good_ones():
    ring = MemoryRing(SnapshotConfig(keep=5, budget_mb=5 * 1024 / 2**20))
    assert ring.fits(snapshot(1).bytes) == 4 and MemoryRing(SnapshotConfig(keep=4)).fits(1 << 40) == 4
    ring.limit(4)
    for step in range(1, 8):
        ring.add(snapshot(step))
    assert ring.steps() == (4, 5, 6, 7)
    ring.limit(ring.fits(1 << 30))
    assert ring.steps() == (5, 6, 7), "two, and the newest may be too young to go back to"


@given(st.lists(st.integers(-4, 3), max_size=30), st.integers(1, 5))
def test_it_holds_the_newest_of_the_course_in_force(moves: list[int], keep: int):
    ring, step = MemoryRing(SnapshotConfig(keep=keep)), 10
    course: list[int] = []
    for move in moves:
        step = max(step + move, 0)
        course = [s for s in course if s < step] + [step]  # what is newer was taken back
        ring.add(snapshot(step, 1))
        assert len(ring) <= keep and ring.steps()[-1] == step
        assert list(ring.steps()) == [s for s in course if s in ring.steps()]


@pytest.mark.parametrize("broken", [False, True])
def test_a_state_with_one_bit_changed_has_another_digest(broken: bool):
    kept = freeze({"w": torch.arange(1000, dtype=torch.float32)})
    before = Snapshot.digest_parts(dict.fromkeys(("engine", "rng", "data", "judge"), kept))
    if broken:
        kept["w"].view(torch.int32)[777] ^= 1 << 31
    assert (Snapshot.digest_parts(dict.fromkeys(("engine", "rng", "data", "judge"), kept)) != before) == broken
