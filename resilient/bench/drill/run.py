"""`resilient drill checkpoint`: real jobs ended in the middle of saving, committing, deleting and loading, and their files
damaged; after every round a good checkpoint must be there and come back bit for bit.

    resilient drill checkpoint [--rounds 200 | --quick] [--seed N] [--only TEXT] [--folder DIR] [--format text|json] [--out FILE]

Each round starts two gloo ranks that train, save in the background and delete old checkpoints, strikes them (or their
files) once, starts the job again and compares what it restores with a state computed without checkpoints. --folder puts
the checkpoints on the file system that is to be tried; the default is the one for temporary files. Exit 1 when a bound
below the tables is missed; the folder is then kept, to be looked at.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from resilient.bench.bounds import Check
from resilient.bench.detection.table import table
from resilient.bench.drill.campaign import STARTS, Campaign, Round, histogram
from resilient.errors import ConfigError
from resilient.telemetry.output import check_folder, hand_over, unusable

ROUNDS, QUICK = 200, len(STARTS)  # quick: every fault in every phase once
_HANG_S = 30.0

MEASURES = {
    "lost": "lost good checkpoints",
    "wrong": "wrong restores",
    "hollow": "manifests over parts that are not whole",
    "stuck": "rounds after which the job could not go on",
    "hangs": f"starts that did not end in {_HANG_S:.0f} s",
}


def checks(rounds: Sequence[Round]) -> list[Check]:
    """What was found must be nothing, and nearly every fault must really have struck."""
    found = [Check(name, float(sum(getattr(r, key) for r in rounds)), 0.0, False) for key, name in MEASURES.items()]
    struck = sum(r.struck for r in rounds) / max(len(rounds), 1)
    return [*found, Check("share of rounds whose fault struck", struck, 0.95)]


def text(rounds: Sequence[Round], held: Sequence[Check]) -> str:
    columns = ["fault", "phase", "rounds", "struck", *MEASURES, "seconds"]
    rows = [
        _row(fault, phase or "", [r for r in rounds if (r.fault, r.phase) == (fault, phase or "")])
        for fault, phase in STARTS
    ]
    parts = [table("Rounds by fault and phase", columns, [row for row in rows if row[2] != "0"])]
    hit = [
        [phase, str(sum(points.values())), ", ".join(f"{what} {n}" for what, n in points.most_common())]
        for phase, points in histogram(rounds).items()
    ]
    if hit:
        parts.append(table("Where kills, power cuts and pauses struck", ["phase", "times", "before or after"], hit))
    parts += [
        f"round {r.number} ({r.fault} {r.phase}; {r.point or r.detail}): {'; '.join(r.problems)}"
        for r in rounds
        if not r.ok
    ]
    seconds = sum(r.seconds for r in rounds)
    parts.append(f"{len(rounds)} rounds in {seconds:.0f} s")
    parts.append(
        "\n".join(
            f"{'held  ' if c.ok else 'MISSED'} {c.name}: {c.value:.4g} ({'>=' if c.at_least else '<='} {c.bound:g})"
            for c in held
        )
    )
    return "\n\n".join(parts)


def _row(fault: str, phase: str, rounds: Sequence[Round]) -> list[str]:
    counts = [str(sum(getattr(r, key) for r in rounds)) for key in MEASURES]
    seconds = f"{sum(r.seconds for r in rounds):.1f}"
    return [fault, phase, str(len(rounds)), str(sum(r.struck for r in rounds)), *counts, seconds]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="resilient drill checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=None, help=f"default {ROUNDS}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} rounds: every fault in every phase once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in their name: kill all commit")
    parser.add_argument("--folder", metavar="DIR", default=None, help="where the checkpoints of the drill are written")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--out", metavar="FILE", default=None)
    options = parser.parse_args(argv)
    rounds = options.rounds if options.rounds is not None else QUICK if options.quick else ROUNDS
    try:
        check_folder("--out", options.out)
        _check(options, rounds)
    except ConfigError as error:
        return unusable("drill checkpoint", error)
    torch.set_num_threads(1)  # the ranks are forked from this process
    logging.getLogger("resilient").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="drill-", dir=options.folder))
    began = time.monotonic()

    def progress(done: Round) -> None:
        left = (time.monotonic() - began) / (done.number + 1) * (rounds - done.number - 1)
        print(f"\rround {done.number + 1} of {rounds}, {left:.0f} s to go ", end="", file=sys.stderr, flush=True)

    quiet = not sys.stderr.isatty()
    found = Campaign(folder, options.seed, deadline_s=_HANG_S, progress=(lambda done: None) if quiet else progress).run(
        rounds, options.only
    )
    if not quiet:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    held = checks(found)
    if any(not r.ok for r in found):
        print(f"what was found lies in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    written = (
        json.dumps(_as_json(options.seed, found, held), indent=1) if options.format == "json" else text(found, held)
    )
    return hand_over("drill checkpoint", written, options.out) or int(not all(c.ok for c in held))


def _check(options: argparse.Namespace, rounds: int) -> None:
    if rounds < 1:
        raise ConfigError(f"--rounds: {rounds} is not at least 1")
    if options.folder is not None and not Path(options.folder).is_dir():
        raise ConfigError(f"--folder: there is no folder {options.folder}")
    if not any(options.only in f"{fault} {phase}" for fault, phase in STARTS):
        names = ", ".join(dict.fromkeys(fault for fault, _ in STARTS))
        raise ConfigError(f"--only {options.only}: no fault has this in its name: {names}")


def _as_json(seed: int, rounds: Sequence[Round], held: Sequence[Check]) -> dict[str, Any]:
    return {
        "seed": seed,
        "seconds": round(sum(r.seconds for r in rounds), 1),
        "rounds": [asdict(r) for r in rounds],
        "struck": {phase: dict(points) for phase, points in histogram(rounds).items()},
        "checks": [c.as_json() for c in held],
    }


if __name__ == "__main__":
    sys.exit(main())
