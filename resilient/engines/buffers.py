"""Buffers that the forward moves (running statistics): held from the start of a window so that a skip leaves no trace."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of a tensor, detached: the local shard of a DTensor, any other tensor itself. No copy."""
    if isinstance(tensor, DTensor):
        if torch.is_grad_enabled():
            with torch.no_grad():  # then it is the shard itself, without a dispatch through DTensor
                return tensor.to_local().detach()
        tensor = tensor.to_local()
    return tensor.detach()


class BufferHold:
    """Copies of a module's buffers from before a window's first forward.

    All of them are copied, every time: they are small next to the parameters, and a custom kernel may write to a
    buffer without telling autograd's version counter.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Call before the first forward of a window."""
        self._held = {name: local(b).clone() for name, b in self._module.named_buffers()}

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo what the window's forwards did to the buffers, in place. A buffer that was rebuilt with another shape
        meanwhile (a grown cache) is left alone. Does nothing if no window was begun."""
        for name, buffer in self._module.named_buffers():
            held = self._held.get(name)
            if held is not None and held.shape == local(buffer).shape:
                local(buffer).copy_(held)
        self.drop()

    def drop(self) -> None:
        """The window was applied or overwritten: nothing to undo."""
        self._held = {}
