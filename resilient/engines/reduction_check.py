"""The reduction check of one engine: what went into each gradient bucket against what came out of it (C2, S19).

    begin_window()
    sent(bucket, flat, square, divisor)           as the bucket goes into the collective
    received(bucket, layout, pieces)              from the gradients that the optimizer will use, for every bucket
    finish() -> Taps.checks                       the sums, of the plan as it was before this window
    rows(cell)                                    a second look, until the next begin_window()

All ranks call these for the same buckets, whose content lies at the same positions on all of them; that is what a
collective needs anyway. Nothing is copied to the host and no rank waits for another. Between `sent` and `received` the
gradient may take any linear way: divided before or after, in another dtype, in two collectives (HSDP).

Cost: one pass over a bucket on the way in and one on the way out, a few small operations each. The rows' sums (36 bytes for
1024 elements) are kept until the next window.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from resilient.engines.base import CellRows
from resilient.engines.projection import PARTS, ROW, RowSums, Signs
from resilient.signals import CheckPlan
from resilient.signals.checks import LANE_COLUMNS, LANES, MOST_CELLS

Piece = tuple[torch.Tensor, int]
"""A slice of a bucket: its elements in the bucket's order, flat, and the position of the first one."""

_SHOWN = 3  # parameters named in a place
_ALONE = {"cpu": 1 << 18}  # elements from which a piece is not copied to join its neighbours
_ALONE_ELSEWHERE = 1 << 20  # a launch costs more there, a copy less
_FOLDS = 32  # kept: a window is nearly always cut like the one before
_AT_ONCE = 1 << 18  # rows whose lanes are taken in one call: bounds the float64 copies


