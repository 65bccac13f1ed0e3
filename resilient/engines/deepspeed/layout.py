"""The layout of an engine: what must be the same where a state is captured and where it is restored, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from resilient.engines.absent import group_difference
from resilient.engines.base import EngineState
from resilient.engines.deepspeed.stages import HalfStage, Stage
from resilient.engines.deepspeed.zero import Bf16Stage, PartitionedStage, ShardedStage
from resilient.engines.pieces import persistent_buffers
from resilient.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine as Engine

PARTS = ("layout", "parameters", "buffers", "masters", "spans", "shared", "groups", "counters")
SCHEDULES = "LR schedules"  # entry of a layout
OPTIONAL = ("moments", "schedulers", "scaler")  # parts that a state may lack where its user says so


def layout_of(engine: Engine, stage: Stage, schedulers: list[Any]) -> dict[str, str]:
    """What -> text, for everything that must agree between capture and restore."""
    layout = {
        "zero stage": str(int(engine.zero_optimization_stage())),
        "world size": str(dist.get_world_size()),
        "rank": str(dist.get_rank()),
        "optimizer": f"{type(stage.optimizer).__name__}({type(stage.base).__name__})",
        SCHEDULES: ", ".join(type(s).__name__ for s in schedulers) or "none",
    }
    if stage not in _steady:
        _steady[stage] = _steady_of(stage)
    layout.update(_steady[stage])
    for name, buffer in persistent_buffers(engine.module).items():
        layout[f"buffer {name}"] = _entry(buffer)
    return layout


_steady: WeakKeyDictionary[Stage, dict[str, str]] = WeakKeyDictionary()


def _steady_of(stage: Stage) -> dict[str, str]:
    """Entries that stay as they are as long as there is the engine; made once, for a snapshot must cost little more than the
    copy."""
    masters = stage.masters()
    layout = {"masters": ", ".join(sorted({"none" if m.alias else str(m.tensor.dtype) for m in masters}))}
    for i, names in enumerate(_group_names(stage)):
        layout[f"parameter group {i}"] = json.dumps(names)
    for name, parameter in stage.parameters.items():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3: the whole parameter's
        layout[f"parameter {name}"] = _entry(parameter, shape)
    for master in masters:
        layout[f"master {master.label}"] = _entry(master.tensor)
    return layout


def _group_names(stage: Stage) -> list[list[str]]:
    """Names of the parameters that the optimizer steps, by parameter group, in the user's order."""
    optimizer = stage.optimizer
    groups: list[list[Any]]
    if isinstance(stage, ShardedStage):
        groups = [[] for _ in stage.base.param_groups]
        for i, sub_group in enumerate(optimizer.fp16_groups):
            groups[optimizer.sub_group_to_group_id[i]] += sub_group
    elif isinstance(stage, PartitionedStage):
        groups = optimizer.bit16_groups
    elif isinstance(stage, Bf16Stage):
        groups = optimizer.bf16_groups
    elif isinstance(stage, HalfStage):
        groups = optimizer.fp16_groups
    else:
        groups = [group["params"] for group in stage.base.param_groups]
    return [[stage.names[id(p)] for p in group] for group in groups]


def _entry(tensor: torch.Tensor, shape: Iterable[int] | None = None) -> str:
    """`torch.float32 [3, 4]`, as a layout says it. shape: of the whole, where the tensor is a part."""
    return f"{tensor.dtype} {list(tensor.shape if shape is None else shape)}"


# --- read from a state ---


def shape_of(state: EngineState, entry: str) -> tuple[int, ...]:
    """Shape that the layout gives of `parameter NAME` (the whole), `buffer NAME` or `master LABEL` (this rank's)."""
    return tuple(json.loads(state["layout"][entry].split(" ", 1)[1]))


def groups_of(state: EngineState) -> list[list[str]]:
    """Names of the parameters of each parameter group, in the user's order."""
    return [json.loads(state["layout"][f"parameter group {i}"]) for i in range(len(state["groups"]))]


# --- what must fit ---


def missing_parts(state: EngineState) -> list[str]:
    """A line for each part that a state lacks. CheckpointError if it has no layout."""
    if not isinstance(state, Mapping) or not isinstance(state.get("layout"), Mapping):
        raise CheckpointError("not a state captured from a DeepSpeed engine: it has no layout")
    return [f"part '{part}' is missing" for part in (*PARTS, *OPTIONAL) if part not in state]


def differences(here: Mapping[str, str], there: Mapping[str, str], *, anywhere: bool = False) -> dict[str, str]:
    """Entries of two layouts that differ -> a readable line. anywhere: but for what depends on rank and world size."""
    names = [n for n in dict.fromkeys([*here, *there]) if here.get(n) != there.get(n)]
    if anywhere:
        names = [n for n in names if n not in ("world size", "rank") and not n.startswith("master ")]
    return {name: _difference(name, here.get(name), there.get(name)) for name in names}


def _difference(name: str, here: str | None, there: str | None) -> str:
    if not name.startswith("parameter group ") or here is None or there is None:
        return f"{name}: {there or 'missing'} in the state, {here or 'missing'} here"
    return f"{name}: {group_difference(json.loads(there), json.loads(here))}"
