"""`resilient report`: one page with every mark, nothing loaded from outside."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from resilient.cli.report import main
from resilient.telemetry.figure import restarts, run_figure, skipped_steps, stretches, thin
from resilient.telemetry.listeners import RunRecorder
from resilient.telemetry.run_data import load_run
from resilient.telemetry.run_directory import RunDirectory
from tests.telemetry.stories import CONFIG, Story, eventful_run, quiet_run


class Page(HTMLParser):
    """Collects tags, references and visible text, and checks that tags nest."""

    VOID = frozenset({"meta", "br", "path", "use", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action")]
        if tag not in ("meta",):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("runs")
    return eventful_run(root), quiet_run(root)


def test_page_is_complete_and_self_contained(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path, twin = runs
    assert main([str(path), "--twin", str(twin)]) == 0
    assert capsys.readouterr().out.strip() == f"report: {path / 'report.html'}"
    text = (path / "report.html").read_text()
    page = Page(text)
    assert page.references, "the figure's own glyphs are referenced"
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<iframe|url\((?!#)", text)
    assert page.tags.count("svg") == 1
    for said in (
        "guarded",
        "ZeRO-1",
        "non-finite loss on rank 1 (forward)",
        "local_grad_norm of rank 0 is 14 times its peers' (31.0 sigmas)",
        "rolled back from step 55 to step 45 on all ranks",
        "data windows 47 to 57 will not be trained on again",
        "start 2: resumed from step 80",
        "undisturbed",
        "+0.0200",
        "Configuration",
        "Environment",
    ):
        assert said in page.text, said


def test_every_kind_of_mark_is_drawn(runs: tuple[Path, Path]) -> None:
    """Alarm, onset, rollback, skipped data, refused attempts, evaluations, restart, outlier rank, twin: as artists."""
    path, twin = runs
    run = load_run(path)
    figure = run_figure(run, load_run(twin))
    loss = figure.axes[0]
    texts = [t.get_text() for ax in figure.axes for t in ax.texts]
    assert {"1", "2-4", "5", "back to 45", "restart", "rank 0"} <= set(texts)
    upright = {line.get_xdata()[0]: line.get_linestyle() for line in loss.get_lines() if _upright(line)}
    assert upright[25] == "-"  # alarm
    assert upright[47] == "--"  # onset of the poisoned window
    assert upright[81] == ":"  # restart
    crosses = [line for line in loss.get_lines() if line.get_marker() == "x"]
    assert sorted(crosses[0].get_xdata()) == [55, 55, 55, 74]
    triangles = [line for line in loss.get_lines() if line.get_marker() == "^"]
    assert list(triangles[0].get_xdata()) == [25]
    diamonds = [line for line in loss.get_lines() if line.get_marker() == "D"]
    assert list(diamonds[0].get_xdata()) == [20, 40, 60, 80, 100, 120]
    spans = [(p.get_x(), p.get_x() + p.get_width()) for p in loss.patches if hasattr(p, "get_width")]
    assert (45, 55) in spans  # rolled back
    assert (46.5, 55.5) in spans  # data skipped
    assert figure.axes[1].get_yscale() == "log"
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert {"alarm", "onset", "rolled back", "data skipped", "refused attempt", "restart", "evaluation"} <= set(legend)


def _upright(line: object) -> bool:
    xdata, ydata = list(line.get_xdata()), list(line.get_ydata())  # type: ignore[attr-defined]
    return len(xdata) == 2 and xdata[0] == xdata[1] and ydata == [0, 1]


def test_what_stands_and_what_was_undone(runs: tuple[Path, Path]) -> None:
    run = load_run(runs[0])
    pieces = stretches(run)
    assert [(p.records[0]["step"], p.records[-1]["step"], p.upto) for p in pieces] == [
        (1, 54, 45),
        (46, 88, 80),
        (81, 120, 120),
    ]
    standing = [r["step"] for p in pieces for r in p.records if r["step"] <= p.upto]
    assert standing == list(range(1, 121))
    assert restarts(run) == [81]
    (rollback,) = [i for i in run.incidents if i["action"] == "rollback"]
    assert skipped_steps(run, rollback) == (47, 55)


def test_json_format_and_out(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main([str(runs[1]), "--out", str(out), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(out)}
    page = Page(out.read_text())
    assert "None: nothing was found" in page.text


def test_unusable_paths_end_with_64(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none")]) == 64
    assert "not a run directory" in capsys.readouterr().err
    assert main([str(runs[0]), "--twin", str(tmp_path)]) == 64
    assert main([str(runs[0]), "--out", str(tmp_path / "no" / "where.html")]) == 64


@pytest.mark.parametrize("steps", [0, 1])
def test_hardly_begun_runs_have_a_page(tmp_path: Path, steps: int) -> None:
    with RunDirectory.open(tmp_path, "short", CONFIG) as run:
        recorder = RunRecorder(run)
        Story([recorder]).healthy(steps)
        recorder.close()
    assert main([str(run.path)]) == 0
    assert "failed" in Page((run.path / "report.html").read_text()).text


def test_a_run_that_only_produced_nan_has_a_page(tmp_path: Path) -> None:
    """The unguarded case of the demo: losses go to NaN and stay there."""
    with RunDirectory.open(tmp_path, "dead", CONFIG) as run:
        recorder = RunRecorder(run)
        story = Story([recorder])
        for _ in range(5):
            story.attempt_step(loss=math.nan, norm=math.inf)
        recorder.close()
    assert main([str(run.path)]) == 0


def test_an_unguarded_run_shows_its_evaluations(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    with RunDirectory.open(tmp_path, "unguarded", CONFIG) as run:
        recorder = RunRecorder(run)
        for step, loss in ((20, 3.9), (40, 6.2)):
            recorder.event("evaluation", {"step": step, "loss": loss})
        recorder.close()
    figure = run_figure(load_run(run.path), load_run(runs[1]))
    diamonds = [line for line in figure.axes[0].get_lines() if line.get_marker() == "D"]
    assert list(diamonds[0].get_ydata()) == [3.9, 6.2]
    assert main([str(run.path), "--twin", str(runs[1])]) == 0
    assert "evaluations only" in Page((run.path / "report.html").read_text()).text


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, "job", {"model": {"name": "<script>alert(1)</script>"}}) as run:
        recorder = RunRecorder(run)
        Story([recorder]).incident("data", "skip", reason="<b>&loss</b>")
        recorder.close()
    assert main([str(run.path)]) == 0
    text = (run.path / "report.html").read_text()
    assert "<script" not in text
    assert "<b>&loss" not in text
    assert "&lt;b&gt;&amp;loss" in text


def test_long_curves_are_thinned_without_losing_a_spike() -> None:
    x = np.arange(200_000.0)
    y = np.sin(x / 500)
    y[123_456] = 50.0
    y[150_000] = np.nan
    tx, ty = thin(x, y, 3000)
    assert len(tx) <= 3000
    assert np.all(np.diff(tx) > 0)
    assert np.nanmax(ty) == 50.0


@pytest.mark.timeout(60)
def test_report_and_compare_need_no_torch(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """They run on a laptop that has the folder and nothing else."""
    code = (
        "import sys\n"
        "for name in ('torch', 'deepspeed', 'hydra', 'omegaconf'): sys.modules[name] = None\n"
        "from resilient.cli import report, compare\n"
        "a, b, out = sys.argv[1:]\n"
        "assert report.main([b, '--out', out + '/r.html']) == 0\n"
        "assert compare.main([a, b, '--html', out + '/c.html']) == 0\n"
    )
    arguments = [sys.executable, "-c", code, *map(str, runs), str(tmp_path)]
    subprocess.run(arguments, check=True, timeout=50, capture_output=True)
