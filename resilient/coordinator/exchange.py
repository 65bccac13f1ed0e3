"""The exchange: every rank's record in one packed all-reduce, on a process group of the guard's own.

Each rank writes its row into its slot of a zero matrix and the matrices are summed. Adding zeros is exact in floating
point, NaN and Inf stay in their slot, and the result is bit-identical on all ranks: the replicated input of the judge.
All collectives of the guard have the same shape and carry a `kind`, so ranks that ever get out of step find a named
mismatch in the table instead of each other's bytes.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from resilient.errors import ExchangeFailed
from resilient.signals import CheckPlan, Flag, Kind, StepRecord, StepTable
from resilient.signals.record import CHECK_COLUMNS, COLUMNS, LAYER_COLUMNS, row_width

_HOST_BYTES = 64  # of a host's name


class Exchange:
    """Create on all ranks at the same point: it makes a process group. World size 1 needs no torch.distributed."""

    def __init__(self, device: torch.device, timeout_s: float, peers: Sequence[Sequence[int]] | None = None) -> None:
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)
        self.peers = peers
        self.layers: tuple[str, ...] = ()  # groups in the tail of every row; change it on all ranks together
        self.plan: CheckPlan | None = None  # of the reduction check, whose cells follow; likewise
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.world_size = dist.get_world_size() if self.distributed else 1
        self._group: dist.ProcessGroup | None = None
        if self.distributed:
            self._group = self.another_group(timeout_s)

    def another_group(self, timeout_s: float) -> dist.ProcessGroup:
        """A process group of all ranks, on the device's backend. Collective; whoever asks for it destroys it.

        gloo's own deadline is the group's. NCCL's watchdog would kill the process at the group's timeout, which the guard
        must never cause: there the group is patient, and waits have a deadline of their own."""
        backend = "gloo" if self.device.type == "cpu" else dist.get_backend()
        patience = timedelta(seconds=timeout_s) * (1 if backend == "gloo" else 20)
        return dist.new_group(backend=backend, timeout=patience)

    def table(self, record: StepRecord) -> StepTable:
        """All ranks' records. Collective. Raises ExchangeFailed when a rank did not come in time or sent another kind."""
        rows = self.gather(self.pack(record), f" at step {record.step}")  # the one host copy of the step
        table = StepTable(rows, self.peers, self.layers, self.plan)
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

    def gather(self, vector: torch.Tensor, when: str = "") -> np.ndarray:
        """(world, n) float64: every rank's (n,) vector, on every rank. Collective; the same n on all ranks. when: for the
        message of ExchangeFailed."""
        matrix = torch.zeros((self.world_size, vector.numel()), dtype=torch.float64, device=self.device)
        matrix[self.rank] = vector.detach().to(self.device, torch.float64)
        return self.total(matrix, when).cpu().numpy()

    def total(self, tensor: torch.Tensor, when: str = "") -> torch.Tensor:
        """The sum over all ranks, in place. Collective."""
        if self.distributed:
            self._checked(lambda: dist.all_reduce(tensor, group=self._group, async_op=True), when)
        return tensor

    def send_bytes(self, data: bytes | None, source: int) -> bytes:
        """The bytes of rank `source`, on every rank. Collective; for start-up and for the second look at a suspicion."""
        if not self.distributed:
            return data or b""
        data = data or b""
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        self._checked(lambda: dist.broadcast(size, src=source, group=self._group, async_op=True))
        payload = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == source and data:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._checked(lambda: dist.broadcast(payload, src=source, group=self._group, async_op=True))
        return payload.cpu().numpy().tobytes()

    def hosts(self) -> tuple[str, ...]:
        """Host name of every rank. Collective; for start-up."""
        name = socket.gethostname().encode()[:_HOST_BYTES]
        vector = torch.zeros(_HOST_BYTES, dtype=torch.float64)
        vector[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8).double()
        return tuple(bytes(row.astype(np.uint8)).rstrip(b"\0").decode(errors="replace") for row in self.gather(vector))

    def share(self, value: Any, source: int = 0) -> Any:
        """The JSON value of rank `source`, on every rank. Collective; for start-up, not for the step loop."""
        if not self.distributed:
            return value
        text = json.dumps(value).encode() if self.rank == source else None
        return json.loads(self.send_bytes(text, source))

    def _checked(self, issue: Callable[[], Any], when: str = "") -> None:
        """Issue a collective and wait for it; what goes wrong with either is ExchangeFailed."""
        try:
            issue().wait(self.timeout)
        except (RuntimeError, dist.DistBackendError) as error:
            raise ExchangeFailed(f"the exchange failed on rank {self.rank}{when}: {error}") from error

    def pack(self, record: StepRecord) -> torch.Tensor:
        """(self.width,) float64 on the device. Device scalars are gathered there; host values travel as
        one copy."""
        values = record.values()
        on_device = [(i, v) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
        host = np.full(self.width, np.nan)
        host[: len(COLUMNS)] = [0.0 if isinstance(v, torch.Tensor) else float(v) for v in values]
        row = torch.from_numpy(host).to(self.device)
        if on_device:
            index = torch.tensor([i for i, _ in on_device], device=self.device)
            row[index] = torch.stack([v.detach().to(self.device, torch.float64).reshape(()) for _, v in on_device])
        if self.layers:
            tail = row[len(COLUMNS) : row_width(len(self.layers))].view(len(LAYER_COLUMNS), len(self.layers))
            for i, name in enumerate(LAYER_COLUMNS):
                if name in record.layers:
                    tail[i] = record.layers[name]
        if self.plan is not None and record.checks and len(record.checks["check_sq"]) == len(self.plan.names):
            cells = row[row_width(len(self.layers)) :].view(len(CHECK_COLUMNS), len(self.plan.names))
            for i, name in enumerate(CHECK_COLUMNS):
                cells[i] = record.checks[name]
        return row

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return row_width(len(self.layers), len(self.plan.names) if self.plan is not None else 0)

    def close(self) -> None:
        """Give the group back. Safe when the default group is already gone."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
