"""Fingerprints of what a rank is fed, how its data are divided, and what its random streams hold (S18).

Each is 48 bits in a float64, NaN where there is nothing to compare. They ride in the step's row, where all ranks see them:

    digest_batch       two ranks with the same were fed the same tensors
    digest_sample_*    those of four samples: the same sample on two ranks, in this window or in different ones
    digest_sampler     ranks with another one shuffle or divide the data in another way: seed, epoch, number of shares
    digest_rng_own     two ranks with the same drop the same units
    digest_rng_shared  ranks with another one differ in a stream that the job has declared to be common

What one rank can tell alone (a sampler for another number of ranks, or one that divides nothing) is a sentence:
`Fingerprints.problem`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler

from resilient.checkpoint.digest import tensor_digest
from resilient.checkpoint.rng import Stream, stream_digest
from resilient.signals import StepRecord
from resilient.signals.digest import MASK_48
from resilient.signals.record import names_digest

if TYPE_CHECKING:
    from resilient.coordinator.feed import Window, WindowFeed

# -- what is fed --------------------------------------------------------------------------------------------------------

_ROW = 1024  # 64-bit words that become one
_AT_ONCE = 16  # rows: what is worked on stays in the cache
_MOST_ROWS = 256  # read of one tensor on the host: 2 MiB, a quarter of a million tokens
# Odd, so that a change of a single word always shows. A bit generator's raw output is the same in every numpy.
_WEIGHTS = np.random.PCG64(20_260_104).random_raw(_ROW) | np.uint64(1)
_MIX = 6364136223846793005  # odd (Knuth's MMIX)


def batch_digest(batches: Sequence[Any]) -> float | torch.Tensor:
    """48 bits of the tensors and arrays in micro-batches (nested dicts, sequences and dataclasses of them), with their
    shapes, dtypes and order. Where there is none of either, of the plain values (str, bytes, numbers). NaN when nothing
    can be read.

    Plain values beside tensors do not count: a position or a worker's number may differ between ranks that are fed the
    same. Tensors on the host are read here, at 3 GiB/s; of one larger than 2 MiB evenly spaced rows of 8 KiB, 2 MiB in
    all, with the first and the last: two batches that differ elsewhere only look alike, as mostly empty ones may.
    Tensors on an accelerator are read whole, there: the result is then a 0-dim float64 tensor on their device, and the
    host does not wait for it.

    It finds accidents, not attackers: a row becomes one word by multilinear hashing (Carter and Wegman 1979), the words
    go through BLAKE2b. Two different batches look alike by chance once in 2**48 pairs, which is once in 5e8 steps among
    1,024 ranks and once in 6e4 among 100,000, where one pair in one step proves little; once in 2**40 pairs if they
    differ in floats of few values only, such as 0 and 1, and all of that within one row."""
    tensors: list[Any] = []
    plain: list[str] = []
    try:
        _collect(batches, tensors, plain)
        return _digest(tensors, plain) if tensors or plain else math.nan
    except Exception:  # sparse, nested or distributed tensors, ...: no reason to disturb a training run
        return math.nan


def _collect(value: Any, tensors: list[Any], plain: list[str]) -> None:
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object):
        tensors.append(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _collect(value[key], tensors, plain)
    elif isinstance(value, list | tuple | np.ndarray):
        for item in value:
            _collect(item, tensors, plain)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), tensors, plain)
    elif isinstance(value, str | bytes | int | float | np.generic):
        plain.append(repr(value))


def _digest(tensors: Sequence[Any], plain: Sequence[str]) -> float | torch.Tensor:
    hashed = hashlib.blake2b(digest_size=6)
    on_device: list[torch.Tensor] = []
    for tensor in tensors:
        hashed.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            on_device.append(tensor_digest(tensor))
        else:
            _hash_bytes(_bytes_of(tensor), hashed)
    if not tensors:
        hashed.update("\0".join(plain).encode())
    on_host = int.from_bytes(hashed.digest(), "big")
    return _mixed(on_host, on_device) if on_device else float(on_host)


def _mixed(on_host: int, on_device: Sequence[torch.Tensor]) -> torch.Tensor:
    """0-dim float64 on the device of those 0-dim int64 digests: 48 bits of all of them and their order."""
    total = on_device[0] + on_host
    for digest in on_device[1:]:
        total = total * _MIX + digest  # wraps modulo 2**64
    return ((total * _MIX >> 16) & MASK_48).to(torch.float64)  # the upper bits depend on all of it


def _bytes_of(tensor: Any) -> np.ndarray:
    """(bytes,) uint8; a copy only if the tensor is not contiguous."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _hash_bytes(data: np.ndarray, hashed: hashlib.blake2b) -> None:
    words = data[: data.size // 8 * 8].view(np.uint64)
    whole = words.size // _ROW * _ROW
    rows = words[:whole].reshape(-1, _ROW)
    if len(rows) > _MOST_ROWS:
        hashed.update(_row_hash(rows[-1]))
        rows = rows[:: -(-len(rows) // _MOST_ROWS)]
    for start in range(0, len(rows), _AT_ONCE):
        hashed.update(_row_hash(rows[start : start + _AT_ONCE]))
    if whole < words.size:
        hashed.update(_row_hash(words[whole:]))
    hashed.update(data[words.size * 8 :].tobytes())


def _row_hash(words: np.ndarray) -> bytes:
    """(..., n) uint64 -> 8 bytes for each row.

    A product loses as many bits as its word has zeros at the lower end, and floats of few values leave it many: so the
    upper half is folded onto the lower one first, one bit further, or equal halves would cancel each other."""
    folded = words >> np.uint64(31)
    folded ^= words
    return folded.dot(_WEIGHTS[: words.shape[-1]]).tobytes()


# -- which samples ------------------------------------------------------------------------------------------------------

SAMPLES = 4  # columns digest_sample_0 .. 3
_PREFIX = 1024  # elements of a sample that count


def sample_digests(batches: Sequence[Any], epoch: int = 0) -> list[Any]:
    """The SAMPLES smallest digests of single samples in micro-batches, ascending; NaN where there are fewer.

    The same sample has the same digest on every rank and in every window, and the smallest ones are told: so what one
    rank tells of its window is not drawn independently of what others tell of theirs, and common samples meet (min-wise
    sampling: Broder 1997). A sample is one row of the first tensor that has rows: `input_ids` where there is one, else
    integers before floats. Its first 1,024 numbers count, of floats 1,024 evenly spaced ones, with what trails in a row
    taken away, so that padding on the right to another length changes nothing. A row of one and the same number is no
    sample. epoch: of the loader; a later pass over the data is another thing than the same sample twice.
    On an accelerator the values are 0-dim float64 tensors there, and the host does not wait for them."""
    try:
        found = [_row_digests(rows, epoch) for rows in (_rows_of(batch) for batch in batches) if rows is not None]
        if not found:
            return [math.nan] * SAMPLES
        each = torch.cat([f.to(found[0].device) for f in found])
        each = torch.cat([each, each.new_full((SAMPLES,), math.inf)]).sort().values[:SAMPLES]
        each = torch.where(torch.isinf(each), math.nan, each)
        return each.tolist() if each.device.type == "cpu" else list(each.unbind())
    except Exception:  # as in batch_digest
        return [math.nan] * SAMPLES


def _rows_of(batch: Any) -> torch.Tensor | None:
    """(samples, ...) or None."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        return batch["input_ids"] if batch["input_ids"].dim() > 1 else None
    tensors: list[Any] = []
    _collect(batch, tensors, [])
    rows = [torch.as_tensor(t) for t in tensors if t.ndim > 1]
    return next((t for t in rows if not t.is_floating_point()), rows[0] if rows else None)


def _row_digests(rows: torch.Tensor, epoch: int) -> torch.Tensor:
    """(samples,) float64, 48 bits; inf for a row of one number."""
    rows = rows.detach().reshape(len(rows), -1)
    if rows.is_floating_point():
        rows = rows[:, :: -(-rows.shape[1] // _PREFIX)].contiguous().to(torch.float32).view(torch.int32)
    words = rows[:, :_PREFIX].to(torch.int64)
    words = words - words[:, -1:]
    mixed = (words * _sample_weights(words.device)[: words.shape[1]]).sum(dim=1)
    mixed = mixed + torch.full_like(mixed, epoch) * _MIX  # wraps modulo 2**64
    for shift in (
        30,
        27,
    ):  # so that a small digest says nothing about the content; >> keeps the sign, the mask drops it
        mixed = (mixed ^ (mixed >> shift & ((1 << 64 - shift) - 1))) * _MIX
    digests = (mixed >> 16 & MASK_48).to(torch.float64)
    return torch.where((words == 0).all(dim=1), math.inf, digests)


@functools.cache
def _sample_weights(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_WEIGHTS.view(np.int64).copy()).to(device)


# -- how it is divided --------------------------------------------------------------------------------------------------

_SHARE = (  # how samplers and datasets name their share and the number of shares
    ("rank", "num_replicas"),  # torch, torchdata, transformers
    ("process_index", "num_processes"),  # accelerate; transformers' IterableDatasetShard
    ("data_parallel_rank", "data_parallel_size"),  # Megatron-LM
)
_ORDER = ("seed", "initial_seed", "epoch", "shuffle", "drop_last", "total_size", "total_samples", "split_batches")
_INNER = ("loader", "dataloader", "base_dataloader", "batch_sampler", "data_sampler", "sampler")


@dataclass(frozen=True)
class Split:
    """Which samples this rank is given, as far as the loader says.

    order: what decides it and has to be the same on all ranks, as "name=value"; empty: the loader does not say.
    rank, replicas: this loader's share and the number of shares; None: it does not say.
    undivided: the kind of sampler that goes through the whole data set, "" if there is none."""

    order: tuple[str, ...] = ()
    rank: int | None = None
    replicas: int | None = None
    undivided: str = ""

    def digest(self) -> float:
        """48 bits of `order`; NaN if it is empty."""
        return names_digest(self.order) if self.order else math.nan

    def problem(self, rank: int, world: int) -> str:
        """What is wrong with it on this rank of `world` that share the data, in a sentence; "" for nothing."""
        if self.replicas is not None and self.replicas != world:
            return (
                f"the loader's sampler divides the data among {self.replicas} ranks, but {world} train on them: set "
                f"num_replicas={world} and each rank's own number"
            )
        if self.rank is not None and self.rank != rank:
            return (
                f"rank {rank} reads the share of rank {self.rank}: unless all ranks are exchanged on purpose, another rank "
                "reads the same samples; give the sampler the rank of its own process"
            )
        if self.undivided and world > 1:
            return (
                f"the loader's {self.undivided} does not divide the data among the {world} ranks: unless each rank's data "
                "set is a share of its own, all ranks read all of it; use torch.utils.data.DistributedSampler"
            )
        return ""


def split_of(loader: Any) -> Split:
    """Read from the attributes of the loader and of what it is made of; touches no data and no random stream.

    Known are: a loader that says so by itself (`order`, a mapping of plain values that must be the same on all ranks);
    torch's DistributedSampler and whatever has attributes like it, inside torch, torchdata, DeepSpeed and Accelerate
    loaders; Accelerate's and Megatron's ways of dividing. A sampler that divides nothing has no order that the ranks
    would have to share: their data sets may be shares already. An iterable data set says nothing, unless it has such
    attributes itself."""
    own = _read(loader, "order")
    if isinstance(own, Mapping):
        return Split(tuple(f"{key}={own[key]}" for key in sorted(own)))
    parts = list(_parts_of(loader))
    shares = [_share_of(part) for part in parts]
    share = next(filter(None, shares), None)
    if share is None:
        return Split(undivided=type(parts[-1]).__name__ if _undivided(parts) else "")
    order: dict[str, object] = {"replicas": share[1]}
    for part in parts[shares.index(share) :]:  # from there inwards; further out a seed may be the rank's own
        for name in _ORDER:
            value = _read(part, name, ...)
            if isinstance(value, int | None):
                order.setdefault(name, value)
    generator = _read(parts[-1], "generator")
    if isinstance(generator, torch.Generator) and not order.keys() & {"seed", "initial_seed"}:
        order["seed"] = generator.initial_seed()
    return Split(tuple(f"{name}={order[name]}" for name in sorted(order)), *share)


def _parts_of(loader: Any) -> Iterator[Any]:
    """The loader, what it wraps, its batch sampler, the sampler in that; or its data set, where that is what iterates."""
    part, seen = loader, set[int]()
    while part is not None and id(part) not in seen:
        yield part
        seen.add(id(part))
        dataset = _read(part, "dataset")
        if isinstance(dataset, IterableDataset) and not isinstance(part, Sampler):
            part = dataset
            continue
        # The sampler of a loader that was given a batch sampler is a dummy, so the batch sampler is asked first.
        part = next((inner for name in _INNER if (inner := _read(part, name)) is not None), None)


def _share_of(part: Any) -> tuple[int, int] | None:
    for rank, replicas in _SHARE:
        found = _read(part, rank), _read(part, replicas)
        if all(type(value) is int for value in found):
            return found
    return None


def _undivided(parts: Sequence[Any]) -> bool:
    """One of torch's samplers that give out the whole data set, each sample once. Those that draw with replacement, or
    from given indices, may be a rank's share; and in Accelerate's dispatcher (it has a slice_fn) rank 0 reads for all."""
    last = parts[-1]
    once = type(last) is SequentialSampler or (type(last) is RandomSampler and not last.replacement)
    return once and not any(_read(part, "slice_fn") for part in parts)


def _read(part: Any, name: str, default: Any = None) -> Any:
    try:
        return getattr(part, name, default)
    except Exception:  # a property of somebody else's class
        return default


# -- random streams -----------------------------------------------------------------------------------------------------


_DROPPING = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),  # `p`
    *(nn.MultiheadAttention, nn.RNNBase),  # `dropout`
)


def dropouts(module: nn.Module) -> list[nn.Module]:
    """The submodules that may drop units at random. What the forward code drops by functions of its own is not seen."""
    return [part for part in module.modules() if isinstance(part, _DROPPING)]


def rng_digests(
    dropping: Sequence[nn.Module], device: torch.device, shared: Sequence[Stream] = ()
) -> tuple[float, float]:
    """(of the streams that must be equal on all ranks, of the stream that must differ from rank to rank).

    Which ones must be equal only the job knows, say where Python's stream picks the layers to leave out: `shared`, none
    by default. The device's stream must differ while one of the modules `dropping` (see dropouts) is at it: equal masks
    on all ranks are fewer masks. NaN where there is nothing to compare. Waits for no device."""
    streams = [stream_digest(stream, device) for stream in shared]
    common = names_digest([str(digest) for digest in streams]) if streams else math.nan
    active = any(part.training and (getattr(part, "p", 0.0) or getattr(part, "dropout", 0.0)) for part in dropping)
    return common, stream_digest("device", device) if active else math.nan


# -- in a row -----------------------------------------------------------------------------------------------------------


class Fingerprints:
    """Fills in the fingerprints of this rank's rows.

    rank, world: among the ranks that divide the data between them. shared: see rng_digests. problem: what is wrong with
    how the loader divides the data, in a sentence; "" for nothing."""

    def __init__(
        self,
        feed: WindowFeed,
        module: nn.Module,
        device: torch.device,
        *,
        rank: int,
        world: int,
        shared: Sequence[Stream] = (),
    ) -> None:
        self._feed = feed
        self._device = device
        self._shared = tuple(shared)
        self._dropping = dropouts(module)
        split = split_of(feed.loader)
        self.problem = split.problem(rank, world)
        self._sampler = split.digest()
        self._epoch = feed.epoch

    def fill(self, record: StepRecord, window: Window, *, due: bool) -> None:
        """Into `record` the digests of the window in hand, of its samples and of the sampler, and with `due` (at the same
        steps on all ranks) those of the random streams. The sampler is looked at again when that is due, and in every
        epoch."""
        record.digest_batch = window.digest
        if window.tokens > 0 and not window.padding:
            for i, digest in enumerate(sample_digests(window.batches, self._feed.epoch)):
                setattr(record, f"digest_sample_{i}", digest)
        if due or self._epoch != self._feed.epoch:
            self._sampler, self._epoch = split_of(self._feed.loader).digest(), self._feed.epoch
        record.digest_sampler = self._sampler
        if due:
            record.digest_rng_shared, record.digest_rng_own = rng_digests(self._dropping, self._device, self._shared)
