"""BR-35: sick checkpoints do not push out sound ones, a NaN metric counts as worst, the best evaluation is kept."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from resilient.checkpoint.filesystem import FilesystemStore
from resilient.checkpoint.manifest import Health, list_checkpoints, read_manifest
from resilient.checkpoint.retention import best_of
from resilient.checkpoint.snapshot import Snapshot


def test_br35_nan_counts_as_worst_and_blocks_nothing():
    assert best_of({"a": math.nan, "b": 2.0, "c": 1.5, "d": None}) == "c"
    assert best_of({"a": math.nan, "b": math.inf, "d": None}) is None
    assert best_of({"a": 1.0, "b": math.nan}) == best_of({"b": math.nan, "a": 1.0}) == "a"


def store(folder: Path, **changes: object) -> FilesystemStore:
    arguments = {"rank": 0, "world": 1, "vote": lambda ok: ok, "keep": 2, "run_id": "run", "generation": 0}
    return FilesystemStore(folder, fingerprint={}, **(arguments | changes))  # type: ignore[arg-type]


def snapshot(step: int) -> Snapshot:
    parts = {"engine": {"w": torch.full((4,), float(step))}, "rng": {}, "data": {"window": step}, "judge": {}}
    return Snapshot(step, step, step, 1e-3, step, parts, Snapshot.digest_parts(parts))


def test_br35_weights_that_are_not_finite_are_found_while_they_are_written(tmp_path: Path):
    kept = store(tmp_path)
    sick = snapshot(1)
    sick.parts["engine"]["w"][2] = math.nan
    masked = snapshot(2)
    masked.parts["engine"]["buffers"] = {"mask": torch.full((2,), -math.inf)}
    assert kept.save(sick) and kept.save(masked)
    found = {c.manifest.step: c.manifest.health.finite for c in list_checkpoints(tmp_path).complete}
    assert found == {1: False, 2: True}


def steps(folder: Path) -> list[int]:
    return [c.manifest.step for c in list_checkpoints(folder).complete]


def test_br35_the_best_by_evaluation_outlives_the_newer_ones(tmp_path: Path):
    with_best, without = store(tmp_path / "a"), store(tmp_path / "b", keep_best=False)
    for kept in (with_best, without):
        for step, loss in enumerate([3.0, 2.0, 2.5, math.nan, 2.6, 2.7], start=1):
            assert kept.save(snapshot(step))
            kept.evaluated(step, {"eval_loss": loss, "repetition": 0.1})
    assert steps(tmp_path / "a") == [6, 5, 4, 2]  # 4 is sick: for a person to look at, and not counted
    assert steps(tmp_path / "b") == [6, 5, 4]
    best = with_best.best()
    assert best is not None
    assert (best.manifest.step, best.manifest.health.eval_loss) == (2, 2.0)
    sick = next(c for c in list_checkpoints(tmp_path / "a").complete if c.manifest.step == 4)
    assert sick.manifest.health.evaluation == {"eval_loss": None, "repetition": 0.1}
    again = store(tmp_path / "a", generation=1)
    loaded = again.load(2)  # the manifest that was written twice is as good as the others
    assert loaded is not None
    assert torch.equal(loaded.parts["engine"]["w"], torch.full((4,), 2.0))


def test_br35_checkpoints_of_nan_weights_delete_no_sound_one_and_are_loaded_last(tmp_path: Path):
    kept = store(tmp_path)
    for step in range(1, 5):
        assert kept.save(snapshot(step), None, Health(level="A"))
    for step in range(5, 9):  # unnoticed for four saves
        assert kept.save(snapshot(step), None, Health(finite=False, level="E"))
    assert steps(tmp_path) == [8, 4, 3]
    assert read_manifest(list_checkpoints(tmp_path).complete[0].path).health == Health(finite=False, level="E")
    loaded = store(tmp_path, generation=1).load()
    assert loaded is not None
    assert loaded.step == 4
