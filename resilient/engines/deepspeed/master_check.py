"""The proof that the weights a forward uses are those the next step starts from (BR-08).

The optimizer steps masters and writes their cast over the weights. Where the two have come apart, by a load of the weights
alone for example, the first step trains on something else than what was loaded, and nobody says so.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from resilient.engines.deepspeed.pieces import Span, describe
from resilient.engines.deepspeed.stages import Stage

_SHOWN = 4  # parameters that are named
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def mismatched_weights(stage: Stage) -> list[str]:
    """A line for each parameter of which this rank holds weights that are not, bit for bit, the cast of the masters that it
    holds of them; the fifth and all after it are only counted. Under ZeRO 1 and 2, where every rank has all weights, its own
    partition is compared. Parameters that are not trained have no masters, and those kept in fp32 equal theirs.

    NaN equals NaN whatever its bits. Local; reads masters and weights once, on the device, and waits for it once."""
    pairs = [pair for pair in _pairs(stage) if pair[-1].numel()]
    if not pairs:
        return []
    found = [pair for pair, differs in zip(pairs, _differing(pairs), strict=True) if differs]
    lines = [line for pair in found if (line := _difference(*pair))]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more parameters"]
    return lines


def _pairs(stage: Stage) -> list[tuple[str, int, torch.Tensor, torch.Tensor]]:
    """(name, first element, weights, masters) of every range of a parameter that this rank has masters of; both flat."""
    described = describe(stage).spans
    named = list(stage.parameters.items())
    numbers = {name: number for number, (name, _) in enumerate(named)}
    pairs = []
    for master in stage.masters():
        if master.alias:
            continue
        if master.label in described:
            spans = [Span(*row) for row in described[master.label].tolist()]
        else:
            spans = [Span(numbers[master.label], 0, 0, master.tensor.numel())]
        flat = master.tensor.detach().reshape(-1)
        for number, first, start, size in spans:
            name, parameter = named[number]
            at = first - stage.holds_from(parameter)
            weights = stage.parameter(parameter).detach().reshape(-1)[at : at + size]
            pairs.append((name, first, weights, flat[start : start + size]))
    return pairs


def _differing(pairs: list[tuple[str, int, torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Of each pair. On a CPU a comparison that stores nothing takes a quarter of the time; on a device each would be waited for."""
    if all(weights.device.type == "cpu" for _, _, weights, _ in pairs):
        return [not torch.equal(*_as_bits(weights, masters)) for _, _, weights, masters in pairs]
    return torch.stack([_off(weights, masters).any() for _, _, weights, masters in pairs]).tolist()


def _as_bits(weights: torch.Tensor, masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, and the cast of the masters."""
    bits = _BITS[weights.element_size()]
    return weights.view(bits), masters.to(weights.dtype).view(bits)


def _off(weights: torch.Tensor, masters: torch.Tensor) -> torch.Tensor:
    """Where the bits are not those of the cast."""
    held, cast = _as_bits(weights, masters)
    return held != cast


def _difference(name: str, first: int, weights: torch.Tensor, masters: torch.Tensor) -> str:
    """Empty where only the bits of NaNs differ."""
    off = _off(weights, masters) & ~(weights.isnan() & masters.isnan())
    places = off.nonzero().reshape(-1)
    if not places.numel():
        return ""
    rank, at = dist.get_rank(), int(places[0])
    return (
        f"rank {rank}: the weights of {name} are not the cast of their masters: {places.numel()} of the {off.numel()} "
        f"elements held there differ, first element {first + at} ({weights[at].item():.9g}, its master "
        f"{masters[at].item():.9g})"
    )
