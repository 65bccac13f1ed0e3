"""Digests of what several ranks hold alike, by layer group, so that a rank that has drifted away is named with the part
of the model where it began (C2, S19). On the device, without a host sync: a pass over the tensors, no copy of them.

A digest that a rank cannot give is 0 and the names are always the same, so that ranks compare like with like even when
one of them lost some of its state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from resilient.checkpoint.digest import joint_digest, tensor_digest, walk
from resilient.engines.buffers import local
from resilient.engines.layers import Layers, layer_groups

OPTIONS = "options"  # the entry of the optimizer's parameter groups: LR, betas, weight decay


def parameter_digests(parameters: Mapping[str, nn.Parameter], layers: Layers, device: torch.device) -> dict[str, Any]:
    """Layer group -> digest of this rank's parts of its parameters."""
    by_layer: list[list[torch.Tensor]] = [[] for _ in layers.names]
    for name, p in parameters.items():
        by_layer[layers.of[name]].append(local(p))
    return {name: joint_digest(parts, device) for name, parts in zip(layers.names, by_layer, strict=True)}


def optimizer_digests(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], layers: Layers, device: torch.device
) -> dict[str, torch.Tensor]:
    """Layer group -> digest of the moments and step counts of its parameters, this rank's parts; and OPTIONS."""
    by_layer: list[list[Any]] = [[] for _ in layers.names]
    for name, p in parameters.items():
        state = optimizer.state.get(p, {})  # a defaultdict: must not grow by being looked at
        by_layer[layers.of[name]] += [state[key] for key in sorted(state)]
    found = {name: _mixed(leaves, device) for name, leaves in zip(layers.names, by_layer, strict=True)}
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    found[OPTIONS] = _mixed([leaf for _, leaf in walk(options)], device)
    return found


class BufferDigests:
    """Of the buffers that never changed since the engine was built: masks, tables, scales.

    One that the forward moves (running statistics) is each rank's own from one forward to the next, also where DDP
    broadcasts it at the start of each. Such a one counts as 0 once it has moved, on all ranks that moved it.
    """

    @torch.no_grad()
    def __init__(self, buffers: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._group = layer_groups(buffers)
        self._device = device
        self._first = {name: tensor_digest(local(b)).to(device) for name, b in buffers.items()}

    @torch.no_grad()
    def now(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Group of buffers -> digest."""
        by_group: dict[str, list[torch.Tensor]] = {group: [] for group in self._group.values()}
        for name, first in self._first.items():
            if name in buffers:
                digest = tensor_digest(local(buffers[name])).to(self._device)
                by_group[self._group[name]].append(torch.where(digest == first, digest, torch.zeros_like(digest)))
        return {
            group: joint_digest([torch.stack(parts)] if parts else [], self._device)
            for group, parts in by_group.items()
        }


def _mixed(leaves: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Tensors, and plain values as they print."""
    tensors = [local(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    plain = repr([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)])
    host = int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest(), "big", signed=True)
    return joint_digest(tensors, device) * 31 + host
