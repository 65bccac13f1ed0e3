"""Signed sums of gradients by rows of 1024 elements, indexed by parameter.

DeepSpeed's buckets do not map onto what a rank keeps: ZeRO 1 and 2 cut a bucket by owner, ZeRO 3 cuts every parameter by
rank, buckets fill in the order in which gradients arrive, and ZeRO 2 and 3 add micro-steps up. So an element's sign goes
by its place in its parameter. Every parameter begins a row of its own, where it pays even every rank's share of it; the rows of a layer group lie side by side, and a
cell of the reduction check is a layer group.

The order of work follows from cost: short pieces and the ragged ends of long ones are put together, padded with zeros to
whole rows, in one `cat`; long pieces are read where they lie.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from resilient.engines.layers import Layers
from resilient.engines.projection import PARTS, ROW, Signs

_LONG = 32 * ROW  # from here on a piece is worth calls of its own
_BLOCKS = 4096  # sums over a cell go through about as many partial sums
_MOST_PLANS = 4096
_AT_ONCE = 1 << 18  # rows whose lanes are taken in one call: bounds the float64 copies


class Piece(NamedTuple):
    """Elements of one parameter's gradient, in the parameter's order; `start` of its elements come before them."""

    tensor: torch.Tensor
    parameter: torch.Tensor
    start: int = 0


class _Cut(NamedTuple):
    """Elements [start, stop) of a piece, between `lead` and `trail` zeros that fill up the rows."""

    piece: int
    start: int
    stop: int
    lead: int = 0
    trail: int = 0


class _Plan(NamedTuple):
    short: list[_Cut]
    long: list[_Cut]
    numbers: torch.Tensor  # (rows,) int64: which rows the sums are of, those of `short` first


class Rows:
    """Rows of all parameters of a module, and how they make up its layer groups; the same on all ranks.

    parameters: name -> (the parameter, its elements over all ranks, elements of a segment of it): each segment begins a
    row of its own. count: of rows, with gaps between groups.
    """

    def __init__(
        self, layers: Layers, parameters: Mapping[str, tuple[torch.Tensor, int, int]], device: torch.device
    ) -> None:
        order = sorted(parameters, key=layers.of.__getitem__)
        rows = {name: -(-size // segment) * -(-segment // ROW) for name, (_, size, segment) in parameters.items()}
        block = 2 ** max(0, math.ceil(math.log2(max(sum(rows.values()), 1) / _BLOCKS)))
        self._first: dict[int, tuple[int, int]] = {}  # id of a parameter -> its first row, elements of a segment
        self._names: list[tuple[int, str]] = []  # (first row, name), ascending
        self.spans: list[tuple[int, int]] = []  # of each layer group: [first row, last row + 1)
        at = 0
        for name in order:
            if layers.of[name] == len(self.spans):  # the next group starts a block of its own
                at = -(-at // block) * block
                self.spans.append((at, at))
            parameter, _, segment = parameters[name]
            self._first[id(parameter)] = (at, segment)
            self._names.append((at, name))
            at += rows[name]
            self.spans[-1] = (self.spans[-1][0], at)
        self.count = max(-(-at // block), 1) * block
        self._block = block
        blocks = [range(a // block, -(-b // block)) for a, b in self.spans]
        widest, none = max(map(len, blocks), default=0), self.count // block
        padded = [[*r, *[none] * (widest - len(r))] for r in blocks]
        self._members = torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(blocks), widest)
        self._signs = Signs(device)
        self._of_rows = self._signs.of_rows(0, self.count)
        self._device = device
        self._plans: dict[tuple[tuple[int, int, int], ...], _Plan] = {}
        self._zeros: dict[torch.dtype, torch.Tensor] = {}

    def place(self, row: int) -> str:
        """The parameter that a row belongs to."""
        return self._names[bisect.bisect_right(self._names, row, key=lambda entry: entry[0]) - 1][1]

    @torch.no_grad()
    def sums(self, pieces: Sequence[Piece], *, signed: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(n,) int64 numbers of the rows that the pieces touch, each once; (n, PARTS) float32 sums of sign x element over
        the parts of each row, empty if not signed; (n,) float32 sums of squares. NaN and Inf stay in their rows."""
        plan = self._plan(tuple((id(p.parameter), p.start, p.tensor.numel()) for p in pieces))
        flats = [p.tensor.detach().reshape(-1) for p in pieces]
        matrices = [flats[cut.piece][cut.start : cut.stop] for cut in plan.long]
        if plan.short:
            zeros = self._zeros_of(flats[plan.short[0].piece].dtype)
            together = []
            for piece, start, stop, lead, trail in plan.short:
                flat = flats[piece]
                if lead:
                    together.append(zeros[:lead])
                together.append(flat[start:stop] if stop - start < flat.numel() else flat)
                if trail:
                    together.append(zeros[:trail])
            matrices.insert(0, torch.cat(together).float())
        none = torch.zeros(0, dtype=torch.float32, device=self._device)
        if not signed:
            norms = [torch.linalg.vector_norm(m.view(-1, ROW), dim=1, dtype=torch.float32) for m in matrices]
            return plan.numbers, none.view(0, PARTS), torch.cat(norms).square() if norms else none
        found = [self._signs.rows(matrix) for matrix in matrices]
        if not found:
            return plan.numbers, none.view(0, PARTS), none
        return (
            plan.numbers,
            torch.cat([rows.sums for rows in found]),
            torch.cat([rows.norms for rows in found]).square_(),
        )

    @torch.no_grad()
    def lanes(self, sums: torch.Tensor) -> torch.Tensor:
        """(count, PARTS) sums by row -> (groups, LANES) float64 by layer group."""
        step = self._block * max(_AT_ONCE // self._block, 1)
        blocks = [
            self._blocks(self._signs.lanes(sums[at : at + step], self._of_rows[at : at + step]))
            for at in range(0, self.count, step)
        ]
        return self._together(torch.cat(blocks))

    def cells(self, rows: torch.Tensor) -> torch.Tensor:
        """(count,) of anything by row -> (groups,) float64 sums by layer group; always added in the same order."""
        return self._together(self._blocks(rows))

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (-1, self._block)).sum(1, dtype=torch.float64)

    def _together(self, blocks: torch.Tensor) -> torch.Tensor:
        return torch.cat((blocks, torch.zeros_like(blocks[:1])))[self._members].sum(1)

    def _plan(self, key: tuple[tuple[int, int, int], ...]) -> _Plan:
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._made(key)
        return plan

    def _made(self, key: tuple[tuple[int, int, int], ...]) -> _Plan:
        short: list[_Cut] = []
        long: list[_Cut] = []
        short_rows: list[int] = []
        long_rows: list[int] = []
        for piece, (parameter, start, length) in enumerate(key):
            first, segment = self._first[parameter]
            at = 0
            while at < length:  # one segment after another
                number, inside = divmod(start + at, segment)
                row, lead = first + number * -(-segment // ROW) + inside // ROW, inside % ROW
                stop = min(at + segment - inside, length)
                if stop - at >= _LONG:
                    if lead:
                        short.append(_Cut(piece, at, at + ROW - lead, lead))
                        short_rows.append(row)
                        at, row, lead = at + ROW - lead, row + 1, 0
                    whole = (stop - at) // ROW
                    long.append(_Cut(piece, at, at + whole * ROW))
                    long_rows.extend(range(row, row + whole))
                    at, row = at + whole * ROW, row + whole
                if at < stop:
                    trail = -(lead + stop - at) % ROW
                    short.append(_Cut(piece, at, stop, lead, trail))
                    short_rows.extend(range(row, row + (lead + stop - at + trail) // ROW))
                at = stop
        return _Plan(short, long, torch.tensor(short_rows + long_rows, dtype=torch.int64, device=self._device))

    def _zeros_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._zeros:
            self._zeros[dtype] = torch.zeros(ROW, dtype=dtype, device=self._device)
        return self._zeros[dtype]
