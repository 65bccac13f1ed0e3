"""What kind of log a growing file is taken for (S11): the same finder as for a finished one, more careful with one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.logs.live import DocumentSource, TextSource, open_source
from resilient.logs.open import open_log

_STATE = '{"log_history": [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]}'
_NESTED = '{"step": 1, "loss": 2.5, "norms": {"head": 1.0}}'


@pytest.mark.parametrize(
    ("content", "document"),
    [
        (_STATE.replace("[{", "[\n{"), True),  # open at the end of its first line
        (f"[{_NESTED},\n{_NESTED}]", True),
        (f"{_NESTED}\n", False),  # more such lines may follow
        (_NESTED[:30], False),  # torn: the rest of the line is on its way
        (f"{_NESTED}\n{_NESTED}\n", False),
        ("step 1 loss 2.5\n", False),
    ],
)
def test_s11_a_growing_file_is_no_document_because_of_one_line(content: str, document: bool, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(content)
    source = open_source(path)
    assert source is not None
    assert isinstance(source, DocumentSource if document else TextSource)
    source.close()


def test_s11_a_finished_file_is_taken_for_what_open_log_takes_it_for(tmp_path: Path) -> None:
    """`watch --once` and `analyze` of a document in one line, as `json.dump` leaves it, whatever its name."""
    path = tmp_path / "state.txt"
    path.write_text(_STATE)
    source = open_source(path, patient=False)
    assert isinstance(source, DocumentSource)
    assert [row.step for row in source.poll()] == [row.step for row in open_log(path).rows()] == [1, 2]
