"""Storage that fails for real: read-only, full, vanished, torn, slow (BR-29, BR-31, BR-32). One rank, a real kernel.

File systems are mounted where the tests run as root, and the tests that need one are skipped elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient.checkpoint.filesystem import FilesystemStore
from resilient.checkpoint.manifest import MANIFEST, list_checkpoints
from resilient.checkpoint.snapshot import Snapshot
from resilient.errors import NothingUsable

pytestmark = pytest.mark.timeout(120)


def snapshot(step: int, size: int = 40_000) -> Snapshot:
    parts: dict[str, Any] = {"engine": {"w": torch.full((size,), float(step))}, "rng": {}, "data": {}, "judge": {}}
    return Snapshot(step, step, step, 0.1, step, parts, Snapshot.digest_parts(parts))


def store(folder: Path, **changes: Any) -> FilesystemStore:
    arguments: dict[str, Any] = {"keep": 9, "run_id": "r", "generation": 0, "visible_s": 0.3}
    return FilesystemStore(folder, rank=0, world=1, vote=lambda ok: ok, fingerprint={}, **(arguments | changes))


def loads(folder: Path, step: int) -> bool:
    found = store(folder, generation=1).load()
    return found is not None and found.step == step and Snapshot.digest_parts(found.parts) == snapshot(step).digests


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB: each part takes 160 kB."""
    mount = tmp_path / "mount"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], capture_output=True)


def test_no_space_then_space_again(small: Path):
    ours = store(small / "checkpoints")
    assert ours.save(snapshot(1))
    with open(small / "ballast", "wb") as ballast:
        while True:
            try:
                ballast.write(b"\0" * 65536)
                ballast.flush()
            except OSError:
                break
    assert not ours.save(snapshot(2))
    assert "No space left" in ours.problem
    assert loads(small / "checkpoints", 1), "a load needs no space for itself"
    (small / "ballast").unlink()
    assert ours.save(snapshot(3))
    assert [c.manifest.step for c in list_checkpoints(small / "checkpoints").complete] == [3, 1]


def test_space_that_comes_back_while_it_is_tried_again(small: Path):
    ours = store(small / "checkpoints", retries=10, retry_wait_s=0.1)
    assert ours.save(snapshot(1))
    (small / "ballast").write_bytes(b"\0" * 700_000)
    ours.begin(snapshot(2))
    for _ in range(100):
        assert ours._task is not None
        ours._task.wait(5)
        if "No space left" in ours.problem:
            break
        ours.poll()
    (small / "ballast").unlink()
    assert [o.committed for o in ours.drain()] == [True]
    assert loads(small / "checkpoints", 2)


def test_a_file_system_that_turns_read_only(small: Path):
    ours = store(small / "checkpoints")
    assert ours.save(snapshot(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    assert not ours.save(snapshot(2))
    assert "Read-only file system" in ours.problem
    ours.evaluated(1, {"eval_loss": 1.0})  # a warning, no error
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    assert ours.save(snapshot(3)) and loads(small / "checkpoints", 3)


def test_a_mount_that_vanishes_and_comes_back(small: Path):
    ours = store(small / "checkpoints")
    assert ours.save(snapshot(1))
    subprocess.run(["umount", "-l", str(small)], check=True)
    os.chmod(small, 0o555)
    blocker = small.parent / "blocker"
    small.rename(blocker)  # as when an automounter has taken the point away
    small.touch()
    assert not ours.save(snapshot(2))
    assert "Not a directory" in ours.problem
    assert ours.best() is None
    small.unlink()
    blocker.rename(small)
    os.chmod(small, 0o755)
    assert ours.save(snapshot(3)) and loads(small / "checkpoints", 3)


def test_no_permission(tmp_path: Path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    folder = tmp_path / "checkpoints"
    ours = store(folder)
    assert ours.save(snapshot(1))
    folder.chmod(0o555)
    assert not ours.save(snapshot(2)) and "Permission denied" in ours.problem
    folder.chmod(0o755)
    assert ours.save(snapshot(3))


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_torn_part_is_found_by_its_size_and_the_older_one_taken(tmp_path: Path, kept: int):
    folder = tmp_path / "checkpoints"
    ours = store(folder)
    assert ours.save(snapshot(1)) and ours.save(snapshot(2))
    part = folder / "step-00000002-a00000002" / "rank-00000.pt"
    os.truncate(part, kept if kept >= 0 else part.stat().st_size - 1)
    listing = list_checkpoints(folder)
    assert [c.manifest.step for c in listing.complete] == [1]
    assert "bytes, expected" in listing.orphans[0].reason
    assert loads(folder, 1)


def test_a_folder_that_is_taken_away_under_the_run_is_made_again(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    ours = store(folder)
    assert ours.save(snapshot(1))
    shutil.rmtree(folder)
    assert ours.save(snapshot(2)) and loads(folder, 2)


def test_a_newer_start_is_noticed_before_the_folder_is_opened_and_before_the_commit(tmp_path: Path):
    """DESIGN 8: older generations are refused, also when the newer one starts in the middle of a save."""
    folder, calls, newer = tmp_path / "checkpoints", 0, 99

    def may_write() -> None:
        nonlocal calls
        calls += 1
        if calls >= newer:
            raise OSError("generation 1 was started")

    for newer in (1, 2):
        calls = 0
        assert not store(folder, may_write=may_write).save(snapshot(newer))
        assert list_checkpoints(folder).complete == ()


def test_lists_that_show_a_checkpoint_before_its_files_make_no_checkpoint_of_it(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    ours = store(folder)
    assert ours.save(snapshot(1)) and ours.save(snapshot(2))
    newest = folder / "step-00000002-a00000002"
    (newest / MANIFEST).unlink()
    os.symlink(folder / "step-00000001-a00000001" / MANIFEST, newest / MANIFEST)
    (folder / "latest").write_text("step-00000002-a00000002")
    assert loads(folder, 1)
    shutil.rmtree(folder / "step-00000001-a00000001")
    with pytest.raises(NothingUsable):
        store(folder, generation=1).load()
