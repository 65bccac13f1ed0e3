"""Requests to a live run through a file in its directory (S10, S11): read on rank 0, carried out by all ranks alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import resilient.cli.request as command
from resilient.checkpoint.config import CheckpointConfig, SnapshotConfig
from resilient.coordinator.requests import RequestDesk, parse_action, write_request
from resilient.errors import ConfigError
from resilient.integrations.guard import Guard
from resilient.signals import Flag, StepRecord
from resilient.telemetry.journal import read_journal, read_steps
from tests.cli.commands import finish, start
from tests.ranks import run_pooled
from tests.scenarios.harness import Job, Outcome, run_job

# -- the desk: what counts as a request ------------------------------------------------------------------------------


class Desk:
    """A desk over a run directory of generation 3, with everything that it told."""

    def __init__(self, run: Path) -> None:
        self.run = run
        (run / "generation.json").write_text('{"generation": 3}')
        self.told: list[dict[str, Any]] = []
        self.desk = RequestDesk(run, 3, lambda kind, fields: self.told.append({"kind": kind, **fields}))
        self.desk.every_s = 0.0

    def put(self, name: str, content: str | bytes) -> Path:
        (self.run / "requests").mkdir(exist_ok=True)
        path = self.run / "requests" / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def look(self) -> StepRecord:
        record = StepRecord(step=7, attempt=9)
        self.desk.fill(record)
        return record


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_s11_requests_become_flags_of_rank_0s_row_one_number_at_a_time(desk: Desk):
    for action in ("checkpoint", "stop", "lr=0.5", "rollback=4"):
        write_request(desk.run, parse_action(action))
    first, second, third = desk.look(), desk.look(), desk.look()
    assert first.flags & Flag.CHECKPOINT and first.flags & Flag.PREEMPTED
    numbers = {(bool(r.flags & Flag.LR), bool(r.flags & Flag.ROLLBACK), r.asked) for r in (first, second)}
    assert numbers == {(True, False, 0.5), (False, True, 4.0)}
    assert third.flags == 0 and third.asked == 0
    assert len(list((desk.run / "requests/done").iterdir())) == 4 and desk.told == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("not json", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "action"),
        ('{"action": "exec"}', "'exec' is not one of checkpoint, stop"),
        ('{"action": "lr", "value": 0}', "LR factor"),
        ('{"action": "lr", "value": NaN}', "finite"),
        ('{"action": "lr", "value": true}', "finite"),
        ('{"action": "lr", "value": 1%s}' % ("0" * 400), "OverflowError"),
        ('{"action": "rollback", "value": 2.5}', "a step to go back before"),
        ('{"action": "checkpoint", "value": 1}', "takes no number"),
        ('{"action": "stop", "command": "rm"}', "unknown keys: command"),
        ('{"action": "stop", "generation": 2}', "meant for start 2"),
        ("[" * 9000, "RecursionError"),
        ('{"action": "stop", "reason": "%s"}' % ("x" * 20_000), "longer than"),
    ],
)
def test_s11_what_is_no_request_is_refused_with_a_word_in_the_journal_and_asks_for_nothing(
    desk: Desk, content: str, why: str
):
    desk.put("a.json", content)
    assert [desk.look().flags for _ in range(3)] == [0, 0, 0]
    (answer,) = desk.told
    assert answer["kind"] == "request" and answer["outcome"] == "refused" and answer["id"] == "a"
    assert why in answer["message"]
    assert json.loads((desk.run / "requests/done/a.json").read_text())["outcome"] == "refused"
    assert not (desk.run / "requests/a.json").exists()


def test_s11_links_pipes_and_folders_are_not_followed(desk: Desk, tmp_path_factory: pytest.TempPathFactory):
    outside = tmp_path_factory.mktemp("outside") / "stop.json"
    outside.write_text('{"action": "stop"}')
    (desk.run / "requests").mkdir()
    (desk.run / "requests/link.json").symlink_to(outside)
    os.mkfifo(desk.run / "requests/pipe.json")
    (desk.run / "requests/folder.json").mkdir()
    assert desk.look().flags == 0
    assert [a["outcome"] for a in desk.told] == ["refused"] * 3 and outside.exists()
    other = Desk(tmp_path_factory.mktemp("run"))
    (other.run / "requests").symlink_to(outside.parent)
    assert other.look().flags == 0 and outside.exists()


def test_s11_a_file_that_is_still_being_written_is_waited_for(desk: Desk):
    desk.put("hand.json", "")
    assert desk.look().flags == 0
    desk.put("hand.json", '{"action": "stop"')
    assert desk.look().flags == 0 and desk.told == []
    desk.put("hand.json", '{"action": "stop"}')
    assert desk.look().flags & Flag.PREEMPTED and desk.told == []


def test_s11_a_request_that_cannot_be_moved_away_is_refused_once(desk: Desk):
    desk.put("a.json", '{"action": "stop"}')
    (desk.run / "requests/done").write_text("a file where the folder should be")
    assert [desk.look().flags for _ in range(3)] == [0, 0, 0]
    assert [a["outcome"] for a in desk.told] == ["refused"]


def test_s11_the_desk_looks_at_most_once_a_second(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("resilient.coordinator.requests.time.monotonic", lambda: now[0])
    desk.desk.every_s = 1.0
    desk.look()
    write_request(desk.run, parse_action("checkpoint"))
    now[0] += 0.9
    assert desk.look().flags == 0
    now[0] += 0.2
    assert desk.look().flags == Flag.CHECKPOINT


@pytest.mark.parametrize("text", ["", "explode", "lr", "lr=", "lr=0", "lr=1e9", "rollback=-1", "checkpoint=2", "note="])
def test_s11_an_action_that_is_none_is_refused_before_it_is_written(text: str):
    with pytest.raises(ConfigError):
        parse_action(text)


def test_s11_a_request_needs_a_run(tmp_path: Path):
    with pytest.raises(ConfigError, match="not the directory of a run"):
        write_request(tmp_path, parse_action("stop"))


# -- two ranks that are asked ------------------------------------------------------------------------------------------

JOB = Job(steps=10, checkpoint=CheckpointConfig(every=100))


def asked(rank: int, world: int, folder: str, requests: dict[int, str], job: Job = JOB) -> tuple[Outcome, list[float]]:
    """Train; requests are written before the given steps are voted on. Returns with the LRs used."""

    def tweak(guard: Guard, engine: Any) -> None:
        coordinator = guard._coordinator
        if coordinator._desk is not None:
            coordinator._desk.every_s = 0.0
        vote: Callable[[], None] = coordinator._vote_and_act

        def ask_then_vote() -> None:
            action = requests.pop(guard.step_index, None)
            if action and rank == 1:
                if action == "checkpoint":  # once from a process of its own, as it will be
                    words = ["request", folder, action, "--reason", "test"]
                    subprocess.run(
                        [sys.executable, "-m", "resilient.cli.main", *words], check=True, stdout=subprocess.DEVNULL
                    )
                else:
                    write_request(folder, parse_action(action), reason="" if action.startswith("note") else "test")
            import torch.distributed as dist

            dist.barrier()  # the request is there before rank 0 looks
            vote()

        coordinator._vote_and_act = ask_then_vote  # type: ignore[method-assign]

    from resilient.errors import Preempted

    outcome = run_job(job.with_(run_dir=folder), rank, world, tweak=tweak, raises=Preempted)
    return outcome, [r.lr for r in outcome.reports]


def answers(run: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_journal(run / "journal.jsonl") if entry["kind"] == "request"]


def test_s10_s11_two_ranks_save_and_change_the_lr_when_a_file_asks_for_it(tmp_path: Path):
    """A checkpoint now and half the LR, as the reference rule wants it; then the LR back, a rollback, and a stop."""
    run = tmp_path / "run"
    requests = {3: "checkpoint", 4: "lr=0.5", 6: "lr=1", 8: "rollback", 10: "stop"}
    plain = run_pooled(asked, 2, str(tmp_path / "plain"), {})
    outcomes = run_pooled(asked, 2, str(run), requests)
    (one, lrs), (two, other_lrs) = outcomes
    assert one.losses() == two.losses() and lrs == other_lrs and one.leaves.keys() == two.leaves.keys()
    # LR: halved for steps 4 and 5, and the schedule itself goes on as if nothing had been
    steps = [r.step for r in one.reports]
    usual = {r.step: r.lr for r in plain[0][0].reports}
    ratio = [(step, lr / usual[step]) for step, lr in zip(steps, lrs, strict=True)]
    assert ratio[:7] == [(1, 1), (2, 1), (3, 1), (4, 0.5), (5, 0.5), (6, 1), (7, 1)]
    # rollback at step 8: to the newest snapshot, on both ranks, and the steps are taken again
    assert (
        steps == [1, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9, 10] and one.counters["rollbacks"] == two.counters["rollbacks"] == 1
    )
    assert [i.action for i in one.incidents] == ["rollback"] and one.incidents[0].target_step == 6
    # stop: both ranks leave at step 10, saved
    assert "Preempted: asked to leave at step 10; the state is saved" in one.error == two.error
    saved = sorted(p.name for p in (run / "checkpoints").iterdir() if p.name.startswith("step"))
    told = [(a["action"], a["outcome"], a["step"], a["reason"]) for a in answers(run)]
    assert told == [
        ("checkpoint", "done", 3, "test"),
        ("lr", "done", 4, "test"),
        ("lr", "done", 6, "test"),
        ("rollback", "done", 8, "test"),
        ("stop", "done", 10, "test"),
    ], saved
    assert "the state of step 3 is saved" in answers(run)[0]["message"]
    assert any(entry["kind"] == "checkpoint" and entry["step"] == 3 for entry in read_journal(run / "journal.jsonl"))
    assert not list((run / "requests").glob("*.json")) and len(list((run / "requests/done").glob("*.json"))) == 5


def test_s11_a_request_that_cannot_be_granted_is_answered_and_training_goes_on(tmp_path: Path):
    run = tmp_path / "run"
    job = JOB.with_(steps=4, snapshot=SnapshotConfig(every=0), checkpoint=CheckpointConfig(every=0))
    first, second = run_pooled(asked, 2, str(run), {2: "rollback=1", 3: "note=new data from here"}, job)
    assert first[0].applied == second[0].applied == 4 and first[0].error == second[0].error == ""
    assert [(a["action"], a["outcome"], a["message"]) for a in answers(run)] == [
        ("rollback", "failed", "no snapshot lies safely before step 1"),
        ("note", "done", "new data from here"),
    ]
    assert len(read_steps(run / "steps.jsonl")) == 4


def test_s11_the_lr_factor_outlives_a_restart_and_a_late_request_does_not(tmp_path: Path):
    run = tmp_path / "run"
    job = Job(steps=4, checkpoint=CheckpointConfig(every=2))
    run_pooled(asked, 2, str(run), {2: "lr=0.25"}, job)
    write_request(run, parse_action("stop"))  # after the end: meant for the first start
    (one, lrs), (two, _) = run_pooled(asked, 2, str(run), {}, job.with_(steps=6))
    usual = {r.step: r.lr for r in run_pooled(asked, 2, str(tmp_path / "plain"), {}, job.with_(steps=6))[0][0].reports}
    assert [r.step for r in one.reports] == [5, 6] and one.applied == two.applied == 6
    assert [lr / usual[r.step] for r, lr in zip(one.reports, lrs, strict=True)] == [0.25, 0.25]
    assert [(a["action"], a["outcome"]) for a in answers(run)] == [("lr", "done"), ("stop", "refused")]


def test_s11_an_unguarded_run_refuses(tmp_path: Path):
    from resilient.policies import PolicyConfig

    job = JOB.with_(steps=3, policy=PolicyConfig(name="off", mode="off"))
    run = tmp_path / "run"

    def tweak(guard: Guard, engine: Any) -> None:
        write_request(run, parse_action("stop"))

    outcome = run_job(job.with_(run_dir=str(run)), 0, 1, tweak=tweak)
    assert outcome.applied == 3
    assert [(a["action"], a["outcome"]) for a in answers(run)] == [("stop", "refused")]


# -- the command -------------------------------------------------------------------------------------------------------


def test_s11_the_command_writes_waits_and_reports(desk: Desk, capsys: pytest.CaptureFixture[str]):
    assert command.main([str(desk.run), "checkpoint", "--reason", "before the switch is changed"]) == 0
    assert command.main([str(desk.run), "nonsense"]) == 64
    assert command.main([str(desk.run / "nowhere"), "stop"]) == 64
    assert command.main([str(desk.run), "stop", "--wait", "0.05"]) == 2
    assert "no answer" in capsys.readouterr().err
    desk.desk.refuse_all("not now", 7)
    assert [a["action"] for a in desk.told] == ["checkpoint", "stop"]
    assert desk.told[0]["reason"] == "before the switch is changed" and "@" in desk.told[0]["who"]


def test_s11_the_command_imports_no_framework(desk: Desk):
    script = (
        "import sys; from resilient.cli.main import main\n"
        f"code = main(['request', {str(desk.run)!r}, 'note=hello'])\n"
        "print(code, sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'deepspeed', 'hydra', 'omegaconf'}))"
    )
    code, out, err = finish(start(["-c", script], desk.run))
    assert code == 0 and out.splitlines()[-1] == "0 []", err
    assert desk.look().flags == 0 and desk.told[0]["message"] == "hello"
