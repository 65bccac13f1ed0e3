"""BR-43: one rank fails between two collectives; the others would wait for it until their timeout."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.recovery.processes import Running, marked
from tests.recovery.test_local import SPAWN

JOB = """
import datetime, os, pathlib, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1800))
rank = dist.get_rank()
for step in range(1, 20):
    if rank == 2 and step == 7:
        pathlib.Path("failed").write_text(str(time.time()))
        print("RuntimeError: out of memory, say", file=sys.stderr, flush=True)
        os._exit(1)  # at once: gloo's teardown may abort, with another exit code
    dist.all_reduce(torch.ones(8))
"""


@pytest.mark.timeout(120)
def test_br43_the_job_is_down_in_seconds_and_the_rank_it_began_with_is_named(tmp_path: Path) -> None:
    script = tmp_path / "origin43.py"
    script.write_text(textwrap.dedent(JOB))
    job = Running(tmp_path, "origin43", "-c", SPAWN, "4", "2.0", sys.executable, str(script))
    assert job.wait(100.0) == 1
    assert time.time() - float((tmp_path / "failed").read_text()) < 10.0
    assert "rank 2 ended first: exit 1" in job.text and "stopping the other 3" in job.text
    assert "out of memory, say" in job.text
    assert marked("origin43") == []
