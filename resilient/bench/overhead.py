"""What the guard costs per step: off, observe and full, in turn inside one launch, so that all meet the same machine.

    resilient bench overhead [--quick] [--nproc 2] [--engines ddp fsdp2 ...] [--model gpt_3m] [--format text|json] [--out FILE]

Each mode has an engine, model, data stream and run directory of its own, all on one seed. Blocks of ten steps (two
snapshots, and everything else that is not of every step) alternate, forwards and back; the difference is taken block by block
against `off`, and given as the median with its quartiles.

**CPU time** of rank 0 is what the bounds are about: of the whole process, in the computing and in the communicating
threads. Wall time is given beside it; where other programs share the cores it measures those, and where every rank has a core
of its own it adds the wait for the slowest rank, which is there without a guard too. The parts are timed in further steps of
the full guard; the judge also on simulated tables of up to 100,000 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from resilient.bench.bounds import Check
from resilient.bench.ranks import ENGINES, MODELS, begin, trained_engine
from resilient.bench.simulated import SimulatedRun
from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.coordinator.config import GuardConfig
from resilient.coordinator.judge import Judge
from resilient.detectors import DetectorConfig, build_monitor
from resilient.errors import ConfigError
from resilient.integrations.guard import Guard
from resilient.policies import Ladder, PolicyConfig
from resilient.recovery.local import spawn
from resilient.telemetry.output import check_folder, hand_over, unusable
from resilient.train.data import DataConfig, TokenStream
from resilient.train.loop import next_byte_loss, weighted

MODES = ("off", "observe, unchecked", "observe", "default")
BOUNDS = {"observe, unchecked": 0.3, "default": 1.0}  # percent of the CPU time of a step
JUDGE_BOUND_US = 2000.0
_FILLED = 160  # steps after which the judge's windows are full


@dataclass(frozen=True)
class Settings:
    """model: of MODELS. blocks: per mode. steps: per block. seq_len x micro_batch: tokens per rank and step."""

    model: str = "gpt_3m"
    engine: str = "ddp"
    blocks: int = 3
    steps: int = 10
    seq_len: int = 128
    micro_batch: int = 16
    seed: int = 0


class Spent(NamedTuple):
    """Seconds a step. cpu: of this process, all its threads."""

    wall: float
    cpu: float


class Lane:
    """One mode: an engine with its guard, advanced a block at a time. folder: of the run directory; it holds snapshots in
    memory and its journal on disk as any run does, but saves no checkpoint."""

    def __init__(self, mode: str, settings: Settings, rank: int, world: int, folder: Path) -> None:
        torch.manual_seed(settings.seed)
        data = DataConfig(seq_len=settings.seq_len, micro_batch=settings.micro_batch)
        self.stream = TokenStream(data, seed=settings.seed, rank=rank, world=world)
        engine = trained_engine(settings.engine, MODELS[settings.model], settings.micro_batch)
        self.guard = Guard(
            engine,
            data=self.stream,
            policy=mode.split(",")[0],
            run_dir=folder / mode.replace(", ", "-"),
            guard=GuardConfig(reduction_check="unchecked" not in mode),
            snapshot=SnapshotConfig(),
            checkpoint=CheckpointConfig(every=0),
            progress=False,
        )
        self.batches = self.guard.batches(steps=10**9)

    def block(self, steps: int) -> Spent:
        """Train `steps` steps; what one of them took, on average."""
        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            result = next_byte_loss(self.guard.engine, next(self.batches))
            mean = result.loss_sum.detach() / max(result.tokens, 1)
            self.guard.backward(weighted(result, self.guard), report=mean, tokens=result.tokens)
            self.guard.step()
        return Spent((time.perf_counter() - started) / steps, (time.process_time() - cpu) / steps)

    def close(self) -> None:
        self.stream.close()
        self.guard.close()


def measure(settings: Settings, folder: Path) -> dict[str, Any]:
    """Run on every rank; the result is rank 0's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lanes = {mode: Lane(mode, settings, rank, world, folder) for mode in MODES}
    for lane in lanes.values():
        lane.block(3)  # allocations, moments, the first bucket layout
    spent: dict[str, list[Spent]] = {mode: [] for mode in MODES}
    for block in range(settings.blocks):
        for mode in MODES if block % 2 == 0 else reversed(MODES):
            spent[mode].append(lanes[mode].block(settings.steps))
    modes = {mode: compared(spent[mode], spent["off"]) for mode in MODES}
    parts = _parts(lanes["default"], settings.steps)
    for lane in lanes.values():
        lane.close()
    return {"settings": asdict(settings), "world": world, "modes": modes, **parts}


