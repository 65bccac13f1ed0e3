"""AdamW with decay groups, and the cosine schedule with warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from resilient.errors import ConfigError


@dataclass(frozen=True)
class OptimConfig:
    """conf/optim.

    clip: largest global gradient norm, 0: no clipping. min_lr_ratio: LR at the end of the cosine, as a share of `lr`.
    decay_steps: length of the schedule in optimizer steps, warm-up included; null: run.steps.
    """

    name: str = "adamw"
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"optim.lr={self.lr}: must be positive")
        if self.clip < 0:
            raise ConfigError(f"optim.clip={self.clip}: must not be negative (0 turns clipping off)")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"optim.betas={list(self.betas)}: both must be in [0, 1)")
        if self.warmup_steps < 0:
            raise ConfigError(f"optim.warmup_steps={self.warmup_steps}: must not be negative")
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ConfigError(f"optim.min_lr_ratio={self.min_lr_ratio}: must be in [0, 1]")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ConfigError(f"optim.decay_steps={self.decay_steps}: must be at least 1, or null for run.steps")


def make_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) with two groups: matrices decay; norms, biases and
    embeddings (and a head tied to one) do not."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decay if parameter.ndim >= 2 and id(parameter) not in embeddings else no_decay).append(parameter)
    groups = [
        {"params": decay, "weight_decay": config.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps)


class WarmupCosine:
    """LR factor by optimizer steps taken: linear warm-up to 1, cosine down to `floor`, flat afterwards.

    An object rather than a closure, so that LambdaLR can put it into its state.
    """

    def __init__(self, warmup: int, total: int, floor: float) -> None:
        self.warmup = warmup
        self.total = total
        self.floor = floor

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        progress = min((step - self.warmup) / max(self.total - self.warmup, 1), 1.0)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_scheduler(optimizer: Optimizer, config: OptimConfig, steps: int) -> LambdaLR:
    """The schedule over `config.decay_steps`, or over `steps` (run.steps) when that is null. Call after make_optimizer."""
    return LambdaLR(optimizer, WarmupCosine(config.warmup_steps, config.decay_steps or steps, config.min_lr_ratio))
