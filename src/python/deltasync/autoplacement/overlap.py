"""Writes of a loader to the same bytes: the last one counts, as it does in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .plan import Dim, merge_dims
from .recording import Write


def settle(writes: Iterable[Write]) -> tuple[list[Write], dict[str, str]]:
    """The copies that count, and the tensors that others replace: name → name of the one that was copied later.

    Copies to the very same elements replace each other. A tensor whose place is written in part by another one, or
    later by something that is no copy, fails.
    """
    by_memory: dict[int, list[Write]] = {}
    for write in writes:
        if 0 not in write.shape:
            by_memory.setdefault(write.memory, []).append(write)
    kept: list[Write] = []
    replaced: dict[str, str] = {}
    for found in by_memory.values():
        for cluster in _clusters(found):
            kept.extend(cluster if len(cluster) == 1 else _settle_cluster(cluster, replaced))
    copies = [write for write in kept if write.region is not None]
    placed = {write.source.spec.name for write in copies if write.source is not None}
    copies.sort(key=lambda write: write.order)
    return copies, {name: by for name, by in replaced.items() if name not in placed}


def end_of(write: Write) -> int:
    """The offset behind its last byte."""
    reach = sum((size - 1) * stride for size, stride in zip(write.shape, write.strides, strict=True))
    return write.offset + reach + write.itemsize


def _clusters(writes: list[Write]) -> Iterable[list[Write]]:
    """Writes whose bounds overlap, directly or by way of others."""
    writes.sort(key=lambda write: write.offset)
    cluster: list[Write] = []
    end = 0
    for write in writes:
        if cluster and write.offset >= end:
            yield cluster
            cluster = []
        end = max(end, end_of(write)) if cluster else end_of(write)
        cluster.append(write)
    if cluster:
        yield cluster


def _place(write: Write) -> tuple[int, int, tuple[Dim, ...]]:
    """Equal for writes to the same elements."""
    dims = merge_dims(Dim(stride, size, stride) for size, stride in zip(write.shape, write.strides, strict=True))
    return write.offset, write.itemsize, tuple(dims)


def _settle_cluster(cluster: list[Write], replaced: dict[str, str]) -> list[Write]:
    copies: dict[tuple[int, int, tuple[Dim, ...]], Write] = {}
    for write in sorted((w for w in cluster if w.region is not None), key=lambda w: w.order):
        earlier = copies.get(_place(write))
        if earlier is not None and earlier.source is not write.source:
            assert earlier.source is not None and write.source is not None
            replaced[earlier.source.spec.name] = write.source.spec.name
        copies[_place(write)] = write
    kept = list(copies.values())
    _fail_overlaps(kept)
    for other in (write for write in cluster if write.region is None):
        low, high = other.offset, end_of(other)
        before = [w for w in kept if w.order < other.order and w.offset < high and low < end_of(w)]
        for copy in _overlapping([*before, other]):
            if copy is not other and copy.source is not None:
                copy.source.fail(f"{other.operator} over it")
    return kept


def _fail_overlaps(copies: list[Write]) -> None:
    hit = _overlapping(copies)
    names = sorted({copy.source.spec.name for copy in hit if copy.source is not None})
    for copy in hit:
        if copy.source is not None:
            others = [name for name in names if name != copy.source.spec.name]
            copy.source.fail(f"parts of its place are also written from {', '.join(others[:2]) or 'itself'}")


def _overlapping(writes: list[Write]) -> list[Write]:
    """Those that have a byte in common with another one."""
    if len(writes) < 2:
        return []
    starts, lengths, owners = [], [], []
    for index, write in enumerate(writes):
        first, length = runs(write.offset, write.shape, write.strides, write.itemsize)
        starts.append(first)
        lengths.append(torch.full_like(first, length))
        owners.append(torch.full_like(first, index))
    start, order = torch.cat(starts).sort(stable=True)
    end, owner = start + torch.cat(lengths)[order], torch.cat(owners)[order]
    reach, holder = end.cummax(0)
    clash = (start[1:] < reach[:-1]).nonzero().flatten()
    hit = {*owner[clash + 1].tolist(), *owner[holder[clash]].tolist()}
    return [writes[index] for index in sorted(hit)]


def runs(offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[torch.Tensor, int]:
    """Offsets of the runs of bytes that elements lie in, and their length. Strides are bytes."""
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    length = itemsize
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    first = torch.tensor([offset])
    for stride, size in dims:
        first = (first[:, None] + torch.arange(size) * stride).flatten()
    return first, length
