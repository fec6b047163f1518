"""Which rectangles of a tensor's 2-D view a piece of memory is: the whole of it, or a rank's part of a DTensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._arrays import rows_cols
from .errors import Unsupported


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of the 2-D view, and where it begins in the local tensor (index of the first element's row there)."""

    row: int
    col: int
    rows: int
    cols: int
    #: Row of the local tensor's own 2-D view at which it begins.
    local_row: int


def pieces(shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> list[Piece]:
    """The N-d block of `size` at `offset` of a tensor of `shape`, as rectangles of its 2-D view, in the order of the
    block's own rows. Empty if the block is."""
    if math.prod(size) == 0:
        return []
    if not shape:
        return [Piece(0, 0, 1, 1, 0)]
    outer, inner = list(shape[:-1]), list(size[:-1])
    # The dimensions behind the last one that is cut are whole: their rows lie one behind the other.
    cut = max((i for i in range(len(outer)) if inner[i] != outer[i]), default=-1)
    run = math.prod(inner[max(cut, 0) :]) if outer else 1
    steps = [math.prod(outer[i + 1 :]) for i in range(len(outer))]
    first = sum(offset[i] * steps[i] for i in range(len(outer)))
    loops = [range(inner[i]) for i in range(max(cut, 0))]
    return [
        Piece(
            first + sum(index * steps[i] for i, index in enumerate(indices)), offset[-1], run, size[-1], number * run
        )
        for number, indices in enumerate(itertools.product(*loops))
    ]


def is_dtensor(value: Any) -> bool:
    return hasattr(value, "_local_tensor") and hasattr(value, "placements") and hasattr(value, "device_mesh")


def local_block(tensor: Any, name: str) -> tuple[Any, list[int], list[int]] | None:
    """This rank's part of a DTensor: (local tensor, offset, size); None if another rank writes it (a replica's first
    rank does) or there is nothing of it here. Unsupported: a placement that is neither Shard nor Replicate."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    offset = [0] * tensor.ndim
    size = list(tensor.shape)
    for index, placement in zip(coordinate, tensor.placements, strict=True):
        if isinstance(placement, Replicate) and index != 0:
            return None
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:  # _StridedShard is a Shard, but its rows are not one run
            raise Unsupported(f"{name}: placed as {placement}; only Shard and Replicate are written by their ranks")
        # As torch.chunk divides: equal chunks, the last ones smaller or empty.
        dim, parts, index = placement.dim, mesh.size(mesh_dim), coordinate[mesh_dim]
        chunk = -(-size[dim] // parts)
        begin = min(index * chunk, size[dim])
        offset[dim] += begin
        size[dim] = min(chunk, size[dim] - begin)
    local = tensor.to_local()
    if list(local.shape) != size and math.prod(size) != 0:
        raise Unsupported(f"{name}: its local part is {list(local.shape)}, but {size} as {tensor.placements}")
    if math.prod(size) == 0:
        return None
    return local, offset, size


__all__ = ["Piece", "is_dtensor", "local_block", "pieces", "rows_cols"]
