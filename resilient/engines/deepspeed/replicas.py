"""What DeepSpeed holds alike on all ranks, and digests of it that say where a difference lies.

parameters: ZeRO 0-2 and BF16_Optimizer: what the forward uses, gathered again after every step. Under ZeRO 3 they are
    sharded; the small ones that stay gathered are copies of the shards, made anew by every step.
optimizer: masters and moments by layer group under ZeRO 0, which replicates them; and in every stage the plain numbers:
    options of the parameter groups, the loss scaler, step counts and LR schedule.
buffers: those that no forward has moved. DeepSpeed synchronises none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resilient.checkpoint.digest import joint_digest, walk
from resilient.engines.deepspeed.stages import Stage
from resilient.engines.replicas import OPTIONS, BufferDigests, parameter_digests

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine as Engine

SCALER, COUNTS = "loss scaler", "counts"
_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


class Replicas:
    """groups: kind -> groups of global ranks that must hold the same values; none with a single rank."""

    def __init__(self, engine: Engine, stage: Stage, schedulers: Sequence[Any]) -> None:
        self._engine = engine
        self._stage = stage
        self._schedulers = schedulers
        self._device = torch.device(engine.device)
        buffers = dict(engine.module.named_buffers())
        kinds = ["optimizer"]
        if engine.zero_optimization_stage() < 3:
            kinds.append("parameters")
        if buffers:
            kinds.append("buffers")
        everyone = tuple(range(dist.get_world_size()))
        self.groups = {kind: (everyone,) for kind in kinds if len(everyone) > 1}
        self._constant = BufferDigests(buffers, self._device) if self.groups else None

    @torch.no_grad()
    def digests(self, kind: str) -> Mapping[str, torch.Tensor]:
        """Name -> 0-dim int64 on the device, of this rank's values. Local, no host sync."""
        if kind == "parameters":
            return parameter_digests(self._stage.parameters, self._stage.layers, self._device)
        if kind == "buffers":
            return self._constant.now(dict(self._engine.module.named_buffers())) if self._constant is not None else {}
        return {**(self._moments() if self._stage.replicated else {}), **self._numbers()}

    def _moments(self) -> dict[str, torch.Tensor]:
        """By layer group: masters, where they are not the parameters themselves, and what the optimizer keeps of them."""
        layers, stage = self._stage.layers, self._stage
        by_layer: list[list[torch.Tensor]] = [[] for _ in layers.names]
        for master in stage.masters():
            state = stage.base.state.get(master.tensor, {})
            kept = [state[key] for key in sorted(state) if _like(state[key], master.tensor)]
            for tensor in kept if master.alias else [master.tensor, *kept]:
                for part in stage.parts[id(master.tensor)]:
                    by_layer[part.layer].append(tensor.detach().reshape(-1)[part.start : part.stop])
        return {name: joint_digest(parts, self._device) for name, parts in zip(layers.names, by_layer, strict=True)}

    def _numbers(self) -> dict[str, torch.Tensor]:
        base, scaler = self._stage.base, self._stage.scaler
        states = [(m.tensor, base.state.get(m.tensor, {})) for m in self._stage.masters()]
        numbers = {
            OPTIONS: [{k: v for k, v in group.items() if k != "params"} for group in base.param_groups],
            SCALER: {k: v for k, v in vars(scaler).items() if isinstance(v, bool | int | float)} if scaler else {},
            COUNTS: {
                "engine": {name: getattr(self._engine, name) for name in _COUNTERS},
                "steps": [{k: v for k, v in state.items() if not _like(v, master)} for master, state in states],
                "schedules": [schedule.state_dict() for schedule in self._schedulers],
            },
        }
        return {name: self._of(values) for name, values in numbers.items()}

    def _of(self, values: Any) -> torch.Tensor:
        """Tensors by their bits, plain numbers and words as they print; whatever else there is does not count."""
        plain, tensors = hashlib.blake2b(digest_size=8), []
        for path, leaf in walk(values):
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            elif isinstance(leaf, bool | int | float | str):
                plain.update(f"{path}={leaf!r};".encode())
        return joint_digest(tensors, self._device) * 31 + int.from_bytes(plain.digest(), "big", signed=True)


def _like(value: Any, master: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == master.shape
