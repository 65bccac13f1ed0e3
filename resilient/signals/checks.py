"""What the reduction check compares, and what stands behind a suspicion once it has been looked into.

A gradient reduction is linear, so it can be checked while it happens: for a fixed vector r of signs that all ranks share,
r.(what a rank sends), summed over the ranks, equals r.(what is received). Both sides ride in the step's one all-reduce, for
LANES different r: a change that cancels against one of them hardly cancels against all. Of the first lane both sides are
told, which is what says who received what; of the others only the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from resilient.signals.digest import short_digest

MOST_CELLS = 64
LANES = 8
LANE_COLUMNS = tuple(f"check_lane{k}" for k in range(1, LANES))
CHECK_COLUMNS: tuple[str, ...] = ("check_before", "check_after", "check_sq", "check_size", *LANE_COLUMNS)
"""What the engines measure, one number per cell each, as `Checks` describes them; a sum over the ranks means something for
every one of them."""


@dataclass(frozen=True)
class CheckPlan:
    """What the cells of a reduction check are; the same on every rank.

    names: of the cells. A cell is one bucket of gradients, or several when there are more than MOST_CELLS.
    receivers: groups of global ranks. The `after` of a group's ranks together is one whole reduced gradient: one group
        per rank where each rank receives all of it, one group of all ranks where each receives its shard, one group per
        replica under HSDP. Every group must agree with what all ranks have sent.
    unit: unit roundoff of the dtype in which gradients are reduced (2**-24 for fp32, 2**-11 for fp16, 2**-8 for bf16).
    """

    names: tuple[str, ...]
    receivers: tuple[tuple[int, ...], ...]
    unit: float

    def digest(self) -> float:
        """48 bits, exact in a float64: equal on two ranks that check the same."""
        return short_digest(repr((self.names, self.receivers, self.unit)).encode())


@dataclass(frozen=True)
class Checks:
    """One attempt's sums, float64 (world, cells), NaN where a rank could not measure. Or (1, cells), the sums over all
    ranks, with one group of receivers in the plan, where single ranks are not known (sketch mode).

    before: r.(what the rank contributed to the mean): already divided by the number of ranks it is averaged over.
    after: r.(the rank's part of the reduced gradient as the optimizer will use it).
    sq: squared L2 of the rank's contribution, as in `before`: the scale for the tolerance.
    size: the rank's share of the squared L2 of the reduced gradient; the shares of all ranks sum to the whole. None: not
        known, then the largest is assumed that it can be.
    lanes: (world, cells, n) for n further vectors r_k: r_k.(contributed) - r_k.(received) / groups of receivers, which
        must sum to zero over the ranks. None: there are none.
    world: ranks behind the sums; 0: as many as rows.
    """

    plan: CheckPlan
    before: np.ndarray
    after: np.ndarray
    sq: np.ndarray
    size: np.ndarray | None = None
    lanes: np.ndarray | None = None
    world: int = 0

    @classmethod
    def read(cls, plan: CheckPlan, columns: Mapping[str, np.ndarray], world: int = 0) -> Checks:
        """columns: CHECK_COLUMNS name -> (rows, cells)."""
        before, after, sq, size = (columns[name] for name in CHECK_COLUMNS[:4])
        return cls(plan, before, after, sq, size, np.stack([columns[name] for name in LANE_COLUMNS], axis=-1), world)

    @property
    def ranks(self) -> int:
        return self.world or len(self.before)


@dataclass(frozen=True)
class Located:
    """A failed reduction check, looked at row by row (a row is 1024 elements of a bucket).

    rank: that received something else than was sent. cell: its name. place: the parameters there. rows: how many are off.
    relative: L2 of the difference over L2 of what should have been received, by the rows' sums.
    """

    rank: int
    cell: str
    place: str
    rows: int
    relative: float


@dataclass(frozen=True)
class Confirmation:
    """What running a suspect rank's window again, on the same weights, has shown. None: not established.

    same_again: the suspect rank got bit for bit the same gradient a second time.
    bad_again: its second run was off like the first.
    peer: the rank on another machine (or at least in another process) that ran the same batch; peer_bad: it was off there too.
    norms: local gradient norm of first run, second run and the peer's run, as far as they were made.
    note: what was not established and why, in words.
    """

    rank: int
    same_again: bool | None = None
    bad_again: bool | None = None
    peer: int | None = None
    peer_bad: bool | None = None
    other_host: bool = False
    norms: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class LinkReport:
    """What a probe of the links and machines has found. Ranks are global.

    slow_pairs: links clearly slower than the others. wrong_pairs: links that delivered other bits. slow_ranks,
    wrong_ranks: by the matmul self-test. measured: lines for a person.
    """

    slow_pairs: tuple[tuple[int, int], ...] = ()
    wrong_pairs: tuple[tuple[int, int], ...] = ()
    slow_ranks: tuple[int, ...] = ()
    wrong_ranks: tuple[int, ...] = ()
    measured: tuple[str, ...] = ()
