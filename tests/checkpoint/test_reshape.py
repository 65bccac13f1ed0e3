"""Putting a state together from pieces of any layout: the arithmetic of boxes, coverage, copies, refusals (issue 5,
deliver 6). Real engines are in tests/engines/test_pieces.py."""

from __future__ import annotations

import math
import random
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.checkpoint.boxes import Box, elements, first_overlap, inside, intersection, split_range
from resilient.checkpoint.pieces import Piece, from_plain, to_plain
from resilient.checkpoint.reshape import SourcePart, reshape, wholes
from resilient.errors import CheckpointError

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + n) for o, n in zip(*box, strict=True))))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return offset, tuple(draw(st.integers(0, n - o)) for o, n in zip(offset, shape, strict=True))


@given(shapes, st.data())
def test_a_range_is_split_into_few_boxes_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = split_range(start, stop, shape)
    everything: Box = ((0,) * len(shape), shape)
    told = [whole[inside(box, everything)].reshape(-1) for box in found]
    assert torch.equal(torch.cat([*told, torch.empty(0, dtype=torch.int64)]), torch.arange(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1) and all(elements(box) for box in found)


@given(shapes, st.data())
def test_intersection_is_what_both_hold(shape: tuple[int, ...], data: st.DataObject) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = intersection(a, b)
    assert (cells(both) if both is not None else set()) == cells(a) & cells(b)


@given(shapes, st.data())
def test_overlaps_are_found_and_only_those(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    pairs = [(i, j) for i in range(len(boxes)) for j in range(i) if cells(boxes[i]) & cells(boxes[j])]
    found = first_overlap(boxes)
    assert (found is None) == (not pairs)
    assert found is None or tuple(sorted(found, reverse=True)) in pairs


# --- layouts of one whole ---


def cuts(rng: random.Random, size: int, parts: int) -> list[tuple[int, int]]:
    """[begin, end) of `parts` ranges that cover `size`, some of them empty."""
    at = [0, *sorted(rng.randint(0, size) for _ in range(parts - 1)), size]
    return list(pairwise(at))


def laid_out(
    whole: torch.Tensor, style: str, parts: int, rng: random.Random, copies: int = 1
) -> list[tuple[torch.Tensor, list[Piece]]]:
    """Each rank's flat tensor and the pieces in it: rows, columns, or ranges of the flattened whole (with padding before)."""
    found = []
    shape = tuple(whole.shape)
    dim = {"rows": 0, "columns": len(shape) - 1}.get(style, 0)
    for copy in range(copies):
        owner = copy == 0
        if style == "flat":
            for begin, end in cuts(rng, whole.numel(), parts):
                pad = rng.randint(0, 3)
                tensor = torch.cat([torch.full((pad,), math.nan), whole.reshape(-1)[begin:end], torch.zeros(pad)])
                shown = shape if rng.random() < 0.5 else (whole.numel(),)
                found.append((tensor, [Piece(("w",), pad, "parameters/w", shown, (begin,), (end - begin,), owner)]))
            continue
        for begin, end in cuts(rng, shape[dim], parts):
            index = tuple(slice(begin, end) if d == dim else slice(None) for d in range(len(shape)))
            offset = tuple(begin if d == dim else 0 for d in range(len(shape)))
            tensor = whole[index].contiguous()
            found.append((tensor, [Piece(("w",), 0, "parameters/w", shape, offset, tuple(tensor.shape), owner)]))
    return found


def sources_of(layout: list[tuple[torch.Tensor, list[Piece]]]) -> list[SourcePart]:
    return [SourcePart(rank, {"w": tensor}, pieces) for rank, (tensor, pieces) in enumerate(layout)]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    st.sampled_from(["rows", "columns", "flat"]),
    st.sampled_from(["rows", "columns", "flat"]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_any_layout_into_any_other(
    shape: tuple[int, ...], before: str, after: str, old: int, new: int, copies: int, rng: random.Random
) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randint(0, 99)))
    whole.view(-1)[rng.randrange(whole.numel())] = math.nan  # a NaN is copied and compared like any other bits
    sources = sources_of(laid_out(whole, before, old, rng, copies))
    for due, pieces in laid_out(whole, after, new, rng):
        room = due.clone()
        for piece in pieces:
            room.view(-1)[piece.start : piece.start + piece.elements] = -1.0
        state = reshape(sources, {"w": room}, pieces)
        assert torch.equal(state["w"].view(torch.int32), due.view(torch.int32))  # padding too: it is nobody's


def test_sizes_are_named_when_they_differ() -> None:
    whole = torch.randn(4, 6)
    sources = sources_of(laid_out(whole, "rows", 2, random.Random(0)))

    def wanted(name: str = "parameters/w", shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.float32) -> None:
        piece = Piece(("w",), 0, name, shape, (0,) * len(shape), shape)
        reshape(sources, {"w": torch.zeros(shape, dtype=dtype)}, [piece])

    wanted()
    with pytest.raises(
        CheckpointError, match=r"parameters/w: shape \(4, 6\) torch.float32 in the checkpoint, shape \(6, 4\)"
    ):
        wanted(shape=(6, 4))
    with pytest.raises(CheckpointError, match=r"torch.float32 in the checkpoint, shape \(4, 6\) torch.bfloat16 here"):
        wanted(dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="moments/w/exp_avg is missing from the checkpoint"):
        wanted(name="moments/w/exp_avg")
    with pytest.raises(CheckpointError, match="there is no part"):
        reshape([], {}, [])
    assert wholes(sources)["parameters/w"].shape == (4, 6)


def test_gaps_and_double_owners_are_found_even_where_their_sizes_cancel_out() -> None:
    whole = torch.arange(12.0)

    def held(*ranges: tuple[int, int]) -> list[SourcePart]:
        return [
            SourcePart(rank, {"w": whole[a:b]}, [Piece(("w",), 0, "parameters/w", (12,), (a,), (b - a,))])
            for rank, (a, b) in enumerate(ranges)
        ]

    room = {"w": torch.zeros(12)}
    wanted = [Piece(("w",), 0, "parameters/w", (12,), (0,), (12,))]
    assert torch.equal(reshape(held((0, 5), (5, 12)), room, wanted)["w"], whole)
    with pytest.raises(CheckpointError, match="is not whole: 11 of its 12"):
        reshape(held((0, 5), (6, 12)), room, wanted)
    with pytest.raises(CheckpointError, match=r"ranks \[0, 1\] both claim"):
        reshape(held((0, 6), (5, 11)), room, wanted)


def test_copies_are_compared_by_the_share_that_they_fall_to() -> None:
    tensors = {f"p{i}": torch.randn(8) for i in range(6)}
    other = {**tensors, "p3": tensors["p3"] + 1}
    buffers = {"own": torch.zeros(1)}

    def part(rank: int, held: dict[str, torch.Tensor]) -> SourcePart:
        pieces = [Piece((n,), 0, f"parameters/{n}", (8,), (0,), (8,), rank == 0) for n in held]
        pieces.append(Piece(("own",), 0, "buffers/own", (1,), (0,), (1,), rank == 0))
        return SourcePart(rank, {**held, **{"own": buffers["own"] + rank}}, pieces)

    sources = [part(0, tensors), part(1, other)]
    refused = []
    for index in range(3):
        try:
            state = reshape(sources, {"own": torch.ones(1)}, [sources[0].pieces[-1]], share=(index, 3))
            assert state["own"].tolist() == [0.0]  # a buffer is rank 0's, and may differ
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) == 1 and "parameters/p3 is not the same on rank 0 and rank 1" in refused[0]


