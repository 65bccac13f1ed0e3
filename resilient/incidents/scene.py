"""The scene of a fault: the batch that was refused, and on request the state it met (T3, T12).

Written at the gate, before anything acts: weights, moments and scaler are still those of the bad step. One scene for each row
of refusals, on the ranks that are named, or on all ranks when none is. A scene that cannot be written is a warning.

    incidents/<step>-<cause>/rank-00001-a00000035.json   what a person reads first: keys, shapes, extremes, ids, text
    incidents/<step>-<cause>/rank-00001-a00000035.pt     the micro-batches, and with `full` the engine's captured state
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from resilient.checkpoint.files import write_json
from resilient.engines.base import Engine
from resilient.signals import Decision

Keep = Literal["none", "batch", "full"]


class SceneKeeper:
    """Called by the coordinator on every rank. Never raises.

    folder: the run's incidents folder. keep: batch (the micro-batches) | full (the engine's state of this rank too: as
    large as a checkpoint part) | none. limit: scenes per start, so that a bad night does not fill the disk.
    text: what a micro-batch says in words, if it can be said.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        keep: Keep = "batch",
        limit: int = 20,
        text: Callable[[Any], str] | None = None,
    ) -> None:
        self._folder, self._rank = folder, rank
        self._keep, self._left = keep, limit
        self._text = text

    def __call__(self, decision: Decision, batches: Sequence[Any], engine: Engine) -> None:
        """Keep this rank's part of the scene of `decision`."""
        if self._keep == "none" or self._left <= 0 or (decision.ranks and self._rank not in decision.ranks):
            return
        self._left -= 1
        try:
            self._write(decision, batches, engine)
        except Exception as error:
            print(f"resilient: WARNING: rank {self._rank}: the scene of step {decision.step}: {error}", file=sys.stderr)

    def _write(self, decision: Decision, batches: Sequence[Any], engine: Engine) -> None:
        folder = self._folder / f"{decision.step}-{decision.cause}"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank:05d}-a{decision.attempt:08d}"
        kept: dict[str, Any] = {
            "step": decision.step,
            "attempt": decision.attempt,
            "batches": [plain(b) for b in batches],
        }
        if self._keep == "full":
            kept["state"] = engine.capture()
        torch.save(kept, folder / f"{name}.pt")
        described: dict[str, Any] = {
            "step": decision.step,
            "attempt": decision.attempt,
            "rank": self._rank,
            "cause": decision.cause,
            "place": decision.place,
            "reason": decision.reason,
            "lr": engine.lr(),
            "loss_scale": engine.loss_scale(),
            "batches": [describe(b) for b in batches],
        }
        if self._text is not None:
            described["text"] = [self._text(b) for b in batches]
        write_json(folder / f"{name}.json", described)


def plain(value: Any) -> Any:
    """A batch in what `torch.load(weights_only=True)` reads: tensors on the CPU, numbers, text; the rest as its repr."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def describe(value: Any) -> Any:
    """The same in a few JSON values: shape, dtype, extremes and non-finite count of each tensor; ids are listed."""
    if isinstance(value, torch.Tensor):
        found: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if value.numel() == 0 or value.is_complex():
            return found
        numbers = value.detach().cpu().to(torch.float64)
        finite = numbers[torch.isfinite(numbers)]
        if finite.numel():
            found |= {"min": float(finite.min()), "max": float(finite.max())}
        found["nonfinite"] = int(numbers.numel() - finite.numel())
        return found
    if isinstance(value, Mapping):
        found = {str(key): describe(item) for key, item in value.items()}
        ids = value.get("ids")
        if isinstance(ids, torch.Tensor):
            found["ids"] = ids.flatten().tolist()
        return found
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
