"""The link probe (C2, S19): its schedule, its verdicts on simulated worlds, and real gloo ranks with one thing broken."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.coordinator import links
from resilient.coordinator.link_report import blame, judge, shared_ranks
from resilient.coordinator.link_schedule import IDLE, circle, follow_up, lanes, pairs_of, ring, schedule
from resilient.coordinator.self_test import MatmulTest
from resilient.errors import ProbeFailed
from resilient.signals import LinkReport
from tests.coordinator.link_world import Broken, measured, report
from tests.ranks import run_pooled

# -- the schedule --------------------------------------------------------------------------------------------------------

worlds = st.integers(2, 1024)
some_hosts = st.lists(st.integers(1, 5), min_size=1, max_size=7).map(
    lambda sizes: [f"h{i}" for i, size in enumerate(sizes) for _ in range(size)]
)


def assert_disjoint(partners: np.ndarray) -> None:
    """Symmetric, nobody plays himself, and so nobody plays two at once."""
    rank = np.broadcast_to(np.arange(partners.shape[1]), partners.shape)
    met = partners != IDLE
    rounds = np.nonzero(met)[0]
    assert (partners[rounds, partners[met]] == rank[met]).all()
    assert not (partners == rank).any()


@settings(max_examples=30, deadline=None)
@given(worlds)
def test_a_full_tournament_has_every_pair_once(n: int) -> None:
    table = circle(n)
    assert_disjoint(table)
    assert len(table) == (n if n % 2 else n - 1)
    expected = np.array([[j for j in range(n) if j != i] for i in (0, n // 2, n - 1)])
    for i, others in zip((0, n // 2, n - 1), expected, strict=True):
        assert sorted(p for p in table[:, i].tolist() if p != IDLE) == others.tolist()
    assert ((table == IDLE).sum(axis=1) == n % 2).all(), "every rank takes part, but one when their number is odd"


@settings(max_examples=15, deadline=None)
@given(worlds)
def test_the_first_rounds_are_few_and_hold_the_ring(n: int) -> None:
    plan = schedule(["one"] * n)
    assert_disjoint(plan.first)
    assert len(plan.first) <= math.ceil(math.log2(n)) + 3
    assert ((plan.first == IDLE).sum(axis=1) <= n % 2).all()
    assert {tuple(sorted((i, (i + 1) % n))) for i in range(n)} <= pairs_of(plan.first)
    assert len(ring(n)) <= 3
    assert plan.pairs == n * (n - 1) // 2


@settings(max_examples=40, deadline=None)
@given(some_hosts)
def test_hosts_play_hosts_and_every_link_is_there(hosts: list[str]) -> None:
    plan = schedule(hosts)
    assert_disjoint(plan.first)
    assert_disjoint(plan.rest)
    met = pairs_of(plan.first) | pairs_of(plan.rest)
    inside = {(a, b) for a, b in met if hosts[a] == hosts[b]}
    count = len(lanes(hosts))
    assert inside == {(a, b) for a in range(len(hosts)) for b in range(a + 1, len(hosts)) if hosts[a] == hosts[b]}, (
        "all pairs within hosts"
    )
    assert len({frozenset((hosts[a], hosts[b])) for a, b in met - inside}) == count * (count - 1) // 2
    across = [row for row in plan.first if any(hosts[i] != hosts[p] for i, p in enumerate(row) if p != IDLE)]
    assert len(across) <= (math.ceil(math.log2(count)) if count > 1 else 0) + 3


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), max_size=12, unique=True))
def test_follow_up_has_just_the_suspects_in_few_rounds(pairs: list[tuple[int, int]]) -> None:
    rounds = follow_up(pairs, 20)
    assert_disjoint(rounds)
    assert pairs_of(rounds) == set(pairs)
    degree = max((sum(rank in pair for pair in pairs) for rank in range(20)), default=0)
    assert len(rounds) <= max(2 * degree - 1, 0)


# -- the verdict on simulated worlds ---------------------------------------------------------------------------------------

some_worlds = st.one_of(st.integers(2, 16), st.sampled_from([17, 32, 63, 100]))


def found(what: LinkReport) -> tuple[Any, ...]:
    return what.slow_pairs, what.wrong_pairs, what.slow_ranks, what.wrong_ranks


@settings(max_examples=20, deadline=None)
@given(some_worlds, st.data())
def test_a_slow_rank_is_named_by_the_first_rounds(n: int, data: st.DataObject) -> None:
    """S19: also when there is no time for more than O(log world) rounds. Of two ranks neither can be named."""
    bad = data.draw(st.integers(0, n - 1))
    said = report(["one"] * n, Broken(slow=bad), seed=data.draw(st.integers(0, 99)), rest=data.draw(st.booleans()))
    assert shared_ranks(said.slow_pairs) == ((bad,) if n > 2 else ())
    assert all(bad in pair for pair in said.slow_pairs)
    assert found(said)[1:] == ((), (), ())
    assert n == 2 or any(f"rank {bad} (one) is in several" in line for line in said.measured)


@settings(max_examples=20, deadline=None)
@given(some_worlds, st.data())
def test_a_slow_pair_is_named_and_no_rank(n: int, data: st.DataObject) -> None:
    a, b = sorted(data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True)))
    said = report(["one"] * n, Broken(slow=(a, b)), seed=data.draw(st.integers(0, 99)))
    assert found(said) == (((a, b),) if n > 2 else (), (), (), ())
    assert shared_ranks(said.slow_pairs) == ()


@settings(max_examples=20, deadline=None)
@given(some_worlds, st.data())
def test_who_corrupts_is_named(n: int, data: st.DataObject) -> None:
    a, b = sorted(data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True)))
    seed = data.draw(st.integers(0, 99))
    assert found(report(["one"] * n, Broken(corrupting=(a, b)), seed=seed)) == ((), ((a, b),), (), ())
    said = report(["one"] * n, Broken(corrupting=a), seed=seed, rest=data.draw(st.booleans()))
    assert all(a in pair for pair in said.wrong_pairs)
    assert shared_ranks(said.wrong_pairs) == ((a,) if n > 2 else ())
    assert not said.slow_pairs


@settings(max_examples=15, deadline=None)
@given(st.integers(3, 9), st.integers(1, 8), st.data())
def test_a_slow_host_is_all_of_its_ranks(count: int, size: int, data: st.DataObject) -> None:
    hosts = [f"h{i}" for i in range(count) for _ in range(size)]
    bad = data.draw(st.integers(0, count - 1))
    said = report(hosts, Broken(slow=f"h{bad}"), seed=data.draw(st.integers(0, 99)))
    assert sorted(shared_ranks(said.slow_pairs)) == list(range(bad * size, (bad + 1) * size))


@settings(max_examples=15, deadline=None)
@given(some_worlds, st.integers(0, 10_000), st.integers(1, 8))
def test_nothing_is_found_where_nothing_is(n: int, seed: int, size: int) -> None:
    assert found(report([f"h{i // size}" for i in range(n)], Broken(), seed=seed)) == ((), (), (), ())


@pytest.mark.parametrize("n", [255, 1024])
def test_large_worlds(n: int) -> None:
    """Every pair of 1,024 ranks is looked at, and the verdict is still as short."""
    slow = report(["one"] * n, Broken(slow=n // 3), rest=False)
    assert shared_ranks(slow.slow_pairs) == (n // 3,)
    both = report(["one"] * n, Broken(slow=(5, n - 1), corrupting=(0, 7)))
    assert found(both) == (((5, n - 1),), ((0, 7),), (), ())
    assert found(report([f"h{i // 8}" for i in range(n)], Broken())) == ((), (), (), ())
    assert len(both.measured) < 20


def test_a_link_that_is_not_slow_every_time_is_not_named() -> None:
    hosts = ["one"] * 8
    once, clean = measured(hosts, Broken(slow=(2, 3), factor=30)), measured(hosts, Broken())
    assert judge(once).slow_pairs == ((2, 3),)
    fine = replace(once.again[-1], figures=clean.first.figures[:, :1])
    assert judge(replace(once, again=(once.again[0], fine))).slow_pairs == ()


def test_the_silent_rank_and_the_dead_link_are_told_from_those_that_only_wait() -> None:
    waiting = {0: {"peer": 1, "waited": 9.0}, 1: {"peer": 2, "waited": 8.0}}
    assert blame(waiting, 3) == ([], [2])
    dead_link = waiting | {
        2: {"peer": 1, "waited": 9.0},
        3: {},
        4: {"peer": 5, "waited": 0.01},
        5: {"peer": 4, "waited": 0.01},
    }
    assert blame(dead_link, 6) == ([(1, 2)], [])


# -- real ranks ------------------------------------------------------------------------------------------------------------

_WORLD = 3
_DELAY_S = 0.04


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def slow_sender(bad: int, rank: int, wire: links.Wire, peer: int, out: torch.Tensor) -> torch.Tensor:
    if rank == bad:
        _busy(_DELAY_S)
    return out


def slow_link(pair: set[int], rank: int, wire: links.Wire, peer: int, out: torch.Tensor) -> torch.Tensor:
    if {rank, peer} == pair:
        _busy(_DELAY_S)
    return out


def corrupting_sender(bad: int, rank: int, wire: links.Wire, peer: int, out: torch.Tensor) -> torch.Tensor:
    if rank != bad or out.dtype != torch.int32:
        return out
    out = out.clone()
    out[7] ^= 1 << 30
    return out


def _probe(
    rank: int, world: int, times: int, tamper: Callable[..., torch.Tensor] | None = None, seconds: float = 1.0
) -> list[LinkReport]:
    """`times` probes on a group of their own, whose every message goes through `tamper` on its way out."""
    group = dist.new_group(backend="gloo")
    post = links.Wire.post
    if tamper is not None:
        links.Wire.post = lambda wire, peer, out, into: post(wire, peer, tamper(rank, wire, peer, out), into)  # type: ignore[method-assign]
    try:
        return [
            links.probe(group, torch.device("cpu"), rank, world, list("abc"), seconds, payload_mb=0.07)
            for _ in range(times)
        ]
    finally:
        links.Wire.post = post  # type: ignore[method-assign]
        dist.destroy_process_group(group)


def the_one(results: list[list[LinkReport]]) -> LinkReport:
    """The report of all ranks, which must be the same."""
    assert all(result == results[0] for result in results)
    return results[0][0]


def test_healthy_ranks_give_an_empty_report_twenty_times_in_a_row() -> None:
    results = run_pooled(_probe, _WORLD, 20, None, 0.3)
    assert all(result == results[0] for result in results)
    assert [found(said) for said in results[0]] == [((), (), (), ())] * 20
    assert all(said.measured for said in results[0])


def test_a_rank_that_sends_late_is_named() -> None:
    said = the_one(run_pooled(_probe, _WORLD, 1, partial(slow_sender, 1)))
    assert found(said) == (((0, 1), (1, 2)), (), (), ())
    assert shared_ranks(said.slow_pairs) == (1,)
    assert "slow: rank 1 (b) is in several of these links" in said.measured


def test_a_slow_link_is_named_and_its_ranks_are_not() -> None:
    said = the_one(run_pooled(_probe, _WORLD, 1, partial(slow_link, {0, 2})))
    assert found(said) == (((0, 2),), (), (), ())
    assert shared_ranks(said.slow_pairs) == ()


def test_a_rank_that_sends_wrong_bits_is_named_with_those_who_received_them() -> None:
    said = the_one(run_pooled(_probe, _WORLD, 1, partial(corrupting_sender, 2)))
    assert found(said) == ((), ((0, 2), (1, 2)), (), ())
    assert shared_ranks(said.wrong_pairs) == (2,)
    assert any("rank 0 (a) received" in line and "from rank 2 (c)" in line for line in said.measured)
    assert not any("rank 2 (c) received" in line for line in said.measured)


def _wrong_arithmetic(rank: int, world: int) -> list[LinkReport]:
    multiply = torch.mm

    def broken(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        multiply(a, b, out=out)
        out[3, 5] += 1.0
        return out

    def slow(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            multiply(a, b, out=out)
        return out

    torch.mm = {0: multiply, 1: broken, 2: slow}[rank]
    try:
        return _probe(rank, world, 1)
    finally:
        torch.mm = multiply


def test_a_slow_or_wrong_machine_is_told_from_a_slow_or_wrong_link() -> None:
    """BR-42: rank 1 multiplies wrongly, rank 2 slowly; the links are in order."""
    assert found(the_one(run_pooled(_wrong_arithmetic, _WORLD))) == ((), (), (2,), (1,))


def test_the_product_is_exact_and_one_wrong_element_is_seen() -> None:
    test = MatmulTest(torch.device("cpu"))
    assert test.run()[2] == 0
    test._cases[1].a[100, 7] += 1  # one operand
    assert test.run()[2] > 0


def _wrong_collective(rank: int, world: int) -> list[LinkReport]:
    reduce = dist.all_reduce

    class Corrupted:
        def __init__(self, tensor: torch.Tensor, work: Any) -> None:
            self.tensor, self.work = tensor, work

        def wait(self, timeout: timedelta) -> None:
            self.work.wait(timeout)
            self.tensor.view(torch.int32)[11] ^= 1

    def corrupted(tensor: torch.Tensor, **options: Any) -> Any:
        return Corrupted(tensor, reduce(tensor, **options)) if rank == 1 else reduce(tensor, **options)

    dist.all_reduce = corrupted
    try:
        return _probe(rank, world, 1)
    finally:
        dist.all_reduce = reduce


def test_a_wrong_result_of_a_collective_names_the_receiver_when_no_link_is_wrong() -> None:
    said = the_one(run_pooled(_wrong_collective, _WORLD))
    assert found(said) == ((), (), (), (1,))
    assert any("rank 1 (b): 2 in all-reduce" in line for line in said.measured)


def _failing(rank: int, world: int, kind: str) -> tuple[str, LinkReport, tuple[int, ...], bool, float] | None:
    """A probe that cannot succeed: kind absent (rank 2 does not come), stuck (it comes and then does nothing more) or
    dead link (0 and 1 send nothing to each other)."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    patience, post, test = links.patience, links.Wire.post, links.MatmulTest
    links.patience = lambda seconds: 3.0
    try:
        if kind == "stuck" and rank == 2:
            links.MatmulTest = lambda device: 1 / 0  # type: ignore[misc, assignment]
        if kind == "dead link":
            links.Wire.post = lambda wire, peer, out, into: (  # type: ignore[method-assign]
                [dist.irecv(into, peer, group=group)] if {rank, peer} == {0, 1} else post(wire, peer, out, into)
            )
        if kind != "absent" or rank != 2:
            links.probe(group, torch.device("cpu"), rank, world, list("abc"), 1.0, payload_mb=0.07)
    except ProbeFailed as error:
        usable = error.usable
        return str(error), error.report, error.missing, usable, _sum(group) if usable else math.nan
    except ZeroDivisionError:
        return None
    finally:
        links.patience, links.Wire.post, links.MatmulTest = patience, post, test  # type: ignore[method-assign, misc]
    _sum(group)
    return None


