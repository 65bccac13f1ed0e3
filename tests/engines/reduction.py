"""Both sides of an engine's reduction check, brought together from all ranks as the coordinator does it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from resilient.engines.base import Engine, Taps
from resilient.signals import CheckPlan

WIRE = 8.0  # roundings of the dtype on the wire that a clean window may be off by: measured are up to 2.3
SUMS = 40.0  # roundings of fp32, in which the sums are taken: measured are up to 27, RMS 8


@dataclass(frozen=True)
class Compared:
    """One window of all ranks. off: (groups, cells) sum before less sum after. scale: (cells,) sqrt of the sum of sq."""

    plan: CheckPlan
    off: torch.Tensor
    scale: torch.Tensor

    @property
    def ratio(self) -> torch.Tensor:
        """(groups, cells) what is off, over what rounding may do; NaN where nothing was measured."""
        return self.off.abs() / ((WIRE * self.plan.unit + SUMS * 2.0**-24) * self.scale + 1e-300)

    def failed(self) -> list[tuple[int, int]]:
        """(group, cell) of all that do not agree."""
        return [(int(g), int(c)) for g, c in torch.nonzero(~(self.ratio < 1)).tolist()]


def compared(plan: CheckPlan | None, taps: Taps) -> Compared | None:
    """Collective. plan: as it was before `taps` were read. None if there was none, or nothing was measured."""
    if plan is None or not taps.checks:
        assert plan is not None or not taps.checks, "sums of which nobody knows what they are"
        return None
    names = ("check_before", "check_after", "check_sq")
    assert sorted(taps.checks) == sorted(names)
    mine = torch.stack([taps.checks[name] for name in names])
    assert mine.shape == (3, len(plan.names)), mine.shape
    assert mine.dtype == torch.float64
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    before, after, sq = torch.stack(every, dim=1)
    off = torch.stack([before.sum(0) - after[list(group)].sum(0) for group in plan.receivers])
    return Compared(plan, off, sq.sum(0).sqrt())


def off_by_row(engine: Engine, plan: CheckPlan, group: int, cell: int) -> list[tuple[str, torch.Tensor, list[str]]]:
    """Collective: for each bucket of a cell its name, (rows,) before less after, and the places of the rows that are
    off by more than a third of the largest."""
    found = []
    for bucket in engine.check_rows(cell):
        members = plan.receivers[group]
        mine = bucket.after if dist.get_rank() in members else torch.zeros_like(bucket.after)
        off = torch.stack((bucket.before, mine))
        dist.all_reduce(off)
        difference = off[0] - off[1]
        bad = torch.nonzero(difference.abs() > difference.abs().max() / 3).flatten().tolist()
        found.append((bucket.name, difference, [bucket.places(row) for row in bad]))
    return found