@dataclass(frozen=True)
class BucketLayout:
    """What lies where in a bucket, the same on every rank.

    name: of the bucket, for a person; a change of it changes the plan. size: elements, padding included; padding is zero
    on all ranks. spans: (start, stop, parameter) in rising order. shards: the bucket is as many equal parts one behind
    the other, each with a part of each parameter; the spans are those of the first. Every part begins a row of its own, so
    that no row belongs to two ranks.
    """

    name: str
    size: int
    spans: tuple[tuple[int, int, str], ...]
    shards: int = 1

    @property
    def rows(self) -> int:
        return self.shards * -(-self.size // self.shards // ROW)

    def aligned(self, start: int) -> int:
        """Where an element would be if every part were filled up to whole rows."""
        part = self.size // self.shards
        return start // part * (-(-part // ROW) * ROW) + start % part if self.size else 0

    def place(self, row: int) -> str:
        """The parameters with elements in this row, as `a`, `a, b` or `a .. z`."""
        part = self.size // self.shards
        start = row % -(-part // ROW) * ROW
        stop = min(start + ROW, part)
        first = max(bisect_right(self.spans, start, key=lambda span: span[0]) - 1, 0)
        beyond = bisect_left(self.spans, stop, key=lambda span: span[0])
        found = [span[2] for span in self.spans[first:beyond] if span[1] > start]
        return ", ".join(found) if len(found) <= _SHOWN else f"{found[0]} .. {found[-1]}"


class _Slice(NamedTuple):
    """What is known of a slice of a bucket: its rows, and what they are still to be divided by once they are added up."""

    bucket: int
    rows: RowSums
    divisor: float


class ReductionCheck:
    """receivers: as in CheckPlan. dtype: of the wire, where it is another than that of what is sent and received.

    plan: of the windows that finish from now on; None before the first one has. Which cell a bucket belongs to is
    decided by the windows before: sums ride in a row whose width all ranks agreed on. Whatever is new in a window
    counts from the next one on. A bucket that is not sent in a window adds nothing to its cell.
    """

    def __init__(
        self, device: torch.device, receivers: tuple[tuple[int, ...], ...], dtype: torch.dtype | None = None
    ) -> None:
        self.plan: CheckPlan | None = None
        self._device = device
        self._receivers = receivers
        self._signs = Signs(device)
        self._names: dict[int, str] = {}  # bucket -> its name, of all buckets that were ever seen
        self._cells: tuple[tuple[int, ...], ...] = ()  # buckets of each cell of the plan
        self._unit = 2.0**-24  # the sums are taken in fp32: no finer
        self._smallest = 0.0  # normal number of the dtypes seen
        if dtype is not None:
            self._see(dtype)
        self._folds: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        self._room = Room()
        self.begin_window()

    def begin_window(self) -> None:
        """Forget the last window, finished or not."""
        self._sent: list[_Slice] = []
        self._received: list[_Slice] = []
        self._sizes: dict[int, int] = {}
        self._layouts: dict[int, BucketLayout] = {}
        self._unclear: set[int] = set()
        self._window_cells: tuple[tuple[int, ...], ...] = ()

    def sent(
        self, bucket: int, flat: torch.Tensor, divisor: float, *, whole: bool = False, shards: int = 1
    ) -> torch.Tensor:
        """The sum of squares of `flat`, 0-dim float64.

        bucket: >= 0, alike on all ranks. flat: all of it, as it goes into the collective; read, not kept. divisor:
        flat / divisor is this rank's contribution to the mean, unscaled. whole: what the window has sent of this bucket
        before is in it once more (else it adds up). shards: as in the bucket's layout.

        On an accelerator the current stream must be one that `flat` is ready on."""
        if whole and bucket in self._sizes:
            del self._sizes[bucket]
            self._sent = [piece for piece in self._sent if piece.bucket != bucket]
        if self._sizes.setdefault(bucket, flat.numel()) != flat.numel():
            self._unclear.add(bucket)
        self._see(flat.dtype)
        rows = self._signs.parts(flat, shards)
        self._sent.append(_Slice(bucket, rows, divisor))
        return rows.norms.double().square().sum()

    def received(self, bucket: int, layout: BucketLayout | None, pieces: Sequence[Piece], divisor: float = 1.0) -> None:
        """Once for each bucket that was sent. pieces: what this rank holds of the reduced gradient, not overlapping, in
        any order; a parameter without a gradient has none. divisor: piece / divisor is the mean, unscaled.
        layout None: what lies where is not known in this window, and nothing is measured of the bucket."""
        if layout is not None:
            self._layouts[bucket] = layout
        if layout is None or self._sizes.get(bucket, layout.size) != layout.size:
            self._unclear.add(bucket)
            return
        for flat, start in joined([(flat, layout.aligned(start)) for flat, start in pieces], self._room):
            self._see(flat.dtype)
            first, sums, norms = self._signs.rows(flat, start)
            rows = RowSums(first, sums.to(self._device), norms.to(self._device))
            self._received.append(_Slice(bucket, rows, divisor))

    def finish(self) -> dict[str, torch.Tensor]:
        """CHECK_COLUMNS name -> (cells,) float64 of this window, by the plan as it was when this is called; empty
        without one. Then `plan` is brought up to date."""
        checks = {}
        self._window_cells = self._cells
        if self._cells:
            (before, square), (after, size) = self._sums(self._sent), self._sums(self._received)
            replicas = len(self._receivers)
            apart = before - after / replicas
            checks = {
                "check_before": before[:, 0],
                "check_after": after[:, 0],
                "check_sq": square + self._floor(),
                "check_size": size / replicas,
                **dict(zip(LANE_COLUMNS, apart[:, 1:].unbind(1), strict=True)),
            }
            unclear = [not self._unclear.isdisjoint(cell) for cell in self._cells]
            if any(unclear):
                mask = torch.tensor(unclear, device=self._device)
                checks = {name: sums.masked_fill(mask, torch.nan) for name, sums in checks.items()}
        self._replan()
        return checks

    def rows(self, cell: int) -> list[CellRows]:
        """The buckets of a cell of the last `finish()`, by rows; without those that were not sent or not measured."""
        found = []
        for bucket in self._window_cells[cell]:
            layout = self._layouts.get(bucket)
            if layout is not None and bucket in self._sizes and bucket not in self._unclear:
                before, _ = self._by_row(layout, [piece for piece in self._sent if piece.bucket == bucket])
                after, held = self._by_row(layout, [piece for piece in self._received if piece.bucket == bucket])
                found.append(CellRows(layout.name, before, after, held, layout.place))
        return found

    def _see(self, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        self._unit, self._smallest = max(self._unit, info.eps / 2), max(self._smallest, info.tiny)

    def _replan(self) -> None:
        named = {bucket: layout.name for bucket, layout in self._layouts.items()}
        if self.plan is not None and self.plan.unit == self._unit and named.items() <= self._names.items():
            return
        self._names.update(named)
        buckets = sorted(self._names)
        each = max(-(-len(buckets) // MOST_CELLS), 1)
        self._cells = tuple(tuple(buckets[i : i + each]) for i in range(0, len(buckets), each))
        ends = [(self._names[cell[0]], self._names[cell[-1]]) for cell in self._cells]
        names = tuple(first if first == last else f"{first} to {last}" for first, last in ends)
        self.plan = CheckPlan(names, self._receivers, self._unit) if names else None

    @torch.no_grad()
    def _by_row(self, layout: BucketLayout, slices: Iterable[_Slice]) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, PARTS) float64 sums and (rows,) bool: rows with any element in these slices."""
        count = layout.rows
        sums = torch.zeros(count, PARTS, dtype=torch.float64, device=self._device)
        held = torch.zeros(count, dtype=torch.bool, device=self._device)
        for piece in slices:
            first, by_part, _ = piece.rows
            where = slice(first, first + len(by_part))
            sums[where] += by_part.double() / piece.divisor
            held[where] = True
        return sums, held

    @torch.no_grad()
    def _sums(self, slices: Sequence[_Slice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each cell's slices (cells, LANES) float64 products, and (cells,) float64 squared L2. Always added in the same
        order; buckets that are new in this window are left out."""
        if not slices:
            none = torch.zeros(len(self._cells), LANES + 1, dtype=torch.float64, device=self._device)
            return none[:, 1:], none[:, 0]
        groups: list[list[_Slice]] = []
        room = 0
        for piece in slices:
            if room < len(piece.rows.norms) or not groups:
                groups.append([])
                room = _AT_ONCE
            groups[-1].append(piece)
            room -= len(piece.rows.norms)
        by_slice = torch.cat([self._by_slice(group) for group in groups])

        def made() -> tuple[torch.Tensor, ...]:
            members = [[i for i, piece in enumerate(slices) if piece.bucket in cell] for cell in self._cells]
            order = [i for cell in members for i in cell]
            divisors = [(slices[i].divisor ** 2, *[slices[i].divisor] * LANES) for i in order]
            return (
                torch.tensor(order, dtype=torch.int64, device=self._device),
                torch.tensor(divisors, dtype=torch.float64, device=self._device).view(-1, LANES + 1),
                self._lengths([len(cell) for cell in members]),
            )

        order, divisors, lengths = self._kept((self._cells, *((p.bucket, p.divisor) for p in slices)), made)
        by_cell = torch.segment_reduce(by_slice[order] / divisors, "sum", lengths=lengths, axis=0, unsafe=True)
        return by_cell[:, 1:], by_cell[:, 0]

    def _by_slice(self, slices: Sequence[_Slice]) -> torch.Tensor:
        """(slices, 1 + LANES) float64: squared L2 and products, still to be divided."""

        def made() -> tuple[torch.Tensor, ...]:
            of_bucket = [self._signs.of_rows(b, r.first + len(r.norms))[r.first :] for b, r, _ in slices]
            return torch.cat(of_bucket), self._lengths([len(rows.norms) for _, rows, _ in slices])

        signs, lengths = self._kept(tuple((b, r.first, len(r.norms)) for b, r, _ in slices), made)
        products = self._signs.lanes(torch.cat([piece.rows.sums for piece in slices]), signs)
        square = torch.cat([piece.rows.norms for piece in slices]).double().square_()
        by_row = torch.cat((square[:, None], products), 1)
        return torch.segment_reduce(
            by_row, "sum", lengths=lengths, axis=0, unsafe=True
        )  # safe: would read lengths back

    def _floor(self) -> torch.Tensor:
        """(cells,) below the smallest normal number of its dtype an element is rounded as if it were that large; with
        fp16 on the wire whole layers can be."""

        def made() -> tuple[torch.Tensor, ...]:
            sizes = [float(sum(self._sizes.get(bucket, 0) for bucket in cell)) for cell in self._cells]
            return (torch.tensor(sizes, dtype=torch.float64, device=self._device) * self._smallest**2,)

        return self._kept((self._smallest, self._cells, tuple(self._sizes.items())), made)[0]

    def _kept(self, key: Hashable, made: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """What was made for this key before."""
        if key not in self._folds:
            if len(self._folds) > _FOLDS:
                self._folds.clear()
            self._folds[key] = made()
        return self._folds[key]

    def _lengths(self, counts: Sequence[int]) -> torch.Tensor:
        return torch.tensor(counts, dtype=torch.int64, device=self._device)


class Room:
    """Memory that short pieces are copied to, over and over the same on a CPU: fresh pages cost ten times the copy, and what
    has just been copied is still in the cache. An accelerator's allocator has memory at hand."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, torch.Tensor] = {}

    @torch.no_grad()
    def copied(self, short: Sequence[Piece]) -> Piece:
        """One piece of neighbours, until the next call."""
        if len(short) == 1:
            return short[0]
        flats = [flat for flat, _ in short]
        first = flats[0]
        if first.device.type != "cpu":
            return torch.cat(flats), short[0][1]
        size = sum(flat.numel() for flat in flats)
        kept = self._kept.get(first.dtype)
        if kept is None or kept.numel() < size:
            kept = self._kept[first.dtype] = torch.empty(size, dtype=first.dtype)
        return torch.cat(flats, out=kept[:size]), short[0][1]


def joined(pieces: Sequence[Piece], room: Room) -> Iterator[Piece]:
    """The same elements in fewer pieces: neighbours in the bucket that are neighbours in memory as they are, of long
    pieces the whole rows as they are, all else as copies of what lies between those. Empty ones are left out. A copy is good
    until the next piece is asked for."""
    runs: list[Piece] = []
    for flat, start in sorted((p for p in pieces if p[0].numel()), key=lambda piece: piece[1]):
        flat = flat.detach()
        if runs and _is_next(runs[-1], flat, start):
            before, first = runs.pop()
            flat, start = before.as_strided((start - first + flat.numel(),), (1,)), first
        runs.append((flat, start))
    if len(runs) == 1:
        yield runs[0]
        return
    short: list[Piece] = []
    gathered = 0
    for flat, start in runs:
        alone = _ALONE.get(flat.device.type, _ALONE_ELSEWHERE)
        if short and (gathered >= alone or not _follows(short[-1], (flat, start))):
            yield room.copied(short)
            short, gathered = [], 0
        if flat.numel() < alone:
            short.append((flat, start))
            gathered += flat.numel()
            continue
        head = -start % ROW
        stop = head + (flat.numel() - head) // ROW * ROW
        if head:
            short.append((flat[:head], start))
        if short:
            yield room.copied(short)
        yield flat[head:stop], start + head
        short = [(flat[stop:], start + stop)] if stop < flat.numel() else []
        gathered = flat.numel() - stop
    if short:
        yield room.copied(short)


def _follows(before: Piece, piece: Piece) -> bool:
    return (
        before[1] + before[0].numel() == piece[1]
        and before[0].dtype is piece[0].dtype
        and before[0].device == piece[0].device
    )


def _is_next(before: Piece, flat: torch.Tensor, start: int) -> bool:
    """One allocation holds both, one behind the other."""
    return (
        _follows(before, (flat, start))
        and before[0].data_ptr() + before[0].numel() * before[0].element_size() == flat.data_ptr()
        and before[0].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    )
