"""64-bit digests of tensors and of nested state, computed on the tensor's device without a host sync per tensor.

The digest is a position-weighted sum of the raw bits modulo 2**64: cheap, order-sensitive inside a tensor and the
same on CPU and CUDA. It finds accidents, not attackers; files carry a cryptographic digest of their own.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

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
    if isinstance(state, Mapping):
        for key in sorted(state, key=str):
            yield from walk(state[key], f"{prefix}/{key}")
    elif isinstance(state, list | tuple):
        for i, item in enumerate(state):
            yield from walk(item, f"{prefix}/{i}")
    else:
        yield prefix, state


def state_digests(state: Any) -> dict[str, str]:
    """Digest of each leaf, path -> hex. One host copy for all tensors of a device together."""
    leaves = list(walk(state))
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    found: dict[str, str] = {}
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for path, tensor in tensors:
        by_device.setdefault(tensor.device, []).append((path, tensor_digest(tensor)))
    for entries in by_device.values():
        values = torch.stack([digest for _, digest in entries]).tolist()
        found.update({path: f"{value & (2**64 - 1):016x}" for (path, _), value in zip(entries, values, strict=True)})
    for path, leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            found[path] = hashlib.blake2b(repr(leaf).encode(), digest_size=8).hexdigest()
    return found


def state_digest(state: Any) -> str:
    """One 64-bit hex digest of a whole nested state."""
    h = hashlib.blake2b(digest_size=8)
    for path, digest in sorted(state_digests(state).items()):
        h.update(f"{path}={digest};".encode())
    return h.hexdigest()
