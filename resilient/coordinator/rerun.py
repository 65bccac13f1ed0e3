"""A refused window, run once more to see where its NaN began (T6).

The guard cannot call the user's forward, so the window goes through the user's own loop again: `batches()` delivers it
right after the refusal, while the weights still stand where they stood. Every rank takes part, as sharded engines need;
all decide it from the same table. The result is dropped: gradients, buffers, counters and random streams are as they
were after the refusal, and training goes on as if nothing had been (a test holds a run against its twin without).

What the window meets again: its micro-batches, the weights, torch's random streams of CPU and device and Python's, the
weight of its tokens. Not NumPy's stream, whose state is too costly to note before every window, nor generators and
counters of the loop's own: `Guard.rerunning` tells a loop when it is looked at.

Limits: only the first refusal in a row, only a skip (a rollback or a stop moves or ends what would be looked at), only
so many re-runs a start. The probe looks for half of the exchange's deadline at most.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from resilient.checkpoint.rng import capture_rng, restore_rng
from resilient.coordinator.exchange import Exchange
from resilient.coordinator.feed import Window
from resilient.coordinator.judge import Judgement
from resilient.engines.base import Engine, Taps
from resilient.signals import Decision, Kind, StepRecord


class OriginProbe(Protocol):
    """Looks at the model while a window is re-run. Never raises."""

    def attach(self, module: torch.nn.Module, seconds: float) -> None: ...
    def micro_step(self, index: int, batch: Any) -> None: ...
    def loss(self, loss: torch.Tensor) -> None: ...
    def finish(self, taps: Taps | None) -> dict[str, Any]: ...
    def detach(self) -> None: ...
    def write(self, name: str, attempt: int, finding: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class _Begin:
    """What a window met: random streams of Python, torch on the CPU and the device, and how the loop weighted it."""

    python: Any
    cpu: torch.Tensor
    device: torch.Tensor | None
    tokens: float


@dataclass(frozen=True)
class Refused:
    """A window to run again. tokens: over all ranks, as when it ran."""

    decision: Decision
    window: Window
    begin: _Begin

    @property
    def tokens(self) -> float:
        return self.begin.tokens


class Rerun:
    """One per coordinator. `mark` before each window and `consider` at each refusal; then the coordinator takes what is
    `due`, hands out `deliver(it)`, and asks for `agree(it)`."""

    def __init__(self, engine: Engine, exchange: Exchange, probe: OriginProbe, limit: int) -> None:
        self._engine, self._exchange, self._probe = engine, exchange, probe
        self._left = limit
        self._begin: _Begin | None = None
        self._refused: Refused | None = None
        self._finding: dict[str, Any] = {}

    def mark(self, tokens: float) -> None:
        """Note what the window that begins will meet. About 20 microseconds, as long as re-runs are left."""
        if self._left > 0:
            device = self._engine.device
            on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            self._begin = _Begin(random.getstate(), torch.get_rng_state(), on_device, tokens)

    def consider(self, judgement: Judgement, window: Window, first: bool) -> None:
        """Plan a re-run of the attempt that was just judged, if it is worth one. first: of a row of refusals."""
        decision = judgement.decision
        nonfinite = any(f.statistic == "nonfinite" for f in judgement.findings)
        worth = nonfinite and first and decision.action == "skip" and decision.incident
        if worth and self._left > 0 and self._begin is not None:
            self._left -= 1
            self._refused = Refused(decision, window, self._begin)

    def due(self) -> Refused | None:
        """The window to run again now, once."""
        refused, self._refused = self._refused, None
        return refused

    def loss(self, loss: torch.Tensor) -> None:
        """The loss of the present micro-step, before its backward."""
        self._probe.loss(loss)

    def deliver(self, refused: Refused) -> Generator[Any, None, None]:
        """The refused micro-batches. However it ends, the engine and the random streams are as before it."""
        batches = refused.window.batches
        before = capture_rng(self._engine.device)
        complete = False
        try:
            self._put_back(refused.begin)
            self._probe.attach(self._engine.module, self._exchange.timeout.total_seconds() / 2)
            for index, batch in enumerate(batches):
                self._engine.begin_micro_step(index, len(batches))
                self._probe.micro_step(index, batch)
                yield batch
            complete = True
        finally:
            self._finding = self._probe.finish(self._engine.taps() if complete else None)
            self._engine.abandon()
            restore_rng(before, self._engine.device)

    def agree(self, refused: Refused) -> dict[str, Any]:
        """What all ranks tell about it: the finding of the first rank on which the value came back before the reduction
        (which carries it to all of them), else after it, else of the first rank that was refused. Collective. Raises
        ExchangeFailed."""
        decision = refused.decision
        finding = {"step": decision.step, "attempt": decision.attempt, **self._finding}
        self._probe.write(f"{decision.step}-{decision.cause}", decision.attempt, finding)
        seen = StepRecord(decision.step, decision.attempt, kind=Kind.RERUN, loss=0.0, loss_max=0.0)
        reduced = finding.get("place") == "reduction"
        seen.nonfinite_forward = float(finding["reproduced"] and not reduced)
        seen.nonfinite_backward = float(reduced)
        table = self._exchange.table(seen)
        own, carried = (table.ranks_where(table.column(f"nonfinite_{c}") > 0) for c in ("forward", "backward"))
        again = own or carried
        told = self._exchange.share(finding, source=(again or decision.ranks or (0,))[0])
        return {**told, "ranks": list(again or decision.ranks)}

    def _put_back(self, begin: _Begin) -> None:
        random.setstate(begin.python)
        torch.set_rng_state(begin.cpu)
        if begin.device is not None:
            torch.cuda.set_rng_state(begin.device, self._engine.device)
