"""The data feed: any iterable of micro-batches, delivered as windows of one optimizer step each.

The next window is fetched before the vote on the current one, so that "does every rank have data?" (BR-41) and "how
many tokens carry loss in the next step?" (BR-40) ride in the same all-reduce: no extra collective, no hang.

Position counts windows since the run began, trained, skipped and excluded alike; it is the same on every rank.
State is always that *before* the prefetched window. A loader with `state_dict`/`load_state_dict` is restored exactly;
any other by counting: the epoch is opened again under the RNG state it was first opened with, and the delivered
batches are read and dropped. A loader that tells another state after it was restored than it was given (torchdata 0.11's
StatefulDistributedSampler counts what it skips twice) is not asked again in that epoch: its position is the state that
it was given, and how many batches it has delivered since.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from resilient.checkpoint.digest import state_digest
from resilient.checkpoint.rng import capture_rng, restore_rng
from resilient.coordinator.fingerprints import batch_digest
from resilient.errors import DataPositionError


@dataclass
class Window:
    """The micro-batches of one optimizer step on this rank."""

    index: int  # position of this window in the run's data, 0-based
    batches: list[Any]
    tokens: float  # that carry loss; 0 if unknown
    longest: float = 0.0  # longest sequence, in tokens that carry loss
    empty: float = 0.0  # share of positions that carry no loss
    padding: bool = False  # delivered only to keep this rank in step; carries no loss
    digest: Any = math.nan  # of the content, see batch_digest; NaN: not asked for, unreadable, or no token carries loss


@dataclass
class _Position:
    """Where the feed is: enough to come back."""

    window: int = 0
    epoch: int = 0
    batches: int = 0  # micro-batches delivered in this epoch
    ended: bool = False  # the loader has said that this epoch is over
    carry: list[Any] = field(default_factory=list)  # micro-batches left over from the previous epoch
    loader: Any = None  # its state, and
    since: int = 0  # micro-batches delivered since that state
    epoch_rng: Any = None
    excluded: list[list[int]] = field(default_factory=list)


def count_tokens(batch: Any) -> float:
    """Tokens that carry loss: labels other than -100 in a mapping with `labels`; else elements of the first integer
    tensor; else the size of the first tensor's first dimension; else 0 (unknown)."""
    if isinstance(batch, dict) and isinstance(batch.get("labels"), torch.Tensor):
        return float((batch["labels"] != -100).sum())
    tensors = [v for v in _leaves(batch) if isinstance(v, torch.Tensor)]
    for tensor in tensors:
        if not tensor.is_floating_point() and tensor.dim() > 1:
            return float(tensor.numel())
    return float(tensors[0].shape[0]) if tensors and tensors[0].dim() > 0 else 0.0


def sequence_lengths(batches: list[Any]) -> tuple[float, float]:
    """(longest sequence, share of positions without loss) of micro-batches that are mappings with `labels` (T2); the
    long tail of lengths and the padding it costs. (0, 0) for other batches."""
    longest, positions, carrying = 0.0, 0, 0
    for batch in batches:
        if isinstance(batch, dict) and isinstance(batch.get("labels"), torch.Tensor) and batch["labels"].dim() > 0:
            real = batch["labels"] != -100
            lengths = real.sum(-1)
            longest = max(longest, float(lengths.max()) if lengths.numel() else 0.0)
            positions, carrying = positions + real.numel(), carrying + int(real.sum())
    return longest, 1.0 - carrying / positions if positions else 0.0


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, dict):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _leaves(value)
    else:
        yield batch


