"""A job that saves in the background: what it commits is what it was at that step, bit for bit, on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.checkpoint.config import CheckpointConfig
from resilient.checkpoint.manifest import list_checkpoints
from tests.ranks import run_pooled
from tests.scenarios.harness import Job, run_job


def save_resume_compare(rank: int, world: int, folder: str) -> tuple[list[int], list[int], bool, bool]:
    job = Job(steps=13, checkpoint=CheckpointConfig(every=3, keep=9, blocking=False), run_dir=f"{folder}/run")
    first = run_job(job, rank, world)
    second = run_job(job.with_(steps=16), rank, world)
    twin = run_job(job.with_(steps=16, run_dir=None, checkpoint=CheckpointConfig(every=0)), rank, world)
    told = [fields["step"] for kind, fields in first.events if kind == "checkpoint"]
    resumed = [fields["step"] for kind, fields in second.events if kind == "resume"]
    return told, resumed, second.digest == twin.digest, second.rng == twin.rng


@pytest.mark.timeout(180)
def test_c3_a_run_that_goes_on_from_a_save_in_the_background_equals_its_twin(tmp_path: Path):
    for told, resumed, same_state, same_rng in run_pooled(save_resume_compare, 2, str(tmp_path), timeout=170):
        assert told[:3] == [0, 3, 6] and sorted(set(told)) == told
        assert resumed == [told[-1]]
        assert same_state and same_rng
    complete = list_checkpoints(tmp_path / "run" / "checkpoints").complete
    assert {0, 3, 6} <= {c.manifest.step for c in complete}
    newest = complete[0].manifest
    assert newest.samples is not None and newest.samples > 0 and newest.loss_scale == 1.0
