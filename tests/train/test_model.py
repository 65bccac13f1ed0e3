"""The reference model: presets, causality, and probed attention equal to fused attention."""

from __future__ import annotations

import math

import pytest
import torch

from resilient.errors import ConfigError
from resilient.train.model import GPT, ModelConfig

pytestmark = pytest.mark.timeout(60)
SMALL = ModelConfig(name="small", width=32, layers=2, heads=2, hidden=48, init_std=0.2)


def tokens(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(5))


def model(config: ModelConfig = SMALL) -> GPT:
    return GPT(config, torch.Generator().manual_seed(0))


def test_untrained_loss_is_that_of_guessing():
    net = model(ModelConfig())
    with torch.no_grad():
        logits = net(tokens())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens().flatten())
    assert logits.shape == (2, 24, 256)
    assert abs(float(loss) - math.log(256)) < 0.25


def test_a_later_byte_never_changes_an_earlier_output():
    net = model().eval()
    one, two = tokens(), tokens()
    two[:, 12] = (two[:, 12] + 1) % 256
    a, b = net(one), net(two)
    assert torch.allclose(a[:, :12], b[:, :12], atol=1e-6)
    assert not torch.allclose(a[:, 12:], b[:, 12:], atol=1e-3)


def test_order_of_earlier_bytes_matters():
    """Rotary positions are in effect: without them one layer of attention could not tell orders apart."""
    net = model(ModelConfig(width=32, layers=1, heads=2, hidden=48, init_std=0.2)).eval()
    one = tokens()
    two = one.clone()
    two[:, [3, 7]] = one[:, [7, 3]]
    assert not torch.allclose(net(one)[:, -1], net(two)[:, -1], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probed_step_equals_fused_step_and_draws_the_same_random_numbers(dtype):
    net = model().to(dtype).train()
    results = []
    for probed in (False, True):
        torch.manual_seed(3)
        net.probe_attention = probed
        net.zero_grad()
        logits = net(tokens())
        logits.float().logsumexp(-1).mean().backward()
        grads = torch.cat([p.grad.flatten().float() for p in net.parameters()])
        results.append((logits.float().detach(), grads, torch.get_rng_state()))
        assert logits.dtype is dtype
        assert len(net.attention_stats) == (2 if probed else 0)
    (a, grad_a, rng_a), (b, grad_b, rng_b) = results
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    assert (a - b).norm() / a.norm() < tolerance
    assert (grad_a - grad_b).norm() / grad_a.norm() < tolerance
    assert torch.equal(rng_a, rng_b)


@torch.no_grad()
def test_attention_stats_equal_a_direct_computation():
    net = model().eval()
    net.probe_attention = True
    ids = tokens()
    net(ids)
    stats = net.attention_stats[0]

    block = net.blocks[0]
    x = block.attention_norm(net.embed(ids))
    q, k, _ = block.attention.qkv(x).double().view(2, 24, 3, 2, 16).unbind(2)

    def spin(t: torch.Tensor) -> torch.Tensor:  # the same rotation, as complex numbers
        z = torch.complex(t[..., :8], t[..., 8:])
        angle = torch.arange(24)[:, None].double() * 10_000.0 ** (-torch.arange(8).double() / 8)
        z = z * torch.polar(torch.ones_like(angle), angle)[None, :, None]
        return torch.cat((z.real, z.imag), -1)

    entropies, peak = [], 0.0
    scores = torch.einsum("bqhd,bkhd->bhqk", spin(q), spin(k)) / 4.0
    for t in range(24):
        row = scores[:, :, t, : t + 1]
        p = row.softmax(-1)
        entropies.append(-(p * p.log()).sum(-1))
        peak = max(peak, float(row.abs().max()))
    assert float(stats.entropy) == pytest.approx(float(torch.stack(entropies).mean()), rel=1e-4)
    assert float(stats.peak_logit) == pytest.approx(peak, rel=1e-4)


def test_tied_head_shares_its_weights():
    net = model(ModelConfig(width=32, layers=1, heads=2, hidden=48, tie_head=True))
    assert net.head.weight is net.embed.weight
    untied = model(ModelConfig(width=32, layers=1, heads=2, hidden=48))
    assert untied.parameter_count() - net.parameter_count() == 256 * 32


def test_residual_init_keeps_depth_from_growing_the_output():
    def spread(layers: int) -> float:
        with torch.no_grad():
            net = model(ModelConfig(width=64, layers=layers, heads=2, hidden=96, init_std=0.1)).eval()
            x = net.embed(tokens())
            for block in net.blocks:
                x = block(x)
            return float(x.std())

    assert spread(12) < 1.5 * spread(2)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"heads": 3}, "model.heads"), ({"dropout": 1.0}, "model.dropout"), ({"layers": 0}, "model.layers")],
)
def test_bad_values_name_the_key(changes, key):
    with pytest.raises(ConfigError, match=key):
        ModelConfig(**changes)
