"""A faulty engine beside its clean twin: what each rank puts on the wire, what it holds after the reduction, its losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from resilient.engines.base import Engine, EngineConfig
from resilient.engines.buffers import local
from resilient.engines.build import build_engine
from resilient.faults import FaultConfig, NoFault, install
from resilient.train.data import DataConfig, TokenStream
from resilient.train.loop import next_byte_loss
from resilient.train.model import GPT, ModelConfig
from resilient.train.optim import OptimConfig, make_optimizer, make_scheduler

MODEL = ModelConfig(name="small", width=32, layers=2, heads=2, hidden=48, dropout=0.0)
DATA = DataConfig(name="synthetic", seq_len=16, micro_batch=2, accumulation=2, max_bytes=20_000)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2)
_ON_THE_WIRE = ("allreduce", "reduce_scatter_single")


@dataclass(frozen=True)
class Attempt:
    """sent: what this rank gave to the reduction; held: its part of the reduced gradient; both flat, in a fixed order."""

    sent: torch.Tensor
    held: torch.Tensor
    loss: float


@dataclass(frozen=True)
class Difference:
    """Of an attempt from its twin's: elements that differ in any bit, and whether the losses are equal."""

    sent: int
    held: int
    loss: bool


def build(config: EngineConfig, data: DataConfig = DATA, model: ModelConfig = MODEL) -> Engine:
    torch.manual_seed(1)
    return build_engine(
        config,
        GPT(model),
        make_optimizer=lambda module: make_optimizer(module, OPTIM),
        make_scheduler=lambda optimizer: make_scheduler(optimizer, OPTIM, 20),
        clip=OPTIM.clip,
        accumulation=data.accumulation,
        micro_batch=data.micro_batch,
        device=torch.device("cpu"),
    )


class Run:
    """One engine with a fault, fed step by step. Step k reads the samples of step k, whenever it is tried."""

    def __init__(
        self, config: EngineConfig, fault: FaultConfig, rank: int, world: int, model: ModelConfig = MODEL
    ) -> None:
        self.now = 0
        self.engine, self.stream, self.objective = install(
            fault,
            engine=build(config, model=model),
            stream=TokenStream(DATA, seed=0, rank=rank, world=world),
            objective=next_byte_loss,
            step=lambda: self.now,
            rank=rank,
            world=world,
        )

    def window(self, step: int) -> float:
        """Forward and backward of the step's micro-batches, up to the gate. The loss of this rank."""
        self.now, loss = step, 0.0
        self.stream.rewind(self.stream.state_at((step - 1) * self.stream.global_batch))
        batches = [batch for _, batch in zip(range(DATA.accumulation), self.stream, strict=False)]
        for index, batch in enumerate(batches):
            self.engine.begin_micro_step(index, len(batches))
            result = self.objective(self.engine, batch)
            self.engine.backward(result.loss_sum / max(result.tokens, 1))
            loss += float(result.loss_sum.detach())
        return loss

    def attempt(self, step: int) -> Attempt:
        with recorded() as sent:
            loss = self.window(step)
        held = flat(gradients_of(self.engine))
        self.engine.skip(False)
        return Attempt(flat(sent), held, loss)


def gradients_of(engine: Any) -> list[torch.Tensor]:
    """What the next step would use on this rank, each tensor once."""
    stage = getattr(engine, "_stage", None)
    if stage is None:
        return [local(p.grad) for group in engine.optimizer.param_groups for p in group["params"] if p.grad is not None]
    return list({id(tensor): tensor for tensor, _ in stage.reduced()}.values())


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1).float() for t in tensors]).clone()


@contextmanager
def recorded() -> Iterator[list[torch.Tensor]]:
    """Copies of what this rank gives to every collective that reduces, in order."""
    seen: list[torch.Tensor] = []
    originals = {name: vars(dist.ProcessGroup)[name] for name in _ON_THE_WIRE}  # not getattr: that unbinds them

    def allreduce(group: Any, tensors: Any, *args: Any) -> Any:
        seen.extend(t.detach().clone() for t in tensors if t.is_floating_point())
        return originals["allreduce"](group, tensors, *args)

    def reduce_scatter(group: Any, output: Any, given: torch.Tensor, *args: Any) -> Any:
        seen.append(given.detach().clone())
        return originals["reduce_scatter_single"](group, output, given, *args)

    for name, wrapper in zip(_ON_THE_WIRE, (allreduce, reduce_scatter), strict=True):
        setattr(dist.ProcessGroup, name, wrapper)
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def attempts(config: EngineConfig, fault: FaultConfig, rank: int, world: int, steps: Sequence[int]) -> list[Attempt]:
    """At `steps`, each refused, so that all of them meet the same weights."""
    run = Run(config, fault, rank, world)
    try:
        return [run.attempt(step) for step in steps]
    finally:
        run.engine.close()


def differences(
    rank: int, world: int, config: EngineConfig, fault: FaultConfig, steps: Sequence[int]
) -> list[Difference]:
    """How this rank's attempts at `steps` differ from the clean twin's."""
    clean = attempts(config, NoFault(), rank, world, steps)
    faulty = attempts(config, fault, rank, world, steps)
    return [
        Difference(changed(a.sent, c.sent), changed(a.held, c.held), a.loss == c.loss)
        for a, c in zip(faulty, clean, strict=True)
    ]


def changed(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    assert ours.shape == theirs.shape
    return int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())
