"""Capture and restore of everything a DeepSpeed engine needs to replay bit for bit, by copying live tensors.

DeepSpeed's own load_checkpoint goes through files and rebuilds objects; copying in place keeps every alias (parameters
are views of flat buffers in ZeRO 1 and 2, shards are views of one buffer in ZeRO 3) and takes milliseconds.

A captured state is one rank's own, and says by itself what its elements are (`pieces.py`):

    {"layout": {what: text that must be the same here and there},
     "parameters": {name: tensor, under ZeRO 3 this rank's shard}, "buffers": {name: tensor},
     "masters": {label: tensor}, where they are not the parameters themselves,
     "moments": {label: {key: tensor or plain value}},
     "spans": {label: (n, 4) int64}, for labels of flat tensors, see pieces.Description; the others are parameter names,
     "shared": {another name of a parameter: its name},
     "groups": [options of a parameter group], "schedulers": [state_dict], "scaler": {...}, "counters": {name: int}}
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from resilient.engines.base import EngineState
from resilient.engines.deepspeed.layout import OPTIONAL, differences, layout_of, missing_parts, report
from resilient.engines.deepspeed.pieces import describe
from resilient.engines.deepspeed.stages import Stage
from resilient.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine as Engine

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
_PLAIN = (bool, int, float, str, type(None))


def live_state(engine: Engine, stage: Stage, schedulers: list[Any], extra: dict[str, int]) -> EngineState:
    """This rank's state: a nested dict of the engine's own tensors and of plain values."""
    masters, description = stage.masters(), describe(stage)
    return {
        "layout": layout_of(engine, stage, schedulers),
        "parameters": {n: stage.parameter(p).detach() for n, p in engine.module.named_parameters()},
        "buffers": {n: b.detach() for n, b in engine.module.named_buffers()},
        "masters": {m.label: m.tensor.detach() for m in masters if not m.alias},
        "moments": {m.label: _plain(stage.base.state.get(m.tensor, {}), "moments") for m in masters},
        "spans": dict(description.spans),
        "shared": dict(description.shared),
        "groups": [
            {key: _plain(value, f"groups/{key}") for key, value in group.items() if key != "params"}
            for group in stage.base.param_groups
        ],
        "schedulers": [_plain(s.state_dict(), "schedulers") for s in schedulers],
        "scaler": _scaler_state(stage),
        "counters": {name: int(getattr(engine, name)) for name in _COUNTERS} | extra,
    }


@torch.no_grad()
def restore_state(
    engine: Engine, stage: Stage, schedulers: list[Any], state: EngineState, allow_missing: Collection[str] = ()
) -> dict[str, int]:
    """Put `state` back into the live tensors; returns the counters. Nothing is touched if it does not fit.

    allow_missing: what the state may lack, and what then stays as it is here: `moments`, `schedulers`, `scaler`, or
    `buffers/NAME`. Whatever is in the state is restored."""
    _check_fits(layout_of(engine, stage, schedulers), describe(stage).spans, state, allow_missing)
    stage.drop_gradients()
    for name, parameter in engine.module.named_parameters():
        stage.parameter(parameter).copy_(state["parameters"][name])
    for name, buffer in engine.module.named_buffers():
        saved = state["buffers"].get(name)
        if saved is not None and saved.shape == buffer.shape:  # others are caches: not persistent, see layout.py
            buffer.copy_(saved)
    _restore_optimizer(stage, state)
    for scheduler, saved in zip(schedulers, state.get("schedulers", ()), strict="schedulers" in state):
        scheduler.load_state_dict(copy.deepcopy(saved))
    for group, saved in zip(stage.base.param_groups, state["groups"], strict=True):
        _restore_group(group, saved)
    if "scaler" in state:
        _restore_scaler(stage, state["scaler"])
    for name in _COUNTERS:
        setattr(engine, name, state["counters"][name])
    return state["counters"]


# --- what must fit ---


def _check_fits(
    here: dict[str, str], spans: dict[str, torch.Tensor], state: EngineState, allow_missing: Collection[str]
) -> None:
    unknown = [name for name in allow_missing if name not in OPTIONAL and not name.startswith("buffers/")]
    if unknown:
        raise CheckpointError(f"allow_missing={unknown}: it may name {', '.join(OPTIONAL)} and buffers/NAME")
    lines = missing_parts(state, allow_missing)
    found = differences(here, state["layout"])
    if "schedulers" in allow_missing and "schedulers" not in state:
        found.pop("LR schedules", None)
    for name in allow_missing:
        entry = name.replace("buffers/", "buffer ", 1)
        if entry not in state["layout"]:
            found.pop(entry, None)
    lines += found.values()
    if not lines:  # the same parameters and sizes, but perhaps in another order (round_robin_gradients)
        theirs = state["spans"]
        lines = [
            f"{label}: its parameters lie otherwise in the state"
            for label, rows in spans.items()
            if label not in theirs or not torch.equal(rows, theirs[label].cpu())
        ]
    if lines:
        raise CheckpointError(report("the state does not fit this engine:", lines))


# --- the parts ---


def _restore_optimizer(stage: Stage, state: EngineState) -> None:
    groups = {id(p): group for group in stage.base.param_groups for p in group["params"]}
    replaced = False
    for master in stage.masters():
        if not master.alias:
            master.tensor.copy_(state["masters"][master.label])
        if "moments" not in state:
            continue
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
    value = copy.deepcopy(value)
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
            group[key] = copy.deepcopy(value)


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


def _plain(value: Any, path: str) -> Any:
    """The same out of detached tensors, containers and plain values, nothing copied; CheckpointError names what is neither."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{path}/{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, f"{path}/{i}") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_plain(item, f"{path}/{i}") for i, item in enumerate(value))
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(f"cannot capture {path}: {type(value).__name__} is neither a tensor nor a plain value")
