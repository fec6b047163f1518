"""What tracing yields: rectangles of HF tensors and where their elements are, in the terms of placement.md.

Nothing here touches a tensor. Offsets and strides of memory are bytes, those of rectangles are elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple


class Rect(NamedTuple):
    """Rows [row, row + rows) and columns [col, col + cols) of a tensor's 2-D view, in elements."""

    row: int
    col: int
    rows: int
    cols: int


class PlacedSlice(NamedTuple):
    """Element (r, c) of `tensor` is at memory base + offset + (r - rect.row)·row_stride + (c - rect.col)·col_stride."""

    tensor: str
    rect: Rect
    memory: int  #: index in LoaderTrace.memories
    offset: int
    row_stride: int  #: 0 where the rectangle has one row
    col_stride: int  #: 0 where the rectangle has one column


class IgnoredSlice(NamedTuple):
    """What no slice places: a rectangle, or the whole tensor where `rect` is None."""

    tensor: str
    rect: Rect | None


class PlacedRect(NamedTuple):
    """A rectangle and its place, relative to the start of the destination (bytes)."""

    rect: Rect
    offset: int
    row_stride: int
    col_stride: int


class Dim(NamedTuple):
    """One dimension of a copy: `size` steps of `src` elements of the HF tensor, `dst` bytes of memory each."""

    src: int
    size: int
    dst: int


