"""The copies of an export plan as rectangles of the target tensors' 2-D views, which is what a writer takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _native
from ._arrays import rows_cols
from ._slices import LocalRect

#: Of one copy. More are elements that lie apart, each of which would be a rectangle of its own.
_RECTANGLES_MAX = 1 << 16
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
            views = [_float_copy(view).add_(place.add) for view in views]
        return views[0] if len(views) == 1 else _in_turn(views)


def _float_copy(view: Any) -> Any:
    import torch

    return view.to(torch.float32, copy=True)


def _in_turn(views: list[Any]) -> Any:
    import torch

    return torch.stack(views, dim=-1).flatten(-2)


def places(copies: Sequence[Any], shape: Sequence[int], what: str, most: int = _RECTANGLES_MAX) -> list[Place]:
    """Of a rank's copies to a tensor of this shape. Unsupported: elements lie apart, so that it takes more than `most`
    rectangles to have those of a copy; names `what`."""
    return [
        Place(tensor, LocalRect(*rect, 0), tuple(Run(run[0], run[1], run[2:]) for run in runs), add)
        for tensor, rect, runs, add in _native.export_rectangles(copies, rows_cols(shape)[1], what, most)
    ]


def worth_it(copies: Sequence[Any]) -> int:
    """How many rectangles of a copy are written in less time than it takes to gather the tensor: those of many elements
    each, or few."""
    elements: int = sum(math.prod(copy.counts) for copy in copies)
    return min(_FEW + elements // _ELEMENTS, _RECTANGLES_MAX)
