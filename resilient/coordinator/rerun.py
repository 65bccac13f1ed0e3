"""A window run once more, because of what its first run showed.

    retry     the attempt was refused and its data is not to blame: the same window is the next attempt at the step
    origin    a refused window only looked at, with hooks, to see where its NaN began (T6)
    confirm   the gate holds the step while a suspect rank's window runs again: on that rank, and at the same time on a
              peer with the same weights, batch and random numbers. What differs on the same rank was a passing fault of
              its hardware; what is bad on the suspect and clean on the peer is that machine; bad on both is the data (C2)

The guard cannot call the user's forward, so the window goes through the user's own loop again: `batches()` delivers it
while the weights still stand where they stood. Every rank takes part, as sharded engines need; all decide it from the same
table. An origin or confirm run is dropped: gradients, buffers, counters and random streams are as they were before it.

What the window meets again: its micro-batches, the weights, torch's random streams of CPU and device and Python's, the
weight of its tokens. Not NumPy's stream, whose state is too costly to note before every window, nor generators and
counters of the loop's own: `Guard.rerunning` tells a loop when it is only looked at.

Limits: so many runs a start; the probe looks for half of the exchange's deadline at most; a batch that is larger than 256 MB or
that `torch.load(weights_only=True)` refuses does not travel to a peer.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from resilient.checkpoint.rng import capture_rng, restore_rng
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.feed import Window
from resilient.coordinator.judge import Judgement
from resilient.engines.base import Engine, Taps
from resilient.signals import Confirmation, Exchanged, Kind, StepRecord, StepTable

_MOST_BYTES = 256 << 20
FOR_GOOD = ("rollback", "stop")  # the weights that the window met are gone afterwards


class OriginProbe(Protocol):
    """Looks at the model while a window is re-run. Never raises."""

    def attach(self, module: torch.nn.Module, seconds: float) -> None: ...
    def micro_step(self, index: int, batch: Any) -> None: ...
    def loss(self, loss: torch.Tensor) -> None: ...
    def finish(self, taps: Taps | None) -> dict[str, Any]: ...
    def detach(self) -> None: ...
    def write(self, name: str, attempt: int, finding: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Begin:
    """What a window met: random streams of Python, torch on the CPU and the device, and how the loop weighted it."""

    python: Any
    cpu: torch.Tensor
    device: torch.Tensor | None
    tokens: float

    @classmethod
    def mark(cls, device: torch.device, tokens: float) -> Begin:
        """About 20 microseconds."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(random.getstate(), torch.get_rng_state(), on_device, tokens)

    def put_back(self, device: torch.device) -> None:
        random.setstate(self.python)
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@dataclass(frozen=True)
class Refused:
    """A window to run again, and what was made of it.

    table: of its first run. suspect, peer: ranks of a confirm run; peer None: there is nobody else who could run it.
    probed: with hooks, to see where its NaN began. held: nothing has been done about the first run yet."""

    judgement: Judgement
    table: Exchanged
    window: Window
    begin: Begin
    suspect: int | None = None
    peer: int | None = None
    probed: bool = False
    held: bool = False


