"""Which rank, and why: every fault in every engine at 2 and 4 ranks, over seeds, against clean controls.

    resilient bench attribution [--quick] [--engines ddp zero3 ...] [--worlds 2 4] [--seeds 3] [--only TEXT]
                                [--simulated STEPS] [--format text|json] [--out FILE]

Live runs: real engine, model, data and guard; one launch per engine and world size goes through all scenarios. Beside it,
on the losses and norms of the same runs, the public rules that answer at least "is something wrong now?"; none of them
names a rank or a cause. False verdicts are also counted on simulated healthy runs of 2 and 8 ranks. Exit 1 when a bound that is stated below the tables is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from resilient.bench.attribution.clean import FalseVerdicts, judge_clean
from resilient.bench.attribution.live import run_scenario
from resilient.bench.attribution.scenarios import SCENARIOS, Scenario
from resilient.bench.attribution.score import Score, score, total
from resilient.bench.attribution.table import text
from resilient.bench.bounds import Check
from resilient.bench.ranks import ENGINES, begin
from resilient.errors import ConfigError
from resilient.recovery.local import spawn
from resilient.telemetry.output import check_folder, hand_over, unusable

_RANKS_RIGHT, _CAUSES_RIGHT = 0.99, 0.95


def launch(engine: str, world: int, seeds: int, only: str) -> list[dict[str, Any]]:
    """All scenarios that this engine can have, in `world` ranks of this host; plain values, one entry a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs.json"
        command = [sys.executable, "-m", "resilient.bench.attribution", "--worker", str(out), "--engines", engine]
        command += ["--seeds", str(seeds), "--only", only]
        code = spawn(command, world, {**os.environ, "OMP_NUM_THREADS": "1"})
        runs = json.loads(out.read_text()) if out.exists() else []
        if code != 0:
            broken = {
                "scenario": "(the launch)",
                "engine": engine,
                "world": world,
                "truth": None,
                "told": [],
                "steps": 0,
            }
            runs.append(
                {**broken, "excluded": [], "series": [], "seconds": 0.0, "row_bytes": 0, "ended": f"exit code {code}"}
            )
        return runs


def worker(engine: str, seeds: int, only: str, out: str) -> int:
    """One rank of a launch. Rank 0 writes after every run, so that a hang loses only what hangs."""
    begin(engine)
    rank, world = dist.get_rank(), dist.get_world_size()
    runs = []
    try:
        for scenario in chosen(engine, world, only):
            for seed in range(seeds):
                runs.append(run_scenario(scenario, engine, rank, world, seed))
                if rank == 0:
                    Path(out).write_text(json.dumps(runs))
    finally:
        dist.destroy_process_group()
    return 0


def chosen(engine: str, world: int, only: str) -> list[Scenario]:
    return [s for s in SCENARIOS if engine in s.engines and world in s.worlds and only in s.name]


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Scores by scenario, by engine, and of everything."""
    scenarios: dict[str, Score] = {}
    engines: dict[str, Score] = {}
    for run in runs:
        found = score(run)
        for table, key in ((scenarios, run["scenario"]), (engines, f"{run['engine']} x{run['world']}")):
            table[key] = total((table[key], found)) if key in table else found
    return {"scenarios": scenarios, "engines": engines, "all": total(scenarios.values())}


def checks(found: Score, clean: Sequence[FalseVerdicts] = ()) -> list[Check]:
    detected = max(found.detected, 1)
    simulated = [
        Check(f"the same in {c.steps} simulated steps, {c.world} ranks, {c.tails} tails", float(c.accusing), 0.0, False)
        for c in clean
    ]
    return [
        *simulated,
        Check("rank named correctly, of detected faults", found.ranks / detected, _RANKS_RIGHT),
        Check("cause named correctly, of detected faults", found.causes / detected, _CAUSES_RIGHT),
        Check("false communication or compute verdicts in clean steps", float(found.false), 0.0, False),
        Check("runs that left out data for a machine's or wire's fault", float(found.excluded), 0.0, False),
        Check("runs that broke", float(len(found.broken)), 0.0, False),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="resilient bench attribution", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="ddp only, 2 ranks, one seed: shows that it runs")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--worlds", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios with this in their name")
    parser.add_argument(
        "--simulated", type=int, default=100_000, metavar="STEPS", help="of each simulated healthy run; 0: none"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--out", metavar="FILE", default=None)
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        return worker(options.engines[0], options.seeds, options.only, options.worker)
    try:
        check_folder("--out", options.out)
    except ConfigError as error:
        return unusable("bench attribution", error)
    engines, worlds, seeds = (["ddp"], [2], 1) if options.quick else (options.engines, options.worlds, options.seeds)
    runs: list[dict[str, Any]] = []
    for engine in engines:
        for world in worlds:
            runs += launch(engine, world, seeds, options.only)
            print(f"{engine}, {world} ranks: done", file=sys.stderr, flush=True)
    simulated = 2_000 if options.quick else options.simulated
    clean = [judge_clean(w, tails, simulated) for w in (2, 8) for tails in ("normal", "t3")] if simulated else []
    found = summarise(runs)
    held = checks(found["all"], clean)
    if options.format == "json":
        plain = {k: {n: vars(s) for n, s in v.items()} if isinstance(v, dict) else vars(v) for k, v in found.items()}
        every = {"checks": [c.as_json() for c in held], "clean": [vars(c) for c in clean], "runs": runs}
        written = json.dumps({"summary": plain, **every}, indent=1)
    else:
        written = text(found, held, runs)
    return hand_over("bench attribution", written, options.out) or int(not all(c.ok for c in held))


if __name__ == "__main__":
    sys.exit(main())
