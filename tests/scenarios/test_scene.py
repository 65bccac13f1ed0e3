"""T3, T12: the batch of a refused step is kept, on the rank that is named, and on request the state it met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from resilient.checkpoint.digest import state_digest
from resilient.coordinator.config import GuardConfig
from tests.ranks import run_pooled
from tests.scenarios.harness import Job, Outcome, run_job


def with_scene(rank: int, world: int, folder: str, scene: str) -> tuple[Outcome, list[str]]:
    met: list[str] = []

    def remember(guard: object, engine: object) -> None:
        keeper = guard._coordinator._scene  # type: ignore[attr-defined]

        def wrapped(decision: object, batches: object, engine: object) -> None:
            met.append(state_digest(engine.capture()))  # type: ignore[attr-defined]
            keeper(decision, batches, engine)

        guard._coordinator._scene = wrapped  # type: ignore[attr-defined]

    job = Job(
        steps=7,
        run_dir=f"{folder}/run",
        guard=GuardConfig(exchange_timeout_s=30.0, scene=scene),  # type: ignore[arg-type]
        fault={"kind": "nan", "step": 5, "rank": 1, "place": "forward"},
    )
    return run_job(job, rank, world, tweak=remember), met


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scene", ["batch", "full", "none"])
def test_the_refused_batch_is_kept_on_the_named_rank_only(scene: str, tmp_path: Path):
    results = run_pooled(with_scene, 2, str(tmp_path), scene)
    files = sorted(p.name for p in (tmp_path / "run" / "incidents").glob("5-compute/rank-*"))
    if scene == "none":
        assert files == []
        return
    assert files == ["rank-00001-a00000005.json", "rank-00001-a00000005.pt"]
    folder = tmp_path / "run" / "incidents" / "5-compute"
    assert (folder / "incident.json").exists()
    kept = torch.load(folder / files[1], weights_only=True)
    described = json.loads((folder / files[0]).read_text())
    assert described["batches"][0]["ids"] == kept["batches"][0]["ids"].tolist()
    assert (described["place"], described["rank"], described["step"]) == ("forward", 1, 5)
    assert described["batches"][0]["input_ids"]["nonfinite"] == 0  # the data was sound
    trained = {i for ids in results[1][0].sample_ids for i in ids}
    refused = set(described["batches"][0]["ids"])
    assert refused and refused <= trained  # it was not the data: the window was run again
    assert ("state" in kept) == (scene == "full")
    if scene == "full":
        assert [state_digest(kept["state"])] == results[1][1]


@pytest.mark.timeout(60)
def test_a_scene_that_cannot_be_written_stops_nothing(tmp_path: Path):
    (tmp_path / "run" / "incidents").mkdir(parents=True)
    blocked = tmp_path / "run" / "incidents" / "5-compute"
    blocked.write_text("a file where the folder should be")
    results = run_pooled(with_scene, 2, str(tmp_path), "batch")
    assert [outcome.applied for outcome, _ in results] == [7, 7]
