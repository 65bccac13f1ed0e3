"""C5, C7, S16, BR-58: a rank is SIGKILLed under each launcher, the job comes back by itself, and what it ends with equals an
undisturbed twin bit for bit. Real launchers, real processes, a real kill."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.checkpoint.manifest import list_checkpoints

TINY = [
    "run.checkpoint.blocking=true",  # which one a kill finds is then known to the step
    "data=synthetic",
    "data.seq_len=16",
    "data.micro_batch=2",
    "data.num_workers=1",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.hidden=32",
    "run.eval_batches=1",
    "run.steps=12",
    "run.checkpoint.every=4",
    "run.guard.exchange_timeout_s=30",
]
HERE = Path(sys.executable).parent
LAUNCHERS = {
    "local": [sys.executable, "-m", "resilient.cli.train", "run.nproc=2", "engine=ddp"],
    "torchrun": [
        str(HERE / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "resilient.cli.train", "engine=fsdp2",
    ],
    "deepspeed": [
        str(HERE / "deepspeed"), "--num_gpus", "2", "--master_port", "{port}", "--module", "resilient.cli.train",
        "engine=deepspeed_zero2", "engine.precision=bf16",
    ],
}  # fmt: skip


def start(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RESILIENT_", "RANK", "WORLD_SIZE", "MASTER_"))}
    env |= {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **environment,
    }
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=170)


def free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def state_of(run: Path) -> tuple[int, list[dict[str, str]]]:
    """Step and per-rank digests (engine, rng, data) of the newest checkpoint."""
    manifest = list_checkpoints(run / "checkpoints").complete[0].manifest
    parts = [{k: v for k, v in part.digests.items() if k in ("engine", "rng", "data")} for part in manifest.parts]
    return manifest.step, parts


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[] if name == "local" else [pytest.mark.slow]) for name in LAUNCHERS]
)
def test_a_killed_rank_comes_back_and_equals_the_twin(launcher: str, tmp_path: Path):
    step = random.Random(launcher).randint(2, 11)  # any step will do; the same each time, to be able to look again
    port = free_port()
    job = [word.format(port=port) for word in LAUNCHERS[launcher]] + TINY
    twin = start([*job, "run.id=twin"], tmp_path)
    assert twin.returncode == 0, twin.stderr[-3000:]
    supervisor = [sys.executable, "-m", "resilient", "launch", "--backoff", "0.1", "--run-id", "hurt", "--"]
    hurt = start([*supervisor, *job, "fault=kill_rank", f"fault.step={step}", "fault.rank=1"], tmp_path)
    assert hurt.returncode == 0, hurt.stderr[-3000:]
    summary = json.loads((tmp_path / "runs" / "hurt" / "summary.json").read_text())
    assert summary["status"] == "done" and summary["steps"] == 12 and summary["generation"] == 1
    reference = json.loads((tmp_path / "runs" / "twin" / "summary.json").read_text())
    assert summary["eval_loss"] == reference["eval_loss"] and summary["final_loss"] == reference["final_loss"]
    assert state_of(tmp_path / "runs" / "hurt") == state_of(tmp_path / "runs" / "twin")
    assert json.loads((tmp_path / "runs" / "hurt" / "verdict.json").read_text())["code"] == 0


@pytest.mark.timeout(300)
def test_br63_the_same_id_goes_on_with_the_original_configuration(tmp_path: Path):
    job = [sys.executable, "-m", "resilient.cli.train", "run.nproc=1", "run.id=mine", *TINY]
    killed = start([*job, "fault=kill_rank", "fault.step=7", "fault.rank=0"], tmp_path)
    assert killed.returncode == -9
    again = start([*job, "optim.lr=0.5"], tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "mine began with optim.lr=0.003; 0.5 is ignored" in again.stderr
    events = [json.loads(line) for line in (tmp_path / "runs" / "mine" / "journal.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "resume"] == [4]
    assert [(e["steps"], e["exact"]) for e in events if e["kind"] == "replay"] == [([5, 6], True)], "BR-08"
    refused = start([*job, "run.resume=never"], tmp_path)
    assert refused.returncode == 64 and "run.resume=never" in refused.stderr
