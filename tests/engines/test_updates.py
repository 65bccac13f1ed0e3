"""BR-07: the update norm of long tensors is an estimate from runs of their elements; how good, and that nothing short is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.engines.layers import Layers, Part
from resilient.engines.updates import Runs, UpdateTap

CPU = torch.device("cpu")


def measured(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float]]:
    """(squared update norm, mean of g^2/v) by group, of one step."""
    layers = Layers({name: p.numel() for name, p in parameters.items()}, CPU)
    tap = UpdateTap(optimizer, layers, {id(p): [Part(layers.of[name])] for name, p in parameters.items()})
    tap.watch(with_lag=True)
    with tap.around():
        optimizer.step()
    update = tap.take()
    assert update is not None and tap.take() is None
    return update.sq_share.tolist(), [] if update.lag_share is None else update.lag_share.tolist()


def stepped(*shapes: tuple[int, ...], columns: float = 1.0) -> dict[str, nn.Parameter]:
    """Parameters with gradients; `columns`: how much larger those of the first eighth of the columns are."""
    generator = torch.Generator().manual_seed(7)
    parameters = {}
    for i, shape in enumerate(shapes):
        p = parameters[f"p{i}.weight"] = nn.Parameter(torch.randn(shape, generator=generator))
        p.grad = torch.randn(shape, generator=generator)
        p.grad[..., : max(shape[-1] // 8, 1)] *= columns
    return parameters


def exact(parameters: dict[str, nn.Parameter], before: list[torch.Tensor]) -> list[float]:
    return [float((p.detach() - b).double().square().sum()) for p, b in zip(parameters.values(), before, strict=True)]


@pytest.mark.parametrize("shape", [(3, 5), (32, 1023), (181, 181), (64, 500), (0, 4)])
def test_short_tensors_are_measured_whole(shape: tuple[int, ...]):
    parameters = stepped(shape, (7,))
    before = [p.detach().clone() for p in parameters.values()]
    squares, _ = measured(parameters, torch.optim.SGD(parameters.values(), lr=0.1))
    assert squares == pytest.approx(exact(parameters, before), rel=1e-6)


@pytest.mark.parametrize("width", [192, 1024, 1600, 2048, 4096, 5120, 7168, 8192, 12288])
def test_long_tensors_are_estimated_whatever_their_width(width: int):
    """SGD with a few columns ten times as large: runs that fell on the same columns of each row would be off by far."""
    rows = (1 << 21) // width
    parameters = stepped((rows, width), columns=10.0)
    before = [p.detach().clone() for p in parameters.values()]
    squares, _ = measured(parameters, torch.optim.SGD(parameters.values(), lr=0.1))
    assert squares == pytest.approx(exact(parameters, before), rel=0.07)


def test_the_lag_of_adam_is_estimated_and_one_whole_tensor_is_not_touched():
    parameters = stepped((512, 1024), (64, 64))
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.0)
    optimizer.step()
    for p in parameters.values():
        assert p.grad is not None
        p.grad *= 2
    before = [p.detach().clone() for p in parameters.values()]
    squares, lags = measured(parameters, optimizer)
    assert squares == pytest.approx(exact(parameters, before), rel=0.01)
    for lag, p in zip(lags, parameters.values(), strict=True):
        assert p.grad is not None
        v = optimizer.state[p]["exp_avg_sq"] / (1 - 0.999 ** optimizer.state[p]["step"])
        assert lag == pytest.approx(float((p.grad.square() / v).mean()), rel=0.02)


def test_a_part_of_a_flat_tensor_is_its_own():
    """ZeRO steps flat partitions: a long part must neither see nor count what lies beside it."""
    flat = nn.Parameter(torch.zeros(300_000))
    flat.grad = torch.cat((torch.ones(100_000), torch.full((150_000,), 2.0), torch.full((50_000,), torch.nan)))
    layers = Layers({"a.w": 100_000, "b.w": 150_000, "c.w": 50_000}, CPU)
    parts = [Part(0, 0.5, 0, 100_000), Part(1, 1.0, 100_000, 250_000), Part(2, 1.0, 250_000, 300_000)]
    optimizer = torch.optim.SGD([flat], lr=1.0)
    tap = UpdateTap(optimizer, layers, {id(flat): parts})
    tap.watch(with_lag=False)
    with tap.around():
        optimizer.step()
    update = tap.take()
    assert update is not None and update.lag_share is None
    a, b, c = update.sq_share.tolist()
    assert (a, b) == (pytest.approx(0.5 * 100_000), pytest.approx(4 * 150_000)) and c != c


def test_runs_stay_inside_and_cover_the_length():
    for length in (1 << 15, 40_000, 123_457):
        tensor = torch.arange(length + 20)
        runs = Runs.of(tensor, Part(0, 1.0, 10, length + 10))
        seen = runs.cut(tensor)
        assert seen.shape == (runs.runs, 1024) and int(seen.min()) == 10 and int(seen.max()) < length + 10
        assert length - (int(seen.max()) - 10) <= 7603 and runs.scale == pytest.approx(length / seen.numel())
