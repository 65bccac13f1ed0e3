"""A checkpoint in DeepSpeed's universal format, which plain DeepSpeed loads at any world size. Written for 0.19.8.

    out/latest_universal                      the tag
    out/<tag>/zero/<parameter>/fp32.pt        {"param": the whole tensor}; exp_avg.pt, exp_avg_sq.pt ... alike; step.pt
    out/<tag>/zero/optimizer_state.pt         options of the parameter groups, and the loss scaler
    out/<tag>/mp_rank_00_model_states.pt      steps, LR schedule, buffers: what ZeRO 1 and 2 read
    out/<tag>/zero_pp_rank_0_mp_rank_00_model_states.pt   the same, for ZeRO 3

    engine = deepspeed.initialize(..., config={"checkpoint": {"load_universal": True}, ...})[0]
    engine.load_checkpoint(out)

What DeepSpeed's reader does not do (0.19.8, each seen in a test): restore buffers and parameters that are not trained;
ZeRO 0 at all; the right order under `round_robin_gradients`. Under ZeRO 3 it gives every parameter group the options of
the first, so options that are not the same in all groups are left out for it and stay as the new job configured them;
and it lets all sub-groups share one step tensor, which torch's optimizers then count up once for each (DeepSpeed's own
keep an integer). The engines' own restore in another world has none of these limits.

Any engine's checkpoint will do: all that is asked for are pieces and an OptimizerView.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resilient.checkpoint.boxes import inside
from resilient.checkpoint.export import OptimizerView
from resilient.checkpoint.files import fsync_folder, write_whole
from resilient.checkpoint.reshape import Held, view
from resilient.errors import CheckpointError

VERSION = "0.19.8"  # of DeepSpeed, whose layout this is
UNIVERSAL_INFO = {"universal_checkpoint_version": 0.4}


@dataclass(frozen=True)
class Progress:
    """Where a job is. steps: as DeepSpeed counts them, refused ones included. samples: over all ranks. schedule: the
    state_dict of the LR schedule, or None."""

    steps: int
    skipped: int
    samples: int
    schedule: Mapping[str, Any] | None


def write_universal(
    held: Mapping[str, Held],
    optimizer: OptimizerView,
    progress: Progress,
    out: Path,
    *,
    world: int,
    tag: str | None = None,
    loss_scaler: Any = None,
) -> None:
    """Write `out`, which must not exist or be empty; it is removed again if this fails. `latest_universal` comes last.

    held: see `reshape.held_by`. world: size of the one that saved it. tag: of the folder, `global_step<steps>` if None.
    loss_scaler: an object of DeepSpeed's class; without one the scaler starts anew. One process; memory: one whole tensor.
    Raises CheckpointError for what the format cannot hold, and OSError."""
    tag = tag or f"global_step{progress.steps}"
    with AllOrNothing(out):
        folder = out / tag
        for group in optimizer.groups:
            _write_group(held, group["params"], optimizer.values, folder / "zero")
        save(_global_state(optimizer, loss_scaler), folder / "zero" / "optimizer_state.pt")
        buffers = {name.removeprefix("buffers/"): whole(held, name) for name in held if name.startswith("buffers/")}
        states = {
            **common_state(progress, world),
            "module": buffers,  # nobody reads weights here: they are under zero/
            "buffer_names": list(buffers),
            "universal_checkpoint_info": UNIVERSAL_INFO,
        }
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            save(states, folder / name)
        point_at(out / "latest_universal", tag)


def common_state(progress: Progress, world: int) -> dict[str, Any]:
    """What DeepSpeed reads from every file of model states."""
    return {
        "global_steps": progress.steps,
        "skipped_steps": progress.skipped,
        "global_samples": progress.samples,
        "lr_scheduler": None if progress.schedule is None else dict(progress.schedule),
        "dp_world_size": world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_version": VERSION,
        "ds_config": {},
    }


def _write_group(
    held: Mapping[str, Held], names: Sequence[str], values: Mapping[str, Mapping[str, Any]], zero: Path
) -> None:
    """DeepSpeed steps a parameter group as one tensor: all of it has the same step count and the same moments. What never
    got a gradient and has none gets zeros, which is what it would have there."""
    moments = {name: _moments_of(held, name) for name in names}
    keys = sorted({key for found in moments.values() for key in found})
    step = _step_of(names, values)
    for name in names:
        master = f"masters/{name}" if f"masters/{name}" in held else f"parameters/{name}"
        weights = whole(held, master).float()
        save({"param": weights}, zero / name / "fp32.pt")
        for key in keys:
            moment = whole(held, moments[name][key]) if key in moments[name] else torch.zeros_like(weights)
            save({"param": moment.view(weights.shape)}, zero / name / f"{key}.pt")
        if step is not None:
            save(step, zero / name / "step.pt")


def _moments_of(held: Mapping[str, Held], name: str) -> dict[str, str]:
    """Key -> name of the whole, of one parameter."""
    prefix = f"moments/{name}/"
    return {n.removeprefix(prefix): n for n in held if n.startswith(prefix) and "/" not in n.removeprefix(prefix)}


def _step_of(names: Sequence[str], values: Mapping[str, Mapping[str, Any]]) -> Any:
    first: Any = None
    for name in names:
        for key in values.get(name, {}):
            if key != "step":
                raise CheckpointError(f"{name}: DeepSpeed's universal format has no place for the optimizer's {key}")
        step = values.get(name, {}).get("step")
        if step is not None and first is not None and float(step) != float(first):
            raise CheckpointError(
                f"{name} has taken {float(step):.0f} steps and others of its parameter group {float(first):.0f}: DeepSpeed "
                "keeps one count per group, so this checkpoint has no universal form"
            )
        first = step if first is None else first
    return first


def _global_state(optimizer: OptimizerView, loss_scaler: Any) -> dict[str, Any]:
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.groups]
    common = {k: v for k, v in options[0].items() if all(_same(v, other.get(k)) for other in options[1:])}
    steps = [_step_of(group["params"], optimizer.values) for group in optimizer.groups]
    state: dict[str, Any] = {
        "param_groups": [{**group, "params": [i]} for i, group in enumerate(options)],  # ZeRO 1 and 2
        "optimizer_state_dict": {  # ZeRO 3
            "state": {0: {"step": steps[0]}},
            "param_groups": [{**common, "params": [0]}],
        },
        "ds_version": VERSION,
    }
    if loss_scaler is not None:
        state |= {"loss_scaler": loss_scaler, "dynamic_loss_scale": bool(loss_scaler.dynamic), "overflow": False}
    return state


def _same(a: Any, b: Any) -> bool:
    return bool(type(a) is type(b) and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b))


def whole(held: Mapping[str, Held], name: str) -> torch.Tensor:
    """A copy of a whole tensor, in host memory. CheckpointError if parts of it are missing."""
    if name not in held:
        raise CheckpointError(f"{name} is in no part of the checkpoint")
    one = held[name]
    one.refuse_incomplete(name)
    shape = one.whole.shape
    made = torch.empty(shape, dtype=one.whole.dtype)
    everything = (tuple(0 for _ in shape), shape)
    for at, cell in one.owned(shape):
        made[inside(cell.box, everything)] = view(at.tensor, cell, cell.box)
    return made


# --- files ---


class AllOrNothing:
    """Makes a folder that must not exist, or be empty, and takes it away again if the block fails."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def __enter__(self) -> None:
        if self._out.exists() and (not self._out.is_dir() or any(self._out.iterdir())):
            raise CheckpointError(f"{self._out} is not empty: choose a folder that does not exist yet")
        self._out.mkdir(parents=True, exist_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            shutil.rmtree(self._out, ignore_errors=True)


def save(value: Any, path: Path) -> None:
    """One file, durable. Raises OSError, or CheckpointError for what torch makes of a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.save(value, path)
    except RuntimeError as error:
        raise CheckpointError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def point_at(latest: Path, tag: str) -> None:
    """The last thing to write: the file that names the folder to load, once all in it is on disk."""
    folder = latest.parent / tag
    for inner in (folder, *folder.rglob("*")):
        if inner.is_dir():
            fsync_folder(inner)
    write_whole(latest, tag.encode())
