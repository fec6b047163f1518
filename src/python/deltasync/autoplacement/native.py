"""A trace as a plan that a receiver takes."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from .._arrays import dtype_name
from .._native import PlacementPlan
from ..coverage import Ignore, log_ignored, require_coverage
from .result import LoaderTrace

_log = logging.getLogger("deltasync.autoplacement")


def placement_plan(trace: LoaderTrace, *, ignore: Iterable[str] = (), reloads: bool = False) -> PlacementPlan:
    """The placed slices and what they leave, for `deltasync.Receiver(plan=…)` and `deltasync.Placement.build`.

    The memory is the trace's: keep the trace as long as the plan is used. `reloads`: the caller hands the tensors of
    class "reload" to the engine's loader with each version; the plan has no place for them. `ignore`: patterns of
    names, of tensors that are other ranks' or not to be updated, and of weights that stay as they are.

    UnmatchedWeights: a tensor without a place, or a weight that no tensor fills, that is not ignored; both sides are
    named. ValueError: memory that is neither the host's nor a CUDA device's.
    """
    patterns = Ignore(ignore)
    untaken = dict(trace.unplaced)
    if not reloads:
        untaken.update({name: f"needs the engine's loader: {reload.reason}" for name, reload in trace.reload.items()})
    untaken, tensors = patterns.split(untaken)
    unfilled, weights = patterns.split(trace.unfilled)
    require_coverage("the traced model", untaken, unfilled, trace.weights)
    log_ignored(_log, "the traced model", tensors, weights)
    dtypes: list[set[torch.dtype]] = [set() for _ in trace.memories]
    of = {spec.name: spec.dtype for spec in trace.specs}
    for placed in trace.slices:
        dtypes[placed.memory].add(of[placed.tensor])
    plan = PlacementPlan()
    for memory, found in zip(trace.memories, dtypes, strict=True):
        # Said only where it is the same on both sides: a tensor may be copied as bits of another type.
        dtype = dtype_name(memory.dtype) if memory.dtype is not None and found == {memory.dtype} else None
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
