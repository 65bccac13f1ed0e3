"""A snapshot: everything one rank needs to replay from a quiescent point, bit for bit.

Taken only when optimizer, schedule, counters and data position have all moved (BR-19). What must outlive a rollback
(budget, skipped data, counters of attempts) is *not* in here: see coordinator/outer.py.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import torch

from resilient.checkpoint.digest import state_digest, walk

PARTS = ("engine", "rng", "data", "judge")
"""Required parts. A snapshot or checkpoint that lacks one is refused (BR-09)."""

PLAIN = frozenset((int, float, str, bool, type(None)))  # need no copy

_LONGEST_S = 600.0  # that anybody waits for digests: a terabyte takes minutes


class Digests(Mapping[str, str]):
    """The digests of a snapshot's parts, taken in the background: hashing takes about as long as copying, and training need
    not wait for it. Reading a digest waits; the names are there at once."""

    def __init__(self, parts: dict[str, Any], executor: Executor) -> None:
        self._taken = executor.submit(Snapshot.digest_parts, parts)

    def __getitem__(self, name: str) -> str:
        return self._taken.result(_LONGEST_S)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(PARTS)

    def __len__(self) -> int:
        return len(PARTS)

    def __contains__(self, name: object) -> bool:
        return name in PARTS

    @property
    def taken(self) -> bool:
        """Nothing reads the snapshot for them any more."""
        return self._taken.done()

    def __reduce__(self) -> Any:
        """As a plain mapping, of the kind that `torch.load(weights_only=True)` accepts."""
        return OrderedDict, (), None, None, iter(self._taken.result(_LONGEST_S).items())


@dataclass(frozen=True)
class Snapshot:
    """State of one rank after optimizer step `step` was committed.

    parts: one entry per name in PARTS, nested dicts of tensors and plain values.
    position: data windows consumed since the run began (trained and skipped alike).
    lr, schedule: what the next step would use, for the proof after a restore.
    digests: 64-bit digest per part, of what the snapshot holds (see Digests).
    pieces: what the engine's tensors are of the whole model (see pieces.py, as plain values), for another world size; empty
        where the engine cannot say, or nobody will ask.
    """

    step: int
    attempt: int
    position: int
    lr: float
    schedule: int | None
    parts: dict[str, Any]
    digests: Mapping[str, str] = field(default_factory=dict)
    pieces: list[tuple[Any, ...]] = field(default_factory=list)

    @staticmethod
    def digest_parts(parts: dict[str, Any]) -> dict[str, str]:
        return {name: state_digest(parts[name]) for name in PARTS}

    @property
    def bytes(self) -> int:
        """Of all tensors in it."""
        return sum(leaf.nbytes for _, leaf in walk(self.parts) if isinstance(leaf, torch.Tensor))


@torch.no_grad()
def freeze(state: Any, into: Any = None) -> Any:
    """A copy of a nested state in host memory that nothing else refers to.

    into: an earlier result nobody needs any more; its memory is used again where tensors still have the same shape and
    dtype, for new memory costs more than the copying. From an accelerator the copies go through pinned memory, all
    started before one wait for the stream that they are on."""
    copies = Copies()
    frozen = _plan(state, into, copies)
    copies.run()
    return frozen


class Copies:
    """Tensors to be copied in one call: hundreds of small ones cost more in calls than in bytes."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._targets.append(target)
        self._sources.append(source)

    @torch.no_grad()
    def run(self) -> None:
        """Do all of it, and wait for the streams of the accelerators that took part: both sides may be used again then."""
        if not self._targets:
            return
        devices = {tensor.device for tensor in (*self._targets, *self._sources) if not tensor.is_cpu}
        torch._foreach_copy_(self._targets, self._sources, non_blocking=bool(devices))
        for device in devices:
            torch.get_device_module(device).current_stream(device).synchronize()


def _plan(state: Any, into: Any, copies: Copies) -> Any:
    kind = type(state)
    if kind in PLAIN:
        return state
    if isinstance(state, torch.Tensor):
        fits = isinstance(into, torch.Tensor) and into.shape == state.shape and into.dtype == state.dtype
        kept = into if fits else torch.empty(state.shape, dtype=state.dtype, pin_memory=not state.is_cpu)
        copies.add(kept, state)
        return kept
    if kind is dict:
        old: Mapping[Any, Any] = into if isinstance(into, dict) else {}
        return {key: _plan(item, old.get(key), copies) for key, item in state.items()}
    if kind is list or kind is tuple:
        if PLAIN.issuperset(map(type, state)):
            return kind(state)
        alike = isinstance(into, list | tuple) and len(into) == len(state)
        return kind(_plan(item, into[i] if alike else None, copies) for i, item in enumerate(state))
    return copy.deepcopy(state)
