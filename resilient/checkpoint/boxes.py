"""Boxes inside a whole tensor: where pieces of two layouts meet. Pure arithmetic on tuples, no tensors.

A box is (offset, size), each as long as the whole's shape. A 0-dim whole is the one box ((), ()).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]


def elements(box: Box) -> int:
    return math.prod(box[1])


def split_range(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Elements [start, stop) of a whole that is flattened in C order, as boxes of it: in that order, none empty, and at
    most 2 * dims - 1 of them (the rest of a row, whole rows, the beginning of a row; the same inside a row)."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = tuple(shape[1:])
    row = math.prod(inner)
    (first, skipped), (last, more) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, split_range(skipped, more, inner))
    found: list[Box] = []
    if skipped:
        found += _in_row(first, split_range(skipped, row, inner))
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in inner)), (last - first, *inner)))
    if more:
        found += _in_row(last, split_range(0, more, inner))
    return found


def _in_row(index: int, boxes: list[Box]) -> list[Box]:
    return [((index, *offset), (1, *size)) for offset, size in boxes]


def intersection(a: Box, b: Box) -> Box | None:
    """What both boxes of one whole hold; None if there is no such element."""
    offset, size = [], []
    for at, n, other, m in zip(*a, *b, strict=True):
        begin, end = max(at, other), min(at + n, other + m)
        if begin >= end:
            return None
        offset.append(begin)
        size.append(end - begin)
    return tuple(offset), tuple(size)


def inside(part: Box, box: Box) -> tuple[slice, ...]:
    """Index of `part` into a tensor that holds `box`, which must contain it."""
    return tuple(slice(o - at, o - at + n) for o, n, at in zip(*part, box[0], strict=True))


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes of one whole that share an element; None if all are disjoint.

    A sweep along the dimension with the most different offsets: cheap for shards of one dimension."""
    order = [i for i, box in enumerate(boxes) if elements(box)]
    if len(order) < 2:
        return None
    dims = len(boxes[order[0]][0])
    if dims == 0:
        return order[0], order[1]
    sweep = max(range(dims), key=lambda dim: len({boxes[i][0][dim] for i in order}))
    order.sort(key=lambda i: boxes[i][0][sweep])
    for n, i in enumerate(order):
        end = boxes[i][0][sweep] + boxes[i][1][sweep]
        for j in order[n + 1 :]:
            if boxes[j][0][sweep] >= end:
                break
            if intersection(boxes[i], boxes[j]) is not None:
                return i, j
    return None
