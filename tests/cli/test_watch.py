"""`resilient watch` (S11): outside the run, on files that grow, with real writers, hooks and servers."""

from __future__ import annotations

import io
import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from resilient.cli.hooks import Command, Hooks, Webhook
from resilient.cli.watch import Watch, main
from resilient.cli.watch_view import JsonLines, LiveView, PlainLines
from resilient.coordinator.requests import parse_action
from resilient.errors import ConfigError
from resilient.logs.analysis import Analyzer
from resilient.logs.events import masked_crc
from resilient.logs.open import open_log
from tests.cli.commands import finish, start


def points(count: int, bad: Mapping[int, float] = {}) -> list[dict[str, float]]:
    """A calm run, one dict a step from 1 on, with other losses at some steps."""
    noise = random.Random(3)
    return [
        {
            "step": step,
            "loss": bad.get(step, 2.0 + math.exp(-step / 50) + noise.gauss(0, 0.01)),
            "grad_norm": 1.0 + noise.gauss(0, 0.05),
            "lr": 1e-3,
        }
        for step in range(1, count + 1)
    ]


def lines(rows: list[dict[str, float]]) -> list[str]:
    return [json.dumps(row) + "\n" for row in rows]


SPIKED = lines(points(220, {150: 900.0, 151: 950.0, 180: math.nan}))


