"""Faults of the wire: what one rank receives is not what was sent.

The collectives run as ever, so no rank is left waiting; what came out of them is changed on the rank that is hit, after
the window's last backward and before anyone looks at it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from resilient.engines.base import Engine
from resilient.engines.layers import Layers
from resilient.faults.config import BadReduction, SkippedReduction
from resilient.faults.gradient import GradientFault, draw
from resilient.faults.proxy import Trigger
from resilient.faults.reduced import Piece, reduced_pieces


def check_layer(layers: Layers, name: str | None) -> None:
    """ConfigError for a layer group that the model does not have."""
    if name is not None:
        draw(dict(zip(layers.names, layers.sizes, strict=True)), name, 0, "layer")


class ReductionFault(GradientFault):
    """Calls `corrupt(pieces)` once the gradients of a window are reduced, in the steps in which the fault is due.

    keep_local: with this rank's own gradients of the window in `local`, whole and by name, as they went into the
    reduction: in the units of the reduced ones, as if this rank were alone.
    """

    def __init__(
        self, engine: Engine, step: Callable[[], int], fault: BadReduction | SkippedReduction, *, keep_local: bool
    ) -> None:
        super().__init__(engine, step, None if keep_local else ())
        self._trigger = Trigger(self, fault)
        self.local: dict[str, torch.Tensor] = {}

    def due(self) -> bool:
        return self._trigger.due()

    def change(self, name: str, gradient: torch.Tensor) -> None:
        seen = self.local.get(name)
        gradient = gradient.detach().float()
        self.local[name] = gradient.clone() if seen is None else seen + gradient

    def corrupt(self, pieces: list[Piece]) -> None:
        raise NotImplementedError

    def passed(self) -> None:
        """The gradients of a window are reduced, and the fault is not due."""

    def begin_micro_step(self, index: int, count: int) -> None:
        super().begin_micro_step(index, count)
        if index == 0:
            self.local = {}

    @torch.no_grad()
    def backward(self, loss: torch.Tensor) -> None:
        with torch.enable_grad():
            super().backward(loss)
        if self.index < self.count - 1:
            return
        if self.due():
            self.corrupt(reduced_pieces(self.inner))
        else:
            self.passed()
        self.local = {}


class SkippedEngine(ReductionFault):
    """Every gradient that this rank holds is its own, as if it had not been reduced."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: SkippedReduction) -> None:
        super().__init__(engine, step, fault, keep_local=True)

    def corrupt(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.name in self.local:
                piece.flat().copy_(piece.flat_of(self.local[piece.name]))


class BadlyReduced(ReductionFault):
    """Some elements of one layer group are wrong on this rank. ConfigError for a group of which it holds nothing."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: BadReduction) -> None:
        super().__init__(engine, step, fault, keep_local=fault.how == "unreduced")
        self._fault = fault
        self._before: dict[str, torch.Tensor] = {}  # parameter -> what was received in the step before

    def corrupt(self, pieces: list[Piece]) -> None:
        received = self._received(pieces)
        groups: dict[str, list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(self.layers.names[self.layers.of[piece.name]], []).append(piece)
        values = {name: torch.cat([piece.flat() for piece in group]) for name, group in groups.items()}
        layer, first = self._draw(values)
        held = values[layer].numel()
        count = held if self._fault.elements is None else min(self._fault.elements, held)
        first = min(first, held - count)
        step = torch.linalg.vector_norm(values[layer], dtype=torch.float32) * (self._fault.relative / math.sqrt(count))
        at = 0
        for piece in groups[layer]:
            start, stop = max(first - at, 0), min(first + count - at, piece.values.numel())
            if start < stop:
                self._overwrite(piece, start, stop, step)
            at += piece.values.numel()
        self._before = received

    def passed(self) -> None:
        self._before = {}
        if self._fault.how == "stale" and self._trigger.covers(self.step + 1):
            self._before = self._received(reduced_pieces(self.inner))

    def _received(self, pieces: list[Piece]) -> dict[str, torch.Tensor]:
        return {piece.name: piece.flat().clone() for piece in pieces} if self._fault.how == "stale" else {}

    def _draw(self, values: dict[str, torch.Tensor]) -> tuple[str, int]:
        """A group and an element of it, among those that have a gradient: a row of an embedding that no token asked for
        would be the same before and after."""
        wanted = self._fault.layer
        where = {name: flat.nonzero().flatten() for name, flat in values.items()}
        if not sum(index.numel() for name, index in where.items() if wanted in (None, name)):
            where = {name: torch.arange(flat.numel()) for name, flat in values.items()}  # there is none: any will do
        layer, nth = draw({name: index.numel() for name, index in where.items()}, wanted, self._fault.seed, "layer")
        return layer, int(where[layer][nth])

    def _overwrite(self, piece: Piece, start: int, stop: int, step: torch.Tensor) -> None:
        target = piece.flat()[start:stop]
        if self._fault.how == "nan":
            target.fill_(math.nan)
        elif self._fault.how == "finite":
            target.add_(torch.where(target < 0, -step, step).to(target.dtype))  # away from zero: nothing cancels
        elif self._fault.how == "unreduced" and piece.name in self.local:
            target.copy_(piece.flat_of(self.local[piece.name])[start:stop])
        elif self._fault.how == "stale":  # without a step before (a restart just here): what an empty buffer holds
            before = self._before.get(piece.name)
            target.zero_() if before is None else target.copy_(before[start:stop])
