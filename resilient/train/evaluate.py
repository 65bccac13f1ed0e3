"""Evaluation: held-out loss on a fixed set of windows, and text sampled from the model, to see a silent collapse (S1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from resilient.engines.base import Engine
from resilient.train.data import IGNORED, Corpus, DataConfig
from resilient.train.model import set_probe

_PASSES = 8  # between two looks at whether the job has to leave


class HeldOut:
    """Callable: the mean loss over the held-out windows, nats per byte, the same value on every rank.

    batches: how many micro-batches of windows to use, spread evenly over the held-out text; fewer when there is less.
    The set does not depend on the number of ranks. Every rank runs the same number of forward passes, as sharded
    engines need: where windows run out, rows carry no loss. The model is put into eval mode and back, attention probes
    are off, no random number is drawn. Collective: all ranks of the default group call it together.

    leaving: asked every few passes, on all ranks alike; once it is true the rest is left out and the result is NaN.
    """

    def __init__(
        self,
        engine: Engine,
        corpus: Corpus,
        config: DataConfig,
        *,
        batches: int,
        rank: int,
        world: int,
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine, self._leaving = engine, leaving
        available = (len(corpus.held_out) - 1) // config.seq_len
        wanted = min(max(batches, 1) * config.micro_batch, available)
        starts = (np.arange(wanted) * available // wanted) * config.seq_len
        rounds = -(-wanted // (config.micro_batch * world))  # forward passes on each rank
        rows = np.full(rounds * config.micro_batch * world, -1)
        rows[:wanted] = starts
        mine = rows.reshape(rounds, world, config.micro_batch)[:, rank]  # (rounds, micro)
        text = torch.from_numpy(corpus.held_out[np.maximum(mine, 0)[..., None] + np.arange(config.seq_len + 1)])
        self._input_ids = text[..., :-1].long()  # (rounds, micro, T)
        self._labels = text[..., 1:].long().masked_fill(torch.from_numpy(mine < 0)[..., None], IGNORED)
        self._tokens = wanted * config.seq_len

    @torch.no_grad()
    def __call__(self) -> float:
        device = self._engine.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        with _evaluating(self._engine.module):
            for done, (input_ids, labels) in enumerate(zip(self._input_ids, self._labels, strict=True)):
                if done % _PASSES == 0 and self._leaving():
                    return math.nan
                logits = self._engine(input_ids.to(device)).flatten(0, 1).float()
                total += F.cross_entropy(
                    logits, labels.to(device).flatten(), ignore_index=IGNORED, reduction="sum"
                ).double()
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total) / self._tokens


@dataclass(frozen=True)
class Sample:
    """What the model wrote. entropy: of its output, nats a token, mean over all sampled tokens. repetition: see
    `repetition`, mean over the prompts. text: the continuation of the first prompt, for people."""

    entropy: float
    repetition: float
    text: str


class Sampler:
    """Callable: text sampled at temperature 1 behind a few fixed held-out prompts. A collapsed model keeps its loss for
    a while, but its entropy falls or its text turns in circles.

    tokens: sampled per prompt, one forward pass each; at most `seq_len` tokens of context are read again. Prompts and
    random numbers are the same at every call and on every rank, so that calls can be compared and sharded engines run
    in step; the global random streams are not touched. Collective for sharded engines: all ranks call it together.
    """

    def __init__(
        self, engine: Engine, corpus: Corpus, config: DataConfig, *, tokens: int, prompts: int = 2, seed: int = 0
    ) -> None:
        self._engine, self._tokens, self._seed = engine, tokens, seed
        self._context = config.seq_len
        length = max(min(16, config.seq_len // 2), 1)
        starts = np.arange(prompts) * (len(corpus.held_out) - length) // prompts
        self._prompts = torch.from_numpy(
            corpus.held_out[starts[:, None] + np.arange(length)]
        ).long()  # (prompts, length)

    @torch.no_grad()
    def __call__(self) -> Sample:
        device = self._engine.device
        generator = torch.Generator().manual_seed(self._seed)
        text = self._prompts.to(device)
        entropy = torch.zeros((), dtype=torch.float64, device=device)
        with _evaluating(self._engine.module):
            for _ in range(self._tokens):
                log_p = self._engine(text[:, -self._context :])[:, -1].float().log_softmax(-1)  # (prompts, vocabulary)
                entropy += torch.special.entr(log_p.exp()).sum(-1).mean().double()
                gumbel = -(-torch.rand(log_p.shape, generator=generator).to(device).log()).log()
                text = torch.cat((text, (log_p + gumbel).argmax(-1, keepdim=True)), dim=1)  # a draw without a host sync
        written = text[:, self._prompts.shape[1] :].cpu().numpy()
        return Sample(
            entropy=float(entropy) / max(self._tokens, 1),
            repetition=float(np.mean([repetition(row) for row in written])),
            text=bytes(np.minimum(written[0], 255).astype(np.uint8)).decode("utf-8", "replace"),
        )


def repetition(tokens: np.ndarray, n: int = 4) -> float:
    """Share of a text's n-grams that occurred in it before: 0 for none, near 1 for a loop. tokens: (T,) integers."""
    if len(tokens) <= n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """In eval mode, attention probes off; afterwards as before."""
    training, probing = module.training, set_probe(module, False)
    module.eval()
    try:
        yield
    finally:
        module.train(training)
        set_probe(module, probing)
