"""What a person sees of an analysis: text with curves, one page, one picture."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from resilient.errors import ConfigError
from resilient.logs.analysis import Analysis, analyze
from resilient.logs.page import analysis_page
from resilient.logs.plot import analysis_figure, write_png
from resilient.logs.rows import Row
from resilient.logs.show import charts, text_report
from tests.logs.curves import Rows, falling, norms, rows


@pytest.fixture(scope="module")
def broken() -> Analysis:
    """Gradient first, then the loss, then NaN."""
    loss, norm = falling(600), norms(600)
    norm[470:] *= 4.0 * np.exp(np.linspace(0, 12, 130))
    loss[500:] += np.linspace(0.6, 6, 100)
    loss[590:] = norm[590:] = math.nan
    log = Rows(rows(loss, norm), path="made <up>.csv")
    log.remarks.unread["update_norm"] = "0.000 throughout: not measured"
    log.remarks.notes.append("The file has no step counter: rows are counted.")
    return analyze(log)


def test_the_text_says_what_to_do(broken: Analysis) -> None:
    text = text_report(broken, width=100)
    assert text.startswith("verdict: NONFINITE: ")
    assert f"began at step {broken.onset_step}" in text and f"blew up at step {broken.blowup_step}" in text
    assert "steps before the blow-up" in text
    assert "likely causes" in text and "     - " in text and "level at the end: " in text
    assert "not read: update_norm: 0.000 throughout: not measured" in text
    assert "note: The file has no step counter" in text
    assert f"alarms: {len(broken.alarms)}" in text and "... and" in text
    assert max(map(len, text.split("\n"))) <= 100


def test_curves_are_braille_and_marked(broken: Analysis) -> None:
    lines = charts(broken, 100, unicode=True)
    assert any("\u2800" <= c <= "\u28ff" for line in lines for c in line)
    marks = next(line for line in lines if "o began" in line or "X blew up" in line)
    assert "^ alarm" in marks and "! not finite" in marks
    row = lines[lines.index(marks) - 1]
    assert row.rindex("X") < row.rindex("!") and "o" in row and row.index("o") < row.index("X")


def test_a_curve_falls_from_top_left_to_bottom_right() -> None:
    lines = charts(analyze(Rows(rows(np.linspace(9.0, 2.0, 400)))), 60, unicode=False)
    left = [line[11:13] for line in lines[:7]]
    assert left[0].strip("| ") and not left[-1].strip("| ")
    assert len(lines[6]) > len(lines[0])
    assert lines[0].split()[0] == "9" and lines[6].split()[0] == "2"


@pytest.mark.parametrize("width", [40, 80, 250])
def test_without_utf_8_the_text_is_ascii(broken: Analysis, width: int) -> None:
    text = text_report(broken, width=width, unicode=False)
    assert text.isascii() and "?" not in text and "*" in text
    assert all(len(line) <= width for line in text.split("\n") if " " in line.strip())


@pytest.mark.parametrize(
    "made",
    [[], rows([1.0]), rows([math.nan] * 50), rows([0.0] * 50), [Row(5, {"grad_norm": 1.0})] * 40],
    ids=["empty", "one row", "all nan", "zeros", "one step"],
)
def test_nothing_much_to_draw(made: list[Row]) -> None:
    found = analyze(Rows(made))
    assert text_report(found).startswith("verdict: ")
    analysis_figure([found])


def test_the_page_stands_alone_and_escapes(broken: Analysis) -> None:
    page = analysis_page([broken])
    assert not re.search(r"\bsrc=|https?://|<script|<link|url\((?!#)", page)
    assert "made &lt;up&gt;.csv" in page and "made <up>" not in page
    assert "<svg" in page
    assert '<span class="chip failed">nonfinite</span>' in page
    assert all(report.detail.split(",")[0] in page for report in broken.causes[:2])


def test_several_files_on_one_page_and_picture(broken: Analysis, tmp_path: Path) -> None:
    healthy = analyze(Rows(rows(falling(300)), path="other.csv"))
    page = analysis_page([broken, healthy])
    assert page.count("<svg") == 2 and "2 logs" in page and 'chip done">healthy' in page
    write_png([broken, healthy], tmp_path / "two.png")
    data = (tmp_path / "two.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    with pytest.raises(ConfigError, match="at most 12 files"):
        analysis_figure([healthy] * 13)
