"""Poisoned data: wrong labels at fixed positions of the global sample order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from resilient.faults.config import PoisonedWindow
from resilient.train.data import IGNORED, Batch, TokenStream


class PoisonedStream:
    """A TokenStream whose labels in the positions [(step - 1) * G, (step - 1 + window) * G), G samples a window, went
    through one fixed permutation of the bytes that moves every one of them. Everything else is passed on."""

    def __init__(self, stream: TokenStream, fault: PoisonedWindow, vocab_size: int = 256) -> None:
        self.inner = stream
        self.poisoned = range(
            (fault.step - 1) * stream.global_batch, (fault.step - 1 + fault.window) * stream.global_batch
        )
        generator = torch.Generator().manual_seed(fault.seed)
        cycle = torch.randperm(vocab_size, generator=generator)
        self._wrong = torch.empty_like(cycle)
        self._wrong[cycle] = cycle.roll(1)  # one long cycle: no byte keeps its label

    def __iter__(self) -> Iterator[Batch]:
        return map(self._poison, iter(self.inner))

    def _poison(self, batch: Batch) -> Batch:
        if batch["position"] not in self.poisoned:
            return batch
        labels = batch["labels"]
        carrying = labels != IGNORED
        return {**batch, "labels": torch.where(carrying, self._wrong[labels.clamp(min=0)], labels)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # position, global_batch, samples, state_at

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def rewind(self, state: Mapping[str, Any]) -> None:
        self.inner.rewind(state)

    def close(self) -> None:
        self.inner.close()
