"""`resilient analyze`: exit codes, strict JSON, pictures, and what it must not cost."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resilient.cli.main import main
from tests.cli.commands import finish, start
from tests.logs.curves import falling, norms


def write_csv(path: Path, loss: Any, norm: Any) -> Path:
    lines = ["step,loss,grad_norm", *(f"{i},{a:.6g},{b:.6g}" for i, (a, b) in enumerate(zip(loss, norm, strict=True)))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "healthy.csv", falling(400), norms(400))


@pytest.fixture
def spiked(tmp_path: Path) -> Path:
    loss = falling(400)
    loss[200:212] += 3.0
    return write_csv(tmp_path / "spiked.csv", loss, norms(400))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    loss, norm = falling(400), norms(400)
    loss[300:] += 5.0
    norm[295:] *= 40.0
    loss[390:] = norm[390:] = math.nan
    return write_csv(tmp_path / "broken.csv", loss, norm)


def run(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["analyze", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_exit_codes(healthy: Path, spiked: Path, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 healthy, 1 warnings, 2 a broken run."""
    for path, expected in ((healthy, 0), (spiked, 1), (broken, 2)):
        code, out, err = run(path, capsys=capsys)
        assert (code, err) == (expected, "")
        assert out.startswith(f"{path}: ") and "verdict: " in out


def test_json_of_one_file_is_an_object(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(broken, "--format", "json", capsys=capsys)
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 2
    assert found["file"] == str(broken) and found["rows"] == 400 and found["verdict"] == "nonfinite"
    assert {"loss", "grad_norm"} <= set(found["signals"])
    assert abs(found["blowup_step"] - 300) <= 2 and 290 <= found["onset_step"] <= 300
    assert found["first_alarm_step"] == found["alarms"][0]["step"] <= 300
    assert {"step", "severity", "signal", "statistic", "score", "onset_step", "message"} <= set(found["alarms"][0])
    assert {"cause", "confidence", "evidence", "remedies", "rows"} <= set(found["causes"][0])
    assert any(alarm["score"] is None for alarm in found["alarms"])


def test_several_files_are_a_list_and_the_worst_counts(
    healthy: Path, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(broken, healthy, "--format", "json", capsys=capsys)
    assert code == 2
    assert [found["verdict"] for found in json.loads(out)] == ["nonfinite", "healthy"]


def test_a_file_that_cannot_be_read_stops_no_other(
    healthy: Path, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 at the end; each has its own line on stderr; a list stays a list."""
    picture = tmp_path / "picture.bin"
    picture.write_bytes(bytes(range(256)) * 40)
    code, out, err = run(tmp_path / "gone.csv", picture, broken, healthy, "--format", "json", capsys=capsys)
    assert code == 64
    assert len(json.loads(out)) == 2
    assert len(err.splitlines()) == 2 and "gone.csv" in err and "picture.bin" in err
    assert run(tmp_path / "gone.csv", "--format", "json", capsys=capsys)[:2] == (64, "")


def test_page_and_picture(healthy: Path, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "curves.png"
    code, out, _ = run(broken, healthy, "--html", page, "--plot", picture, capsys=capsys)
    assert code == 2 and f"page: {page}" in out and f"picture: {picture}" in out
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_said_before_the_work(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(healthy, "--plot", tmp_path / "no" / "x.png", capsys=capsys)
    assert (code, out) == (64, "") and "--plot: there is no folder" in err
    assert run(healthy, "--format", "xml", capsys=capsys)[0] == 64


def test_our_own_log_is_read_with_its_attempts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rollback in steps.jsonl: the step goes back, the attempts go on, and the spike that was undone counts once."""
    lines, attempt = [], 0

    def attempt_step(step: int, loss: float | None, applied: bool = True) -> None:
        nonlocal attempt
        attempt += 1
        line = {
            "step": step,
            "attempt": attempt,
            "applied": applied,
            "loss": loss,
            "grad_norm": 0.5 + 0.01 * (step % 7),
        }
        lines.append({**line, "lr": 1e-3, "loss_scale": 1.0, **({} if loss is not None else {"nonfinite": ["loss"]})})

    loss = falling(200)
    for step in range(1, 121):
        attempt_step(step, float(loss[step]))
    attempt_step(121, None, applied=False)
    attempt_step(121, 9.0, applied=False)
    for step in range(101, 200):
        attempt_step(step, float(loss[step]))
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = run(path, "--format", "json", capsys=capsys)
    found = json.loads(out)
    assert found["verdict"] == "healthy" and found["restarts"] == [{"after": 120, "at": 101}]
    assert code == 1 and {alarm["step"] for alarm in found["alarms"]} == {121}


def test_no_torch_on_this_path(broken: Path, tmp_path: Path) -> None:
    """Nor Hydra, nor rich; matplotlib only when something is drawn."""
    script = (
        "import json, sys\n"
        "from resilient.cli.main import main\n"
        f"code = main(['analyze', {str(broken)!r}, '--format', 'json'])\n"
        "heavy = {'torch', 'deepspeed', 'hydra', 'omegaconf', 'rich', 'matplotlib'}\n"
        "print(json.dumps([code, sorted(heavy & {m.split('.')[0] for m in sys.modules})]), file=sys.stderr)\n"
        f"main(['analyze', {str(broken)!r}, '--html', {str(tmp_path / 'page.html')!r}])\n"
        "print(json.dumps(sorted({'torch', 'deepspeed', 'hydra'} & set(sys.modules))), file=sys.stderr)\n"
    )
    code, _, err = finish(start(["-c", script], tmp_path))
    assert code == 0, err
    assert [json.loads(line) for line in err.splitlines()] == [[2, []], []]


def test_first_output_comes_in_under_a_second(tmp_path: Path) -> None:
    """10,000 rows, interpreter start included. The best of five: this machine has other work too."""
    path = write_csv(tmp_path / "long.csv", falling(10_000), norms(10_000))
    waits = []
    for _ in range(5):
        began = time.perf_counter()
        process = start(["-m", "resilient", "analyze", str(path)], tmp_path)
        assert process.stdout is not None
        first = process.stdout.readline()
        waits.append(time.perf_counter() - began)
        code, out, err = finish(process)
        assert first.startswith(str(path)) and "verdict: healthy" in out, err
        assert code in (0, 1)
        if waits[-1] < 1.0:
            break
    assert min(waits) < 1.0


def test_a_terminal_without_utf_8_gets_ascii(broken: Path, tmp_path: Path) -> None:
    process = start(
        ["-m", "resilient", "analyze", str(broken)], tmp_path, {"PYTHONIOENCODING": "ascii", "COLUMNS": "90"}
    )
    code, out, err = finish(process)
    assert code == 2, err
    assert out.isascii() and "NONFINITE" in out and "*" in out


def test_a_reader_that_has_seen_enough_is_no_error(broken: Path, tmp_path: Path) -> None:
    """`resilient analyze FILE | head -1`."""
    process = start(["-m", "resilient", "analyze", str(broken)], tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert (code, err or "") == (2, "")


def test_it_is_a_command() -> None:
    code, out, _ = finish(start(["-m", "resilient", "--help"], Path(sys.prefix)))
    assert code == 0 and "analyze" in out
