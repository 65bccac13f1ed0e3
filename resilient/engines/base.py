"""The Engine protocol: what the coordinator needs from DeepSpeed, FSDP2 or DDP, and nothing more.

One window of data is one optimizer step: `len(window)` micro-steps, then a gate, then `apply` or `skip`.

    engine.begin_micro_step(i, n)      before the forward of micro-step i of n
    engine.backward(loss)              mean over micro-steps, mean over ranks; reduces on the last micro-step
    engine.taps()                      what was measured on the way (device tensors, no host sync)
    --- the vote ---
    engine.apply(grad_norm, knobs)     clip, optimizer step, LR schedule, clear gradients, count
    engine.skip(overflow)              clear gradients; nothing else moves
    engine.abandon()                   the same, and not even counted: the window was only looked at

The engine never decides. `apply` and `skip` are called with the same arguments on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from resilient.checkpoint.pieces import Piece
from resilient.engines.layers import Layers
from resilient.engines.updates import Update
from resilient.signals import CheckPlan, Knobs

EngineState = dict[str, Any]
"""Nested dict/list/tuple of CPU or device tensors and plain Python scalars/strings (loadable by `torch.load(weights_only=True)`)."""


@dataclass(frozen=True)
class EngineConfig:
    """conf/engine: which engine, and how.

    precision: fp32 | bf16 | fp16. fp16 needs a DeepSpeed engine (its dynamic loss scaler).
    deepspeed: passed through to deepspeed.initialize, unknown keys accepted.
    """

    name: Literal["ddp", "fsdp2", "deepspeed"]
    zero_stage: int = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    bucket_mb: float = 1.0
    initial_loss_scale_power: int = 16
    deepspeed: Mapping[str, Any] | None = None


def engine_problems(config: EngineConfig) -> list[str]:
    """What cannot work together in it, each naming its full key; empty when all is well."""
    problems = []
    if config.name not in ("ddp", "fsdp2", "deepspeed"):
        problems.append(f"engine.name={config.name}: must be ddp, fsdp2 or deepspeed")
    if config.precision not in ("fp32", "bf16", "fp16"):
        problems.append(f"engine.precision={config.precision}: must be fp32, bf16 or fp16")
    if config.name != "deepspeed":
        if config.precision == "fp16":
            problems.append(f"engine.precision=fp16: {config.name} has no loss scaler; use bf16 or a deepspeed engine")
        if config.zero_stage != 0:
            problems.append(f"engine.zero_stage={config.zero_stage}: only a deepspeed engine shards by ZeRO stage")
        if config.deepspeed:
            problems.append(f"engine.deepspeed: {config.name} does not read it; choose a deepspeed engine")
    elif config.zero_stage not in (0, 1, 2, 3):
        problems.append(f"engine.zero_stage={config.zero_stage}: must be 0, 1, 2 or 3")
    if not config.bucket_mb > 0:
        problems.append(f"engine.bucket_mb={config.bucket_mb}: must be positive")
    return problems


@dataclass(frozen=True)
class Taps:
    """Measurements of one window, as float64 tensors on the engine's device, 0-dim if not said otherwise.

    local_sq: sum of squares of this rank's own gradient before reduction, unscaled, as a gradient of this rank's mean
        loss. Engines that reduce once per window report the accumulated gradient; engines that reduce every
        micro-step (ZeRO 2, ZeRO 3) report the sum over micro-steps (see `per_micro_step`).
    reduced_sq_share: this rank's share of the squared global norm after reduction, before clipping, unscaled;
        the shares of all ranks sum to the whole (a replicated gradient counts 1/world on each rank).
    buckets: how many gradient buckets the taps saw. 0 means the tap is not connected (BR-47).
    layer_sq_share: (groups,) `reduced_sq_share` by layer group (S3).
    reduce_s: host seconds spent in the reduction of gradients, waiting included; collective_s: those of them spent
        waiting for the other ranks (BR-42). On an accelerator both are the time to launch it only.
    checks: CHECK_COLUMNS name -> (cells,) float64, as `Checks` describes them, unscaled; empty without a check.
    """

    local_sq: torch.Tensor
    reduced_sq_share: torch.Tensor
    buckets: int
    layer_sq_share: torch.Tensor
    reduce_s: float = 0.0
    collective_s: float = 0.0
    checks: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CellRows:
    """One bucket of the window that ended, by rows of 1024 elements, for a second look at a failed check.

    name: of the bucket. before: (rows, 8) float64 on the device, this rank's part of the mean, by parts of 128 elements;
    after: (rows, 8) what this rank holds of the reduced gradient, 0 where it holds nothing. held: (rows,) bool, rows it
    holds any element of.
    places: for each row, the parameters in it, by name."""

    name: str
    before: torch.Tensor
    after: torch.Tensor
    held: torch.Tensor
    places: Callable[[int], str]


@dataclass(frozen=True)
class Counters:
    """The engine's own bookkeeping, for the cross-check of BR-18.

    steps: applied optimizer steps by the engine's count. skipped: steps it knows were refused.
    schedule: position of the LR schedule (steps taken), or None without a schedule.
    """

    steps: int
    skipped: int
    schedule: int | None


@runtime_checkable
class Engine(Protocol):
    """One training engine, wrapped. All methods are called on every rank, in the same order."""

    name: str
    module: torch.nn.Module  # the user's module, for hooks and evaluation (forward goes through __call__)
    device: torch.device
    per_micro_step: bool  # True: reduces gradients on every micro-step
    per_rank: tuple[str, ...]  # entries of a captured state that, apart from its pieces, differ from rank to rank
    layers: Layers  # the module's layer groups, the same on every rank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward pass through the wrapped model."""

    def begin_micro_step(self, index: int, count: int) -> None:
        """Announce micro-step `index` (0-based) of `count`, before its forward: sets gradient sync for the last one."""

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-step's loss. Gradients end up as the mean over micro-steps and ranks."""

    def taps(self) -> Taps:
        """Measurements of the window that just ended. Call once, after the last backward, before apply/skip."""

    def check_plan(self) -> CheckPlan | None:
        """What `Taps.checks` is about from now on; None where nothing is reduced, or where the buckets are not known yet
        (they are after the first window). It may change between windows, on all ranks alike."""

    def uncheck(self) -> None:
        """From the next window on nothing is measured for the reduction check: `check_plan` is None for good. On all ranks."""

    def check_rows(self, cell: int) -> list[CellRows]:
        """The buckets of a cell, by rows, of the window whose taps were read last. Before apply or skip. Local."""

    def replicas(self) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """What is held alike by several ranks: `parameters`, `optimizer`, `buffers` -> groups of global ranks that must
        hold the same values. A kind that is sharded over all ranks is absent."""

    def replica_digests(self, kind: str) -> Mapping[str, torch.Tensor]:
        """Name (layer group, or optimizer state of it) -> 0-dim int64 digest on the device, of this rank's values of a
        kind in `replicas()`. A pass over them; no host sync. The same names on all ranks of a group."""

    def leftover_sq(self) -> torch.Tensor | None:
        """Call before the first micro-step of a window: None if no gradient is left from before, else this rank's
        squared L2 of what is, 0-dim float64 on the device (BR-04). Costs a pass over those gradients, if any."""

    def watch_update(self, with_lag: bool) -> None:
        """Measure what the next `apply` changes; with_lag: and Adam's RMS(g^2/v). Costs a copy of the parameters that
        this rank steps, while it steps them."""

    def take_update(self) -> Update | None:
        """What was measured since `watch_update`; None if the step was refused. Call once, after `apply`."""

    def weight_sq_share(self) -> torch.Tensor:
        """This rank's share of the squared L2 norm of all trained parameters (masters where there are any), 0-dim
        float64 on the device; shares of all ranks sum to the whole. Costs a pass over the weights."""

    def mismatched_weights(self) -> list[str]:
        """Of an engine that computes in weights cast from masters: a line for each parameter of which the weights that this
        rank holds are not, bit for bit, the cast of the masters that it holds (BR-08), with rank, name, how many elements
        and the first. Empty where all are, and where the optimizer steps the weights themselves.

        Between steps. Local: one pass over this rank's masters, room for the largest parameter in the weights' format, one
        host sync; 3.2 M parameters in bf16 took 8 ms under ZeRO 2 and 15 ms under ZeRO 0, 2 ranks on 2 busy cores."""

    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        """Clip to `clip * knobs.clip_factor` using `grad_norm` (None, when unguarded: the engine measures it itself,
        collectively if it must), step the optimizer with LR x `knobs.lr_factor`,
        advance the LR schedule, clear gradients, count the step. The LR factor never leaks into the schedule."""

    def skip(self, overflow: bool = False) -> None:
        """A true skip: gradients cleared; weights, moments, LR schedule and step counters untouched; the engine's own
        skipped-step count goes up by one. `overflow` additionally tells a dynamic loss scaler about an overflow."""

    def abandon(self) -> None:
        """Drop the window since `begin_micro_step(0, n)`, finished or not, without a trace: gradients cleared, buffers as
        before it; weights, moments, LR schedule, loss scaler and every counter untouched. For a window that is only
        looked at."""

    def lr(self) -> float:
        """LR that the next optimizer step would use in group 0, before knobs."""

    def loss_scale(self) -> float:
        """Current loss scale, 1.0 when none is used."""

    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale adapts by itself, so that overflows are expected now and then."""

    def counters(self) -> Counters: ...

    def capture(self) -> EngineState:
        """`live()`, frozen in host memory."""

    def live(self) -> EngineState:
        """Everything a bitwise replay needs on this rank except RNG and data: parameters or shards, buffers, masters,
        optimizer state with integer steps, LR schedule, loss scaler, the engine's counters. The very tensors: to be read
        or copied before the next step, and not to be changed."""

    def restore(self, state: EngineState) -> None:
        """Put a captured state back into the live tensors (in place), drop stale gradients. State that did not exist
        at capture (lazily created moments) is dropped again. Raises CheckpointError, before anything is touched, with what
        the state lacks and how it differs from this engine."""

    def optional_parts(self) -> tuple[str, ...]:
        """Parts that a state may lack where its user says so: `moments`, `schedulers`, `scaler` where this kind of engine has
        one, and `buffers/NAME` for each persistent buffer. Local."""

    def complete(self, state: EngineState, allow_missing: Collection[str]) -> tuple[EngineState, tuple[str, ...]]:
        """`state` with those parts of `allow_missing` that it lacks as they are here, frozen, so that a restore of it leaves
        them alone; and their names. A schedule that the state was saved without is lacking, too; what the state does have is
        never replaced. Raises ConfigError for a name that is not in `optional_parts()`. Nothing is touched. Local."""

    def pieces(self, state: EngineState) -> list[Piece]:
        """Which box of which whole tensor the tensors of a state of this rank are. Everything else in a state is the same
        on all ranks or named in `per_rank`. Raises CheckpointError where that cannot be said (parameters that are not laid
        out in boxes, optimizer state of no known shape): such a state fits this world only. Local."""

    def frame(self, source: EngineState, allow_missing: Collection[str] = ()) -> EngineState:
        """Room for this rank's state, in host memory: all that is no piece is taken from `source`, rank 0's state in a
        world of any size. Fill in every piece of `pieces(frame)`, then `restore` it (see checkpoint/reshape.py).
        allow_missing: what the source may lack; the frame then lacks it as well: `complete` it.
        Raises CheckpointError, with what differs, if the source is not of this model, optimizer and schedule. Local."""

    def close(self) -> None:
        """Remove every hook and patch. The wrapped objects work unguarded afterwards. Idempotent."""
