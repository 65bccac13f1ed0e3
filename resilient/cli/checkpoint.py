"""`resilient checkpoint ls|verify|show|diff|rm|export`: look at checkpoints, check them, compare, delete and convert them.

Needs no device and no training code. Only `diff` and `export` open the state itself, and load it with `weights_only`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from resilient.checkpoint.manifest import MANIFEST, list_checkpoints, step_of
from resilient.checkpoint.storage import LocalStorage, redact
from resilient.checkpoint.verify import Damage, verify_checkpoint
from resilient.cli.argv import Parser, number
from resilient.errors import CheckpointError, ConfigError, ExitCode
from resilient.telemetry.checkpoints import (
    Place,
    choose,
    details,
    is_checkpoint_name,
    is_link,
    lacks,
    last_good,
    listing,
    open_place,
    strange_files,
)
from resilient.telemetry.checkpoints_view import list_lines, list_table, printable, show_text, size_text

_DAMAGED, _INTERRUPTED = 1, 130
_EXAMPLES = """examples:
  resilient checkpoint ls runs/<id>                                       what there is, how far it may be trusted
  resilient checkpoint verify runs/<id>                                   every byte against the digests
  resilient checkpoint show runs/<id> --step 500
  resilient checkpoint diff runs/<id>/checkpoints/step-00000400-a00000400 runs/<id>
  resilient checkpoint rm runs/<id>/checkpoints/step-00000400-a00000400
  resilient checkpoint export runs/<id> --to dcp --out exported

PATH is a run directory, a folder of checkpoints, one checkpoint, or an fsspec URL of either (not for export).

