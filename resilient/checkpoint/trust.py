"""How far a snapshot may be trusted, decided from what happened after it was taken. Pure: events in, levels out.

    provisional --proved--> good          W clean steps followed it
    good --doubted--> provisional         an onset was found among those W steps: they prove nothing any more
    provisional, good --reached--> tainted   an onset at or before its own step was found: the damage is inside
    any --repeated--> quarantined         it was loaded, and the same failure came back, twice (BR-30)

A level belongs to the state that was captured, (step, attempt), wherever copies of it lie; whether one copy can be read
is kept beside it, by tier. Every rank feeds its book the same events from the same table, so all books are equal; rank 0
writes the state to <run>/checkpoints/trust.json. It is outside what a rollback rewinds: going back must not forget why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

TRUST = "trust.json"
TRUST_LIMIT = 4 << 20  # bytes
_FORMAT = 1
_REASONS = 4  # texts kept per snapshot; each is cut to _LONGEST characters
_LONGEST = 300
_FAILURES = 16  # kept per snapshot


class Trust(IntEnum):
    """Levels, worst first."""

    QUARANTINED = 0
    TAINTED = 1
    PROVISIONAL = 2
    GOOD = 3

    @property
    def word(self) -> str:
        return self.name.lower()


class Key(NamedTuple):
    """Which state: a step may be reached twice (after a rollback), an attempt may not."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt})"


_NEXT: Mapping[tuple[Trust, str], Trust] = {
    (Trust.PROVISIONAL, "proved"): Trust.GOOD,
    (Trust.GOOD, "doubted"): Trust.PROVISIONAL,
    (Trust.PROVISIONAL, "reached"): Trust.TAINTED,
    (Trust.GOOD, "reached"): Trust.TAINTED,
    (Trust.PROVISIONAL, "repeated"): Trust.QUARANTINED,
    (Trust.GOOD, "repeated"): Trust.QUARANTINED,
    (Trust.TAINTED, "repeated"): Trust.QUARANTINED,
}
"""All changes of level there are; whatever is not listed changes nothing. No line leads out of quarantine."""


@dataclass(frozen=True)
class Failure:
    """What went wrong after a load, coarse enough to be recognised when it comes back.

    cause: of the verdict. what: signal, place or rank that shows it, without figures. onset: its first step."""

    cause: str
    what: str
    onset: int

    def like(self, other: Failure, stretch: int) -> bool:
        return (
            self.cause == other.cause and self.what == other.what and abs(self.onset - other.onset) <= max(stretch, 0)
        )


@dataclass
class _Entry:
    level: Trust = Trust.PROVISIONAL
    clean: int = 0  # clean steps in a row that followed it, up to W
    proved_at: int = -1  # the last of the W; -1: not yet
    parent: Key | None = None  # the snapshot before it in the same course of training
    reasons: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # tier -> why its copy cannot be read


