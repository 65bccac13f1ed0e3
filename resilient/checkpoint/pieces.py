"""What the elements of a captured tensor are of the whole model: what makes a state of one world size another's.

An engine says it of its own state (`Engine.pieces`), on every rank; `reshape.py` puts states together from it, and
`export.py` writes them in other libraries' formats. Optimizers and parameters are named by the model's own parameter
names, the same in every engine:

    parameters/<parameter>             the weights that the forward uses
    masters/<parameter>                fp32 copies that the optimizer steps, where there are any
    moments/<parameter>/<key>          optimizer state shaped like the parameter (exp_avg, exp_avg_sq, ...)
    buffers/<buffer>

A checkpoint keeps the list beside the state, as plain data (`to_plain`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from resilient.errors import CheckpointError

KeyPath = tuple[str | int, ...]
"""Keys from a state down to one of its nodes."""


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor, and where its elements lie in this rank's state.

    path: keys from the engine state down to the tensor. start: first element of it, flattened, that is of this piece; the
        box's elements follow in C order.
    name: of the whole. shape: of the whole.
    offset, size: of the box, as long as `shape`; or of length 1, for a range of the whole flattened in C order. (Where
        nobody knows the whole's own shape, `shape` is (elements,).) A size of no elements is allowed.
    owner: exactly one rank that holds the same box is; only it writes the box where pieces are not wanted twice.
    """

    path: KeyPath
    start: int
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    owner: bool = True

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    @property
    def kind(self) -> str:
        """parameters, masters, moments or buffers."""
        return self.name.partition("/")[0]


_FIELDS = tuple(f.name for f in fields(Piece))


def to_plain(pieces: Iterable[Piece]) -> list[tuple[Any, ...]]:
    """For a file that `torch.load(weights_only=True)` reads: one tuple of the fields of Piece, in order, for each."""
    return [tuple(getattr(piece, name) for name in _FIELDS) for piece in pieces]


def from_plain(plain: Any) -> list[Piece]:
    """The pieces in what `to_plain` gave. Raises CheckpointError if it is anything else."""
    try:
        return [_piece(*entry) for entry in plain]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"its list of pieces is damaged: {error}") from error


def _piece(path: Any, start: Any, name: Any, shape: Any, offset: Any, size: Any, owner: Any) -> Piece:
    shape, offset, size = (tuple(int(n) for n in numbers) for numbers in (shape, offset, size))
    piece = Piece(tuple(path), int(start), str(name), shape, offset, size, bool(owner))
    limits = shape if len(size) == len(shape) else (math.prod(shape),)
    if not len(offset) == len(size) == len(limits) or any(
        o < 0 or n < 0 or o + n > limit for o, n, limit in zip(offset, size, limits, strict=True)
    ):
        raise ValueError(f"{name}: no box at {offset} of size {size} in {shape}")
    return piece


def node(state: Any, path: KeyPath) -> Any:
    """What lies at `path`. Raises CheckpointError naming the path if nothing does."""
    for key in path:
        inside = key in state if isinstance(state, Mapping) else isinstance(state, list) and key in range(len(state))
        if not inside:
            raise CheckpointError(f"the state holds nothing at {show(path)}")
        state = state[key]
    return state


def show(path: KeyPath) -> str:
    return "/".join(str(key) for key in path)
