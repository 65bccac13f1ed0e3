"""The guard on a CUDA device: measured without a host sync per parameter, restored bit for bit. Skipped without one."""

from __future__ import annotations

import pytest
import torch

import resilient
from resilient.checkpoint.config import SnapshotConfig
from resilient.checkpoint.digest import state_digest
from resilient.signals import StepRecord
from resilient.train.model import GPT, ModelConfig
from tests.scenarios.harness import ROLL_BACK_AT_ONCE, Ear, seed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run(nan_at: int | None) -> tuple[str, Ear, resilient.Guard]:
    seed(0)
    model = GPT(ModelConfig(width=32, layers=2, heads=2, hidden=64, dropout=0.2)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(i)) for i in range(40)]
    ear = Ear()
    guard = resilient.Guard(
        model,
        optimizer,
        data=data,
        policy=ROLL_BACK_AT_ONCE,
        snapshot=SnapshotConfig(every=3, trust_after=0),
        listeners=[ear],
        progress=False,
    )
    broken = False
    for batch in guard.batches(steps=9):
        tokens = batch.cuda()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if guard.step_index == nan_at and not broken:
            broken, loss = True, loss * float("nan")
        guard.backward(loss)
        guard.step()
    return state_digest(guard.engine.capture()), ear, guard


def test_rollback_on_the_device_equals_the_twin():
    twin, _, _ = run(None)
    hurt, ear, _ = run(8)
    assert [i.action for i in ear.incidents] == ["rollback"]
    assert hurt == twin


def test_measuring_and_packing_do_not_synchronise():
    _, _, guard = run(None)
    coordinator = guard._coordinator
    model = guard.engine.module
    torch.cuda.set_sync_debug_mode("error")
    try:
        coordinator._measure.start()
        loss = model(torch.zeros(4, 16, dtype=torch.long, device="cuda")).float().square().mean()
        guard.backward(loss)
        record = coordinator._measure.record(1, 1)
        assert isinstance(record, StepRecord)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    guard.engine.skip()