class TrustBook:
    """Levels of all snapshots that some tier may hold.

    after: clean steps after a snapshot that make it good (W, the configuration's trust_after). A step's damage may show only
        in the next loss: with 0 every snapshot counts as good until an onset is found. stretch: two failures whose onsets are at most so many steps apart may be the same.

    `head` is the snapshot from which training goes on: the newest one saved, or the one loaded since.
    """

    def __init__(self, after: int = 2, stretch: int = 10) -> None:
        if after < 0:
            raise ValueError(f"clean steps after a snapshot cannot be {after}")
        self.after, self.stretch = after, stretch
        self.head: Key | None = None
        self._loaded: Key | None = None
        self._entries: dict[Key, _Entry] = {}

    # -- events -------------------------------------------------------------------------------------------------

    def saved(self, key: Key) -> None:
        """It was captured, for some tier. Again, for another tier: nothing new, and never a better level. To be told when the
        state is captured, not when a copy is committed: by then training may be on another course."""
        key = Key(*key)
        if key not in self._entries:
            parent = self.head if self.head is None or self.head.attempt < key.attempt else None
            self._entries[key] = _Entry(Trust.PROVISIONAL if self.after > 0 else Trust.GOOD, parent=parent)
            self.head = key

    def clean_step(self, step: int) -> None:
        """Optimizer step `step` was applied and nothing was found in it. Counts for every snapshot that training has
        come through, and for no snapshot of a course that was given up."""
        for key in self._line():
            entry = self._entries[key]
            if key.step >= step or entry.level is not Trust.PROVISIONAL:
                continue
            entry.clean += 1
            if entry.clean >= self.after:
                entry.proved_at = step
                self._change(entry, "proved", "")

    def onset(self, step: int, reason: str) -> None:
        """Something was found to have been off since `step`. Taints what was captured at or after it, of whatever course
        (too careful costs steps, too trusting the run), and takes back what later clean steps had proved."""
        for key, entry in self._entries.items():
            if key.step >= step:
                self._change(entry, "reached", f"onset at step {step}: {reason}")
            elif entry.proved_at >= step or entry.level is Trust.PROVISIONAL:
                self._change(entry, "doubted", f"an onset at step {step} came within {self.after} steps: {reason}")
                entry.clean, entry.proved_at = 0, -1

    def loaded(self, key: Key) -> None:
        """Training goes on from it, on all ranks. What was captured after it belongs to a course that was given up."""
        key = Key(*key)
        self._entries.setdefault(key, _Entry())
        self.head = self._loaded = key
        entry = self._entries[key]
        if entry.level is Trust.PROVISIONAL:
            entry.clean = 0  # the steps that follow the load are the ones that count

    def failed_after_load(self, failure: Failure) -> Key | None:
        """A failure that makes the run go back or end. It counts against the snapshot loaded last, unless a newer one had
        proved good before the failure began. Returns the key if that one is in quarantine now, for the journal."""
        if self._loaded is None or self._loaded not in self._entries or self._proved_since(failure.onset):
            return None
        key, entry = self._loaded, self._entries[self._loaded]
        again = any(failure.like(other, self.stretch) for other in entry.failures)
        entry.failures = [*entry.failures, failure][-_FAILURES:]
        if not again or entry.level is Trust.QUARANTINED:
            return None
        text = (
            f"the same failure came back after it was loaded: {failure.cause} ({failure.what}) at step {failure.onset}"
        )
        self._change(entry, "repeated", text)
        return key

    def deleted(self, key: Key) -> None:
        """No tier holds it any more."""
        key = Key(*key)
        gone = self._entries.pop(key, None)
        if gone is None:
            return
        for entry in self._entries.values():
            if entry.parent == key:
                entry.parent = gone.parent
        if self.head == key:
            self.head = gone.parent
        if self._loaded == key:
            self._loaded = None

    def unreadable(self, key: Key, tier: str, reason: str) -> None:
        """The copy in `tier` was refused by some rank: missing, damaged, or the restored state was not as captured."""
        self._entries.setdefault(Key(*key), _Entry()).refused[tier] = reason[:_LONGEST]

    def readable(self, key: Key, tier: str) -> None:
        """The copy in `tier` was written anew."""
        if Key(*key) in self._entries:
            self._entries[Key(*key)].refused.pop(tier, None)

    def _proved_since(self, step: int) -> bool:
        """Whether something captured after the last load was proved good by steps before `step`."""
        assert self._loaded is not None
        newer = (self._entries[key] for key in self._line() if key.attempt > self._loaded.attempt)
        return any(0 <= entry.proved_at < step for entry in newer)

    def _change(self, entry: _Entry, event: str, reason: str) -> None:
        found = _NEXT.get((entry.level, event))
        if found is not None:
            entry.level = found
            if reason:
                entry.reasons = [*entry.reasons, reason[:_LONGEST]][-_REASONS:]

    # -- questions ----------------------------------------------------------------------------------------------

    def level(self, key: Key) -> Trust:
        """Provisional for one the book has not heard of: nothing speaks for it and nothing against it."""
        entry = self._entries.get(Key(*key))
        return entry.level if entry is not None else Trust.PROVISIONAL

    def reasons(self, key: Key) -> tuple[str, ...]:
        """Why it is not good (any more), oldest first."""
        entry = self._entries.get(Key(*key))
        return tuple(entry.reasons) if entry is not None else ()

    def refused(self, key: Key) -> dict[str, str]:
        """Tiers whose copy cannot be read, and why."""
        entry = self._entries.get(Key(*key))
        return dict(entry.refused) if entry is not None else {}

    def in_force(self, key: Key) -> bool:
        """Whether training has come through it: not a snapshot of a course given up. True for one the book does not know."""
        key = Key(*key)
        return key not in self._entries or key in set(self._line())

    def known(self) -> tuple[Key, ...]:
        """All known ones, the latest attempt first."""
        return tuple(sorted(self._entries, key=lambda key: key.attempt, reverse=True))

    def _line(self) -> Iterator[Key]:
        """The head and the snapshots before it in its course. Attempts fall along the way, so it ends."""
        key = self.head
        while key is not None and key in self._entries:
            yield key
            key = self._entries[key].parent

    # -- kept outside the rollback --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        entries = [
            {
                **asdict(entry),
                "key": list(key),
                "level": entry.level.word,
                "parent": None if entry.parent is None else list(entry.parent),
            }
            for key, entry in sorted(self._entries.items())
        ]
        return {
            "format": _FORMAT,
            "head": None if self.head is None else list(self.head),
            "loaded": None if self._loaded is None else list(self._loaded),
            "entries": entries,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError naming what is wrong; the book is then unchanged."""
        try:
            if state["format"] != _FORMAT:
                raise ValueError(f"format {state['format']!r}, this version reads {_FORMAT}")
            entries = {_key(found["key"]): _entry(found) for found in state["entries"]}
            head, loaded = (None if state[name] is None else _key(state[name]) for name in ("head", "loaded"))
            for key, entry in entries.items():
                if entry.parent is not None and entry.parent.attempt >= key.attempt:
                    raise ValueError(f"{key} cannot come from {entry.parent}")
            if head is not None and head not in entries:
                raise ValueError(f"{head} is the head and no entry")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a trust book ({type(error).__name__}: {error})") from error
        self._entries, self.head, self._loaded = entries, head, loaded


def _key(value: Any) -> Key:
    step, attempt = value
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in (step, attempt)):
        raise ValueError(f"{value!r} is not a step and an attempt")
    return Key(step, attempt)


def _entry(found: Mapping[str, Any]) -> _Entry:
    return _Entry(
        level=Trust[str(found["level"]).upper()],
        clean=int(found["clean"]),
        proved_at=int(found["proved_at"]),
        parent=None if found["parent"] is None else _key(found["parent"]),
        reasons=[str(text)[:_LONGEST] for text in found["reasons"]][-_REASONS:],
        failures=[Failure(str(f["cause"]), str(f["what"]), int(f["onset"])) for f in found["failures"]][-_FAILURES:],
        refused={str(tier): str(why)[:_LONGEST] for tier, why in found["refused"].items()},
    )
