"""What saving costs the training thread, and when it is done: this project's way and the engines' own, in turn in one run.

    resilient bench checkpoint [--quick] [--nproc 2] [--engines ddp ...] [--models gpt_3m gpt_28m] [--format text|json] [--out FILE]

In each round every way of saving has its turn, forwards and back, each after a training step of its own:

    copy, clone        the plain copy of a snapshot's bytes, into memory that is there, and into new memory
    snapshot           frozen into the memory of an older one (digests are taken in the background); `new memory`: not
    save               a snapshot, checked, voted on, begun: how long training stands still while the rest goes on behind it
    save, blocking     the same until it is on the disk, fsynced, and committed by all ranks
    save_checkpoint    DeepSpeed's own
    dcp.save, dcp.async_save   torch's own, with `get_state_dict`, for DDP and FSDP2

A round counts as long as its slowest rank. Bounds are on the lowest round of each: the cores may be shared with other programs.
Only `save` and dcp end with fsync; DeepSpeed leaves its files to the system's cache.

Then blocks of steps with a save written behind them, in turn with blocks without one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from resilient.bench.bounds import Check
from resilient.bench.checkpoint_job import (
    MODELS,
    Job,
    Native,
    Settings,
    Spent,
    bytes_below,
    copier,
    slowest,
    summary,
    timed,
)
from resilient.bench.ranks import ENGINES, begin
from resilient.checkpoint.snapshot import Snapshot
from resilient.errors import ConfigError
from resilient.recovery.local import spawn
from resilient.telemetry.output import check_folder, hand_over, unusable

COPIES = 1.5  # a save holds training up at most so many times as long as the plain copy
SHARE = 0.25  # and so much of a blocking save by the engine's own means
FOLLOWING = 6  # steps of a block behind which a save is written


def measure(settings: Settings, folder: Path) -> dict[str, Any]:
    """Run on every rank; the result is the same on all of them. folder: of all ranks."""
    job = Job(settings, folder / "run")
    native_folder = folder / "native"
    native = Native(job, native_folder)
    live = job.tensors()
    kept = [tensor.clone() for tensor in live]
    older: Snapshot | None = job.capture(None)
    spent: dict[str, list[Spent]] = {}
    written: dict[str, int] = {}

    def note(way: str, found: Spent) -> None:
        spent.setdefault(way, []).append(found)

    def snapshot() -> None:
        nonlocal older
        older = job.capture(older)

    def save(wait: bool) -> Callable[[], None]:
        def saved() -> None:
            nonlocal older
            older = job.capture(older)
            job.save(older, wait=wait)

        return saved

    def save_behind() -> None:
        note("save", timed(save(wait=False)))
        began = time.perf_counter()
        job.committed()
        stall = spent["save"][-1].wall
        note("save, committed", Spent(stall + time.perf_counter() - began, 0.0))

    def native_behind() -> None:
        waits: list[Callable[[], object]] = []
        note("dcp.async_save", timed(lambda: waits.append(native.begin_save())))
        began = time.perf_counter()
        waits[0]()
        note("dcp.async_save, done", Spent(spent["dcp.async_save"][-1].wall + time.perf_counter() - began, 0.0))

    ways: dict[str, Callable[[], None]] = {
        "copy": lambda: note("copy", timed(copier(kept, job.tensors()))),
        "clone": lambda: note("clone", timed(lambda: [tensor.clone() for tensor in job.tensors()])),
        "snapshot": lambda: note("snapshot", timed(snapshot)),
        "snapshot, new memory": lambda: note("snapshot, new memory", timed(lambda: job.capture(None))),
        "save": save_behind,
        "save, blocking": lambda: note("save, blocking", timed(save(wait=True))),
        native.names[0]: lambda: note(native.names[0], timed(native.save)),
    }
    if native.deepspeed is None:
        ways["dcp.async_save"] = native_behind
    for turn in range(settings.rounds + 1):
        for way in ways if turn % 2 == 0 else reversed(ways):
            job.train()
            ways[way]()
            if way in (native.names[0], "dcp.async_save"):
                dist.barrier()
                written[native.names[0]] = bytes_below(native_folder)
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(native_folder)
        if turn == 0:
            for rounds in spent.values():
                rounds.clear()  # each was done once
    dist.barrier()
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    written["save"] = bytes_below(newest)
    found = slowest(spent)
    following = _following(job, settings.rounds, older)
    job.close()
    return {
        "settings": asdict(settings),
        "world": dist.get_world_size(),
        "bytes": sum(tensor.nbytes for tensor in live),
        "ways": {way: summary(rounds) for way, rounds in found.items()},
        "native": native.names[0],
        "written": written,
        "following": following,
    }


def _following(job: Job, rounds: int, older: Snapshot | None) -> dict[str, float]:
    """Milliseconds that a block of steps takes longer, on rank 0, when a save is written behind it: the wall, and the CPU time
    of the whole process."""
    blocks: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(2 * rounds):
        saving = turn % 4 in (1, 2)
        if saving:
            older = job.capture(older)
            job.save(older, wait=False)
        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        job.train(FOLLOWING)
        blocks[saving].append((time.perf_counter() - started, time.process_time() - cpu))
        job.saver.finish()
    wall, cpu_time = ({w: statistics.median(b[i] for b in blocks[w]) for w in blocks} for i in (0, 1))
    return {
        "steps": FOLLOWING,
        "without_ms": 1e3 * wall[False],
        "extra_ms": 1e3 * (wall[True] - wall[False]),
        "cpu_without_ms": 1e3 * cpu_time[False],
        "extra_cpu_ms": 1e3 * (cpu_time[True] - cpu_time[False]),
    }


def checks(found: Sequence[dict[str, Any]]) -> list[Check]:
    held = []
    for one in found:
        name, ways = f"{one['settings']['engine']}, {one['settings']['model']}", one["ways"]
        stall = ways["save"]["lowest_ms"]
        held.append(Check(f"{name}: save / copy", stall / ways["copy"]["lowest_ms"], COPIES, False))
        held.append(Check(f"{name}: save / {one['native']}", stall / ways[one["native"]]["lowest_ms"], SHARE, False))
    return held


def worker(settings: Settings, folder: Path, measured: Callable[[Settings, Path], dict[str, Any]]) -> int:
    """One rank of a launch."""
    begin(settings.engine)
    try:
        found = measured(settings, folder)
        if dist.get_rank() == 0:
            (folder / "result.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def launch(module: str, settings: Settings, nproc: int) -> dict[str, Any] | int:
    """Measure in ranks of their own; the exit code of the first that failed, if one does."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, "--worker", folder, json.dumps(asdict(settings))]
        code = spawn(command, nproc, {**os.environ, "OMP_NUM_THREADS": "1"})
        return code or json.loads((Path(folder) / "result.json").read_text())