def compared(mode: Sequence[Spent], off: Sequence[Spent]) -> dict[str, Any]:
    """Milliseconds a step, medians over the blocks, and per cent more than `off` block by block."""
    cpu = [100 * (a.cpu / b.cpu - 1) for a, b in zip(mode, off, strict=True)]
    wall = [100 * (a.wall / b.wall - 1) for a, b in zip(mode, off, strict=True)]
    low, _, high = statistics.quantiles(cpu, n=4) if len(cpu) > 1 else cpu * 3
    return {
        "cpu_ms": 1e3 * statistics.median(s.cpu for s in mode),
        "wall_ms": 1e3 * statistics.median(s.wall for s in mode),
        "extra_cpu_percent": statistics.median(cpu),
        "extra_cpu_quartiles": [low, high],
        "extra_wall_percent": statistics.median(wall),
    }


def _parts(lane: Lane, steps: int) -> dict[str, Any]:
    """What the guard's parts take of a step, in the thread that trains, and what it sends and keeps."""
    coordinator = lane.guard._coordinator
    engine, judge, exchange, state = coordinator.engine, coordinator.judge, coordinator.exchange, coordinator._state
    assert judge is not None
    hook: Any = getattr(engine, "_tap", None)  # DDP's; elsewhere there is no one place to time it
    tap: Any = getattr(engine, "_update_tap", None)
    timers = {
        "before reduction": _Timer(*([(hook, "measure")] if hook is not None else [])),
        "taps": _Timer((engine, "taps")),
        "record": _Timer((coordinator, "_record")),
        "update": _Timer(*([(tap, "_before"), (tap, "_after")] if tap is not None else [])),
        "exchange": _Timer((exchange, "table")),
        "see": _Timer((judge, "see")),
        "conclude": _Timer((judge, "conclude")),
        "settle": _Timer((judge, "settle")),
        "tell": _Timer((coordinator._listeners, "tell")),
        "snapshot": _Timer((state, "capture")),
    }
    collectives = _Timer((exchange, "_checked"))
    for _ in range(steps):
        lane.block(1)
        for timer in (*timers.values(), collectives):
            timer.step()
    parts = {name: timer.stop() for name, timer in timers.items() if timer.calls}
    collectives.stop()
    snapshot = state.capture(0, 0)
    return {
        "parts": parts,
        "collectives": collectives.calls / steps,
        "exchange_bytes": exchange.world_size * exchange.width * 8,
        "check_cells": len(exchange.plan.names) if exchange.plan is not None else 0,
        "snapshot_mb": sum(t.numel() * t.element_size() for t in _tensors(snapshot.parts["engine"])) / 1e6,
    }


