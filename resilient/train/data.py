"""Byte-level text in a global order that every rank can compute and resume to the exact sample.

The text is cut into blocks; some are held out. The training text is cut into samples of `seq_len` tokens. The order is
the endless concatenation of one permutation of all samples per epoch, and a *position* counts samples along it. With w
ranks and micro-batches of b samples, the micro-step that starts at position p gives rank r the samples

    order[p + r*b], ..., order[p + r*b + b - 1]

and the next one starts at p + w*b. So a window of `accumulation` micro-steps covers the same samples on any number of
ranks that divides it, and a position is all the state there is.
"""

from __future__ import annotations

import glob as globbing
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from resilient.errors import ConfigError, DataPositionError

IGNORED = -100  # label that carries no loss, as in torch's cross entropy

# Not prose, not typical code, or not on every machine.
_NOT_STDLIB_TEXT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
_SEPARATOR = b"\x00"
_LARGEST_BLOCK = 65_536


@dataclass(frozen=True)
class DataConfig:
    """conf/data.

    name: stdlib (the Python standard library's own sources) | files (`glob`) | synthetic (made-up words, no files read).
    seq_len: tokens per sample. micro_batch: samples per rank and micro-step. accumulation: micro-steps per window.
    eval_fraction: share of the text held out. max_bytes: where to stop reading; the text is held in memory. null: no end.
    """

    name: Literal["stdlib", "files", "synthetic"] = "stdlib"
    glob: str | None = None
    seq_len: int = 128
    micro_batch: int = 8
    accumulation: int = 1
    num_workers: int = 0
    eval_fraction: float = 0.05
    max_bytes: int | None = 4_000_000

    def __post_init__(self) -> None:
        for key in ("seq_len", "micro_batch", "accumulation"):
            if getattr(self, key) < 1:
                raise ConfigError(f"data.{key}={getattr(self, key)}: must be at least 1")
        if self.num_workers < 0:
            raise ConfigError(f"data.num_workers={self.num_workers}: must not be negative")
        if not 0.0 < self.eval_fraction < 1.0:
            raise ConfigError(f"data.eval_fraction={self.eval_fraction}: must be between 0 and 1")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"data.max_bytes={self.max_bytes}: must be positive, or null for no limit")
        if self.name == "files" and not self.glob:
            raise ConfigError("data.glob: missing; data=files needs a pattern such as data.glob='texts/**/*.txt'")


class Batch(TypedDict):
    """One rank's share of one micro-step.

    input_ids, labels: (micro_batch, seq_len) int64; labels are already shifted, IGNORED carries no loss.
    ids: (micro_batch,) int64, which samples these are, the same in every epoch.
    position: global position at which this micro-step starts, the same on all ranks.
    """

    input_ids: Tensor
    labels: Tensor
    ids: Tensor
    position: int


# ---------------------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Corpus:
    """uint8 arrays of training and held-out text, each long enough for one sample, and a digest of both."""

    train: np.ndarray
    held_out: np.ndarray
    digest: str


def as_text(batch: Batch) -> str:
    """What a micro-batch says, sample by sample: bytes as Latin-1, so that every byte is shown."""
    return "\n---\n".join(bytes(row).decode("latin-1") for row in batch["input_ids"].to(torch.uint8).tolist())


