"""What a person sees: plain lines in a log, a live line on a terminal, incidents in clear words, a closing table."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from resilient.coordinator.events import Incident
from resilient.telemetry.listeners import Progress
from resilient.telemetry.messages import incident_message
from resilient.telemetry.run_directory import RunDirectory
from tests.telemetry.stories import CONFIG, Story


def test_plain_lines_when_not_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        story = Story([Progress(run, total_steps=120, log_every=10, stream=out)])
        story.event("start", engine="deepspeed", policy="default", world=2)
        story.healthy(30)
        story.nan_on_rank(1)
        story.poisoned_window(back_to=30)
        story.healthy(40)
        story.event("warning", message="clipping on every step")
        story.event("guard_failed", error="exchange timed out")
        story.end()
    text = out.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "run job, engine deepspeed, policy default, 2 ranks"
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["10/120", "20/120", "30/120", "40/120"]
    assert "tokens/s" in steps[0]
    assert "level A" in steps[0]
    assert (
        "! step 31: non-finite loss on rank 1 (forward) -> skipped on all ranks; cause: unknown (0.5); budget left 19"
        in lines
    )
    (back,) = [line for line in lines if "rolled back" in line]
    assert (
        "rolled back from step 39 to step 30 on all ranks, data windows 31 to 41 will not be trained on again" in back
    )
    assert "LR x 0.3, clip x 0.3" in back
    assert "began at step 31" in back
    assert "warning: clipping on every step" in lines
    assert "!! the guard itself failed: exchange timed out" in lines
    table = text[text.rindex("run job") :]
    assert "done" in table
    assert "40 (48 applied, 8 lost)" in table


def test_a_resumed_run_says_so(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, "job", CONFIG).close()
    out = io.StringIO()
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        progress = Progress(run, stream=out)
        progress.event("start", {"engine": "ddp"})
        progress.event("resume", {"step": 50})
    assert out.getvalue().splitlines() == ["run job, engine ddp, start 2", "resumed from step 50"]


def test_other_ranks_are_silent_but_count(tmp_path: Path) -> None:
    out = io.StringIO()
    with RunDirectory.open(tmp_path, "job", CONFIG) as run:
        progress = Progress(RunDirectory.attach(run.path), log_every=1, stream=out)
        story = Story([progress])
        story.healthy(3)
        story.nan_on_rank(0)
        story.end()
    assert out.getvalue() == ""
    assert progress.summary.attempts == 4


_ON_A_TERMINAL = """
from resilient.telemetry.listeners import Progress
from tests.telemetry.stories import Story
progress = Progress(total_steps=40, log_every=10)
story = Story([progress], total=40)
story.healthy(20)
story.nan_on_rank(1)
story.healthy(40)
story.end()
progress.close()
"""


@pytest.mark.timeout(60)
def test_live_line_on_a_real_terminal() -> None:
    """In a pseudo-terminal: one line redrawn in place, the incident above it, and no plain step lines."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140"}
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_A_TERMINAL], stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True
    )
    os.close(slave)
    timer = threading.Timer(40, process.kill)
    timer.start()
    seen = b""
    try:
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
        assert process.wait(timeout=20) == 0
    finally:
        timer.cancel()
        os.close(master)
    text = seen.decode()
    assert "tok/s" in text
    assert "/40" in text
    assert "! step 21: non-finite loss on rank 1 (forward) -> skipped on all ranks" in text
    assert "tokens/s" not in text
    assert "40 (40 applied, 0 lost)" in text


@pytest.mark.parametrize(
    ("incident", "expected"),
    [
        (
            Incident(40, 41, "unknown", (1,), "skip", 40, place="forward", confidence=0.6, reason="non-finite loss"),
            "step 40: non-finite loss on rank 1 (forward) -> skipped on all ranks; cause: unknown (0.6); budget left 15",
        ),
        (
            Incident(
                9, 9, "communication", (0, 2), "skip", 9, confidence=0.6, evidence=("local norm far above its peers",)
            ),
            "step 9: local norm far above its peers on ranks 0, 2 -> skipped on all ranks; "
            "cause: communication (0.6); budget left 15",
        ),
        (
            Incident(9, 9, "data", (), "would rollback", 9, confidence=0.5, reason="loss is high"),
            "step 9: loss is high -> applied all the same (observed only; would have rolled back); cause: data (0.5); "
            "budget left 15",
        ),
        (
            Incident(
                30,
                33,
                "data",
                (),
                "rollback",
                28,
                target_step=25,
                skipped_windows=(28, 29),
                confidence=0.5,
                reason="spike",
            ),
            "step 30: spike -> rolled back from step 30 to step 25 on all ranks, data window 28 will not be trained on "
            "again; cause: data (0.5); began at step 28; budget left 15",
        ),
        (
            Incident(30, 33, "optimizer", (), "stop", 30, confidence=0.5, reason="spike; the budget is used up"),
            "step 30: spike; the budget is used up -> stopped on all ranks; cause: optimizer (0.5); budget left 15",
        ),
    ],
)
def test_incident_messages(incident: Incident, expected: str) -> None:
    assert incident_message(incident, 15) == expected