def _sum(group: dist.ProcessGroup) -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return float(ones)


def test_a_rank_that_does_not_come_is_named_and_the_group_is_untouched() -> None:
    results = run_pooled(_failing, _WORLD, "absent")
    for message, said, missing, usable, total in results[:2]:
        assert (missing, usable, total) == ((2,), True, 3.0)
        assert "rank 2 (c) did not come to the link probe within 1 s" in message
        assert found(said) == ((), (), (), ())


def test_a_rank_that_stops_answering_is_named_and_the_group_is_not_said_to_be_usable() -> None:
    results = run_pooled(_failing, _WORLD, "stuck")
    for message, _, missing, usable, _ in results[:2]:
        assert (missing, usable) == ((2,), False)
        assert "rank 2 (c) has stopped answering" in message


def test_a_dead_link_is_named_on_all_ranks_alike() -> None:
    for message, said, missing, usable, _ in run_pooled(_failing, _WORLD, "dead link"):
        assert (missing, usable) == ((), False)
        assert said.slow_pairs == ((0, 1),)
        assert "the link between rank 0 (a) and rank 1 (b) does not answer" in message


def test_one_rank_alone_tests_its_machine() -> None:
    said = links.probe(None, torch.device("cpu"), 0, 1, ["here"], 1.0)
    assert found(said) == ((), (), (), ())
    with pytest.raises(ValueError, match="1 host names for 2 ranks"):
        links.probe(None, torch.device("cpu"), 0, 2, ["here"], 1.0)
