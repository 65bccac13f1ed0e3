"""Meetings in the store: who is missing is known in time, and the same to all, however late a rank comes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from resilient.coordinator.attendance import LONGEST_S, Attendance, Meeting
from resilient.coordinator.exchange import Exchange
from tests.ranks import run_pooled


def late(rank: int, world: int) -> tuple[Meeting, float, Meeting]:
    """Rank 1 comes when the others have gone; then all come, and rank 1 has something to say."""
    exchange = Exchange(torch.device("cpu"), 1.0)
    attendance = Attendance(exchange)
    if rank == 1:
        dist.barrier()
    began = time.monotonic()
    first = attendance.meet("here/7")
    took = time.monotonic() - began
    if rank != 1:
        dist.barrier()
    second = attendance.meet("here/7", "not yet" if rank == 1 else "")
    exchange.close()
    return first, took, second


def test_one_that_comes_late_is_told_so_at_once_and_the_next_meeting_is_a_new_one():
    for rank, (first, took, second) in enumerate(run_pooled(late, 3)):
        assert first.missing == (1,) and took < (0.5 if rank == 1 else 5)
        assert first.first == (rank == 0)
        text = first.missed("the roll call")
        assert "rank 1 did not come to the roll call within 1 s" in text and "on every rank" in text
        assert ("came after the others had given up" in text) == (rank == 1)
        assert (second.missing, second.note) == ((), "not yet")


def elsewhere(rank: int, world: int) -> tuple[Meeting, int]:
    """Each comes to a place of its own; afterwards to one together, often."""
    exchange = Exchange(torch.device("cpu"), 0.5)
    attendance = Attendance(exchange)
    apart = attendance.meet(f"here/{rank}")
    dist.barrier()
    together = sum(not attendance.meet(f"there/{i // 2}").missing for i in range(20))
    exchange.close()
    return apart, together


def test_another_place_is_another_meeting_and_none_is_mistaken_for_the_one_before():
    (one, often), (two, as_often) = run_pooled(elsewhere, 2)
    assert (one.missing, two.missing) == ((1,), (0,))
    assert often == as_often == 20


def test_a_rank_alone_in_the_world_waits_for_nobody():
    exchange = Exchange(torch.device("cpu"), 1e3)
    assert exchange.store() is None
    assert Attendance(exchange).meet("here") == Meeting(0)
    assert LONGEST_S < 10


def test_the_store_of_a_launched_job_keeps_the_time_and_every_outcome():
    """Over TCP, as under any launcher; the other tests' ranks share a file."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)

    def attendance(rank: int) -> Attendance:
        store = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=20)))
        exchange: Any = SimpleNamespace(rank=rank, world_size=3, timeout=timedelta(seconds=1), store=lambda: store)
        return Attendance(exchange)

    ranks = [attendance(rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        first = [job.result() for job in [pool.submit(ranks[r].meet, "here") for r in (0, 2)]]
        assert [meeting.missing for meeting in first] == [(1,), (1,)] and 0.9 < time.monotonic() - began < 3
        began = time.monotonic()
        assert ranks[1].meet("here").missing == (1,) and time.monotonic() - began < 0.5
        for _ in range(50):
            met = [job.result() for job in [pool.submit(rank.meet, "there", f"{rank is ranks[2]}") for rank in ranks]]
            assert [meeting.missing for meeting in met] == [(), (), ()]
            assert len({meeting.note for meeting in met}) == 1
