"""Where a NaN began: hooks on every module while a refused window is run once more (T6, T12).

Nothing of this is on in an ordinary step. The coordinator delivers the refused micro-batches again, under the random
numbers they met, through the user's own loop, and drops the result; meanwhile every tensor that enters or leaves a
module, every parameter at the moment it is used, the loss, and every gradient on the way back is looked at. What comes
first in the order of execution is the origin:

    batch      a value of the micro-batch itself is not finite, or a label is none
    weights    a parameter is not finite already: the step that broke it lies in the past
    forward    a module's output is not finite although its input and parameters are
    loss       the model's output is finite, the loss is not
    backward   loss finite; a module passes on a gradient that is not finite although the one it received is
    reduction  this rank's own gradient is finite, the reduced one is not

A module is named by its path. One that has code of its own around its submodules is named when the value appeared
between them. Minus infinity alone is taken for a mask, as attention uses it, and named only beside the origin.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from resilient.checkpoint.files import write_json
from resilient.engines.base import Taps
from resilient.incidents.scene import describe

_NAMED = 8  # parameters listed by name
_IGNORED = -100  # the label that carries no loss


class OriginProbe:
    """One per run and rank; the coordinator calls it on all ranks alike. Never raises: what breaks in here ends up in
    the result under `problem`, and the window goes on.

        attach(module)                 hooks on
        micro_step(index, batch)       before each forward
        loss(loss)                     before each backward
        finish(taps)                   hooks off; the finding of this rank
        write(folder name, finding)    into the incident's folder

    folder: the run's incidents folder, or None.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._handles: list[Any] = []
        self._names: dict[int, str] = {}
        self._containers: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self._found: dict[str, Any] | None = None
        self._candidate: dict[str, Any] | None = None  # of this micro-step's forward; counts if something comes of it
        self._masked = ""  # module that first showed minus infinity
        self._parameters: set[int] = set()
        self._micro, self._batch = 0, None
        self._output: torch.Tensor | None = None  # the model's, of this micro-step
        self._output_bad, self._forward = False, True
        self._problem = ""
        self._until = float("inf")

    # -- what the coordinator calls -------------------------------------------------------------------------------

    def attach(self, module: nn.Module, seconds: float) -> None:
        """Hook every submodule. After `seconds` the hooks let everything pass unseen: no rank is kept waiting."""
        self.detach()
        self._reset()
        self._until = time.monotonic() + seconds
        self._root = module
        self._names = {id(part): name for name, part in module.named_modules()}
        self._containers = {
            name for name, part in module.named_modules() if isinstance(part, nn.ModuleList | nn.ModuleDict)
        }
        for part in module.modules():
            self._handles.append(part.register_forward_pre_hook(self._entering, with_kwargs=True))
            self._handles.append(part.register_forward_hook(self._leaving))

    def micro_step(self, index: int, batch: Any) -> None:
        """index: 0-based."""
        self._micro, self._batch, self._output = index, batch, None
        self._candidate, self._masked = None, ""
        self._output_bad, self._forward = False, True

    def loss(self, loss: torch.Tensor) -> None:
        """The loss of the micro-step, before its backward."""
        self._forward = False
        self._guarded(self._judge_loss, loss.detach())

    def finish(self, taps: Taps | None) -> dict[str, Any]:
        """Hooks off, and what was found. taps: the engine's, of the whole window; None if it did not come to an end.

        {"reproduced": bool, "rank": int, "place", "module", "micro_step" (1-based), "message", ...}"""
        self.detach()
        if taps is not None:
            self._guarded(self._judge_norms, taps)
        finding: dict[str, Any] = {"rank": self._rank, "reproduced": self._found is not None}
        if self._found is not None:
            finding |= self._found
        elif not self._problem:
            finding["message"] = "did not recur on the same batch with the same random numbers: a transient"
        if self._problem:
            finding["problem"] = self._problem
            finding.setdefault("message", f"the search broke off: {self._problem}")
        self._batch = self._output = None
        return finding

    def detach(self) -> None:
        """Every hook off. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def write(self, name: str, attempt: int, finding: Mapping[str, Any]) -> None:
        """incidents/<name>/origin-00001-a00000035.json. A failure is a warning."""
        if self._folder is None:
            return
        try:
            folder = self._folder / name
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / f"origin-{self._rank:05d}-a{attempt:08d}.json", dict(finding))
        except Exception as error:
            print(f"resilient: WARNING: rank {self._rank}: the origin of {name}: {error}", file=sys.stderr)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _entering(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module's forward, after whatever gathers its parameters."""
        return self._guarded(self._look_at_input, module, args, kwargs)

    def _leaving(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._guarded(self._look_at_output, module, args, output)

    def _guarded(self, look: Callable[..., Any], *args: Any) -> Any:
        """A failure in here must not reach the user's forward or backward."""
        if self._found is not None or self._problem:
            return None
        if time.monotonic() > self._until:
            self._problem = "out of time"
            return None
        try:
            return look(*args)
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
            return None

    def _look_at_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._names[id(module)]
        if self._forward:
            self._look_at_parameters(module, name)
            bad = next((t for t in _floats([args, kwargs]) if self._bad(t, name)), None)
            if bad is not None and self._candidate is None:
                self._note_bad_input(name, bad)
        self._watch_parameters(module, name)
        enclosing = self._enclosing(name)
        watched = [self._watched(value, name, "input", enclosing) for value in args]
        return tuple(watched), {key: self._watched(v, name, "input", enclosing) for key, v in kwargs.items()}

    def _look_at_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        name = self._names[id(module)]
        if self._forward:
            bad = next((t for t in _floats(output) if self._bad(t, name)), None)
            if bad is not None and self._candidate is None:
                self._candidate = self._finding(
                    "forward",
                    name,
                    f"{self._label(name)} made it: its input and its parameters are finite",
                    input=[describe(t) for t in _floats(list(args))],
                    output=describe(bad),
                )
            if module is self._root:
                self._output = next((t.detach() for t in _floats(output)), None)
                self._output_bad = any(t.dim() > 0 and not torch.isfinite(t).all() for t in _floats(output))
        enclosing = self._enclosing(name)
        if type(output) is tuple:
            return tuple(self._watched(value, name, "output", enclosing) for value in output)
        return self._watched(output, name, "output", enclosing)

    def _look_at_parameters(self, module: nn.Module, name: str) -> None:
        for own, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point() or torch.isfinite(parameter.detach()).all():
                continue
            full = f"{name}.{own}" if name else own
            if self._candidate is None:
                self._candidate = self._finding(
                    "weights", name, f"{full} is not finite already: an earlier step broke it", weights=[]
                )
            names = self._candidate.get("weights")
            if names is not None and full not in names and len(names) < _NAMED:
                names.append(full)

    def _note_bad_input(self, name: str, tensor: torch.Tensor) -> None:
        """A module is given a bad value that no module before it has made."""
        if name == "" or self._batch_problem():
            why = self._batch_problem() or "the model's input is not finite"
            self._candidate = self._finding("batch", "", why, input=[describe(tensor)])
        else:
            where = self._enclosing(name)
            self._candidate = self._finding(
                "forward",
                where,
                f"{self._label(where)} made it in code of its own, before {name}",
                input=[describe(tensor)],
            )

    def _watch_parameters(self, module: nn.Module, name: str) -> None:
        """A gradient that only a weight gets (the first layer's) is seen at the weight."""
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._parameters:
                self._parameters.add(id(parameter))
                self._handles.append(parameter.register_hook(self._gradient_check(name, f"the gradient of {own}", "")))

    def _watched(self, value: Any, name: str, side: str, enclosing: str) -> Any:
        """A tensor of the module's own, so that its gradient is that of this use alone; its gradient is looked at."""
        if not (isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()):
            return value
        value = value.view_as(value)
        if side == "input":
            value.register_hook(self._gradient_check(name, "the gradient of its input", ""))
        else:
            value.register_hook(self._gradient_check(enclosing if name else "", "", name))
        return value

    def _gradient_check(self, name: str, what: str, after: str) -> Callable[[torch.Tensor], None]:
        """what: that `name` computed from a finite one. Without: a gradient that arrives at the output of `after`."""

        def look(gradient: torch.Tensor) -> None:
            if torch.isfinite(gradient).all():
                return
            if what:
                message = f"{self._label(name)} made it on the way back: {what} is not finite, what it received is"
            elif after:
                message = f"{self._label(name)} made it on the way back in code of its own, after {after}"
            else:
                message = "it came back from behind the model: the gradient of the model's output is not finite"
            self._found = self._finding("backward", name, message, gradient=describe(gradient))
            if self._candidate is not None:
                self._found["passing"] = f"{self._candidate['message']}, but it reached neither output nor loss"

        def hook(gradient: torch.Tensor) -> None:
            self._guarded(look, gradient.detach())

        return hook

    # -- judging --------------------------------------------------------------------------------------------------

    def _judge_loss(self, loss: torch.Tensor) -> None:
        if torch.isfinite(loss).all() and not self._output_bad:
            return
        found = self._candidate
        if found is None and self._output_bad:
            where = self._masked
            found = self._finding(
                "forward", where, f"minus infinity, first seen at {self._label(where)}, is in the output"
            )
        if found is None:
            problem = self._batch_problem()
            message = problem or f"the model's output is finite, the loss is {float(loss.reshape(-1)[0]):g}"
            found = self._finding("batch" if problem else "loss", "", message, input=[describe(self._batch)])
        self._found = found

    def _judge_norms(self, taps: Taps) -> None:
        """What no single value showed: a norm that overflowed, or a reduction that went wrong."""
        if self._found is not None:
            return
        if not torch.isfinite(taps.local_sq):
            self._found = self._finding(
                "backward", "", "every gradient was finite where it was seen; their norm is not"
            )
        elif not torch.isfinite(taps.reduced_sq_share):
            self._found = self._finding("reduction", "", "this rank's own gradient is finite, the reduced one is not")

    def _batch_problem(self) -> str:
        """What is wrong with the micro-batch by itself; empty: nothing that can be seen."""
        for key, tensor in _named(self._batch):
            where = f"`{key}` of the batch" if key else "the batch"
            if tensor.is_floating_point() and torch.isnan(tensor).any():
                return f"{where} is not finite"
            if key.rpartition(".")[2] == "labels" and not tensor.is_floating_point():
                carrying = tensor[tensor != _IGNORED]
                if carrying.numel() == 0:
                    return f"no position of {where} carries loss: a mean over nothing"
                classes = self._output.shape[-1] if self._output is not None and self._output.dim() > 1 else None
                low, high = int(carrying.min()), int(carrying.max())
                if low < 0 or (classes is not None and high >= classes):
                    return f"{where} holds {low if low < 0 else high}, which is no label"
        return ""

    def _finding(self, place: str, module: str, message: str, **more: Any) -> dict[str, Any]:
        finding: dict[str, Any] = {
            "place": place,
            "module": module,
            "micro_step": self._micro + 1,
            "message": message,
            **more,
        }
        if self._masked:
            finding["minus_infinity_first_in"] = self._masked
        return finding

    def _bad(self, tensor: torch.Tensor, name: str) -> bool:
        """NaN or plus infinity. Minus infinity alone masks; where it came first is remembered."""
        tensor = tensor.detach()
        if torch.isfinite(tensor).all():
            return False
        if (torch.isnan(tensor) | torch.isposinf(tensor)).any():
            return True
        self._masked = self._masked or name
        return False

    def _enclosing(self, name: str) -> str:
        """The nearest module around `name` that has a forward of its own."""
        outer = name.rpartition(".")[0]
        while outer in self._containers:
            outer = outer.rpartition(".")[0]
        return outer

    def _label(self, name: str) -> str:
        return name or type(self._root).__name__


def _named(value: Any, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a batch with the path of keys to each."""
    if isinstance(value, torch.Tensor):
        yield key, value
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _named(item, f"{key}.{inner}" if key else str(inner))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item, key)


def _floats(value: Any) -> Iterator[torch.Tensor]:
    """Floating-point tensors with something in them."""
    return (t for _, t in _named(value) if t.is_floating_point() and t.numel() > 0)
