"""What an optimizer step changes: the L2 norm of the change by layer group (BR-07), and Adam's RMS of g^2/v.

The update norm leads: it grows with the alignment of recent gradients, before loss and gradient norm move. RMS(g^2/v)
above 1 says that the second moment lags behind the gradients (Wortsman et al. 2023, arXiv:2304.13013, StableAdamW).

Hooks on the optimizer's own `step` see the tensors that it really moves (masters, shards, one ZeRO 3 subgroup at a
time), after clipping and with the LR in effect, whatever the optimizer is. They are there on measured steps only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from resilient.engines.buffers import local
from resilient.engines.layers import Layers, Part


@dataclass(frozen=True)
class Update:
    """This rank's shares of what one applied step changed, (groups,) float64 tensors on the device; shares of all
    ranks sum to the whole.

    sq_share: of the squared L2 norm of the change. lag_share: of the mean of g^2/v, for Adam's v (bias-corrected, the
    step's own gradient in it); None if it was not asked for or the optimizer keeps no v.
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
        self._stepped: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._kept: dict[int, torch.Tensor] = {}
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
            self._stepped, self._copies = [], []

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._stepped = [p for p in params if id(p) in self._parts]
        if self._stepped:
            self._copies = [self._room(p) for p in self._stepped]
            torch._foreach_copy_(self._copies, [local(p) for p in self._stepped])

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepped:
            return
        torch._foreach_sub_(self._copies, [local(p) for p in self._stepped])
        moved = self._sums()
        lag = self._lag(optimizer) if self._with_lag else None
        if self._update is not None:  # a step in several calls
            moved = moved + self._update.sq_share
            lag = lag + self._update.lag_share if lag is not None and self._update.lag_share is not None else None
        self._update = Update(moved, lag)

    def _lag(self, optimizer: Optimizer) -> torch.Tensor | None:
        """The copies are done with: they hold g/sqrt(v) now, v at least eps^2 as in StableAdamW."""
        copies = dict(zip(map(id, self._stepped), self._copies, strict=True))
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if id(p) in copies]
            states = [optimizer.state[p] for p in params]
            if not all("exp_avg_sq" in state for state in states):
                return None
            if not params:
                continue
            ours = [copies[id(p)] for p in params]
            torch._foreach_copy_(ours, [local(state["exp_avg_sq"]) for state in states])
            torch._foreach_clamp_min_(ours, max(float(group.get("eps", 0.0)) ** 2, 1e-30))
            torch._foreach_rsqrt_(ours)
            torch._foreach_mul_(ours, [local(p.grad) for p in params])
            steps = states[0].get("step", group.get("step"))
            if steps is not None and "betas" in group:
                correction = (1 - group["betas"][1] ** steps) ** 0.5
                if isinstance(correction, torch.Tensor):
                    correction = correction.to(ours[0])
                torch._foreach_mul_(ours, correction)
        sizes = torch.tensor(self._layers.sizes, dtype=torch.float64)
        return self._sums() / sizes.to(self._copies[0].device)

    def _sums(self) -> torch.Tensor:
        return self._layers.sums(
            [(c, part) for p, c in zip(self._stepped, self._copies, strict=True) for part in self._parts[id(p)]]
        )

    def _room(self, parameter: torch.Tensor) -> torch.Tensor:
        """Memory for a copy of this rank's part. On the CPU it is kept: fresh pages cost ten times the copy (3.6 ms
        against 0.2 ms for a million parameters). An accelerator's allocator has it at hand and may lend it in between."""
        own = local(parameter)
        if own.device.type != "cpu":
            return torch.empty_like(own)
        kept = self._kept.get(id(parameter))
        if kept is None or kept.shape != own.shape or kept.dtype != own.dtype:
            kept = self._kept[id(parameter)] = torch.empty_like(own)
        return kept