class Heard(JsonLines):
    """Everything that was shown."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []
        self.said: list[str] = []

    def _print(self, record: Mapping[str, Any]) -> None:
        self.shown.append(dict(record))

    def say(self, text: str) -> None:
        self.said.append(text)

    def alarms(self) -> list[tuple[Any, ...]]:
        return [(r["step"], r["severity"], r["signal"], r["statistic"]) for r in self.shown if r["kind"] == "alarm"]


def watching(path: Path, *hooks: Any, request: str = "", **options: Any) -> tuple[Watch, Heard, Hooks]:
    heard = Heard()
    caller = Hooks(list(hooks), heard.say)
    asked = parse_action(request) if request else None
    return Watch(path, heard, caller, asked, **options), heard, caller


def analyzed(path: Path) -> list[tuple[Any, ...]]:
    analyzer = Analyzer()
    for row in open_log(path).rows():
        analyzer.add(row)
    return [(a.step, a.severity, a.signal, a.statistic) for a in analyzer.alarms]


# -- what it sees -------------------------------------------------------------------------------------------------------


def test_s11_a_growing_file_read_in_any_pieces_gives_the_alarms_of_the_finished_one(tmp_path: Path):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "train.jsonl"
    whole.write_text("".join(SPIKED))
    expected = analyzed(whole)
    assert {step for step, *_ in expected} >= {151, 180}  # 150 is one odd step; 151 confirms it
    pieces = random.Random(1)
    watch, heard, _ = watching(path)
    assert not watch.look() and heard.said == [f"{path} is not there yet; waiting"]
    text, at = "".join(SPIKED), 0
    while at < len(text):
        size = pieces.choice((1, 7, 100, 3000))
        with open(path, "a") as file:
            file.write(text[at : at + size])
        at += size
        watch.look()
    assert heard.alarms() == expected
    assert watch.finish() in (1, 2) and heard.shown[-1]["kind"] == "end" and heard.shown[-1]["rows"] == len(SPIKED)


def test_s11_a_writer_process_that_rotates_is_followed_until_it_is_idle(tmp_path: Path):
    """Real processes: a writer that is slow, tears its lines and rotates; the command beside it, from before the file."""
    (tmp_path / "source").write_text("".join(SPIKED))
    writer = (
        "import os, time\n"
        "lines = open('source').readlines()\n"
        "for part in range(3):\n"
        "    piece = ''.join(lines[part * len(lines) // 3 : (part + 1) * len(lines) // 3])\n"
        "    with open('train.jsonl', 'a') as file:\n"
        "        for at in range(0, len(piece), 1000):\n"
        "            file.write(piece[at : at + 1000]); file.flush(); time.sleep(0.005)\n"
        "    time.sleep(0.4)\n"
        "    if part < 2: os.rename('train.jsonl', f'train.jsonl.{part}')\n"
    )
    words = ["watch", "train.jsonl", "--interval", "0.05", "--until-idle", "2", "--format", "json"]
    watcher = start(["-m", "resilient.cli.main", *words], tmp_path)
    subprocess.run([sys.executable, "-c", writer], cwd=tmp_path, check=True, timeout=60)
    code, out, err = finish(watcher, 60)
    records = [json.loads(line) for line in out.splitlines()]
    found = [(r["step"], r["severity"], r["signal"], r["statistic"]) for r in records if r["kind"] == "alarm"]
    assert found == analyzed(tmp_path / "source") and found, err
    assert records[-1]["kind"] == "end" and code == records[-1]["exit_code"] in (1, 2)
    assert all(r["level"] in "ABCDE" for r in records if r["kind"] == "level")


def test_s11_a_json_document_that_is_written_anew_tells_each_row_once(tmp_path: Path):
    path = tmp_path / "trainer_state.json"

    def save(rows: list[dict[str, float]]) -> None:
        log = [{"epoch": 0.1, "learning_rate": r["lr"], **{k: v for k, v in r.items() if k != "lr"}} for r in rows]
        state = {"global_step": int(rows[-1]["step"]), "best_metric": None, "log_history": log}
        (tmp_path / "partial").write_text(json.dumps(state, indent=2))
        os.replace(tmp_path / "partial", path)

    rows = points(220, {150: 900.0, 151: 950.0})
    watch, heard, _ = watching(path)
    for count in (40, 40, 100, 160, 220):
        save(rows[:count])
        watch.look()
    path_text = path.read_text()
    path.write_text(path_text[: len(path_text) // 2])  # half written: neither lost nor told twice
    watch.look()
    path.unlink()
    watch.look()
    assert "cannot be read now" in heard.said[-1]
    path.write_text(path_text)
    watch.look()
    watch.finish()
    assert heard.shown[-1]["rows"] == 220
    assert heard.alarms() == analyzed(path) and heard.alarms()


def event(step: int, tag: str, value: float) -> bytes:
    """A TensorBoard scalar, framed as a TFRecord."""
    scalar = b"\x0a" + bytes([len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(scalar)]) + scalar
    number = bytes([step & 0x7F | 0x80, step >> 7])
    data = b"\x10" + number + b"\x2a" + bytes([len(summary)]) + summary
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def test_s11_event_files_are_read_again_as_they_grow_and_a_step_is_told_when_it_is_whole(tmp_path: Path):
    folder = tmp_path / "tb"
    folder.mkdir()
    watch, heard, _ = watching(folder)
    assert not watch.look()
    told = []
    with open(folder / "events.out.tfevents.1.host", "wb", buffering=0) as file:
        for row in points(60):
            record = event(int(row["step"]), "train/loss", row["loss"])
            file.write(record[:20])
            watch.look()
            file.write(record[20:])
            watch.look()
            file.write(event(int(row["step"]), "train/grad_norm", row["grad_norm"]))
            told.append(watch.analyzer.rows)
    assert told == list(range(60))  # the newest step may still lack a signal
    watch.look()
    assert watch.finish() == 0 and heard.shown[-1]["rows"] == 60
    assert set(watch.result().signals) == {"loss", "grad_norm"}


def test_s11_once_reads_what_is_there_with_its_last_torn_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "calm.jsonl"
    path.write_text("".join(lines(points(100))).rstrip("\n"))
    assert main([str(path), "--once", "--format", "json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records[-1]["rows"] == 100 and records[-1]["last_step"] == 100
    assert not [r for r in records if r["kind"] == "alarm"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["absent", "--once"],
        ["absent", "--wait", "0"],
        ["prose.txt", "--once"],
        ["x", "--until-idle", "-1"],
        ["x", "--once", "--until-idle", "3"],
        ["x", "--on-alarm", "unclosed 'quote"],
        ["x", "--shell"],
        ["x", "--webhook", "ftp://host/x"],
        ["x", "--on-alarm-request", "explode"],
    ],
)
def test_s11_what_cannot_be_watched_is_64(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prose.txt").write_text("It was the best of times,\nit was the worst of times.\n")
    try:
        assert main(arguments) == 64
    except SystemExit as end:
        assert end.code == 64


def test_s11_ctrl_c_ends_it_cleanly(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("".join(SPIKED))
    words = ["-m", "resilient.cli.main", "watch", "train.jsonl", "--interval", "30", "--format", "json"]
    watcher = start(words, tmp_path)
    assert watcher.stdout is not None
    watcher.stdout.readline()  # it is at work
    watcher.send_signal(signal.SIGINT)
    code, _, err = finish(watcher, 30)
    assert code == 130 and "Traceback" not in err


def test_s11_it_imports_no_framework(tmp_path: Path):
    (tmp_path / "calm.jsonl").write_text("".join(lines(points(50))))
    script = (
        "import sys; from resilient.cli.main import main\n"
        "code = main(['watch', 'calm.jsonl', '--once'])\n"
        "print(code, sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'deepspeed', 'hydra', 'omegaconf'}))"
    )
    code, out, err = finish(start(["-c", script], tmp_path))
    assert code == 0 and out.splitlines()[-1] == "0 []", err
    assert "watching calm.jsonl" in out


def test_s11_on_a_terminal_the_level_stands_below_the_alarms(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(SPIKED))
    screen = io.StringIO()
    view = LiveView(Console(file=screen, force_terminal=True, width=100, highlight=False))
    with view:
        watch = Watch(path, view, Hooks([], view.say))
        while watch.look():
            pass
        watch.finish()
    text = screen.getvalue()
    assert "step 150" in text and "level" in text and "grad_norm" in text and "220 rows" in text


# -- a run of ours -------------------------------------------------------------------------------------------------------


class RunFiles:
    """A run directory as a run leaves it, written by hand: what counts is when which file appears."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.step = 0
        self.begin(0)

    def begin(self, generation: int) -> None:
        self.generation = generation
        for name in ("summary", "verdict"):
            if (self.path / f"{name}.json").exists():
                (self.path / f"{name}.json").rename(self.path / f"{name}.{generation - 1}.json")
        (self.path / "generation.json").write_text(json.dumps({"generation": generation}))

    def steps(self, count: int, loss: float | None = 2.0) -> None:
        with open(self.path / "steps.jsonl", "a") as file:
            for _ in range(count):
                self.step += 1
                wiggle = 0.01 * math.sin(self.step * 1.7)
                row: dict[str, Any] = {"step": self.step, "attempt": self.step, "applied": True, "action": "apply"}
                row |= {"loss": None if loss is None else loss + wiggle, "grad_norm": 1.0 + wiggle, "lr": 1e-3}
                row |= {"loss_scale": 1.0, "tokens": 100.0, "time_s": 0.1, "generation": self.generation, "time": 1.0}
                if loss is None:
                    row["nonfinite"] = ["loss"]
                file.write(json.dumps(row) + "\n")

    def end(self, name: str, **fields: Any) -> None:
        (self.path / f"{name}.json").write_text(json.dumps({"generation": self.generation, **fields}))


