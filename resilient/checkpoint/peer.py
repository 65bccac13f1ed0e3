"""The peer tier: each rank's newest snapshots in the memory of its own host and of another one.

Training processes die with their job, so the copies lie in a folder that is memory (tmpfs) and outlives them: after a restart
every rank looks on its own host first and fetches from the partner's what a lost host took with it. Two hosts that
vanish together may take both copies; then the filesystem tier is next.

    hold      in the background: write the own part, send it to the partner
    settle    once all ranks hold it (they say so in their rows): mark it complete, drop what is older
    find      collective, at a start: which complete snapshots every rank can still get
    load      this rank's part, verified

Names carry everything that identifies a part, its digest included:

    <folder>/step-00000050-a00000057-rank-00003-of-00008-<xxh3-128>.pt      step-00000050-a00000057.complete
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from resilient.checkpoint.manifest import folder_name
from resilient.checkpoint.part_server import Address, PartServer, fetch_part, partners, send_part
from resilient.checkpoint.snapshot import PARTS, Snapshot
from resilient.checkpoint.trust import Key
from resilient.errors import CheckpointError

_FIELDS = tuple(f.name for f in fields(Snapshot))
_PART = re.compile(r"step-(\d{8,})-a(\d{8,})-rank-(\d{5,})-of-(\d{5,})-([0-9a-f]{32})\.pt")
_KEY = re.compile(r"step-(\d{8,})-a(\d{8,})\b")
_CHUNK = 1 << 20
_OFFERED = 4  # newest complete snapshots of a host that are spoken of at a start
_BITS = 48  # of a float64 that carry ranks


class PeerStore:
    """Construct on all ranks, then `join` on all of them at the same point.

    folder: of this run, on a memory file system of this host; made with mode 0700, shared by the host's ranks.
    token: the job's secret.
    keep: complete snapshots to keep; one more is being written now and then. timeout_s: of one silence in a transfer.
    Raises CheckpointError on the rank that cannot make its folder or listen."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        token: str,
        keep: int = 2,
        limit: int = 1 << 40,
        timeout_s: float = 30.0,
    ) -> None:
        self.folder, self.rank, self.world = folder, rank, 1
        self.keep, self.timeout_s = max(keep, 1), timeout_s
        self.partner: int | None = None
        self._token = token
        self._gather: Callable[[torch.Tensor], np.ndarray] | None = None
        self._addresses: list[Address] = []
        self._held = -1
        self._problem = ""
        self._running: Future[int] | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._server = PartServer(folder, token, limit=limit, timeout_s=timeout_s)
        except OSError as error:
            raise CheckpointError(f"no peer copies from rank {rank}: {folder}: {error}") from error
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="resilient-peer")

    def join(self, hosts: Sequence[str], gather: Callable[[torch.Tensor], np.ndarray]) -> None:
        """Learn where the others listen. hosts: host name by rank. gather: (n,) vector -> (world, n) of all ranks, collective.
        Collective."""
        self.world, self._gather = len(hosts), gather
        self._addresses = _addresses(gather, self._server.port)
        self.partner = partners(hosts)[self.rank]
        for path in self.folder.parent.glob(f"{self.folder.name.rpartition('-')[0]}-*"):
            if path != self.folder and self.folder.name.count("-"):  # of a run of this name that was begun anew since
                shutil.rmtree(path, ignore_errors=True)

    # -- while training -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self._running is None or self._running.done()

    def hold(self, snapshot: Snapshot, outer: Mapping[str, Any] | None = None) -> None:
        """Copy this frozen snapshot, in the background, and the JSON state that outlives a rollback. The last one must be
        done (`idle`)."""
        if not self.idle:
            raise RuntimeError("one snapshot at a time")
        self._running = self._worker.submit(self._hold, snapshot, dict(outer or {}))

    def held(self) -> int:
        """Attempt of the newest snapshot that lies on this host and at the partner; -1 before the first one. No wait."""
        if self._running is not None and self._running.done():
            done, self._running = self._running, None
            error = done.exception()
            if error is None:
                self._held = max(self._held, done.result())
            else:
                self._problem = str(error)
        return self._held

    def problem(self) -> str:
        """What went wrong since it was asked last; "" if nothing."""
        self.held()
        said, self._problem = self._problem, ""
        return said

    def settle(self, step: int, attempt: int) -> None:
        """Every rank holds it: mark it complete and drop what is older than `keep`. Local. A full folder is no error."""
        with suppress(OSError):
            (self.folder / f"{folder_name(step, attempt)}.complete").touch(mode=0o600)
        complete = self._complete()
        for path, key in self._all():
            if len(complete) >= self.keep and key.attempt < complete[self.keep - 1].attempt:
                path.unlink(missing_ok=True)

    def drain(self, timeout_s: float) -> bool:
        """Wait for the copy under way. False if it is not done by then."""
        if self._running is not None:
            with suppress(Exception):
                self._running.result(timeout_s)
        return self.idle

    def close(self) -> None:
        """Stop listening. The copies stay for the next start."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._server.close()

    def _hold(self, snapshot: Snapshot, outer: dict[str, Any]) -> int:
        key = Key(snapshot.step, snapshot.attempt)
        partial = self.folder / f"{folder_name(*key)}-{self.rank}.{secrets.token_hex(4)}.partial"
        try:
            with open(partial, "wb") as file:
                torch.save({name: getattr(snapshot, name) for name in _FIELDS} | {"outer": outer}, file)
            name = f"{folder_name(*key)}-rank-{self.rank:05d}-of-{self.world:05d}-{_digest(partial)}.pt"
            os.replace(partial, path := self.folder / name)
        except Exception as error:  # torch's writer turns a full file system into a RuntimeError
            raise CheckpointError(f"rank {self.rank} could not copy step {snapshot.step} to memory: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
        if self.partner is not None:
            send_part(path, self._addresses[self.partner], self._token, self.timeout_s)
        return snapshot.attempt

    # -- at a start -----------------------------------------------------------------------------------------------

    def find(self) -> list[tuple[Key, list[int]]]:
        """Complete snapshots of this world size whose parts all still lie on some host, newest first, each with a rank per
        part on whose host it is (the part's own rank where it can be). Collective; the same on all ranks."""
        offered = self._complete()[:_OFFERED]
        words = -(-self.world // _BITS)
        mine = torch.zeros(_OFFERED, 2 + words, dtype=torch.float64)
        parts = {key: self._parts(key) for key in offered}
        for i, key in enumerate(offered):
            mine[i, 0], mine[i, 1] = key.attempt + 1, key.step
            for rank in parts[key]:
                mine[i, 2 + rank // _BITS] += float(1 << rank % _BITS)
        assert self._gather is not None
        told = self._gather(mine.reshape(-1)).reshape(self.world, _OFFERED, 2 + words)
        holders: dict[Key, dict[int, list[int]]] = {}
        for holder, rows in enumerate(told):
            for attempt, step, *bits in rows.astype(np.int64).tolist():
                if attempt > 0:
                    of_key = holders.setdefault(Key(step, attempt - 1), {})
                    for rank in range(self.world):
                        if bits[rank // _BITS] >> rank % _BITS & 1:
                            of_key.setdefault(rank, []).append(holder)
        return [
            (key, [rank if rank in found[rank] else found[rank][0] for rank in range(self.world)])
            for key, found in sorted(holders.items(), key=lambda item: item[0].attempt, reverse=True)
            if len(found) == self.world
        ]

    def load(self, key: Key, holder: int) -> tuple[Snapshot, dict[str, Any]]:
        """This rank's part of a snapshot from `find`, and the outer state that was copied with it. Raises CheckpointError when
        it cannot be had or is damaged."""
        path = self._parts(key).get(self.rank)
        if path is None:
            name = f"{folder_name(*key)}-rank-{self.rank:05d}-of-{self.world:05d}"
            path = fetch_part(name, self._addresses[holder], self.folder, self._token, self.timeout_s)
        match = _PART.fullmatch(path.name)
        if match is None or _digest(path) != match.group(5):
            raise CheckpointError(f"{path}: its content is not what was written (digest differs)")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            outer = dict(content.pop("outer"))
            snapshot = Snapshot(**content)
        except Exception as error:  # torch.load raises many kinds
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        missing = [name for name in PARTS if name not in snapshot.parts]
        if missing or (snapshot.step, snapshot.attempt) != key:
            raise CheckpointError(f"{path} is not the part of step {key.step} that its name says")
        return snapshot, outer

    # -- the folder -----------------------------------------------------------------------------------------------

    def _parts(self, key: Key) -> dict[int, Path]:
        """Rank -> its part on this host."""
        found = {}
        for path in self.folder.glob(f"{folder_name(*key)}-rank-*.pt"):
            match = _PART.fullmatch(path.name)
            if match is not None and int(match.group(4)) == self.world:
                found[int(match.group(3))] = path
        return found

    def _complete(self) -> list[Key]:
        """Newest first: attempts never come twice in a run, so they say which of two is newer."""
        found = {key for path in self.folder.glob("*.complete") if (key := _key_of(path.name)) is not None}
        return sorted(found, key=lambda key: key.attempt, reverse=True)

    def _all(self) -> list[tuple[Path, Key]]:
        return [(path, key) for path in self.folder.iterdir() if (key := _key_of(path.name)) is not None]


def _key_of(name: str) -> Key | None:
    match = _KEY.match(name)
    return Key(int(match.group(1)), int(match.group(2))) if match is not None else None


def _digest(path: Path) -> str:
    hashed = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def _addresses(gather: Callable[[torch.Tensor], np.ndarray], port: int) -> list[Address]:
    """Where each rank listens. Collective."""
    address = _own_address().encode()
    vector = torch.zeros(48, dtype=torch.float64)
    vector[0], vector[1] = port, len(address)
    vector[2 : 2 + len(address)] = torch.tensor(list(address), dtype=torch.float64)
    rows = gather(vector)
    return [(bytes(row[2 : 2 + int(row[1])].astype(np.uint8)).decode(), int(row[0])) for row in rows]


def _own_address() -> str:
    """The address by which this host reaches the job's rendezvous, and so by which the others reach it. Nothing is sent."""
    master: Any = os.environ.get("MASTER_ADDR", "127.0.0.1")
    for family, *_, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return "127.0.0.1"
