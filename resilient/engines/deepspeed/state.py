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

from resilient.checkpoint.snapshot import Copies, freeze
from resilient.engines.absent import BUFFER, report
from resilient.engines.base import EngineState
from resilient.engines.deepspeed.layout import OPTIONAL, SCHEDULES, differences, layout_of, missing_parts
from resilient.engines.deepspeed.pieces import describe
from resilient.engines.deepspeed.stages import Stage
from resilient.engines.pieces import persistent_buffers
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
        "parameters": {n: stage.parameter(p).detach() for n, p in stage.parameters.items()},
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


def optional_parts(engine: Engine) -> tuple[str, ...]:
    return (*OPTIONAL, *(BUFFER + name for name in persistent_buffers(engine.module)))


@torch.no_grad()
def complete_state(
    state: EngineState, live: EngineState, allow_missing: Collection[str]
) -> tuple[EngineState, tuple[str, ...]]:
    """`state` with those parts of `allow_missing` that it lacks taken from `live`, frozen; and their names.

    Parameter groups get the options that only a kept schedule has left in them; those of the state stay, the LR among
    them, until the schedule's next step."""
    lacks = tuple(part for part in allow_missing if _lacks(state, live, part))
    whole = {**state, "layout": dict(state["layout"])} if lacks else state
    for part in lacks:
        if part.startswith(BUFFER):
            name = part.removeprefix(BUFFER)
            whole["buffers"] = {**whole["buffers"], name: freeze(live["buffers"][name])}
            whole["layout"][f"buffer {name}"] = live["layout"][f"buffer {name}"]
            continue
        whole[part] = freeze(live[part])
        if part == "schedulers":
            whole["layout"][SCHEDULES] = live["layout"][SCHEDULES]
            whole["counters"] = {**state["counters"], "schedule_offset": live["counters"]["schedule_offset"]}
            if len(state["groups"]) == len(live["groups"]):
                pairs = zip(state["groups"], live["groups"], strict=True)
                whole["groups"] = [{**freeze(ours), **theirs} for theirs, ours in pairs]
    return whole, lacks


def _lacks(state: EngineState, live: EngineState, part: str) -> bool:
    """Whether an optional part is missing, or was saved empty where there is one here, in a state that otherwise says
    enough to go on without it."""
    if part.startswith(BUFFER):
        return "buffers" in state and part.removeprefix(BUFFER) not in state["buffers"]
    if part == "schedulers" and not {"counters", "groups"} <= state.keys():
        return False
    return part not in state or (not state[part] and bool(live[part]))


@torch.no_grad()
def restore_state(engine: Engine, stage: Stage, schedulers: list[Any], state: EngineState) -> dict[str, int]:
    """Put `state` back into the live tensors; returns the counters. Nothing is touched if it does not fit."""
    _check_fits(layout_of(engine, stage, schedulers), stage, state)
    stage.drop_gradients()
    copies = Copies()
    for name, parameter in stage.parameters.items():
        copies.add(stage.parameter(parameter), state["parameters"][name])
    for name, buffer in engine.module.named_buffers():
        saved = state["buffers"].get(name)
        if saved is not None and saved.shape == buffer.shape:  # others are caches: not persistent, see layout.py
            copies.add(buffer, saved)
    _restore_optimizer(stage, state, copies)
    for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(copy.deepcopy(saved))
    for group, saved in zip(stage.base.param_groups, state["groups"], strict=True):
        _restore_group(group, saved, copies)
    copies.run()
    _restore_scaler(stage, state["scaler"])
    for name in _COUNTERS:
        setattr(engine, name, state["counters"][name])
    return state["counters"]


# --- what must fit ---


def _check_fits(here: dict[str, str], stage: Stage, state: EngineState) -> None:
    lines = missing_parts(state)
    lines += differences(here, state["layout"]).values()
    if not lines:  # the same parameters and sizes, but perhaps in another order (round_robin_gradients)
        theirs = state["spans"]
        lines = [
            f"{label}: its parameters lie otherwise in the state"
            for label, rows in describe(stage).spans.items()
            if label not in theirs or not torch.equal(rows, theirs[label].cpu())
        ]
        lines += [f"moments of {m.label} are missing" for m in stage.masters() if m.label not in state["moments"]]
    if lines:
        raise CheckpointError(report("the state does not fit this engine:", lines))


# --- the parts ---


def _restore_optimizer(stage: Stage, state: EngineState, copies: Copies) -> None:
    groups = {id(p): group for group in stage.base.param_groups for p in group["params"]}
    replaced = False
    for master in stage.masters():
        if not master.alias:
            copies.add(master.tensor, state["masters"][master.label])
        saved, live = state["moments"][master.label], stage.base.state.get(master.tensor, {})
        for key in [key for key in live if key not in saved]:  # created after the capture
            del live[key]
            replaced = True
        for key, value in saved.items():
            current = live.get(key)
            if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) and _alike(value, current):
                copies.add(current, value)
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


def _restore_group(group: dict[str, Any], saved: Mapping[str, Any], copies: Copies) -> None:
    for key in [key for key in group if key != "params" and key not in saved]:
        del group[key]
    for key, value in saved.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
            copies.add(group[key], value)
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
