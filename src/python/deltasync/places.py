"""Where a torch module keeps what a trainer publishes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ._arrays import NAMES, Array, describe, is_torch_tensor, memory_shape
from ._modules import is_module
from ._native import Layout, PlacementPlan
from .coverage import LISTED, Ignore, log_ignored, require_coverage
from .errors import InvalidArgument, LayoutMismatch
from .layouts import module_memory

_log = logging.getLogger("deltasync.rollout")


def plan_of_module(
    layout: Layout, module: Any, *, strict: bool = True, ignore: Iterable[str] = ()
) -> tuple[PlacementPlan, list[tuple[str, Any]]]:
    """Each tensor of the layout in the parameter or buffer of its name, or in its part of one; and these as (name,
    tensor that shares its memory), which keep the memory while the plan is used.

    UnmatchedWeights names what is left over, but for what `ignore` matches: tensors that the module does not have, and
    with `strict` parameters and buffers that the layout does not have (but for further names of the same memory).
    LayoutMismatch: another shape or dtype; InvalidArgument: memory without rows."""
    if not is_module(module):
        raise InvalidArgument(
            f"module: {type(module).__name__} is no torch module",
            "give the module itself; without one, tensors() and arrays() have what is received",
        )
    state = module_memory(module, layout.names())
    ignored = Ignore(ignore)
    plan = PlacementPlan()
    places: list[tuple[str, Any]] = []
    untaken: dict[str, str] = {}
    left_out: list[str] = []
    for tensor in layout:
        own = state.get(tensor.name)
        if tensor.name in ignored:
            plan.ignore(tensor.name)
            left_out.append(tensor.name)
            continue
        if own is None:
            untaken[tensor.name] = "the module has no such parameter or buffer"
            continue
        if _place(plan, tensor, own):
            places.append((tensor.name, own.detach()))
    written = {own.data_ptr() for _, own in places}
    unfilled, kept = ignored.split(
        {
            name: f"{list(own.shape)}" if is_torch_tensor(own) else f"no tensor but {type(own).__name__}"
            for name, own in state.items()
            if layout.find(name) is None and not _is_covered(own, written)
        }
    )
    more = "; strict=False lets the module have more" if unfilled and not untaken else ""
    require_coverage("module", untaken, unfilled if strict else {}, state, f"{_OTHER_MODEL}; {LISTED}{more}")
    log_ignored(_log, "module", left_out, kept)
    return plan, places


def _is_covered(own: Any, written: set[int]) -> bool:
    """Whether no update has to write it: it has no byte, or is a further name of memory that one writes."""
    return is_torch_tensor(own) and (not own.numel() or own.data_ptr() in written)


def _place(plan: PlacementPlan, tensor: Any, own: Any) -> bool:
    """Adds a tensor of the layout to the plan, in the module's tensor of its name; False: it has no byte."""
    array = describe(own, tensor.name)
    if array.shape != memory_shape(tensor.shape, tensor.dtype) or array.dtype != tensor.dtype:
        raise LayoutMismatch(
            f"{tensor.name}: the module's is {array.dtype} {list(array.shape)}, "
            f"the trainer's {tensor.dtype} {list(tensor.shape)}",
            _remedy(array, tensor),
        )
    if array.owner is not own:
        raise InvalidArgument(
            f"{tensor.name}: the elements of a row do not lie side by side in the module's memory (shape "
            f"{list(own.shape)}, strides {list(own.stride())})",
            "make it dense before the receiver is made: `tensor.data = tensor.data.contiguous()`",
        )
    if tensor.nbytes == 0:
        return False
    step = array.row_stride or tensor.cols * tensor.element_bytes
    size = (tensor.rows - 1) * step + tensor.cols * tensor.element_bytes
    memory = plan.add_memory(tensor.name, array.address, size, array.device, tensor.dtype)
    plan.place(tensor.name, (0, 0, tensor.rows, tensor.cols), memory, 0, step, tensor.element_bytes)
    return True


_OTHER_MODEL = "module= must be the model that the trainer publishes, with the same names"


def _remedy(array: Array, tensor: Any) -> str:
    if array.shape != memory_shape(tensor.shape, tensor.dtype):
        return _OTHER_MODEL
    own, theirs = NAMES[array.dtype], NAMES[tensor.dtype]
    return f'publish with WeightManager(dtype="{own}"), or make the module {theirs}'


def check_module_places(module: Any, places: list[tuple[str, Any]]) -> None:
    """LayoutMismatch where the module's memory is not any more what plan_of_module() found."""
    state = module_memory(module, [name for name, _ in places])
    for name, known in places:
        own = state.get(name)
        if own is None or own.data_ptr() != known.data_ptr() or own.dtype is not known.dtype:
            raise LayoutMismatch(
                f"{name}: the module keeps it elsewhere than when the receiver was made (.to(), .half(), .data =); "
                "make another Receiver"
            )
