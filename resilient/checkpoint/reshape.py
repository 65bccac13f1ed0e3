"""A state for this rank of another world, put together bit for bit from the parts that an earlier world has saved.

    sources = [SourcePart(rank, state, pieces), ...]     memory-mapped: only what is needed is read
    frame = engine.frame(sources[0].state)               room for this rank's state, and all that is no piece
    state = reshape(sources, frame, engine.pieces(frame), share=(rank, world), per_rank=engine.per_rank)
    engine.restore(state)

Where an element comes from:

    parameters, masters, moments   from the piece of its owner; every copy must have the same bits, and the ranks of the
                                   new world share the comparing (`share`)
    buffers                        from the owner (rank 0): a running statistic is each rank's own
    everything else                step counts, LR and other group options, schedule, scaler, counters: from rank 0's
                                   part; all parts must say the same

Not a collective. A rank that raises must tell the others: vote before anything is restored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from resilient.checkpoint.boxes import Box, elements, first_overlap, inside, intersection, split_range
from resilient.checkpoint.pieces import KeyPath, Piece, node, show
from resilient.errors import CheckpointError

_MISSING = object()


@dataclass(frozen=True)
class SourcePart:
    """What one rank of the earlier world saved. state: as its engine captured it; its tensors may be memory-mapped."""

    rank: int
    state: Mapping[str, Any]
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Whole:
    """A tensor as all ranks hold it together. shape: its own, or (elements,) where no piece says more."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def wholes(sources: Sequence[SourcePart]) -> dict[str, Whole]:
    """Name -> whole of everything that the sources hold pieces of.

    Raises CheckpointError for a part without pieces, and where two parts disagree on a whole."""
    return {name: held.whole for name, held in held_by(sources).items()}


def reshape(
    sources: Sequence[SourcePart],
    frame: dict[str, Any],
    wanted: Sequence[Piece],
    *,
    share: tuple[int, int] = (0, 1),
    per_rank: Sequence[str] = (),
) -> dict[str, Any]:
    """`frame`, with every piece of `wanted` filled in, in place. Nothing of it refers to a source.

    share: (rank, world) of those who call this together for the same sources: each compares its share of the copies.
    per_rank: entries of a state that need not be the same in all parts (apart from its pieces).
    Memory: the frame and one piece. Raises CheckpointError naming the tensor or value that is missing, has another shape
    or dtype, is not whole, or is not the same in all parts; `frame` is of no use then."""
    held = held_by(sources)
    _compare_values(sources, per_rank)
    compare(held, share)
    by_path: dict[KeyPath, list[Piece]] = defaultdict(list)
    for piece in wanted:
        by_path[piece.path].append(piece)
    for path, pieces in by_path.items():
        _fill(node(frame, path), pieces, held)
    return frame


def compare(held: Mapping[str, Held], share: tuple[int, int] = (0, 1)) -> None:
    """Every copy of a piece (buffers apart) has the bits of its owner's; of the wholes, the `share`-th of so many shares.

    Raises CheckpointError naming the tensor and the ranks."""
    index, shares = share
    for n, (name, one) in enumerate(sorted(held.items())):
        if n % shares != index or name.startswith("buffers/"):
            continue
        for at in one.places:
            if at.piece.owner:
                continue
            for owner, mine, theirs in one.meetings(at.piece, one.whole.shape):
                if not _same_bits(view(at.tensor, *mine), view(owner.tensor, *theirs)):
                    raise CheckpointError(
                        f"{name} is not the same on rank {owner.rank} and rank {at.rank}, which hold a copy each: "
                        "ranks had drifted apart when this was saved, or this tensor is each rank's own; no state of another "
                        "world size can be made from it"
                    )


# --- where the elements of a whole are ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A box of a whole in a flat tensor: `start` is where its elements begin there."""

    box: Box
    start: int


@dataclass(frozen=True)
class Place:
    """A piece of a source, and the tensor that holds it."""

    rank: int
    piece: Piece
    tensor: torch.Tensor


