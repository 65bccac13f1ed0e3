"""The second pass of a failed reduction check: which rank received something else, in which bucket, and where in it.

The sums by row of 1024 elements, eight a row, were kept while the window ran, so nothing is reduced anew: what all ranks sent is added
up row by row, and each rank holds it against what it has. Collective: all ranks come here for the same cells, from the same
table. Rare, so its cost (1/64 of a cell's gradients in bytes, and one small exchange) does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from resilient.coordinator.exchange import Exchange
from resilient.detectors.reduction import rounding
from resilient.engines.base import CellRows, Engine
from resilient.signals import CheckPlan, Located

_SIGMAS = 6.0  # of healthy rounding, beyond which a row is off: far below a fault that a whole cell has shown
_MOST_CELLS = 4  # that are looked into; a fault that hits more of them is told by these


def localise(exchange: Exchange, engine: Engine, plan: CheckPlan, cells: Sequence[int]) -> list[Located]:
    """Every rank that is off in one of these cells, with the place; the same list on all ranks. Call at the gate, before
    the gradients are used or dropped. Raises ExchangeFailed.

    A row that two ranks of one receiver share is off for both of them: a rank that is off in shared rows only is left out,
    if another one of its receiver is off in a row of its own."""
    found: list[tuple[Located, bool]] = []
    for cell in list(cells)[:_MOST_CELLS]:
        for bucket in engine.check_rows(cell):
            found += _compare(exchange, plan, bucket)
    sure = {located.rank for located, alone in found if alone}
    others = {rank: sure.intersection(group) for group in plan.receivers for rank in group}
    return [located for located, _ in found if located.rank in sure or not others[located.rank]]


def _compare(exchange: Exchange, plan: CheckPlan, bucket: CellRows) -> list[tuple[Located, bool]]:
    """One bucket: ranks that are off, and whether in a row that no other rank of their receiver is off in."""
    sent = exchange.total(bucket.before.clone())
    # Rounding grows with what was summed: the ranks' own sums, not with their mean, which may nearly cancel.
    squares = exchange.total(bucket.before.square()).sum(dim=1)
    received = _received(exchange, plan, bucket)
    whole, mean = float(squares.sum()), float(sent.square().sum())
    sigma = float(rounding(plan.unit, exchange.world_size, np.array(whole), np.array(mean))) / max(whole, 1e-300) ** 0.5
    tolerance = _SIGMAS * sigma * torch.maximum(squares, squares.mean()).sqrt()
    apart = (received - sent).square().sum(dim=1).sqrt()
    off = bucket.held & ~(apart <= tolerance)  # a NaN is off
    difference = torch.where(off, apart, torch.zeros_like(apart))
    count = off.sum()
    worst = int(torch.nan_to_num(difference, nan=torch.inf).argmax()) if int(count) else 0
    held = sent[bucket.held].norm().clamp_min(1e-300)
    relative = float(difference.norm() / held) if int(count) else 0.0
    alone = (off & (_holders_off(exchange, plan, off) <= 1)).sum()
    mine = torch.tensor([float(count), relative, float(worst), float(alone)], dtype=torch.float64)
    table = exchange.gather(mine)
    ranks = np.flatnonzero(table[:, 0]).tolist()
    if not ranks:
        return []
    places = exchange.share([bucket.places(int(table[r, 2])) for r in ranks])
    return [
        (Located(r, bucket.name, place, int(table[r, 0]), float(table[r, 1])), table[r, 3] > 0)
        for r, place in zip(ranks, places, strict=True)
    ]


def _holders_off(exchange: Exchange, plan: CheckPlan, off: torch.Tensor) -> torch.Tensor:
    """(rows,) how many ranks of this rank's receiver are off in each row."""
    holders = off.to(torch.float64)
    for group in plan.receivers:
        if len(group) > 1:
            inside = exchange.rank in group
            whole = exchange.total(off.to(torch.float64) if inside else torch.zeros_like(holders))
            holders = whole if inside else holders
    return holders


def _received(exchange: Exchange, plan: CheckPlan, bucket: CellRows) -> torch.Tensor:
    """(rows, parts) sums of the whole reduced bucket, as this rank's receivers hold it together."""
    received = bucket.after
    for group in plan.receivers:
        if len(group) > 1:
            mine = bucket.after if exchange.rank in group else torch.zeros_like(bucket.after)
            whole = exchange.total(mine.clone())
            if exchange.rank in group:
                received = whole
    return received
