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
from resilient.engines.projection import PARTS
from resilient.signals import CheckPlan
from resilient.signals.checks import LANE_COLUMNS


class ReductionCheck:
    """Sums of one engine's windows. Costs a pass over what is sent, one over what is received, and for every 1024
    parameters 76 bytes.

    plan: None with a single rank, which has nothing to compare; set it to None to measure the squares alone.
    """

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self._stage = stage
        self._layers = stage.layers
        named = {name: (p, *stage.extent(p)) for name, p in stage.parameters.items()}
        self._map = Rows(stage.layers, named, device)
        count = self._map.count
        self._before = torch.zeros(count, PARTS, dtype=torch.float32, device=device)  # this rank's, still scaled
        self._after = torch.zeros(count, PARTS, dtype=torch.float32, device=device)
        self._squares = torch.zeros(count, dtype=torch.float32, device=device)
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
        self._before.zero_()
        self._squares.zero_()
        self._carried.zero_()

    @torch.no_grad()
    def sent(self, pieces: list[Piece]) -> None:
        """These gradients are about to be reduced."""
        checked = self.plan is not None
        index, sums, squares = self._map.sums(pieces, signed=checked)
        self._squares.index_add_(0, index, squares)
        if checked:
            self._before.index_add_(0, index, sums)

    @torch.no_grad()
    def carry(self) -> None:
        """A micro-step was added to those before it: that rounds the sum so far, however small the addition. The sums by
        row, squared, are on average its square, which is not to be had otherwise."""
        if self.plan is not None and torch.finfo(self._stage.reduction_dtypes()[-1]).eps / 2 == self._unit:
            self._carried += self._map.cells(self._before.square().sum(1))

    @torch.no_grad()
    def finish(self, size: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The window ended: squared norm of all that was sent, 0-dim float64, and `Taps.checks`. Both unscaled. size:
        (groups,) `Taps.layer_sq_share`."""
        self._scale = self._stage.loss_scale()
        sq = self._map.cells(self._squares)
        local_sq = sq.sum() / self._scale**2
        if self.plan is None:
            return local_sq, {}
        self._received, sums, _ = self._map.sums(self._stage.received())
        self._after.zero_().index_add_(0, self._received, sums)
        mean = self._stage.mean_factor()
        before = self._map.lanes(self._before) * (mean / self._scale)
        after = self._map.lanes(self._after) / self._scale
        apart = before - after / len(self.plan.receivers)
        checks = {
            "check_before": before[:, 0],
            "check_after": after[:, 0],
            "check_sq": ((sq + self._carried) * mean**2 + self._floor) / self._scale**2,
            "check_size": size,
            **dict(zip(LANE_COLUMNS, apart[:, 1:].unbind(1), strict=True)),
        }
        return local_sq, checks

    @torch.no_grad()
    def rows_of(self, cell: int) -> CellRows:
        """One cell by rows, of the window that `finish` was called for last."""
        first, last = self._map.spans[cell]
        held = torch.zeros(self._map.count, dtype=torch.bool, device=self._after.device)
        held[self._received] = True
        return CellRows(
            name=self._layers.names[cell],
            before=self._before[first:last].double() * (self._stage.mean_factor() / self._scale),
            after=self._after[first:last].double() / self._scale,
            held=held[first:last],
            places=partial(_place, self._map, first),
        )


def _place(rows: Rows, first: int, row: int) -> str:
    return rows.place(first + row)
