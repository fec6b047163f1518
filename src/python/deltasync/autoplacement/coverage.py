"""Which elements of a model's weights a loader fills, and which keep what the engine made of them.

A loader that skips a name that it does not know says nothing, and the parameter behind it stays as it is. So whatever
was written during a trace is compared with what the model holds: each element of a weight has to be written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from .memory import LiveMemories, LiveTensor, bounds
from .overlap import end_of, runs
from .recording import Write


class Gap(NamedTuple):
    """Elements of a live tensor that are loaded from no HF tensor."""

    elements: int
    of: int
    shape: tuple[int, ...]
    first: tuple[int, ...]  #: index of the first one
    is_buffer: bool

    def __str__(self) -> str:
        if self.elements == self.of:
            return f"{list(self.shape)}, all of it"
        return f"{list(self.shape)}, {self.elements} of its {self.of} elements, from {list(self.first)} on"


def is_weight(live: LiveTensor) -> bool:
    """Parameters and persistent buffers: what a checkpoint of the model has. What else a module holds (rotary caches,
    workspaces, absorbed projections) is the engine's own."""
    if live.attribute in live.holder._parameters:
        return True
    return live.attribute in live.holder._buffers and live.attribute not in live.holder._non_persistent_buffers_set


def gaps(
    tensors: Iterable[LiveTensor],
    live: LiveMemories,
    writes: Sequence[Write],
    replaced: Collection[str],
    unseen: Collection[str],
) -> dict[str, Gap]:
    """Name → what of the tensor nothing fills; of tied ones the first name.

    An element is filled by what the loader writes from HF tensors, as a copy or computed. So is padding that the loader
    fills with something else once it has copied a part of the same tensor. `replaced`: names of tensors that the loader
    exchanges as a whole. `unseen`: modules that the loader reaches on ways that no trace can follow.
    """
    by_memory: dict[int, list[Write]] = {}
    for write in writes:
        by_memory.setdefault(write.memory, []).append(write)
    filled = {memory: _union(write for write in found if _is_loaded(write)) for memory, found in by_memory.items()}
    found: dict[str, Gap] = {}
    places: set[tuple[object, ...]] = set()
    for tensor in tensors:
        alias = tensor.alias
        if not is_weight(tensor) or tensor.name in replaced or tensor.module in unseen:
            continue
        if alias.device.type == "meta" or alias.layout != torch.strided or not alias.numel():
            continue
        memory = live.find(alias)
        place = (memory, alias.data_ptr(), alias.shape, alias.stride())
        if memory is None or place in places:
            continue
        places.add(place)
        base = live.memories[memory].base
        gap = _gap(tensor, base, filled.get(memory, _NOTHING))
        if gap is not None:
            within = _padded(by_memory.get(memory, ()), *(address - base for address in bounds(alias)))
            gap = _gap(tensor, base, _union(within)) if within else gap
        if gap is not None:
            found[tensor.name] = gap
    return found


class _Filled(NamedTuple):
    """Ranges of a memory: disjoint, in order; and how many bytes those before each have."""

    starts: torch.Tensor
    ends: torch.Tensor
    before: torch.Tensor

    def below(self, offsets: torch.Tensor) -> torch.Tensor:
        """How many of the bytes below each offset are filled."""
        if not len(self.starts):
            return torch.zeros_like(offsets)
        at = (torch.searchsorted(self.starts, offsets, right=True) - 1).clamp(min=0)
        inside = torch.minimum(offsets, self.ends[at]) - self.starts[at]
        return self.before[at] + inside.clamp(min=0)


_NOTHING = _Filled(*(torch.empty(0, dtype=torch.int64),) * 3)


def _is_loaded(write: Write) -> bool:
    return write.source is not None and 0 not in write.shape


def _padded(writes: Sequence[Write], low: int, high: int) -> list[Write]:
    """Of a tensor at [low, high): what is loaded, and what the loader writes after the first of it. That may have been
    an empty part: of a vocabulary the last ranks have padding only."""
    inside = [write for write in writes if write.offset < high and end_of(write) > low or write.offset in (low, high)]
    first = min((write.order for write in inside if write.source is not None), default=None)
    if first is None:
        return []
    return [write for write in inside if 0 not in write.shape and (_is_loaded(write) or write.order > first)]


def _union(writes: Iterable[Write]) -> _Filled:
    starts, ends = [], []
    for write in writes:
        first, length = runs(write.offset, write.shape, write.strides, write.itemsize)
        starts.append(first)
        ends.append(first + length)
    if not starts:
        return _NOTHING
    start, order = torch.cat(starts).sort()
    reach = torch.cat(ends)[order].cummax(0).values
    gap = start[1:] > reach[:-1]
    edge = torch.ones(1, dtype=torch.bool)
    start, end = start[torch.cat([edge, gap])], reach[torch.cat([gap, edge])]
    size = end - start
    return _Filled(start, end, size.cumsum(0) - size)


def _gap(tensor: LiveTensor, base: int, filled: _Filled) -> Gap | None:
    alias = tensor.alias
    width = alias.element_size()
    kept = [(size, stride * width) for size, stride in zip(alias.shape, alias.stride(), strict=True) if stride]
    first, length = runs(alias.data_ptr() - base, [s for s, _ in kept], [s for _, s in kept], width)
    there = filled.below(first + length) - filled.below(first)
    missing = int((length - there).sum())
    if not missing:
        return None
    run = int((there < length).nonzero()[0])
    index = _index(alias, _first_missing(int(first[run]), filled) - (alias.data_ptr() - base))
    of = first.numel() * length // width
    is_buffer = tensor.attribute in tensor.holder._buffers
    return Gap(missing // width, of, tuple(alias.shape), index, is_buffer)


def _first_missing(offset: int, filled: _Filled) -> int:
    """The first byte from `offset` on that is not filled."""
    at = int(torch.searchsorted(filled.starts, torch.tensor(offset), right=True)) - 1
    return max(offset, int(filled.ends[at])) if at >= 0 else offset


def _index(tensor: torch.Tensor, offset: int) -> tuple[int, ...]:
    """Of the element at `offset` bytes from a tensor's first one."""
    index = [0] * tensor.dim()
    rest = offset // tensor.element_size()
    for dim in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.stride(dim) and tensor.shape[dim] > 1:
            index[dim], rest = divmod(rest, tensor.stride(dim))
    return tuple(index)
