"""The exchange: every rank's record in one packed all-reduce, on a process group of the guard's own.

table     Each rank writes its row into its slot of a zero matrix and the matrices are summed. Adding zeros is exact in
          floating point, NaN and Inf stay in their slot.
sketch    Each rank packs its row into a summary of a fixed size, at most 64 KiB, and the summaries of all ranks are merged by
          two all-reduces that are on their way together: SUM of the one part, MAX of the other (signals/sketch_pack.py). For
          worlds where a table is too large: its size and the judge's work grow with the ranks.

Either way the result is bit-identical on all ranks: the replicated input of the judge. All exchanges have the same shape and
carry a `kind`, so ranks that ever get out of step find a named mismatch in it instead of each other's bytes.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from resilient.errors import ExchangeFailed
from resilient.signals import CheckPlan, Exchanged, Flag, Kind, StepRecord, StepSketch, StepTable
from resilient.signals.checks import CHECK_COLUMNS
from resilient.signals.record import COLUMNS, LAYER_COLUMNS, row_width
from resilient.signals.sketch import read
from resilient.signals.sketch_pack import Sketch, SketchLayout, SketchState, pack
from resilient.signals.table import as_peers

Mode = Literal["auto", "table", "sketch"]

SKETCH_FROM = 4096  # ranks from which on `auto` takes the sketch; docs/configuration.md has the measurement

_HOST_BYTES = 64  # of a host's name


class Exchange:
    """Create on all ranks at the same point: it makes a process group. World size 1 needs no torch.distributed.

    peers: groups of ranks that are compared with each other; None: all. A sketch compares all ranks.
    mode: auto: a sketch from SKETCH_FROM ranks on, if all ranks are one peer group."""

    def __init__(
        self,
        device: torch.device,
        timeout_s: float,
        peers: Sequence[Sequence[int]] | None = None,
        mode: Mode = "table",
    ) -> None:
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)
        self.layers: tuple[str, ...] = ()  # groups in the tail of every row; change it on all ranks together
        self.plan: CheckPlan | None = None  # of the reduction check, whose cells follow; likewise
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.world_size = dist.get_world_size() if self.distributed else 1
        self.peers = as_peers(peers, self.world_size)
        if mode == "auto":
            mode = "sketch" if self.world_size >= SKETCH_FROM and len(self.peers) == 1 else "table"
        # What this rank knows of itself, for its sketches; the judge lets steps into it and rewinds it. None: in table mode.
        self.sketch_state = SketchState([self.rank]) if mode == "sketch" else None
        self._layout = SketchLayout()
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

    def store(self) -> dist.Store | None:
        """The key-value store behind the group, shared by all ranks; None in a world of 1. Not collective."""
        return self._group.get_group_store() if self._group is not None else None

    def table(self, record: StepRecord) -> Exchanged:
        """All ranks' records, as a table or as a sketch. Collective. Raises ExchangeFailed when a rank did not come in time or
        sent another kind."""
        when = f" at step {record.step}"
        if self.sketch_state is None:
            return self._in_step(self._all_rows(self.pack(record), when), when)
        own = StepTable(self.pack(record).cpu().numpy()[None], None, self.layers, self.plan)
        return self._in_step(self._sketch(own, self.sketch_state, when), when)

    def every_row(self, record: StepRecord) -> StepTable:
        """As `table`, with every rank's row in any mode: for what is rare and must know single ranks exactly. Its size grows
        with the world. Collective."""
        brought = self.table(record)
        if isinstance(brought, StepTable):
            return brought
        return self._all_rows(self.pack(record), f" at step {record.step}")

    def _all_rows(self, row: torch.Tensor, when: str) -> StepTable:
        rows = self.gather(row, when)  # the one host copy of the step
        return StepTable(rows, self.peers, self.layers, self.plan, self.rank)

    def _sketch(self, own: StepTable, state: SketchState, when: str) -> StepSketch:
        if (self._layout.layers, self._layout.plan) != (self.layers, self.plan):
            self._layout = SketchLayout(self.layers, self.plan)
        mine = pack(self._layout, own, state)
        sums, largest = (torch.from_numpy(part).to(self.device) for part in (mine.sums, mine.largest))
        if self.distributed:
            deadline = time.monotonic() + self.timeout.total_seconds()
            works = [
                self._issued(lambda: dist.all_reduce(sums, group=self._group, async_op=True), when),
                self._issued(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX, self._group, async_op=True), when),
            ]
            for work in works:
                self._wait(work, when, max(deadline - time.monotonic(), 0.001))
        merged = Sketch(sums.cpu().numpy(), largest.cpu().numpy())
        return StepSketch(read(self._layout, merged, state.centre), own, state)

    def _in_step(self, brought: Any, when: str) -> Any:
        """The same, if all ranks are at the same point of the program."""
        low, high = brought.ends("kind")
        if low != high and not brought.ranks_flagged(Flag.GUARD_FAILED):
            raise ExchangeFailed(f"ranks are out of step{when}: kinds from {low:g} to {high:g}")
        return brought

    def vote(self, ok: bool, step: int = 0, attempt: int = 0) -> bool:
        """True on all ranks if every rank said True. Collective."""
        record = StepRecord(
            step=step, attempt=attempt, kind=Kind.VOTE, flags=0 if ok else Flag.NO, loss=0.0, loss_max=0.0
        )
        return not self.table(record).ranks_flagged(Flag.NO)

    def gather(self, vector: torch.Tensor, when: str = "") -> np.ndarray:
        """(world, n) float64: every rank's (n,) vector, on every rank. Collective; the same n on all ranks. when: for the
        message of ExchangeFailed."""
        matrix = torch.zeros((vector.numel(), self.world_size), dtype=torch.float64, device=self.device)
        matrix[:, self.rank] = vector.detach().to(self.device, torch.float64)
        return self.total(matrix, when).cpu().numpy().T  # a column's values lie together

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
        self._wait(self._issued(issue, when), when, self.timeout.total_seconds())

    def _issued(self, issue: Callable[[], Any], when: str) -> Any:
        try:
            return issue()
        except (RuntimeError, dist.DistBackendError) as error:
            raise ExchangeFailed(f"the exchange failed on rank {self.rank}{when}: {error}") from error

    def _wait(self, work: Any, when: str, seconds: float) -> None:
        self._issued(lambda: work.wait(timedelta(seconds=seconds)), when)

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