class WindowFeed:
    """One per run, on every rank.

    loader: iterable of micro-batches; if it has `state_dict` and `load_state_dict` it is restored exactly. A `rewind`
        method, where there is one, is preferred to `load_state_dict` for a loader that is already iterating.
    accumulation: micro-batches per window.
    tail: what happens to an incomplete window at the end of an epoch (BR-18): drop it, flush it as a short window, or
        carry it into the next epoch.
    digests: fingerprint what is delivered, before the loop can change it (S18).
    """

    def __init__(
        self,
        loader: Iterable[Any],
        accumulation: int = 1,
        *,
        tail: Literal["drop", "flush", "carry"] = "drop",
        tokens: Callable[[Any], float] = count_tokens,
        digests: bool = True,
    ) -> None:
        self.loader = loader
        self.accumulation = accumulation
        self.tail = tail
        self.exact = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._tokens = tokens
        self._digests = digests
        self._iterator: Iterator[Any] | None = None
        self._at = _Position()
        self._before_pending = _Position()  # state to come back to: before the prefetched window
        self._pending: Window | None = None
        self._fetching = False  # a fetch has begun and not come to its end
        self._fetched = False  # the pending slot is filled (perhaps with None: the epoch is over)
        self._last: Window | None = None
        self._given: Any = None  # state that the loader was given and has told otherwise
        self.wait_s = 0.0  # time spent waiting for the loader since last asked

    @property
    def position(self) -> int:
        """Windows consumed: the index of the next window to be delivered."""
        return self._before_pending.window if self._fetched else self._at.window

    @property
    def epoch(self) -> int:
        return self._at.epoch

    # -- delivering ---------------------------------------------------------------------------------------------

    def peek(self) -> Window | None:
        """The next window, fetched if need be. None: this epoch has no further (full) window on this rank."""
        if not self._fetched:
            started = time.perf_counter()
            self._before_pending = self._mark()
            self._fetching = True
            self._pending = self._fetch()
            self._fetched, self._fetching = True, False
            self.wait_s += time.perf_counter() - started
        return self._pending

    def give_up(self) -> None:
        """No window will be asked for any more, and a `peek` may have been broken off: the position is that before it."""
        if not self._fetched and not self._fetching:
            self._before_pending = self._mark()
        self._pending, self._fetched = None, True

    def take(self) -> Window:
        """Hand the next window over; the position moves past it."""
        window = self.peek()
        if window is None:
            raise DataPositionError("the feed was asked for a window after the end of its epoch")
        self._pending, self._fetched = None, False
        self._last = window
        return window

    def pad(self) -> Window:
        """The last window again, with no token carrying loss: keeps a rank without data in step (BR-41)."""
        if self._last is None or not all(isinstance(b, dict) and "labels" in b for b in self._last.batches):
            raise DataPositionError(
                "pad_with_zero_weight needs batches that are mappings with `labels`, and one delivered"
            )
        batches = [{**b, "labels": torch.full_like(b["labels"], -100)} for b in self._last.batches]
        return Window(self._at.window, batches, 0.0, 0.0, 1.0, padding=True)

    def next_epoch(self) -> None:
        """Close this epoch, whatever is left of it on this rank, and open the next. Call on all ranks together."""
        self._iterator = None
        self._pending, self._fetched = None, False
        self._at.epoch += 1
        self._at.batches, self._at.ended = 0, False
        self._at.epoch_rng, self._given = None, None

    def exclude(self, first: int, last: int) -> None:
        """Never deliver windows [first, last) again. Takes effect on what has not been fetched yet."""
        if last > first:
            self._at.excluded.append([first, last])

    @property
    def excluded(self) -> list[tuple[int, int]]:
        return [(a, b) for a, b in self._at.excluded]

    def _fetch(self) -> Window | None:
        while True:
            batches, self._at.carry = self._at.carry, []
            while len(batches) < self.accumulation:
                try:
                    batches.append(self._next_batch())
                except StopIteration:
                    if not batches or self.tail == "drop":
                        return None
                    if self.tail == "carry":
                        self._at.carry = batches
                        return None
                    break  # flush: a short window
            index = self._at.window
            self._at.window += 1
            if not any(first <= index < last for first, last in self._at.excluded):
                longest, empty = sequence_lengths(batches)
                tokens = sum(self._tokens(b) for b in batches)
                # Windows without loss are alike on many ranks, and nobody is trained on them.
                digest = batch_digest(batches) if self._digests and tokens > 0 else math.nan
                return Window(index, batches, tokens, longest, empty, digest=digest)

    def _next_batch(self) -> Any:
        if self._at.ended:
            raise StopIteration  # asking again would start the next epoch of some loaders
        if self._iterator is None:
            self._open()
        assert self._iterator is not None
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._at.ended = True
            raise
        self._at.batches += 1
        self._at.since += 1
        return batch

    def _open(self) -> None:
        """Start iterating this epoch. Whatever decides the order (sampler epoch, RNG) is set or recorded first."""
        parts: tuple[Any, ...] = (
            self.loader,
            getattr(self.loader, "sampler", None),
            getattr(self.loader, "dataset", None),
        )
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._at.epoch)
        if not self.exact and self._at.epoch_rng is None:
            self._at.epoch_rng = capture_rng()
        self._iterator = iter(self.loader)

    # -- coming back --------------------------------------------------------------------------------------------

    def _mark(self) -> _Position:
        if self._iterator is None and not self.exact and not self._at.ended:
            self._open()  # so that the RNG under which this epoch is shuffled is part of the mark
        at, loader, since = self._at, None, 0
        if self._given is not None:
            loader, since = self._given, at.since
        elif self.exact:
            loader = self.loader.state_dict()  # type: ignore[attr-defined]
        return _Position(
            at.window, at.epoch, at.batches, at.ended, list(at.carry), loader, since, at.epoch_rng, at.excluded
        )

    def state_dict(self) -> dict[str, Any]:
        """State before the prefetched window: restoring it delivers that window next."""
        mark = self._before_pending if self._fetched else self._mark()
        return {
            "window": mark.window,
            "epoch": mark.epoch,
            "batches": mark.batches,
            "ended": mark.ended or self._nothing_left(),
            "carry": mark.carry,
            "loader": mark.loader,
            "since": mark.since,
            "epoch_rng": mark.epoch_rng,
            "accumulation": self.accumulation,
        }

    def _nothing_left(self) -> bool:
        """By count: whether it is known that this epoch holds no window more, and that nothing of it is carried over. A position
        that says so needs no batch to be read again, and means the same with any number of ranks."""
        known = self._fetched and self._pending is None and self._at.ended
        return known and not self.exact and self.tail != "carry"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, forwards or back. The exclusion list is not part of it: it outlives a rollback.

        By count this replays the loader's draws from the global RNG streams: restore RNG afterwards."""
        if state["accumulation"] != self.accumulation:
            raise DataPositionError(
                f"saved with {state['accumulation']} micro-batches per step, now {self.accumulation}: positions differ"
            )
        self._pending, self._fetched, self._fetching, self._iterator = None, False, False, None
        excluded = self._at.excluded
        self._at = _Position(
            state["window"],
            state["epoch"],
            state["batches"],
            state["ended"],
            list(state["carry"]),
            None,
            state["since"],
            state["epoch_rng"],
            excluded,
        )
        if self.exact:
            self._restore_loader(state["loader"], state["since"])
        elif not state["ended"]:
            restore_rng(state["epoch_rng"])
            self._read(state["batches"])

    def _restore_loader(self, given: Any, since: int) -> None:
        loader: Any = self.loader
        own = copy.deepcopy(given)  # torchdata goes on counting in what it is given
        if hasattr(loader, "rewind"):
            loader.rewind(own)
        else:
            loader.load_state_dict(own)
        self._given = None
        if since or state_digest(loader.state_dict()) != state_digest(given):
            self._given = copy.deepcopy(given)
            self._read(since)

    def _read(self, batches: int) -> None:
        """Open the loader and drop so many batches, which were delivered before."""
        self._open()
        assert self._iterator is not None
        for read in range(batches):
            try:
                next(self._iterator)
            except StopIteration:
                raise DataPositionError(
                    f"the loader ended after {read} of the {batches} batches it had delivered before"
                ) from None