def view_2d(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the 2-D view: columns are the last dimension, a scalar is 1×1, 1-D is 1×n, empty is 0×0."""
    if not shape:
        return 1, 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return (rows, shape[-1]) if rows and shape[-1] else (0, 0)


def merge_dims(dims: Iterable[Dim]) -> list[Dim]:
    """The same steps in as few dimensions as possible, the one with the widest source step first."""
    merged: list[Dim] = []
    for dim in sorted((dim for dim in dims if dim.size != 1), reverse=True):
        if merged and merged[-1].src == dim.src * dim.size and merged[-1].dst == dim.dst * dim.size:
            merged[-1] = Dim(dim.src, merged[-1].size * dim.size, dim.dst)
        else:
            merged.append(dim)
    return merged


@lru_cache(maxsize=4096)
def placed_rects(
    start: int, shape: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...], columns: int
) -> list[PlacedRect]:
    """Cuts an N-d copy into rectangles of the source's 2-D view.

    `start`, `src`: first element and strides of the region, in elements of the contiguous HF tensor; `dst`: strides of
    the destination in bytes; `columns`: of the 2-D view. A rectangle takes one dimension that steps by a row and one
    that steps by a column; where the two sides' strides do not let others be merged into these, they are enumerated.
    The result is shared: do not change it.
    """
    if 0 in shape:
        return []
    dims = merge_dims(Dim(*dim) for dim in zip(src, shape, dst, strict=True))
    return list(_emit(start, 0, dims, columns))


def _emit(start: int, offset: int, dims: list[Dim], columns: int) -> Iterator[PlacedRect]:
    across = [dim for dim in dims if dim.src % columns]
    if start % columns + sum((dim.size - 1) * dim.src for dim in across) < columns:
        yield from _rectangles(start, offset, dims, columns)
        return
    # The region runs over the ends of rows. What steps over them is cut there.
    widest = max(across)
    rest = list(dims)
    rest.remove(widest)
    per_row = columns // widest.src if columns % widest.src == 0 else 0
    if per_row and widest.size > per_row and widest.size % per_row == 0:
        rows = Dim(columns, widest.size // per_row, widest.dst * per_row)
        yield from _emit(start, offset, [*rest, rows, Dim(widest.src, per_row, widest.dst)], columns)
    elif widest.src == 1 and len(across) == 1:
        yield from _run(start, offset, widest, rest, columns)
    else:
        for i in range(widest.size):
            yield from _emit(start + i * widest.src, offset + i * widest.dst, rest, columns)


def _run(start: int, offset: int, run: Dim, rest: list[Dim], columns: int) -> Iterator[PlacedRect]:
    """A run of neighbours: the end of a row, whole rows, the beginning of a row."""
    head = min(run.size, -start % columns)
    rows, tail = divmod(run.size - head, columns)
    whole = [Dim(columns, rows, run.dst * columns), Dim(1, columns, run.dst)]
    for done, dims in ((0, [Dim(1, head, run.dst)]), (head, whole), (run.size - tail, [Dim(1, tail, run.dst)])):
        if all(dim.size for dim in dims):
            yield from _rectangles(start + done, offset + done * run.dst, rest + dims, columns)


def _rectangles(start: int, offset: int, dims: list[Dim], columns: int) -> Iterator[PlacedRect]:
    rows, cols = Dim(columns, 1, 0), Dim(1, 1, 0)
    others: list[Dim] = []
    for dim in dims:
        if dim.size == 1:
            continue
        if dim.src == columns and rows.size == 1:
            rows = dim
        elif dim.src == 1 and columns != 1 and cols.size == 1:
            cols = dim
        else:
            others.append(dim)
    places = [(start, offset)]
    for dim in others:
        places = [(s + i * dim.src, o + i * dim.dst) for s, o in places for i in range(dim.size)]
    for first, place in places:
        row, col = divmod(first, columns)
        yield PlacedRect(Rect(row, col, rows.size, cols.size), place, rows.dst, cols.dst)


def complement(rects: Iterable[Rect], rows: int, columns: int) -> list[Rect]:
    """What of rows × columns none of `rects` covers, as disjoint rectangles from top to bottom. They may overlap."""
    todo = sorted(rects)
    if len(todo) == 1 and todo[0] == (0, 0, rows, columns) or not rows:
        return []
    bounds = sorted({0, rows, *(r.row for r in todo), *(r.row + r.rows for r in todo)})
    bands: list[tuple[int, int, list[tuple[int, int]]]] = []  # first row, end, gaps
    active: list[Rect] = []
    following = 0
    for top, bottom in zip(bounds, bounds[1:], strict=False):
        active = [r for r in active if r.row + r.rows > top]
        while following < len(todo) and todo[following].row <= top:
            active.append(todo[following])
            following += 1
        gaps, end = [], 0
        for left, right in sorted((r.col, r.col + r.cols) for r in active):
            if left > end:
                gaps.append((end, left))
            end = max(end, right)
        if end < columns:
            gaps.append((end, columns))
        if bands and bands[-1][2] == gaps:
            bands[-1] = (bands[-1][0], bottom, gaps)
        else:
            bands.append((top, bottom, gaps))
    return [Rect(top, left, bottom - top, right - left) for top, bottom, gaps in bands for left, right in gaps]


def merge_slices(slices: list[PlacedSlice]) -> list[PlacedSlice]:
    """Joins slices of one tensor that follow each other by rows, then by columns, in the tensor and in memory."""
    if len(slices) < 2:
        return slices
    by_rows = _joined(sorted(slices, key=lambda s: (s.memory, s.rect.col, s.rect.cols, s.rect.row)), _below)
    return _joined(sorted(by_rows, key=lambda s: (s.memory, s.rect.row, s.rect.rows, s.rect.col)), _beside)


def _joined(
    slices: list[PlacedSlice], join: Callable[[PlacedSlice, PlacedSlice], PlacedSlice | None]
) -> list[PlacedSlice]:
    joined = [slices[0]]
    for piece in slices[1:]:
        both = join(joined[-1], piece)
        if both is None:
            joined.append(piece)
        else:
            joined[-1] = both
    return joined


def _below(upper: PlacedSlice, lower: PlacedSlice) -> PlacedSlice | None:
    """Both as one, if `lower` continues `upper` downwards."""
    a, b = upper.rect, lower.rect
    if upper.memory != lower.memory or (a.col, a.cols, a.row + a.rows) != (b.col, b.cols, b.row):
        return None
    stride = _stride(upper.offset, a.rows, upper.row_stride, lower.offset, b.rows, lower.row_stride)
    if stride is None or (a.cols > 1 and upper.col_stride != lower.col_stride):
        return None
    return upper._replace(rect=a._replace(rows=a.rows + b.rows), row_stride=stride)


def _beside(left: PlacedSlice, right: PlacedSlice) -> PlacedSlice | None:
    """Both as one, if `right` continues `left` to the right."""
    a, b = left.rect, right.rect
    if left.memory != right.memory or (a.row, a.rows, a.col + a.cols) != (b.row, b.rows, b.col):
        return None
    stride = _stride(left.offset, a.cols, left.col_stride, right.offset, b.cols, right.col_stride)
    if stride is None or (a.rows > 1 and left.row_stride != right.row_stride):
        return None
    return left._replace(rect=a._replace(cols=a.cols + b.cols), col_stride=stride)


def _stride(first: int, steps: int, stride: int, second: int, more: int, other: int) -> int | None:
    """The one stride of `steps` places from `first` and `more` from `second`; that of a single place is free."""
    step, rest = divmod(second - first, steps)
    fits = not rest and step > 0 and (steps == 1 or step == stride) and (more == 1 or step == other)
    return step if fits else None
