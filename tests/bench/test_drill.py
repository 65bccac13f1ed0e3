"""`resilient drill checkpoint`: the store comes through, and stores that are wrong in one way each do not (BR-23, BR-28, BR-29)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient.bench.drill.campaign import KILLS, STARTS, Campaign, Round, histogram
from resilient.bench.drill.faults import PHASES, DrillStorage
from resilient.bench.drill.job import EVERY, WORLD, Course, Model, Store, filesystem_store
from resilient.bench.drill.run import MEASURES, checks, main, text
from resilient.checkpoint import commit, loading, parts
from resilient.checkpoint.files import wait_until
from resilient.checkpoint.filesystem import FilesystemStore, Outcome
from resilient.checkpoint.manifest import MANIFEST, folder_name, list_checkpoints
from resilient.checkpoint.snapshot import Snapshot
from resilient.cli import drill
from resilient.errors import CheckpointError


@pytest.mark.timeout(180)
def test_the_store_comes_through_every_fault_in_every_phase(tmp_path: Path) -> None:
    """One round of each, through the command; nothing of it is left behind."""
    out, where = tmp_path / "drill.json", tmp_path / "place"
    where.mkdir()
    command = [sys.executable, "-m", "resilient.cli.main", "drill", "checkpoint", "--quick"]
    command += ["--format", "json", "--out", str(out), "--folder", str(where)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    found = json.loads(out.read_text())
    assert done.returncode == 0, [r for r in found["rounds"] if r["problems"]]
    assert {c["name"] for c in found["checks"]} > set(MEASURES.values()) and all(c["ok"] for c in found["checks"])
    assert {(r["fault"], r["phase"]) for r in found["rounds"]} == {(fault, phase or "") for fault, phase in STARTS}
    assert set(found["struck"]) == set(PHASES), "every phase was hit"
    assert list(where.iterdir()) == []


class Found(Exception):
    """Ends a campaign at the first round that shows what is wrong."""


def campaign(tmp_path: Path, make_store: Any, only: str, *kinds: str, rounds: int = 20, **more: Any) -> None:
    """Raises Found at the first round in which one of `kinds` is counted."""
    torch.set_num_threads(1)

    def look(done: Round) -> None:
        if any(getattr(done, kind) for kind in kinds):
            raise Found(done.problems)

    Campaign(tmp_path, 1, make_store, progress=look, **more).run(rounds, only)


def test_a_loader_that_skips_digests_restores_something_else(tmp_path: Path) -> None:
    def trusting(*about: Any) -> Store:
        parts.verify_stream = lambda *ignored: None  # type: ignore[assignment]  # in the rank's own process
        return filesystem_store(*about)

    with pytest.raises(Found, match="wrong"):
        campaign(tmp_path, trusting, "bit flip in a part", "wrong")


class ManifestFirst:
    """Says that a checkpoint is there before its parts are, as a `latest` file that is written too early does."""

    manifest = None

    def __init__(
        self, storage: DrillStorage, rank: int, generation: int, vote: Callable[[bool], bool], *rest: Any
    ) -> None:
        self.storage, self.rank, self.vote = storage, rank, vote

    def begin(self, snapshot: Snapshot) -> list[Outcome]:
        folder = folder_name(snapshot.step, snapshot.attempt)
        if self.rank == 0:
            if not self.storage.has_files(folder):
                self.storage.make_folder(folder)
            self.storage.put(f"{folder}/{MANIFEST}", b"{}")
        self.vote(True)
        self.storage.write(f"{folder}/{self.rank}.pt", lambda file: torch.save(vars(snapshot), file))
        return [Outcome(snapshot.step, snapshot.attempt, self.vote(True), 0.0)]

    def load(self) -> Snapshot | None:
        for folder in reversed(self.storage.folders()):
            if self.storage.has_files(f"{folder}/{MANIFEST}"):
                with self.storage.open(f"{folder}/{self.rank}.pt") as file:
                    return Snapshot(**torch.load(file, weights_only=True))
        return None

    def poll(self) -> list[Outcome]:
        return []

    def drain(self) -> list[Outcome]:
        return []

    def close(self) -> None:
        pass


def test_a_manifest_before_its_parts_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(Found, match="lost"):
        campaign(tmp_path, ManifestFirst, "kill all write", "lost")


def test_deleting_the_manifest_last_is_found_out(tmp_path: Path) -> None:
    def manifest_last(storage: DrillStorage, *about: Any) -> Store:
        def delete(folder: str, first: str) -> None:
            with storage.points.within("delete"):
                for name in sorted(storage.files(folder), key=lambda name: name == MANIFEST):
                    storage.path(f"{folder}/{name}").unlink()
                storage.path(folder).rmdir()

        storage.delete_folder = delete  # type: ignore[method-assign]
        return filesystem_store(storage, *about)

    with pytest.raises(Found, match="hollow"):
        campaign(tmp_path, manifest_last, "kill all delete", "hollow")


def test_files_that_are_not_fsynced_do_not_survive_a_power_cut(tmp_path: Path) -> None:
    def unsynced(*about: Any) -> Store:
        os.fsync = lambda file: None  # type: ignore[assignment]
        return filesystem_store(*about)

    with pytest.raises(Found, match="lost"):
        campaign(tmp_path, unsynced, "power cut", "lost")


def test_a_start_that_was_thought_dead_takes_back_only_its_own(tmp_path: Path) -> None:
    """What the drill found first: the old start's save fails, and with its own folder it deleted the newer start's, which
    had the same step and attempt."""
    dead = False

    def store(generation: int, may_write: Callable[[], None] = lambda: None) -> FilesystemStore:
        about: dict[str, Any] = {
            "rank": 0,
            "world": 1,
            "vote": lambda ok: ok,
            "keep": 2,
            "run_id": "r",
            "fingerprint": {},
        }
        return FilesystemStore(tmp_path / "checkpoints", generation=generation, may_write=may_write, **about)

    def may_write() -> None:
        if dead:
            raise CheckpointError("a newer start exists")

    snapshot = Model(0, 0).snapshot(0)
    old = store(0, may_write)
    old.begin(snapshot)
    assert wait_until(lambda: old.report() == "ready", 20), "its part is written, its manifest not"
    new = store(1)
    assert new.save(snapshot)
    dead = True
    assert [o.committed for o in old.drain()] == [False]
    assert [c.manifest.generation for c in list_checkpoints(tmp_path / "checkpoints").complete] == [1]
    assert store(2).load() is not None
    old.close()
    new.close()


def _without_generation(step: int, attempt: int, generation: int = 0) -> str:
    return folder_name(step, attempt)


def _always(self: commit.Save) -> bool:
    return True


def test_two_starts_that_share_a_folder_are_found_out(tmp_path: Path) -> None:
    """A rank stopped in the middle of a save comes back after another start has saved the same step: its folder must not
    have the same name, nor may it take back what it no longer owns."""

    def careless(*about: Any) -> Store:
        commit.folder_name = _without_generation
        commit.Save._is_mine = _always  # type: ignore[method-assign]
        return filesystem_store(*about)

    with pytest.raises(Found):
        campaign(tmp_path, careless, "two writers write", "lost", "hollow")


@pytest.mark.slow
def test_a_start_that_hangs_is_ended_and_counted(tmp_path: Path) -> None:
    def hanging(storage: DrillStorage, rank: int, generation: int, *rest: Any) -> Store:
        if rank == 1 and generation > 2:  # the first two prepare the place
            time.sleep(60)
        return filesystem_store(storage, rank, generation, *rest)

    with pytest.raises(Found, match="hangs"):
        campaign(tmp_path, hanging, "kill one load", "hangs", deadline_s=4.0)


def test_the_seed_decides_what_is_done(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    first, again = (Campaign(tmp_path / name, 3).run(1, "bit flip")[0] for name in ("a", "b"))
    assert (first.fault, first.detail) == (again.fault, again.detail)
    assert first.struck and first.ok


def test_the_course_is_what_two_ranks_train() -> None:
    models = [Model(5, rank) for rank in range(WORLD)]
    for _ in range(2 * EVERY):
        gradient = models[0].gradient() + models[1].gradient()
        for model in models:
            model.apply(gradient)
    course = Course(5)
    assert course.fingerprints(2 * EVERY) == [m.fingerprint() for m in models]
    assert course.fingerprints(EVERY) != course.fingerprints(2 * EVERY), "what lies behind is kept"
    assert course.fingerprints(2 * EVERY + 1) == []
    before = models[1].fingerprint()
    models[1].weights[7] += 1e-6
    assert models[1].fingerprint() != before


def test_a_table_that_shows_what_was_missed() -> None:
    bad = Round(0, "kill all", "write", point="rename part.pt.partial", struck=True)
    bad.blame("lost", "step 9 was committed, step 6 was found")
    fine = Round(1, "truncation", "", struck=True)
    shown = text([bad, fine], checks([bad, fine]))
    assert "MISSED lost good checkpoints: 1" in shown and "step 9 was committed" in shown
    assert "held   wrong restores: 0" in shown and "rename part.pt.partial 1" in shown
    assert set(histogram([bad, fine])) == {"write"}
    idle = [Round(n, "kill one", "load") for n in range(3)]
    assert [c.name for c in checks(idle) if not c.ok] == ["share of rounds whose fault struck"]


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--only", "meteor"], ["--folder", "/no/such/folder"]])
def test_what_cannot_be_used_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 64
    assert words[0] in capsys.readouterr().err


def test_the_command_names_its_drills(capsys: pytest.CaptureFixture[str]) -> None:
    assert drill.main([]) == 64
    assert drill.main(["--help"]) == 0
    assert "checkpoint" in capsys.readouterr().out
    assert drill.main(["chekpoint"]) == 64
    assert "checkpoint" in capsys.readouterr().err


def test_every_phase_is_struck_by_kills_of_one_and_of_all() -> None:
    assert {(k, p) for k in KILLS for p in PHASES} <= set(STARTS)
    assert loading.read_part is parts.read_part, "the control above replaces what the loader really calls"
