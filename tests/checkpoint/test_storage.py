"""checkpoint/storage*.py and layout.py: one contract for folders and object stores, whole files or none, who shares what."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from resilient.checkpoint.config import CheckpointConfig
from resilient.checkpoint.filesystem import FilesystemStore
from resilient.checkpoint.layout import Layout, layout_of, probe_layout
from resilient.checkpoint.manifest import MANIFEST, list_checkpoints
from resilient.checkpoint.snapshot import Snapshot
from resilient.checkpoint.storage import LocalStorage, Storage, location_problem, open_storage, place_of, redact
from resilient.checkpoint.storage_remote import RemoteStorage
from resilient.errors import CheckpointError, ConfigError
from tests.checkpoint.threads import ThreadRanks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["folder", "memory", "file"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "memory":
        place: Any = f"memory://{secrets.token_hex(4)}/run"
    else:
        place = tmp_path / "checkpoints" if request.param == "folder" else f"file://{tmp_path}/checkpoints"
    yield open_storage(place)
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def test_a_place_that_is_not_there_yet_is_empty(storage: Storage):
    assert storage.folders() == [] and storage.files("a") == [] and not storage.has_files("a")
    with pytest.raises(FileNotFoundError):
        storage.get("a/b", 10)
    with pytest.raises(FileNotFoundError):
        storage.size("a/b")
    storage.delete("a")


def test_what_is_written_can_be_read_moved_and_deleted(storage: Storage):
    storage.make_folder("step")
    storage.write("step/part", lambda file: file.writelines([b"ab", b"cd"]))
    storage.put("step/note", b"1")
    storage.put("step/note", b"22")
    storage.put("choice", b"3")
    assert storage.folders() == ["step"] and storage.files("step") == ["note", "part"]
    assert storage.size("step/part") == 4
    assert storage.get("step/note", 2) == b"22"
    with pytest.raises(ValueError, match="longer than 1"):
        storage.get("step/note", 1)
    with storage.open("step/part") as file:
        assert file.read(3) == b"abc"
        file.seek(0)
        assert file.read() == b"abcd"
    with pytest.raises(FileExistsError):
        storage.make_folder("step")
    storage.move_folder("step", "aside", last="note")
    assert storage.folders() == ["aside"] and not storage.has_files("step")
    assert storage.get("aside/part", 10) == b"abcd"
    storage.delete_folder("aside", first="note")
    assert storage.folders() == []
    storage.delete("choice")
    with pytest.raises(FileNotFoundError):
        storage.get("choice", 10)


def test_a_write_that_fails_leaves_nothing(storage: Storage):
    def torn(file: Any) -> None:
        file.write(b"half")
        raise OSError("no space")

    storage.make_folder("step")
    with pytest.raises(OSError, match="no space"):
        storage.write("step/part", torn)
    assert storage.files("step") == []


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../b", "a/b/c", "", ".", "a//b", "a/..", "a\0b", "..\\a"])
def test_no_name_leads_out_of_the_place(storage: Storage, name: str):
    for method in (storage.size, storage.delete, lambda n: storage.get(n, 1), lambda n: storage.put(n, b"")):
        with pytest.raises(ValueError, match="no name of a file"):
            method(name)


def test_file_modes_are_what_the_umask_leaves(tmp_path: Path):
    storage = LocalStorage(tmp_path / "checkpoints")
    before = os.umask(0o027)
    try:
        storage.make_folder("step")
        storage.write("step/part", lambda file: file.writelines([b"x"]))
        storage.put("step/note", b"x")
    finally:
        os.umask(before)
    modes = {n: (tmp_path / "checkpoints" / n).stat().st_mode & 0o777 for n in ("step", "step/part", "step/note")}
    assert modes == {"step": 0o750, "step/part": 0o640, "step/note": 0o640}


# -- locations and credentials ---------------------------------------------------------------------------------------


def test_credentials_are_refused_where_they_would_be_copied_and_masked_where_they_turn_up():
    for url in ("s3://key:secret@bucket/x", "https://host/x?sig=abc", "abfs://user:pw@a/b", "memory://u:p@x/y"):
        with pytest.raises(ConfigError) as refused:
            CheckpointConfig(location=url)
        for secret in ("secret", "abc", ":pw", "u:p"):
            assert secret not in str(refused.value)
        with pytest.raises(ConfigError):
            open_storage(url)
    text = redact("PUT https://key:s3cr3t@host/a/b?X-Amz-Signature=deadbeef&x=1 failed, s3://bucket/a stays")
    assert "s3cr3t" not in text and "deadbeef" not in text
    assert "https://***@host/a/b?***" in text and "s3://bucket/a stays" in text
    assert location_problem("s3://bucket/runs") == location_problem("/data/runs") == location_problem("") == ""
    assert location_problem("/data/what?/a@b") == "", "a folder may be called anything"


def test_a_url_without_its_library_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"run\.checkpoint\.location: nosuch://x/y cannot be opened"):
        open_storage("nosuch://x/y")


def test_the_place_of_a_run(tmp_path: Path):
    run = tmp_path / "runs" / "a"
    assert place_of(None, run) == run / "checkpoints"
    assert place_of("/data/", run) == "/data/a"
    assert place_of("s3://bucket/runs/", run) == "s3://bucket/runs/a"
    assert isinstance(open_storage(place_of("/data/", run)), LocalStorage)


# -- the store on other places than a shared folder --------------------------------------------------------------------


def snapshot(step: int, rank: int) -> Snapshot:
    parts: dict[str, Any] = {
        "engine": {"w": torch.arange(1000.0) * (step + 10 * rank)},
        "rng": {"r": rank},
        "data": {"p": step},
        "judge": {},
    }
    return Snapshot(step, step, step, 0.1, step, parts, Snapshot.digest_parts(parts))


def is_of(found: Snapshot | None, step: int, rank: int) -> bool:
    return (
        found is not None and found.step == step and Snapshot.digest_parts(found.parts) == snapshot(step, rank).digests
    )


def store(storage: Any, rank: int, world: int, vote: Any, gather: Any, **changes: Any) -> FilesystemStore:
    arguments: dict[str, Any] = {"keep": 3, "run_id": "r", "generation": 0, "fingerprint": {}, "visible_s": 3.0}
    return FilesystemStore(storage, rank=rank, world=world, vote=vote, gather=gather, **(arguments | changes))


def test_an_object_store_shared_by_two_ranks():
    url = f"memory://{secrets.token_hex(4)}/runs/r"

    def job(rank: int, vote: Any, gather: Any) -> Any:
        ours = store(url, rank, 2, vote, gather, keep=2)
        fresh = ours.load()
        saved = [ours.save(snapshot(step, rank), {"n": step}) for step in (1, 2, 3)]
        vote(True)
        names = ours.storage.folders()
        vote(True)
        if rank == 0:  # one byte of rank 1's part of the newest
            fs = fsspec.filesystem("memory")
            path = next(p for p in fs.store if p.endswith("step-00000003-a00000003/rank-00001.pt"))
            data = bytearray(fs.store[path].getvalue())
            data[len(data) // 2] ^= 1
            fs.pipe_file(path, bytes(data))
        vote(True)
        again = store(url, rank, 2, vote, gather)  # as a run whose starts nobody counts: under the same name
        loaded = again.load()
        replaced = again.save(snapshot(3, rank))  # the damaged one is put aside
        vote(True)
        names_after = again.storage.folders()
        vote(True)
        return fresh, saved, names, is_of(loaded, 2, rank), replaced, names_after, again.layout()

    for fresh, saved, names, right, replaced, names_after, layout in ThreadRanks(2).run(job):
        assert fresh is None and saved == [True, True, True]
        assert names == ["step-00000002-a00000002", "step-00000003-a00000003"]
        assert right and replaced
        assert names_after == ["step-00000002-a00000002", "step-00000003-a00000003", "step-00000003-a00000003.old0"]
        assert layout == Layout.one(2)
    fsspec.filesystem("memory").store.clear()


class Late:
    """An fsspec file system in front of which a cache lies: what others have written shows up some calls later (BR-28)."""

    def __init__(self, fs: Any, behind: int) -> None:
        self._fs, self._behind, self._asked = fs, behind, dict[str, int]()

    def _is_late(self, path: str) -> bool:
        self._asked[path] = self._asked.get(path, 0) + 1
        return self._asked[path] <= self._behind

    def cat_file(self, path: str, **options: Any) -> bytes:
        if self._is_late(path):
            raise FileNotFoundError(path)
        return self._fs.cat_file(path, **options)

    def info(self, path: str) -> Any:
        if self._is_late(path):
            raise FileNotFoundError(path)
        return self._fs.info(path)

    def ls(self, path: str, **options: Any) -> Any:
        return [e for e in self._fs.ls(path, **options) if not self._is_late(f"ls {e['name']}")]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


def test_br28_a_rank_that_sees_names_and_files_late_takes_part_all_the_same():
    url = f"memory://{secrets.token_hex(4)}/runs/r"

    def job(rank: int, vote: Any, gather: Any) -> Any:
        place = RemoteStorage(url)
        if rank == 1:
            place = RemoteStorage(url, fs=Late(place._fs, behind=5))
        ours = store(place, rank, 2, vote, gather)
        saved = [ours.save(snapshot(step, rank)) for step in (1, 2)]
        loaded = store(place, rank, 2, vote, gather, generation=1).load()
        return saved, is_of(loaded, 2, rank)

    assert ThreadRanks(2).run(job) == [([True, True], True)] * 2
    fsspec.filesystem("memory").store.clear()


def four_ranks_on_two_hosts(tmp_path: Path, between: Any) -> list[Any]:
    """Save twice on two disks, let `between(tmp_path)` happen, start again and load."""
    ranks = ThreadRanks(4)

    def job(rank: int, vote: Any, gather: Any) -> Any:
        disk = tmp_path / f"host{rank // 2}" / "checkpoints"
        ours = store(disk, rank, 4, vote, gather, visible_s=0.5)
        saved = [ours.save(snapshot(step, rank)) for step in (5, 10)]
        twice = ours.save(snapshot(10, rank))
        vote(True)
        if rank == 0:
            between(tmp_path)
        vote(True)
        again = store(disk, rank, 4, vote, gather, generation=1, visible_s=0.5)
        loaded = again.load()
        return saved, twice, loaded and loaded.step, loaded is None or is_of(loaded, loaded.step, rank), ours.layout()

    return ranks.run(job)


def test_br27_one_committer_and_one_complete_checkpoint_per_disk(tmp_path: Path):
    for saved, twice, step, right, layout in four_ranks_on_two_hosts(tmp_path, lambda root: None):
        assert saved == [True, True] and twice and step == 10 and right
        assert layout == Layout(((0, 1), (2, 3)))
    for host, ranks in ((0, (0, 1)), (1, (2, 3))):
        complete = list_checkpoints(tmp_path / f"host{host}" / "checkpoints").complete
        assert [(c.manifest.step, c.manifest.ranks, c.manifest.world) for c in complete] == [
            (10, ranks, 4),
            (5, ranks, 4),
        ]
        assert [p.file for p in complete[0].manifest.parts] == [f"rank-0000{r}.pt" for r in ranks]
        with pytest.raises(CheckpointError, match="lies elsewhere"):
            complete[0].manifest.part_of(2 - 2 * host)


def test_br27_a_checkpoint_counts_only_where_every_disk_has_its_manifest(tmp_path: Path):
    def lose(root: Path) -> None:
        (root / "host1" / "checkpoints" / "step-00000010-a00000010" / MANIFEST).unlink()

    assert [(r[2], r[3]) for r in four_ranks_on_two_hosts(tmp_path, lose)] == [(5, True)] * 4


def test_a_damaged_part_on_one_disk_sends_all_hosts_to_the_older_one(tmp_path: Path):
    def tear(root: Path) -> None:
        path = root / "host1" / "checkpoints" / "step-00000010-a00000010" / "rank-00003.pt"
        data = bytearray(path.read_bytes())
        data[-400] ^= 4
        path.write_bytes(data)

    assert [(r[2], r[3]) for r in four_ranks_on_two_hosts(tmp_path, tear)] == [(5, True)] * 4


# -- the probe ---------------------------------------------------------------------------------------------------------


def test_who_sees_whom_must_be_the_same_both_ways():
    def layout(lowest: list[int], count: list[int]) -> Layout | None:
        return layout_of(np.array(lowest), np.array(count))

    assert layout([0, 0, 0], [3, 3, 3]) == Layout.one(3)
    assert layout([0, 0, 2, 2], [2, 2, 2, 2]) == Layout(((0, 1), (2, 3)))
    assert layout([0, 1, 0, 1], [2, 2, 2, 2]) == Layout(((0, 2), (1, 3)))
    assert layout([0, 0], [2, 1]) is None, "rank 1 does not see itself"
    assert layout([0, 0, 2], [2, 3, 1]) is None, "rank 1 sees rank 2, which does not see rank 1"
    assert layout([0, -1], [1, 0]) is None


def test_the_probe_leaves_nothing_and_old_leftovers_do_not_matter(tmp_path: Path):
    (tmp_path / ".probe").mkdir()
    (tmp_path / ".probe" / "rank-00000-0123456789ab").touch()  # of a start that died

    def probe(rank: int, vote: Any, gather: Any) -> Any:
        found = probe_layout(LocalStorage(tmp_path), rank, 3, gather)
        vote(True)
        return found

    assert ThreadRanks(3).run(probe) == [Layout.one(3)] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_write_is_named_on_all_ranks(tmp_path: Path):
    (tmp_path / "file").touch()

    def probe(rank: int, vote: Any, gather: Any) -> str:
        place = tmp_path / "file" / "x" if rank == 1 else tmp_path / "good"
        with pytest.raises(CheckpointError) as refused:
            probe_layout(LocalStorage(place), rank, 2, gather, patience_s=0.2)
        return str(refused.value)

    texts = ThreadRanks(2).run(probe)
    assert all("rank 1 cannot write" in text for text in texts)
    assert "Not a directory" in texts[1]
