"""checkpoint/trust.py: the table of levels, event by event, and what must hold whatever the order of events (S15, BR-30)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from resilient.checkpoint.trust import _NEXT, Failure, Key, Trust, TrustBook

NAN = Failure("compute", "loss/nonfinite", 13)


def at(step: int) -> Key:
    return Key(step, step)


def book_with(*steps: int, after: int = 2) -> TrustBook:
    book = TrustBook(after=after)
    for step in steps:
        book.saved(at(step))
    return book


def clean(book: TrustBook, *steps: int) -> None:
    for step in steps:
        book.clean_step(step)


def good_at(step: int) -> TrustBook:
    book = book_with(step)
    clean(book, step + 1, step + 2)
    assert book.level(at(step)) is Trust.GOOD
    return book


def quarantined_at(step: int) -> TrustBook:
    book = good_at(step)
    for onset in (13, 15):
        book.loaded(at(step))
        book.failed_after_load(Failure("compute", "loss/nonfinite", onset))
    assert book.level(at(step)) is Trust.QUARANTINED
    return book


# -- every line of the table, and every level's silence about the rest ----------------------------------------------


def test_proved_after_w_clean_steps_that_follow_it():
    book = book_with(10, after=3)
    clean(book, 10)  # its own step does not follow it
    clean(book, 11, 12)
    assert book.level(at(10)) is Trust.PROVISIONAL
    clean(book, 13)
    assert book.level(at(10)) is Trust.GOOD
    assert book.reasons(at(10)) == ()


def test_doubted_when_the_onset_is_among_the_steps_that_proved_it():
    """Damage of step 10 shows in the loss of step 11 or 12: those two prove nothing if the trouble began there."""
    book = good_at(10)
    book.onset(13, "loss/level")
    assert book.level(at(10)) is Trust.GOOD
    book.onset(12, "loss/level")
    assert book.level(at(10)) is Trust.PROVISIONAL
    assert book.reasons(at(10)) == ("an onset at step 12 came within 2 steps: loss/level",)
    clean(book, 13)
    assert book.level(at(10)) is Trust.PROVISIONAL
    clean(book, 14)
    assert book.level(at(10)) is Trust.GOOD


def test_an_odd_step_breaks_the_row_of_clean_ones():
    book = book_with(10)
    clean(book, 11)
    book.onset(12, "grad_norm/point")
    clean(book, 12)  # skipped, then applied with the next window
    assert book.level(at(10)) is Trust.PROVISIONAL
    clean(book, 13)
    assert book.level(at(10)) is Trust.GOOD


@pytest.mark.parametrize("proved", [False, True])
def test_reached_by_an_onset_at_or_before_its_step(proved: bool):
    book = good_at(10) if proved else book_with(10)
    book.onset(11, "later")
    assert book.level(at(10)) is Trust.PROVISIONAL
    book.onset(10, "loss/drift")
    assert book.level(at(10)) is Trust.TAINTED
    assert book.reasons(at(10))[-1] == "onset at step 10: loss/drift"
    clean(book, 11, 12, 13, 14)
    book.saved(at(10))  # its copy in another tier
    assert book.level(at(10)) is Trust.TAINTED


def test_br30_repeated_twice_after_loading_it():
    book = good_at(10)
    book.onset(13, "nan")  # the failure for which it is loaded at all
    book.loaded(at(10))
    assert book.failed_after_load(NAN) is None
    book.loaded(at(10))
    assert book.failed_after_load(Failure("compute", "loss/nonfinite", 15)) == at(10)
    assert book.level(at(10)) is Trust.QUARANTINED
    assert "came back after it was loaded: compute (loss/nonfinite) at step 15" in book.reasons(at(10))[-1]


@pytest.mark.parametrize("start", [book_with, good_at])
def test_repeated_from_every_level(start: Any):
    for taint in (False, True):
        book = start(10)
        if taint:
            book.onset(9, "found late")
        for _ in range(2):
            book.loaded(at(10))
            book.failed_after_load(NAN)
        assert book.level(at(10)) is Trust.QUARANTINED


@pytest.mark.parametrize(
    "other",
    [Failure("data", NAN.what, 13), Failure("compute", "grad_norm/point", 13), Failure("compute", NAN.what, 24)],
    ids=["cause", "what", "onset"],
)
def test_another_failure_is_not_the_same(other: Failure):
    book = good_at(10)
    for failure in (NAN, other):
        book.loaded(at(10))
        assert book.failed_after_load(failure) is None
    assert book.level(at(10)) is Trust.GOOD
    assert book.failed_after_load(NAN) == at(10)  # the first of them again


def test_nothing_leads_out_of_quarantine():
    book = quarantined_at(10)
    book.onset(5, "x")
    book.saved(at(10))
    book.loaded(at(10))
    clean(book, 11, 12, 13)
    book.readable(at(10), "disk")
    assert book.level(at(10)) is Trust.QUARANTINED
    assert not any(before is Trust.QUARANTINED for before, _ in _NEXT)
    assert all(after is not Trust.GOOD for (before, _), after in _NEXT.items() if before is not Trust.PROVISIONAL)


# -- courses of training ------------------------------------------------------------------------------------------------


def test_clean_steps_count_for_the_course_they_belong_to():
    book = book_with(10, 20)
    clean(book, 21)  # 10 is good, 20 has one clean step
    assert (book.level(at(10)), book.level(at(20))) == (Trust.PROVISIONAL, Trust.PROVISIONAL)
    clean(book, 22)
    book.saved(at(30))
    book.loaded(at(20))  # 30 is given up
    assert book.in_force(at(10)) and book.in_force(at(20)) and not book.in_force(at(30))
    book.saved(Key(25, 40))
    clean(book, 26, 27, 31, 32)
    assert book.level(Key(25, 40)) is Trust.GOOD
    assert book.level(at(30)) is Trust.PROVISIONAL
    assert book.in_force(Key(25, 40)) and not book.in_force(at(30))


def test_going_back_to_a_course_given_up_takes_it_up_again():
    book = book_with(10, 15)
    book.loaded(at(10))
    book.saved(Key(12, 30))
    book.loaded(at(15))
    clean(book, 16, 17)
    assert book.level(at(15)) is Trust.GOOD
    assert book.level(Key(12, 30)) is Trust.PROVISIONAL  # 12 < 15, and yet not on the way to it
    assert book.level(at(10)) is Trust.GOOD  # it is on the way to both


def test_clean_steps_before_the_load_do_not_count_for_what_was_loaded():
    book = book_with(10)
    clean(book, 11)
    book.loaded(at(10))
    clean(book, 11)
    assert book.level(at(10)) is Trust.PROVISIONAL
    clean(book, 12)
    assert book.level(at(10)) is Trust.GOOD


def test_a_failure_long_after_the_load_is_not_held_against_it():
    """Something newer had proved good before the failure began."""
    book = good_at(10)
    book.loaded(at(10))
    book.saved(Key(20, 40))
    clean(book, 21, 22)
    late = Failure("compute", "loss/nonfinite", 23)
    assert [book.failed_after_load(late) for _ in range(3)] == [None] * 3
    assert book.level(at(10)) is Trust.GOOD
    early = Failure("compute", "loss/nonfinite", 22)  # one of the steps that had proved it
    assert [book.failed_after_load(early) for _ in range(2)] == [None, at(10)]


def test_a_failure_without_a_load_counts_against_nothing():
    book = good_at(10)
    assert book.failed_after_load(NAN) is None
    assert book.failed_after_load(NAN) is None
    assert book.level(at(10)) is Trust.GOOD


def test_deleted_is_forgotten_and_the_course_stays_whole():
    book = book_with(10, 20, 30)
    book.deleted(at(20))
    clean(book, 31, 32)
    assert book.level(at(10)) is Trust.GOOD and book.known() == (at(30), at(10))
    book.deleted(at(30))
    assert book.head == at(10)
    book.deleted(at(10))
    book.deleted(at(10))
    assert book.head is None and book.known() == ()


def test_an_unknown_one_is_provisional_until_it_is_loaded_and_proves_good():
    """The book was lost, or the checkpoint is older than books."""
    book = TrustBook()
    assert book.level(at(40)) is Trust.PROVISIONAL and book.in_force(at(40)) and not book.refused(at(40))
    book.loaded(at(40))
    clean(book, 41, 42)
    assert book.level(at(40)) is Trust.GOOD


def test_an_unreadable_copy_says_nothing_about_the_state():
    book = good_at(10)
    book.unreadable(at(10), "memory", "digest differs on rank 3")
    assert book.level(at(10)) is Trust.GOOD and book.refused(at(10)) == {"memory": "digest differs on rank 3"}
    book.unreadable(at(10), "disk", "rank-00003.pt is missing")
    book.readable(at(10), "disk")
    assert list(book.refused(at(10))) == ["memory"]


# -- kept ----------------------------------------------------------------------------------------------------------------


def test_the_book_survives_as_json():
    book = quarantined_at(10)
    book.saved(Key(20, 40))
    book.unreadable(Key(20, 40), "peer", "gone")
    again = TrustBook()
    again.load_state_dict(json.loads(json.dumps(book.state_dict())))
    assert again.state_dict() == book.state_dict()
    assert (again.level(at(10)), again.refused(Key(20, 40))) == (Trust.QUARANTINED, {"peer": "gone"})


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"entries": None},
        {"entries": [{"key": [1, 1]}]},
        {"head": [7, 7]},
        {"head": "x"},
        {"loaded": [1]},
        {"entries": [{"key": [1, -1]}]},
    ],
)
def test_a_damaged_book_is_refused_and_changes_nothing(change: dict[str, Any]):
    book = good_at(10)
    before = book.state_dict()
    with pytest.raises(ValueError):
        book.load_state_dict({**before, **change})
    assert book.state_dict() == before


def test_a_book_whose_courses_run_in_a_circle_is_refused():
    state = book_with(10, 20).state_dict()
    state["entries"][0]["parent"] = [20, 20]
    with pytest.raises(ValueError, match="cannot come from"):
        TrustBook().load_state_dict(state)


def test_what_a_book_keeps_is_bounded():
    book = good_at(10)
    for i in range(200):
        book.loaded(at(10))
        book.failed_after_load(Failure("data", f"kind {i}", 11))
        book.onset(12, "x" * 5000)
        clean(book, 13, 14)
    assert len(json.dumps(book.state_dict())) < 8000


# -- whatever the order ---------------------------------------------------------------------------------------------------

LEVELS = st.sampled_from([Failure("compute", "a", 1), Failure("compute", "a", 30), Failure("data", "b", 1)])


class Books(RuleBasedStateMachine):
    """A run with saves, onsets, rollbacks and deletions. A second book is handed over as JSON after every event."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.copy = TrustBook(after=2, stretch=5), TrustBook(after=2, stretch=5)
        self.step = self.attempt = 0
        self.onsets: dict[Key, list[int]] = {}  # found since it was saved
        self.evidence: dict[Key, list[int]] = {}  # clean steps since it was saved, loaded, or an onset came
        self.quarantined: set[Key] = set()

    def tell(self, event: str, *arguments: Any) -> Any:
        found = getattr(self.book, event)(*arguments)
        assert getattr(self.copy, event)(*arguments) == found
        return found

    @rule(clean=st.booleans(), back=st.integers(0, 6))
    def a_step(self, clean: bool, back: int) -> None:
        self.step, self.attempt = self.step + 1, self.attempt + 1
        if clean:
            self.tell("clean_step", self.step)
            for key, steps in self.evidence.items():
                if key.step < self.step and self.book.in_force(key):
                    steps.append(self.step)
        else:
            onset = max(self.step - back, 0)
            self.tell("onset", onset, "odd")
            for key in self.onsets:
                self.onsets[key].append(onset)
                if self.evidence[key][1:2] >= [onset] or len(self.evidence[key]) < 2:
                    self.evidence[key] = []

    @rule()
    def save(self) -> None:
        key = Key(self.step, self.attempt)
        self.tell("saved", key)
        self.onsets.setdefault(key, [])
        self.evidence.setdefault(key, [])

    @precondition(lambda self: self.onsets)
    @rule(data=st.data(), failure=LEVELS, fails=st.booleans())
    def go_back(self, data: st.DataObject, failure: Failure, fails: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.onsets)))
        if fails:
            before = self.book.level(key)
            found = self.tell("failed_after_load", failure)
            if found is not None:
                self.quarantined.add(found)
                assert found != key or before is not Trust.QUARANTINED
        proved = self.book.level(key) is Trust.GOOD
        self.tell("loaded", key)
        self.step = key.step
        if not proved:
            self.evidence[key] = []

    @precondition(lambda self: self.onsets)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.onsets)))
        self.tell("deleted", key)
        for known in (self.onsets, self.evidence):
            known.pop(key)
        self.quarantined.discard(key)

    @invariant()
    def what_an_onset_has_reached_is_never_trusted_again(self) -> None:
        for key, onsets in self.onsets.items():
            if any(onset <= key.step for onset in onsets):
                assert self.book.level(key) <= Trust.TAINTED

    @invariant()
    def nothing_comes_out_of_quarantine(self) -> None:
        assert {key for key in self.onsets if self.book.level(key) is Trust.QUARANTINED} == self.quarantined

    @invariant()
    def good_means_w_clean_steps_and_no_onset_among_them(self) -> None:
        for key, steps in self.evidence.items():
            proved = len(steps) >= 2 and key not in self.quarantined
            reached = any(onset <= key.step for onset in self.onsets[key])
            assert (self.book.level(key) is Trust.GOOD) == (proved and not reached), (key, steps)

    @invariant()
    def a_book_that_was_written_and_read_is_as_good(self) -> None:
        assert self.copy.state_dict() == self.book.state_dict()
        self.copy = TrustBook(after=2, stretch=5)
        self.copy.load_state_dict(json.loads(json.dumps(self.book.state_dict())))

    @invariant()
    def onsets_and_unreadable_copies_commute(self) -> None:
        books = []
        for order in ((3, 1), (1, 3)):
            book = TrustBook(after=2, stretch=5)
            book.load_state_dict(self.book.state_dict())
            for back in order:
                book.onset(max(self.step - back, 0), "odd")
                book.unreadable(at(10**6), ("memory", "disk")[back // 2], str(back))
            books.append(book)
        first, second = books
        assert [*map(first.level, first.known())] == [*map(second.level, second.known())]
        assert first.refused(at(10**6)) == second.refused(at(10**6))


Books.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestBooks = Books.TestCase