class _Timer:
    """Replaces methods of objects by ones that note how long they take together in a step."""

    def __init__(self, *methods: tuple[Any, str]) -> None:
        self._methods = methods
        self._now = [0.0, 0.0]
        self._steps: list[Spent] = []
        self.calls = 0
        for owner, name in methods:
            self._wrap(owner, name)

    def _wrap(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started, cpu = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self._now[0] += time.perf_counter() - started
                self._now[1] += time.thread_time() - cpu
                self.calls += 1

        setattr(owner, name, timed)

    def step(self) -> None:
        self._steps.append(Spent(*self._now))
        self._now = [0.0, 0.0]

    def stop(self) -> dict[str, float]:
        """Microseconds a step: the mean, since not all is of every step, and the lowest CPU time."""
        for owner, name in self._methods:
            delattr(owner, name)
        cpu, wall = [s.cpu for s in self._steps], [s.wall for s in self._steps]
        return {
            "cpu_us": 1e6 * statistics.mean(cpu),
            "lowest_cpu_us": 1e6 * min(cpu),
            "wall_us": 1e6 * statistics.mean(wall),
        }


def judge_at(world: int, steps: int, seed: int = 0) -> float:
    """Microseconds of CPU time to judge and settle one step of a simulated run of `world` ranks, median over `steps`. The
    windows behind the references are full by then; before, they are brought up to date step by step, about 0.3 ms more."""
    run = SimulatedRun(world, cells=0, seed=seed)
    judge = Judge(build_monitor(DetectorConfig()), Ladder(PolicyConfig()))
    seconds = []
    for step in range(1, _FILLED + steps + 1):
        table = run.table(step)
        started = time.process_time()
        observation, findings = judge.see(table)
        judgement = judge.conclude(observation, findings, dynamic_scale=False, targets=lambda onset: 1)
        judge.settle(judgement, applied=judgement.decision.action == "apply")
        seconds.append(time.process_time() - started)
    return 1e6 * statistics.median(seconds[_FILLED:])


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def checks(found: dict[str, Any], *, quick: bool) -> list[Check]:
    """The bounds. quick: without those on the cost of a step, which a few steps cannot show."""
    held = []
    for engine, one in found["engines"].items():
        held.append(Check(f"{engine}: collectives of the guard a step", one["collectives"], 1.0, False))
        for mode, bound in BOUNDS.items() if not quick else ():
            percent = one["modes"][mode]["extra_cpu_percent"]
            held.append(Check(f"{engine}: extra CPU time per step, {mode}, per cent", percent, bound, False))
    if "16384" in found["judge_us"]:
        held.append(Check("judge at 16,384 ranks, us", found["judge_us"]["16384"], JUDGE_BOUND_US, False))
    return held


def _worker(settings: Settings, folder: Path) -> int:
    begin(settings.engine)
    try:
        found = measure(settings, folder)
        if dist.get_rank() == 0:
            (folder / "result.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()
    return 0


def launch(settings: Settings, nproc: int) -> dict[str, Any] | int:
    """Measure in ranks of their own; the exit code of the first that failed, if one does."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "resilient.bench.overhead", "--worker", folder, json.dumps(asdict(settings))]
        code = spawn(command, nproc, {**os.environ, "OMP_NUM_THREADS": "1"})
        return code or json.loads((Path(folder) / "result.json").read_text())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="resilient bench overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="ddp, few steps: shows that it runs, proves little")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt_3m")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=None, help="default: all; with --quick: ddp")
    parser.add_argument("--blocks", type=int, default=None, help="of ten steps, per mode and engine")
    parser.add_argument(
        "--worlds", type=int, nargs="*", default=[1024, 16_384, 100_000], help="simulated ranks for the judge"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--out", metavar="FILE", default=None)
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "SETTINGS"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        folder, settings = options.worker
        return _worker(Settings(**json.loads(settings)), Path(folder))
    try:
        check_folder("--out", options.out)
    except ConfigError as error:
        return unusable("bench overhead", error)
    size: dict[str, Any] = {"blocks": 2, "steps": 3, "micro_batch": 4} if options.quick else {}
    if options.blocks is not None:
        size["blocks"] = max(options.blocks, 1)
    engines: dict[str, Any] = {}
    for engine in options.engines or (["ddp"] if options.quick else ENGINES):
        one = launch(Settings(model=options.model, engine=engine, seed=options.seed, **size), options.nproc)
        if isinstance(one, int):
            return one
        engines[engine] = one
        print(f"{engine}: done", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"engines": engines}
    found["judge_us"] = {str(world): judge_at(world, 40) for world in options.worlds}
    held = checks(found, quick=options.quick)
    found["checks"] = [check.as_json() for check in held]
    written = json.dumps(found, indent=2) if options.format == "json" else text(found, held)
    return hand_over("bench overhead", written, options.out) or int(not all(check.ok for check in held))


def text(found: dict[str, Any], held: Sequence[Check]) -> str:
    lines = []
    for engine, one in found["engines"].items():
        settings = one["settings"]
        tokens = settings["seq_len"] * settings["micro_batch"]
        lines += [
            f"{engine}, {settings['model']}, {one['world']} ranks, {tokens} tokens per rank and step",
            f"  {'policy':<20}{'CPU':>11}{'extra':>10}   {'quartiles':<20}{'wall':>11}{'extra':>10}",
        ]
        for mode, row in one["modes"].items():
            low, high = row["extra_cpu_quartiles"]
            lines.append(
                f"  {mode:<20}{row['cpu_ms']:>8.1f} ms{row['extra_cpu_percent']:>8.2f} %   "
                f"{f'{low:+.2f} .. {high:+.2f} %':<20}{row['wall_ms']:>8.1f} ms{row['extra_wall_percent']:>8.2f} %"
            )
        parts = ", ".join(f"{name} {part['cpu_us']:.0f}" for name, part in one["parts"].items())
        lines.append(f"  CPU microseconds a step, on average (taps are part of record): {parts}")
        lines.append(
            f"  {one['collectives']:g} collectives a step, {one['exchange_bytes']} bytes, {one['check_cells']} cells of the "
            f"reduction check a rank; a snapshot is {one['snapshot_mb']:.1f} MB, every {SnapshotConfig().every} steps"
        )
    judged = ", ".join(f"{int(world):,} ranks {us / 1e3:.2f} ms" for world, us in found["judge_us"].items())
    lines.append(f"judge and settle a step of simulated ranks, CPU time: {judged or 'not asked for'}")
    lines += [f"{'ok  ' if c.ok else 'MISS'} {c.name}: {c.value:.4g} (at most {c.bound:g})" for c in held]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
