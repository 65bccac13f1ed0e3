"""Following a file that is written, moved, emptied, replaced and unreadable meanwhile (S11). No sleeps: the tests write and
poll in turn; one test has a writer process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.logs import follow
from resilient.logs.follow import LineFollower


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "train.log"


def add(path: Path, text: str | bytes) -> None:
    with open(path, "ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def test_s11_a_file_that_is_not_there_yet_is_waited_for_and_a_torn_last_line_is_held_back(log: Path):
    follower = LineFollower(log)
    assert follower.poll() == [] and not follower.exists and follower.problem == ""
    add(log, "step 1\nstep 2\nste")
    assert follower.poll() == ["step 1", "step 2"] and follower.exists
    assert follower.poll() == []
    add(log, "p 3")
    assert follower.poll() == []
    add(log, "\r\n\nstep 4\n")
    assert follower.poll() == ["step 3", "", "step 4"]
    add(log, "end")
    assert follower.poll() == [] and follower.rest() == ["end"] and follower.rest() == []


def test_s11_a_character_torn_in_the_middle_is_whole_in_its_line(log: Path):
    follower = LineFollower(log)
    add(log, "μ=3".encode()[:1])
    assert follower.poll() == []
    add(log, "μ=3".encode()[1:] + b"\n\xff\n")
    assert follower.poll() == ["μ=3", "\ufffd"]


def test_s11_rotation_by_rename_loses_and_repeats_nothing(log: Path, tmp_path: Path):
    follower = LineFollower(log)
    add(log, "1\n2\n")
    assert follower.poll() == ["1", "2"]
    with open(log, "ab") as old:  # the writer still holds the old file while the new one is there
        add(log, "3\n")
        log.rename(tmp_path / "train.log.1")
        assert follower.poll() == ["3"]  # the name is gone for a moment
        add(log, "5\n")
        old.write(b"4\n")
        old.flush()
        seen = follower.poll()
    for _ in range(3):
        seen += follower.poll()
    assert seen == ["4", "5"] and follower.starts == 2


@pytest.mark.parametrize("after", ["short\n", "as long as what was there before and longer\n" * 40])
def test_s11_copytruncate_reads_the_emptied_file_from_its_top(log: Path, after: str):
    follower = LineFollower(log)
    add(log, "".join(f"line {i}\n" for i in range(30)))
    assert len(follower.poll()) == 30
    shutil.copy(log, log.with_suffix(".1"))
    os.truncate(log, 0)
    add(log, after)
    seen = [line for _ in range(3) for line in follower.poll()]
    assert seen == after.splitlines()


def test_s11_copytruncate_under_a_writer_that_keeps_its_offset_leaves_a_hole_that_is_stepped_over(log: Path):
    follower = LineFollower(log, nul_patience=3)
    with open(log, "wb") as writer:
        writer.write(b"x" * 5_000_000 + b"\nold\n")
        writer.flush()
        assert follower.poll()[-1] == "old"
        os.truncate(log, 0)
        writer.write(b"new\n")
        writer.flush()
    assert os.stat(log).st_size > 5_000_000
    polls = [follower.poll() for _ in range(8)]
    assert [line for lines in polls for line in lines] == ["new"]


def test_s11_nuls_that_are_filled_later_are_waited_for(log: Path):
    """A network file system shows the new size before the bytes: they read as NULs until they are there."""
    follower = LineFollower(log, nul_patience=5)
    add(log, b"step 1 loss 2.5\n" + bytes(32))
    assert follower.poll() == ["step 1 loss 2.5"]
    assert [follower.poll() for _ in range(20)] == [[]] * 20  # at the end of the file: for any time
    with open(log, "r+b") as file:
        file.seek(16 + 16)  # the second page comes first
        file.write(b"step 3 loss 2.3\n")
    assert [follower.poll() for _ in range(4)] == [[]] * 4
    with open(log, "r+b") as file:
        file.seek(16)
        file.write(b"step 2 loss 2.4\n")
    assert follower.poll() == ["step 2 loss 2.4", "step 3 loss 2.3"]
    assert follower.lost == 0


def test_s11_a_whole_new_copy_goes_on_where_the_old_one_ended(log: Path, tmp_path: Path):
    """What rsync does every minute: a new inode under the old name with all of the old content and more."""
    follower = LineFollower(log)
    text = ""
    seen: list[str] = []
    for i in range(6):
        text += f"step {i}\nsta"[: None if i == 5 else -3] if i % 2 else f"step {i}\n"
        copy = tmp_path / f".copy{i}"
        copy.write_text(text)
        os.replace(copy, log)
        seen += follower.poll() + follower.poll()
    assert seen == [f"step {i}" for i in range(6)] and follower.starts == 1


def test_s11_another_file_under_the_name_is_read_from_its_top_and_the_torn_line_is_lost(log: Path, tmp_path: Path):
    follower = LineFollower(log)
    add(log, "old 1\nold 2 is to")
    assert follower.poll() == ["old 1"]
    (tmp_path / "new").write_text("new 1\n")
    os.replace(tmp_path / "new", log)
    assert [line for _ in range(3) for line in follower.poll()] == ["new 1"]
    assert follower.lost == 1


def test_s11_a_view_that_is_too_short_for_a_moment_repeats_nothing(log: Path, monkeypatch: pytest.MonkeyPatch):
    follower = LineFollower(log)
    add(log, "1\n2\n3\n")
    assert follower.poll() == ["1", "2", "3"]
    real = os.pread
    monkeypatch.setattr(follow.os, "pread", lambda file, size, at: real(file, max(min(size, 4 - at), 0), at))
    assert follower.poll() == []  # an old view of the file: four of six bytes
    monkeypatch.setattr(follow.os, "pread", real)
    add(log, "4\n")
    assert follower.poll() == ["4"] and follower.starts == 1


@pytest.mark.parametrize("number", [13, 116, 5])  # EACCES, ESTALE, EIO
def test_s11_a_moment_in_which_it_cannot_be_read_is_told_and_passes(
    log: Path, number: int, monkeypatch: pytest.MonkeyPatch
):
    follower = LineFollower(log)
    add(log, "1\n2 is t")
    assert follower.poll() == ["1"]
    real = os.pread

    def fails(file: int, size: int, at: int) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(follow.os, "pread", fails)
    add(log, "orn\n3\n")
    assert follower.poll() == [] and os.strerror(number) in follower.problem
    monkeypatch.setattr(follow.os, "pread", real)
    assert follower.poll() == ["2 is torn", "3"] and follower.problem == ""


def test_s11_a_long_log_comes_in_pieces_and_what_never_ends_is_no_line(log: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(follow, "_PER_POLL", 4 * follow._CHUNK)
    follower = LineFollower(log)
    add(log, "0123456789abcde\n" * 100_000 + "x" * (2 * follow._LONGEST_LINE) + "\nlast\n")
    seen, polls = [], 0
    while polls == 0 or follower.behind:
        seen += follower.poll()
        polls += 1
    assert polls > 3 and seen.count("0123456789abcde") == 100_000 and seen[-1] == "last"
    assert follower.lost >= 1 and all(len(line) <= follow._LONGEST_LINE for line in seen)


def test_s11_a_writer_process_that_appends_and_rotates(log: Path):
    """Real processes: every line once and in order, however writing and polling meet."""
    script = (
        "import os, sys\n"
        "path, n = sys.argv[1], 0\n"
        "for part in range(4):\n"
        "    with open(path, 'a', buffering=7) as file:\n"
        "        for _ in range(2000):\n"
        "            file.write(f'line {n}\\n'); n += 1\n"
        "    input()\n"  # the reader has seen it: rotating twice between two polls loses what lies between
        "    os.rename(path, f'{path}.{part}')\n"
        "open(path, 'w').write('end\\n')\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(log)], stdin=subprocess.PIPE, text=True)
    assert writer.stdin is not None
    follower, seen = LineFollower(log), []
    try:
        for part in range(4):
            while len(seen) < 2000 * (part + 1):
                seen += follower.poll()
                assert writer.poll() is None or len(seen) >= 2000 * (part + 1)
            writer.stdin.write("\n")
            writer.stdin.flush()
        while seen[-1] != "end":
            seen += follower.poll()
        assert writer.wait(20) == 0
    finally:
        writer.kill()
        writer.wait()
    assert seen == [*(f"line {i}" for i in range(8000)), "end"]
    assert follower.lost == 0