class Rerun:
    """One per coordinator. `mark` before each window; `origin` or `confirm` at a refusal says whether to look again; then
    the coordinator hands out `deliver(it)` and asks for `agree(it)`.

    origins, confirmations: how many a start. hosts: of the ranks."""

    def __init__(
        self,
        engine: Engine,
        exchange: Exchange,
        probe: OriginProbe | None,
        *,
        origins: int,
        confirmations: int,
        hosts: tuple[str, ...] = (),
    ) -> None:
        self._engine, self._exchange, self._probe = engine, exchange, probe
        self._origins = origins if probe is not None else 0
        self._confirmations = confirmations if exchange.world_size > 1 else 0
        self._hosts = hosts
        self._begin: Begin | None = None
        self._norm = math.nan  # local, of the run that just ended
        self._sent = False  # the peer has run the suspect's window
        self._finding: dict[str, Any] = {}

    def mark(self, tokens: float) -> None:
        """Note what the window that begins will meet."""
        self._begin = Begin.mark(self._engine.device, tokens)

    def again(self, judgement: Judgement, table: Exchanged, window: Window) -> Refused:
        """The window as it ran, to be the next attempt."""
        assert self._begin is not None
        return Refused(judgement, table, window, self._begin)

    def origin(self, judgement: Judgement, table: Exchanged, window: Window, first: bool) -> Refused | None:
        """The window, if it is worth a look at where its NaN began: after a skip, but before weights are given back or the
        run ends. first: of a row of refusals."""
        decision = judgement.decision
        worth = _nonfinite(judgement) and first and decision.action in ("skip", *FOR_GOOD) and decision.incident
        if not worth or self._origins == 0 or self._begin is None:
            return None
        self._origins -= 1
        return Refused(judgement, table, window, self._begin, probed=True, held=decision.action in FOR_GOOD)

    def confirm(self, judgement: Judgement, table: Exchanged, window: Window, suspect: int | None) -> Refused | None:
        """The window, if the step is to be held while `suspect` is run again."""
        decision = judgement.decision
        if suspect is None or self._confirmations == 0 or self._begin is None or decision.action == "apply":
            return None
        self._confirmations -= 1
        probed = _nonfinite(judgement) and self._origins > 0
        self._origins -= probed
        return Refused(judgement, table, window, self._begin, suspect, self._peer(suspect, table), probed, held=True)

    def _peer(self, suspect: int, table: Exchanged) -> int | None:
        """Who runs the suspect's window too: a peer on another host if there is one, else the next one."""
        group = next((g for g in table.peers if suspect in g), ())
        after = sorted((r for r in group if r != suspect), key=lambda r: (r - suspect) % table.world_size)
        elsewhere = [r for r in after if self.other_host(suspect, r)]
        return next(iter(elsewhere or after), None)

    def other_host(self, a: int, b: int | None) -> bool:
        return b is not None and max(a, b) < len(self._hosts) and self._hosts[a] != self._hosts[b]

    def loss(self, loss: torch.Tensor) -> None:
        """The loss of the present micro-step, before its backward."""
        if self._probe is not None:
            self._probe.loss(loss)

    def deliver(self, refused: Refused) -> Generator[Any, None, None]:
        """The micro-batches to run. However it ends, the engine and the random streams are as before it. Collective:
        sends the suspect's window to the peer first. Raises ExchangeFailed."""
        batches, begin = refused.window.batches, refused.begin
        if refused.suspect is not None:
            batches, begin = self._swap(refused)
        before = capture_rng(self._engine.device)
        complete = False
        probe = self._probe if refused.probed else None
        try:
            begin.put_back(self._engine.device)
            if probe is not None:
                probe.attach(self._engine.module, self._exchange.timeout.total_seconds() / 2)
            for index, batch in enumerate(batches):
                self._engine.begin_micro_step(index, len(batches))
                if probe is not None:
                    probe.micro_step(index, batch)
                yield batch
            complete = True
        finally:
            taps = self._engine.taps() if complete else None
            self._norm = math.sqrt(float(taps.local_sq)) if taps is not None else math.nan
            if probe is not None:
                self._finding = probe.finish(taps)
            self._engine.abandon()
            restore_rng(before, self._engine.device)

    def _swap(self, refused: Refused) -> tuple[list[Any], Begin]:
        """What this rank runs: the peer the suspect's window, all others their own."""
        rank, data = self._exchange.rank, None
        if rank == refused.suspect:
            data = _packed(refused.window.batches, refused.begin)
        received = self._exchange.send_bytes(data, refused.suspect) if refused.peer is not None else b""  # type: ignore[arg-type]
        self._sent = False
        if rank == refused.peer and received:
            window = _unpacked(received, self._engine.device)
            if window is not None and len(window[0]) == len(refused.window.batches):
                self._sent = True
                return window[0], replace(window[1], tokens=refused.begin.tokens)
        return refused.window.batches, refused.begin

    def agree(self, refused: Refused) -> tuple[dict[str, Any] | None, Confirmation | None]:
        """What all ranks make of the run: where the NaN began, if it was probed, and what it says about the suspect, if
        there is one. Collective. Raises ExchangeFailed."""
        decision = refused.judgement.decision
        seen = StepRecord(decision.step, decision.attempt, kind=Kind.RERUN, loss=0.0, loss_max=0.0)
        seen.local_grad_norm, seen.asked = self._norm, float(self._sent)
        seen.loss = refused.table.own("local_grad_norm")  # of the first run
        finding = {"step": decision.step, "attempt": decision.attempt, **self._finding}
        if refused.probed and self._probe is not None:
            self._probe.write(f"{decision.step}-{decision.cause}", decision.attempt, finding)
            reduced = finding.get("place") == "reduction"
            seen.nonfinite_forward = float(finding["reproduced"] and not reduced)
            seen.nonfinite_backward = float(reduced)
        table = self._exchange.every_row(seen)
        origin = self._told(refused, table, finding) if refused.probed else None
        return origin, self._confirmation(refused, table) if refused.suspect is not None else None

    def _told(self, refused: Refused, table: StepTable, finding: dict[str, Any]) -> dict[str, Any]:
        """The finding of the first rank on which the value came back before the reduction (which carries it to all of
        them), else after it, else of the first rank that was refused."""
        its_own = table.column("asked") == 0  # a peer has run the suspect's window
        own, carried = (
            table.ranks_where((table.column(f"nonfinite_{c}") > 0) & its_own) for c in ("forward", "backward")
        )
        again, refused_ranks = own or carried, refused.judgement.decision.ranks
        told = self._exchange.share(finding, source=(again or refused_ranks or (0,))[0])
        return {**told, "ranks": list(again or refused_ranks)}

    def _confirmation(self, refused: Refused, table: StepTable) -> Confirmation:
        suspect, peer = refused.suspect, refused.peer
        assert suspect is not None
        before, norms = table.column("loss"), table.column("local_grad_norm")
        first, second = float(before[suspect]), float(norms[suspect])
        bad = _threshold(first, np.delete(before, suspect))
        ran = peer is not None and bool(table.column("asked")[peer])
        notes = []
        if not ran:
            notes.append(
                "no other rank holds the same model" if peer is None else "its batch could not be sent to a peer"
            )
        elif not self.other_host(suspect, peer):
            notes.append("the peer runs on the same host: a fault of the host itself was not told apart")
        return Confirmation(
            rank=suspect,
            same_again=second == first or (math.isnan(second) and math.isnan(first)),
            bad_again=not second <= bad,
            peer=peer if ran else None,
            peer_bad=not float(norms[peer]) <= bad if ran else None,  # type: ignore[index]
            other_host=ran and self.other_host(suspect, peer),
            norms=(first, second, float(norms[peer])) if ran else (first, second),  # type: ignore[index]
            note="; ".join(notes),
        )


