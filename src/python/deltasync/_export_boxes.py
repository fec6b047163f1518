"""The copies of an export plan as rectangles of the target tensors' 2-D views, which is what a writer takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ._arrays import rows_cols
from ._slices import LocalRect
from .errors import Unsupported

#: Of one copy. More are elements that lie apart, each of which would be a rectangle of its own.
_BOXES_MAX = 1 << 16
#: A rectangle costs some 50 µs, in which some 1,000 elements are gathered.
_FEW = 256
_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class Run:
    """Where a rectangle's elements are in a piece: offset and strides (rows, columns) in elements."""

    piece: int
    offset: int
    strides: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Place:
    """A rectangle of a tensor, and where its elements are. Of several runs its columns are from each in turn."""

    tensor: int
    rect: LocalRect
    runs: tuple[Run, ...]
    add: float


class ExportedBox:
    """A rectangle of a tensor of this shape, as this rank has it: in these pieces."""

    def __init__(self, shape: Sequence[int], pieces: Sequence[Any], place: Place) -> None:
        self._pieces = [pieces[run.piece] for run in place.runs]
        self.shape, self.dtype = tuple(shape), self._pieces[0].dtype
        self.rect = place.rect
        self._place = place

    @property
    def piece(self) -> Any:
        """Whose memory it is, if it is one's."""
        return self._pieces[0]

    def memory(self) -> Any:
        """Rows and columns: a view of the piece, if nothing is computed, and it is of one."""
        place = self._place
        size = (place.rect.rows, place.rect.cols // len(place.runs))
        views = [
            piece.as_strided(size, run.strides, piece.storage_offset() + run.offset)
            for piece, run in zip(self._pieces, place.runs, strict=True)
        ]
        if place.add:
            views = [view.float() + place.add for view in views]
        return views[0] if len(views) == 1 else _in_turn(views)


def _in_turn(views: list[Any]) -> Any:
    import torch

    return torch.stack(views, dim=-1).flatten(-2)


def places(copies: Sequence[Any], shape: Sequence[int], what: str, most: int = _BOXES_MAX) -> list[Place]:
    """Of a rank's copies to a tensor of this shape. Unsupported: elements lie apart, so that it takes more than `most`
    rectangles to have those of a copy; names `what`."""
    return [place for together in _joined(copies) for place in _places(together, rows_cols(shape)[1], what, most)]


def worth_it(copies: Sequence[Any]) -> int:
    """How many rectangles of a copy are written in less time than it takes to gather the tensor: those of many elements
    each, or few."""
    elements: int = sum(math.prod(copy.counts) for copy in copies)
    return min(_FEW + elements // _ELEMENTS, _BOXES_MAX)


def _joined(copies: Sequence[Any]) -> Iterator[list[Any]]:
    """Copies whose elements alternate in the target, as those of gate and up may, together; others alone."""
    groups: dict[Any, list[Any]] = {}
    for copy in copies:
        every = copy.target_strides[-1] if copy.target_strides else 1
        alike = (tuple(copy.counts), tuple(copy.target_strides), copy.target_offset // max(every, 1), copy.add)
        groups.setdefault(alike, []).append(copy)
    for (_, strides, _, _), group in groups.items():
        ordered = sorted(group, key=lambda copy: copy.target_offset)
        if len(group) > 1 and len(group) == strides[-1] and all(stride % strides[-1] == 0 for stride in strides):
            yield ordered
        else:
            yield from ([copy] for copy in group)


def _places(copies: list[Any], cols: int, what: str, most: int) -> Iterator[Place]:
    """Of copies that go together: as if the tensor had one column for all of them."""
    every, first = len(copies), copies[0]
    each = [_rects(_Steps.of(copy, every), cols // every) for copy in copies]
    for number, found in enumerate(zip(*each, strict=True)):
        if number == most:
            raise Unsupported(
                f"{what}: row {first.row} of the page moves elements one by one, which direct export does not do"
            )
        rect = found[0][0]
        rect = LocalRect(rect.row, rect.col * every, rect.rows, rect.cols * every, rect.local_row)
        runs = tuple(Run(copy.piece, run[1], run[2]) for copy, run in zip(copies, found, strict=True))
        yield Place(first.tensor, rect, runs, first.add)


@dataclass(frozen=True, slots=True)
class _Steps:
    """A copy to a tensor of which only each `every`-th element counts."""

    counts: Sequence[int]
    source_strides: Sequence[int]
    target_strides: Sequence[int]
    source_offset: int
    target_offset: int

    @classmethod
    def of(cls, copy: Any, every: int) -> _Steps:
        strides = [stride // every for stride in copy.target_strides]
        return cls(copy.counts, copy.source_strides, strides, copy.source_offset, copy.target_offset // every)


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
