"""A snapshot: everything one rank needs to replay from a quiescent point, bit for bit.

Taken only when optimizer, schedule, counters and data position have all moved (BR-19). What must outlive a rollback
(budget, skipped data, counters of attempts) is *not* in here: see coordinator/outer.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from resilient.checkpoint.digest import state_digest, walk

PARTS = ("engine", "rng", "data", "judge")
"""Required parts. A snapshot or checkpoint that lacks one is refused (BR-09)."""


@dataclass(frozen=True)
class Snapshot:
    """State of one rank after optimizer step `step` was committed.

    parts: one entry per name in PARTS, nested dicts of tensors and plain values.
    position: data windows consumed since the run began (trained and skipped alike).
    lr, schedule: what the next step would use, for the proof after a restore.
    digests: 64-bit digest per part, taken when the snapshot was.
    pieces: what the engine's tensors are of the whole model (see pieces.py, as plain values), for another world size; empty
        where the engine cannot say, or nobody will ask.
    """

    step: int
    attempt: int
    position: int
    lr: float
    schedule: int | None
    parts: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)
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
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    frozen = _plan(state, into, copies)
    devices = {live.device for _, live in copies if live.device.type != "cpu"}
    if copies:
        torch._foreach_copy_([kept for kept, _ in copies], [live for _, live in copies], non_blocking=bool(devices))
    for device in devices:
        torch.get_device_module(device).current_stream(device).synchronize()
    return frozen


def _plan(state: Any, into: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(state, torch.Tensor):
        live = state.detach()
        fits = isinstance(into, torch.Tensor) and into.shape == live.shape and into.dtype == live.dtype
        pinned = live.device.type != "cpu"
        kept = into if fits else torch.empty(live.shape, dtype=live.dtype, pin_memory=pinned)
        copies.append((kept, live))
        return kept
    if type(state) is dict:
        old: Mapping[Any, Any] = into if isinstance(into, dict) else {}
        return {key: _plan(item, old.get(key), copies) for key, item in state.items()}
    if type(state) in (list, tuple):
        alike = isinstance(into, list | tuple) and len(into) == len(state)
        return type(state)(_plan(item, into[i] if alike else None, copies) for i, item in enumerate(state))
    return copy.deepcopy(state)