class Held:
    """One whole in the sources."""

    def __init__(self, whole: Whole, places: Sequence[Place]) -> None:
        self.whole = whole
        self.places = places
        self._owned: dict[tuple[int, ...], list[tuple[Place, Cell]]] = {}

    def shaped_as(self, shape: tuple[int, ...]) -> Held:
        """The same, where somebody knows the whole's own shape. Of another number of elements, it stays as it is."""
        agreed = _agreed(self.whole.shape, shape)
        return self if agreed in (None, self.whole.shape) else Held(Whole(shape, self.whole.dtype), self.places)

    def owned(self, shape: tuple[int, ...]) -> list[tuple[Place, Cell]]:
        """Every owner's boxes of it. shape: of the whole, where somebody knows it better than `whole.shape`."""
        if shape not in self._owned:
            owners = [at for at in self.places if at.piece.owner]
            self._owned[shape] = [(at, cell) for at in owners for cell in cells_of(at.piece, shape)]
        return self._owned[shape]

    def meetings(
        self, piece: Piece, shape: tuple[int, ...]
    ) -> Iterator[tuple[Place, tuple[Cell, Box], tuple[Cell, Box]]]:
        """(owner, (a cell of `piece`, what both hold), (the owner's cell, the same)): all of `piece` that anybody owns."""
        for mine in cells_of(piece, shape):
            for at, theirs in self.owned(shape):
                both = intersection(mine.box, theirs.box)
                if both is not None:
                    yield at, (mine, both), (theirs, both)

    def refuse_incomplete(self, name: str) -> None:
        owned = self.owned(self.whole.shape)
        boxes = [cell.box for _, cell in owned]
        found, due = sum(map(elements, boxes)), math.prod(self.whole.shape)
        if (twice := first_overlap(boxes)) is not None:
            ranks = sorted({owned[i][0].rank for i in twice})
            raise CheckpointError(f"{name}: the parts of ranks {ranks} both claim to own the same elements of it")
        if found != due:
            raise CheckpointError(
                f"{name} is not whole: {found} of its {due} elements are in the parts of ranks "
                f"{sorted({at.rank for at in self.places})}; a part is missing or damaged"
            )


def held_by(sources: Sequence[SourcePart]) -> dict[str, Held]:
    """Name -> whole in the sources. Raises CheckpointError for a part without pieces or with wrong ones, and where two
    parts disagree on a whole."""
    if not sources:
        raise CheckpointError("there is no part to take a state from")
    places: dict[str, list[Place]] = defaultdict(list)
    for source in sources:
        if not source.pieces:
            raise CheckpointError(
                f"the part of rank {source.rank} does not say what its tensors are pieces of: this checkpoint can be loaded "
                "with the world size and the sharding it was saved with, and no other"
            )
        for piece in source.pieces:
            tensor = node(source.state, piece.path)
            if not isinstance(tensor, torch.Tensor) or piece.start + piece.elements > tensor.numel():
                raise CheckpointError(
                    f"the part of rank {source.rank} says that {piece.name} is at {show(piece.path)}, where there is no "
                    "tensor of that size"
                )
            places[piece.name].append(Place(source.rank, piece, tensor))
    return {name: Held(_whole(name, found), found) for name, found in places.items()}


def _whole(name: str, places: Sequence[Place]) -> Whole:
    first = places[0]
    shape, dtype = first.piece.shape, first.tensor.dtype
    for at in places[1:]:
        agreed = _agreed(shape, at.piece.shape)
        if agreed is None or at.tensor.dtype != dtype:
            raise CheckpointError(
                f"{name}: {_what(shape, dtype)} on rank {first.rank}, {_what(at.piece.shape, at.tensor.dtype)} on rank {at.rank}"
            )
        shape = agreed
    return Whole(shape, dtype)