def arguments(name: str, description: str | None) -> argparse.ArgumentParser:
    """What this benchmark and that of rollback are asked."""
    parser = argparse.ArgumentParser(
        prog=f"resilient bench {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="ddp, one small model, few rounds: shows that it runs")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=None, help="default: gpt_3m gpt_28m")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=None, help="default: all; with --quick: ddp")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--out", metavar="FILE", default=None)
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "SETTINGS"), help=argparse.SUPPRESS)
    return parser


def cells(options: argparse.Namespace) -> list[Settings]:
    """What is to be measured: each engine with each model."""
    rounds = options.rounds or (2 if options.quick else 8)
    return [
        Settings(engine=engine, model=model, rounds=max(rounds, 1), seed=options.seed)
        for model in options.models or (["gpt_1m"] if options.quick else ["gpt_3m", "gpt_28m"])
        for engine in options.engines or (["ddp"] if options.quick else ENGINES)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("checkpoint", __doc__).parse_args(argv)

    def bounds(found: Sequence[dict[str, Any]]) -> list[Check]:
        return checks(found) if not options.quick else []  # a few milliseconds in two rounds bound nothing

    return run("checkpoint", options, measure, bounds, text)


def run(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[Settings, Path], dict[str, Any]],
    checks: Callable[[Sequence[dict[str, Any]]], list[Check]],
    text: Callable[[Sequence[dict[str, Any]], Sequence[Check]], str],
    more: Callable[[Settings], dict[str, Any]] = lambda settings: {},
) -> int:
    """Measure each cell in a launch of its own, or in this rank of one (`--worker`), and hand over what was found.

    more: what is measured of a cell outside its launch. Returns the exit code."""
    if options.worker:
        folder, settings = options.worker
        return worker(Settings(**json.loads(settings)), Path(folder), measure)
    try:
        check_folder("--out", options.out)
    except ConfigError as error:
        return unusable(f"bench {name}", error)
    found = []
    for cell in cells(options):
        one = launch(f"resilient.bench.{name}", cell, options.nproc)
        if isinstance(one, int):
            return one
        found.append({**one, **more(cell)})
        print(f"{cell.engine}, {cell.model}: done", file=sys.stderr, flush=True)
    held = checks(found)
    whole = {"found": found, "checks": [check.as_json() for check in held]}
    written = json.dumps(whole, indent=2) if options.format == "json" else text(found, held)
    return hand_over(f"bench {name}", written, options.out) or int(not all(check.ok for check in held))


def table(one: dict[str, Any]) -> list[str]:
    """One line for each way that was measured."""
    copy = one["ways"]["copy"]["lowest_ms"]
    return [
        f"  {way:<24}{row['lowest_ms']:>9.1f} ms{row['median_ms']:>9.1f} ms{row['cpu_ms']:>9.1f} ms{row['lowest_ms'] / copy:>9.2f}"
        for way, row in one["ways"].items()
    ]


def heading(one: dict[str, Any]) -> list[str]:
    settings = one["settings"]
    return [
        f"{settings['engine']}, {settings['model']}, {one['world']} ranks, {one['bytes'] / 1e6:.1f} MB a rank",
        f"  {'':<24}{'lowest':>12}{'median':>12}{'CPU':>12}{'copies':>9}",
    ]


def verdicts(held: Sequence[Check]) -> list[str]:
    return [
        f"{'ok  ' if c.ok else 'MISS'} {c.name}: {c.value:.4g} (at {'least' if c.at_least else 'most'} {c.bound:g})"
        for c in held
    ]


def text(found: Sequence[dict[str, Any]], held: Sequence[Check]) -> str:
    lines = []
    for one in found:
        behind = one["following"]
        lines += heading(one) + table(one)
        sizes = ", ".join(f"{way} {size / 1e6:.1f} MB" for way, size in one["written"].items())
        lines.append(
            f"  written, all ranks: {sizes}; {behind['steps']} steps of {behind['without_ms'] / behind['steps']:.0f} ms with a save "
            f"behind them: {behind['extra_ms']:+.0f} ms, CPU {behind['extra_cpu_ms']:+.0f} ms"
        )
    return "\n".join(lines + verdicts(held))


if __name__ == "__main__":
    sys.exit(main())
