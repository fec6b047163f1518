"""A trace as a plan that a receiver takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .result import Trace
from .specs import DTYPES

if TYPE_CHECKING:
    from .. import PlacementPlan

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def placement_plan(trace: Trace) -> PlacementPlan:
    """The placed slices and what they leave, for `deltasync.Receiver(plan=…)` and `deltasync.Placement.build`.

    The memory is the trace's: keep the trace as long as the plan is used. Tensors of class "reload" are ignored by the
    plan. ValueError: memory that is neither the host's nor a CUDA device's.
    """
    from .. import PlacementPlan

    dtypes: list[set[torch.dtype]] = [set() for _ in trace.memories]
    of = {spec.name: spec.dtype for spec in trace.specs}
    for placed in trace.slices:
        dtypes[placed.memory].add(of[placed.tensor])
    plan = PlacementPlan()
    for memory, found in zip(trace.memories, dtypes, strict=True):
        # Said only where it is the same on both sides: a tensor may be copied as bits of another type.
        dtype = _NAMES[memory.dtype] if memory.dtype is not None and found == {memory.dtype} else None
        plan.add_memory(memory.name, memory.base, memory.bytes, _ordinal(memory.device), dtype)
    for placed in trace.slices:
        plan.place(placed.tensor, placed.rect, placed.memory, placed.offset, placed.row_stride, placed.col_stride)
    for ignored in trace.ignored:
        plan.ignore(ignored.tensor, ignored.rect)
    return plan


def _ordinal(device: torch.device) -> int:
    if device.type == "cpu":
        return -1
    if device.type != "cuda":
        raise ValueError(f"live memory on {device}: only the host's and CUDA devices' can be written")
    return torch.cuda.current_device() if device.index is None else device.index