def _agreed(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """One of them may be (elements,): then the other is the whole's own shape."""
    if a == b:
        return a
    if math.prod(a) != math.prod(b):
        return None
    return b if len(a) == 1 else a if len(b) == 1 else None


def cells_of(piece: Piece, shape: tuple[int, ...]) -> list[Cell]:
    """shape: of the whole, which the piece itself may know as (elements,) only."""
    if len(piece.size) == len(shape):
        return [Cell((piece.offset, piece.size), piece.start)] if piece.elements else []
    (offset,), (size,) = piece.offset, piece.size
    found, start = [], piece.start
    for box in split_range(offset, offset + size, shape):
        found.append(Cell(box, start))
        start += elements(box)
    return found


def view(tensor: torch.Tensor, cell: Cell, part: Box) -> torch.Tensor:
    """`part` of the whole, out of a tensor that holds `cell`. Of a contiguous tensor it is a view, and writable."""
    flat = tensor.detach().reshape(-1)
    box = flat[cell.start : cell.start + elements(cell.box)].view(cell.box[1])
    return box[inside(part, cell.box)]


# --- filling ------------------------------------------------------------------------------------------------------


def _fill(tensor: torch.Tensor, pieces: Sequence[Piece], held: Mapping[str, Held]) -> None:
    """All pieces of one tensor of the frame."""
    target = tensor.detach().contiguous()  # the same one, unless it lies in another order in memory (channels last)
    filled: list[Piece] = []
    end = 0
    for piece in pieces:
        source = held.get(piece.name)
        if source is None:
            raise CheckpointError(f"{piece.name} is missing from the checkpoint")
        whole, shape = source.whole, _agreed(piece.shape, source.whole.shape)
        if shape is None or tensor.dtype != whole.dtype:
            raise CheckpointError(
                f"{piece.name}: {_what(whole.shape, whole.dtype)} in the checkpoint, {_what(piece.shape, tensor.dtype)} here"
            )
        source.refuse_incomplete(piece.name)
        before = next((p for p in filled if _share_elements(p, piece)), None) if piece.start < end else None
        copied = 0
        for owner, mine, theirs in source.meetings(piece, shape):
            here, there = view(target, *mine), view(owner.tensor, *theirs)
            if before is None:
                here.copy_(there)
            elif not _same_bits(here, there.to(here.device)):
                raise CheckpointError(
                    f"{before.name} and {piece.name} are one tensor here, but differ in the checkpoint"
                )
            copied += there.numel()
        if copied != piece.elements:
            raise CheckpointError(f"{piece.name}: {piece.elements - copied} of its elements here are in no part")
        filled.append(piece)
        end = max(end, piece.start + piece.elements)
    if target.data_ptr() != tensor.data_ptr():
        tensor.copy_(target)


def _share_elements(a: Piece, b: Piece) -> bool:
    return max(a.start, b.start) < min(a.start + a.elements, b.start + b.elements)


def _what(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"shape {tuple(shape)} {dtype}"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- everything that is no piece ----------------------------------------------------------------------------------


def _compare_values(sources: Sequence[SourcePart], per_rank: Sequence[str]) -> None:
    first = sources[0]
    expected = dict(_values(first, per_rank))
    for source in sources[1:]:
        found = dict(_values(source, per_rank))
        for path in dict.fromkeys([*expected, *found]):
            here, there = expected.get(path, _MISSING), found.get(path, _MISSING)
            if not _same_value(here, there):
                raise CheckpointError(
                    f"{show(path)} is {_shown(here)} in the part of rank {first.rank} and {_shown(there)} in that of rank "
                    f"{source.rank}: no state of another world size can be made from both"
                )


def _values(source: SourcePart, per_rank: Sequence[str]) -> Iterator[tuple[KeyPath, Any]]:
    """Leaves that are no piece, with their paths."""
    state = {key: value for key, value in source.state.items() if key not in per_rank}
    return _leaves(state, {piece.path for piece in source.pieces}, ())


def _leaves(state: Any, pieces: set[KeyPath], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, pieces, (*path, key))
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from _leaves(value, pieces, (*path, i))
    elif path not in pieces:
        yield path, state


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_bits(a, b)
    if type(a) is not type(b):
        return False
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    return f"a tensor of {_what(tuple(value.shape), value.dtype)}" if isinstance(value, torch.Tensor) else repr(value)
