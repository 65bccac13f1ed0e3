"""Every random stream of this rank: Python, NumPy, torch CPU, the current device, and the engine's trackers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch

from resilient.checkpoint.digest import state_digest
from resilient.errors import CheckpointError
from resilient.signals.digest import short_digest

Stream = Literal["python", "numpy", "torch", "device"]


_NumpyState = tuple[str, np.ndarray, int, int, float]


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """All streams of this rank as tensors and plain values that `torch.load(weights_only=True)` accepts."""
    numpy_state = cast(_NumpyState, np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": _of_python(random.getstate()),
        "numpy": _of_numpy(numpy_state),
        "torch": torch.get_rng_state().clone(),
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).clone()
    return state


def restore_rng(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Put all captured streams back. A stream that is missing is an error, never a silent reseed (BR-15)."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        (
            numpy_state["name"],
            numpy_state["keys"].numpy().astype(np.uint32),
            numpy_state["pos"],
            numpy_state["has_gauss"],
            numpy_state["cached"],
        )
    )
    torch.set_rng_state(state["torch"])
    if device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _of_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def _of_numpy(state: _NumpyState) -> dict[str, Any]:
    name, keys, pos, has_gauss, cached = state
    return {
        "name": str(name),
        "keys": torch.from_numpy(keys.astype(np.int64)),
        "pos": int(pos),
        "has_gauss": int(has_gauss),
        "cached": float(cached),
    }


def rederive(
    saved: Sequence[Mapping[str, Any]], *, step: int, rank: int, world: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """The streams of one rank of another world, in the form of `capture_rng`; and stream -> what was done, to record.

    saved: those of all ranks of the earlier world, rank 0's first. step: after which they were saved.
    The rule, for each stream by itself. One that all ranks had alike (seeded alike, to draw alike) is common to the new
    ranks, too: "kept". Any other is started anew on every rank, the low ones not excepted, from a seed of 64 bits:
    blake2b("<stream> <digest of rank 0's stream> <step> <world> <rank>"): "derived". So the same checkpoint gives the same
    streams, no two ranks (and no two worlds) share one, and none goes on where another rank was.
    Raises CheckpointError if the ranks did not save the same streams."""
    names = list(saved[0])
    if any(list(other) != names for other in saved):
        raise CheckpointError(f"rng: not every rank has saved the streams {', '.join(names)}")
    state: dict[str, Any] = {}
    done: dict[str, str] = {}
    for name in names:
        digests = [state_digest(one[name]) for one in saved]
        if len(set(digests)) == 1 and len(saved) > 1:
            state[name], done[name] = saved[0][name], "kept"
        else:
            text = f"{name} {digests[0]} {step} {world} {rank}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
            state[name], done[name] = _seeded(name, seed), "derived"
    return state, done


def _seeded(stream: str, seed: int) -> Any:
    if stream == "python":
        return _of_python(random.Random(seed).getstate())
    if stream == "numpy":
        words = [seed & 0xFFFFFFFF, seed >> 32]
        return _of_numpy(cast(_NumpyState, np.random.RandomState(words).get_state(legacy=True)))
    if stream == "torch":
        return torch.Generator().manual_seed(seed).get_state()
    if stream == "cuda":  # Philox: its state is the seed and an offset, 64 bits each; no device is needed to write it
        return torch.tensor(list(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8)
    raise CheckpointError(f"rng: nobody knows how to start the stream {stream!r} anew")


def stream_digest(stream: Stream, device: torch.device) -> float:
    """48 bits of one stream's state, exact in a float64. device: of which the stream "device" is; for the CPU it is torch's.

    Waits for no device: a CUDA generator keeps its seed and offset on the host."""
    if stream == "python":
        state = repr(random.getstate()).encode()
    elif stream == "numpy":
        _, keys, *rest = cast(_NumpyState, np.random.get_state(legacy=True))
        state = keys.tobytes() + repr(rest).encode()
    elif stream == "torch" or device.type == "cpu":
        state = torch.get_rng_state().numpy().tobytes()
    else:
        state = torch.get_device_module(device).get_rng_state(device).numpy().tobytes()
    return short_digest(state)
