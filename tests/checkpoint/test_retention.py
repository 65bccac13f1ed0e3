"""checkpoint/retention.py: what may go, and what never may (S15, BR-35)."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.checkpoint.retention import Held, Retention, best_of, expendable, next_good
from resilient.checkpoint.trust import Key, Trust, TrustBook

GOOD, YOUNG, TAINTED, QUARANTINED = Trust.GOOD, Trust.PROVISIONAL, Trust.TAINTED, Trust.QUARANTINED


def held(step: int, trust: Trust = GOOD, **changes: object) -> Held:
    return Held(f"s{step}", step, trust, **changes)  # type: ignore[arg-type]


def goods(*steps: int) -> list[Held]:
    return [held(step) for step in steps]


def gone(items: list[Held], *orphans: str, at_risk: bool = False, **rules: object) -> list[str]:
    return expendable(items, orphans, Retention(**rules), at_risk=at_risk)  # type: ignore[arg-type]


def test_the_last_n_good_ones_stay():
    assert gone(goods(50, 40, 30, 20, 10), last=3) == ["s20", "s10"]
    assert gone(goods(50, 40), last=0) == ["s40"]  # never the last good one


def test_s15_at_least_two_good_ones_when_risk_is_high():
    assert gone(goods(50, 40, 30), last=1) == ["s40", "s30"]
    assert gone(goods(50, 40, 30), last=1, at_risk=True) == ["s30"]
    with_young = [held(50, YOUNG), held(40, YOUNG), held(30), held(20, YOUNG, in_force=False)]
    assert gone(with_young, last=1, young=0) == ["s50", "s20"]  # s40 is the next to become good
    assert gone(with_young, last=1, young=0, at_risk=True) == ["s20"]  # one good one is filled up


def test_every_kth_step_stays_if_it_is_good():
    items = [*goods(50, 40, 30, 20), held(10, TAINTED)]
    assert gone(items, last=1, every=20) == ["s30"]
    assert gone([held(60), *items], last=1, every=20) == ["s50", "s30"]


def test_br35_the_best_by_evaluation_stays_and_nan_is_worst():
    items = [
        held(50, loss=3.0),
        held(40, loss=math.nan),
        held(30, loss=1.0, sound=False),
        held(20, loss=2.0),
        held(15, TAINTED, loss=0.5),
        held(10, loss=2.5),
    ]
    assert gone(items, last=1) == ["s40", "s15", "s10"]  # s30 is broken, for a person to look at
    assert gone(items, last=1, best=False) == ["s40", "s20", "s15", "s10"]


def test_pinned_ones_stay_whatever_they_are():
    items = [held(50), held(40), held(30, TAINTED), held(20, QUARANTINED, pinned=True), held(10, pinned=True)]
    assert gone(items, last=1) == ["s40"]


def test_one_broken_thing_stays_for_a_person_to_look_at():
    items = [held(50), held(40, QUARANTINED), held(30, sound=False)]
    assert gone(items, "o2", "o1") == ["s30", "o2", "o1"]
    assert gone([held(50)], "o2", "o1") == ["o1"]


def test_nothing_is_deleted_while_nothing_is_usable():
    assert gone([held(50, TAINTED), held(40, sound=False), held(30, QUARANTINED)], "o2", "o1", last=1) == []


def test_without_any_judgement_the_newest_stay():
    """policy=off: nobody counts clean steps, and the disk must not fill up all the same."""
    assert gone([held(s, YOUNG) for s in (60, 50, 40, 30, 20)], last=3) == ["s30"]  # s20 is the next to become good
    assert gone([held(s, YOUNG) for s in (60, 50, 40, 30, 20)], last=3, young=0) == ["s30"]


def test_a_course_given_up_does_not_push_out_the_one_in_force():
    """Gone back from 25 to 10: the newest good ones are of no use any more, s10 is what training goes on from."""
    items = [held(25, in_force=False), held(20, in_force=False), held(10)]
    assert gone(items, last=1) == ["s25", "s20"]
    assert gone(items, last=2) == ["s20"]
    assert gone([held(12, YOUNG), *items], last=1) == ["s25", "s20"]


def test_the_next_to_become_good():
    assert next_good([held(30, YOUNG), held(20, YOUNG), held(10)]) == ["s20"]
    assert next_good([held(30), held(20, YOUNG)]) == []
    assert next_good([held(30, YOUNG, in_force=False), held(25, in_force=False), held(20, YOUNG), held(10)]) == ["s20"]
    assert next_good([held(30, YOUNG, sound=False), held(20, TAINTED)]) == []


def test_best_of():
    assert best_of({"a": math.nan, "b": 2.0, "c": 1.5, "d": None}) == "c"
    assert best_of({"a": math.nan, "b": math.inf, "d": None}) is None
    assert best_of({}) is None


# -- memory -------------------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> list[Held]:
    steps = sorted(draw(st.sets(st.integers(0, 60), max_size=12)), reverse=True)
    return [
        Held(
            f"s{step}",
            step,
            draw(st.sampled_from(Trust)),
            sound=draw(st.integers(0, 4)) > 0,
            in_force=draw(st.booleans()),
            loss=draw(st.sampled_from([None, math.nan, 1.0, 2.0, 3.0])),
            pinned=draw(st.integers(0, 9)) == 0,
        )
        for step in steps
    ]


RULES = st.builds(
    Retention, last=st.integers(0, 4), every=st.sampled_from([0, 5, 7]), best=st.booleans(), young=st.integers(0, 3)
)


@settings(max_examples=300, deadline=None)
@given(worlds(), st.lists(st.sampled_from(["o1", "o2", "o3"]), unique=True), RULES, st.booleans())
def test_invariants_on_disk(items: list[Held], orphans: list[str], rules: Retention, at_risk: bool):
    deleted = set(expendable(items, orphans, rules, at_risk=at_risk))
    left = [h for h in items if h.name not in deleted]
    good, usable = [h for h in items if h.good], [h for h in items if not h.broken]
    least = max(rules.last, 2 if at_risk else 1)
    assert deleted <= {h.name for h in items} | set(orphans)
    assert sum(h.good for h in left) >= min(len(good), least)
    assert sum(not h.broken for h in left) >= min(len(usable), least)
    assert not any(h.pinned for h in items if h.name in deleted)
    assert set(next_good(items)) <= {h.name for h in left}
    if any(h.in_force for h in good):
        assert any(h.good and h.in_force for h in left)
    if usable:
        known = {h.name: h.loss for h in usable}
        assert not rules.best or best_of(known) not in deleted
        broken_left = [h for h in left if h.broken and not h.pinned] + [o for o in orphans if o not in deleted]
        assert len(broken_left) <= 1 or any(h.broken and h.pinned for h in left)
    else:
        assert not deleted
    # Doing it again finds nothing more, so a deletion that failed half-way is finished by the next one.
    assert not expendable(left, [o for o in orphans if o not in deleted], rules, at_risk=at_risk)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5))
def test_a_calm_run_never_starves_whatever_comes_first(every: int, after: int):
    """Saved more often than trust grows, with the smallest retention: there is always a good one, never older than trust
    needs."""
    book, disk = TrustBook(after=after), list[int]()
    for step in range(1, 80):
        book.clean_step(step)
        if step % every == 0:
            book.saved(Key(step, step))
            disk.append(step)
            held = [Held(str(s), s, book.level(Key(s, s)), in_force=book.in_force(Key(s, s))) for s in reversed(disk)]
            names = expendable(held, (), Retention(last=1, young=0))
            disk = [s for s in disk if str(s) not in names]
        newest = max((s for s in disk if book.level(Key(s, s)) is GOOD), default=None)
        assert len(disk) <= 3
        if step > every + after:
            assert newest is not None and step - newest <= 2 * (after + every), (step, disk)
