"""What the guard costs per step: off, observe and full, in turn inside one launch, so that all meet the same machine.

    resilient bench overhead [--quick] [--nproc 2] [--engine ddp] [--model gpt_3m] [--format text|json] [--out FILE]

Each mode has an engine, model and data stream of its own, all on one seed. Blocks of steps alternate A B C A B C; the figure
of a mode is the median over its steps, the difference is taken block by block against `off` and given with its range.
The parts are timed inside further steps of the guarded lane; the judge also on simulated tables of up to 100,000 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resilient.bench.ranks import ENGINES, begin, engine_config
from resilient.bench.simulated import SimulatedRun
from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.coordinator.config import GuardConfig
from resilient.coordinator.judge import Judge
from resilient.detectors import DetectorConfig, build_monitor
from resilient.engines.build import build_engine
from resilient.errors import ConfigError
from resilient.integrations.guard import Guard
from resilient.policies import Ladder, PolicyConfig
from resilient.recovery.local import spawn
from resilient.telemetry.output import check_folder, hand_over, unusable
from resilient.train.data import DataConfig, TokenStream
from resilient.train.loop import next_byte_loss, weighted
from resilient.train.model import GPT, ModelConfig
from resilient.train.optim import OptimConfig, make_optimizer, make_scheduler

MODES = ("off", "observe, unchecked", "observe", "default")
PRESETS = {
    "gpt_1m": ModelConfig(),
    "gpt_3m": ModelConfig(name="gpt_3m", width=192, layers=7, heads=6, hidden=512),
}


@dataclass(frozen=True)
class Settings:
    """model: a preset. blocks: per mode. steps: per block. seq_len x micro_batch: tokens per rank and step."""

    model: str = "gpt_3m"
    engine: str = "ddp"
    blocks: int = 8
    steps: int = 8
    seq_len: int = 128
    micro_batch: int = 16
    seed: int = 0


class Lane:
    """One mode: an engine with its guard, advanced a block at a time."""

    def __init__(self, mode: str, settings: Settings, rank: int, world: int) -> None:
        torch.manual_seed(settings.seed)
        data = DataConfig(seq_len=settings.seq_len, micro_batch=settings.micro_batch)
        self.stream = TokenStream(data, seed=settings.seed, rank=rank, world=world)
        optim = OptimConfig()
        engine = build_engine(
            engine_config(settings.engine),
            GPT(PRESETS[settings.model]),
            make_optimizer=lambda module: make_optimizer(module, optim),
            make_scheduler=lambda optimizer: make_scheduler(optimizer, optim, 10_000),
            clip=1.0,
            accumulation=1,
            micro_batch=settings.micro_batch,
            device=torch.device("cpu"),
        )
        self.guard = Guard(
            engine,
            data=self.stream,
            policy=mode.split(",")[0],
            guard=GuardConfig(reduction_check="unchecked" not in mode),
            snapshot=SnapshotConfig(every=5, keep=4),
            checkpoint=CheckpointConfig(every=0),
            progress=False,
        )
        self.batches = self.guard.batches(steps=10**9)

    def block(self, steps: int) -> list[float]:
        """Seconds of each of the next steps."""
        seconds = []
        for _ in range(steps):
            dist.barrier()
            started = time.perf_counter()
            result = next_byte_loss(self.guard.engine, next(self.batches))
            mean = result.loss_sum.detach() / max(result.tokens, 1)
            self.guard.backward(weighted(result, self.guard), report=mean, tokens=result.tokens)
            self.guard.step()
            seconds.append(time.perf_counter() - started)
        return seconds


def measure(settings: Settings) -> dict[str, Any]:
    """Run on every rank; the result is rank 0's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lanes = {mode: Lane(mode, settings, rank, world) for mode in MODES}
    for lane in lanes.values():
        lane.block(3)  # allocations, moments, the first bucket layout
    times: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    for _ in range(settings.blocks):
        for mode, lane in lanes.items():
            times[mode].append(lane.block(settings.steps))
    modes = {}
    off = [statistics.median(block) for block in times["off"]]
    for mode in MODES:
        extra = [100 * (statistics.median(b) / o - 1) for b, o in zip(times[mode], off, strict=True)]
        modes[mode] = {
            "step_ms": 1e3 * statistics.median(s for block in times[mode] for s in block),
            "extra_percent": statistics.median(extra),
            "extra_percent_range": [min(extra), max(extra)],
        }
    parts = _parts(lanes["default"], settings.steps * 2)
    for lane in lanes.values():
        lane.stream.close()
        lane.guard.close()
    return {"settings": asdict(settings), "world": world, "modes": modes, "parts": parts}


