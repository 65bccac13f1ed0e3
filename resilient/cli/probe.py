"""`resilient probe`: measure the links between the ranks and their arithmetic; name what is slow or wrong.

Started on every rank by any launcher, as the job itself would be, or alone with --nproc N. Needs no configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from resilient.cli.argv import Parser, Runtime, number, strip_launcher_arguments
from resilient.cli.errors import fail
from resilient.errors import ConfigError, ProbeFailed, ResilientError
from resilient.signals import LinkReport

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from resilient.coordinator.link_report import Measured

_MODULE = "resilient.cli.probe"
_FOUND = 1
_ROWS = 28  # of a table: all links of 8 ranks
_PREFIX = "resilient-probe"
_EXAMPLES = """examples:
  resilient probe --nproc 8                                                  the ranks of this machine
  torchrun --nnodes 4 --nproc-per-node 8 ... -m resilient.cli.probe          those of a cluster
  deepspeed --hostfile hostfile --module resilient.cli.probe --seconds 60
  srun --ntasks-per-node 8 resilient probe                                   with MASTER_ADDR and MASTER_PORT exported

exit codes, the same on all ranks: 0 nothing found; 1 a link or rank is slow, wrong or does not answer; 64 bad usage
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilient probe",
        description="Measure latency, bandwidth and bits of the links between all ranks, pair by pair, and let every rank "
        "multiply matrices with a known product.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds",
        type=number(float, 0, above=True),
        default=20.0,
        metavar="S",
        help="time to measure for; pairs beyond the first 3 + log2(hosts) rounds are left out when it is over (default 20)",
    )
    parser.add_argument(
        "--size-mb",
        type=number(float, 0, above=True),
        metavar="N",
        help="size of the largest message in MB (default: 1 on CPUs, 32 on GPUs)",
    )
    parser.add_argument(
        "--wait",
        type=number(float, 0, above=True),
        default=120.0,
        metavar="S",
        help="longest wait for all ranks to come (default 120)",
    )
    parser.add_argument(
        "--nproc",
        type=number(int, 0, above=True),
        metavar="N",
        help="outside a launcher: start N ranks on this machine (default: one per GPU)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, instead of tables")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; raises SystemExit(64) for unusable arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    runtime = Runtime()
    try:
        runtime, words = strip_launcher_arguments(words, os.environ)
        options = _parser().parse_args(words)
        if runtime.launched:
            return _rank(runtime, options)
        import torch  # not before --help and bad usage are answered

        nproc = options.nproc or max(torch.cuda.device_count(), 1)
        if nproc == 1:
            return _alone(options)
        from resilient.recovery.local import spawn

        return spawn([sys.executable, "-m", _MODULE, *words], nproc)
    except ResilientError as error:
        return fail(error, runtime.rank)


def _alone(options: argparse.Namespace) -> int:
    from resilient.coordinator.links import measure

    host = socket.gethostname()
    measured = measure(None, _device(0), 0, 1, [host], options.seconds)
    return _show(measured, options)


def _rank(runtime: Runtime, options: argparse.Namespace) -> int:
    """One rank of several, or of one under a launcher."""
    import torch.distributed as dist

    from resilient.coordinator.links import measure

    if runtime.world == 1:
        return _alone(options)
    runtime.export(os.environ)
    device = _device(runtime.local_rank)
    try:
        store = _meet(runtime, options.wait)
    except ProbeFailed as error:
        _show_failure(error, options)
        return _FOUND
    try:
        hosts = _hosts(store, runtime, options.wait)
        _open_group(store, runtime, device, options.wait)
        measured = measure(
            dist.group.WORLD, device, runtime.rank, runtime.world, hosts, options.seconds, payload_mb=options.size_mb
        )
        dist.destroy_process_group()
    except ProbeFailed as error:
        if runtime.rank == min(set(range(runtime.world)) - set(error.missing)):
            _show_failure(error, options)
        return _FOUND
    finally:
        _leave(store, runtime)
    return _show(measured, options) if runtime.rank == 0 else _code(_judged(measured))


