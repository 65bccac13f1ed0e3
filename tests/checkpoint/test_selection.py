"""checkpoint/selection.py: one list of targets on all ranks, and the reasons for what is not in it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.checkpoint.selection import CAPACITY, Copy, Offer, Selection, Tier, decode, encode, select, width
from resilient.checkpoint.trust import Failure, Key, Trust, TrustBook
from resilient.coordinator.exchange import Exchange
from resilient.errors import CheckpointError, RankDisagreement
from tests.ranks import run_pooled

M, P, D = Tier.MEMORY, Tier.PEER, Tier.DISK


def at(step: int) -> Key:
    return Key(step, step)


def offer(step: int | Key, *tiers: Tier, digest: int = 0, **refused: Tier) -> Offer:
    copies = dict.fromkeys(tiers, Copy.THERE) | dict.fromkeys(refused.values(), Copy.REFUSED)
    return Offer(step if isinstance(step, Key) else at(step), copies, digest)


def book_of(*steps: int, good: bool = True) -> TrustBook:
    book = TrustBook(after=2)
    for step in steps:
        book.saved(at(step))
        for clean in (step + 1, step + 2) if good else ():
            book.clean_step(clean)
    return book


def chosen(
    ranks: list[list[Offer]],
    book: TrustBook,
    onset: int | None = None,
    *,
    traces: bool = True,
    capacity: int = CAPACITY,
) -> Selection:
    rows = [encode(offers, book, onset, traces=traces, capacity=capacity) for offers in ranks]
    return select(np.stack(rows), book, onset)


def order(selection: Selection) -> list[int]:
    return list(dict.fromkeys(target.key.step for target in selection.targets))


def why(selection: Selection) -> Mapping[int, str]:
    return {key.step: reason for key, reason in selection.refused}


# -- going back ----------------------------------------------------------------------------------------------------------


def test_the_newest_good_one_before_the_onset():
    book = book_of(10, 20, 30, 40)
    every = [offer(s, M, D) for s in (10, 20, 30, 40)]
    book.onset(35, "loss/level on rank 1")
    found = chosen([every, every], book, 35)
    assert order(found) == [30, 20, 10]
    assert found.start == "resume"
    assert why(found) == {40: "tainted: onset at step 35: loss/level on rank 1"}


def test_the_step_of_the_onset_itself_is_too_late():
    found = chosen([[offer(10, M), offer(20, M), offer(30, M)]], book_of(10, 20, 30), 20)
    assert order(found) == [10]
    assert why(found) == {30: "at or after the onset at step 20", 20: "at or after the onset at step 20"}


def test_the_nearest_tier_first_and_then_farther_for_the_same_one():
    book = book_of(10, 20)
    ranks = [[offer(20, M, D), offer(10, M)], [offer(20, M, P, D), offer(10, D)]]
    found = chosen(ranks, book, 30)
    assert [(t.key.step, t.tiers) for t in found.targets] == [(20, (M, M)), (20, (D, P)), (20, (D, D)), (10, (M, D))]


def test_a_new_host_reads_a_peer_while_the_others_copy_from_memory():
    found = chosen([[offer(20, M, D)], [offer(20, M, D)], [offer(20, P, D)]], book_of(20), 30)
    assert found.targets[0].tiers == (M, M, P)
    assert str(found.targets[0]) == "step 20 (attempt 20) from memory on ranks 0, 1, peer on rank 2"
    assert str(found.targets[-1]) == "step 20 (attempt 20) from disk on all ranks"


def test_a_newer_one_from_disk_is_better_than_an_older_one_from_memory():
    found = chosen([[offer(20, D), offer(10, M)]], book_of(10, 20), 30)
    assert [t.tiers for t in found.targets] == [(D,), (M,)]


def test_one_that_some_rank_cannot_reach_is_refused_and_the_rank_named():
    book = book_of(10, 20, 30)
    ranks = [
        [offer(10, D), offer(20, D), offer(30, M)],
        [offer(10, D), offer(20, bad=D), offer(30, M)],
        [offer(10, D), offer(20, D)],
    ]
    book.unreadable(at(20), "disk", "rank-00001.pt: digest differs")
    found = chosen(ranks, book, 40)
    assert order(found) == [10]
    assert why(found) == {
        30: "rank 2 cannot reach it in any tier",
        20: "rank 1 cannot read it in any tier (refused: disk: rank-00001.pt: digest differs)",
    }
    assert found.explain().splitlines() == [
        "target: step 10 (attempt 10) from disk on all ranks",
        "not step 30 (attempt 30): rank 2 cannot reach it in any tier",
        "not step 20 (attempt 20): rank 1 cannot read it in any tier (refused: disk: rank-00001.pt: digest differs)",
    ]


def test_provisional_ones_come_after_all_good_ones():
    book = book_of(10, 20)
    book.saved(at(25))
    found = chosen([[offer(s, M) for s in (10, 20, 25)]], book, 27)
    assert order(found) == [20, 10, 25]


def test_trust_after_is_minded():
    """The onset is one of the two steps that had proved 20: it is provisional again, and 10 comes first."""
    book = book_of(10, 20)
    book.onset(22, "grad_norm/point")
    assert order(chosen([[offer(10, M), offer(20, M)]], book, 22)) == [10, 20]


def test_br30_quarantine_sends_the_run_to_the_next_older_one():
    book = book_of(10, 20)
    held = [[offer(10, M, D), offer(20, M, D)]] * 2
    for _ in range(2):
        assert order(chosen(held, book, 24))[0] == 20
        book.loaded(at(20))
        book.failed_after_load(Failure("compute", "loss/nonfinite", 23))
    found = chosen(held, book, 24)
    assert order(found) == [10]
    assert why(found)[20].startswith("quarantined: the same failure came back after it was loaded")


def test_a_course_given_up_comes_after_the_one_in_force():
    book = book_of(10, 20)
    book.loaded(at(10))
    assert order(chosen([[offer(10, D), offer(20, D)]], book, 30)) == [10, 20]


def test_different_checkpoints_under_one_name_are_refused():
    """A stale listing, or two node-local folders that went different ways."""
    book = book_of(10, 20)
    ranks = [[offer(10, D, digest=7), offer(20, D, digest=1)], [offer(10, M), offer(20, D, digest=2)]]
    found = chosen(ranks, book, 30)
    assert order(found) == [10]
    assert why(found)[20] == "ranks hold different checkpoints under this name: rank 0 against rank 1"


# -- starting -------------------------------------------------------------------------------------------------------------


def test_three_starts_told_apart():
    book = TrustBook()
    assert chosen([[], []], book, traces=False).start == "fresh"
    assert chosen([[offer(10, D)], [offer(10, D)]], book, traces=False).start == "resume"
    for ranks, traces in (([[], []], True), ([[offer(10, D)], []], False), ([[offer(10, bad=D)]], False)):
        found = chosen(ranks, book, traces=traces)
        assert found.start == "nothing usable"
        assert found.explain().startswith("no target: nothing usable")


def test_br25_one_rank_that_sees_traces_is_enough():
    book = TrustBook()
    rows = [encode([], book, None, traces=rank == 1) for rank in range(3)]
    assert select(np.stack(rows), book).start == "nothing usable"


def test_at_a_start_the_newest_comes_first_unless_something_speaks_against_it():
    book = book_of(10, 20)
    book.saved(at(30))
    held = [[offer(s, D) for s in (10, 20, 30)]]
    assert order(chosen(held, book)) == [30, 20, 10]
    book.onset(25, "found before it was killed")
    assert order(chosen(held, book)) == [20, 10]
    book.loaded(at(10))  # and had gone back before that
    book.saved(Key(12, 40))
    assert order(chosen([[*held[0], offer(Key(12, 40), D)]], book)) == [12, 10, 20]


def test_without_a_book_everything_is_as_good_as_the_rest():
    assert order(chosen([[offer(s, D) for s in (10, 20, 30)]], TrustBook())) == [30, 20, 10]


# -- the vector -----------------------------------------------------------------------------------------------------------


def test_more_than_the_vector_holds():
    """What could be used goes first: twenty newer ones behind the onset do not push it out."""
    book = book_of(5, 10, *range(20, 40), good=True)
    held = [offer(s, M) for s in (5, 10, *range(20, 40))]
    found = chosen([held, held[:2]], book, 15, capacity=4)
    assert order(found) == [10, 5]
    found = chosen([held, held], book, 100, capacity=4)
    assert order(found) == [39, 38, 37, 36]
    mixed = chosen([held, held[:2]], book, 100, capacity=4)
    assert mixed.start == "nothing usable"
    assert why(mixed)[10] == "rank 0 cannot reach it in any tier (rank 0 held more than could be listed)"


def test_what_this_rank_cannot_read_does_not_push_out_what_it_can():
    book = book_of(10, *range(20, 26))
    held = [offer(10, M), *(offer(s, bad=D) for s in range(20, 26))]
    assert order(chosen([held], book, 100, capacity=3)) == [10]


def test_ranks_that_ask_differently_are_stopped():
    book = book_of(10)
    rows = np.stack([encode([], book, onset, traces=True) for onset in (20, 21)])
    with pytest.raises(RankDisagreement, match="rank 1 looks for a snapshot before step 21, this rank 20"):
        select(rows, book, 20)


@pytest.mark.parametrize("spoil", [(0, 2.0), (0, np.nan), (3, CAPACITY + 1), (7, np.inf)])
def test_a_vector_that_nobody_encoded_is_refused(spoil: tuple[int, float]):
    row = encode([offer(10, D)], TrustBook(), None, traces=True)
    row[spoil[0]] = spoil[1]
    with pytest.raises(RankDisagreement, match="another format"):
        decode(row)
    with pytest.raises(RankDisagreement, match="another format"):
        decode(row[:-1])


def test_what_cannot_be_sent_exactly_is_refused():
    with pytest.raises(CheckpointError, match="exactly"):
        encode([offer(10, D, digest=2**53)], TrustBook(), None, traces=True)
    with pytest.raises(CheckpointError, match="twice"):
        encode([offer(10, D), offer(10, M)], TrustBook(), None, traces=True)


def _choose_together(rank: int, world: int, damaged: int) -> tuple[str, list[tuple[Key, tuple[Tier, ...]]]]:
    """As in a job: each rank knows its own, one gather, and every rank chooses by itself."""
    exchange = Exchange(torch.device("cpu"), 30.0)
    try:
        book = book_of(10, 20, 30)
        held = [offer(10, D, digest=2**48 - 1), offer(20, D) if rank != damaged else offer(20, bad=D), offer(30, M)]
        vector = encode(held, book, 35, traces=True)
        found = select(exchange.gather(torch.from_numpy(vector)), book, 35)
        return found.explain(), [(target.key, target.tiers) for target in found.targets]
    finally:
        exchange.close()


def test_all_ranks_of_a_job_choose_the_same():
    first, second = run_pooled(_choose_together, 2, 1)
    assert first == second
    assert first[1] == [(at(30), (M, M)), (at(10), (D, D))]


COPIES = st.dictionaries(st.sampled_from(Tier), st.sampled_from(Copy), max_size=3)


@st.composite
def rank_offers(draw: st.DrawFn, steps: tuple[int, ...] = tuple(range(0, 50, 5))) -> list[Offer]:
    some = draw(st.sets(st.sampled_from(steps), max_size=8))
    return [Offer(at(s), draw(COPIES), draw(st.sampled_from([0, 0, 1, 2]))) for s in some]


@settings(max_examples=100, deadline=None)
@given(rank_offers(), st.booleans(), st.integers(0, 60))
def test_encode_and_decode(offers: list[Offer], traces: bool, onset: int):
    row = encode(offers, TrustBook(), onset, traces=traces)
    assert row.shape == (width(),) and row.dtype == np.float64
    found = {o.key: o for o in decode(row)}
    assert found.keys() == {o.key for o in offers}
    for o in offers:
        assert found[o.key].digest == o.digest and found[o.key].reachable == o.reachable
        assert {t: c for t, c in found[o.key].copies.items() if c} == {t: c for t, c in o.copies.items() if c}


@settings(max_examples=120, deadline=None)
@given(st.lists(rank_offers(), min_size=1, max_size=4), st.data(), st.one_of(st.none(), st.integers(0, 60)))
def test_invariants(ranks: list[list[Offer]], data: st.DataObject, onset: int | None):
    book = TrustBook(after=2)
    for step in range(0, 50, 5):
        book.saved(at(step))
        if data.draw(st.booleans()):
            book.clean_step(step + 1)
            book.clean_step(step + 2)
    if data.draw(st.booleans()):
        book.onset(data.draw(st.integers(0, 60)), "odd")
    found = chosen(ranks, book, onset)
    by_rank = [{o.key: o for o in offers} for offers in ranks]
    for target in found.targets:
        assert book.level(target.key) >= Trust.PROVISIONAL
        assert onset is None or target.key.step < onset
        for rank, tier in enumerate(target.tiers):
            assert by_rank[rank][target.key].copies[tier] in (Copy.THERE, Copy.VERIFIED)
    # Every snapshot is either a target or refused for a reason, and what every rank could use is never refused.
    targets = {t.key for t in found.targets}
    everywhere = set.intersection(*(set(r) for r in by_rank))
    assert targets | {key for key, _ in found.refused} == set.union(*(set(r) for r in by_rank))
    assert all(reason for _, reason in found.refused)
    for key in everywhere - targets:
        assert (
            book.level(key) < Trust.PROVISIONAL
            or (onset is not None and key.step >= onset)
            or not all(r[key].reachable for r in by_rank)
            or len({r[key].digest for r in by_rank} - {0}) > 1
        )
    # The first is the newest of the most trusted; each snapshot's own targets stand together, nearest first.
    keys = [t.key for t in found.targets]
    assert [k for i, k in enumerate(keys) if i == 0 or keys[i - 1] != k] == list(dict.fromkeys(keys))
    if onset is not None:
        levels = [book.level(k) for k in dict.fromkeys(keys)]
        assert levels == sorted(levels, reverse=True)
    for key in targets:
        sums = [sum(t.tiers) for t in found.targets if t.key == key]
        assert sums == sorted(sums) and len(sums) == len(set(sums))
    # The order in which ranks list theirs is no matter.
    again = chosen([list(reversed(offers)) for offers in ranks], book, onset)
    assert again == found