def test_s11_a_run_is_followed_over_its_generations_until_it_ends(tmp_path: Path):
    watch, heard, _ = watching(tmp_path / "run")
    assert not watch.look()
    run = RunFiles(tmp_path / "run")
    assert not watch.look() and not watch.ended
    run.steps(40)
    assert watch.look() and not watch.ended
    run.end("verdict", code=75, reason="a rank died")
    run.end("summary", status="failed")
    assert not watch.look() and not watch.ended  # the supervisor starts it again
    run.begin(1)
    run.steps(5)
    with open(run.path / "journal.jsonl", "w") as journal:
        journal.write('{"kind": "checkpoint", "step": 3}\n{"kind": "incident", "step": 4, "action": "skip"}\n')
        alarm = {"step": 4, "severity": "warn", "signal": "local_grad_norm", "statistic": "ranks", "score": 30.0}
        alarm |= {
            "onset_step": 4,
            "onset_confidence": 1.0,
            "message": "off",
            "ranks": [1],
            "time": 3.0,
            "generation": 1,
        }
        journal.write(json.dumps({"kind": "alarm", **alarm}) + "\n")
        journal.write(json.dumps({"kind": "alarm", **alarm, "statistic": "point", "signal": "loss"}) + '\n{"ki')
    run.end("summary", status="done")
    assert watch.look() and not watch.ended  # what was written before the end is read first
    assert not watch.look() and watch.ended
    assert heard.alarms() == [(4, "warn", "local_grad_norm", "ranks")]  # the others are found from the steps
    assert watch.finish() == 1
    assert heard.shown[-1]["status"] == "done" and heard.shown[-1]["rows"] == 45
    assert [r["event"]["kind"] for r in heard.shown if r["kind"] == "event"] == ["incident"]


