"""Who has come to a call that must be made on every rank.

A collective that some ranks leave out hangs until the deadline of its process group, and then does not say who was missing. So
the ranks meet in the store first, where no wait is without an end and a rank that stays away leaves nothing half done.

The first rank to settle a meeting settles it for all: they have all come, or it is off and these were missing. So one that
comes late does not go on alone into what the others have given up, nor the other way round.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from resilient.coordinator.exchange import Exchange
from resilient.errors import ExchangeFailed

LONGEST_S = 8.0  # of a wait, however patient the exchange is


@dataclass(frozen=True)
class Meeting:
    """How a meeting ended; the same on all ranks that came. missing: ranks that did not come in time; nobody does what they met
    for. note: what a rank had to say, "" if none. seconds: how long the others were waited for."""

    rank: int
    missing: tuple[int, ...] = ()
    note: str = ""
    seconds: float = 0.0

    @property
    def first(self) -> bool:
        """Whether this is the lowest rank that came in time: who tells what all of them know."""
        return self.rank not in self.missing and set(range(self.rank)) <= set(self.missing)

    def missed(self, call: str) -> str:
        """For a person: who was missing at `call`, and what to do."""
        more = f" and {len(self.missing) - 8} more" if len(self.missing) > 8 else ""
        who = f"rank{'s' if len(self.missing) > 1 else ''} {', '.join(map(str, self.missing[:8]))}{more}"
        late = f" (this rank, {self.rank}, came after the others had given up)" if self.rank in self.missing else ""
        return f"{who} did not come to {call} within {self.seconds:g} s{late}: call it on every rank at the same place"


class Attendance:
    """One per process. Not collective to create."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._where, self._times = "", 0  # the last place this rank came to, and how often

    def meet(self, where: str, note: str = "") -> Meeting:
        """Wait for the other ranks, for the exchange's deadline and LONGEST_S at most. Call it on all ranks. A rank that comes
        after the meeting was called off is told so at once, and finds itself among the missing.

        where: names the call and the point of the run, "save/12". The n-th call of a rank there meets the n-th of the others.
        Raises ExchangeFailed when the store does not answer."""
        exchange, store = self._exchange, self._exchange.store()
        if store is None:
            return Meeting(exchange.rank, note=note)
        self._times = self._times + 1 if where == self._where else 1
        self._where = where
        seconds = min(exchange.timeout.total_seconds(), LONGEST_S)
        try:
            missing, note = self._settle(store, f"attendance/{where}/{self._times}", seconds, note)
        except RuntimeError as error:  # of every kind of store
            raise ExchangeFailed(f"the store of the job does not answer on rank {exchange.rank}: {error}") from error
        return Meeting(exchange.rank, missing, note, seconds)

    def _settle(self, store: dist.Store, place: str, seconds: float, note: str) -> tuple[tuple[int, ...], str]:
        """Ranks that are missing, or what was noted."""
        world = self._exchange.world_size
        outcome, noted, here = (f"{place}/{key}" for key in ("missing", "note", "here"))
        if note:
            store.set(noted, note)
        store.set(f"{here}/{self._exchange.rank}", "1")
        missing: list[int] = []
        if store.add(f"{place}/came", 1) < world:
            _wait(store, outcome, seconds)
            if not store.check([outcome]):
                missing = [r for r in range(world) if not store.check([f"{here}/{r}"])]
        missing = json.loads(store.compare_set(outcome, "", json.dumps(missing)))
        if missing:
            return tuple(missing), ""
        store.delete_key(f"{here}/{self._exchange.rank}")  # a long run has many meetings
        return (), store.get(noted).decode() if store.check([noted]) else ""


def _wait(store: dist.Store, key: str, seconds: float) -> None:
    """Until `key` is there, or the time is over."""
    try:
        store.wait([key], timedelta(seconds=seconds))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # the time is over: a DistStoreError, but not from every kind of store
        pass
