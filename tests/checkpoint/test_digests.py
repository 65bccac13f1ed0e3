"""Digests of a snapshot are taken behind the training thread's back, of what was frozen, and nothing else (C3)."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from resilient.checkpoint.snapshot import PARTS, Digests, Snapshot


def parts(value: float = 1.0) -> dict[str, Any]:
    return {"engine": {"w": torch.full((300,), value)}, "rng": {}, "data": {"window": 3}, "judge": {}}


def test_names_are_known_at_once_and_values_are_waited_for():
    begun, go = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(lambda: (begun.set(), go.wait(20.0)))
        assert begun.wait(20.0)
        digests = Digests(parts(), executor)
        snapshot = Snapshot(1, 1, 3, 0.1, 1, parts(), digests)
        assert set(snapshot.digests) == set(PARTS) and all(name in digests for name in PARTS) and "other" not in digests
        assert not digests.taken
        go.set()
        assert digests == Snapshot.digest_parts(parts()) != Snapshot.digest_parts(parts(2.0)) and digests.taken


def test_they_are_saved_as_plain_values():
    with ThreadPoolExecutor(1) as executor:
        digests = Digests(parts(), executor)
        buffer = io.BytesIO()
        torch.save({"digests": digests}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["digests"]
    assert isinstance(loaded, dict) and loaded == dict(digests)


def test_what_goes_wrong_is_said_where_a_digest_is_read():
    with ThreadPoolExecutor(1) as executor:
        digests = Digests({"engine": {}}, executor)
        with pytest.raises(KeyError, match="rng"):
            digests["engine"]
