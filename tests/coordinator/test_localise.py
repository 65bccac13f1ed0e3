"""The second pass of a failed reduction check (S19): who received something else, where ranks share rows and where not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resilient.coordinator.exchange import Exchange
from resilient.coordinator.localise import localise
from resilient.engines.base import CellRows
from resilient.signals import CheckPlan
from tests.ranks import run_pooled

ROWS = 12
ONE_RECEIVER = ((0, 1, 2),)
EACH_ITS_OWN = ((0,), (1,), (2,))
HELD = (range(5), range(4, 9), range(8, 12))  # with one receiver: rows 4 and 8 are shared


def located(
    rank: int, world: int, receivers: tuple[tuple[int, ...], ...], off: dict[int, dict[str, list[int]]]
) -> list[tuple[int, str, int]]:
    """(rank, cell, rows) of what was found. off: by rank, the rows of each cell in which it received something else."""
    torch.manual_seed(0)
    exchange = Exchange(torch.device("cpu"), 30.0)
    cells = sorted({cell for rows in off.values() for cell in rows})

    def check_rows(cell: int) -> list[CellRows]:
        sent = torch.randn(world, ROWS, 8, dtype=torch.float64) + 1.0
        received, held = sent.sum(0), torch.ones(ROWS, dtype=torch.bool)
        if len(receivers) == 1:
            held = torch.tensor([row in HELD[rank] for row in range(ROWS)])
            share = torch.tensor(
                [sum(row in rows for rows in HELD) for row in range(ROWS)]
            )  # each has its part of a row
            received = received / share[:, None] * held[:, None]
        for row in off.get(rank, {}).get(cells[cell], []):
            received[row] += 5.0
        return [CellRows(cells[cell], sent[rank], received, held, str)]

    plan = CheckPlan(tuple(cells), receivers, 2.0**-24)
    engine: Any = SimpleNamespace(check_rows=check_rows)
    found = localise(exchange, engine, plan, range(len(cells)))
    exchange.close()
    return [(one.rank, one.cell, one.rows) for one in found]


@pytest.mark.parametrize(
    ("receivers", "off", "expected"),
    [
        (ONE_RECEIVER, {1: {"a": [4, 5, 8]}}, [(1, "a", 3)]),
        (ONE_RECEIVER, {1: {"a": [4, 5, 8], "b": [4, 8]}}, [(1, "a", 3), (1, "b", 2)]),
        (ONE_RECEIVER, {1: {"a": [5]}, 2: {"a": [8, 9]}}, [(1, "a", 2), (2, "a", 2)]),
        (ONE_RECEIVER, {0: {"a": [4]}}, [(0, "a", 1), (1, "a", 1)]),
        (EACH_ITS_OWN, {1: {"a": [5]}, 2: {"a": [5, 6]}}, [(1, "a", 1), (2, "a", 2)]),
        (EACH_ITS_OWN, {0: {"a": []}}, []),
    ],
    ids=["shared rows", "shared rows only in one cell", "two of them", "nobody can tell", "the same row", "none"],
)
def test_s19_only_ranks_with_a_row_of_their_own_are_named_where_rows_are_shared(
    receivers: tuple[tuple[int, ...], ...], off: dict[int, dict[str, list[int]]], expected: list[tuple[int, str, int]]
) -> None:
    for found in run_pooled(located, 3, receivers, off):
        assert found == expected
