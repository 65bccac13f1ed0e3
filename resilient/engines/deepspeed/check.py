"""The reduction check under DeepSpeed: what goes into each bucket against what the optimizer would use.

before: taken where the taps are, from the gradients of a bucket before anything is divided, cast or sent, and added up
over buckets and micro-steps. after: taken from what lies ready for the next step, so that everything between the two is
covered: scaling, casting, the collective, copying out of buckets, adding micro-steps up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist

from resilient.engines.base import CellRows
from resilient.engines.deepspeed.rows import Piece, Rows
from resilient.engines.deepspeed.stages import Stage
from resilient.signals import CheckPlan
from resilient.signals.record import CHECK_COLUMNS

_BEFORE, _SQ, _AFTER = range(3)


class ReductionCheck:
    """Sums of one engine's windows. Costs a pass over what is sent, one over what is received, and for every 1024
    parameters 13 bytes.

    plan: None with a single rank, which has nothing to compare; set it to None to measure the squares alone.
    """

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self._stage = stage
        self._layers = stage.layers
        named = stage.engine.module.named_parameters()
        self._map = Rows(stage.layers, {name: (p, *stage.extent(p)) for name, p in named}, device)
        self._rows = torch.zeros(3, self._map.count, dtype=torch.float32, device=device)  # this rank's, still scaled
        self._carried = torch.zeros(len(stage.layers.names), dtype=torch.float64, device=device)
        self._received = torch.zeros(0, dtype=torch.int64, device=device)  # rows this rank holds any element of
        self._scale = 1.0
        ways = stage.reduction_dtypes()
        self._unit = max(torch.finfo(dtype).eps / 2 for dtype in ways)
        # Below the smallest normal number of its dtype an element is rounded as if it were that large.
        smallest = max(torch.finfo(dtype).tiny for dtype in ways)
        self._floor = torch.tensor(stage.layers.sizes, dtype=torch.float64, device=device) * smallest**2
        world = stage.engine.dp_world_size
        receivers = tuple((r,) for r in range(world)) if stage.whole else (tuple(range(world)),)
        self.plan = CheckPlan(stage.layers.names, receivers, self._unit) if 1 < world == dist.get_world_size() else None

    def begin(self) -> None:
        """A window begins: forget the one before, NaN included."""
        self._rows.zero_()
        self._carried.zero_()

    @torch.no_grad()
    def sent(self, pieces: list[Piece]) -> None:
        """These gradients are about to be reduced."""
        if self.plan is None:
            index, lines = self._map.sums(pieces, signed=False, squares=True)
            self._rows[_SQ : _SQ + 1].index_add_(1, index, lines)
            return
        index, lines = self._map.sums(pieces, squares=True)
        self._rows[: _SQ + 1].index_add_(1, index, lines)

    @torch.no_grad()
    def carry(self) -> None:
        """A micro-step was added to those before it: that rounds the sum so far, however small the addition. The sums by
        row, squared, are on average its square, which is not to be had otherwise."""
        if self.plan is not None and torch.finfo(self._stage.reduction_dtypes()[-1]).eps / 2 == self._unit:
            self._carried += self._map.cells(self._rows[_BEFORE : _BEFORE + 1].square())[0]

    @torch.no_grad()
    def finish(self) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The window ended: squared norm of all that was sent, 0-dim float64, and `Taps.checks`. Both unscaled."""
        self._scale = self._stage.loss_scale()
        if self.plan is None:
            return self._map.cells(self._rows[_SQ : _SQ + 1]).sum() / self._scale**2, {}
        self._received, lines = self._map.sums(self._stage.received())
        self._rows[_AFTER].zero_().index_add_(0, self._received, lines[0])
        before, after = self._map.cells(self._rows[_BEFORE::_AFTER] * self._map.signs)
        sq = self._map.cells(self._rows[_SQ : _SQ + 1])[0]
        mean = self._stage.mean_factor()
        values = (
            before * (mean / self._scale),
            after / self._scale,
            ((sq + self._carried) * mean**2 + self._floor) / self._scale**2,
        )
        return sq.sum() / self._scale**2, dict(zip(CHECK_COLUMNS, values, strict=True))

    @torch.no_grad()
    def rows_of(self, cell: int) -> CellRows:
        """One cell by rows, of the window that `finish` was called for last."""
        first, last = self._map.spans[cell]
        rows = self._rows[:, first:last].double()
        held = torch.zeros(self._map.count, dtype=torch.bool, device=self._rows.device)
        held[self._received] = True
        return CellRows(
            name=self._layers.names[cell],
            before=rows[_BEFORE] * (self._stage.mean_factor() / self._scale),
            after=rows[_AFTER] / self._scale,
            held=held[first:last],
            places=partial(_place, self._map, first),
        )


def _place(rows: Rows, first: int, row: int) -> str:
    return rows.place(first + row)
