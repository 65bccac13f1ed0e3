"""What an optimizer step changes: the L2 norm of the change by layer group (BR-07), and Adam's RMS of g^2/v.

The update norm leads: it grows with the alignment of recent gradients, before loss and gradient norm move. RMS(g^2/v)
above 1 says that the second moment lags behind the gradients (Wortsman et al. 2023, arXiv:2304.13013, StableAdamW).

Hooks on the optimizer's own `step` see the tensors that it really moves (masters, shards, one ZeRO 3 subgroup at a
time), after clipping and with the LR in effect, whatever the optimizer is. They are there on measured steps only.

Of a tensor of 2**15 elements or more one run of 1024 in every 7603 is looked at, always the same ones, and counts for all: a
copy of every parameter would cost as much memory as the parameters and, on a CPU, 1 % of a step. Both figures are then
estimates, good to sqrt((k - 1) / n) of a square for n elements seen of kurtosis k: 0.2 % for a million parameters of k = 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from resilient.engines.buffers import local
from resilient.engines.layers import Layers, Part

_LONG = 1 << 15  # elements from which a tensor is looked at in runs
_RUN = 1024
_STEP = 7603  # of steps around 8000 the one whose runs lie most evenly over columns, for widths of 1536 to 28672


@dataclass(frozen=True)
class Update:
    """This rank's shares of what one applied step changed, (groups,) float64 tensors on the device; shares of all
    ranks sum to the whole.

    sq_share: of the squared L2 norm of the change. lag_share: of the mean of g^2/v, for Adam's v (bias-corrected, the
    step's own gradient in it); None if it was not asked for or the optimizer keeps no v. Of long tensors both are estimates.
    """

    sq_share: torch.Tensor
    lag_share: torch.Tensor | None


class UpdateTap:
    """Measures the next step of `optimizer` when asked to.

    parts: id of a tensor that the optimizer steps -> whose its elements are. Tensors without an entry are left out.
    """

    def __init__(self, optimizer: Optimizer, layers: Layers, parts: Mapping[int, Sequence[Part]]) -> None:
        self._optimizer = optimizer
        self._layers = layers
        self._parts = parts
        self._due = self._with_lag = False
        self._stepped: list[_Stepped] = []
        self._kept: dict[tuple[int, int], torch.Tensor] = {}
        self._update: Update | None = None

    def watch(self, with_lag: bool) -> None:
        """Measure the next step; with_lag: RMS(g^2/v), too."""
        self._due, self._with_lag, self._update = True, with_lag, None

    def take(self) -> Update | None:
        """What was measured, once. None if no step was taken since `watch`."""
        update, self._update = self._update, None
        return update

    @contextmanager
    def around(self) -> Iterator[None]:
        """The optimizer may step in here, in several calls if need be."""
        if not self._due:
            yield
            return
        self._due = False
        hooks = [self._optimizer.register_step_pre_hook(self._before)]
        hooks.append(self._optimizer.register_step_post_hook(self._after))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._stepped = []

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped, seen = [], []
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            own = local(p)
            for i, part in enumerate(self._parts.get(id(p), ())):
                runs = Runs.of(own, part)
                seen.append(runs.cut(own))
                counts = Part(part.layer, part.weight * runs.scale)
                self._stepped.append(_Stepped(p, counts, runs, self._room((id(p), i), seen[-1])))
        if seen:
            torch._foreach_copy_(self._copies(), seen)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepped:
            return
        torch._foreach_sub_(self._copies(), [each.runs.cut(local(each.parameter)) for each in self._stepped])
        moved = self._sums()
        lag = self._lag(optimizer) if self._with_lag else None
        if self._update is not None:  # a step in several calls
            moved = moved + self._update.sq_share
            lag = lag + self._update.lag_share if lag is not None and self._update.lag_share is not None else None
        self._update = Update(moved, lag)

    def _lag(self, optimizer: Optimizer) -> torch.Tensor | None:
        """The copies are done with: they hold g/sqrt(v) now, v at least eps^2 as in StableAdamW."""
        for group in optimizer.param_groups:
            members = set(map(id, group["params"]))
            stepped = [s for s in self._stepped if id(s.parameter) in members]
            states = [optimizer.state[s.parameter] for s in stepped]
            if not all("exp_avg_sq" in state for state in states):
                return None
            if not stepped:
                continue
            ours = [s.copy for s in stepped]
            torch._foreach_copy_(
                ours, [s.runs.cut(local(state["exp_avg_sq"])) for s, state in zip(stepped, states, strict=True)]
            )
            torch._foreach_clamp_min_(ours, max(float(group.get("eps", 0.0)) ** 2, 1e-30))
            torch._foreach_rsqrt_(ours)
            grads = [s.runs.cut(local(s.parameter.grad)) for s in stepped if s.parameter.grad is not None]
            torch._foreach_mul_(ours, grads)
            steps = states[0].get("step", group.get("step"))
            if steps is not None and "betas" in group:
                correction = (1 - group["betas"][1] ** steps) ** 0.5
                if isinstance(correction, torch.Tensor):
                    correction = correction.to(ours[0])
                torch._foreach_mul_(ours, correction)
        sizes = torch.tensor(self._layers.sizes, dtype=torch.float64)
        return self._sums() / sizes.to(self._stepped[0].copy.device)

    def _copies(self) -> list[torch.Tensor]:
        return [each.copy for each in self._stepped]

    def _sums(self) -> torch.Tensor:
        return self._layers.sums([(each.copy, each.part) for each in self._stepped])

    def _room(self, key: tuple[int, int], seen: torch.Tensor) -> torch.Tensor:
        """Memory for a copy. On the CPU it is kept: fresh pages cost ten times the copy (3.6 ms against 0.2 ms for a
        million elements). An accelerator's allocator has it at hand and may lend it in between."""
        if seen.device.type != "cpu":
            return torch.empty(seen.shape, dtype=seen.dtype, device=seen.device)
        kept = self._kept.get(key)
        if kept is None or kept.shape != seen.shape or kept.dtype != seen.dtype:
            kept = self._kept[key] = torch.empty(seen.shape, dtype=seen.dtype)
        return kept


class Runs(NamedTuple):
    """Which elements of a tensor are looked at: [start, stop) of it in its own order, or runs of 1024 from there on.

    runs 0: all of [start, stop); stop None: the whole tensor in its shape. scale: elements there are / elements seen.
    """

    start: int
    stop: int | None
    runs: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, part: Part) -> Runs:
        """Those of a part of a tensor. Runs that lay a multiple of a layer's width apart would all show the same columns."""
        stop = tensor.numel() if part.stop is None else part.stop
        if stop - part.start < _LONG or not tensor.is_contiguous():
            return cls(part.start, part.stop)
        return cls(part.start, stop, (stop - part.start - _RUN) // _STEP + 1)

    @property
    def scale(self) -> float:
        return (self.stop - self.start) / (self.runs * _RUN) if self.runs and self.stop is not None else 1.0

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Views of the elements seen, (runs, 1024) or as they are. tensor: of the same shape as the one given to `of`."""
        if self.stop is None:
            return tensor
        flat = tensor.reshape(-1)
        if not self.runs:
            return flat[self.start : self.stop]
        return flat.as_strided((self.runs, _RUN), (_STEP, 1), flat.storage_offset() + self.start)


class _Stepped(NamedTuple):
    """What is seen of a tensor that the optimizer steps. part: whose that is, with the weight that it counts for."""

    parameter: torch.Tensor
    part: Part
    runs: Runs
    copy: torch.Tensor
