"""Capture and restore of one rank's full state, with the proof that a restore is exact."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from resilient.checkpoint.digest import state_digest
from resilient.checkpoint.rng import capture_rng, restore_rng
from resilient.checkpoint.snapshot import PARTS, Digests, Snapshot, freeze
from resilient.coordinator.feed import WindowFeed
from resilient.coordinator.judge import Judge
from resilient.engines.base import Engine
from resilient.errors import CheckpointError, DataPositionError

_OWN = ("rng", "judge")  # parts that are copies already, whoever makes them


class StateKeeper:
    """Knows the parts of a snapshot and the order in which they must go back."""

    def __init__(self, engine: Engine, feed: WindowFeed, judge: Judge | None) -> None:
        self._engine = engine
        self._feed = feed
        self._judge = judge
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="resilient-digest", initializer=_give_way)

    def capture(self, step: int, attempt: int, into: Snapshot | None = None) -> Snapshot:
        """Frozen state at a quiescent point: optimizer, schedule, counters and data position have all moved.

        into: a snapshot nobody needs any more, whose memory is used again.
        The digests are taken of the frozen copy, in the background."""
        if into is not None and isinstance(into.digests, Digests) and not into.digests.taken:
            into = None  # still being read
        live = self._live()
        own = {name: live.pop(name) for name in _OWN}
        parts = {**freeze(live, into.parts if into is not None else None), **own}
        return Snapshot(
            step=step,
            attempt=attempt,
            position=self._feed.position,
            lr=self._engine.lr(),
            schedule=self._engine.counters().schedule,
            parts=parts,
            digests=Digests(parts, self._hashing),
        )

    def completed(
        self, snapshot: Snapshot, allow_missing: Collection[str]
    ) -> tuple[Snapshot, tuple[str, ...], list[str]]:
        """A snapshot to restore, whose engine's state has those parts of `allow_missing` that it lacks as they are here now;
        their names; and why it is no state, if it is none. Nothing is touched."""
        if not allow_missing or "engine" not in snapshot.parts:
            return snapshot, (), []
        try:
            engine, kept = self._engine.complete(snapshot.parts["engine"], allow_missing)
        except (CheckpointError, KeyError, TypeError) as error:
            return snapshot, (), [f"{type(error).__name__}: {error}"]
        if not kept:
            return snapshot, (), []
        schedule = self._engine.counters().schedule if "schedulers" in kept else snapshot.schedule
        parts = {**snapshot.parts, "engine": engine}
        digests = {**snapshot.digests, "engine": state_digest(engine)}
        return replace(snapshot, parts=parts, digests=digests, schedule=schedule), kept, []

    def tried(self, snapshot: Snapshot, exclude: tuple[int, int] | None = None) -> list[str]:
        """`restore`, and why a snapshot cannot be put back as one more thing that differs."""
        try:
            return self.restore(snapshot, exclude)
        except (CheckpointError, DataPositionError) as error:
            return [str(error)]

    def restore(self, snapshot: Snapshot, exclude: tuple[int, int] | None = None) -> list[str]:
        """Put a snapshot back and prove it. Returns what differs from the snapshot, and weights that are not the cast of
        their masters: empty when the restore is exact.

        exclude: data windows [first, last) that are not to be delivered again."""
        missing = [name for name in PARTS if name not in snapshot.parts]
        if missing:
            raise CheckpointError(
                f"the snapshot of step {snapshot.step} lacks {', '.join(missing)}: it cannot be restored"
            )
        try:
            self._engine.restore(snapshot.parts["engine"])
            if self._judge is not None and snapshot.parts["judge"]:
                self._judge.load_state_dict(_to_arrays(snapshot.parts["judge"]))
            self._feed.load_state_dict(snapshot.parts["data"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the state of step {snapshot.step} has another format ({type(error).__name__}: {error}): it was written by "
                "another version of resilient or with other detectors"
            ) from error
        if exclude is not None:
            self._feed.exclude(*exclude)
        self._feed.peek()  # as at capture: the next window is in hand, and whatever RNG its loading drew is drawn
        restore_rng(snapshot.parts["rng"], self._engine.device)  # last: everything above may draw
        return self._differences(snapshot)

    def _differences(self, snapshot: Snapshot) -> list[str]:
        found = Snapshot.digest_parts(self._live())
        differences = [
            f"{name}: digest {found[name]}, expected {digest}"
            for name, digest in snapshot.digests.items()
            if found[name] != digest and not (name == "judge" and not snapshot.parts["judge"])
        ]
        for name, now, then in (
            ("lr", self._engine.lr(), snapshot.lr),
            ("schedule", self._engine.counters().schedule, snapshot.schedule),
            ("position", self._feed.state_dict()["window"], snapshot.position),
        ):
            if now != then:
                differences.append(f"{name}: found {now}, expected {then}")
        # The state as it was saved may be one that must not be trained on: its digests prove the copy only.
        return differences + self._engine.mismatched_weights()

    def _live(self) -> dict[str, Any]:
        with torch.no_grad():
            return {
                "engine": self._engine.live(),
                "rng": capture_rng(self._engine.device),
                "data": self._feed.state_dict(),
                "judge": _to_tensors(self._judge.state_dict()) if self._judge is not None else {},
            }


def _give_way() -> None:
    """Where all cores are taken, training goes first: on Linux a thread has a priority of its own."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _to_tensors(state: Any) -> Any:
    """Detectors are numpy only; snapshots are made of tensors: those are digested fast and load without unsafe pickle."""
    if isinstance(state, dict):
        return {key: _to_tensors(value) for key, value in state.items()}
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state


def _to_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _to_arrays(value) for key, value in state.items()}
    return state.numpy() if isinstance(state, torch.Tensor) else state