def test_values_must_agree_unless_they_are_each_ranks_own() -> None:
    def part(rank: int, **values: object) -> SourcePart:
        tensor = torch.zeros(2)
        state = {"w": tensor, "rank": {"is": rank}, "values": {"nan": math.nan, "step": torch.tensor(3.0), **values}}
        return SourcePart(rank, state, [Piece(("w",), 0, "parameters/w", (2,), (0,), (2,), rank == 0)])

    reshape([part(0), part(1)], {}, [], per_rank=("rank",))
    with pytest.raises(CheckpointError, match="rank/is is 0 in the part of rank 0 and 1 in that of rank 1"):
        reshape([part(0), part(1)], {}, [])
    with pytest.raises(CheckpointError, match=r"values/step is a tensor of shape \(\) torch.float32 .* and 3.0 in"):
        reshape([part(0), part(1, step=3.0)], {}, [], per_rank=("rank",))
    with pytest.raises(CheckpointError, match=r"values/lr is missing in the part of rank 0 and 0\.1 in"):
        reshape([part(0), part(1, lr=0.1)], {}, [], per_rank=("rank",))


def test_pieces_survive_a_weights_only_file_and_damage_is_named(tmp_path: Path) -> None:
    pieces = [
        Piece(("optimizer", "state", "a.b", 0), 3, "moments/a.b/exp_avg", (4, 5), (1, 0), (2, 5), False),
        Piece(("x",), 0, "parameters/s", (), (), ()),
        Piece(("x",), 2, "masters/f", (4, 5), (7,), (9,)),
    ]
    torch.save(to_plain(pieces), tmp_path / "pieces.pt")
    assert from_plain(torch.load(tmp_path / "pieces.pt", weights_only=True)) == pieces
    for damage in (
        [("path",)],
        5,
        [(("x",), 0, "n", (4,), (3,), (2,), True)],
        [(("x",), 0, "n", (4, 4), (0, 0, 0), (1, 1, 1), True)],
        [(("x",), 0, "n", (4,), (-1,), (2,), True)],
    ):
        with pytest.raises(CheckpointError, match="pieces is damaged"):
            from_plain(damage)
    outside = [Piece(("w",), 4, "parameters/w", (8,), (0,), (8,))]
    with pytest.raises(CheckpointError, match="where there is no tensor of that size"):
        reshape([SourcePart(0, {"w": torch.zeros(8)}, outside)], {}, [])
    with pytest.raises(CheckpointError, match="holds nothing at v"):
        reshape([SourcePart(0, {"w": torch.zeros(8)}, [Piece(("v",), 0, "parameters/w", (8,), (0,), (8,))])], {}, [])


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """One rank's rows out of 64 MB of memory-mapped parts: the process grows by much less than the parts hold."""
    rows = 2**15
    for rank in range(4):
        torch.save({"w": torch.full((rows, 128), float(rank))}, tmp_path / f"{rank}.pt")

    def piece(rank: int, of: int) -> Piece:
        return Piece(("w",), 0, "parameters/w", (4 * rows, 128), (rank * 4 * rows // of, 0), (4 * rows // of, 128))

    sources = [
        SourcePart(rank, torch.load(tmp_path / f"{rank}.pt", weights_only=True, mmap=True), [piece(rank, 4)])
        for rank in range(4)
    ]
    room = {"w": torch.zeros(4 * rows // 64, 128)}
    before = resident()
    state = reshape(sources, room, [piece(40, 64)])
    assert (state["w"] == 2).all()
    assert resident() - before < 8 * 2**20  # the rows are 1 MB; a part is 16 MB


def resident() -> int:
    """Bytes of this process in memory, file pages that it has touched included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
