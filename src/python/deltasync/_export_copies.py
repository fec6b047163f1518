"""Carrying out the copies of an export plan with torch."""

from __future__ import annotations

from typing import Any

#: Integers of as many bytes.
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def bits(tensor: Any) -> Any:
    """The same memory as integers: a comparison of them is one of bytes."""
    import torch

    return tensor.view(getattr(torch, _BITS[tensor.element_size()]))


class Sources:
    """The pieces of a rank, while their memory stays as it is."""

    def __init__(self, views: list[Any]) -> None:
        self._views = views

    def read(self, copy: Any, dtype: Any) -> Any:
        """The copy's elements in the target's dtype (torch), in the shape of its counts. A view of the trainer's memory
        where nothing is computed."""
        piece = self._views[copy.piece]
        if not piece.is_contiguous():
            self._views[copy.piece] = piece = piece.contiguous()
        made = piece.as_strided(copy.counts, copy.source_strides, piece.storage_offset() + copy.source_offset)
        if copy.add:
            made = made.float() + copy.add
        return made.to(dtype)


def target_of(copy: Any, flat: Any) -> Any:
    """The copy's elements in the whole target tensor, `flat`; a view."""
    return flat.as_strided(copy.counts, copy.target_strides, flat.storage_offset() + copy.target_offset)


def positions(copy: Any, most: int) -> tuple[Any, Any]:
    """Of at most so many of the copy's elements, evenly chosen: their numbers among them, and in the target."""
    import torch

    total = 1
    for count in copy.counts:
        total *= count
    chosen = torch.unique(torch.linspace(0, total - 1, min(total, most), dtype=torch.float64).long())
    place = torch.full_like(chosen, copy.target_offset)
    rest = chosen.clone()
    for count, stride in zip(reversed(copy.counts), reversed(copy.target_strides), strict=True):
        place += (rest % count) * stride
        rest //= count
    return chosen, place
