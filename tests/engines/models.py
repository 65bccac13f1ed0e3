"""A small language model with everything that trips engines up: dropout, a buffer, an embedding, a tied head, a
parameter that never gets a gradient, parameter groups that differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

VOCAB, LENGTH, BATCH = 23, 6, 4


@dataclass(frozen=True)
class Setup:
    """What one check wants. Every adapter builds its engine from this and nothing else.

    groups: two parameter groups with different LR and weight decay (vectors apart from matrices).
    unused: the model holds a parameter that no forward uses.
    bucket_mb: small enough that this model makes several buckets.
    """

    accumulation: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    dropout: float = 0.0
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-2
    gamma: float = 0.9  # of ExponentialLR: a recursive schedule, which a leaked LR factor would poison
    scheduled: bool = True
    clip: float | None = None
    tied: bool = False
    groups: bool = False
    unused: bool = False
    width: int = 16
    bucket_mb: float = 0.004
    seed: int = 1

    def but(self, **changes: object) -> Setup:
        """The same with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


class Centre(nn.Module):
    """Subtracts the batch mean in training and the running mean (a buffer, moved by every forward) in evaluation."""

    mean: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x - self.mean.to(x.dtype)
        batch_mean = x.mean(dim=(0, 1))
        self.mean.lerp_(batch_mean.detach().to(self.mean.dtype), 0.1)
        return x - batch_mean


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)  # odd: shards are uneven and padded
        self.down = nn.Linear(3 * width + 1, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x + x.roll(1, dims=1)
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(mixed)))))


class TinyLM(nn.Module):
    """tokens (batch, length) int64 -> logits (batch, length, VOCAB)."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, setup.width)
        self.blocks = nn.ModuleList(Block(setup.width, setup.dropout) for _ in range(2))
        self.centre = Centre(setup.width)
        self.head = nn.Linear(setup.width, VOCAB, bias=False)
        if setup.tied:
            self.head.weight = self.embedding.weight
        if setup.unused:
            self.spare = nn.Linear(setup.width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.centre(x))


def build_model(setup: Setup) -> TinyLM:
    """The same float32 weights on every rank and in every process, from setup.seed; leaves the RNG as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        return TinyLM(setup)


def build_optimizer(module: nn.Module, setup: Setup) -> torch.optim.Optimizer:
    params = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict] = [{"params": params}]
    if setup.groups:
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": setup.lr / 2},
        ]
    if setup.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=setup.lr)
    return torch.optim.AdamW(groups, lr=setup.lr, betas=(0.9, 0.95), weight_decay=0.05)


def build_scheduler(optimizer: torch.optim.Optimizer, setup: Setup) -> LRScheduler | None:
    return ExponentialLR(optimizer, setup.gamma) if setup.scheduled else None


def batch(index: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), each (BATCH, LENGTH) int64: micro-step `micro` of data window `index` on `rank`."""
    generator = torch.Generator().manual_seed(1_000_003 * index + 1009 * micro + rank)
    text = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, at least in float32."""
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))
