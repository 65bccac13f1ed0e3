"""The exchange: every rank's record in one packed all-reduce, on a process group of the guard's own.

Each rank writes its row into its slot of a zero matrix and the matrices are summed. Adding zeros is exact in floating
point, NaN and Inf stay in their slot, and the result is bit-identical on all ranks: the replicated input of the judge.
All collectives of the guard have the same shape and carry a `kind`, so ranks that ever get out of step find a named
mismatch in the table instead of each other's bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from resilient.errors import ExchangeFailed
from resilient.signals import Flag, Kind, StepRecord, StepTable
from resilient.signals.record import COLUMNS, LAYER_COLUMNS, row_width


class Exchange:
    """Create on all ranks at the same point: it makes a process group. World size 1 needs no torch.distributed."""

    def __init__(self, device: torch.device, timeout_s: float, peers: Sequence[Sequence[int]] | None = None) -> None:
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)
        self.peers = peers
        self.layers: tuple[str, ...] = ()  # groups in the tail of every row; change it on all ranks together
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.world_size = dist.get_world_size() if self.distributed else 1
        self._group: dist.ProcessGroup | None = None
        if self.distributed:
            # gloo's own deadline is the group's. NCCL's watchdog would kill the process at the group's timeout, which
            # the guard must never cause: there the group is patient and the wait below has the deadline.
            backend = "gloo" if device.type == "cpu" else dist.get_backend()
            patience = self.timeout if backend == "gloo" else self.timeout * 20
            self._group = dist.new_group(backend=backend, timeout=patience)

    def table(self, record: StepRecord) -> StepTable:
        """All ranks' records. Collective. Raises ExchangeFailed when a rank did not come in time or sent another kind."""
        row = self.pack(record)
        if not self.distributed:
            return StepTable(row.cpu().numpy()[None, :], self.peers, self.layers)
        matrix = torch.zeros((self.world_size, len(row)), dtype=torch.float64, device=self.device)
        matrix[self.rank] = row
        try:
            work = dist.all_reduce(matrix, group=self._group, async_op=True)
            assert work is not None
            work.wait(self.timeout)
        except (RuntimeError, dist.DistBackendError) as error:
            raise ExchangeFailed(f"the exchange failed on rank {self.rank} at step {record.step}: {error}") from error
        table = StepTable(matrix.cpu().numpy(), self.peers, self.layers)  # the one host copy of the step
        kinds = table.column("kind")
        if not (kinds == kinds[0]).all() and not table.ranks_flagged(Flag.GUARD_FAILED):
            raise ExchangeFailed(f"ranks are out of step: kinds {kinds.tolist()} at step {record.step}")
        return table

    def vote(self, ok: bool, step: int = 0, attempt: int = 0) -> bool:
        """True on all ranks if every rank said True. Collective."""
        record = StepRecord(
            step=step, attempt=attempt, kind=Kind.VOTE, flags=0 if ok else Flag.NO, loss=0.0, loss_max=0.0
        )
        return not self.table(record).ranks_flagged(Flag.NO)

    def share(self, value: Any, source: int = 0) -> Any:
        """The JSON value of rank `source`, on every rank. Collective; for start-up, not for the step loop."""
        if not self.distributed:
            return value
        text = json.dumps(value).encode() if self.rank == source else b""
        size = torch.tensor([len(text)], dtype=torch.int64, device=self.device)
        self._checked(dist.broadcast(size, src=source, group=self._group, async_op=True))
        payload = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            payload.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self._checked(dist.broadcast(payload, src=source, group=self._group, async_op=True))
        return json.loads(payload.cpu().numpy().tobytes())

    def _checked(self, work: Any) -> None:
        try:
            work.wait(self.timeout)
        except (RuntimeError, dist.DistBackendError) as error:
            raise ExchangeFailed(f"the exchange failed on rank {self.rank}: {error}") from error

    def pack(self, record: StepRecord) -> torch.Tensor:
        """(row_width(len(self.layers)),) float64 on the device. Device scalars are gathered there; host values travel as
        one copy."""
        values = record.values()
        on_device = [(i, v) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
        host = np.full(row_width(len(self.layers)), np.nan)
        host[: len(COLUMNS)] = [0.0 if isinstance(v, torch.Tensor) else float(v) for v in values]
        row = torch.from_numpy(host).to(self.device)
        if on_device:
            index = torch.tensor([i for i, _ in on_device], device=self.device)
            row[index] = torch.stack([v.detach().to(self.device, torch.float64).reshape(()) for _, v in on_device])
        if self.layers:
            tail = row[len(COLUMNS) :].view(len(LAYER_COLUMNS), len(self.layers))
            for i, name in enumerate(LAYER_COLUMNS):
                if name in record.layers:
                    tail[i] = record.layers[name]
        return row

    def close(self) -> None:
        """Give the group back. Safe when the default group is already gone."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
