"""What a rank holds of the reduced gradient, parameter by parameter, in the engine's own memory.

DDP and FSDP2 keep it in `.grad`, DeepSpeed's optimizers where `Stage.received` looks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from resilient.engines.base import Engine
from resilient.engines.buffers import local


@dataclass(frozen=True)
class Piece:
    """name: of the parameter. values: what this rank holds of its reduced gradient, live, times the loss scale.
    cut: a tensor like the whole parameter -> its elements that belong here, shaped like `values`."""

    name: str
    values: torch.Tensor
    cut: Callable[[torch.Tensor], torch.Tensor]

    def flat(self) -> torch.Tensor:
        """`values` in one dimension, in memory order, without a copy: gradients are dense whatever their strides."""
        return self.values.as_strided((self.values.numel(),), (1,))

    def flat_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor like the whole parameter, in the order and dtype of `flat()`."""
        return torch.empty_like(self.values).copy_(self.cut(whole)).as_strided((self.values.numel(),), (1,))


def reduced_pieces(engine: Engine) -> list[Piece]:
    """After the backward of a window's last micro-step. Local; on any engine, wrapped or not. Empty pieces are left out."""
    stage = getattr(engine, "_stage", None)
    pieces = _of_torch(engine) if stage is None else _of_deepspeed(stage, engine.module)
    return [piece for piece in pieces if piece.values.numel() > 0]


def _of_torch(engine: Any) -> list[Piece]:
    return [Piece(name, local(gradient), _shard(gradient)) for name, gradient in engine._grads().items()]


def _shard(gradient: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """This rank's shard of a plain tensor, split along its dimensions as the DTensor is."""

    def cut(whole: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            for axis, placement in enumerate(gradient.placements):
                if placement.is_shard():
                    parts = whole.chunk(mesh.size(axis), dim=placement.dim)  # type: ignore[attr-defined]
                    at = mesh.get_local_rank(axis)
                    whole = parts[at] if at < len(parts) else whole.narrow(placement.dim, 0, 0)  # type: ignore[attr-defined]
        return whole

    return cut


def _of_deepspeed(stage: Any, module: nn.Module) -> list[Piece]:
    names = {id(p): name for name, p in module.named_parameters()}
    return [Piece(names[id(p.parameter)], p.tensor, _slice(p.tensor, p.start)) for p in stage.received()]


def _slice(values: torch.Tensor, start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """As many elements as `values` has, from `start` on, of the flat parameter."""
    length, shape = values.numel(), values.shape
    return lambda whole: whole.reshape(-1)[start : start + length].view(shape)
