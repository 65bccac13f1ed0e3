"""Faults of one rank's own gradient, before anything is accumulated or reduced, in any engine."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from resilient.engines.base import Engine
from resilient.errors import ConfigError
from resilient.faults.config import BitFlip, DroppedMicroStep, GradNoise, GradStuck, nearest
from resilient.faults.proxy import EngineProxy, Trigger

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def sizes(module: nn.Module) -> dict[str, int]:
    """Elements of each whole trained parameter, over all ranks (`ds_numel`: as ZeRO 3 keeps it), by name."""
    return {n: int(getattr(p, "ds_numel", p.numel())) for n, p in module.named_parameters() if p.requires_grad}


def check_parameter(module: nn.Module, name: str | None) -> None:
    """ConfigError for a name that the model does not have, or does not train."""
    if name is not None:
        draw(sizes(module), name, 0)


def draw(of: Mapping[str, int], name: str | None, seed: int, key: str = "parameter") -> tuple[str, int]:
    """A name and an element of it: both drawn evenly over all elements, or the element alone when the name is given.

    of: name -> elements. The same for the same seed. ConfigError naming `fault.<key>` for a name that is not there.
    """
    if name is not None and name not in of:
        raise ConfigError(f"fault.{key}={name}: not here{nearest(name, list(of))}")
    candidates = of if name is None else {name: of[name]}
    generator = torch.Generator().manual_seed(seed)
    at = int(torch.randint(sum(candidates.values()), (1,), generator=generator))
    for one, size in candidates.items():
        if at < size:
            return one, at
        at -= size
    raise AssertionError("unreachable: at is below the sum of all sizes")


def generator_for(device: torch.device, *what: object) -> torch.Generator:
    """A stream of its own for what is named, the same in every run, on `device`. The global streams stay untouched."""
    digest = hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=7).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "big"))


class GradientHooks:
    """Shows parameters' gradients to `change(name, gradient)` as autograd hands them over: whole, of one micro-step, before
    they are accumulated or reduced. What it returns takes their place; None: nothing changes.

    Set in the forward of each micro-step in which `due()`, and to be taken off with `clear` after its backward: what
    FSDP2 computes on are not the parameters that it shows outside. They exist from the forward of the module that
    they belong to on, after FSDP2's own hook gathered them. names: None: all trained parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        due: Callable[[], bool],
        change: Callable[[str, torch.Tensor], torch.Tensor | None],
        names: Collection[str] | None = None,
    ) -> None:
        self._due, self._change = due, change
        self._names = frozenset(sizes(module) if names is None else names)
        self._prefix = {part: f"{name}." if name else "" for name, part in module.named_modules()}
        self._root = module
        owners = {name.rpartition(".")[0] for name in self._names}
        self._entries = [
            part.register_forward_pre_hook(self._entering)
            for part, prefix in self._prefix.items()
            if self._names and (part is module or prefix.removesuffix(".") in owners)
        ]
        self._watched: dict[str, torch.utils.hooks.RemovableHandle] = {}

    def _entering(self, module: nn.Module, args: Any) -> None:
        if not (self._root.training and torch.is_grad_enabled() and self._due()):
            return
        # At the root everything that is there already: a parent may use a parameter without calling its module.
        for own, parameter in module.named_parameters(recurse=module is self._root):
            name = self._prefix[module] + own
            if name in self._names and name not in self._watched and not isinstance(parameter, DTensor):
                self._watched[name] = parameter.register_hook(functools.partial(self._change, name))

    def clear(self) -> None:
        for handle in self._watched.values():
            handle.remove()
        self._watched = {}

    def close(self) -> None:
        self.clear()
        for handle in self._entries:
            handle.remove()


class GradientFault(EngineProxy):
    """Changes local gradients through hooks: `change(name, gradient)` in the micro-steps in which `due()`."""

    def __init__(self, engine: Engine, step: Callable[[], int], names: Collection[str] | None) -> None:
        super().__init__(engine, step)
        self._hooks = GradientHooks(engine.module, self.due, self.change, names)

    def due(self) -> bool:
        raise NotImplementedError

    def change(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        raise NotImplementedError

    def begin_micro_step(self, index: int, count: int) -> None:
        self._hooks.clear()  # of a forward whose backward never came
        super().begin_micro_step(index, count)

    def backward(self, loss: torch.Tensor) -> None:
        try:
            super().backward(loss)
        finally:
            self._hooks.clear()

    def close(self) -> None:
        self._hooks.close()
        super().close()


class FlippedBit(GradientFault):
    """On every rank, so that all of them refuse a bit that the gradient does not have; only `fault.rank` flips it."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: BitFlip, rank: int) -> None:
        self.parameter, self.element = draw(of := sizes(engine.module), fault.parameter, fault.seed)
        if fault.element is not None:
            self.element = fault.element
        if self.element >= of[self.parameter]:
            size = of[self.parameter]
            raise ConfigError(
                f"fault.element={self.element}: {self.parameter} has only {size} elements, 0 to {size - 1}"
            )
        super().__init__(engine, step, [self.parameter])
        self._trigger = Trigger(self, fault)
        self._bit, self._here = fault.bit, rank == fault.rank

    def due(self) -> bool:
        return self._trigger.due() and self.index == 0

    def change(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        at = self._bit - 32 + 8 * gradient.itemsize
        if at < 0:
            raise ConfigError(f"fault.bit={self._bit}: a gradient in {gradient.dtype} has only the bits 16 to 31")
        return flip_bit(gradient, self.element, at) if self._here else None


def flip_bit(values: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    """A copy with one bit of one element inverted. bit: of the element's own word, from the lowest."""
    flipped = values.clone(memory_format=torch.contiguous_format)
    width = 8 * values.itemsize
    mask = (1 << bit) - ((1 << width) if bit == width - 1 else 0)  # as the signed integer it is
    flipped.view(-1).view(_WORDS[values.itemsize])[element] ^= mask
    return flipped


class NoisyGradient(GradientFault):
    def __init__(self, engine: Engine, step: Callable[[], int], fault: GradNoise) -> None:
        super().__init__(engine, step, None if fault.parameter is None else [fault.parameter])
        self._trigger = Trigger(self, fault)
        self._fault = fault

    def due(self) -> bool:
        return self._trigger.due()

    def change(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        generator = generator_for(gradient.device, self._fault.seed, self.step, self.index, name)
        noise = torch.randn(gradient.shape, generator=generator, device=gradient.device)
        size = torch.linalg.vector_norm(gradient, dtype=torch.float32) / math.sqrt(gradient.numel())
        return gradient + (noise * (size * self._fault.relative)).to(gradient.dtype)


class StuckGradient(GradientFault):
    def __init__(self, engine: Engine, step: Callable[[], int], fault: GradStuck) -> None:
        self.parameter, _ = draw(sizes(engine.module), fault.parameter, fault.seed)
        super().__init__(engine, step, [self.parameter])
        self._trigger = Trigger(self, fault)
        self._value = fault.value

    def due(self) -> bool:
        return self._trigger.due()

    def change(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, self._value * self.inner.loss_scale() / self.count)


class DroppingEngine(EngineProxy):
    """The backward of one micro-step runs, with all its collectives, and contributes exact zeros."""

    def __init__(self, engine: Engine, step: Callable[[], int], fault: DroppedMicroStep) -> None:
        super().__init__(engine, step)
        self._trigger = Trigger(self, fault)
        self._micro_step = fault.micro_step

    def backward(self, loss: torch.Tensor) -> None:
        if self.index == min(self._micro_step, self.count) - 1 and self._trigger.due():
            loss = loss * 0.0
        super().backward(loss)