def _parts(lane: Lane, steps: int) -> dict[str, float]:
    """Microseconds of the guard's parts in a step, medians over `steps` further steps, and what it sends and keeps. Without
    the update norm, which is measured inside the optimizer's own step."""
    coordinator = lane.guard._coordinator
    judge, measure = coordinator.judge, coordinator._measure
    assert judge is not None and measure is not None
    timers = {
        "taps_us": _Timer(coordinator.engine, "taps"),
        "record_us": _Timer(measure, "record"),
        "exchange_us": _Timer(coordinator.exchange, "table"),
        "see_us": _Timer(judge, "see"),
        "conclude_us": _Timer(judge, "conclude"),
        "settle_us": _Timer(judge, "settle"),
        "tell_us": _Timer(coordinator._listeners, "tell"),
    }
    lane.block(steps)
    parts = {name: timer.stop() for name, timer in timers.items()}
    state = lane.guard.engine.capture()
    return {
        **parts,
        "exchange_bytes": float(coordinator.exchange.world_size * coordinator.exchange.width * 8),
        "check_cells": float(len(coordinator.exchange.plan.names) if coordinator.exchange.plan is not None else 0),
        "snapshot_us": _microseconds(lambda: coordinator._state.capture(0, 0), 5),
        "snapshot_mb": sum(t.numel() * t.element_size() for t in _tensors(state)) / 1e6,
    }


class _Timer:
    """Replaces methods of one object by ones that note how long they take."""

    def __init__(self, owner: Any, *names: str) -> None:
        self._owner, self._names = owner, names
        self._seconds: dict[str, list[float]] = {name: [] for name in names}
        for name in names:
            self._wrap(name)

    def _wrap(self, name: str) -> None:
        original, seconds = getattr(self._owner, name), self._seconds[name]

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - started)

        setattr(self._owner, name, timed)

    def stop(self) -> float:
        """Microseconds: the sum of the methods' medians."""
        for name in self._names:
            delattr(self._owner, name)
        return 1e6 * sum(statistics.median(seconds) for seconds in self._seconds.values() if seconds)


def judge_at(world: int, steps: int, seed: int = 0) -> float:
    """Microseconds to judge and settle one step of a simulated run of `world` ranks, median over `steps`."""
    run = SimulatedRun(world, cells=0, seed=seed)
    judge = Judge(build_monitor(DetectorConfig()), Ladder(PolicyConfig()))
    seconds = []
    for step in range(1, steps + 33):
        table = run.table(step)
        started = time.perf_counter()
        observation, findings = judge.see(table)
        judgement = judge.conclude(observation, findings, dynamic_scale=False, targets=lambda onset: 1)
        judge.settle(judgement, applied=judgement.decision.action == "apply")
        seconds.append(time.perf_counter() - started)
    return 1e6 * statistics.median(seconds[32:])


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _microseconds(action: Any, times: int) -> float:
    """Median over `times` calls."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return 1e6 * statistics.median(seconds)


def _worker(settings: Settings, out: str) -> int:
    begin(settings.engine)
    try:
        found = measure(settings)
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="resilient bench overhead", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, proves little")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--model", choices=sorted(PRESETS), default="gpt_3m")
    parser.add_argument("--engine", choices=ENGINES, default="ddp")
    parser.add_argument(
        "--worlds", type=int, nargs="*", default=[1024, 16_384, 100_000], help="simulated ranks for the judge"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--out", metavar="FILE", default=None)
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    size = {"blocks": 2, "steps": 3, "micro_batch": 4} if options.quick else {}
    settings = Settings(model=options.model, engine=options.engine, seed=options.seed, **size)
    if options.worker:
        return _worker(settings, options.worker)
    try:
        check_folder("--out", options.out)
    except ConfigError as error:
        return unusable("bench overhead", error)
    words = list(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "resilient.bench.overhead", *words, "--worker", str(result)]
        code = spawn(command, options.nproc, {**os.environ, "OMP_NUM_THREADS": "1"})
        if code != 0:
            return code
        found = json.loads(result.read_text())
    found["judge_us"] = {str(world): judge_at(world, 40) for world in options.worlds}
    text = json.dumps(found, indent=2) if options.format == "json" else _table(found)
    return hand_over("bench overhead", text, options.out)


def _table(found: dict[str, Any]) -> str:
    settings, parts = found["settings"], found["parts"]
    tokens = settings["seq_len"] * settings["micro_batch"]
    lines = [
        f"{settings['engine']}, {settings['model']}, {found['world']} ranks, {tokens} tokens per rank and step",
        f"{'policy':<20}{'step':>10}{'extra':>10}   range over blocks",
    ]
    for mode, row in found["modes"].items():
        low, high = row["extra_percent_range"]
        lines.append(f"{mode:<20}{row['step_ms']:>7.1f} ms{row['extra_percent']:>8.2f} %   {low:+.2f} .. {high:+.2f} %")
    times = ", ".join(f"{name[:-3]} {value:.0f}" for name, value in parts.items() if name.endswith("_us"))
    lines.append(f"microseconds a step: {times} (a snapshot is not of every step: {parts['snapshot_mb']:.1f} MB)")
    lines.append(
        f"sent: {parts['exchange_bytes']:.0f} bytes, of which {parts['check_cells']:.0f} cells of the reduction check a rank"
    )
    judged = ", ".join(f"{int(world):,} ranks {us / 1e3:.2f} ms" for world, us in found["judge_us"].items())
    lines.append(f"judge and settle a step of simulated ranks: {judged}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
