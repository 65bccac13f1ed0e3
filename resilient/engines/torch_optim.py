"""What DDP and FSDP2 share: a torch optimizer stepped by us, its knobs, a true skip, capture and restore.

A captured state is one rank's own: plain tensors (local shards for DTensors) and plain Python values, by name.

    {"params": {name: tensor}, "buffers": {name: tensor},
     "optimizer": {"class": str, "groups": [{"params": [name], "options": {...}}],
                   "state": {name: {"values": {key: value}, "shapes": {key: [global shape of a sharded tensor]}}}},
     "schedule": {"class": str, "state": scheduler.state_dict()} | None,
     "counters": {"steps": int, "skipped": int, "schedule_start": int | None}}
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from resilient.checkpoint.pieces import Piece
from resilient.checkpoint.snapshot import Copies, freeze
from resilient.engines.absent import BUFFER, group_difference, refuse_unknown, report
from resilient.engines.base import Counters, EngineState
from resilient.engines.buffers import BufferHold, local
from resilient.engines.layers import Layers, Part
from resilient.engines.pieces import frame_of, persistent_buffers, pieces_of
from resilient.engines.replicas import BufferDigests, optimizer_digests, parameter_digests
from resilient.engines.updates import Update, UpdateTap
from resilient.errors import CheckpointError, ConfigError
from resilient.signals import Knobs

_PARTS = {
    "params": "params",
    "buffers": "buffers",
    "optimizer": "optimizer",
    "schedule": "schedulers",
    "counters": "counters",
}
"""Entry of a state -> what it is called where it is missing."""


class TorchOptimEngine:
    """Base of the engines whose user brings a `torch.optim` optimizer. Subclasses add the forward and the taps.

    module: holds every parameter that `optimizer` steps; names in a captured state are its names.
    scheduler: stepped once per applied step; position 0 is where it stood when the engine was built.
    clip: largest global gradient norm, or None; `knobs.clip_factor` scales it.
    """

    name: str
    per_micro_step = False
    per_rank: tuple[str, ...] = ("buffers",)

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        clip: float | None,
        device: torch.device,
    ) -> None:
        _check_scheduler(optimizer, scheduler)
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip={clip}: must be positive, or None for no clipping")
        self.module = module
        self.device = device
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.clip = clip
        self._params = dict(module.named_parameters())
        self._group_names = _names_by_group(self._params, optimizer)
        self._buffers = BufferHold(module)
        self._constant: BufferDigests | None = None
        self.layers = Layers({name: p.numel() for name, p in self._params.items()}, device)
        self._micro_steps = 1
        self._steps = 0
        self._skipped = 0
        self._schedule_start = _position(scheduler)

    # --- one window -----------------------------------------------------------------------------------------

    def begin_micro_step(self, index: int, count: int) -> None:
        self._micro_steps = count
        if index == 0:
            self._buffers.take()
            self._begin_window()
        self._set_sync(index == count - 1)

    def backward(self, loss: torch.Tensor) -> None:
        if self._micro_steps > 1:
            loss = loss / self._micro_steps
        loss.backward()

    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        """Clip by min(1, clip * clip_factor / (grad_norm + 1e-6)) as `torch.nn.utils.clip_grad_norm_` does, step, advance
        the schedule, clear gradients, count. Raises ConfigError, with nothing touched, for a betas knob on an optimizer
        without betas."""
        groups = self.optimizer.param_groups
        if knobs.betas is not None and not all("betas" in group for group in groups):
            raise ConfigError(f"the policy changes betas, but {type(self.optimizer).__name__} has none")
        if self.clip is not None:
            if grad_norm is None:
                grad_norm = self._measure_norm()
            coefficient = self.clip * knobs.clip_factor / (grad_norm + 1e-6)
            grads = [local(g) for g in self._grads().values()]
            if coefficient < 1 and grads:
                torch._foreach_mul_(grads, coefficient)
        with _overridden(groups, knobs), self._update_tap.around():
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()  # after the LR factor is gone: recursive schedules build on group["lr"]
        self._clear_gradients()
        self._buffers.drop()
        self._steps += 1

    def skip(self, overflow: bool = False) -> None:
        """Gradients cleared, buffers as before the window; without a loss scaler `overflow` means nothing here."""
        self._clear_gradients()
        self._buffers.put_back()
        self._skipped += 1

    def leftover_sq(self) -> torch.Tensor | None:
        left = self._grads()
        return self._sums(left).sum() if left else None

    def watch_update(self, with_lag: bool) -> None:
        self._update_tap.watch(with_lag)

    def take_update(self) -> Update | None:
        return self._update_tap.take()

    @torch.no_grad()
    def weight_sq_share(self) -> torch.Tensor:
        """Parts that n ranks hold alike count 1/n on each."""
        return self._sums(self._params).sum()

    def mismatched_weights(self) -> list[str]:
        """None: the optimizer steps the parameters themselves; autocast and FSDP2's mixed precision cast them anew for
        every forward."""
        return []

    def abandon(self) -> None:
        self._abandon_window()
        self._clear_gradients()
        self._buffers.put_back()

    # --- what the coordinator reads -------------------------------------------------------------------------

    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def loss_scale(self) -> float:
        return 1.0

    def dynamic_loss_scale(self) -> bool:
        return False

    def counters(self) -> Counters:
        """schedule: the scheduler's `last_epoch` now, less what it was when the engine was built: steps it took."""
        position = _position(self.scheduler)
        schedule = None if position is None or self._schedule_start is None else position - self._schedule_start
        return Counters(self._steps, self._skipped, schedule)

    # --- what ranks hold alike ------------------------------------------------------------------------------

    def replicas(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Buffers, where there are any: those that no forward has moved yet (see replicas.BufferDigests)."""
        found = {}
        if copies := self._copies():
            found["parameters"] = copies
            if not _is_sharded(self.optimizer):
                found["optimizer"] = copies
        if self._constant is not None:
            found["buffers"] = self._everyone()
        return found

    @torch.no_grad()
    def replica_digests(self, kind: str) -> dict[str, torch.Tensor]:
        params = {name: p for name, p in self._params.items() if self._is_copied(name, p)}
        if kind == "parameters":
            return parameter_digests(params, self.layers, self.device)
        if kind == "optimizer":
            return optimizer_digests(self.optimizer, params, self.layers, self.device)
        return self._constant.now(dict(self.module.named_buffers())) if self._constant is not None else {}

    # --- another world size ---------------------------------------------------------------------------------

    def pieces(self, state: EngineState) -> list[Piece]:
        return pieces_of(self.module, state)

    @torch.no_grad()
    def frame(self, source: EngineState, allow_missing: Collection[str] = ()) -> EngineState:
        whole, kept = self.complete(source, allow_missing)
        self._refuse(self._differences(whole, sharded_alike=False))
        return frame_of(self.module, source, kept)

    # --- capture and restore --------------------------------------------------------------------------------

    def capture(self) -> EngineState:
        return freeze(self.live())

    @torch.no_grad()
    def live(self) -> EngineState:
        """See the module's docstring for the layout. Not a collective."""
        return {
            "params": {name: local(p) for name, p in self._params.items()},
            "buffers": {name: local(b) for name, b in self.module.named_buffers()},
            "optimizer": {
                "class": type(self.optimizer).__name__,
                "groups": [
                    {
                        "params": list(names),
                        "options": {key: _plain(value) for key, value in group.items() if key != "params"},
                    }
                    for names, group in zip(self._group_names, self.optimizer.param_groups, strict=True)
                ],
                "state": self._optimizer_state(),
            },
            "schedule": self.scheduler
            and {"class": type(self.scheduler).__name__, "state": _plain(self.scheduler.state_dict())},
            "counters": {
                "steps": self._steps,
                "skipped": self._skipped,
                "schedule_start": self._schedule_start,
            },
        }

    def optional_parts(self) -> tuple[str, ...]:
        return ("moments", "schedulers", *(BUFFER + name for name in persistent_buffers(self.module)))

    @torch.no_grad()
    def complete(self, state: EngineState, allow_missing: Collection[str]) -> tuple[EngineState, tuple[str, ...]]:
        """Without a saved schedule the group options (the LR among them) are the state's all the same, with what only this
        schedule keeps there beside them, until the schedule's next step."""
        refuse_unknown(allow_missing, self.optional_parts(), self.name)
        lacks = [part for part in allow_missing if self._lacks(state, part)]
        live, whole = self.live() if lacks else {}, dict(state)
        for part in lacks:
            if part == "moments":
                whole["optimizer"] = {**whole["optimizer"], "state": freeze(live["optimizer"]["state"])}
            elif part == "schedulers":
                whole["schedule"] = freeze(live["schedule"])
                whole["counters"] = {**state["counters"], "schedule_start": self._schedule_start}
                whole["optimizer"] = _with_options(whole["optimizer"], live["optimizer"]["groups"])
            else:
                name = part.removeprefix(BUFFER)
                whole["buffers"] = {**whole["buffers"], name: freeze(live["buffers"][name])}
        return whole, tuple(lacks)

    def _lacks(self, state: EngineState, part: str) -> bool:
        """Whether an optional part is missing in a state that otherwise says enough to go on without it."""
        optimizer, buffers = state.get("optimizer"), state.get("buffers")
        if part == "moments":
            return optimizer is not None and "state" not in optimizer
        if part == "schedulers":
            there = state.get("schedule") or (self.scheduler is None and "schedule" in state)
            return not there and optimizer is not None and "counters" in state
        return buffers is not None and part.removeprefix(BUFFER) not in buffers

    @torch.no_grad()
    def restore(self, state: EngineState) -> None:
        """In place: parameters, buffers and existing optimizer tensors keep their storage. Not a collective.

        Raises CheckpointError listing what differs if the state is of another model, optimizer, sharding or schedule;
        nothing has been touched then. Buffers registered as non-persistent are put back where they fit and otherwise
        left alone: by declaration they can be rebuilt.
        """
        self._refuse(self._differences(state))
        self._abandon_window()
        self._clear_gradients()
        self._buffers.drop()
        copies = Copies()
        for name, p in self._params.items():
            copies.add(local(p), state["params"][name])
        for name, b in self.module.named_buffers():
            saved = state["buffers"].get(name)
            if saved is not None and saved.shape == local(b).shape:
                copies.add(local(b), saved)
        for saved_group, group in zip(state["optimizer"]["groups"], self.optimizer.param_groups, strict=True):
            for key, value in saved_group["options"].items():
                group[key] = _put(group.get(key), value, copies)
        self._restore_optimizer_state(state["optimizer"]["state"], copies)
        copies.run()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(state["schedule"]["state"]))
        counters = state["counters"]
        self._steps, self._skipped = counters["steps"], counters["skipped"]
        self._schedule_start = counters["schedule_start"]

    def _optimizer_state(self) -> dict[str, Any]:
        state = self.optimizer.state
        ours = {id(p) for p in self._params.values()}
        strangers = [key for key in state if id(key) not in ours]
        if strangers:
            raise CheckpointError(
                f"{type(self.optimizer).__name__} keeps state that belongs to no parameter of the model "
                f"({type(strangers[0]).__name__}); it could not be restored"
            )
        captured: dict[str, Any] = {}
        for name, p in self._params.items():
            if p in state:
                values = state[p]
                captured[name] = {
                    "values": {key: _plain(value) for key, value in values.items()},
                    "shapes": {key: list(value.shape) for key, value in values.items() if isinstance(value, DTensor)},
                }
        return captured

    def _restore_optimizer_state(self, saved: dict[str, Any], copies: Copies) -> None:
        for names, group in zip(self._group_names, self.optimizer.param_groups, strict=True):
            step_on_device = bool(group.get("capturable") or group.get("fused"))
            for name in names:
                p = self._params[name]
                if name not in saved:
                    self.optimizer.state.pop(p, None)
                    continue
                live = self.optimizer.state[p]
                for key in live.keys() - saved[name]["values"].keys():
                    del live[key]
                for key, value in saved[name]["values"].items():
                    shape = saved[name]["shapes"].get(key)
                    if isinstance(value, torch.Tensor) and (key != "step" or step_on_device):
                        value = value.to(p.device)  # torch.optim keeps `step` on the CPU otherwise
                    live[key] = _put(live.get(key), value, copies, like=p, shape=shape)

    @staticmethod
    def _refuse(differences: list[str]) -> None:
        if differences:
            raise CheckpointError(report("this state does not belong to this engine:", differences))

    def _differences(self, state: EngineState, sharded_alike: bool = True) -> list[str]:
        """What stops `state` from being restored here, one readable line each. Reads only.

        sharded_alike: False for a state of another world, whose tensors may be other parts of the same wholes."""
        missing = [name for key, name in _PARTS.items() if key not in state]
        if "optimizer" in state and "state" not in state["optimizer"]:
            missing.append("moments")
        if missing:
            return [f"part '{name}' is missing" for name in missing]
        found = _tensor_differences("parameter", state["params"], self._params, sharded_alike)
        persistent = persistent_buffers(self.module)
        buffers = {name: b for name, b in state["buffers"].items() if name in persistent}
        found += _tensor_differences("buffer", buffers, persistent, sharded_alike)
        optimizer = state["optimizer"]
        if optimizer["class"] != type(self.optimizer).__name__:
            found.append(f"optimizer: {optimizer['class']} in the state, {type(self.optimizer).__name__} here")
        groups = [group["params"] for group in optimizer["groups"]]
        if len(groups) != len(self._group_names):
            found.append(f"parameter groups: {len(groups)} in the state, {len(self._group_names)} here")
        for i, (saved, live) in enumerate(zip(groups, self._group_names, strict=False)):
            if difference := group_difference(saved, live):
                found.append(f"parameter group {i}: {difference}")
        theirs = state["schedule"]["class"] if state["schedule"] else "none"
        ours = type(self.scheduler).__name__ if self.scheduler is not None else "none"
        if theirs != ours:
            found.append(f"LR schedule: {theirs} in the state, {ours} here")
        return found

    # --- what a subclass fills in or extends ----------------------------------------------------------------

    def _begin_window(self) -> None:
        """A new window starts: forget the last one's measurements."""

    def _set_sync(self, last: bool) -> None:
        """Reduce gradients in the backward that follows only if it is the window's last."""

    def _weight(self, parameter: nn.Parameter) -> float:
        """1/n for a parameter, or a shard of one, that n ranks hold alike."""
        raise NotImplementedError

    def _copies(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that hold the same of each parameter that `_is_copied`; none if there are no such ranks."""
        raise NotImplementedError

    def _everyone(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that run the same module; none without other ranks."""
        raise NotImplementedError

    def _is_copied(self, name: str, tensor: torch.Tensor) -> bool:
        """This parameter or buffer is one that other ranks must hold alike."""
        raise NotImplementedError

    def _measure_norm(self) -> float:
        """Global norm of the reduced gradient, on every rank alike. Collective where gradients are sharded."""
        raise NotImplementedError

    def _abandon_window(self) -> None:
        """A restore came, perhaps in the middle of a window: drop what the wrapper holds beside `.grad`."""

    @functools.cached_property
    def _parts(self) -> dict[str, Part]:
        """Which layer group each parameter is of, and how much of it this rank counts. After the subclass is built."""
        return {name: Part(self.layers.of[name], self._weight(p)) for name, p in self._params.items()}

    def _note_buffers(self) -> None:
        """Last thing when a subclass is built: from here on a buffer that moves is told from one that does not."""
        buffers = {name: b for name, b in self.module.named_buffers() if self._is_copied(name, b)}
        self._constant = BufferDigests(buffers, self.device) if buffers and self._everyone() else None

    @functools.cached_property
    def _update_tap(self) -> UpdateTap:
        return UpdateTap(self.optimizer, self.layers, {id(p): [self._parts[n]] for n, p in self._params.items()})

    def _sums(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(groups,) float64: this rank's shares of the squares of tensors like the parameters of these names."""
        return self.layers.sums([(local(tensor), self._parts[name]) for name, tensor in tensors.items()])

    def _grads(self) -> dict[str, torch.Tensor]:
        """Gradients that exist, by parameter name."""
        return {name: p.grad for name, p in self._params.items() if p.grad is not None}

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for p in self._params.values():
            p.grad = None  # parameters that no group holds would otherwise add up across windows


@contextmanager
def _overridden(groups: Sequence[dict[str, Any]], knobs: Knobs) -> Iterator[None]:
    """The optimizer's groups with the knobs applied; the original values come back however the step ends."""
    kept: list[dict[str, Any]] = [{key: group[key] for key in ("lr", "betas") if key in group} for group in groups]
    try:
        for group in groups:
            if knobs.lr_factor != 1.0:
                group["lr"] = group["lr"] * knobs.lr_factor
            if knobs.betas is not None:
                group["betas"] = knobs.betas
        yield
    finally:
        for group, values in zip(groups, kept, strict=True):
            group.update(values)


def _check_scheduler(optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau steps on a metric, not on optimizer steps: "
            "leave it out of the guard and step it after your own evaluation"
        )
    if scheduler is None:
        return
    if not isinstance(scheduler, ChainedScheduler) and not hasattr(scheduler, "last_epoch"):
        raise ConfigError(
            f"{type(scheduler).__name__} does not count its steps (no `last_epoch`): give the torch LR scheduler itself"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError("the LR scheduler drives another optimizer than the one given")


def _position(scheduler: LRScheduler | None) -> int | None:
    """Steps the scheduler has taken by its own count. ChainedScheduler keeps none; its first part does."""
    if isinstance(scheduler, ChainedScheduler):
        return _position(scheduler._schedulers[0])
    return None if scheduler is None else int(scheduler.last_epoch)


def _names_by_group(params: dict[str, nn.Parameter], optimizer: Optimizer) -> list[list[str]]:
    names = {id(p): name for name, p in params.items()}
    lost = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if lost:
        raise ConfigError(
            f"the optimizer holds {len(lost)} parameters that are not the model's (shapes {lost[:3]}). "
            "Build the optimizer from the model after wrapping or sharding it: fully_shard replaces the parameters"
        )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _with_options(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's saved state whose groups have the options, too, that only these groups have."""
    if len(saved["groups"]) != len(groups):
        return dict(saved)  # refused as it is
    pairs = zip(saved["groups"], groups, strict=True)
    merged = [{**theirs, "options": {**freeze(ours["options"]), **theirs["options"]}} for theirs, ours in pairs]
    return {**saved, "groups": merged}


def _is_sharded(optimizer: Optimizer) -> bool:
    """Each rank keeps the state of its own parameters only (torch's ZeroRedundancyOptimizer)."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def _tensor_differences(
    kind: str,
    saved: dict[str, torch.Tensor],
    live: dict[str, torch.Tensor] | dict[str, nn.Parameter],
    sharded_alike: bool,
) -> list[str]:
    found = [f"{kind} {name}: only in the state" for name in saved if name not in live]
    for name, tensor in live.items():
        ours = local(tensor)
        theirs = saved.get(name)
        if theirs is None:
            found.append(f"{kind} {name}: not in the state")
        elif sharded_alike and (theirs.shape != ours.shape or theirs.dtype != ours.dtype):
            found.append(
                f"{kind} {name}: shape {tuple(theirs.shape)} {theirs.dtype} in the state, "
                f"{tuple(ours.shape)} {ours.dtype} on this rank"
            )
    return found


def _plain(value: Any) -> Any:
    """The same with tensors local and NumPy scalars as Python ones; nothing is copied."""
    if isinstance(value, torch.Tensor):
        return local(value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def _put(
    live: Any, saved: Any, copies: Copies, like: torch.Tensor | None = None, shape: list[int] | None = None
) -> Any:
    """`saved` as a live value: to be copied into `live` where that tensor fits, else a new one, sharded as `like` if
    `shape` (its global shape) is given."""
    if not isinstance(saved, torch.Tensor):
        return copy.deepcopy(saved)
    if isinstance(live, torch.Tensor) and local(live).shape == saved.shape and live.dtype == saved.dtype:
        copies.add(local(live), saved)
        return live
    fresh = saved.detach().clone()
    if shape is None or not isinstance(like, DTensor):
        return fresh
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        fresh, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