exit codes: 0 all is well; 1 verify found damage, or rm or export could not do it; 64 bad usage, or nothing there; 130 interrupted
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilient checkpoint",
        description="Look at checkpoints, check them, compare, delete and convert them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="ls|verify|show|diff|rm|export")

    def command(name: str, run: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        sub.add_argument("--format", choices=("text", "json"), default="text", help="json: one object on stdout")
        sub.set_defaults(run=run)
        return sub

    for name, run, what in (
        ("ls", _ls, "list checkpoints: health, trust, size, age, what each lacks, and orphans"),
        ("verify", _verify, "read every byte and compare it with the digests; exit 1 on damage"),
    ):
        command(name, run, what).add_argument("paths", metavar="PATH", nargs="+")
    step = {"type": number(int, 0), "metavar": "N", "help": "of this step (default: the newest commit)"}
    show = command("show", _show, "one checkpoint's manifest, readable")
    show.add_argument("path", metavar="PATH")
    show.add_argument("--step", **step)  # type: ignore[arg-type]
    difference = command("diff", _diff, "what differs: configuration, LR, parameter groups, state parts")
    difference.add_argument("paths", metavar="PATH", nargs=2)
    difference.add_argument("--step", action="append", **step)  # type: ignore[arg-type]
    rm = command("rm", _rm, "delete checkpoints, the manifest first; never the last good one")
    rm.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint's own folder")
    rm.add_argument("--force", action="store_true", help="also the last good one, and folders with other files in them")
    export = command("export", _export, "write it as torch's DCP, DeepSpeed's own or its universal format")
    export.add_argument("path", metavar="PATH")
    export.add_argument("--step", **step)  # type: ignore[arg-type]
    export.add_argument("--to", choices=("dcp", "deepspeed", "universal"), required=True)
    export.add_argument("--out", required=True, metavar="FOLDER", help="a new or empty folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; raises SystemExit(64) for unusable arguments."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except ConfigError as error:
        print(f"resilient checkpoint: {printable(error)}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    except RecursionError:
        print("resilient checkpoint: a file is nested too deeply to be an honest one", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except OSError as error:
        print(f"resilient checkpoint: {printable(redact(str(error)))}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    except KeyboardInterrupt:
        return _INTERRUPTED


# -- ls, show, diff ----------------------------------------------------------------------------------------------------------


def _ls(options: argparse.Namespace) -> int:
    found = [listing(open_place(path)) for path in options.paths]
    if options.format == "json":
        _print_json({"places": found})
        return ExitCode.DONE
    from rich.console import Console

    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=160, color_system=None)
    for place in found:
        with console.capture() as capture:
            console.print(list_table(place))
        print("\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n")))
        print("\n".join(list_lines(place)))
    return ExitCode.DONE


def _show(options: argparse.Namespace) -> int:
    place = open_place(options.path)
    found = details(place, choose(place, options.step), time.time())
    if options.format == "json":
        _print_json(found)
    else:
        print("\n".join(line.rstrip() for line in show_text(found)))
    return ExitCode.DONE


def _diff(options: argparse.Namespace) -> int:
    from resilient.telemetry.checkpoint_diff import diff, diff_lines

    steps = options.step or [None]
    if len(steps) > 2:
        raise ConfigError("diff takes --step once for both, or twice, for A and B")
    places = [open_place(path) for path in options.paths]
    a, b = ((place, choose(place, step)) for place, step in zip(places, (steps[0], steps[-1]), strict=True))
    found = diff(a, b)
    if options.format == "json":
        _print_json(found)
    else:
        print("\n".join(diff_lines(found)))
    return ExitCode.DONE


# -- verify ---------------------------------------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    reports: list[dict[str, Any]] = []
    for path in options.paths:
        place = open_place(path)
        for remark in place.remarks:
            print(f"resilient checkpoint: {printable(remark)}", file=sys.stderr)
        names = _to_verify(place)
        if not names:
            raise ConfigError(f"no checkpoint in {place.storage.name}")
        reports += [_verify_one(place, name, options) for name in names]
    damaged = sum(bool(report["damage"]) for report in reports)
    if options.format == "json":
        _print_json({"checkpoints": reports, "damaged": damaged, "exit": int(damaged > 0)})
    else:
        print(f"{len(reports)} verified, {damaged} damaged")
    return _DAMAGED if damaged else ExitCode.DONE


def _to_verify(place: Place) -> list[str]:
    """Folders that have a manifest, newest step first. One that was named is verified whatever it has."""
    if place.only is not None:
        return [place.only]
    names = [name for name in place.storage.folders() if step_of(name) is not None]
    return sorted((n for n in names if MANIFEST in place.storage.files(n)), reverse=True)


def _verify_one(place: Place, name: str, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    with _progress(place, name) as tick:
        manifest, damage = verify_checkpoint(place.storage, name, tick)
    seconds = time.monotonic() - began
    size = sum(part.size for part in manifest.parts) if manifest is not None else 0
    missing = lacks(manifest) if manifest is not None else []
    if options.format == "text":
        for found in damage:
            print(f"damaged: {place.storage.name}/{name}/{printable(_damage_text(found))}", flush=True)
        if not damage:
            rate = f", {size_text(int(size / seconds))}/s" if seconds > 0 else ""
            more = f"; lacks {', '.join(missing)}" if missing else ""
            print(f"ok: {place.storage.name}/{name}: {size_text(size)} in {seconds:.1f} s{rate}{more}", flush=True)
    return {
        "place": place.storage.name,
        "name": name,
        "bytes": size,
        "seconds": round(seconds, 3),
        "lacks": missing,
        "damage": [asdict(found) for found in damage],
    }


def _damage_text(damage: Damage) -> str:
    return f"{damage.file}{f' (part of rank {damage.rank})' if damage.rank is not None else ''}: {damage.problem}"


@contextmanager
def _progress(place: Place, name: str) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    known = {c.path.name: c.manifest for c in list_checkpoints(place.storage).complete}
    total = sum(part.size for part in known[name].parts) if name in known else None
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(name), total=total)
        yield lambda count: progress.advance(task, count)


# -- rm, export --------------------------------------------------------------------------------------------------------------------


def _rm(options: argparse.Namespace) -> int:
    going: dict[str, tuple[Place, list[str]]] = {}
    for path in options.paths:
        place = open_place(_own_name(path))
        if place.only is None:
            raise ConfigError(
                f"{path} is not one checkpoint: name its own folder, such as {path}/step-00000100-a00000100"
            )
        if is_link(place, place.only):
            raise ConfigError(f"{path} is refused: it is a link")
        strange = strange_files(place, place.only)
        if strange and not options.force:
            raise ConfigError(f"{path} is refused: it holds what no checkpoint has: {', '.join(strange[:3])}")
        going.setdefault(place.storage.name, (place, []))[1].append(place.only)
    for place, names in going.values():  # all are looked at before any is deleted
        last = last_good(place, names)
        if last and not options.force:
            raise ConfigError(
                f"{place.storage.name}/{last[0]} is refused: no other good checkpoint would be left there (--force deletes it)"
            )
    deleted, failed = [], []
    for place, names in going.values():
        for name in dict.fromkeys(names):
            try:
                place.storage.delete_folder(name, first=MANIFEST)
                deleted.append(f"{place.storage.name}/{name}")
            except (OSError, ValueError) as error:
                failed.append(f"{place.storage.name}/{name}: {redact(str(error))}")
    if options.format == "json":
        _print_json({"deleted": deleted, "failed": failed})
    else:
        for name in deleted:
            print(f"deleted: {printable(name)}")
    for line in failed:
        print(f"resilient checkpoint: could not delete {printable(line)}", file=sys.stderr)
    return _DAMAGED if failed else ExitCode.DONE


def _own_name(path: str) -> str:
    """A path whose last name is the folder's own: `..` or a link at the end would delete something else than it says."""
    last = path.rstrip("/").rpartition("/")[2]
    if not is_checkpoint_name(last):
        raise ConfigError(
            f"{path} is refused: only folders that a store has made can be deleted, such as step-00000100-a00000100"
        )
    return path.rstrip("/")


def _export(options: argparse.Namespace) -> int:
    place = open_place(options.path)
    if not isinstance(place.storage, LocalStorage):
        raise ConfigError(f"{redact(options.path)}: export reads a folder: copy the checkpoint to this machine first")
    checkpoint = choose(place, options.step)
    out = Path(options.out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: {out} exists and is not an empty folder")
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.parent}")
    from resilient.engines.export import export_checkpoint  # imports torch

    try:
        export_checkpoint(checkpoint.path, to=options.to, out=out)
    except (CheckpointError, OSError) as error:
        print(f"resilient checkpoint: {printable(error)}", file=sys.stderr)
        return _DAMAGED
    if options.format == "json":
        _print_json({"from": str(checkpoint.path), "to": options.to, "out": str(out)})
    else:
        print(f"exported: {printable(checkpoint.path)} -> {printable(out)} ({options.to})")
    return ExitCode.DONE


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


if __name__ == "__main__":
    sys.exit(main())
