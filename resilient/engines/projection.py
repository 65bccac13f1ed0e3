"""The fixed signs behind the reduction check, and the products of any slice of a bucket with them.

A bucket of n elements is seen as rows of 1024, a row as 8 parts of 128. Parts are multiplied with the same 128 random
signs u: 8 sums a row, and the bucket is not touched again. Of these sums come LANES = 8 products of the whole bucket,

    lane_k = sum over rows j and parts a of  v_k[j] * H[k, a] * (u . part a of row j)

with random signs v_k of the rows and the rows H[k] of an 8 x 8 Hadamard matrix. So the vector r_k behind a lane consists
of signs too: r_k.d is linear in a change d of the bucket, |r_k.d| = |d| for one element, and E (r_k.d)^2 = ||d||^2 for any d
(Alon, Matias, Szegedy, "The space complexity of approximating the frequency moments", 1999). A change that is spread over
many elements can cancel against one lane, against all 8 hardly: the v_k are independent, and of a change within one row,
where v_k says nothing, the orthogonal H[k] make 8 uncorrelated products. Only what is spread inside a single part looks
the same to all lanes.

Cost: that of one product per element, as without lanes; what follows works on a 128th of the size. The squares of the
elements are taken along while a piece is in the cache. Nothing as large as a bucket is stored. The sums by part are kept for
a window: when a check fails they say which rows are off.

Slices: a rank that holds elements [start, start + m) of a bucket gets sums of the same rows, without the elements that
others hold; added up over the ranks they are the sums of the whole bucket.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from resilient.signals.checks import LANES

ROW = 1024
PARTS = LANES  # of a row; a Hadamard matrix is square
PART = ROW // PARTS
_FEW_PARTS = 16  # beyond it a copy is cheaper than a call for each
_PIECE = {"cpu": 1 << 18}  # elements looked at at a time: a megabyte in fp32 stays in the cache
_PIECE_ELSEWHERE = 1 << 24  # bounds the copies in fp32


class RowSums(NamedTuple):
    """Of the rows that a slice of a bucket touches: the number of the first; (k, PARTS) float32 sums of u * element over the
    parts of each; and (k,) float32 L2 of the slice's elements in each."""

    first: int
    sums: torch.Tensor
    norms: torch.Tensor


class Signs:
    """Signs of buckets, made on the device, the same on all ranks. bucket: any number that names it, alike on all ranks."""

    def __init__(self, device: torch.device, seed: int = 0x5EED) -> None:
        self._seed = seed
        self._device = device
        self._u = {device: self._draw(seed, PART).float().to(device)}
        self._v: dict[int, torch.Tensor] = {}
        self._hadamard = _hadamard().to(device)

    def _draw(self, seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)  # drawn on the CPU: the same for every device
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1

    @torch.no_grad()
    def rows(self, tensor: torch.Tensor, start: int = 0) -> RowSums:
        """tensor: flat, the elements [start, start + tensor.numel()) of a bucket, any float dtype. No host sync."""
        flat = tensor.detach().reshape(-1)
        if torch.is_autocast_enabled(flat.device.type):
            with torch.autocast(flat.device.type, enabled=False):  # or the products are taken in bf16
                return self.rows(flat, start)
        n, first, shift = flat.numel(), start // ROW, start % ROW
        head = min(ROW - shift, n) if shift else 0
        stop = head + (n - head) // ROW * ROW
        step = _PIECE.get(flat.device.type, _PIECE_ELSEWHERE)
        whole = [flat[at : min(at + step, stop)].view(-1, ROW).float() for at in range(head, stop, step)]
        ragged = [_filled(flat[:head], shift)] if head else []
        found = [self._of(rows) for rows in (*ragged, *whole)]
        if stop < n:
            found.append(self._of(_filled(flat[stop:], 0)))
        if len(found) == 1:
            return RowSums(first, *found[0])
        if not found:
            none = torch.zeros(0, PARTS, dtype=torch.float32, device=flat.device)
            return RowSums(first, none, none[:, 0])
        return RowSums(first, torch.cat([sums for sums, _ in found]), torch.cat([norms for _, norms in found]))

    @torch.no_grad()
    def parts(self, tensor: torch.Tensor, parts: int) -> RowSums:
        """Of a whole bucket that is made of equal parts, each of which begins a row of its own. No host sync."""
        pieces = tensor.detach().reshape(parts, -1)
        if parts == 1 or pieces.shape[1] % ROW == 0:
            return self.rows(tensor)
        if parts > _FEW_PARTS:
            return self.rows(torch.nn.functional.pad(pieces, (0, -pieces.shape[1] % ROW)))
        found = [self.rows(piece) for piece in pieces]
        return RowSums(0, torch.cat([rows.sums for rows in found]), torch.cat([rows.norms for rows in found]))

    @torch.no_grad()
    def lanes(self, sums: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
        """(n, LANES) float64: what each row adds to the lanes. sums: (n, PARTS). signs: (n, LANES), as `of_rows` has them."""
        return (sums.double() @ self._hadamard).mul_(signs)

    def _of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """rows: (k, ROW) float32. Its sums and norms."""
        u = self._u.get(rows.device)
        if u is None:
            u = self._u[rows.device] = next(iter(self._u.values())).to(rows.device)
        return torch.mv(rows.view(-1, PART), u).view(-1, PARTS), torch.linalg.vector_norm(rows, dim=1)

    def of_rows(self, bucket: int, count: int) -> torch.Tensor:
        """(count, LANES) int8 on the device: v_k, the signs of the bucket's first `count` rows."""
        known = self._v.get(bucket)
        if known is None or len(known) < count:
            # a longer draw starts with the shorter one: ranks that hold different slices agree
            seed = self._seed * 1_000_003 + bucket + 1
            rows = 2 ** math.ceil(math.log2(max(count, 64)))
            known = self._v[bucket] = self._draw(seed, rows, LANES).to(self._device)
        return known[:count]


def _filled(flat: torch.Tensor, lead: int) -> torch.Tensor:
    """(1, ROW) float32: `lead` zeros, the elements, zeros."""
    return torch.nn.functional.pad(flat.float(), (lead, ROW - lead - flat.numel())).view(1, ROW)


def _hadamard() -> torch.Tensor:
    """(PARTS, LANES) float64 of signs, symmetric, columns orthogonal; the first is all +1 (Sylvester's construction)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < PARTS:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
