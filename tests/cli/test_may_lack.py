"""`run.checkpoint.allow_missing`: a checkpoint that lacks a part, and what a start of `resilient train` makes of it (BR-09, issue 5,
deliver 5)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient.checkpoint.digest import state_digest
from resilient.checkpoint.manifest import Checkpoint, list_checkpoints, write_manifest
from resilient.checkpoint.parts import read_part, write_part
from resilient.checkpoint.pieces import from_plain, to_plain
from resilient.checkpoint.storage import LocalStorage
from resilient.telemetry.run_directory import RunDirectory
from tests.cli.commands import finish, start
from tests.engines.contract import without

RUN = [
    "-m", "resilient", "train", "run.id=lacking", "run.root=.", "data=synthetic", "data.seq_len=16", "data.micro_batch=2",
    "model.width=16", "model.layers=2", "model.heads=2", "model.hidden=32", "run.eval_every=0", "run.eval_batches=1",
    "run.sample_tokens=0", "run.steps=6", "run.checkpoint.every=3", "run.checkpoint.blocking=true",
]  # fmt: skip
ALLOWED = "run.checkpoint.allow_missing=[moments,schedulers]"


def journal(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event", line.get("kind")) == kind]


def strip(run: Path) -> Checkpoint:
    """Take moments and schedule out of the newest checkpoint that is not of the last step, and delete all others."""
    storage = LocalStorage(run / "checkpoints")
    complete = list_checkpoints(storage).complete
    chosen = next(one for one in complete if one.manifest.step == 3)
    for one in complete:
        if one.path != chosen.path:
            for file in one.path.iterdir():
                file.unlink()
            one.path.rmdir()
    parts = []
    for rank, part in zip(chosen.manifest.ranks, chosen.manifest.parts, strict=True):
        snapshot = read_part(storage, chosen.path.name, part)
        engine = without(snapshot.parts["engine"], "moments", "schedulers")
        pieces = [piece for piece in from_plain(snapshot.pieces) if not piece.name.startswith("moments/")]
        lacking = replace(
            snapshot,
            parts={**snapshot.parts, "engine": engine},
            digests={**snapshot.digests, "engine": state_digest(engine)},
            pieces=to_plain(pieces),
        )
        (chosen.path / part.file).unlink()
        parts.append(write_part(storage, chosen.path.name, rank, lacking))
    manifest = replace(chosen.manifest, parts=tuple(parts))
    (chosen.path / "manifest.json").unlink()
    write_manifest(chosen.path, manifest)
    (run / "outer.json").unlink(missing_ok=True)
    return Checkpoint(chosen.path, manifest)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_may_be_missing_is_named_for_one_start(tmp_path: Path) -> None:
    """By a start of the same size; another world size is for tests/engines/test_pieces.py."""
    run = tmp_path / "lacking"
    code, _, err = finish(start([*RUN, "run.nproc=2"], tmp_path))
    assert code == 0, err
    lacking = strip(run)
    files = {path.name: path.read_bytes() for path in lacking.path.iterdir()}
    again = [*RUN, "run.nproc=2"]

    code, _, err = finish(start(again, tmp_path))
    assert code == 77 and "part 'moments' is missing" in err, err
    assert {path.name: path.read_bytes() for path in lacking.path.iterdir()} == files, "a refused start touched it"

    code, _, err = finish(start([*again, "run.checkpoint.allow_missing=[moments,schedular]"], tmp_path))
    assert code == 64 and "run.checkpoint.allow_missing names 'schedular' (did you mean 'schedulers'?)" in err, err
    assert journal(run, "resume") == []

    code, out, err = finish(start([*again, ALLOWED], tmp_path))
    assert code == 0, err
    assert "allow_missing" not in err, "it is no change of the configuration that would be ignored"
    assert out.count("kept as it is here (run.checkpoint.allow_missing)") == 1, out
    (resume,) = journal(run, "resume")
    assert resume["step"] == 3 and resume["absent"] == ["moments", "schedulers"]
    (told,) = [w["message"] for w in journal(run, "warning") if "kept as it is here" in w["message"]]
    assert told.startswith("the state of step 3 has no moments, schedulers: ")
    end = list_checkpoints(run / "checkpoints").complete[0]
    assert end.manifest.step == 6, "it went on to the end"
    state = torch.load(end.path / "rank-00000.pt", weights_only=True)["parts"]["engine"]
    steps = {int(entry["values"]["step"]) for entry in state["optimizer"]["state"].values()}
    assert steps == {3}, "moments began anew"
    assert state["counters"]["steps"] == 6 and state["schedule"]["state"]["last_epoch"] == 3


def test_todays_value_counts(tmp_path: Path) -> None:
    def config(*names: str) -> dict[str, Any]:
        return {"run": {"checkpoint": {"allow_missing": list(names), "every": 5}}}

    RunDirectory.open(tmp_path, "job", config()).close()
    with RunDirectory.open(tmp_path, "job", config("moments", "buffers/centre.mean")) as run:
        assert run.config == config("moments", "buffers/centre.mean") and run.differences == []
    with RunDirectory.open(tmp_path, "job", config()) as run:
        assert run.config == config()
