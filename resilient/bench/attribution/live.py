"""One scenario in the ranks of this process group: a small guarded job with one fault, and everything it was told."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from resilient import faults
from resilient.bench.attribution.scenarios import FAULT_STEP, Scenario
from resilient.bench.ranks import engine_config
from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.coordinator.config import GuardConfig
from resilient.coordinator.events import Incident, StepReport
from resilient.engines.build import build_engine
from resilient.integrations.guard import Guard
from resilient.policies import PolicyConfig
from resilient.signals import Finding, Observation
from resilient.train.data import DataConfig, TokenStream
from resilient.train.loop import next_byte_loss, weighted
from resilient.train.model import GPT, ModelConfig
from resilient.train.optim import OptimConfig, make_optimizer, make_scheduler

MODEL = ModelConfig(name="bench", width=32, layers=3, heads=2, hidden=64, dropout=0.1, probe_every=0)
NONFINITE = ("nonfinite_forward", "nonfinite_loss", "nonfinite_backward")
GUARD = GuardConfig(exchange_timeout_s=60.0, digests_every=4, confirmations=50, link_probes=2, link_probe_s=1.0)


RECORDED = ("loss", "local_grad_norm", *NONFINITE, "compute_s", "collective_s")
"""Columns of every table that are kept with a run."""


@dataclass(frozen=True)
class Told:
    """One verdict: at which attempt and step, by severity act (an incident) or warn (an event)."""

    step: int
    attempt: int
    severity: str
    cause: str
    ranks: tuple[int, ...]
    action: str
    confidence: float
    evidence: tuple[str, ...]


class _Ear:
    """Keeps verdicts and step times. A Listener."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.steps: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        self.steps.append(report)

    def incident(self, incident: Incident) -> None:
        self.told.append(
            Told(
                incident.step,
                incident.attempt,
                "act",
                incident.cause,
                tuple(incident.ranks),
                incident.action,
                incident.confidence,
                tuple(incident.evidence),
            )
        )

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "verdict":
            self.told.append(
                Told(
                    fields["step"],
                    fields["attempt"],
                    "warn",
                    fields["cause"],
                    tuple(fields["ranks"]),
                    "apply",
                    fields["confidence"],
                    tuple(fields["evidence"]),
                )
            )

    def close(self) -> None: ...


class _Tables:
    """Keeps of each exchanged table what a rank by itself, or a rule of others, could have known."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Any]] = {name: [] for name in ("step", "grad_norm", *RECORDED)}

    def listen(self, guard: Guard) -> None:
        judge = guard._coordinator.judge
        assert judge is not None
        see = judge.see

        def seen(table: Any) -> tuple[Observation, tuple[Finding, ...]]:
            self.rows["step"].append(table.step)
            self.rows["grad_norm"].append(_plain(table.grad_norm))
            for name in RECORDED:
                self.rows[name].append([_plain(float(v)) for v in table.column(name)])
            return see(table)

        judge.see = seen  # type: ignore[method-assign, assignment]


def run_scenario(scenario: Scenario, engine_name: str, rank: int, world: int, seed: int) -> dict[str, Any]:
    """Train with the fault of the scenario; plain values of what came of it on this rank."""
    _seed(1000 * seed)
    data = DataConfig(
        name="synthetic", seq_len=32, micro_batch=4, accumulation=scenario.accumulation, max_bytes=200_000
    )
    stream = TokenStream(data, seed=seed, rank=rank, world=world)
    optim = OptimConfig(warmup_steps=5)
    engine = build_engine(
        engine_config(
            engine_name,
            precision=scenario.precision,
            bucket_mb=0.02,
            initial_loss_scale_power=10,
        ),
        GPT(MODEL),
        make_optimizer=lambda module: make_optimizer(module, optim),
        make_scheduler=lambda optimizer: make_scheduler(optimizer, optim, 200),
        clip=1.0,
        accumulation=scenario.accumulation,
        micro_batch=data.micro_batch,
        device=torch.device("cpu"),
    )
    _seed(1000 * seed + 1 + rank)
    guard: Guard | None = None
    fault = faults.parse(scenario.at(FAULT_STEP, seed))
    engine, source, objective = faults.install(
        fault,
        engine=engine,
        stream=stream,
        objective=next_byte_loss,
        step=lambda: guard.step_index if guard is not None else 0,
        rank=rank,
        world=world,
    )
    ear, tables = _Ear(), _Tables()
    guard = Guard(
        engine,
        data=source,
        accumulation=scenario.accumulation,
        policy=PolicyConfig(),
        guard=GUARD,
        snapshot=SnapshotConfig(every=5, keep=4, trust_after=0),
        checkpoint=CheckpointConfig(every=0),
        listeners=[ear],
        progress=False,
    )
    tables.listen(guard)
    ended, started = "", time.perf_counter()
    try:
        for batch in guard.batches(steps=scenario.steps):
            result = objective(guard.engine, batch)
            mean = result.loss_sum.detach() / max(result.tokens, 1)
            guard.backward(weighted(result, guard), report=mean, tokens=result.tokens)
            guard.step()
    except Exception as error:  # a stop is an outcome; anything else shows in the table
        ended = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - started
    truths = faults.ground_truth(fault)
    found = {
        "scenario": scenario.name,
        "engine": engine_name,
        "world": world,
        "seed": seed,
        "precision": scenario.precision,
        "truth": asdict(truths[0]) if truths else None,
        "told": [asdict(t) for t in ear.told],
        "steps": guard.applied,
        "attempts": len(ear.steps),
        "series": [[s.step, _plain(s.loss), _plain(s.grad_norm)] for s in ear.steps],
        "rows": tables.rows,
        "excluded": [list(w) for w in guard.counters.excluded],
        "seconds": seconds,
        "row_bytes": 8 * guard._coordinator.exchange.width,
        "ended": ended,
    }
    stream.close()
    guard.close()
    return found


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _seed(value: int) -> None:
    np.random.seed(value)
    torch.manual_seed(value)
