"""`resilient launch` on real processes: what is restarted, how often, and that nothing is left running (BR-25, BR-55)."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from resilient.checkpoint.manifest import Checkpoint, Listing, Manifest
from resilient.recovery.process import describe
from resilient.recovery.supervisor import Budget, outcome_of
from tests.recovery.processes import Running, children, eventually, marked

PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
generation = int(os.environ["RESILIENT_GENERATION"])
here = pathlib.Path(__file__).parent
with open(here / "starts", "a") as file:
    file.write(json.dumps({n: os.environ[n] for n in ("RESILIENT_GENERATION", "RESILIENT_RUN_ID", "RESILIENT_SUPERVISOR")}) + "\\n")
"""

# A guarded job without a model: it has a run directory, commits a checkpoint folder now and then, writes its verdict.
RUN = """
from resilient.checkpoint.manifest import Manifest, folder_name, write_manifest
from resilient.recovery.verdict import announce, write_verdict
run = here / "run"

def checkpoint(step, attempt, serial):
    folder = run / "checkpoints" / folder_name(step, attempt)
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest("r", generation, serial, step, attempt, step, 0.1, step, 0, {}, (), {}, "now"))
"""


def launch(tmp_path: Path, mark: str, code: str, *options: str, env: dict[str, str] | None = None) -> Running:
    (tmp_path / "job").mkdir()
    script = tmp_path / "job" / "job.py"
    script.write_text(PRELUDE + textwrap.dedent(code))
    options = ("--backoff", "0.05", *options)
    return Running(tmp_path, mark, "-m", "resilient.cli.launch", *options, "--", sys.executable, str(script), env=env)


def starts(tmp_path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (tmp_path / "job" / "starts").read_text().splitlines()]


@pytest.mark.timeout(60)
def test_a_job_that_fails_twice_is_started_three_times_under_one_run_id(tmp_path: Path) -> None:
    job = launch(tmp_path, "twice", "sys.exit(0 if generation == 2 else 1)", "--run-id", "mine")
    assert job.wait() == 0
    seen = starts(tmp_path)
    assert [s["RESILIENT_GENERATION"] for s in seen] == ["0", "1", "2"]
    assert {s["RESILIENT_RUN_ID"] for s in seen} == {"mine"}
    assert not Path(seen[0]["RESILIENT_SUPERVISOR"]).exists(), "the supervisor's folder goes with it"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job", "twice.log"], (
        "nothing is written into the user's folder"
    )


@pytest.mark.timeout(60)
def test_the_run_id_comes_from_the_environment_or_is_made_up_once(tmp_path: Path) -> None:
    code = "sys.exit(0 if generation == 1 else 1)"
    assert launch(tmp_path, "given", code, env={"RESILIENT_RUN_ID": "theirs"}).wait() == 0
    assert {s["RESILIENT_RUN_ID"] for s in starts(tmp_path)} == {"theirs"}
    other = tmp_path / "other"
    other.mkdir()
    assert launch(other, "fresh", code).wait() == 0
    assert len({s["RESILIENT_RUN_ID"] for s in starts(other)}) == 1


@pytest.mark.timeout(60)
def test_a_job_that_always_dies_uses_up_the_budget_and_ends_with_77(tmp_path: Path) -> None:
    job = launch(tmp_path, "never", "os.kill(os.getpid(), signal.SIGKILL)", "--max-restarts", "2")
    assert job.wait() == 77
    assert len(starts(tmp_path)) == 3
    assert "exit 137 (SIGKILL)" in job.text
    assert "2 restarts in a row brought no checkpoint of a later step" in job.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("code", [64, 76, 77, 78])
def test_codes_that_mean_stop_are_not_restarted(tmp_path: Path, code: int) -> None:
    job = launch(tmp_path, f"stop{code}", f"sys.exit({code})")
    assert job.wait() == code
    assert len(starts(tmp_path)) == 1


@pytest.mark.timeout(60)
def test_the_verdict_wins_over_the_code_that_a_launcher_invents(tmp_path: Path) -> None:
    """torchrun and deepspeed turn every failure of a rank into exit 1."""
    job = launch(
        tmp_path,
        "verdict",
        RUN + "run.mkdir()\nannounce(run, 'r', 5)\nwrite_verdict(run, 77, 'the loss is beyond repair', 5)\nsys.exit(1)",
    )
    assert job.wait() == 77
    assert len(starts(tmp_path)) == 1
    assert "the loss is beyond repair" in job.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("announced", [5, 6])
