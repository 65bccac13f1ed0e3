"""Where the states lie that this run can go back to or start from, and how far each may be trusted.

Three tiers, nearest first: the ring in this process's memory, copies in the hosts' memory that outlive it (peer), the file
system. What is captured, committed, proved or doubted is booked here, in the same order on every rank; which state is
loaded is chosen by all ranks alike from what all of them hold (checkpoint/selection.py), and what cannot be loaded exactly on
every rank is followed by the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from resilient.checkpoint.filesystem import FilesystemStore
from resilient.checkpoint.loading import Offer as DiskOffer
from resilient.checkpoint.loading import nothing_usable
from resilient.checkpoint.manifest import Health, Manifest
from resilient.checkpoint.peer import PeerStore
from resilient.checkpoint.ring import MemoryRing
from resilient.checkpoint.selection import Copy, Offer, Selection, Target, Tier, encode, select
from resilient.checkpoint.snapshot import Snapshot
from resilient.checkpoint.trust import TRUST, TRUST_LIMIT, Failure, Key, Trust, TrustBook
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.other_world import BoundToItsWorld
from resilient.errors import CheckpointError

_RISK = "C"  # stability letter from which on more is kept (S15)
_KNOWN = 256  # checkpoints on disk that the book keeps in mind; older ones count as provisional


class Refit(Protocol):
    """A checkpoint of another world size as this rank's snapshot. Raises CheckpointError for a damaged one, BoundToItsWorld
    for one that can be had with the ranks that saved it only."""

    def __call__(self, folder: str, manifest: Manifest) -> tuple[Snapshot, list[str]]: ...


@dataclass(frozen=True)
class Candidate:
    """A state to go on from, on this rank. outer, health: as saved with it, None where nobody saved them. changes: what in
    it is not as it was saved, for the journal (another world size)."""

    key: Key
    snapshot: Snapshot
    target: Target
    outer: Mapping[str, Any] | None = None
    health: Health | None = None
    changes: tuple[str, ...] = ()


class Tiers:
    """One per coordinator. Everything but `count` is called on all ranks at the same point; what says so is collective."""

    def __init__(
        self,
        exchange: Exchange,
        ring: MemoryRing,
        *,
        store: FilesystemStore | None,
        peer: PeerStore | None,
        book: TrustBook,
        tell: Callable[[str, Mapping[str, Any]], None],
        level: Callable[[], str] | None,
    ) -> None:
        """level: the stability letter now; None where nobody judges, and every sound state counts as good."""
        self.ring, self.book, self.peer = ring, book, peer
        self._level = level
        self._exchange, self._store, self._tell = exchange, store, tell
        self._begun: set[Key] = set()  # checkpoints that are being written
        self._disk: dict[Key, None] = {}  # known to be committed, oldest first
        self._offers: dict[Key, DiskOffer] = {}
        self._holders: dict[Key, list[int]] = {}

    # -- what happens ---------------------------------------------------------------------------------------------

    def captured(self, snapshot: Snapshot) -> None:
        """A snapshot is in the ring."""
        self.ring.add(snapshot)
        self.book.saved(Key(snapshot.step, snapshot.attempt))
        self._forget()

    def begun(self, step: int, attempt: int) -> None:
        """A checkpoint of the present state is being written: now it is known from which course it is."""
        self._begun.add(Key(step, attempt))
        self.book.saved(Key(step, attempt))

    def ended(self, step: int, attempt: int, committed: bool) -> None:
        """It is on disk, or it could not be written."""
        key = Key(step, attempt)
        self._begun.discard(key)
        if committed:
            self._disk[key] = None
            self.book.readable(key, Tier.DISK.name.lower())
        self._forget()
        self._publish()

    def clean_step(self, step: int) -> None:
        self.book.clean_step(step)

    def onset(self, step: int, reason: str) -> None:
        """Something has been off since `step`."""
        self.book.onset(step, reason)
        self._publish()

    def failed(self, failure: Failure) -> None:
        """What makes the run go back or end; after `onset`."""
        key = self.book.failed_after_load(failure)
        if key is not None:
            self._tell("quarantine", {"step": key.step, "attempt": key.attempt, "reason": self.book.reasons(key)[-1]})
        self._publish()

    def loaded(self, candidate: Candidate) -> None:
        """Training goes on from it."""
        self.ring.drop_after(candidate.key.step)
        self.book.loaded(candidate.key)
        self._forget()
        self._publish()

    def refused(self, candidate: Candidate, why: str) -> None:
        """Some rank could not restore it exactly."""
        for tier in sorted(set(candidate.target.tiers)):
            self.book.unreadable(candidate.key, tier.name.lower(), why)

    def count(self, onset: int) -> int:
        """How many states before `onset` could be gone back to, as far as is known without asking."""
        held = {Key(s.step, s.attempt) for s in self.ring.snapshots} | set(self._disk)
        return sum(key.step < onset and self.book.level(key) >= Trust.PROVISIONAL for key in held)

    # -- going back -----------------------------------------------------------------------------------------------

    def before(self, onset: int, further_back: int) -> Iterator[Candidate]:
        """States before `onset`, best first: from memory, and when none of them will do, from disk. further_back: how many
        of the best to pass over, where there are others. Collective."""
        selection = self._select(self._in_memory(), onset)
        yield from self._each(selection, further_back)
        if self._store is not None:
            self._list_disk(sound=True)
            selection = self._select(self._with_disk(self._in_memory(), {}), onset)
            self._tell("target", {"onset": onset, "why": selection.explain()})
            yield from self._each(selection, 0)

    # -- starting -------------------------------------------------------------------------------------------------

    def resumes(self, refit: Refit | None, on_no_valid_checkpoint: Literal["stop", "fresh"]) -> Iterator[Candidate]:
        """States to start from, best first; none for a fresh start. Collective.

        Raises NothingUsable when something was trained and no state is left to try, unless that may be a fresh start, and
        BoundToItsWorld when the next to try is in order and only this number of ranks cannot have it."""
        self._read_book()
        traces = self._list_disk(sound=True)
        peers = self._list_peers()
        problems: list[str] = []
        selection = self._select(self._with_disk({}, peers), None, traces)
        if not selection.targets and traces:  # rather weights that are not finite, for a person to see, than none
            self._list_disk(sound=False)
            selection = self._select(self._with_disk({}, peers), None, traces)
        for candidate in self._each(selection, 0, refit):
            yield candidate
            problems += self.book.refused(candidate.key).values()
        if selection.start == "fresh":
            return
        place = self._store.storage.name if self._store is not None else "this run"
        what = f"{place}: there are traces of training ({traces or 'as another rank sees'}) but no usable checkpoint"
        reasons = [*problems[:3], *(f"{key}: {why}" for key, why in selection.refused[:3])]
        if reasons:
            what += f" ({'; '.join(reasons)})"
        if on_no_valid_checkpoint == "fresh":
            self._tell(
                "warning", {"message": f"{what}: starting from the beginning, as on_no_valid_checkpoint=fresh says"}
            )
            return
        raise nothing_usable(what)

    # -- what lies where ------------------------------------------------------------------------------------------

    def _in_memory(self) -> dict[Key, dict[Tier, Copy]]:
        return {
            Key(s.step, s.attempt): {Tier.MEMORY: Copy.VERIFIED} for s in self.ring.snapshots if s.parts
        }  # without parts: only where one would be, see Keeper.snapshot

    def _list_disk(self, *, sound: bool) -> str:
        """Fill `_offers`; returns traces of training. Collective."""
        if self._store is None:
            return ""
        offers, traces = self._store.offers()
        self._offers = {}
        for offer in offers:
            if offer.sound or not sound:
                self._offers.setdefault(Key(offer.step, offer.attempt), offer)
        for key in sorted(self._offers, key=lambda key: key.attempt):
            self._disk[key] = None
        return traces

    def _list_peers(self) -> dict[Key, list[int]]:
        """Complete copies in the hosts' memory: key -> holder by rank. Collective."""
        self._holders = dict(self.peer.find()) if self.peer is not None else {}
        return self._holders

    def _with_disk(
        self, near: dict[Key, dict[Tier, Copy]], peers: Mapping[Key, list[int]]
    ) -> dict[Key, dict[Tier, Copy]]:
        copies: dict[Key, dict[Tier, Copy]] = {key: dict(tiers) for key, tiers in near.items()}
        for tier, keys in ((Tier.PEER, peers), (Tier.DISK, self._offers)):
            for key in keys:
                copies.setdefault(key, {})[tier] = Copy.THERE
        return {key: self._marked(key, tiers) for key, tiers in copies.items()}

    def _marked(self, key: Key, tiers: dict[Tier, Copy]) -> dict[Tier, Copy]:
        refused = self.book.refused(key)
        return {t: Copy.REFUSED if t.name.lower() in refused else copy for t, copy in tiers.items()}

    def _select(self, copies: Mapping[Key, Mapping[Tier, Copy]], onset: int | None, traces: str = "") -> Selection:
        offers = [
            Offer(key, tiers, self._offers[key].identity if key in self._offers and Tier.DISK in tiers else 0)
            for key, tiers in copies.items()
        ]
        vector = encode(offers, self.book, onset, traces=bool(traces))
        return select(self._exchange.gather(torch.from_numpy(vector)), self.book, onset)

    def _each(self, selection: Selection, further_back: int, refit: Refit | None = None) -> Iterator[Candidate]:
        """The targets that every rank could load its part of, in order. Collective."""
        targets = selection.targets
        keys = list(dict.fromkeys(target.key for target in targets))
        if further_back > 0 and keys:
            passed_over = set(keys[: min(further_back, len(keys) - 1)])
            targets = tuple(target for target in targets if target.key not in passed_over)
        for target in targets:
            candidate = self._bring(target, refit)
            if candidate is not None:
                yield candidate

    def _bring(self, target: Target, refit: Refit | None) -> Candidate | None:
        """This rank's part from the tier that the target names, None on all ranks if one of them cannot have it."""
        tier, key = target.tiers[self._exchange.rank], target.key
        snapshot: Snapshot | None = None
        outer: Mapping[str, Any] | None = None
        problem, health, bound = "", None, False
        changes: list[str] = []
        if tier is Tier.MEMORY:
            snapshot = next(s for s in self.ring.snapshots if (s.step, s.attempt) == tuple(key))
        elif tier is Tier.PEER:
            assert self.peer is not None
            try:
                snapshot, outer = self.peer.load(key, self._holders[key][self._exchange.rank])
            except CheckpointError as error:
                problem = str(error)
        if Tier.DISK in target.tiers:
            assert self._store is not None
            own = tier is Tier.DISK
            loaded = self._store.take(self._offers[key], own)
            if loaded is None:
                self.book.unreadable(key, Tier.DISK.name.lower(), self._store.problem)
                return None
            outer, health = loaded.manifest.outer, loaded.manifest.health
            if own:
                snapshot = loaded.snapshot
                if snapshot is None and refit is None:
                    problem = f"it was saved by {loaded.manifest.world} ranks"
                elif snapshot is None and refit is not None:
                    try:
                        snapshot, changes = refit(loaded.folder, loaded.manifest)
                    except Exception as error:  # whatever a part can be wrong in
                        bound = isinstance(error, BoundToItsWorld)
                        problem = str(error) if bound else f"{type(error).__name__}: {error}"
        if set(target.tiers) != {Tier.MEMORY} and not self._exchange.vote(snapshot is not None, key.step):
            why = problem or "another rank could not load its part"
            if refit is not None and not self._exchange.vote(not bound, key.step):
                raise BoundToItsWorld(why)  # an older one would lose steps that are all there
            self._tell("warning", {"message": f"{key} is passed over: {why}"})
            for used in sorted(set(target.tiers) - {Tier.MEMORY}):
                self.book.unreadable(key, used.name.lower(), why)
            return None
        assert snapshot is not None
        return Candidate(key, snapshot, target, outer, health, tuple(changes))

    # -- the book -------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Drop from the book what no tier holds, and what lies on disk since long."""
        if len(self._disk) > _KNOWN:
            for key in sorted(self._disk, key=lambda key: key.attempt)[:-_KNOWN]:
                if self.book.level(key) >= Trust.PROVISIONAL:
                    del self._disk[key]
        held = {Key(s.step, s.attempt) for s in self.ring.snapshots}
        held |= self._begun | set(self._disk) | set(self._holders)
        for key in self.book.known():
            if key not in held:
                self.book.deleted(key)

    def _read_book(self) -> None:
        """What rank 0 finds written, on every rank. Collective."""
        state = None
        if self._store is not None and self._exchange.rank == 0:
            state = self._store.read_beside(TRUST, TRUST_LIMIT)
        state = self._exchange.share(state)
        if state is not None:
            try:
                self.book.load_state_dict(state)
            except ValueError as error:
                self._tell("warning", {"message": f"{TRUST} is not used: {error}"})

    def _publish(self) -> None:
        """For the next start, for people, and for retention, which runs in the background and must not see a book that
        changes under it."""
        if self._store is None or self._level is None:
            return
        levels = {key: (self.book.level(key), self.book.in_force(key)) for key in self.book.known()}
        self._store.trusted = lambda manifest: levels.get(
            Key(manifest.step, manifest.attempt), (Trust.PROVISIONAL, True)
        )
        self._store.at_risk = self._level() >= _RISK
        if self._exchange.rank == 0:
            self._store.write_beside(TRUST, self.book.state_dict())