@pytest.mark.parametrize(("end", "code"), [("done", 0), ("preempted", 0), ("stopped", 2), ("failed", 2)])
def test_s11_the_exit_code_says_how_the_run_ended(tmp_path: Path, end: str, code: int):
    run = RunFiles(tmp_path / "run")
    run.steps(60)
    run.end("summary", status=end)
    assert main([str(run.path), "--interval", "0.05", "--format", "json"]) == code


def test_s11_a_new_alarm_asks_the_live_run_and_an_old_one_does_not(tmp_path: Path):
    run = RunFiles(tmp_path / "run")
    run.steps(60)
    run.steps(1, loss=None)
    run.steps(5)
    watch, heard, _ = watching(run.path, request="checkpoint", clock=iter([100.0, 130.0, 200.0]).__next__)
    while watch.look():
        pass
    assert len(heard.alarms()) >= 1 and not (run.path / "requests").exists()
    for _ in range(3):  # the second comes half a minute after the first: one request is enough
        run.steps(30)
        run.steps(1, loss=None)
        watch.look()
    asked = [json.loads(path.read_text()) for path in sorted((run.path / "requests").glob("*.json"))]
    assert [a["action"] for a in asked] == ["checkpoint", "checkpoint"]
    assert asked[0]["generation"] == 0 and f"alarm at step {run.step - 62}" in asked[0]["reason"]


# -- calls for help ------------------------------------------------------------------------------------------------------

ALARM = {
    "step": 7,
    "severity": "act",
    "signal": "loss",
    "statistic": "point",
    "score": None,
    "onset_step": 5,
    "message": "loss 9 $(touch hacked); `touch hacked`",
    "ranks": [0, 3],
    "source": "runs/x",
}


def test_s11_a_command_gets_the_alarm_and_no_shell_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    script = "import json, os, sys; json.dump([dict(os.environ), json.load(sys.stdin), sys.argv[1:]], open('got', 'w'))"
    assert Command(f'{sys.executable} -c "{script}" "$HOME; touch hacked"')(ALARM) == ""
    environment, given, words = json.loads((tmp_path / "got").read_text())
    assert given == ALARM and words == ["$HOME; touch hacked"]
    assert environment["RESILIENT_ALARM_STEP"] == "7" and environment["RESILIENT_ALARM_RANKS"] == "0,3"
    assert environment["RESILIENT_ALARM_SCORE"] == "" and environment["RESILIENT_ALARM_MESSAGE"] == ALARM["message"]
    assert (
        Command('echo "$RESILIENT_ALARM_STEP $RESILIENT_ALARM_MESSAGE"', shell=True)(ALARM) == f"7 {ALARM['message']}"
    )
    assert not (tmp_path / "hacked").exists()


def test_s11_a_hook_that_fails_or_hangs_is_reported_and_ended(tmp_path: Path):
    with pytest.raises(OSError, match="exit code 3: no luck"):
        Command("echo no luck; exit 3", shell=True)(ALARM)
    with pytest.raises(OSError, match=r"still running after 0\.2 s"):
        Command(f"echo $$ > {tmp_path}/pid; sleep 60 & wait", shell=True, timeout_s=0.2)(ALARM)
    leader = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(leader, 0)
    said: list[str] = []
    hooks = Hooks([Command("/does/not/exist"), Command("echo told", shell=True)], said.append)
    assert hooks.wants(ALARM)
    hooks.call(ALARM)
    hooks.close()
    assert len(said) == 2 and "--on-alarm: told" in said and any("failed for step 7" in line for line in said)