def _device(local_rank: int) -> torch.device:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _meet(runtime: Runtime, wait: float) -> dist.Store:
    """The store that all ranks share, without a process group: with one, a missing rank would have no name."""
    from torch.distributed import PrefixStore, TCPStore

    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise ConfigError(
            f"{' and '.join(absent)} not set: the ranks need an address to meet, "
            "for instance the first host of the job and a free port"
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal():
        raise ConfigError(f"MASTER_PORT needs a number, found {port!r}")
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent holds the store
    try:
        store = TCPStore(
            address,
            int(port),
            is_master=runtime.rank == 0 and not agents,
            timeout=timedelta(seconds=wait),
            wait_for_workers=False,  # the roll call does, and names the absent
        )
    except RuntimeError as error:
        line = f"rank {runtime.rank} ({socket.gethostname()}) cannot reach {address}:{port}: {error}"
        raise ProbeFailed(line, LinkReport(measured=(line,))) from error
    return PrefixStore(f"{_PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _hosts(store: dist.Store, runtime: Runtime, wait: float) -> list[str]:
    """Host names by rank. Raises ProbeFailed, with the ranks that have not come."""
    from resilient.coordinator.links import roll_call

    store.set(f"host/{runtime.rank}", socket.gethostname())
    missing = roll_call(store, "start", runtime.rank, runtime.world, wait)
    if missing:
        line = f"ranks {list(missing)} of {runtime.world} did not come within {wait:g} s"
        raise ProbeFailed(line, LinkReport(measured=(line,)), missing, usable=True)
    return [store.get(f"host/{rank}").decode() for rank in range(runtime.world)]


def _open_group(store: dist.Store, runtime: Runtime, device: torch.device, wait: float) -> None:
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, store=store, rank=runtime.rank, world_size=runtime.world, timeout=timedelta(seconds=wait)
        )
    except RuntimeError as error:
        line = f"rank {runtime.rank} ({socket.gethostname()}) cannot open {backend} connections to the others: {error}"
        raise ProbeFailed(line, LinkReport(measured=(line,))) from error


def _leave(store: dist.Store, runtime: Runtime) -> None:
    """Rank 0 may be the store's host: it goes last, so that the others can read to the end."""
    with suppress(RuntimeError):
        store.set(f"left/{runtime.rank}", "")
        if runtime.rank == 0:
            store.wait([f"left/{rank}" for rank in range(runtime.world)], timedelta(seconds=5))


def _judged(measured: Measured) -> LinkReport:
    from resilient.coordinator.link_report import judge

    return judge(measured)


def _code(report: LinkReport) -> int:
    return _FOUND if report.slow_pairs or report.wrong_pairs or report.slow_ranks or report.wrong_ranks else 0


# -- for people and for programs ---------------------------------------------------------------------------------------


def _show(measured: Measured, options: argparse.Namespace) -> int:
    report = _judged(measured)
    code = _code(report)
    if options.json:
        print(json.dumps(_as_json(measured, report) | {"exit": code}))
    else:
        _print_tables(measured)
        _print_lines(report.measured, code)
    return code


def _show_failure(error: ProbeFailed, options: argparse.Namespace) -> None:
    if options.json:
        print(
            json.dumps({"error": str(error), "missing": error.missing, "report": asdict(error.report), "exit": _FOUND})
        )
    else:
        _print_lines(error.report.measured or (str(error),), _FOUND)


def _print_lines(lines: Sequence[str], code: int) -> None:
    for line in lines:
        print(line)
    print("found: see above" if code else "nothing slow, nothing wrong", flush=True)


def _as_json(measured: Measured, report: LinkReport) -> dict[str, Any]:
    links = _links(measured)
    return {
        "world": len(measured.hosts),
        "hosts": measured.hosts,
        "device": measured.device,
        "seconds": round(float(measured.machine("seconds").max()), 3),
        "links": [
            {
                "ranks": [int(a), int(b)],
                "one_host": bool(links.inside[i]),
                "latency_us": round(float(links.latency[i]), 1),
                "latency_p95_us": round(float(links.latency_p95[i]), 1),
                "mb_per_s": round(float(links.rate[i]), 2),
                "wrong_words": [int(words) for words in links.wrong[i]],
            }
            for i, (a, b) in enumerate(links.pairs)
        ],
        "matmul_ms": [round(float(s) * 1e3, 3) for s in measured.machine("matmul")],
        "matmul_wrong": [int(n) for n in measured.machine("matmul_wrong") + measured.machine("matmul_wrong_again")],
        "report": asdict(report),
    }


def _links(measured: Measured) -> Any:
    from resilient.coordinator.link_report import links_of

    return links_of(measured.hosts, *measured.stages)


def _print_tables(measured: Measured) -> None:
    """The slowest links and machines; all of them when there are few."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    console = Console()
    links, hosts = _links(measured), measured.hosts
    if len(links.pairs):
        worst = np.argsort(-links.latency, kind="stable")[:_ROWS]
        title = (
            "links"
            if len(links.pairs) <= _ROWS
            else f"links: the {_ROWS} with the longest latency of {len(links.pairs)}"
        )
        table = Table(title=title)
        for heading in ("ranks", "hosts", "latency us", "p95 us", "MB/s each way", "wrong words"):
            table.add_column(heading, justify="left" if heading in ("ranks", "hosts") else "right")
        for i in worst:
            a, b = links.pairs[i]
            where = hosts[a] if hosts[a] == hosts[b] else f"{hosts[a]} - {hosts[b]}"
            cells = (f"{links.latency[i]:,.0f}", f"{links.latency_p95[i]:,.0f}", f"{links.rate[i]:,.1f}")
            table.add_row(f"{a} - {b}", where, *cells, f"{links.wrong[i].sum():,.0f}")
        console.print(table)
    spent = measured.machine("matmul")
    wrong = measured.machine("matmul_wrong") + measured.machine("matmul_wrong_again")
    table = Table(
        title="matmul self-test" if len(hosts) <= _ROWS else f"matmul self-test: the {_ROWS} slowest of {len(hosts)}"
    )
    for heading in ("rank", "host", "ms", "wrong elements"):
        table.add_column(heading, justify="left" if heading == "host" else "right")
    for rank in np.argsort(-spent, kind="stable")[:_ROWS]:
        table.add_row(str(rank), hosts[rank], f"{spent[rank] * 1e3:.2f}", f"{wrong[rank]:,.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
