"""`DeepSpeedEngine`: the Engine protocol around what `deepspeed.initialize` returned."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from resilient.checkpoint.pieces import Piece as StatePiece
from resilient.checkpoint.snapshot import freeze
from resilient.engines.absent import refuse_unknown
from resilient.engines.base import CellRows, Counters, EngineState, Taps
from resilient.engines.buffers import BufferHold
from resilient.engines.deepspeed.check import ReductionCheck
from resilient.engines.deepspeed.frame import PER_RANK, frame_of
from resilient.engines.deepspeed.layout import missing_parts
from resilient.engines.deepspeed.master_check import mismatched_weights
from resilient.engines.deepspeed.pieces import pieces_of
from resilient.engines.deepspeed.replicas import Replicas
from resilient.engines.deepspeed.rows import Piece
from resilient.engines.deepspeed.state import complete_state, live_state, optional_parts, restore_state
from resilient.engines.deepspeed.support import stage_of
from resilient.engines.norms import sum_of_squares
from resilient.engines.updates import Update, UpdateTap
from resilient.errors import ConfigError
from resilient.signals import CheckPlan, Knobs

if TYPE_CHECKING:
    import deepspeed


class DeepSpeedEngine:
    """ZeRO 0, 1, 2 and 3 in fp32, bf16 and fp16. All methods on every rank, in the same order.

    engine: what `deepspeed.initialize` returned.
    scheduler: an LR schedule that DeepSpeed does not know; `apply` steps it after the engine stepped. The engine's own
        `lr_scheduler` is stepped by DeepSpeed and needs no mention.

    While wrapped, gradient accumulation follows `begin_micro_step`, not DeepSpeed's own micro-step count, and
    `engine.backward` and `engine.step` are called from here only. Do not call them yourself.
    Raises ConfigError for engines whose gradients or state would not be seen in full (offload, MoE, pipeline...).
    """

    name: str
    per_rank: tuple[str, ...] = PER_RANK

    def __init__(self, engine: deepspeed.DeepSpeedEngine, *, scheduler: Any = None) -> None:
        self.name = f"deepspeed_zero{engine.zero_optimization_stage()}"
        self.engine = engine
        self.module: torch.nn.Module = engine.module
        self.device = torch.device(engine.device)
        self.per_micro_step = engine.zero_optimization_stage() >= 2
        self._stage = stage_of(engine)
        self._world = engine.dp_world_size
        self.layers = self._stage.layers
        self._update_tap = UpdateTap(self._stage.base, self.layers, self._stage.parts)
        self._own_scheduler = scheduler if scheduler is not engine.lr_scheduler else None
        self._refused = engine.skipped_steps  # steps that DeepSpeed refused itself: it counts them in global_steps too
        self._schedule_offset = self._schedule_position(0) - (engine.global_steps - self._refused)
        self._buffers = BufferHold(self.module)
        self._check = ReductionCheck(self._stage, self.device)
        self._replicas = Replicas(engine, self._stage, self._schedulers)
        self._index, self._count = 0, 1
        self._micro_steps_before = engine.micro_steps  # when the window began
        self._complete = False  # the last backward of a window is done, and nothing was decided about it yet
        self._listening = False
        self._reset_taps()
        self._stage.connect(self._observe)

    @property
    def _schedulers(self) -> list[Any]:
        return [s for s in (self.engine.lr_scheduler, self._own_scheduler) if s is not None]

    # --- one window ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def begin_micro_step(self, index: int, count: int) -> None:
        """Micro-step `index` of `count`. `count` may differ from the configured accumulation (a short last window)."""
        if index == 0:
            self._reset_taps()
            self._buffers.take()
            self._micro_steps_before = self.engine.micro_steps
        self._index, self._count = index, count
        self.engine.set_gradient_accumulation_boundary(index == count - 1)

    def backward(self, loss: torch.Tensor) -> None:
        """`engine.backward` of loss / count. The loss is taken to float32 first, so that the loss scale fits."""
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()
        self._listening = True
        try:
            self.engine.backward(self._stage.scale_loss(loss / self._count), scale_wrt_gas=False)
        finally:
            self._listening = False
        if self.per_micro_step and self._index > 0:
            self._check.carry()
        self._complete = self._index == self._count - 1
        if not self._complete:
            self.engine.step()  # not a boundary: DeepSpeed only counts the micro-step

    def taps(self) -> Taps:
        """Local norm of what entered the reduction; reduced share of what `engine.step` is about to use."""
        by_layer = self.layers.sums(self._stage.reduced()) / self._stage.loss_scale() ** 2
        local_sq, checks = self._check.finish(by_layer)
        waited = self._stage.reduce_s
        return Taps(local_sq, by_layer.sum(), self._seen, by_layer, waited, waited, checks)

    def check_plan(self) -> CheckPlan | None:
        """A cell is a layer group. None with a single rank."""
        return self._check.plan

    def uncheck(self) -> None:
        self._check.plan = None

    def check_rows(self, cell: int) -> list[CellRows]:
        """One entry: the layer group, each of its parameters in rows of its own."""
        return [self._check.rows_of(cell)]

    def replicas(self) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """All ranks: parameters (not under ZeRO 3), constant buffers, and of the optimizer what is not sharded."""
        return self._replicas.groups

    def replica_digests(self, kind: str) -> Mapping[str, torch.Tensor]:
        return self._replicas.digests(kind)

    def leftover_sq(self) -> torch.Tensor | None:
        left = self._stage.reduced()
        return self.layers.sums(left).sum() / self._stage.loss_scale() ** 2 if left else None

    def watch_update(self, with_lag: bool) -> None:
        self._update_tap.watch(with_lag)

    def take_update(self) -> Update | None:
        return self._update_tap.take()

    def weight_sq_share(self) -> torch.Tensor:
        share = sum_of_squares((m.tensor for m in self._stage.masters()), self.device)
        return share / self._world if self._stage.replicated else share

    def mismatched_weights(self) -> list[str]:
        """ZeRO 1 to 3: of this rank's partition. ZeRO 0 in half precision: nothing is known before the first step, see
        `HalfStage`."""
        return mismatched_weights(self._stage) if self._stage.begins_cast or self.counters().steps else []

    def _reset_taps(self) -> None:
        self._check.begin()
        self._seen = 0
        self._stage.reduce_s = 0.0

    def _observe(self, pieces: list[Piece]) -> None:
        if self._listening:
            self._check.sent(pieces)
            self._seen += 1

    # --- the gate ---

    def apply(self, grad_norm: float | None, knobs: Knobs) -> None:
        """`engine.step()` at clip x clip_factor. DeepSpeed clips by its own norm, which is `grad_norm` to rounding.

        DeepSpeed may still refuse the step (an overflow that only it sees): then `counters().skipped` goes up and
        `counters().steps` does not; gradients are dropped all the same."""
        if not self._complete:
            raise RuntimeError(
                "apply() without a complete window: no backward of a last micro-step since the last decision"
            )
        self._complete = False
        with self._stage.knobs(knobs), self._update_tap.around():
            self.engine.step()
        self._align_micro_steps()
        self._buffers.drop()
        if self.engine.was_step_applied():
            self._stage.after_step()
            if self._own_scheduler is not None:
                self._own_scheduler.step()
        else:
            self._refused += 1
            self._stage.drop_gradients()

    def skip(self, overflow: bool = False) -> None:
        """Drop the window without `engine.step()`. Buffers that the forward passes moved go back as well.

        `overflow` reaches a dynamic loss scaler as in DeepSpeed's own step, which raises at the smallest scale."""
        self._complete = False
        self._stage.drop_gradients()
        self._buffers.put_back()
        self.engine.micro_steps += 1
        self._align_micro_steps()
        self.engine.skipped_steps += 1
        self.engine._step_applied = False
        if overflow:
            self._stage.overflowed()

    def abandon(self) -> None:
        self._complete = False
        self._stage.drop_gradients()
        self._buffers.put_back()
        self.engine.micro_steps = self._micro_steps_before

    def _align_micro_steps(self) -> None:
        """Keep DeepSpeed's own boundary arithmetic, (micro_steps + 1) % accumulation, in phase after a short window."""
        accumulation = self.engine.gradient_accumulation_steps()
        self.engine.micro_steps += -self.engine.micro_steps % accumulation

    # --- readings ---

    def lr(self) -> float:
        return float(self._stage.base.param_groups[0]["lr"])

    def loss_scale(self) -> float:
        return self._stage.loss_scale()

    def dynamic_loss_scale(self) -> bool:
        return self._stage.dynamic()

    def counters(self) -> Counters:
        """steps: DeepSpeed's global_steps without those it counted but refused. skipped: its skipped_steps.
        schedule: by the schedule's own count, less what it was ahead of `steps` when the engine was wrapped."""
        schedule = self._schedule_position(self._schedule_offset) if self._schedulers else None
        return Counters(self.engine.global_steps - self._refused, self.engine.skipped_steps, schedule)

    def _schedule_position(self, offset: int) -> int:
        """Steps the LR schedule has taken by its own count, less `offset`; 0 without a schedule."""
        return _position(self._schedulers[-1]) - offset if self._schedulers else 0

    # --- state ---

    def capture(self) -> EngineState:
        return freeze(self.live())

    def live(self) -> EngineState:
        """ZeRO 1-3: this rank's partitions only."""
        extra = {"refused": self._refused, "schedule_offset": self._schedule_offset}
        return live_state(self.engine, self._stage, self._schedulers, extra)

    def pieces(self, state: EngineState) -> list[StatePiece]:
        """What the tensors of a captured state are of the whole model. Not a collective."""
        return pieces_of(state)

    def frame(self, source: EngineState, allow_missing: Collection[str] = ()) -> EngineState:
        """Room for a state like `source`, which may be of another world, on this rank."""
        whole, absent = self.complete(source, allow_missing)
        return frame_of(self.engine, self._stage, self._schedulers, whole, absent)

    def optional_parts(self) -> tuple[str, ...]:
        return optional_parts(self.engine)

    def complete(self, state: EngineState, allow_missing: Collection[str]) -> tuple[EngineState, tuple[str, ...]]:
        refuse_unknown(allow_missing, self.optional_parts(), self.name)
        if not allow_missing:
            return state, ()
        missing_parts(state)  # raises for what is no state at all
        return complete_state(state, self.live(), allow_missing)

    def restore(self, state: EngineState) -> None:
        """Bit for bit, in place. CheckpointError, before anything is touched, if the state is of another model, stage,
        precision, world or rank."""
        counters = restore_state(self.engine, self._stage, self._schedulers, state)
        self._refused, self._schedule_offset = counters["refused"], counters["schedule_offset"]
        self._buffers.drop()
        self._index, self._count, self._complete = 0, 1, False
        self._reset_taps()

    def close(self) -> None:
        """Remove the taps; DeepSpeed decides about accumulation boundaries again."""
        self._stage.disconnect()
        self.engine._is_gradient_accumulation_boundary = None


def _position(scheduler: Any) -> int:
    """Steps a schedule has taken: torch counts from 0, DeepSpeed's own schedules from -1. ChainedScheduler keeps no
    count; its first part does."""
    if hasattr(scheduler, "last_epoch"):
        return int(scheduler.last_epoch)
    if hasattr(scheduler, "last_batch_iteration"):
        return int(scheduler.last_batch_iteration) + 1
    if getattr(scheduler, "_schedulers", None):
        return _position(scheduler._schedulers[0])
    raise ConfigError(f"{type(scheduler).__name__} does not say how many steps it has taken (no last_epoch)")
