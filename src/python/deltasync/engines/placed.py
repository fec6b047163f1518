"""From a trace to a placement: direct tensors where the engine has them, "reload" tensors in host memory."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arrays import memory_shape, torch_dtype
from .._native import Layout, PlacementPlan
from ..errors import Unsupported

if TYPE_CHECKING:
    from ..autoplacement import LoaderTrace

_ALIGNMENT = 64


class HostCopies:
    """Host memory for whole tensors, which a placement writes as if it were the engine's: what goes through the
    engine's loader is kept here, at the version of the rest, committed and rolled back with it."""

    def __init__(self, layout: Layout, names: list[str]) -> None:
        wanted = set(names)
        self._tensors = [tensor for tensor in layout if tensor.name in wanted]
        self._offsets: list[int] = []
        size = 0
        for tensor in self._tensors:
            self._offsets.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = size
        self._memory = mmap.mmap(-1, max(size, mmap.PAGESIZE))
        self._bytes = np.frombuffer(self._memory, np.uint8)

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self._tensors]

    def place(self, plan: PlacementPlan) -> None:
        """Adds all of them to the plan."""
        memory = plan.add_memory("deltasync: copies for the loader", self._bytes.ctypes.data, self._bytes.size, -1)
        for tensor, offset in zip(self._tensors, self._offsets, strict=True):
            if tensor.nbytes == 0:
                continue
            width = tensor.element_bytes
            rect = (0, 0, tensor.rows, tensor.cols)
            plan.place(tensor.name, rect, memory, offset, tensor.cols * width, width)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """(HF name, torch tensor), in the layout's order, without a copy."""
        import torch

        for tensor, offset in zip(self._tensors, self._offsets, strict=True):
            dtype, shape = torch_dtype(tensor.dtype), memory_shape(tensor.shape, tensor.dtype)
            if tensor.nbytes == 0:
                yield tensor.name, torch.empty(shape, dtype=dtype)
                continue
            raw = self._bytes[offset : offset + tensor.nbytes]
            yield tensor.name, torch.from_numpy(raw).view(dtype).reshape(shape)


def plan_of(layout: Layout, trace: LoaderTrace) -> tuple[PlacementPlan, HostCopies]:
    """The plan of a trace, and the memory that its "reload" tensors are placed in. The copies, and the trace, are to
    live as long as the plan is used. What the trace has no place for is ignored: who makes the plan has proved that it
    may be (coverage.py). Unsupported: the engine takes nothing of this checkpoint."""
    plan = PlacementPlan()
    numbers: list[int] = []
    for memory in trace.memories:
        device = memory.device
        if device.type not in ("cpu", "cuda"):
            raise Unsupported(f"{memory.name} is on {device}: deltasync writes to the host and to CUDA devices")
        ordinal = -1 if device.type == "cpu" else (device.index or 0)
        numbers.append(plan.add_memory(memory.name, memory.base, memory.bytes, ordinal))
    for placed in trace.slices:
        memory_index, (row, col, rows, cols) = numbers[placed.memory], placed.rect
        plan.place(
            placed.tensor, (row, col, rows, cols), memory_index, placed.offset, placed.row_stride, placed.col_stride
        )
    copies = HostCopies(layout, list(trace.reload))
    if copies.nbytes:
        copies.place(plan)
    if not plan.slice_count:
        raise Unsupported("the engine's loader takes none of the trainer's tensors: is it the same model?")
    for ignored in trace.ignored:
        if ignored.tensor not in trace.reload:
            plan.ignore(ignored.tensor, ignored.rect)
    return plan, copies


def places(trace: LoaderTrace, model: Any) -> dict[str, tuple[object, ...]]:
    """Where and how the model holds what is in memory that the trace's slices name: name → geometry. If it differs from
    what it was, the plan is void. Of tensors elsewhere nothing is said: an engine may make those again as it likes
    (scales that it keeps on the host, what it derives from others)."""
    from ..autoplacement.memory import live_tensors

    memories = sorted((str(m.device), m.base, m.base + m.bytes) for m in trace.memories)
    found: dict[str, tuple[object, ...]] = {}
    for live in live_tensors(model):
        tensor = live.tensor
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        device, address = str(tensor.device), tensor.data_ptr()
        at = bisect_right(memories, (device, address, 1 << 64)) - 1
        if at >= 0 and memories[at][0] == device and address < memories[at][2]:
            found[live.name] = (device, address, tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return found


def without_shared(trace: LoaderTrace, model: Any, other: Any) -> LoaderTrace:
    """The trace of `model` less what is in memory of the model `other`, which is the other's to fill: slices that are
    there, tensors that are nowhere else ("unplaced"), and weights."""
    from ..autoplacement.memory import live_tensors

    theirs = {live.tensor.untyped_storage().data_ptr() for live in live_tensors(other) if live.tensor.numel()}
    shared = {index for index, memory in enumerate(trace.memories) if memory.storage.data_ptr() in theirs}
    own = {
        name: tuple(placed for placed in slices if placed.memory not in shared) for name, slices in trace.placed.items()
    }
    gone = [name for name, slices in own.items() if not slices and trace.placed[name]]
    gaps = dict(trace.gaps)
    for live in live_tensors(model):
        if live.name in gaps and live.tensor.untyped_storage().data_ptr() in theirs:
            del gaps[live.name]
    left = replace(trace, placed=own, gaps=gaps)
    return left.drop(dict.fromkeys(gone, "the other model's receiver writes it"))
