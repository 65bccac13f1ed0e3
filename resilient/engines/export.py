"""A committed checkpoint of any engine in the format of another library: `resilient checkpoint export`.

dcp         torch.distributed.checkpoint, any engine: any wrapping, any number of ranks (checkpoint/export.py)
deepspeed   as DeepSpeed's save_checkpoint would have left it: DeepSpeed engines, the same world size
universal   DeepSpeed's universal format: DeepSpeed engines, any world size
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilient.checkpoint.export import OptimizerView, export_dcp, open_checkpoint, torch_optimizer
from resilient.errors import CheckpointError

FORMATS = ("dcp", "deepspeed", "universal")


def export_checkpoint(folder: Path, to: str, out: Path, *, flatten_optimizer: bool = False) -> None:
    """Write the checkpoint in a local folder to `out`, which must not exist or be empty. All files are verified first.

    One process, without the job that wrote it. flatten_optimizer: for dcp, see `export_dcp`. Raises CheckpointError (what
    is damaged, missing, or of another engine) and OSError; `out` is not left half done."""
    if to not in FORMATS:
        raise CheckpointError(f"cannot export to {to!r}: {', '.join(FORMATS)} can be written")
    opened = open_checkpoint(folder)
    if to == "dcp":
        export_dcp(opened, out, optimizer=optimizer_view, flatten_optimizer=flatten_optimizer)
        return
    sources = opened.sources()
    if not is_deepspeed(sources[0].state):
        raise CheckpointError(f"{folder} was not written by a DeepSpeed engine: export it to dcp")
    from resilient.engines.deepspeed.export import write_deepspeed, write_universal

    (write_universal if to == "universal" else write_deepspeed)(sources, out)


def optimizer_view(state: Mapping[str, Any]) -> OptimizerView:
    """What is no piece of the optimizer in a state of any engine."""
    if not is_deepspeed(state):
        return torch_optimizer(state)
    from resilient.engines.deepspeed.export import optimizer_view as of_deepspeed

    return of_deepspeed(state)


def is_deepspeed(state: Mapping[str, Any]) -> bool:
    """Only those say how their flat tensors are laid out."""
    return "layout" in state