def _threshold(first: float, others: np.ndarray) -> float:
    """A local norm beyond this is off like the first: half way, in the logarithm, from what the others had."""
    others = others[np.isfinite(others)]
    usual = float(np.median(others)) if len(others) else 0.0
    return math.sqrt(first * usual) if math.isfinite(first) and first > usual else math.inf


def _nonfinite(judgement: Judgement) -> bool:
    return any(f.statistic == "nonfinite" for f in judgement.findings)


def _packed(batches: list[Any], begin: Begin) -> bytes | None:
    """A window as bytes; None if it does not fit."""
    buffer = io.BytesIO()
    torch.save({"batches": batches, "python": begin.python, "cpu": begin.cpu, "device": begin.device}, buffer)
    return buffer.getvalue() if buffer.tell() <= _MOST_BYTES else None


def _unpacked(data: bytes, device: torch.device) -> tuple[list[Any], Begin] | None:
    """(batches, what they meet) of another rank; None if they are made of what data cannot be made of."""

    def put(storage: Any, location: str) -> Any:
        return storage if location == "cpu" or device.type == "cpu" else storage.to(device)

    try:
        window = torch.load(io.BytesIO(data), map_location=put, weights_only=True)
    except Exception:  # a batch of the user's own classes
        return None
    on_device = window["device"]
    begin = Begin(window["python"], window["cpu"].cpu(), None if on_device is None else on_device.cpu(), 0.0)
    return list(window["batches"]), begin