def test_an_old_verdict_is_not_this_starts(tmp_path: Path, announced: int) -> None:
    """A start that dies without a word is judged by its exit code, whatever an earlier one, of this launch or of
    another, has left in the run directory."""
    job = launch(
        tmp_path,
        f"stale{announced}",
        RUN
        + f"""
if generation == 0:
    run.mkdir()
    announce(run, 'r', 5)
    write_verdict(run, 75, 'again', 5)
    sys.exit(1)
if generation == 1:
    os.environ["RESILIENT_SUPERVISOR"] += "-another"
    write_verdict(run, 77, 'of another launch', 5)
    os.environ["RESILIENT_SUPERVISOR"] = os.environ["RESILIENT_SUPERVISOR"].removesuffix("-another")
    announce(run, 'r', {announced})
    sys.exit(1)
""",
    )
    assert job.wait() == 0
    assert len(starts(tmp_path)) == 3
    assert "verdict 75: again" in job.text
    assert "another launch" not in job.text


@pytest.mark.timeout(60)
def test_a_start_that_announces_nothing_is_judged_by_its_exit_code(tmp_path: Path) -> None:
    job = launch(
        tmp_path,
        "silent",
        RUN
        + """
if generation == 0:
    run.mkdir()
    announce(run, "r", 0)
    write_verdict(run, 75, "again", 0)
    sys.exit(1)
sys.exit(64)
""",
    )
    assert job.wait() == 64
    assert len(starts(tmp_path)) == 2


@pytest.mark.timeout(60)
def test_progress_earns_the_restarts_back_and_standing_still_does_not(tmp_path: Path) -> None:
    """BR-25: five deaths with a later checkpoint each are fine with a budget of 1; two without are the end."""
    job = launch(
        tmp_path,
        "progress",
        RUN
        + """
run.mkdir(exist_ok=True)
announce(run, "r", generation)
if generation < 5:
    checkpoint(10 * generation, generation + 1, generation + 1)
else:
    checkpoint(40, generation + 1, generation + 1)  # the same step again: not progress
sys.exit(1)
""",
        "--max-restarts",
        "1",
    )
    assert job.wait() == 77
    assert len(starts(tmp_path)) == 6
    assert "from the checkpoint of step 30" in job.text
    assert "it stands at the checkpoint of step 40" in job.text


@pytest.mark.timeout(60)
def test_TERM_is_passed_on_and_the_job_is_not_restarted(tmp_path: Path) -> None:
    job = launch(
        tmp_path,
        "term",
        """
        def leave(*_):
            (here / "left").touch()
            sys.exit(78)
        signal.signal(signal.SIGTERM, leave)
        (here / "ready").touch()
        time.sleep(60)
        """,
    )
    assert eventually((tmp_path / "job" / "ready").exists)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 78
    assert (tmp_path / "job" / "left").exists()
    assert len(starts(tmp_path)) == 1
    assert marked("term") == []


