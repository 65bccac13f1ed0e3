"""The reference training loop: what a guarded loop of one's own looks like, with token-weighted averaging."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from resilient.engines.base import Engine
from resilient.train.data import IGNORED, Batch
from resilient.train.evaluate import Sample
from resilient.train.model import set_probe


class LoopGuard(Protocol):
    """What the loop needs of a `resilient.Guard`."""

    engine: Engine
    world: int

    @property
    def step_index(self) -> int:
        """Optimizer step being attempted, 1-based."""

    @property
    def applied(self) -> int:
        """Optimizer steps in force."""

    @property
    def window_tokens(self) -> float:
        """Loss-carrying tokens of the current window over all ranks and micro-steps; 0.0 if unknown."""

    @property
    def window_size(self) -> int:
        """Micro-steps in the current window."""

    def batches(self, *, steps: int) -> Iterator[Batch]:
        """Micro-batches, until `steps` optimizer steps are in force, the data runs out, or a stop is decided."""

    def backward(self, loss: Tensor, report: Tensor | None = None, tokens: int | None = None) -> None:
        """Mean over micro-steps and ranks. report: this rank's own mean loss; tokens: how many tokens it is over."""

    def step(self) -> bool:
        """True when a window ended, applied or refused."""

    def evaluation(self) -> AbstractContextManager[Any]: ...

    def evaluated(
        self,
        step: int,
        *,
        loss: float | None = None,
        entropy: float | None = None,
        repetition: float | None = None,
        text: str | None = None,
    ) -> None: ...


@dataclass(frozen=True)
class Objective:
    """Loss of one micro-batch on this rank. loss_sum: 0-dim fp32 tensor, summed over the tokens that carry loss, nats;
    tokens: how many these are (a host integer); logits: the model's output."""

    loss_sum: Tensor
    tokens: int
    logits: Tensor


ObjectiveFn = Callable[[Engine, Batch], Objective]


def next_byte_loss(engine: Engine, batch: Batch) -> Objective:
    """Cross entropy of the next byte. A micro-batch without a single labelled token gives an exact zero that still
    hangs on the graph, so its rank takes part in every collective and adds nothing (BR-40)."""
    tokens = int((batch["labels"] != IGNORED).sum())  # counted on the host, before the copy
    input_ids = batch["input_ids"].to(engine.device, non_blocking=True)
    labels = batch["labels"].to(engine.device, non_blocking=True)
    logits = engine(input_ids)
    loss_sum = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return Objective(loss_sum, tokens, logits)


def weighted(result: Objective, guard: LoopGuard) -> Tensor:
    """The loss whose mean over ranks and micro-steps is the mean over all tokens of the window, however they are spread.

    When the window's tokens are not known beforehand: this rank's own mean.
    """
    if guard.window_tokens:
        return result.loss_sum * (guard.world * guard.window_size / guard.window_tokens)
    return result.loss_sum / max(result.tokens, 1)


def train(
    guard: LoopGuard,
    evaluate: Callable[[], float],
    *,
    steps: int,
    eval_every: int = 0,
    probe_every: int = 0,
    sample: Callable[[], Sample] | None = None,
    objective: ObjectiveFn = next_byte_loss,
) -> float:
    """Train until `steps` optimizer steps are in force; return the last evaluation loss (nats per byte). On every rank.

    eval_every: steps between evaluations; 0: only at the end. probe_every: steps between attention probes of a GPT;
    0: none. They depend on the step number alone, so that a replay probes the same steps. sample: what the model writes,
    asked at each evaluation; None: nothing is sampled.
    """
    evaluated: tuple[int, float] | None = None
    for batch in guard.batches(steps=steps):
        set_probe(guard.engine.module, probe_every > 0 and guard.step_index % probe_every == 0)
        result = objective(guard.engine, batch)
        own_mean = result.loss_sum.detach() / max(result.tokens, 1)
        guard.backward(weighted(result, guard), report=own_mean, tokens=result.tokens)
        due = guard.step() and eval_every > 0 and guard.applied % eval_every == 0
        if due and (evaluated is None or evaluated[0] != guard.applied):  # a refused step changes nothing
            evaluated = (guard.applied, _evaluate(guard, evaluate, sample))
    if evaluated is None or evaluated[0] != guard.applied:
        evaluated = (guard.applied, _evaluate(guard, evaluate, sample))
    return evaluated[1]


def _evaluate(guard: LoopGuard, evaluate: Callable[[], float], sample: Callable[[], Sample] | None) -> float:
    with guard.evaluation(), torch.no_grad():
        loss = evaluate()
        written = sample() if sample is not None else None
    if written is None:
        guard.evaluated(guard.applied, loss=loss)
    else:
        guard.evaluated(
            guard.applied, loss=loss, entropy=written.entropy, repetition=written.repetition, text=written.text
        )
    return loss
