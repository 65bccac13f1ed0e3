"""S3: which layer group a parameter belongs to, and sums of squares by group."""

from __future__ import annotations

import math

import pytest
import torch

from resilient.engines.layers import Layers, Part, layer_groups

CPU = torch.device("cpu")


def groups(*names: str, most: int = 64) -> list[str]:
    return list(layer_groups(names, most).values())


def test_a_repeated_container_gives_one_group_per_element_and_the_rest_stays_at_the_top():
    names = ("embed.weight", "blocks.0.attention.qkv.weight", "blocks.0.mlp.down.weight", "blocks.1.mlp.down.weight")
    assert groups(*names, "norm.weight", "head.weight", "head.bias") == [
        "embed", "blocks.0", "blocks.0", "blocks.1", "norm", "head", "head",
    ]  # fmt: skip


def test_what_lies_beside_a_nested_container_is_told_apart():
    """GPT-2 as Hugging Face names it: embeddings and final norm share an ancestor with the blocks, and no more."""
    names = ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.bias")
    names += ("transformer.h.11.mlp.c_fc.weight", "transformer.ln_f.weight", "lm_head.weight")
    assert groups(*names) == [
        "transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.11", "transformer.ln_f", "lm_head",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("0.weight", "2.weight", "2.bias"), ["0", "2", "2"]),  # the model is a Sequential
        (
            ("layers.0.experts.0.w", "layers.0.experts.1.w", "layers.1.experts.0.w"),
            ["layers.0", "layers.0", "layers.1"],
        ),
        (("encoder.0.w", "head.w"), ["encoder", "head"]),  # a single element repeats nothing
        (("scale", "body.w"), ["scale", "body"]),  # a parameter of the root itself
        (("_orig_mod.blocks.0.w", "_orig_mod.blocks.1.w", "_orig_mod.head.w"), ["blocks.0", "blocks.1", "head"]),
        ((), []),
    ],
)
def test_odd_shapes(names: tuple[str, ...], expected: list[str]):
    assert groups(*names) == expected


def test_beyond_the_limit_the_middle_is_one_group():
    names = ["embed.w", *(f"h.{i}.w" for i in range(126)), "head.w"]
    found = list(dict.fromkeys(groups(*names)))
    assert len(found) == 64
    assert found[:2] == ["embed", "h.0"]
    assert found[-2:] == ["h.125", "head"]
    assert found[32] == "h.31..h.95"
    assert groups(*names).count("h.31..h.95") == 128 - 63


def test_sums_by_group_weigh_cut_and_keep_a_nan_where_it_is():
    layers = Layers({"a.w": 4, "b.0.w": 2, "b.1.w": 2, "c.w": 1}, CPU)
    assert layers.names == ("a", "b.0", "b.1", "c")
    assert layers.sizes == [4, 2, 2, 1]
    flat = torch.tensor([1.0, 2.0, math.nan, 0.0])
    parts = [
        (torch.full((2, 2), 3.0), Part(0, 0.5)),
        (flat, Part(1, 1.0, 0, 2)),
        (flat, Part(2, 1.0, 2, 4)),
        (torch.ones(20_000), Part(0)),  # by rows, with a rest
        (torch.zeros(0), Part(1)),
    ]
    for _ in range(2):  # the second time by the plan that was kept
        a, b0, b1, c = layers.sums(parts).tolist()
        assert (a, b0, c) == (pytest.approx(0.5 * 36 + 20_000), pytest.approx(5.0), 0.0)
        assert math.isnan(b1)
    assert layers.sums([]).tolist() == [0.0] * 4
