"""Nothing in a checkpoint can run code, lead out of its folder, or take memory without end when it is read."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from resilient.checkpoint.filesystem import FilesystemStore
from resilient.checkpoint.manifest import MANIFEST, Manifest, list_checkpoints, read_manifest, write_manifest
from resilient.checkpoint.parts import read_part
from resilient.checkpoint.snapshot import Snapshot
from resilient.checkpoint.storage import LocalStorage
from resilient.errors import CheckpointError

pytestmark = pytest.mark.timeout(60)

NAME = "step-00000005-a00000005"


def snapshot() -> Snapshot:
    parts: dict[str, Any] = {"engine": {"w": torch.ones(100)}, "rng": {}, "data": {}, "judge": {}}
    return Snapshot(5, 5, 5, 0.1, 5, parts, Snapshot.digest_parts(parts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint in <tmp>/checkpoints; its own folder is returned."""
    store = FilesystemStore(
        tmp_path / "checkpoints", rank=0, world=1, vote=bool, keep=3, run_id="r", generation=0, fingerprint={}
    )
    assert store.save(snapshot())
    store.close()
    return tmp_path / "checkpoints" / NAME


def read(folder: Path) -> Snapshot:
    return read_part(LocalStorage(folder.parent), folder.name, read_manifest(folder).part_of(0))


def reseal(folder: Path, **changes: Any) -> None:
    """A manifest that somebody has written with all digests right."""
    part = folder / "rank-00000.pt"
    data = part.read_bytes()
    manifest = read_manifest(folder)
    found = replace(manifest.parts[0], size=len(data), digest=xxhash.xxh3_128(data).hexdigest())
    write_manifest(folder, replace(manifest, parts=(found,), **changes))


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_the_control_loads(folder: Path):
    assert torch.equal(read(folder).parts["engine"]["w"], torch.ones(100))


