"""Capture and restore of everything a DeepSpeed engine needs to replay bit for bit, by copying live tensors.

DeepSpeed's own load_checkpoint goes through files and rebuilds objects; copying in place keeps every alias (parameters
are views of flat buffers in ZeRO 1 and 2, shards are views of one buffer in ZeRO 3) and takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resilient.engines.base import EngineState
from resilient.engines.deepspeed.stages import Stage
from resilient.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine as Engine

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
_PLAIN = (bool, int, float, str, type(None))


def capture_state(engine: Engine, stage: Stage, schedulers: list[Any], extra: dict[str, int]) -> EngineState:
    """This rank's state: a nested dict of cloned tensors and plain values."""
    masters = stage.masters()
    return {
        "layout": _layout(engine, stage),
        "parameters": {n: stage.parameter(p).clone() for n, p in engine.module.named_parameters()},
        "buffers": {n: b.detach().clone() for n, b in engine.module.named_buffers()},
        "masters": {m.label: m.tensor.detach().clone() for m in masters if not m.alias},
        "moments": {m.label: _freeze(stage.base.state.get(m.tensor, {}), "moments") for m in masters},
        "groups": [
            {key: _freeze(value, f"groups/{key}") for key, value in group.items() if key != "params"}
            for group in stage.base.param_groups
        ],
        "schedulers": [_freeze(s.state_dict(), "schedulers") for s in schedulers],
        "scaler": _scaler_state(stage),
        "counters": {name: int(getattr(engine, name)) for name in _COUNTERS} | extra,
    }


@torch.no_grad()
def restore_state(engine: Engine, stage: Stage, schedulers: list[Any], state: EngineState) -> dict[str, int]:
    """Put `state` back into the live tensors; returns the counters. Nothing is touched if it does not fit."""
    _check_fits(_layout(engine, stage), state)
    if len(state["schedulers"]) != len(schedulers):
        raise CheckpointError(f"the state has {len(state['schedulers'])} LR schedules, this engine {len(schedulers)}")
    stage.drop_gradients()
    for name, parameter in engine.module.named_parameters():
        stage.parameter(parameter).copy_(state["parameters"][name])
    for name, buffer in engine.module.named_buffers():
        saved = state["buffers"].get(name)
        if saved is not None and saved.shape == buffer.shape:  # others are caches: not persistent, see _layout
            buffer.copy_(saved)
    _restore_optimizer(stage, state)
    for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(_freeze(saved, "schedulers"))
    for group, saved in zip(stage.base.param_groups, state["groups"], strict=True):
        _restore_group(group, saved)
    _restore_scaler(stage, state["scaler"])
    for name in _COUNTERS:
        setattr(engine, name, state["counters"][name])
    return state["counters"]


# --- what must fit ---


def _layout(engine: Engine, stage: Stage) -> dict[str, str]:
    """name -> description of everything that must agree between capture and restore."""
    layout = {
        "zero stage": str(int(engine.zero_optimization_stage())),
        "world size": str(dist.get_world_size()),
        "rank": str(dist.get_rank()),
        "optimizer": f"{type(stage.optimizer).__name__}({type(stage.base).__name__})",
        "parameter groups": str(len(stage.base.param_groups)),
    }
    for name, parameter in engine.module.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO 3: the whole parameter's
        layout[f"parameter {name}"] = f"shape {list(shape)} {parameter.dtype}"
    for name, buffer in _persistent_buffers(engine.module):
        layout[f"buffer {name}"] = f"shape {list(buffer.shape)} {buffer.dtype}"
    for master in stage.masters():
        layout[f"master {master.label}"] = f"shape {list(master.tensor.shape)} {master.tensor.dtype}"
    return layout


def _persistent_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{path}.{name}" if path else name, buffer)
        for path, child in module.named_modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set
    ]


def _check_fits(here: dict[str, str], state: EngineState) -> None:
    there = state.get("layout") if isinstance(state, Mapping) else None
    if not isinstance(there, Mapping):
        raise CheckpointError("not a state captured from a DeepSpeed engine: it has no layout")
    lines = [
        f"{name}: {there.get(name, 'missing')} in the state, {here.get(name, 'missing')} here"
        for name in dict.fromkeys([*here, *there])
        if here.get(name) != there.get(name)
    ]
    if lines:
        more = [f"and {len(lines) - 12} more"] if len(lines) > 12 else []
        raise CheckpointError("\n  ".join(["the state does not fit this engine:", *lines[:12], *more]))


# --- the parts ---


def _restore_optimizer(stage: Stage, state: EngineState) -> None:
    groups = {id(p): group for group in stage.base.param_groups for p in group["params"]}
    replaced = False
    for master in stage.masters():
        if not master.alias:
            master.tensor.copy_(state["masters"][master.label])
        saved, live = state["moments"][master.label], stage.base.state.get(master.tensor, {})
        for key in [key for key in live if key not in saved]:  # created after the capture
            del live[key]
            replaced = True
        for key, value in saved.items():
            current = live.get(key)
            if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) and _alike(value, current):
                current.copy_(value)
            else:
                live[key] = _thaw(value, master.tensor, groups.get(id(master.tensor), {}))
                replaced = True
        if live:
            stage.base.state[master.tensor] = live
        else:
            stage.base.state.pop(master.tensor, None)
    if replaced:
        stage.moments_replaced()


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _thaw(value: Any, master: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """A fresh copy of one optimizer-state value, on the device where the optimizer would have created it: beside its
    parameter, except that torch keeps 0-dim step counts on the CPU unless `capturable` or `fused`."""
    value = _freeze(value, "moments")
    if isinstance(value, torch.Tensor) and (value.ndim > 0 or group.get("capturable") or group.get("fused")):
        return value.to(master.device)
    return value


def _restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key in [key for key in group if key != "params" and key not in saved]:
        del group[key]
    for key, value in saved.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
            group[key].copy_(value)
        else:
            group[key] = _freeze(value, f"groups/{key}")


def _scaler_state(stage: Stage) -> dict[str, Any]:
    """Every plain attribute of the loss scaler, and a scale that the user may have forced on the optimizer."""
    if stage.scaler is None:
        return {}
    own = {key: value for key, value in vars(stage.scaler).items() if isinstance(value, _PLAIN)}
    forced = {key: getattr(stage.optimizer, key) for key in ("custom_loss_scaler", "external_loss_scale")}
    return {"scaler": own, "forced": forced}


def _restore_scaler(stage: Stage, saved: Mapping[str, Any]) -> None:
    if stage.scaler is not None:
        for key, value in saved["scaler"].items():
            setattr(stage.scaler, key, value)
        for key, value in saved["forced"].items():
            setattr(stage.optimizer, key, value)


def _freeze(value: Any, path: str) -> Any:
    """A deep copy out of tensors, containers and plain values; CheckpointError names what is neither."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _freeze(item, f"{path}/{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_freeze(item, f"{path}/{i}") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_freeze(item, f"{path}/{i}") for i, item in enumerate(value))
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(f"cannot capture {path}: {type(value).__name__} is neither a tensor nor a plain value")
