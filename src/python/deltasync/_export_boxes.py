"""The copies of an export plan as rectangles of the target tensors' 2-D views, which is what a writer takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ._arrays import rows_cols
from ._slices import LocalRect
from .errors import Unsupported

#: Of one copy. More are elements that lie apart, each of which would be a rectangle of its own.
_BOXES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Place:
    """A rectangle of a tensor, and where its elements are in a piece: offset and strides in elements."""

    tensor: int
    piece: int
    rect: LocalRect
    offset: int
    strides: tuple[int, int]
    add: float


class ExportedBox:
    """A rectangle of a tensor of this shape, as a piece of this rank has it."""

    def __init__(self, shape: Sequence[int], piece: Any, place: Place) -> None:
        self.shape, self.dtype = tuple(shape), piece.dtype
        self.rect = place.rect
        self._place, self.piece = place, piece

    def memory(self) -> Any:
        """Rows and columns: a view of the piece, if nothing is computed."""
        place = self._place
        size = (place.rect.rows, place.rect.cols)
        view = self.piece.as_strided(size, place.strides, self.piece.storage_offset() + place.offset)
        return view.float() + place.add if place.add else view


def places(copy: Any, shape: Sequence[int], what: str) -> list[Place]:
    """Of a copy to a tensor of this shape. Unsupported: it is of elements that lie apart; names `what`."""
    cols = rows_cols(shape)[1]
    made = list(itertools.islice(_rects(copy, cols), _BOXES_MAX + 1))
    if len(made) > _BOXES_MAX:
        raise Unsupported(
            f"{what}: row {copy.row} of the page moves elements one by one, which direct export does not do"
        )
    return [Place(copy.tensor, copy.piece, rect, offset, strides, copy.add) for rect, offset, strides in made]


def _rects(copy: Any, cols: int) -> Iterator[tuple[LocalRect, int, tuple[int, int]]]:
    steps = list(zip(copy.counts, copy.source_strides, copy.target_strides, strict=True))
    count, source_step, target_step = steps.pop() if steps and steps[-1][2] == 1 else (1, 1, 1)
    down, down_step = 1, 0  # runs that lie below each other
    if steps and steps[-1][2] == cols and copy.target_offset % cols + count <= cols:
        down, down_step, _ = steps.pop()
    for indices in itertools.product(*(range(size) for size, _, _ in steps)):
        source, target = copy.source_offset, copy.target_offset
        for index, (_, from_step, to_step) in zip(indices, steps, strict=True):
            source, target = source + index * from_step, target + index * to_step
        if down > 1 or target % cols + count <= cols:
            row, col = divmod(target, cols)
            yield LocalRect(row, col, down, count, 0), source, (down_step, source_step)
            continue
        for first, length in _lines(target, count, cols):
            row, col = divmod(first, cols)
            rows = max(length // cols, 1)
            strides = (cols * source_step, source_step)
            yield LocalRect(row, col, rows, length // rows, 0), source + (first - target) * source_step, strides


def _lines(begin: int, count: int, cols: int) -> Iterator[tuple[int, int]]:
    """A run over several rows: the end of the first, whole ones, the beginning of the last."""
    head = min(-begin % cols, count)
    whole = (count - head) // cols * cols
    for first, length in ((begin, head), (begin + head, whole), (begin + head + whole, count - head - whole)):
        if length:
            yield first, length
