"""Sums of squares against float64, where a flat float32 norm is not good enough."""

from __future__ import annotations

import math

import pytest
import torch

from resilient.engines.norms import sum_of_squares

CPU = torch.device("cpu")


def relative_error(tensors: list[torch.Tensor]) -> float:
    exact = sum(float(t.detach().double().square().sum()) for t in tensors)
    return abs(math.sqrt(float(sum_of_squares(tensors, CPU))) / math.sqrt(exact) - 1)


@pytest.mark.parametrize("numel", [1, 7, 1023, 1024, 8191, 8192, 8193, 100_000, 4_000_000])
def test_norm_is_accurate_at_every_size(numel: int) -> None:
    """BR-45: well under 1e-5, also where float32 over a flat tensor is off by 1e-4 and more."""
    g = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 10
    assert relative_error([g * torch.linspace(0, 1, numel) ** 4 + 1e-3]) < 3e-7


def test_mixed_shapes_dtypes_and_layouts() -> None:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = [
        rand(3, 5),
        rand(200, 100).t(),
        rand(70_000).bfloat16(),
        rand(40).half(),
        rand(9, 9).double(),
        rand(0, 4),
    ]
    tensors += [rand(30_000).double()[::2], torch.tensor(2.0)]
    assert relative_error(tensors) < 1e-6
    assert float(sum_of_squares([], CPU)) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("numel", [10, 50_000])
def test_one_bad_element_shows(numel: int, bad: float) -> None:
    g = torch.ones(numel)
    g[numel // 2] = bad
    assert not math.isfinite(float(sum_of_squares([torch.ones(3), g], CPU)))


def test_large_norms_do_not_overflow() -> None:
    """1e17 per element: the sum of squares would not fit into float32."""
    g = torch.full((50_000,), 1e17)
    assert float(sum_of_squares([g, g[:10]], CPU)) == pytest.approx(50_010e34, rel=1e-6)
