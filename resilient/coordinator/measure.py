"""Measure: fill a StepRecord while forward and backward run, without a host sync.

Everything here stays a 0-dim tensor on the engine's device until the exchange copies the whole table once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from resilient.engines.base import Engine
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

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.paused or not torch.is_grad_enabled():
            return
        try:
            self._look_at(output)
        except Exception as error:
            self.problem, self.paused = error, True

    def _look_at(self, output: Any) -> None:
        peak = torch.zeros((), dtype=torch.float64, device=self._device)
        for tensor in _outputs(output):
            # the maximum norm is NaN or Inf if any element is: finiteness and peak in one pass, no boolean copy
            peak = torch.maximum(peak, torch.linalg.vector_norm(tensor.detach(), ord=torch.inf).to(peak))
        finite = torch.isfinite(peak)
        self.last = peak
        self.nonfinite = self.nonfinite + (~finite)
        self.peak = torch.where(finite, torch.maximum(self.peak, peak), self.peak)

    def __reduce__(self) -> tuple[type[OutputTap], tuple[()]]:
        return OutputTap, ()


class Measurement:
    """Accumulates one window's measurements. Hooks the root module's output; `close` removes the hook."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._output = OutputTap(engine.device)
        self._hook = engine.module.register_forward_hook(self._output)
        self.start()

    def start(self) -> None:
        """Begin a window."""
        zero = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        self._output.start()
        self._loss_sum, self._weight = zero, 0.0
        self._unweighted, self._micro_steps = zero, 0
        self._loss_max = zero - torch.inf
        self._nonfinite_loss = zero
        self._started = time.perf_counter()

    def pause(self, paused: bool) -> None:
        """While paused (evaluation), outputs are not looked at."""
        self._output.paused = paused

    def loss(self, loss: torch.Tensor, report: torch.Tensor | None, tokens: float | None) -> None:
        """One micro-step's loss. `report` is what to show for it (this rank's own mean), default the loss itself."""
        shown = (loss if report is None else report).detach().to(torch.float64).reshape(())
        weight = 1.0 if tokens is None else tokens
        if weight > 0:  # a branch, not a product: a micro-step without tokens says nothing about the loss
            self._loss_sum = self._loss_sum + shown * weight
            self._weight += weight
        self._unweighted, self._micro_steps = self._unweighted + shown, self._micro_steps + 1
        self._loss_max = torch.maximum(self._loss_max, shown)
        bad = ~torch.isfinite(shown) | ~torch.isfinite(loss.detach().to(torch.float64).reshape(()))
        self._nonfinite_loss = self._nonfinite_loss + (bad & torch.isfinite(self._output.last))

    def record(self, step: int, attempt: int) -> StepRecord:
        """Close the window: everything measured on this rank, and the engine's taps."""
        if self._output.problem is not None:
            raise self._output.problem
        taps = self._engine.taps()
        earlier = (self._output.nonfinite > 0) | (self._nonfinite_loss > 0)
        backward = ~torch.isfinite(taps.local_sq).to(earlier.device) & ~earlier
        mean = self._loss_sum / self._weight if self._weight else self._unweighted / max(self._micro_steps, 1)
        return StepRecord(
            step=step,
            attempt=attempt,
            loss=mean,
            loss_max=self._loss_max,
            local_grad_norm=taps.local_sq.to(torch.float64).sqrt(),
            reduced_sq_share=taps.reduced_sq_share,
            nonfinite_forward=self._output.nonfinite,
            nonfinite_loss=self._nonfinite_loss,
            nonfinite_backward=backward,
            logit_max=self._output.peak,
            attention_entropy=_attention_entropy(self._engine.module),
            loss_scale=self._engine.loss_scale(),
            lr=self._engine.lr(),
            compute_s=time.perf_counter() - self._started,
        )

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


def _attention_entropy(module: torch.nn.Module) -> Any:
    """Mean attention entropy (nats) if the model probed it in this window (`attention_stats`), else NaN."""
    stats = getattr(module, "attention_stats", None)
    if not stats:
        return torch.nan
    return torch.stack([layer.entropy.to(torch.float64) for layer in stats]).mean()
