"""Which rectangles of a tensor's 2-D view a piece of memory is: the whole of it, or a rank's part of a DTensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import Unsupported


@dataclass(frozen=True, slots=True)
class LocalRect:
    """A rectangle of the 2-D view, and where it begins in the local tensor (index of the first element's row there)."""

    row: int
    col: int
    rows: int
    cols: int
    #: Row of the local tensor's own 2-D view at which it begins.
    local_row: int


def local_rects(shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> list[LocalRect]:
    """The N-d block of `size` at `offset` of a tensor of `shape`, as rectangles of its 2-D view, in the order of the
    block's own rows. Empty if the block is."""
    if math.prod(size) == 0:
        return []
    if not shape:
        return [LocalRect(0, 0, 1, 1, 0)]
    outer, inner = list(shape[:-1]), list(size[:-1])
    # The dimensions behind the last one that is cut are whole: their rows are contiguous.
    cut = max((i for i in range(len(outer)) if inner[i] != outer[i]), default=-1)
    run = math.prod(inner[max(cut, 0) :]) if outer else 1
    steps = [math.prod(outer[i + 1 :]) for i in range(len(outer))]
    first = sum(offset[i] * steps[i] for i in range(len(outer)))
    loops = [range(inner[i]) for i in range(max(cut, 0))]
    return [
        LocalRect(
            first + sum(index * steps[i] for i, index in enumerate(indices)), offset[-1], run, size[-1], number * run
        )
        for number, indices in enumerate(itertools.product(*loops))
    ]


def is_dtensor(value: Any) -> bool:
    return hasattr(value, "_local_tensor") and hasattr(value, "placements") and hasattr(value, "device_mesh")


class ShardedView:
    """A box of a DTensor, perhaps without dimensions of one: what slicing and indexing make. Each rank writes what it
    has of it."""

    def __init__(self, tensor: Any, begin: Sequence[int], size: Sequence[int], kept: Sequence[int]) -> None:
        """`kept`: the tensor's dimensions that are the view's, in order."""
        self.tensor, self.begin, self.size, self.kept = tensor, begin, size, kept
        self.dtype = tensor.dtype
        self.shape = tuple(size[dim] for dim in kept)

    @staticmethod
    def of(tensor: Any, size: Sequence[int], stride: Sequence[int], offset: int) -> ShardedView | None:
        """The view of the whole, dense tensor with these sizes, strides and offset (in elements); None if it is no box,
        or its dimensions are in another order."""
        shape = list(tensor.shape)
        if math.prod(shape) == 0:
            return None
        steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        begin = []
        for step in steps:
            begin.append(offset // step)
            offset %= step
        sizes, kept, at = [1] * len(shape), [], 0
        for length, step in zip(size, stride, strict=True):
            # A dimension of one may have any stride: it takes the next of the tensor, cut to one.
            while at < len(shape) and length != 1 and (steps[at] != step or shape[at] == 1):
                at += 1
            if at == len(shape) or begin[at] + length > shape[at]:
                return None
            sizes[at] = length
            kept.append(at)
            at += 1
        return ShardedView(tensor, begin, sizes, kept)

    def block(self, name: str, near: Container[int] | None = None) -> tuple[Any, list[int], list[int]] | None:
        """As :func:`local_block`, of the view."""
        mine = local_block(self.tensor, name, near)
        if mine is None:
            return None
        local, at, have = mine
        first = [max(a, b) for a, b in zip(self.begin, at, strict=True)]
        end = [min(a + n, b + m) for a, n, b, m in zip(self.begin, self.size, at, have, strict=True)]
        if any(a >= b for a, b in zip(first, end, strict=True)):
            return None
        for dim, (a, b) in enumerate(zip(first, end, strict=True)):
            local = local.narrow(dim, a - at[dim], b - a)
        size = [end[dim] - first[dim] for dim in self.kept]
        return local.reshape(size), [first[dim] - self.begin[dim] for dim in self.kept], size


def local_block(tensor: Any, name: str, near: Container[int] | None = None) -> tuple[Any, list[int], list[int]] | None:
    """This rank's part of a DTensor: (local tensor, offset, size), both in elements of each dimension; None if another
    rank writes it (the first that has a replica does, of those that are `near`, by global rank) or there is nothing of
    it here. Unsupported: a placement that is neither Shard nor Replicate; parts that are not one block, or are other
    than torch divides without saying where they lie."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    said = _said_block(tensor, name)
    cuts = _cuts(tensor, name, ordered=said is None)
    cut_in = {mesh_dim for mesh_dim, _ in cuts}
    alike = mesh.mesh[tuple(index if dim in cut_in else slice(None) for dim, index in enumerate(coordinate))]
    if next(rank for rank in alike.flatten().tolist() if near is None or rank in near) != mesh.get_rank():
        return None
    local = tensor.to_local()
    offset, size = _chunk(tensor, cuts, coordinate) if said is None else said
    if list(local.shape) != size and (0 not in size or local.numel()):
        raise Unsupported(
            f"{name}: its local part is {list(local.shape)}, but {size} as {tensor.placements}",
            "parts of Megatron-FSDP are uneven, which megatron_fsdp.uneven_dtensor's "
            "preprocess_state_dict_for_uneven_dtensor() says of a state_dict",
        )
    return None if 0 in size else (local, offset, size)


def _chunk(tensor: Any, cuts: list[tuple[int, int]], coordinate: Sequence[int]) -> tuple[list[int], list[int]]:
    """As torch.chunk divides: equal chunks, the last ones smaller or empty."""
    offset = [0] * tensor.ndim
    size = list(tensor.shape)
    for mesh_dim, dim in cuts:
        chunk = -(-size[dim] // tensor.device_mesh.size(mesh_dim))
        begin = min(coordinate[mesh_dim] * chunk, size[dim])
        offset[dim] += begin
        size[dim] = min(chunk, size[dim] - begin)
    return offset, size


def _said_block(tensor: Any, name: str) -> tuple[list[int], list[int]] | None:
    """Of a part that says itself where it lies, as torch's checkpoints ask it: Megatron-FSDP divides unevenly."""
    said = getattr(tensor._local_tensor, "__create_chunk_list__", None)
    if said is None:
        return None
    chunks = said()
    if len(chunks) != 1:
        raise Unsupported(f"{name}: its local part is {len(chunks)} blocks, and one is written")
    offset, size = list(chunks[0].offsets), list(chunks[0].sizes)
    if any(a + n > whole for a, n, whole in zip(offset, size, tensor.shape, strict=True)):
        raise Unsupported(f"{name}: its local part of {size} at {offset} is beyond its {list(tensor.shape)}")
    return offset, size


def _cuts(tensor: Any, name: str, *, ordered: bool = True) -> list[tuple[int, int]]:
    """(mesh dimension, tensor dimension) of each cut, in the order in which they were made if that is to be known.

    FSDP2 over tensor parallelism cuts what the latter has cut before, although it is the mesh dimension to the left of
    it: torch says so by _StridedShard, with the number of parts that there were."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    plain: list[tuple[int, int]] = []
    later: list[tuple[int, int]] = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard):
            before = math.prod(
                tensor.device_mesh.size(i)
                for i, other in enumerate(tensor.placements)
                if i > mesh_dim and getattr(other, "dim", None) == placement.dim
            )
            if ordered and placement.split_factor != before:
                raise Unsupported(f"{name}: placed as {tensor.placements}, parts of {placement} are not one block")
            later.append((mesh_dim, placement.dim))
        elif isinstance(placement, Shard):
            plain.append((mesh_dim, placement.dim))
        else:
            raise Unsupported(f"{name}: placed as {placement}; only Shard and Replicate are written by their ranks")
    return plain + later[::-1]


__all__ = ["LocalRect", "ShardedView", "is_dtensor", "local_block", "local_rects"]
