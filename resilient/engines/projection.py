"""The fixed vector of signs behind the reduction check, and its product with any slice of a bucket.

A bucket of n elements is seen as rows of 1024. Element i has the sign u[i mod 1024] * v[i div 1024] with pairwise
independent random signs u and v, so nothing as large as the bucket is stored, |r.d| = |d| for a change d of one element,
and E (r.d)^2 = ||d||^2 for any d (Alon, Matias, Szegedy 1999). The sums by row cost nothing extra and are kept for a
window: when a check fails they say which rows are off.

Slices: a rank that holds elements [start, start + m) of a bucket gets sums of the same rows, without the elements that
others hold; added up over the ranks they are the sums of the whole bucket.
"""

from __future__ import annotations

import math

import torch

ROW = 1024
_FEW_PARTS = 16  # beyond it a copy is cheaper than a call for each
_PIECE = 1 << 20  # elements that are converted to fp32 at a time, where the tensor is of another dtype


class Signs:
    """Signs of buckets, made on the device, the same on all ranks. bucket: any number that names it, alike on all ranks."""

    def __init__(self, device: torch.device, seed: int = 0x5EED) -> None:
        self._seed = seed
        self._u = {device: self._draw(seed, ROW).to(device)}
        self._v: dict[int, torch.Tensor] = {}

    def _draw(self, seed: int, n: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)  # drawn on the CPU: the same for every device
        return torch.randint(0, 2, (n,), generator=generator).to(torch.float32) * 2 - 1

    @torch.no_grad()
    def rows(self, tensor: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, int]:
        """(k,) float32 sums of u * element over each row that the slice touches, and the number of the first of them.

        tensor: flat, the elements [start, start + tensor.numel()) of a bucket, any float dtype. No host sync."""
        flat = tensor.detach().reshape(-1)
        if torch.is_autocast_enabled(flat.device.type):
            with torch.autocast(flat.device.type, enabled=False):  # or the products are taken in bf16
                return self.rows(flat, start)
        u = self._signs_in_row(flat.device)
        n, first, shift = flat.numel(), start // ROW, start % ROW
        if n == 0:
            return torch.zeros(0, dtype=torch.float32, device=flat.device), first
        if shift == 0 and n % ROW == 0 and flat.dtype is torch.float32:
            return torch.mv(flat.view(-1, ROW), u), first
        sums = []
        head = min(ROW - shift, n) if shift else 0
        if head:
            sums.append((flat[:head].float() @ u[shift : shift + head]).reshape(1))
        whole = (n - head) // ROW * ROW
        step = whole if flat.dtype is torch.float32 else _PIECE
        for at in range(head, head + whole, max(step, 1)):
            piece = flat[at : min(at + step, head + whole)]
            sums.append(torch.mv(piece.view(-1, ROW).float(), u))
        rest = n - head - whole
        if rest:
            sums.append((flat[n - rest :].float() @ u[:rest]).reshape(1))
        return torch.cat(sums) if len(sums) > 1 else sums[0], first

    @torch.no_grad()
    def parts(self, tensor: torch.Tensor, parts: int) -> torch.Tensor:
        """(parts * k,) float32 sums by row of a whole bucket that is made of equal parts, each of which begins a row of its
        own. No host sync."""
        if parts == 1:
            return self.rows(tensor)[0]
        if torch.is_autocast_enabled(tensor.device.type):
            with torch.autocast(tensor.device.type, enabled=False):
                return self.parts(tensor, parts)
        pieces = tensor.detach().reshape(parts, -1)
        if parts <= _FEW_PARTS:
            return torch.cat([self.rows(piece)[0] for piece in pieces])
        part, u = pieces.shape[1], self._signs_in_row(tensor.device)
        whole = part // ROW * ROW
        sums = [torch.matmul(pieces[:, :whole].unflatten(1, (-1, ROW)).float(), u)] if whole else []
        if whole < part:
            sums.append((pieces[:, whole:].float() @ u[: part - whole])[:, None])
        return torch.cat(sums, dim=1).reshape(-1)

    def _signs_in_row(self, device: torch.device) -> torch.Tensor:
        u = self._u.get(device)
        if u is None:
            u = self._u[device] = next(iter(self._u.values())).to(device)
        return u

    def of_rows(self, bucket: int, count: int) -> torch.Tensor:
        """(count,) float32 on the CPU: v, the signs of the bucket's first `count` rows."""
        known = self._v.get(bucket)
        if known is None or len(known) < count:
            # a longer draw starts with the shorter one: ranks that hold different slices agree
            seed = self._seed * 1_000_003 + bucket + 1
            known = self._v[bucket] = self._draw(seed, 2 ** math.ceil(math.log2(max(count, 64))))
        return known[:count]
