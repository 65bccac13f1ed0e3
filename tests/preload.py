"""Imported once by the server from which the ranks of the tests are forked (see ranks.py): what nearly every rank needs.

None of it starts a thread, or a fork would not be safe; tests/test_ranks.py holds it to that. What cannot be imported is left
to the test that needs it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

for _name in (
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "resilient.integrations.guard",
    "resilient.engines.fsdp2",
    "resilient.train.loop",
    "resilient.engines.deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # DeepSpeed imports it with its first engine, and torch.compile with it
    "tests.engines.contract",
    "tests.scenarios.harness",
):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

gc.freeze()  # DeepSpeed collects garbage with every engine: of a rank's own objects only, and no page is copied for it