@pytest.mark.timeout(60)
def test_a_deaf_job_is_killed_after_the_grace_with_all_it_started(tmp_path: Path) -> None:
    job = launch(
        tmp_path,
        "deaf",
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        (here / "ready").touch()
        time.sleep(60)
        """,
        "--grace",
        "0.5",
    )
    assert eventually((tmp_path / "job" / "ready").exists)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 137
    assert len(starts(tmp_path)) == 1
    assert marked("deaf") == []


@pytest.mark.timeout(60)
def test_TERM_during_the_wait_for_a_restart_ends_resumable(tmp_path: Path) -> None:
    job = launch(tmp_path, "pause", "sys.exit(1)", "--backoff", "50")
    assert eventually(lambda: "restart 1 of 3 in 50 s" in job.text)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(10) == 78


LAUNCHER = """
worker = "import signal,time; {deaf}; time.sleep(60)"
if generation == 0:
    workers = [subprocess.Popen([sys.executable, "-c", worker], start_new_session=True) for _ in range(2)]
    (here / "workers").write_text(" ".join(str(w.pid) for w in workers))
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
alive = [p for p in (here / "workers").read_text().split() if pathlib.Path("/proc/" + p).exists()]
sys.exit(17 if alive else 0)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("deaf", ["pass", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_workers_of_a_killed_launcher_are_gone_before_the_next_start(tmp_path: Path, deaf: str) -> None:
    """An agent killed with SIGKILL leaves its workers, in sessions of their own, as orphans."""
    mark = f"orphans{len(deaf)}"
    job = launch(tmp_path, mark, LAUNCHER.format(deaf=deaf))
    assert job.wait() == 0, job.text
    assert len(starts(tmp_path)) == 2
    assert "ended 2 processes that the command had left running" in job.text
    assert marked(mark) == []


@pytest.mark.timeout(60)
def test_pre_empted_by_the_supervisors_own_sweep_is_not_pre_empted(tmp_path: Path) -> None:
    """A rank that outlives its launcher takes the sweep's TERM for the cluster's and says 78: restart all the same."""
    rank = """
from resilient.recovery.verdict import write_verdict
def leave(*_):
    write_verdict(sys.argv[1], 78, "asked to leave", 0)
    sys.exit(78)
signal.signal(signal.SIGTERM, leave)
(here / "ready").touch()
time.sleep(60)
"""
    job = launch(
        tmp_path,
        "ownterm",
        RUN
        + f"""
if generation == 0:
    run.mkdir()
    announce(run, "r", 0)
    source = "import pathlib, signal, sys, time\\nhere = pathlib.Path(sys.argv[2])\\n" + {rank!r}
    subprocess.Popen([sys.executable, "-c", source, str(run), str(here)], start_new_session=True)
    while not (here / "ready").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert job.wait() == 0, job.text
    assert json.loads((tmp_path / "job" / "run" / "verdict.json").read_text())["code"] == 78
    assert len(starts(tmp_path)) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("guarded", [True, False])
def test_exit_0_of_a_launcher_that_lost_its_ranks_is_a_crash_of_a_guarded_run(tmp_path: Path, guarded: bool) -> None:
    """The deepspeed runner returns 0 when its inner launcher is killed; the ranks go on as orphans. A script that has
    said nothing of itself may have left a helper running on purpose: its 0 is a 0."""
    job = launch(
        tmp_path,
        f"zero{guarded}",
        RUN
        + f"""
if generation == 0:
    run.mkdir()
    {"announce(run, 'r', 0)" if guarded else "pass"}
    subprocess.Popen(["sleep", "60"], start_new_session=True)
sys.exit(0)
""",
    )
    assert job.wait() == 0
    assert len(starts(tmp_path)) == (2 if guarded else 1)
    assert marked(f"zero{guarded}") == []


@pytest.mark.timeout(60)
def test_adopted_orphans_that_end_leave_no_zombies_while_the_job_runs(tmp_path: Path) -> None:
    job = launch(
        tmp_path,
        "zombie",
        """
        for _ in range(3):
            if os.fork() == 0:
                subprocess.Popen(["sleep", "0.2"])
                os._exit(0)
            os.wait()
        (here / "ready").touch()
        while not (here / "go").exists():
            time.sleep(0.01)
        """,
    )
    assert eventually((tmp_path / "job" / "ready").exists)
    assert eventually(lambda: len(children(job.process.pid)) == 1, 10), "only the job itself is left, no zombie"
    (tmp_path / "job" / "go").touch()
    assert job.wait() == 0


@pytest.mark.timeout(60)
def test_the_job_ends_with_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    job = launch(tmp_path, "killed", "(here / 'ready').touch()\ntime.sleep(60)")
    assert eventually((tmp_path / "job" / "ready").exists)
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()
    assert eventually(lambda: marked("killed") == [])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "no-such-program-anywhere"], "cannot start 'no-such-program-anywhere'"),
        ([], "no command to run"),
        (["--max-restarts", "many", "--", "true"], "--max-restarts"),
        (["--grace", "-1", "--", "true"], "--grace"),
    ],
)
def test_arguments_that_cannot_be_used_end_with_64(tmp_path: Path, arguments: list[str], said: str) -> None:
    job = Running(tmp_path, "usage", "-m", "resilient.cli.launch", *arguments)
    assert job.wait() == 64
    assert said in job.text


def test_exit_codes_are_named_as_shells_and_the_deepspeed_launcher_report_them() -> None:
    assert [describe(s) for s in (0, 75, 137, 143, 247)] == [
        "exit 0",
        "exit 75",
        "exit 137 (SIGKILL)",
        "exit 143 (SIGTERM)",
        "exit 247 (SIGKILL)",
    ]


def test_every_code_of_the_design_has_its_outcome() -> None:
    assert {c: outcome_of(c) for c in (0, 64, 75, 76, 77, 78, 1, 2, 137, 143)} == {
        0: "done",
        64: "stop",
        75: "restart",
        76: "stop",
        77: "stop",
        78: "stop",
        1: "restart",
        2: "restart",
        137: "restart",
        143: "restart",
    }


def test_the_budget_remembers_the_furthest_step_even_when_its_checkpoint_is_gone() -> None:
    def at(*steps: int) -> Listing:
        found = [Manifest("r", 0, s, s, s, s, 0.1, s, 0, {}, (), {}, "now") for s in steps]
        return Listing(tuple(Checkpoint(Path(str(m.step)), m) for m in found), ())

    budget = Budget(1)
    assert not budget.progressed(at())
    assert budget.spend()
    assert not budget.spend()
    assert budget.progressed(at(0))
    assert budget.spend()
    assert budget.progressed(at(50, 40))
    assert not budget.progressed(at(40))
    assert budget.spend()
    assert not budget.progressed(at(40, 50)), "the same step reached again"
    assert not budget.spend()
