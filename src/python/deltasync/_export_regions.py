"""Rectangles of a quantised tensor that a rank has whole blocks of: it makes their codes and scales itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ._export_boxes import ExportedBox, Place, Run
from ._export_quantise import Scheme, quantise
from ._slices import LocalRect
from .errors import Unsupported


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of whole blocks, and the places that it is made of."""

    tensor: int
    rect: LocalRect
    places: tuple[Place, ...]


def regions(places: Iterable[Place], shape: Sequence[int], scheme: Scheme, what: str) -> list[Region]:
    """Of what a rank has of one tensor. Unsupported: it has parts of blocks; names `what`."""
    whole = [Region(place.tensor, replace(place.rect, local_row=0), (place,)) for place in places]
    found = _joined(_joined(whole, down=True), down=False)
    down, across = scheme.block or (shape[0], shape[1])
    for region in found:
        rect = region.rect
        if _cut(rect.row, rect.rows, down, shape[0]) or _cut(rect.col, rect.cols, across, shape[1]):
            raise Unsupported(
                f"{what}: a rank has rows {rect.row} to {rect.row + rect.rows} and columns {rect.col} to "
                f"{rect.col + rect.cols}, and a scale is of {down} x {across} elements: another rank has some of them"
            )
    return found


def _cut(first: int, count: int, block: int, size: int) -> bool:
    return first % block != 0 or ((first + count) % block != 0 and first + count != size)


def _joined(found: list[Region], *, down: bool) -> list[Region]:
    """Those that lie below each other (or beside each other) and are equally wide (high), as one."""

    def key(region: Region) -> tuple[int, int, int]:
        rect = region.rect
        return (rect.col, rect.cols, rect.row) if down else (rect.row, rect.rows, rect.col)

    out: list[Region] = []
    for region in sorted(found, key=key):
        before, rect = out[-1].rect if out else None, region.rect
        if before is not None and key(out[-1])[:2] == key(region)[:2]:
            if down and before.row + before.rows == rect.row:
                out[-1] = _with(out[-1], region, replace(before, rows=before.rows + rect.rows))
                continue
            if not down and before.col + before.cols == rect.col:
                out[-1] = _with(out[-1], region, replace(before, cols=before.cols + rect.cols))
                continue
        out.append(region)
    return out


def _with(one: Region, other: Region, rect: LocalRect) -> Region:
    return Region(one.tensor, rect, one.places + other.places)


class QuantisedBox(ExportedBox):
    """Codes of a region, or its scales. They are made when they are asked for."""

    def __init__(self, shape: Sequence[int], dtype: Any, rect: LocalRect, make: Callable[[], Any]) -> None:
        self.shape, self.dtype, self.rect = tuple(shape), dtype, rect
        self._make = make

    @property
    def piece(self) -> Any:
        return None

    def memory(self) -> Any:
        return self._make()


class QuantisedRegion:
    """A region with the memory of its places."""

    def __init__(self, region: Region, shape: Sequence[int], pieces: Sequence[Any], scheme: Scheme) -> None:
        self._region, self._shape, self._pieces, self._scheme = region, tuple(shape), pieces, scheme
        self._scales: Any = None

    def boxes(self, names: tuple[str, str], scale_shape: Sequence[int]) -> Iterator[tuple[str, QuantisedBox]]:
        """Of tensor and scales. The scales are made with the codes, and kept until they are asked for."""
        import torch

        rect, (down, across) = self._region.rect, self._scheme.block or self._shape
        size = self._scheme.scale_shape((rect.rows, rect.cols))
        yield names[0], QuantisedBox(self._shape, torch.float8_e4m3fn, rect, self._codes)
        scales = LocalRect(rect.row // down, rect.col // across, *size, 0)
        yield names[1], QuantisedBox(scale_shape, torch.float32, scales, self._take_scales)

    def _codes(self) -> Any:
        rect = self._region.rect
        codes, self._scales = quantise(self._rows, (rect.rows, rect.cols), self._scheme)
        return codes

    def _take_scales(self) -> Any:
        if self._scales is None:
            self._codes()
        scales, self._scales = self._scales, None
        return scales

    def _rows(self, begin: int, end: int) -> Any:
        """Of the region."""
        import torch

        rect = self._region.rect
        parts = [part for place in self._region.places if (part := self._part(place, begin, end)) is not None]
        if len(parts) == 1:
            return parts[0][1]
        dtype = parts[0][1].dtype if len({part.dtype for _, part in parts}) == 1 else torch.float32
        band = torch.empty((end - begin, rect.cols), dtype=dtype, device=parts[0][1].device)
        for (row, col), part in parts:
            band[row : row + part.shape[0], col : col + part.shape[1]] = part
        return band

    def _part(self, place: Place, begin: int, end: int) -> tuple[tuple[int, int], Any] | None:
        """What the place has of these rows: where that is in them, and the values."""
        rect, whole = place.rect, self._region.rect
        first = max(rect.row, whole.row + begin)
        rows = min(rect.row + rect.rows, whole.row + end) - first
        if rows <= 0:
            return None
        runs = tuple(
            Run(run.piece, run.offset + (first - rect.row) * run.strides[0], run.strides) for run in place.runs
        )
        cut = Place(place.tensor, replace(rect, row=first, rows=rows), runs, place.add)
        values = ExportedBox(self._shape, self._pieces, cut).memory()
        return (first - whole.row - begin, rect.col - whole.col), values
