"""64-bit digests: of live tensors on their own device, and of nested state in host memory.

`tensor_digest` is a position-weighted sum of the raw bits modulo 2**64: order-sensitive inside a tensor, the same on CPU
and CUDA, no host sync per tensor. `state_digest` is xxh3 over a whole nested state, faster than copying it. Both find
accidents, not attackers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

_CHUNK = 1 << 20
_CACHED = 1 << 16  # words of a chunk that are worked on at a time, where a processor's cache makes that faster
_OFFSET = 0x9E3779B9  # so that zeros count
_MULTIPLIER = 6364136223846793005  # odd (Knuth's MMIX): chunks in another order give another digest


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """0-dim int64 tensor on the same device: digest of the tensor's raw bits (shape and dtype not included)."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = _as_words(flat)
    weights = _weights(words.device)
    step = _CACHED if words.device.type == "cpu" else _CHUNK
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        n = chunk.numel()
        # sum of (word + _OFFSET) * weight; wraps modulo 2**64, the same everywhere
        found = [(some * by).sum() for some, by in zip(chunk.split(step), weights[:n].split(step), strict=True)]
        mixed = (found[0] if len(found) == 1 else torch.stack(found).sum()) + _signed(_OFFSET * n * (n + 2))
        total = total * _MULTIPLIER + mixed
    return total


def joint_digest(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """0-dim int64 on `device`: one digest of several tensors, in this order. 0 without any element.

    Short tensors of a kind are put together first: a model has hundreds of them, and each digest is a few launches."""
    parts: list[list[torch.Tensor]] = []
    for tensor in tensors:
        words = _as_words(tensor.detach().contiguous().view(-1))
        last = parts[-1][-1] if parts else None
        if (
            last is not None
            and max(words.numel(), last.numel()) <= _CACHED
            and (words.dtype, words.device) == (last.dtype, last.device)
        ):
            parts[-1].append(words)
        else:
            parts.append([words])
    total = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        digest = tensor_digest(part[0] if len(part) == 1 else torch.cat(part))
        total = total * _MULTIPLIER + digest.to(device)
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """3, 5, 7 ... for each word of a chunk."""
    return torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * 2 + 1


def _signed(value: int) -> int:
    """Modulo 2**64, as an int64 holds it."""
    return (value + 2**63) % 2**64 - 2**63


def _as_words(flat: torch.Tensor) -> torch.Tensor:
    """The same bits as integers: 32-bit words where the size allows, bytes otherwise."""
    if flat.dtype is torch.bool:
        return flat.to(torch.uint8)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.element_size() >= 4:
        return flat.view(torch.int32)
    return flat.view(torch.int16) if flat.element_size() == 2 else flat.view(torch.uint8)


def walk(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts, lists and tuples with their path, in a stable order."""
    stack = [(prefix, state)]
    while stack:
        path, item = stack.pop()
        kind = type(item)
        if kind is torch.Tensor or kind is int or kind is float or kind is str:  # nearly all leaves
            yield path, item
        elif kind is dict or isinstance(item, Mapping):
            stack.extend((f"{path}/{key}", item[key]) for key in sorted(item, key=str, reverse=True))
        elif isinstance(item, list | tuple):
            stack.extend((f"{path}/{i}", item[i]) for i in range(len(item) - 1, -1, -1))
        else:
            yield path, item


def state_digest(state: Any) -> str:
    """One 64-bit hex digest (xxh3) of a whole nested state: paths, shapes, dtypes and every bit of the tensors, repr of
    everything else. Tensors of an accelerator are copied to the host for it, one at a time."""
    whole, about = xxhash.xxh3_64(), []
    for path, leaf in walk(state):
        if isinstance(leaf, torch.Tensor):
            about.append(f"{path}:{leaf.dtype}{tuple(leaf.shape)}")
            whole.update(_bytes(leaf))
        else:
            about.append(f"{path}={leaf!r}")
    whole.update("\n".join(about).encode())
    return whole.hexdigest()


def state_digests(state: Any) -> dict[str, str]:
    """The same of each leaf by itself, path -> hex: to say what differs."""
    return {path: state_digest(leaf) for path, leaf in walk(state)}


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bits, in C order, without a copy where they lie so in host memory."""
    flat = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    if flat.dtype is torch.bfloat16:  # NumPy has none
        return flat.view(torch.int16).numpy(force=True).data
    try:
        return flat.numpy(force=True).data
    except TypeError:  # float8 and the like
        return flat.reshape(-1).view(torch.uint8).numpy(force=True).data
