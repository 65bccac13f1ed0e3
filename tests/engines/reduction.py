"""Both sides of an engine's reduction check, brought together from all ranks as the coordinator does it; and simulated
ranks, whose gradients are really added up in the dtype of the wire."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from resilient.detectors.reduction import ReductionCheck as Detector
from resilient.engines.base import Engine, Taps
from resilient.engines.projection import ROW, Signs
from resilient.signals import CheckPlan, Checks, Observation
from resilient.signals.checks import CHECK_COLUMNS

WIRE = 8.0  # roundings of the dtype on the wire that a clean window may be off by: measured are up to 2.3
SUMS = 40.0  # roundings of fp32, in which the sums are taken: measured are up to 27, RMS 8


@dataclass(frozen=True)
class Compared:
    """One window of all ranks. off: (groups, cells) sum before less sum after, on the first lane. scale: (cells,) sqrt of
    the sum of sq. failed_cells: those that the detector would tell, of no window but this."""

    plan: CheckPlan
    off: torch.Tensor
    scale: torch.Tensor
    failed_cells: tuple[int, ...]

    @property
    def ratio(self) -> torch.Tensor:
        """(groups, cells) what is off, over what rounding may do; NaN where nothing was measured."""
        return self.off.abs() / ((WIRE * self.plan.unit + SUMS * 2.0**-24) * self.scale + 1e-300)

    def failed(self) -> list[tuple[int, int]]:
        """(group, cell) of all that do not agree on the first lane. The detector sees the same cells fail, or more."""
        found = [(int(g), int(c)) for g, c in torch.nonzero(~(self.ratio < 1)).tolist()]
        finite = {c for _, c in found if bool(self.ratio[:, c].isfinite().all())}
        assert finite <= set(self.failed_cells), f"{found}, but the detector says {self.failed_cells}"
        return found


def compared(plan: CheckPlan | None, taps: Taps) -> Compared | None:
    """Collective. plan: as it was before `taps` were read. None if there was none, or nothing was measured."""
    if plan is None or not taps.checks:
        assert plan is not None or not taps.checks, "sums of which nobody knows what they are"
        return None
    assert sorted(taps.checks) == sorted(CHECK_COLUMNS)
    mine = torch.stack([taps.checks[name] for name in CHECK_COLUMNS])
    assert mine.shape == (len(CHECK_COLUMNS), len(plan.names)), mine.shape
    assert mine.dtype == torch.float64
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    columns = dict(zip(CHECK_COLUMNS, torch.stack(every, dim=1), strict=True))
    off = [columns["check_before"].sum(0) - columns["check_after"][list(group)].sum(0) for group in plan.receivers]
    checks = Checks.read(plan, {name: values.numpy() for name, values in columns.items()})
    failing = Detector().failed_cells(Observation(0, 0, {}, checks=checks))
    return Compared(plan, torch.stack(off), columns["check_sq"].sum(0).sqrt(), failing)


def off_by_row(engine: Engine, plan: CheckPlan, group: int, cell: int) -> list[tuple[str, torch.Tensor, list[str]]]:
    """Collective: for each bucket of a cell its name, (rows,) L2 of before less after, and the places of the rows that are
    off by more than a third of the largest."""
    found = []
    for bucket in engine.check_rows(cell):
        members = plan.receivers[group]
        mine = bucket.after if dist.get_rank() in members else torch.zeros_like(bucket.after)
        off = torch.stack((bucket.before, mine))
        dist.all_reduce(off)
        difference = (off[0] - off[1]).norm(dim=1)
        bad = torch.nonzero(difference > difference.max() / 3).flatten().tolist()
        found.append((bucket.name, difference, [bucket.places(row) for row in bad]))
    return found


@dataclass(frozen=True)
class Wire:
    """Simulated ranks that reduce buckets alike, each bucket a cell: rank by rank in the dtype, rounding every sum, then
    divided by the number of ranks. whole: every rank receives all of it, else its shard.

    common: share of the gradient that all ranks have. uneven: spread of the ranks' sizes, in log units. heavy: spread of the
    elements' sizes, in log units. first_row: how much larger the first row of a bucket is than the others."""

    dtype: torch.dtype
    world: int
    whole: bool = False
    size: int = 20_000
    common: float = 0.5
    uneven: float = 0.0
    heavy: float = 1.0
    first_row: float = 1.0
    accumulate: torch.dtype | None = None

    @property
    def plan(self) -> CheckPlan:
        ranks = tuple(range(self.world))
        receivers = tuple((r,) for r in ranks) if self.whole else (ranks,)
        return CheckPlan((), receivers, torch.finfo(self.dtype).eps / 2)

    def windows(self, count: int, cells: int, seed: int = 0) -> Iterator[tuple[Checks, torch.Tensor]]:
        """Clean windows, and (cells, size) what was received."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        ranks = (self.uneven * normal(self.world, 1)).exp()
        for _ in range(count):
            sizes = (self.heavy * normal(cells, 1, self.size)).exp()
            sizes[..., :ROW] *= self.first_row
            gradient = (
                self.common * normal(cells, 1, self.size) + ranks * normal(cells, self.world, self.size)
            ) * sizes
            sent = gradient.to(self.dtype)
            total = sent[:, 0].to(self.accumulate or self.dtype)
            for rank in range(1, self.world):
                total = total + sent[:, rank]
            received = (total / self.world).to(self.dtype).float()
            yield self._checks(sent.float() / self.world, received), received

    def _checks(self, sent: torch.Tensor, received: torch.Tensor) -> Checks:
        before, after = lanes(sent), lanes(received)  # (cells, world, LANES) and (cells, LANES)
        share = np.full((self.world, 1), 1.0) if self.whole else np.eye(self.world, 1)
        groups = self.world if self.whole else 1
        apart = before.transpose(1, 0, 2) - share[:, :, None] * after[None] / groups
        square, size = sent.double().square().sum(2).numpy().T, received.double().square().sum(1).numpy()
        plan = replace(self.plan, names=tuple(f"bucket {c}" for c in range(len(received))))
        one = np.full((self.world, 1), 1 / self.world)
        return Checks(plan, before[..., 0].T, share * after[:, 0], square, one * size, apart[..., 1:])


def lanes(values: torch.Tensor) -> np.ndarray:
    """(..., n) -> (..., LANES) float64 of a bucket of so many elements, in the arithmetic of the engines."""
    signs = Signs(torch.device("cpu"))
    filled = torch.nn.functional.pad(values, (0, -values.shape[-1] % ROW))
    rows = signs.rows(filled.reshape(-1)).sums
    count = filled.shape[-1] // ROW
    by_row = signs.lanes(rows, signs.of_rows(0, count).repeat(len(rows) // count, 1))
    return by_row.view(*values.shape[:-1], count, -1).sum(-2).numpy()


def changed(checks: Checks, change: torch.Tensor, ranks: Sequence[int]) -> Checks:
    """What these ranks hold is another by (cells, n) change."""
    groups, off = len(checks.plan.receivers), lanes(change)
    assert checks.lanes is not None
    after, apart = checks.after.copy(), checks.lanes.copy()
    for rank in ranks:
        after[rank] += off[:, 0]
        apart[rank] -= off[:, 1:] / groups
    return replace(checks, after=after, lanes=apart)


def drawn(kind: str, received: torch.Tensor, relative: float, generator: torch.Generator) -> torch.Tensor:
    """(cells, n) a change of relative size, placed anew in each cell: spread over the bucket, over a `shard` (a quarter),
    over a `row` of the check or over a `part` of one, of one `element`, or a shard of which the sign is `flipped`."""
    cells, n = received.shape
    change = torch.zeros_like(received)
    for cell in range(cells):
        width = {"spread": n, "shard": n // 4, "row": ROW, "part": 100, "element": 1, "flipped": n // 4}[kind]
        start = int(torch.randint(max((n - width) // width, 1), (1,), generator=generator)) * width if width < n else 0
        if kind == "part":
            start = start // ROW * ROW + 10
        where = slice(start, start + width)
        if kind == "flipped":
            change[cell, where] = -2 * received[cell, where]
            continue
        values = torch.randn(min(width, n), generator=generator)
        change[cell, where] = values * (relative * received[cell].norm() / values.norm())
    return change


def missed(wire: Wire, kind: str, relative: float, trials: int, ranks: Sequence[int] | None = None) -> float:
    """Share of such changes that the detector does not tell in the window in which they happen. ranks: which hold the
    changed result; None: rank 0, the only one whose part counts where each has a shard."""
    generator, cells = torch.Generator().manual_seed(11), 25
    unseen = 0
    for checks, received in wire.windows(math.ceil(trials / cells), cells, seed=3):
        change = drawn(kind, received, relative, generator)
        wrong = changed(checks, change, (0,) if ranks is None else ranks)
        unseen += cells - len(Detector().failed_cells(Observation(0, 0, {}, checks=wrong)))
    return unseen / (math.ceil(trials / cells) * cells)
