"""Which ranks share a checkpoint place: found out by looking, not assumed (BR-27, BR-34).

Every rank leaves a file with a name that nobody can guess, all look which of them they see, and who sees whom is agreed on
by all. Ranks that see each other are a domain: one for a shared file system or an object store, one per host for disks
of their own. The lowest rank of a domain is its committer.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from resilient.checkpoint.files import wait_until
from resilient.checkpoint.storage import Storage, redact
from resilient.errors import CheckpointError

log = logging.getLogger(__name__)

Gather = Callable[[torch.Tensor], np.ndarray]
"""Collective: every rank's (n,) float64 vector, as (world, n), on every rank."""

_PROBE = ".probe"


def gather_in_default_group(vector: torch.Tensor) -> np.ndarray:
    """A `Gather` for CPU tensors, over torch.distributed's default group; of one process where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return vector.double().numpy()[None]
    told = [torch.empty_like(vector, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(told, vector.double())
    return torch.stack(told).numpy()


@dataclass(frozen=True)
class Layout:
    """domains: ranks that share a place, each in order, the one of rank 0 first."""

    domains: tuple[tuple[int, ...], ...]

    @classmethod
    def one(cls, world: int) -> Layout:
        return cls((tuple(range(world)),))

    @property
    def shared(self) -> bool:
        return len(self.domains) == 1

    def domain(self, rank: int) -> tuple[int, ...]:
        return next(domain for domain in self.domains if rank in domain)


def probe_layout(storage: Storage, rank: int, world: int, gather: Gather, patience_s: float = 5.0) -> Layout:
    """Call on all ranks at the start; the same result on all. Takes `patience_s` where the place is not shared by all.

    Raises CheckpointError, on all ranks, where a rank cannot write or they do not see each other both ways."""
    nonce, problem = secrets.randbits(48), ""
    try:
        storage.put(f"{_PROBE}/{_file(rank, nonce)}", b"")
    except Exception as error:
        problem = f": {redact(str(error))}"
        log.warning("rank %d cannot write in %s%s", rank, storage.name, problem)
    told = gather(torch.tensor([float(nonce), float(bool(problem))], dtype=torch.float64))
    failed = np.flatnonzero(told[:, 1])
    if len(failed):
        raise CheckpointError(f"rank {', '.join(map(str, failed[:8]))} cannot write in {storage.name}{problem}")

    names = {_file(r, int(n)): r for r, n in enumerate(told[:, 0])}
    seen: set[int] = set()

    def all_seen() -> bool:
        try:
            seen.update(names[name] for name in storage.files(_PROBE) if name in names)
        except OSError as error:
            log.warning("rank %d cannot list %s: %s", rank, storage.name, redact(str(error)))
        return len(seen) == world

    wait_until(all_seen, patience_s)
    agreed = gather(torch.tensor([float(min(seen, default=-1)), float(len(seen))], dtype=torch.float64))
    layout = layout_of(agreed[:, 0].astype(int), agreed[:, 1].astype(int))
    if layout is None or rank not in seen:
        raise CheckpointError(
            f"the ranks see different parts of {storage.name} (rank {rank} sees the files of {len(seen)} of {world}): it must "
            "be one place for all ranks, or one for all ranks of a host"
        )
    if rank == layout.domain(rank)[0]:  # everybody has looked
        try:
            storage.delete_folder(_PROBE, first="")
        except OSError as error:
            log.warning("%s/%s could not be removed: %s", storage.name, _PROBE, redact(str(error)))
    return layout


def layout_of(lowest: np.ndarray, count: np.ndarray) -> Layout | None:
    """From the lowest rank that each rank sees and how many it sees, both (world,). None: they do not fit together."""
    domains = []
    for first in sorted(set(lowest.tolist())):
        members = np.flatnonzero(lowest == first)
        if first < 0 or members[0] != first or (count[members] != len(members)).any():
            return None
        domains.append(tuple(int(r) for r in members))
    return Layout(tuple(domains))


def _file(rank: int, nonce: int) -> str:
    return f"rank-{rank:05d}-{nonce:012x}"
