"""Does this machine multiply correctly, and how fast? Matrices of small whole numbers, whose product is known.

A sum of whole numbers is exact in floating point in any order as long as it stays within the mantissa, so any wrong bit
is the machine's. The operands are a block repeated over the whole matrix: the product is then the product of the blocks,
repeated, times the number of blocks in a row, and the block's product is computed in integers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

_BLOCK = 128
_SIDE = {"cpu": 256, "cuda": 4096}  # on a CPU short enough to fit between two interruptions, on a GPU to fill it
_REPEATS = 12


@dataclass(frozen=True)
class _Case:
    a: torch.Tensor
    b: torch.Tensor
    product: torch.Tensor


class MatmulTest:
    """fp32, and bf16 on CUDA. Touches no random stream of the training."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times = _SIDE[device.type] // _BLOCK
        self._out: dict[torch.dtype, torch.Tensor] = {}
        # Sums stay below 2**24: 4096 x 8 x 8. The first is the one that is timed.
        self._cases = [self._case(torch.float32, seed, nonzero=_BLOCK, largest=8) for seed in (1, 2)]
        if device.type == "cuda":  # bf16 has 8 bits, also where partial sums are kept in it: 32 x 8 products of +-1
            self._cases += [self._case(torch.bfloat16, seed, nonzero=8, largest=1) for seed in (3, 4)]

    def run(self) -> tuple[float, float, int]:
        """(fastest fp32 product in s, median in s, elements of all products that were wrong). Waits for the device."""
        spent = []
        wrong = 0
        for repeat in range(_REPEATS):
            for number, case in enumerate(self._cases):
                out, seconds = self._multiply(case)
                wrong += int(torch.count_nonzero(out != case.product))
                if number == 0 and repeat > 0:  # the first call loads kernels and wakes the clocks
                    spent.append(seconds)
        return min(spent), float(np.median(spent)), wrong

    def _multiply(self, case: _Case) -> tuple[torch.Tensor, float]:
        out = self._out.setdefault(case.a.dtype, torch.empty_like(case.a))
        if self.device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            torch.mm(case.a, case.b, out=out)
            after.record()
            after.synchronize()
            return out, before.elapsed_time(after) / 1e3
        began = time.perf_counter()
        torch.mm(case.a, case.b, out=out)
        return out, time.perf_counter() - began

    def _case(self, dtype: torch.dtype, seed: int, *, nonzero: int, largest: int) -> _Case:
        """nonzero: in each row of a block of `a`. largest: absolute value."""
        random = np.random.Generator(np.random.Philox(seed))
        a, b = random.integers(-largest, largest, (2, _BLOCK, _BLOCK), endpoint=True)
        a[random.permuted(np.tile(np.arange(_BLOCK), (_BLOCK, 1)), axis=1) >= nonzero] = 0
        return _Case(*(self._repeated(block, dtype) for block in (a, b, self.times * (a @ b))))

    def _repeated(self, block: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(block).to(self.device, dtype).repeat(self.times, self.times)