def load_corpus(config: DataConfig) -> Corpus:
    """Read, cut into blocks and split. The same on every rank and in every process that sees the same files.

    Raises ConfigError naming `data.glob` (or `data.name`) when nothing matches or there is too little text.
    """
    documents = _synthetic(config) if config.name == "synthetic" else _read(_paths(config), config.max_bytes)
    text = _SEPARATOR.join(documents)
    window = config.seq_len + 1  # a sample and the byte after it
    # Blocks are as large as they can be while every small share of the text still gets some.
    block = max(window, min(_LARGEST_BLOCK, len(text) // 64))
    blocks = [text[i : i + block] for i in range(0, len(text), block)]
    f = config.eval_fraction
    held = [int((i + 1) * f) > int(i * f) for i in range(len(blocks))]
    train = b"".join(b for b, out in zip(blocks, held, strict=True) if not out)
    held_out = b"".join(b for b, out in zip(blocks, held, strict=True) if out)
    if min(len(train), len(held_out)) < window:
        key = f"data.glob={config.glob}" if config.name == "files" else f"data.name={config.name}"
        raise ConfigError(
            f"{key}: {len(text)} bytes of text leave {len(train)} for training and {len(held_out)} held out "
            f"(data.eval_fraction={f}); each needs at least data.seq_len + 1 = {window}"
        )
    return Corpus(
        np.frombuffer(train, np.uint8),
        np.frombuffer(held_out, np.uint8),
        hashlib.blake2b(train + _SEPARATOR + held_out, digest_size=8).hexdigest(),
    )


def _paths(config: DataConfig) -> list[Path]:
    if config.name == "files":
        assert config.glob is not None
        found = sorted(p for p in map(Path, globbing.glob(config.glob, recursive=True)) if p.is_file())
        if not found:
            raise ConfigError(f"data.glob={config.glob}: no file matches (looked from {Path.cwd()})")
        return found
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(_sources(root))
    if not found:
        raise ConfigError(f"data.name=stdlib: no .py source under {root}; use data=files data.glob=... instead")
    return found


def _sources(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _NOT_STDLIB_TEXT]  # never walks into site-packages
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _read(paths: Sequence[Path], max_bytes: int | None) -> list[bytes]:
    """Whole files in order until max_bytes; the last one is cut there."""
    documents: list[bytes] = []
    left = max_bytes
    for path in paths:
        if left is not None and left <= 0:
            break
        try:
            with path.open("rb") as file:
                documents.append(file.read() if left is None else file.read(left))
        except OSError as error:
            raise ConfigError(f"data.glob: cannot read {path}: {error.strerror}") from error
        if left is not None:
            left -= len(documents[-1])
    return documents


def _synthetic(config: DataConfig) -> list[bytes]:
    """Lines of made-up words drawn by Zipf's law, at most a megabyte: quick to make and quick to learn."""
    draw = np.random.Generator(np.random.PCG64(20_260_101))
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
    words = [draw.choice(letters, size=int(n)).tobytes() for n in draw.integers(2, 9, size=512)]
    weights = 1.0 / np.arange(1, len(words) + 1)
    size = min(config.max_bytes or 1_000_000, 1_000_000)
    chosen = draw.choice(len(words), size=size // 2, p=weights / weights.sum())
    lines = [b" ".join(words[w] for w in chosen[i : i + 12]) for i in range(0, len(chosen), 12)]
    return [b"\n".join(lines)[:size]]


# --------------------------------------------------------------------------------------------------------------- order


def permute(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """A pseudo-random bijection of [0, size), different for each (seed, epoch), evaluated only where asked.

    index: int64 array with values in [0, size) -> int64 array of the same shape. A six-round Feistel network over the
    next even power of two, walked until the value falls inside (Black and Rogaway 2002): no table, so that the order
    of a corpus of any size costs no memory and a restore costs no replay.
    """
    half = np.uint64((max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    keys = [
        np.uint64(int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}/{r}".encode(), digest_size=8).digest(), "little"))
        for r in range(6)
    ]
    value = index.astype(np.uint64)
    todo = np.ones(value.shape, dtype=bool)
    while todo.any():
        left, right = value[todo] >> half, value[todo] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        value[todo] = (left << half) | right
        todo = value >= np.uint64(size)
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014): 64 bits in, 64 well-mixed bits out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_ids(position: int, length: int, size: int, seed: int) -> np.ndarray:
    """Ids of the samples at global positions [position, position + length): (length,) int64."""
    positions = np.arange(position, position + length, dtype=np.int64)
    ids = np.empty(length, dtype=np.int64)
    for epoch in range(int(positions[0]) // size, int(positions[-1]) // size + 1):
        inside = positions // size == epoch
        ids[inside] = permute(positions[inside] % size, size, seed, epoch)
    return ids


# -------------------------------------------------------------------------------------------------------------- stream


@dataclass(frozen=True)
class _MicroBatches(Dataset[Batch]):
    """Start position of a micro-step -> this rank's batch. Runs in worker processes; reads nothing but its fields."""

    text: np.ndarray
    seq_len: int
    seed: int
    offset: int  # of this rank inside a micro-step, in samples
    micro_batch: int

    @property
    def size(self) -> int:
        """Samples per epoch."""
        return (len(self.text) - 1) // self.seq_len

    def expected_ids(self, position: int) -> np.ndarray:
        return sample_ids(position + self.offset, self.micro_batch, self.size, self.seed)

    def __getitem__(self, position: int) -> Batch:
        ids = self.expected_ids(position)
        rows = ids[:, None] * self.seq_len + np.arange(self.seq_len + 1)  # (micro, T + 1)
        tokens = torch.from_numpy(self.text[rows].astype(np.int64))
        return Batch(
            input_ids=tokens[:, :-1].contiguous(),
            labels=tokens[:, 1:].contiguous(),
            ids=torch.from_numpy(ids),
            position=position,
        )


class TokenStream:
    """This rank's endless iterable of micro-batches, restorable to the exact sample.

        stream.load_state_dict(state)   before the first iter(stream); afterwards it raises DataPositionError (BR-13)
        stream.rewind(state)            at any time: drops the running iterator and its workers, then loads;
                                        the caller takes a new iter(stream)
        stream.state_dict()             position after the micro-batches *delivered* so far, never of prefetched ones
        iter(stream)                    starts at that position; an older iterator raises when used again

    A state of another seed, text or sample length is refused. The first batch after a start is checked against the
    sample ids that its position calls for, and every batch against the position. Workers (num_workers > 0) change
    nothing about the sequence, and the global torch RNG is never drawn from. Call `close` at the end.

    Not a collective: each rank builds its own, with the same seed and text.
    """

    any_world = True  # a state means the same with any number of ranks

    def __init__(self, config: DataConfig, *, seed: int, rank: int, world: int, corpus: Corpus | None = None) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not in a world of {world}")
        self.corpus = corpus = corpus or load_corpus(config)
        self.micro_batch = config.micro_batch
        self.stride = config.micro_batch * world  # samples per micro-step over all ranks
        self.global_batch = self.stride * config.accumulation  # samples per window over all ranks
        self._data = _MicroBatches(corpus.train, config.seq_len, seed, rank * config.micro_batch, config.micro_batch)
        self._num_workers = config.num_workers
        self._fingerprint = {"seed": seed, "text": corpus.digest, "seq_len": config.seq_len, "samples": self._data.size}
        self._position = 0
        self._loader: Iterator[Batch] | None = None
        self._generation = 0  # of the iterator in force

    @property
    def order(self) -> dict[str, Any]:
        """What decides which samples each rank is given; the same on all ranks."""
        return {**self._fingerprint, "stride": self.stride}

    @property
    def samples(self) -> int:
        """Samples per epoch."""
        return self._data.size

    @property
    def position(self) -> int:
        """Global position after the micro-batches delivered so far, in samples."""
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """Position and fingerprint as plain values, the same on all ranks."""
        return self.state_at(self._position)

    def state_at(self, position: int) -> dict[str, Any]:
        """The state of a stream that has delivered everything before `position` (say, a batch's own position)."""
        return {"position": int(position), **self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Only before iteration begins; DataPositionError otherwise or if it does not fit."""
        if self._loader is not None:
            raise DataPositionError(
                "the data position was loaded after iteration began: the running iterator (and its workers) would go on "
                "from the old position. Load before iter(stream), or call rewind(state) and iterate anew."
            )
        self._check(state)
        self._position = int(state["position"])

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Drop the running iterator, if any, and continue from `state` with the next iter(stream)."""
        self._check(state)
        self.close()
        self.load_state_dict(state)

    def _check(self, state: Mapping[str, Any]) -> None:
        missing = [key for key in ("position", *self._fingerprint) if key not in state]
        if missing:
            raise DataPositionError(f"the data state lacks {', '.join(missing)}")
        if int(state["position"]) < 0:
            raise DataPositionError(f"the data state has position {state['position']}")
        differing = [key for key, ours in self._fingerprint.items() if state[key] != ours]
        if differing:
            detail = "; ".join(f"{key}: state {state[key]}, this run {self._fingerprint[key]}" for key in differing)
            raise DataPositionError(f"the data state belongs to another order of samples ({detail})")

    def __iter__(self) -> Iterator[Batch]:
        # Not itself a generator: iteration begins here, not at the first next() (BR-13).
        self.close()
        loader = DataLoader(
            self._data,
            batch_size=None,  # the dataset makes whole micro-batches
            sampler=count(self._position, self.stride),  # type: ignore[arg-type]  # any iterable will do
            num_workers=self._num_workers,
            generator=torch.Generator(),  # otherwise each iterator draws a seed from the global stream
        )
        self._loader = iter(loader)
        return self._deliver(self._loader, self._generation)

    def _deliver(self, loader: Iterator[Batch], generation: int) -> Iterator[Batch]:
        first = True
        while True:
            if generation != self._generation:
                raise DataPositionError("this iterator ended when the stream was closed, rewound or iterated anew")
            batch = next(loader)
            if batch["position"] != self._position:
                raise DataPositionError(f"a batch of position {batch['position']} came where {self._position} was due")
            if first and batch["ids"].tolist() != (due := self._data.expected_ids(self._position).tolist()):
                raise DataPositionError(
                    f"first batch at position {self._position} holds samples {batch['ids'].tolist()}, due were {due}"
                )
            first = False
            self._position += self.stride
            yield batch

    def close(self) -> None:
        """End the running iterator and its worker processes. Idempotent; iter(stream) continues where it stopped."""
        self._generation += 1
        loader, self._loader = self._loader, None
        shutdown = getattr(loader, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()  # torch offers no public way to end workers at a known time
