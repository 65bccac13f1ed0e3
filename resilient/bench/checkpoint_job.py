"""A guarded job to measure saving and going back on, and what DeepSpeed and torch themselves offer for both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from resilient.bench.ranks import MODELS, trained_engine
from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.checkpoint.digest import walk
from resilient.checkpoint.snapshot import Snapshot
from resilient.integrations.guard import Guard
from resilient.signals import Knobs
from resilient.train.data import DataConfig, TokenStream
from resilient.train.loop import next_byte_loss, weighted

_FOREVER = 10**9


@dataclass(frozen=True)
class Settings:
    """model: of MODELS. rounds: each way of doing it is measured so often. Small batches: a step only has to move the state."""

    engine: str = "ddp"
    model: str = "gpt_3m"
    rounds: int = 8
    seq_len: int = 64
    micro_batch: int = 2
    seed: int = 0


class Spent(NamedTuple):
    """Seconds of one call. cpu: of the calling thread."""

    wall: float
    cpu: float


class Job:
    """On every rank. Trains under the guard; saves only when asked to. folder: of the run."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        torch.manual_seed(settings.seed)
        rank, world = dist.get_rank(), dist.get_world_size()
        data = DataConfig(name="synthetic", seq_len=settings.seq_len, micro_batch=settings.micro_batch)
        self._stream = TokenStream(data, seed=settings.seed, rank=rank, world=world)
        self.engine = trained_engine(settings.engine, MODELS[settings.model], settings.micro_batch)
        self.guard = Guard(
            self.engine,
            data=self._stream,
            run_dir=folder,
            snapshot=SnapshotConfig(every=0),
            checkpoint=CheckpointConfig(every=_FOREVER, blocking=False, keep=1, keep_best=False),
            progress=False,
        )
        coordinator = self.guard._coordinator
        self.state, self.saver, self.exchange = coordinator._state, coordinator._kept.saver, coordinator.exchange
        self.feed, self.store = coordinator.feed, self.guard._store
        self._batches = self.guard.batches(steps=_FOREVER)
        self.train(3)  # allocations, moments, the first bucket layout

    def train(self, steps: int = 1) -> None:
        """Steps under the guard."""
        for _ in range(steps):
            result = next_byte_loss(self.engine, next(self._batches))
            mean = result.loss_sum.detach() / max(result.tokens, 1)
            self.guard.backward(weighted(result, self.guard), report=mean, tokens=result.tokens)
            self.guard.step()

    def stray(self) -> None:
        """One step that the guard does not see: weights, moments, schedule, counters, data and random streams have moved, and
        it takes a restore to go on."""
        self.engine.begin_micro_step(0, 1)
        result = next_byte_loss(self.engine, self.feed.take().batches[0])
        self.engine.backward(result.loss_sum / max(result.tokens, 1))
        self.engine.apply(None, Knobs())
        self.feed.peek()

    def capture(self, into: Snapshot | None) -> Snapshot:
        """Of the present step, as the guard takes it."""
        coordinator = self.guard._coordinator
        return self.state.capture(coordinator.applied, coordinator.outer.attempts, into=into)

    def save(self, snapshot: Snapshot, *, wait: bool) -> None:
        """As the guard saves it: checked, voted on, begun; with `wait` written and committed."""
        self.saver.save(snapshot, self.guard.counters, wait=wait)

    def committed(self) -> None:
        """Wait for what is being written. Raises RuntimeError when it was not saved."""
        self.saver.finish()
        if self.saver.last != self.guard.applied:
            raise RuntimeError(f"step {self.guard.applied} was not saved")

    def tensors(self) -> list[torch.Tensor]:
        """The engine's, live: all but a hundredth of a snapshot's bytes."""
        return [leaf for _, leaf in walk(self.engine.live()) if isinstance(leaf, torch.Tensor)]

    def close(self) -> None:
        self._stream.close()
        self.guard.close()


class Native:
    """What the engine's own makers offer: DeepSpeed's `save_checkpoint` and `load_checkpoint`; torch's distributed checkpoint
    (with the state dicts that it is given) for DDP and FSDP2. Neither brings back data, random streams or the guard."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder = job, folder
        engine: Any = job.engine
        self.deepspeed = engine.engine if hasattr(engine, "engine") else None
        self._model: Any = getattr(engine, "model", None)
        self._optimizer: Any = getattr(engine, "optimizer", None)
        self._group = dist.new_group(backend="gloo") if self.deepspeed is None else None  # of its background thread

    @property
    def names(self) -> tuple[str, str]:
        """Of its blocking save and its load."""
        return ("save_checkpoint", "load_checkpoint") if self.deepspeed is not None else ("dcp.save", "dcp.load")

    def save(self) -> None:
        if self.deepspeed is not None:
            self.deepspeed.save_checkpoint(str(self._folder), tag="native")
        else:
            dcp.save(self._state(), checkpoint_id=self._folder)

    def begin_save(self) -> Callable[[], object]:
        """`dcp.async_save`; what it returns waits for the end."""
        future: Any = dcp.async_save(self._state(), checkpoint_id=self._folder, process_group=self._group)
        return lambda: future.result()

    def load(self) -> None:
        if self.deepspeed is not None:
            loaded, _ = self.deepspeed.load_checkpoint(str(self._folder), tag="native")
            if loaded is None:
                raise RuntimeError("DeepSpeed found nothing to load")
            return
        state = self._state()
        dcp.load(state, checkpoint_id=self._folder)
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def timed(action: Callable[[], object]) -> Spent:
    """Begun by all ranks together."""
    dist.barrier()
    started, cpu = time.perf_counter(), time.thread_time()
    action()
    return Spent(time.perf_counter() - started, time.thread_time() - cpu)


def copier(kept: Sequence[torch.Tensor], live: Sequence[torch.Tensor]) -> Callable[[], None]:
    """The plain copy that everything is measured against."""

    @torch.no_grad()
    def copy() -> None:
        torch._foreach_copy_(list(kept), list(live))

    return copy


def slowest(values: dict[str, list[Spent]]) -> dict[str, list[Spent]]:
    """Of all ranks in each round. Collective."""
    table = torch.tensor([[tuple(s) for s in rounds] for rounds in values.values()], dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return {name: [Spent(*row) for row in rounds] for name, rounds in zip(values, table.tolist(), strict=True)}


def summary(rounds: Sequence[Spent]) -> dict[str, float]:
    """Milliseconds. Where other programs share the cores, the lowest is the one that they disturbed least."""
    walls, cpus = [s.wall for s in rounds], [s.cpu for s in rounds]
    return {
        "lowest_ms": 1e3 * min(walls),
        "median_ms": 1e3 * statistics.median(walls),
        "cpu_ms": 1e3 * statistics.median(cpus),
    }


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
