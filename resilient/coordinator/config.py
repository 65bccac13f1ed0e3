"""Deadlines and failure behaviour of the guard itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GuardConfig:
    """exchange_timeout_s: longest wait for the other ranks at the gate. Must exceed the slowest phase that only some
    ranks go through (evaluation on one rank, compilation).

    exchange_mode: what the ranks exchange. table: every rank's row, exact. sketch: a summary of at most 64 KiB at any world
        size, which names outliers all the same. auto: a sketch in worlds where a table is too large.

    on_guard_failure: continue (train on unguarded, loudly) | stop (all ranks end with exit 77).
    on_uneven_data: what happens when ranks run out of data at different times (BR-41).
    on_epoch_tail: what happens to an incomplete accumulation window at the end of an epoch (BR-18).
    blind_after: steps after which a tap that never reported is an error (BR-47).
    weights_every: steps between measurements of the weight norm, and of Adam's RMS(g^2/v) (0: never).
    updates_every: steps between measurements of the update norm (0: never). Needs room for a copy of the parameters
        that a rank steps, while it steps them; on the CPU for good.
    layers: gradient and update norms by layer group, too (S3).
    scene: what is kept of a refused step (T3, T12): none | batch | full (the rank's whole state too).
    scene_limit: scenes per rank and start.
    reduction_check: compare what goes into each gradient reduction with what comes out of it (C2). Costs two passes over the
        gradients.
    confirmations: how often in one start a step is held while a suspect rank's window runs once more, on that rank and on
        a peer, to tell its batch from its machine (C2). 0: never.
    digests_every: steps between comparisons of what ranks hold alike: parameters, optimizer, buffers, random streams
        (0: never). A pass over them.
    link_probes: how often in one start a suspicion may have the links and machines probed. 0: never.
    link_probe_s: longest time of one such probe.
    grace_s: seconds that the cluster leaves between TERM (or USR1) and the end; null: not known. A checkpoint that takes
        longer is not begun then: the copies in memory are brought up to date.
    nan_probes: how often in one start a window refused for a non-finite value is run once more, with hooks on every
        module, to name the module it began in (T6). 0: never."""

    exchange_timeout_s: float = 120.0
    exchange_mode: Literal["auto", "table", "sketch"] = "auto"
    on_guard_failure: Literal["continue", "stop"] = "continue"
    on_uneven_data: Literal["stop_all", "drop_epoch_tail", "pad_with_zero_weight"] = "drop_epoch_tail"
    on_epoch_tail: Literal["drop", "flush", "carry"] = "drop"
    blind_after: int = 2
    weights_every: int = 10
    updates_every: int = 1
    layers: bool = True
    scene: Literal["none", "batch", "full"] = "batch"
    scene_limit: int = 20
    reduction_check: bool = True
    confirmations: int = 8
    digests_every: int = 100
    link_probes: int = 2
    link_probe_s: float = 5.0
    nan_probes: int = 3
    grace_s: float | None = None
