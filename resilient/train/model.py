"""The reference model: a small decoder-only transformer over bytes.

Pre-norm RMSNorm, rotary positions, SwiGLU, no biases. Attention is fused; on probed steps an explicit path computes
the same thing and also records the entropy of the attention and its peak logit (S8, S9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from resilient.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """conf/model. The defaults are the gpt_1m preset.

    hidden: width of the SwiGLU layer. tie_head: the output layer shares the embedding's weights. dropout acts on the
    embedding and the two residual branches, never inside attention, so that probed and fused steps draw the same
    random numbers. probe_every: steps between attention probes; 0: never.
    """

    name: str = "gpt_1m"
    vocab_size: int = 256
    width: int = 128
    layers: int = 5
    heads: int = 4
    hidden: int = 352
    dropout: float = 0.1
    tie_head: bool = False
    rope_base: float = 10_000.0
    init_std: float = 0.04
    probe_every: int = 10

    def __post_init__(self) -> None:
        for key in ("vocab_size", "width", "layers", "heads", "hidden"):
            if getattr(self, key) < 1:
                raise ConfigError(f"model.{key}={getattr(self, key)}: must be at least 1")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(f"model.heads={self.heads}: must split model.width={self.width} into heads of even size")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout={self.dropout}: must be in [0, 1)")


class AttentionStats(NamedTuple):
    """One layer's probe, 0-dim float32 tensors on the device.

    entropy: nats, mean over batch, heads and positions. peak_logit: largest |q.k|/sqrt(head size) before the softmax.
    """

    entropy: Tensor
    peak_logit: Tensor


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves convention.

    x: (B, H, T, D) -> the same shape and dtype. Angles are computed in fp32 on each call: a buffer would be cast to bf16
    together with the model.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequency  # (T, D/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.rope_base = config.rope_base
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.probe = False
        self.stats: AttentionStats | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, self.rope_base), rotate(k, self.rope_base)
        mixed = self._explicit(q, k, v) if self.probe else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The fused result up to rounding, (B, H, T, D) each, with the softmax in fp32 and the statistics kept."""
        future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.shape[-1])
        log_p = scores.masked_fill(future, -torch.inf).log_softmax(-1)
        p = log_p.exp()
        with torch.no_grad():
            entropy = -(p * log_p.masked_fill(future, 0.0)).sum(-1).mean()
            peak = scores.masked_fill(future, 0.0).abs().amax()
        self.stats = AttentionStats(entropy.detach(), peak.detach())
        return p.to(v.dtype) @ v


class SwiGLU(nn.Module):
    """Gated feed-forward (Shazeer 2020, arXiv:2002.05202), (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added after. (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = SwiGLU(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Byte-level language model. `blocks` is the ModuleList that sharding engines wrap.

    Set `probe_attention = True` before a forward to have it leave one AttentionStats per layer in `attention_stats`;
    otherwise the list is empty. Nothing here synchronises with the host.

    generator: source of the initial weights; None: the global CPU stream. Give all ranks the same.
    """

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_head:
            self.head.weight = self.embed.weight
        self.probe_attention = False
        self.attention_stats: list[AttentionStats] = []
        self._init_weights(generator)

    @torch.no_grad()
    def _init_weights(self, generator: torch.Generator | None) -> None:
        """Normal(0, init_std); the two projections into the residual stream by 1/sqrt(2 layers) (GPT-2), so that its
        variance at the output does not grow with depth. Norm weights stay 1."""
        residual = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                parameter.normal_(0.0, residual if into_residual else self.config.init_std, generator=generator)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: (B, T) int64 in [0, vocab_size) -> logits (B, T, vocab_size) in the model's compute dtype."""
        x = self.drop(self.embed(input_ids))
        attentions: list[Attention] = [block.attention for block in self.blocks]  # type: ignore[misc]
        for attention in attentions:
            attention.probe, attention.stats = self.probe_attention, None
        for block in self.blocks:
            x = block(x)
        self.attention_stats = [a.stats for a in attentions if a.stats is not None]
        return self.head(self.norm(x))

    def parameter_count(self) -> int:
        """Trainable parameters, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())


def set_probe(module: nn.Module, on: bool) -> bool:
    """Have a GPT probe its attention in the next forward passes, or not; any other module is left alone.

    Returns what it was before.
    """
    if not isinstance(module, GPT):
        return False
    before, module.probe_attention = module.probe_attention, on
    return before
