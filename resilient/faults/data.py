"""Faults of the data: other labels or other samples at fixed positions of the global order, or in one sample.

They come again whenever that data is read again; skipping it is what helps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from resilient.engines.base import Engine
from resilient.faults.config import BadSample, EmptyBatch, PoisonedWindow, ShuffleMismatch
from resilient.train.data import IGNORED, Batch, TokenStream, sample_ids
from resilient.train.loop import Objective, ObjectiveFn


class ChangedStream:
    """A TokenStream whose micro-batches go through `change`. Everything else is passed on."""

    def __init__(self, stream: TokenStream) -> None:
        self.inner = stream

    def change(self, batch: Batch) -> Batch:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        return map(self.change, iter(self.inner))

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


def positions(stream: TokenStream, step: int, window: int | None) -> range:
    """Of the samples that `window` steps from `step` on (None: and all later ones) read in an undisturbed run."""
    first = (step - 1) * stream.global_batch
    return range(first, sys.maxsize if window is None else first + window * stream.global_batch)


class WrongLabels:
    """One fixed permutation of the vocabulary, drawn from `seed`, that moves every entry."""

    def __init__(self, seed: int, vocab_size: int = 256) -> None:
        cycle = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
        self._wrong = torch.empty_like(cycle)
        self._wrong[cycle] = cycle.roll(1)  # one long cycle: no byte keeps its label

    def __call__(self, labels: torch.Tensor) -> torch.Tensor:
        return torch.where(labels != IGNORED, self._wrong[labels.clamp(min=0)], labels)


class PoisonedStream(ChangedStream):
    """Wrong labels in all micro-batches of some windows."""

    def __init__(self, stream: TokenStream, fault: PoisonedWindow) -> None:
        super().__init__(stream)
        self.poisoned = positions(stream, fault.step, fault.window)
        self._wrong = WrongLabels(fault.seed)

    def change(self, batch: Batch) -> Batch:
        if batch["position"] not in self.poisoned:
            return batch
        return {**batch, "labels": self._wrong(batch["labels"])}


class EmptyStream(ChangedStream):
    """No label that carries loss in some windows."""

    def __init__(self, stream: TokenStream, fault: EmptyBatch) -> None:
        super().__init__(stream)
        self.empty = positions(stream, fault.step, fault.window)

    def change(self, batch: Batch) -> Batch:
        if batch["position"] not in self.empty:
            return batch
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}


class MismatchedStream(ChangedStream):
    """The samples that a sampler with another seed, epoch or rank delivers at the same positions.

    Its state names the other seed while it is in force, as that of a sampler set up so would; a state of either seed
    can be loaded.
    """

    def __init__(self, stream: TokenStream, fault: ShuffleMismatch, rank: int, world: int) -> None:
        super().__init__(stream)
        self._positions = positions(stream, fault.step, fault.window)
        self._seed = int(stream.state_dict()["seed"])
        self._other_seed = self._seed + (fault.seed if fault.differs == "seed" else 0)
        self._ahead = stream.samples if fault.differs == "epoch" else 0
        others, data = (
            (rank + 1) % world,
            stream._data,
        )  # what makes this rank's micro-batches, from their positions alone
        offset = others * data.micro_batch if fault.differs == "rank" else data.offset
        self._other = replace(data, seed=self._other_seed, offset=offset)
        self._told = fault.told

    @property
    def order(self) -> dict[str, Any]:
        """What the micro-batches are given out by that comes next. The share is a rank's own, and no part of it."""
        inner = dict(self.inner.order)
        if self._told and self.inner.position in self._positions:
            inner["seed"] = self._other_seed
            if self._ahead:
                inner["ahead"] = self._ahead
        return inner

    def change(self, batch: Batch) -> Batch:
        position = batch["position"]
        if position not in self._positions:
            return batch
        return {**self._other[position + self._ahead], "position": position}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "seed": self._other_seed} if state["position"] in self._positions else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(self._own(state))

    def rewind(self, state: Mapping[str, Any]) -> None:
        super().rewind(self._own(state))

    def _own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {**state, "seed": self._seed} if state.get("seed") == self._other_seed else dict(state)


def first_sample(stream: TokenStream, step: int, rank: int) -> int:
    """The id of the first sample that `rank` reads for `step` in an undisturbed run; the same answer on all ranks."""
    order = stream.state_dict()
    position = (step - 1) * stream.global_batch + rank * stream.micro_batch
    return int(sample_ids(position, 1, order["samples"], order["seed"])[0])


class BadSampleStream(ChangedStream):
    """Wrong labels in one sample, wherever it is read."""

    def __init__(self, stream: TokenStream, fault: BadSample) -> None:
        super().__init__(stream)
        self.sample = first_sample(stream, fault.step, fault.rank)
        self._wrong = WrongLabels(fault.seed)

    def change(self, batch: Batch) -> Batch:
        bad = batch["ids"] == self.sample
        if not bad.any():
            return batch
        return {**batch, "labels": torch.where(bad[:, None], self._wrong(batch["labels"]), batch["labels"])}


def bad_sample_objective(objective: ObjectiveFn, fault: BadSample, sample: int) -> ObjectiveFn:
    """`objective`, and a loss, or only its gradient, `factor` times as large for a micro-batch that has the sample."""

    def changed(engine: Engine, batch: Batch) -> Objective:
        result = objective(engine, batch)
        if not torch.is_grad_enabled() or not bool((batch["ids"] == sample).any()):  # on the host
            return result
        loss = result.loss_sum
        if fault.loss == "odd":
            return replace(result, loss_sum=loss * fault.factor)
        return replace(result, loss_sum=loss.detach() + (loss - loss.detach()) * fault.factor)

    return changed