@pytest.mark.parametrize("form", ["torch", "zip without crc", "bare pickle", "torch legacy"])
def test_a_pickle_that_calls_something_is_refused_and_nothing_is_called(folder: Path, tmp_path: Path, form: str):
    mark, part = tmp_path / "ran", folder / "rank-00000.pt"
    content = {**asdict(snapshot()), "parts": {"engine": Evil(mark), "rng": {}, "data": {}, "judge": {}}}
    if form == "bare pickle":
        part.write_bytes(pickle.dumps(content))
    elif form == "torch legacy":
        torch.save(content, part, _use_new_zipfile_serialization=False)
    else:
        torch.save(content, part)
        if form == "zip without crc":
            with zipfile.ZipFile(part) as archive:
                files = {n: archive.read(n) for n in archive.namelist()}
            with zipfile.ZipFile(part, "w") as archive:
                for name, data in files.items():
                    archive.writestr(name, data)
    reseal(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(folder)
    assert not mark.exists()


@pytest.mark.parametrize("content", [None, [], {"step": 1}, {**asdict(snapshot()), "parts": "x"}, "text"])
def test_content_that_is_no_snapshot_is_refused(folder: Path, content: Any):
    torch.save(content, folder / "rank-00000.pt")
    reseal(folder)
    with pytest.raises(CheckpointError, match="does not hold a snapshot"):
        read(folder)


def test_a_part_that_is_a_link_a_pipe_or_a_folder_is_never_opened(folder: Path, tmp_path: Path):
    part, elsewhere = folder / "rank-00000.pt", tmp_path / "elsewhere.pt"
    part.rename(elsewhere)
    manifest = read_manifest(folder)
    for make in (lambda: part.symlink_to(elsewhere), lambda: os.mkfifo(part), part.mkdir):
        make()
        assert list_checkpoints(folder.parent).complete == ()
        with pytest.raises(CheckpointError):
            read_part(LocalStorage(folder.parent), folder.name, manifest.parts[0])  # a pipe would wait for ever
        part.rmdir() if part.is_dir() and not part.is_symlink() else part.unlink()


def test_a_checkpoint_folder_that_is_a_link_is_no_checkpoint(folder: Path, tmp_path: Path):
    away = tmp_path / "away"
    folder.rename(away)
    folder.symlink_to(away)
    assert list_checkpoints(folder.parent).complete == ()
    storage = LocalStorage(folder.parent)
    with pytest.raises(OSError):
        storage.get(f"{NAME}/{MANIFEST}", 1 << 20)
    with pytest.raises(OSError, match="is a link"):
        storage.delete_folder(NAME, first=MANIFEST)
    assert (away / MANIFEST).exists(), "and what it points to is not deleted"


def test_a_link_in_the_place_of_the_file_to_be_written_is_not_followed(folder: Path, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    storage = LocalStorage(folder.parent)
    (folder / "rank-00001.pt.partial").symlink_to(victim)
    with pytest.raises(OSError):
        storage.write(f"{NAME}/rank-00001.pt", lambda file: file.writelines([b"x"]))
    assert victim.read_text() == "precious"
    (folder / "rank-00002.pt").symlink_to(victim)
    storage.write(f"{NAME}/rank-00002.pt", lambda file: file.writelines([b"x"]))  # the link itself is replaced
    assert victim.read_text() == "precious"


def forged(folder: Path, **changes: Any) -> None:
    """A manifest with fields as given and a digest that fits them."""
    from resilient.checkpoint.manifest import _content_digest

    content = json.loads((folder / MANIFEST).read_text())
    content.pop("digest")
    content.update(changes)
    (folder / MANIFEST).write_text(json.dumps({**content, "digest": _content_digest(content)}))


PART = {"file": "rank-00000.pt", "size": 1, "digest": "x", "digests": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": [{**PART, "file": "../../secret.pt"}]},
        {"parts": [{**PART, "file": "/etc/passwd"}]},
        {"parts": [{**PART, "size": -1}]},
        {"parts": [{**PART, "size": "1"}]},
        {"parts": [{**PART, "surprise": 1}]},
        {"parts": [PART, PART]},
        {"parts": "rank-00000.pt"},
        {"ranks": [1]},
        {"ranks": [0, 0]},
        {"ranks": ["0"]},
        {"world": 10**12, "ranks": [-1]},
        {"step": "5"},
        {"step": -1},
        {"step": True},
        {"serial": 1e300},
        {"fingerprint": []},
        {"health": {"evaluation": []}},
        {"health": {"finite": True, "surprise": 1}},
        {"format": 1},
        {"surprise": 1},
    ],
)
def test_a_manifest_that_says_what_no_manifest_says_is_refused(folder: Path, changes: dict[str, Any]):
    forged(folder, **changes)
    with pytest.raises(CheckpointError, match="unusable manifest"):
        read_manifest(folder)
    assert list_checkpoints(folder.parent).complete == ()


def test_the_control_of_forging_is_read(folder: Path):
    forged(folder, position=7)
    assert read_manifest(folder).position == 7


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 100_000, "", "nul", '"text"', "[]", '{"step": ' + "9" * 5000 + "}"]
)
def test_json_that_is_deep_or_odd_is_an_orphan_not_a_crash(folder: Path, text: str):
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="unusable manifest"):
        read_manifest(folder)
    assert [o.path.name for o in list_checkpoints(folder.parent).orphans] == [NAME]


def test_a_huge_manifest_is_not_read_into_memory(folder: Path):
    with open(folder / MANIFEST, "r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(CheckpointError, match="longer than"):
        read_manifest(folder)


def test_a_manifest_too_large_to_be_read_is_not_written(folder: Path):
    manifest: Manifest = read_manifest(folder)
    with pytest.raises(ValueError, match="the limit is"):
        write_manifest(folder, replace(manifest, outer={"x": "y" * (17 << 20)}))
    assert read_manifest(folder) == manifest
