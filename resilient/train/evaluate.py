"""Held-out loss on a fixed set of windows, split over the ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from resilient.engines.base import Engine
from resilient.train.data import IGNORED, Corpus, DataConfig
from resilient.train.model import set_probe


class HeldOut:
    """Callable: the mean loss over the held-out windows, nats per byte, the same value on every rank.

    batches: how many micro-batches of windows to use, spread evenly over the held-out text; fewer when there is less.
    The set does not depend on the number of ranks. Every rank runs the same number of forward passes, as sharded
    engines need: where windows run out, rows carry no loss. The model is put into eval mode and back, attention probes
    are off, no random number is drawn. Collective: all ranks of the default group call it together.
    """

    def __init__(
        self, engine: Engine, corpus: Corpus, config: DataConfig, *, batches: int, rank: int, world: int
    ) -> None:
        self._engine = engine
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
        module, device = self._engine.module, self._engine.device
        training, probing = module.training, set_probe(module, False)
        module.eval()
        total = torch.zeros((), dtype=torch.float64, device=device)
        try:
            for input_ids, labels in zip(self._input_ids, self._labels, strict=True):
                logits = self._engine(input_ids.to(device)).flatten(0, 1).float()
                total += F.cross_entropy(
                    logits, labels.to(device).flatten(), ignore_index=IGNORED, reduction="sum"
                ).double()
        finally:
            module.train(training)
            set_probe(module, probing)
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total) / self._tokens
