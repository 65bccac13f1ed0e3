"""Measure: fill a StepRecord while forward and backward run, without a host sync.

Everything here stays a 0-dim tensor on the engine's device until the exchange copies the whole table once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from resilient.coordinator.config import GuardConfig
from resilient.engines.base import Engine
from resilient.engines.updates import Update
from resilient.signals import StepRecord


class OutputTap:
    """The forward hook on the root module: peak and finiteness of the model's output.

    A copy or a pickle of the model (an EMA, a `torch.save(model)`) carries an inert one."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.paused = device is None
        self.problem: Exception | None = None  # the hook must not break the user's forward pass
        self.start()

    def start(self) -> None:
        """Begin a window."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self.peak, self.last, self.nonfinite = zero, zero, zero
        self.seen = False  # any output that could be looked at

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.paused or not torch.is_grad_enabled():
            return
        try:
            self._look_at(output)
        except Exception as error:
            self.problem, self.paused = error, True

    def _look_at(self, output: Any) -> None:
        # One of the extremes is NaN or Inf if any element is: finiteness and peak in one pass, no boolean copy. (The maximum
        # norm says the same; on the CPU it takes seven times as long.)
        extremes = [x for tensor in _outputs(output) for x in torch.aminmax(tensor.detach())]
        if not extremes:
            self.last = torch.zeros_like(self.peak)
            return
        self.seen = True
        self.last = peak = torch.stack([x.to(self.peak) for x in extremes]).abs().amax()
        finite = torch.isfinite(peak)
        self.nonfinite = self.nonfinite + (~finite)
        self.peak = torch.where(finite, torch.maximum(self.peak, peak), self.peak)

    def __reduce__(self) -> tuple[type[OutputTap], tuple[()]]:
        return OutputTap, ()


class Measurement:
    """Accumulates one window's measurements. Hooks the root module's output; `close` removes the hook."""

    def __init__(self, engine: Engine, config: GuardConfig) -> None:
        self._engine = engine
        self._config = config
        self._windows = 0
        self._update: Update | None = None  # of the last applied step, not told yet
        self._output = OutputTap(engine.device)
        self._hook = engine.module.register_forward_hook(self._output)

    def start(self) -> None:
        """Begin a window."""
        self._output.start()
        self._losses: list[torch.Tensor] = []  # of each micro-step: (3,) shown, the loss itself, peak of the output
        self._weights: list[float] = []
        self._entropies: list[Any] = []
        self._peaks: list[Any] = []
        self._leftover = self._look_for_leftovers()
        self._started = self._computed = time.perf_counter()

    def pause(self, paused: bool) -> None:
        """While paused (evaluation), outputs are not looked at."""
        self._output.paused = paused

    def loss(self, loss: torch.Tensor, report: torch.Tensor | None, tokens: float | None) -> None:
        """One micro-step's loss. `report` is what to show for it (this rank's own mean), default the loss itself."""
        shown = loss if report is None else report
        each = [x.detach().reshape(()).to(self._output.last) for x in (shown, loss)]
        self._losses.append(torch.stack([*each, self._output.last]))
        self._weights.append(1.0 if tokens is None else tokens)

    def backward_done(self) -> None:
        """A micro-step's backward has returned: compute ends here, whatever the loop does before the gate."""
        self._computed = time.perf_counter()

    def probe(self, attention_entropy: Any = None, attention_logit_max: Any = None) -> None:
        """What a model of the user's own knows about its attention, any number of times in a window (S8, S9)."""
        if attention_entropy is not None:
            self._entropies.append(attention_entropy)
        if attention_logit_max is not None:
            self._peaks.append(attention_logit_max)

    @contextmanager
    def stepping(self, step: int) -> Iterator[None]:
        """The optimizer takes `step` in here: what it changes is measured if it is due, for the row of the next attempt."""
        every, lag_every = self._config.updates_every, self._config.weights_every
        due = every > 0 and step % every == 0
        if due:
            self._engine.watch_update(self._config.layers and lag_every > 0 and step % lag_every == 0)
        yield
        self._update = self._engine.take_update() if due else None

    def forget_update(self) -> None:
        """The last step was taken back."""
        self._update = None

    def record(self, step: int, attempt: int) -> StepRecord:
        """Close the window: everything measured on this rank, and the engine's taps."""
        if self._output.problem is not None:
            raise self._output.problem
        taps = self._engine.taps()
        loss, loss_max, nonfinite_loss = self._window_loss()
        earlier = (self._output.nonfinite + nonfinite_loss) > 0
        backward = ~torch.isfinite(taps.local_sq).to(earlier.device) & ~earlier
        entropy, peak = self._attention()
        update, self._update = self._update, None
        layers = {}
        if self._config.layers:
            layers["layer_sq_share"] = taps.layer_sq_share
            if update is not None:
                layers["layer_update_sq_share"] = update.sq_share
            if update is not None and update.lag_share is not None:
                layers["layer_lag_share"] = update.lag_share
        return StepRecord(
            step=step,
            attempt=attempt,
            loss=loss,
            loss_max=loss_max,
            local_grad_norm=taps.local_sq.to(torch.float64).sqrt(),
            reduced_sq_share=taps.reduced_sq_share,
            nonfinite_forward=self._output.nonfinite,
            nonfinite_loss=nonfinite_loss,
            nonfinite_backward=backward,
            logit_max=self._output.peak if self._output.seen else math.nan,
            attention_entropy=entropy,
            attention_logit_max=peak,
            loss_scale=self._engine.loss_scale(),
            lr=self._engine.lr(),
            compute_s=self._computed - self._started - taps.reduce_s,
            collective_s=taps.collective_s if self._engine.device.type == "cpu" else math.nan,
            reduce_s=taps.reduce_s if self._engine.device.type == "cpu" else math.nan,
            leftover_sq=0.0 if self._leftover is None else self._leftover,
            update_sq_share=math.nan if update is None else update.sq_share.sum(),
            layers=layers,
            checks=taps.checks,
        )

    def _window_loss(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean and largest loss of the window, and how many losses were not finite while the output was; 0-dim float64."""
        if not self._losses:
            zero = torch.zeros_like(self._output.last)
            return zero, zero - torch.inf, zero
        losses = torch.stack(self._losses)
        finite = torch.isfinite(losses)
        nonfinite = (finite[:, 2] & ~(finite[:, 0] & finite[:, 1])).sum().to(losses)
        shown = losses[:, 0]
        # a choice, not a product: a micro-step without tokens says nothing about the loss
        counted = [i for i, weight in enumerate(self._weights) if weight > 0]
        if not counted or len(set(self._weights)) == 1:
            return shown.mean(), shown.amax(), nonfinite
        weights = torch.tensor([self._weights[i] for i in counted], dtype=losses.dtype, device=losses.device)
        mean = (shown[counted] * weights).sum() / weights.sum()
        return mean, shown.amax(), nonfinite

    def _look_for_leftovers(self) -> torch.Tensor | None:
        """Gradients that somebody left in the buffers would add up with this window's (BR-04). A look on the host, and a
        pass over what is there only if something is; in the first windows, then now and then."""
        self._windows += 1
        if self._windows <= 4 or self._windows % 16 == 0:
            return self._engine.leftover_sq()
        return None

    def _attention(self) -> tuple[Any, Any]:
        """Mean entropy (nats) and peak |logit| of attention, NaN where unknown: from `probe`, and from a module that
        leaves a list `attention_stats` of objects with `entropy` and `peak_logit` after a forward."""
        stats = getattr(self._engine.module, "attention_stats", None) or ()
        entropies = self._scalars([*self._entropies, *(layer.entropy for layer in stats)])
        peaks = self._scalars([*self._peaks, *(layer.peak_logit for layer in stats)])
        return entropies.mean() if len(entropies) else math.nan, peaks.amax() if len(peaks) else math.nan

    def _scalars(self, values: list[Any]) -> torch.Tensor:
        """(n,) float64 on the engine's device."""
        each = [
            torch.as_tensor(v, dtype=torch.float64, device=self._engine.device).detach().reshape(()) for v in values
        ]
        return torch.stack(each) if each else torch.empty(0)

    def close(self) -> None:
        self._hook.remove()


def _outputs(output: Any) -> Iterator[torch.Tensor]:
    """Floating-point tensors of a model's output that are not scalars (a scalar is the loss, looked at separately)."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.dim() > 0 and output.numel() > 0:
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _outputs(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _outputs(value)
