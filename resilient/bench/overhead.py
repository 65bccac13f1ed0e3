"""What the guard costs per step: off, observe and full, in turn inside one launch, so that all meet the same machine.

    python -m resilient.bench.overhead [--quick] [--nproc 2] [--model gpt_1m] [--format text|json] [--out FILE]

Each mode has an engine, model and data stream of its own, all on one seed. Blocks of steps alternate A B C A B C; the figure
of a mode is the median over its steps, the difference is taken block by block against `off` and given with its range.
The parts (exchange, judge, snapshot) are timed by themselves on the tables and states of the same run.
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

from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.engines.base import EngineConfig
from resilient.engines.build import build_engine
from resilient.integrations.guard import Guard
from resilient.recovery.local import spawn
from resilient.signals import StepRecord
from resilient.signals.record import row_width
from resilient.train.data import DataConfig, TokenStream
from resilient.train.loop import next_byte_loss, weighted
from resilient.train.model import GPT, ModelConfig
from resilient.train.optim import OptimConfig, make_optimizer, make_scheduler

MODES = ("off", "observe", "default")
PRESETS = {
    "gpt_1m": ModelConfig(),
    "gpt_3m": ModelConfig(name="gpt_3m", width=192, layers=7, heads=6, hidden=512),
}


@dataclass(frozen=True)
class Settings:
    """model: a preset. blocks: per mode. steps: per block. seq_len x micro_batch: tokens per rank and step."""

    model: str = "gpt_1m"
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
            EngineConfig(name=settings.engine),  # type: ignore[arg-type]
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
            policy=mode,
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
    parts = _parts(lanes["default"], world)
    for lane in lanes.values():
        lane.stream.close()
        lane.guard.close()
    return {"settings": asdict(settings), "world": world, "modes": modes, "parts": parts}


def _parts(lane: Lane, world: int) -> dict[str, float]:
    coordinator = lane.guard._coordinator
    judge = coordinator.judge
    assert judge is not None
    record = StepRecord(step=coordinator.step_index, attempt=coordinator.outer.attempts + 1, loss=2.0, loss_max=2.0)
    record.local_grad_norm, record.reduced_sq_share, record.tokens = 1.0, 0.5, 1.0
    table = coordinator.exchange.table(record)
    snapshot_bytes = sum(t.numel() * t.element_size() for t in _tensors(lane.guard.engine.capture()))
    return {
        "exchange_us": _microseconds(lambda: coordinator.exchange.table(record), 200),
        "exchange_bytes": float(world * row_width(len(coordinator.exchange.layers)) * 8),
        "judge_us": _microseconds(lambda: judge.judge(table, dynamic_scale=False, targets=lambda onset: 1), 500),
        "snapshot_ms": _microseconds(lambda: coordinator._state.capture(0, 0), 5) / 1e3,
        "snapshot_mb": snapshot_bytes / 1e6,
    }


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
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found = measure(settings)
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="resilient.bench.overhead", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, proves little")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--model", choices=sorted(PRESETS), default="gpt_1m")
    parser.add_argument("--engine", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--out", metavar="FILE", default=None)
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    size = {"blocks": 2, "steps": 3, "micro_batch": 4} if options.quick else {}
    settings = Settings(model=options.model, engine=options.engine, seed=options.seed, **size)
    if options.worker:
        return _worker(settings, options.worker)
    words = list(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "resilient.bench.overhead", *words, "--worker", str(result)]
        code = spawn(command, options.nproc, {**os.environ, "OMP_NUM_THREADS": "1"})
        if code != 0:
            return code
        found = json.loads(result.read_text())
    text = json.dumps(found, indent=2) if options.format == "json" else _table(found)
    if options.out:
        Path(options.out).write_text(text + "\n")
    print(text)
    return 0


def _table(found: dict[str, Any]) -> str:
    settings, parts = found["settings"], found["parts"]
    tokens = settings["seq_len"] * settings["micro_batch"]
    lines = [
        f"{settings['engine']}, {settings['model']}, {found['world']} ranks, {tokens} tokens per rank and step",
        f"{'policy':<10}{'step':>10}{'extra':>10}   range over blocks",
    ]
    for mode, row in found["modes"].items():
        low, high = row["extra_percent_range"]
        lines.append(f"{mode:<10}{row['step_ms']:>7.1f} ms{row['extra_percent']:>8.2f} %   {low:+.2f} .. {high:+.2f} %")
    lines.append(
        f"exchange {parts['exchange_us']:.0f} us, {parts['exchange_bytes']:.0f} bytes; judge {parts['judge_us']:.0f} us; "
        f"snapshot {parts['snapshot_ms']:.1f} ms for {parts['snapshot_mb']:.1f} MB, with digests"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
