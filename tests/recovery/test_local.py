"""recovery/local.py with real processes: the origin's exit code, forwarding, nothing left behind (BR-55)."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.recovery.processes import Running, children, eventually, marked

SPAWN = """
import sys
from resilient.recovery.local import spawn
sys.exit(spawn(sys.argv[3:], int(sys.argv[1]), grace_s=float(sys.argv[2])))
"""


def start(tmp_path: Path, mark: str, rank_code: str, nproc: int = 2, grace_s: float = 5.0) -> Running:
    script = tmp_path / f"{mark}.py"
    script.write_text(
        "import os, signal, sys, time, pathlib\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(rank_code)
    )
    return Running(tmp_path, mark, "-c", SPAWN, str(nproc), str(grace_s), sys.executable, str(script))


def hello(tmp_path: Path, count: int) -> bool:
    return len(list(tmp_path.glob("hello-*"))) >= count


@pytest.mark.timeout(60)
def test_every_rank_gets_the_environment_that_torch_expects(tmp_path: Path) -> None:
    job = start(
        tmp_path,
        "env",
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        pathlib.Path(f"hello-{rank}").write_text(" ".join(os.environ[n] for n in names) + f" {os.getpgrp() == os.getpid()}")
        """,
        nproc=3,
    )
    assert job.wait() == 0
    found = [(tmp_path / f"hello-{r}").read_text().split() for r in range(3)]
    assert [f[:5] for f in found] == [[str(r), "3", str(r), "3", "127.0.0.1"] for r in range(3)]
    assert len({f[5] for f in found}) == 1
    assert 0 < int(found[0][5]) < 65536
    assert all(f[6] == "True" for f in found), "each rank has its own process group"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("sys.exit(17)", 17, "rank 1 ended first: exit 17"), ("os.kill(os.getpid(), 9)", 137, "exit 137 (SIGKILL)")],
)
def test_the_origins_exit_code_is_returned_and_named(tmp_path: Path, end: str, code: int, said: str) -> None:
    """BR-55: rank 1 fails; rank 0, told to stop, ends with a code of its own that must not win."""
    job = start(
        tmp_path,
        f"origin{code}",
        f"""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        pathlib.Path(f"hello-{{rank}}").touch()
        while not all(pathlib.Path(f"hello-{{r}}").exists() for r in range(2)):
            time.sleep(0.01)
        if rank == 1:
            {end}
        time.sleep(60)
        """,
    )
    assert job.wait() == code
    assert said in job.text
    assert marked(f"origin{code}") == []


@pytest.mark.timeout(60)
def test_a_rank_that_ignores_TERM_is_killed_after_the_grace_and_takes_its_children_along(tmp_path: Path) -> None:
    job = start(
        tmp_path,
        "deaf",
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork() == 0:
                time.sleep(60)
            pathlib.Path("hello-0").touch()
            time.sleep(60)
        while not pathlib.Path("hello-0").exists():
            time.sleep(0.01)
        sys.exit(5)
        """,
        grace_s=0.5,
    )
    assert job.wait() == 5
    assert "killing ranks [0]" in job.text
    assert eventually(lambda: marked("deaf") == [])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_TERM_and_INT_reach_every_rank_which_may_finish_in_its_own_way(tmp_path: Path, signum: int) -> None:
    mark = f"forward{int(signum)}"
    job = start(
        tmp_path,
        mark,
        """
        def leave(signum, frame):
            pathlib.Path(f"got-{rank}").write_text(str(signum))
            sys.exit(78)
        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)
        pathlib.Path(f"hello-{rank}").touch()
        time.sleep(60)
        """,
    )
    assert eventually(lambda: hello(tmp_path, 2))
    job.process.send_signal(signum)
    assert job.wait() == 78
    assert [(tmp_path / f"got-{r}").read_text() for r in range(2)] == [str(int(signum))] * 2
    assert marked(mark) == []


@pytest.mark.timeout(60)
def test_ranks_die_with_a_starter_that_was_killed_and_no_zombies_stay_meanwhile(tmp_path: Path) -> None:
    job = start(
        tmp_path,
        "orphan",
        """
        if rank == 2:
            sys.exit(0)
        pathlib.Path(f"hello-{rank}").touch()
        time.sleep(60)
        """,
        nproc=3,
    )
    assert eventually(lambda: hello(tmp_path, 2))
    assert eventually(lambda: len(children(job.process.pid)) == 2), "the rank that ended is reaped, not a zombie"
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()
    assert eventually(lambda: marked("orphan") == []), "PR_SET_PDEATHSIG takes the ranks along"