def test_s11_an_alarm_is_passed_on_once_and_no_more_than_so_many_a_minute():
    now = [0.0]
    said: list[str] = []
    hooks = Hooks([], said.append, severity="act", per_minute=2, clock=lambda: now[0])
    assert not hooks.wants({**ALARM, "severity": "warn"})
    assert hooks.wants(ALARM) and not hooks.wants(ALARM)
    assert hooks.wants({**ALARM, "step": 8}) and not hooks.wants({**ALARM, "step": 9})
    now[0] = 61.0
    assert hooks.wants({**ALARM, "step": 10}) and not hooks.wants({**ALARM, "step": 9})
    hooks.close()
    assert said == ["1 alarms were not passed on: more than 2 a minute"]


class Server:
    """A real HTTP server that gives the answers it was told to give."""

    def __init__(self, answers: list[int]) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.got.append((self.path, json.loads(body)))
                self.send_response(answers[min(len(server.got), len(answers)) - 1])
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/hooks/s3cret?token=s3cret"


@pytest.mark.parametrize(
    ("answers", "calls", "problem"), [([200], 1, ""), ([503, 429, 200], 3, ""), ([500], 3, "500"), ([403], 1, "403")]
)
def test_s11_a_webhook_gets_json_is_tried_again_and_keeps_its_secret(answers: list[int], calls: int, problem: str):
    said: list[str] = []
    pauses: list[float] = []
    with Server(answers) as server:
        hooks = Hooks([Webhook(server.url(), timeout_s=5, pause=pauses.append)], said.append)
        hooks.call(ALARM)
        hooks.close()
    assert [path for path, _ in server.got] == ["/hooks/s3cret?token=s3cret"] * calls and len(pauses) == calls - 1
    body = server.got[0][1]
    assert {k: v for k, v in body.items() if k != "text"} == ALARM
    assert body["text"].startswith("resilient: act alarm at step 7 of runs/x: loss 9")
    assert (problem in said[0] and "127.0.0.1" in said[0]) if problem else not said
    assert "s3cret" not in "".join(said)


def test_s11_a_webhook_that_nobody_answers_keeps_its_secret():
    with Server([200]) as server:
        url = server.url()
    with pytest.raises(OSError) as caught:
        Webhook(url, timeout_s=2, pause=lambda s: None)(ALARM)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        Webhook("https:///s3cret")
    assert "s3cret" not in str(refused.value)


def test_s11_the_command_line_calls_once_per_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(SPIKED))
    calls = tmp_path / "calls"
    calls.mkdir()
    hook = f'cat > "$(mktemp {calls}/XXXXXX)"'
    arguments = [str(path), "--once", "--format", "json", "--shell", "--per-minute", "1000"]
    main([*arguments, "--on-alarm", hook])
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = [json.loads(call.read_text()) for call in calls.iterdir()]
    key = ("step", "severity", "signal", "statistic")
    assert sorted(tuple(t[k] for k in key) for t in told) == sorted(
        {tuple(s[k] for k in key) for s in shown if s["kind"] == "alarm"}
    )
    main([*arguments, "--on-alarm", hook, "--new-only"])
    assert len(list(calls.iterdir())) == len(told) > 0


def test_s11_plain_lines_say_what_happened():
    screen = io.StringIO()
    plain = PlainLines(Console(file=screen, width=200))
    plain.alarm(ALARM)
    plain.event({"kind": "request", "id": "1", "action": "stop", "outcome": "refused", "message": "no"})
    assert screen.getvalue().splitlines() == [
        f"! step 7 act: {ALARM['message']} on rank 0, 3; began at step 5",
        "the run: request 1 stop: refused: no",
    ]
