"""A guarded reference job inside spawned ranks, small enough that a scenario takes seconds: real engine, real model,
real data stream with dropout on, real faults, real guard. Nothing here knows what a test expects."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from resilient import faults
from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.checkpoint.digest import state_digest, state_digests
from resilient.checkpoint.rng import capture_rng
from resilient.coordinator.config import GuardConfig
from resilient.coordinator.events import Incident, StepReport
from resilient.detectors.config import DetectorConfig
from resilient.engines.base import Engine, EngineConfig
from resilient.engines.build import build_engine
from resilient.engines.fsdp2 import FSDP2Engine
from resilient.integrations.guard import Guard
from resilient.policies import PolicyConfig, RetryConfig, RollbackConfig, SkipConfig
from resilient.train.data import DataConfig, TokenStream
from resilient.train.loop import next_byte_loss, weighted
from resilient.train.model import GPT, ModelConfig
from resilient.train.optim import OptimConfig, make_optimizer, make_scheduler

MODEL = ModelConfig(name="tiny", width=16, layers=2, heads=2, hidden=32, dropout=0.2, probe_every=0)
OPTIM = OptimConfig(warmup_steps=3)

ROLL_BACK_AT_ONCE = PolicyConfig(
    retry=RetryConfig(max_in_a_row=0),
    skip=SkipConfig(max_in_a_row=0, budget=4),
    rollback=RollbackConfig(budget=4, cooldown=0, lr_factor=1.0, clip_factor=1.0, skip_data=False),
)
"""The first refusal rolls back, changes no knob and keeps the data: what follows must equal an undisturbed run."""


@dataclass(frozen=True)
class Job:
    """One run. `engine`: ddp | fsdp2 | hsdp (two replicas of the shards, which no configuration asks for) | zero0..zero3."""

    engine: str = "ddp"
    precision: str = "fp32"
    steps: int = 12
    accumulation: int = 1
    workers: int = 0  # of the data loader
    fault: Mapping[str, Any] = field(default_factory=lambda: {"kind": "none"})
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    guard: GuardConfig = field(default_factory=lambda: GuardConfig(exchange_timeout_s=30.0))
    snapshot: SnapshotConfig = field(default_factory=lambda: SnapshotConfig(every=3, keep=4, trust_after=0))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=0))
    run_dir: str | None = None
    seed: int = 0
    scale_power: int = 8
    model: ModelConfig = MODEL
    optim: OptimConfig = OPTIM
    schedule: int = 40  # steps of the LR schedule
    seq_len: int = 16
    micro_batch: int = 2

    def with_(self, **changes: Any) -> Job:
        return replace(self, **changes)


@dataclass
class Outcome:
    """What one rank saw, in picklable plain values."""

    reports: list[StepReport]
    incidents: list[Incident]
    events: list[tuple[str, dict[str, Any]]]
    sample_ids: list[tuple[int, ...]]  # of every window trained on, in the order of the steps in force
    digest: str  # of the engine's whole state
    leaves: dict[str, str]
    rng: str
    finite: bool  # all floating-point state
    applied: int
    counters: dict[str, Any]
    lr: float
    loss_scale: float
    engine_skipped: int
    error: str = ""

    def losses(self) -> dict[int, float]:
        """Step -> loss of the attempt in force."""
        return {r.step: r.loss for r in self.reports if r.applied}


class Ear:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.incidents: list[Incident] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def step(self, report: StepReport) -> None:
        self.reports.append(report)

    def incident(self, incident: Incident) -> None:
        self.incidents.append(incident)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.events.append((kind, dict(fields)))

    def close(self) -> None: ...


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def _engine(job: Job, world: int) -> Engine:
    if job.engine == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        model = GPT(job.model)
        policy = MixedPrecisionPolicy()
        if job.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        optimizer = make_optimizer(model, job.optim)
        return FSDP2Engine(model, optimizer, make_scheduler(optimizer, job.optim, job.schedule), clip=1.0)
    zero = job.engine.startswith("zero")
    return build_engine(
        EngineConfig(
            name="deepspeed" if zero else job.engine,  # type: ignore[arg-type]
            zero_stage=int(job.engine[-1]) if zero else 0,
            precision=job.precision,  # type: ignore[arg-type]
            bucket_mb=0.01,
            initial_loss_scale_power=job.scale_power,
        ),
        GPT(job.model),
        make_optimizer=lambda module: make_optimizer(module, job.optim),
        make_scheduler=lambda optimizer: make_scheduler(optimizer, job.optim, job.schedule),
        clip=1.0,
        accumulation=job.accumulation,
        micro_batch=job.micro_batch,
        device=torch.device("cpu"),
    )


def run_job(job: Job, rank: int, world: int, *, tweak: Any = None, raises: type[Exception] | None = None) -> Outcome:
    """Train on this rank. tweak(guard, engine): a last change before the first batch. raises: an expected end."""
    seed(job.seed)
    data = DataConfig(
        name="synthetic",
        seq_len=job.seq_len,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        num_workers=job.workers,
        max_bytes=60_000,
    )
    stream = TokenStream(data, seed=job.seed, rank=rank, world=world)
    engine = _engine(job, world)
    seed(job.seed + 1 + rank)
    guard: Guard | None = None
    engine, source, objective = faults.install(
        faults.parse(job.fault),
        engine=engine,
        stream=stream,
        objective=next_byte_loss,
        step=lambda: guard.step_index if guard is not None else 0,
        rank=rank,
        world=world,
    )
    ear = Ear()
    guard = Guard(
        engine,
        data=source,
        accumulation=job.accumulation,
        policy=job.policy,
        detector=job.detector,
        guard=job.guard,
        snapshot=job.snapshot,
        checkpoint=job.checkpoint,
        run_dir=job.run_dir,
        listeners=[ear],
        progress=False,
    )
    ids: dict[int, list[int]] = {}
    error = ""
    try:
        if tweak is not None:
            tweak(guard, engine)
        for batch in guard.batches(steps=job.steps):
            step = guard.step_index
            result = objective(guard.engine, batch)
            if guard._coordinator._micro == 0:
                ids[step] = []
            ids[step] += batch["ids"].tolist()
            mean = result.loss_sum.detach() / max(result.tokens, 1)
            guard.backward(weighted(result, guard), report=mean, tokens=result.tokens)
            guard.step()
    except Exception as problem:
        if raises is None or not isinstance(problem, raises):
            raise
        error = f"{type(problem).__name__}: {problem}"
    state = engine.capture()
    rng = state_digest(capture_rng())
    outcome = Outcome(
        reports=ear.reports,
        incidents=ear.incidents,
        events=ear.events,
        sample_ids=[tuple(ids[s]) for s in sorted(ids) if s <= guard.applied],
        digest=state_digest({k: v for k, v in state.items()}),
        leaves=state_digests(state),
        rng=rng,
        finite=_finite(state),
        applied=guard.applied,
        counters=guard.counters.as_dict(),
        lr=engine.lr(),
        loss_scale=engine.loss_scale(),
        engine_skipped=engine.counters().skipped,
        error=error,
    )
    stream.close()
    guard.close()
    return outcome


def _finite(state: Any) -> bool:
    from resilient.checkpoint.digest import walk

    tensors = [leaf for _, leaf in walk(state) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def same_training(one: Outcome, two: Outcome) -> list[str]:
    """How two runs differ in what they trained: empty when losses, samples, parameters, moments, LR, loss scale and
    random streams are bit-identical. Counters of refused attempts may differ: they tell what happened on the way."""
    problems = []
    if one.losses() != two.losses():
        step = next(s for s in sorted({*one.losses(), *two.losses()}) if one.losses().get(s) != two.losses().get(s))
        problems.append(f"losses differ from step {step}")
    if one.sample_ids != two.sample_ids:
        problems.append("sample ids differ")
    changed = [p for p in sorted({*one.leaves, *two.leaves}) if one.leaves.get(p) != two.leaves.get(p)]
    changed = [p for p in changed if not any(word in p for word in ("skipped", "micro_steps"))]
    if changed:
        problems.append(f"state differs at {changed[:5]}")
    for name in ("rng", "lr", "loss_scale", "applied"):
        if getattr(one, name) != getattr(two, name):
            problems.append(f"{name}: {getattr(one, name)} against {getattr(two, name)}")
    return problems
