"""Every random stream of this rank: Python, NumPy, torch CPU, the current device, and the engine's trackers."""

from __future__ import annotations

import random
from typing import Any, Literal, cast

import numpy as np
import torch

from resilient.signals.digest import short_digest

Stream = Literal["python", "numpy", "torch", "device"]


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """All streams of this rank as tensors and plain values that `torch.load(weights_only=True)` accepts."""
    version, words, gauss = random.getstate()
    numpy_state = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state(legacy=True))
    name, keys, pos, has_gauss, cached = numpy_state
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "pos": int(pos),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
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


def stream_digest(stream: Stream, device: torch.device) -> float:
    """48 bits of one stream's state, exact in a float64. device: of which the stream "device" is; for the CPU it is torch's.

    Waits for no device: a CUDA generator keeps its seed and offset on the host."""
    if stream == "python":
        state = repr(random.getstate()).encode()
    elif stream == "numpy":
        _, keys, *rest = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state(legacy=True))
        state = keys.tobytes() + repr(rest).encode()
    elif stream == "torch" or device.type == "cpu":
        state = torch.get_rng_state().numpy().tobytes()
    else:
        state = torch.get_device_module(device).get_rng_state(device).numpy().tobytes()
    return short_digest(state)
