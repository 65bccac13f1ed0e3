"""Which rank, and why: every fault in every engine at 2 and 4 ranks, over seeds, against clean controls.

    resilient bench attribution [--quick] [--engines ddp zero3 ...] [--worlds 2 4] [--seeds 3] [--only TEXT]
                                [--simulated STEPS] [--format text|json] [--out FILE] [--resume]

Live runs: real engine, model, data and guard; one launch per engine and world size goes through all scenarios. Beside it,
on the losses and norms of the same runs, the public rules that answer at least "is something wrong now?"; none of them
names a rank or a cause. Two peers that look at each rank's own values, or skip steps, are beside it fault by fault. False verdicts are also counted on simulated healthy runs of 2 and 8 ranks. Exit 1 when a bound that is stated below the tables is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
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
_RUN_S = 6.0  # of DDP with 2 ranks on two idle cores: a first guess, until this machine's own pace is known
_COST = {"fsdp2": 2.0, "zero0": 1.5, "zero1": 2.0, "zero2": 2.0, "zero3": 4.0}  # of a run, against DDP's


class Kept:
    """Finished runs, one JSON line each, so that what was interrupted can go on. path None: of this process only.

    resume: take over what is there; otherwise it is begun anew."""

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = []
        if path is not None and path.exists():
            if resume:
                self.runs = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            path.write_text("".join(json.dumps(run) + "\n" for run in self.runs))  # without a line that was cut off

    def add(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(run) + "\n")

    def has(self, engine: str, world: int, scenario: str, seed: int) -> bool:
        return any(_key(run) == (engine, world, scenario, seed) for run in self.runs)


def _key(run: dict[str, Any]) -> tuple[str, int, str, int]:
    return run["engine"], run["world"], run["scenario"], run["seed"]


def launch(engine: str, world: int, seeds: int, only: str, kept: Kept) -> None:
    """All scenarios that this engine can have, in `world` ranks of this host, without those that `kept` has; into it."""
    with tempfile.TemporaryDirectory() as folder:
        out = kept.path or Path(folder) / "runs.jsonl"
        command = [sys.executable, "-m", "resilient.bench.attribution", "--worker", str(out), "--engines", engine]
        command += ["--seeds", str(seeds), "--only", only]
        code = spawn(command, world, {**os.environ, "OMP_NUM_THREADS": "1"})
        if out.exists():
            kept.runs += [run for run in Kept(out, resume=True).runs if not kept.has(*_key(run))]
    if code != 0:
        about = {"scenario": "(the launch)", "engine": engine, "world": world, "seed": -1, "ended": f"exit code {code}"}
        nothing: dict[str, Any] = {"truth": None, "told": [], "steps": 0, "excluded": [], "series": []}
        kept.runs.append({**about, **nothing, "seconds": 0.0, "row_bytes": 0})  # not kept: it is run again


def worker(engine: str, seeds: int, only: str, out: str) -> int:
    """One rank of a launch. Rank 0 writes after every run, so that a hang loses only what hangs."""
    kept = Kept(Path(out), resume=True) if os.environ["RANK"] == "0" else None
    begin(engine)
    rank, world = dist.get_rank(), dist.get_world_size()
    planned = [(s, seed) for s in chosen(engine, world, only) for seed in range(seeds)]
    todo = [[not kept.has(engine, world, s.name, seed) for s, seed in planned] if kept is not None else None]
    dist.broadcast_object_list(todo)
    try:
        for (scenario, seed), due in zip(planned, todo[0] or [], strict=True):
            if due:
                found = run_scenario(scenario, engine, rank, world, seed)
                if kept is not None:
                    kept.add(found)
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
        Check(
            f"the same in {c.steps} simulated steps, {c.world} ranks, {c.tails} tails ({c.suspected} before the re-run)",
            float(c.accusing),
            0.0,
            False,
        )
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


def _runs_ahead(engine: str, world: int, seeds: int, only: str, kept: Kept) -> int:
    return sum(not kept.has(engine, world, s.name, n) for s in chosen(engine, world, only) for n in range(seeds))


def _weight(engine: str, world: int) -> float:
    """A run of this engine in this world, in units of one of DDP with 2 ranks."""
    return (world / 2) * _COST.get(engine, 1.0)


def _minutes(seconds: float) -> str:
    return f"{max(seconds / 60, 1):.0f} min"


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
    parser.add_argument(
        "--resume", action="store_true", help="go on with what FILE.runs.jsonl of an earlier --out FILE has"
    )
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        return worker(options.engines[0], options.seeds, options.only, options.worker)
    try:
        check_folder("--out", options.out)
    except ConfigError as error:
        return unusable("bench attribution", error)
    engines, worlds, seeds = (["ddp"], [2], 1) if options.quick else (options.engines, options.worlds, options.seeds)
    if options.resume and options.out is None:
        return unusable(
            "bench attribution", ConfigError("--resume: needs the --out FILE of the run that it goes on with")
        )
    kept = Kept(Path(f"{options.out}.runs.jsonl") if options.out else None, options.resume)
    launches = [(engine, world) for engine in engines for world in worlds]
    ahead = {at: _runs_ahead(*at, seeds, options.only, kept) for at in launches}
    began, done = time.perf_counter(), 0.0
    left = sum(_weight(*at) * n for at, n in ahead.items())
    print(f"{sum(ahead.values())} runs ahead, about {_minutes(left * _RUN_S)}", file=sys.stderr, flush=True)
    for engine, world in launches:
        if ahead[engine, world]:
            launch(engine, world, seeds, options.only, kept)
            done += _weight(engine, world) * ahead[engine, world]
            left -= _weight(engine, world) * ahead[engine, world]
            more = f", {_minutes((time.perf_counter() - began) / done * left)} to go" if left else ""
            print(f"{engine}, {world} ranks: done{more}", file=sys.stderr, flush=True)
    wanted = {(e, w, s.name, n) for e, w in launches for s in chosen(e, w, options.only) for n in range(seeds)}
    runs = [r for r in kept.runs if _key(r) in wanted or r["seed"] < 0]
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
