"""`resilient train` with another `run.nproc` than the run began with, and `resilient checkpoint export` of what it saved (issue 5,
delivers 1, 6 and 10)."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resilient.checkpoint.manifest import list_checkpoints
from resilient.cli.job import _same_global_batch
from resilient.telemetry.run_directory import RunDirectory
from tests.cli.commands import finish, start

RUN = [
    "-m", "resilient", "train", "run.id=elastic", "run.root=.", "data=synthetic", "data.seq_len=16", "data.micro_batch=2",
    "model.width=16", "model.layers=2", "model.heads=2", "model.hidden=32", "run.eval_every=0", "run.eval_batches=1",
    "run.sample_tokens=0", "run.checkpoint.every=5",
]  # fmt: skip


def journal(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event", line.get("kind")) == kind]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_2_ranks_goes_on_alone_and_is_exported(tmp_path: Path) -> None:
    run = tmp_path / "elastic"
    process = start([*RUN, "run.nproc=2", "run.steps=60"], tmp_path)
    deadline = time.monotonic() + 120
    while not (run / "steps.jsonl").exists() or len((run / "steps.jsonl").read_text().splitlines()) < 8:
        assert process.poll() is None and time.monotonic() < deadline, finish(process, 5)
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 78
    saved = list_checkpoints(run / "checkpoints").complete[0].manifest
    assert saved.world == 2 and saved.samples == 4 * saved.step

    refused = start([*RUN, "run.nproc=1", "run.checkpoint.elastic=false"], tmp_path)
    code, _, err = finish(refused)
    assert code == 77 and "world size 2 there, 1 here (start 2 ranks, or with run.checkpoint.elastic=true)" in err, err

    code, _, err = finish(start([*RUN, "run.nproc=1"], tmp_path))  # 60 steps, as it began with
    assert code == 0, err
    assert "began with 2 ranks, now there are 1: data.accumulation 1 -> 2 (2 micro-batches per step, now 2)" in err
    assert "run.nproc" not in err, "another number of ranks is no change of the configuration that would be ignored"
    (resume,) = journal(run, "resume")
    assert resume["step"] == saved.step and "world: 2 ranks -> 1" in resume["changes"]
    warning = next(w["message"] for w in journal(run, "warning") if "taken by 1" in w["message"])
    assert warning.endswith("the global batch is as large as before")
    end = list_checkpoints(run / "checkpoints").complete[0]
    assert (end.manifest.world, end.manifest.step, end.manifest.samples) == (1, 60, 240)

    out = tmp_path / "exported"
    code, _, err = finish(
        start(["-m", "resilient", "checkpoint", "export", str(run), "--to", "dcp", "--out", str(out)], tmp_path)
    )
    assert code == 0, err
    state = torch.load(end.path / "rank-00000.pt", weights_only=True)["parts"]["engine"]
    model = {name: torch.zeros_like(value) for name, value in state["params"].items()}
    loaded: dict[str, Any] = {"model": model, "train": {"step": 0}}
    dcp.load(loaded, checkpoint_id=out, no_dist=True)
    assert all(torch.equal(model[name], value) for name, value in state["params"].items()) and model
    assert loaded["train"]["step"] == 60
    other = ["-m", "resilient", "checkpoint", "export", str(run), "--to", "universal", "--out", str(tmp_path / "no")]
    code, _, err = finish(start(other, tmp_path))
    assert code == 1 and "was not written by a DeepSpeed engine" in err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_zero_is_exported_for_deepspeed(tmp_path: Path) -> None:
    """Its own format and the universal one, from the command, of a real run's checkpoint."""
    run = tmp_path / "elastic"
    code, _, err = finish(start([*RUN, "run.nproc=2", "run.steps=5", "engine=deepspeed_zero1"], tmp_path), 150)
    assert code == 0, err
    end = list_checkpoints(run / "checkpoints").complete[0]
    masters = {
        name: value
        for rank in range(2)
        for name, value in torch.load(end.path / f"rank-{rank:05d}.pt", weights_only=True)["parts"]["engine"][
            "masters"
        ].items()
    }
    assert masters
    for to in ("universal", "deepspeed", "dcp"):
        out = tmp_path / to
        command = ["-m", "resilient", "checkpoint", "export", str(run), "--to", to, "--out", str(out)]
        code, _, err = finish(start(command, tmp_path))
        assert code == 0, err
        assert any(path.is_file() for path in out.rglob("*")), to
    names = [path.parent.name for path in (tmp_path / "universal").rglob("fp32.pt")]
    state = torch.load(end.path / "rank-00000.pt", weights_only=True)["parts"]["engine"]
    assert sorted(names) == sorted(state["parameters"])
    for path in (tmp_path / "universal").rglob("fp32.pt"):
        full = torch.load(path, weights_only=True)
        full = full["param"] if isinstance(full, dict) else full
        weights = state["parameters"][path.parent.name]
        assert torch.equal(full.reshape(-1).to(weights.dtype), weights.reshape(-1)), path


class OnRank0:
    rank = 0

    def __init__(self, world: int) -> None:
        self.world_size = world


@pytest.mark.parametrize(
    ("first", "before", "world", "now"),
    [(4, 1, 4, 1), (4, 1, 2, 2), (4, 1, 3, 1), (4, 2, 3, 3), (2, 4, 8, 1), (2, 1, 8, 1), (None, 3, 8, 3)],
)
def test_the_global_batch_stays_as_near_as_it_can(first: int | None, before: int, world: int, now: int) -> None:
    resolved = {"run": {"id": "x"}, "data": {"accumulation": before, "micro_batch": 2}}
    found = _same_global_batch(resolved, first, OnRank0(world))  # type: ignore[arg-type]
    assert found["data"] == {"accumulation": now, "micro_batch": 2}


def test_todays_ranks_count_and_the_first_start_is_remembered(tmp_path: Path) -> None:
    config = {"run": {"nproc": 4, "checkpoint": {"elastic": True, "every": 5}}, "data": {"accumulation": 1}}
    RunDirectory.open(tmp_path, "job", config, world=4).close()
    today = {"run": {"nproc": 2, "checkpoint": {"elastic": False, "every": 7}}, "data": {"accumulation": 1}}
    with RunDirectory.open(tmp_path, "job", today, world=2) as run:
        assert run.config["run"] == {"nproc": 2, "checkpoint": {"elastic": False, "every": 5}}
        assert run.differences == [("run.checkpoint.every", 5, 7)]
        assert run.first_world == RunDirectory.attach(run.path).first_world == 4
