"""Where a torch module keeps what a trainer publishes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._arrays import DTYPES, Array, describe
from ._native import Layout, PlacementPlan
from .errors import InvalidArgument, LayoutMismatch
from .layouts import is_module


def plan_of_module(layout: Layout, module: Any, *, strict: bool = True) -> tuple[PlacementPlan, list[tuple[str, Any]]]:
    """Each tensor of the layout in the parameter or buffer of its name; and these as (name, tensor that shares its
    memory), which keep the memory while the plan is used.

    LayoutMismatch names what does not fit: another shape or dtype, a tensor that the module does not have, with
    `strict` one that the layout does not have (but for further names of the same memory); InvalidArgument: memory
    without rows."""
    if not is_module(module):
        raise InvalidArgument(f"module: {type(module).__name__} is no torch module")
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    plan = PlacementPlan()
    places: list[tuple[str, Any]] = []
    for tensor in layout:
        own = state.get(tensor.name)
        if own is None:
            raise LayoutMismatch(
                f"{tensor.name}: the trainer publishes it, the module has no such parameter or buffer", _OTHER_MODEL
            )
        array = describe(own, tensor.name)
        if array.shape != tensor.shape or array.dtype != tensor.dtype:
            raise LayoutMismatch(
                f"{tensor.name}: the module's is {array.dtype} {list(array.shape)}, "
                f"the trainer's {tensor.dtype} {list(tensor.shape)}",
                _remedy(array, tensor),
            )
        if array.owner is not own:
            raise InvalidArgument(f"{tensor.name}: the module's memory has no rows that could be written in place")
        if tensor.nbytes == 0:
            continue
        places.append((tensor.name, own.detach()))
        step = array.row_stride or tensor.cols * tensor.element_bytes
        size = (tensor.rows - 1) * step + tensor.cols * tensor.element_bytes
        memory = plan.add_memory(tensor.name, array.address, size, array.device, tensor.dtype)
        plan.place(tensor.name, (0, 0, tensor.rows, tensor.cols), memory, 0, step, tensor.element_bytes)
    written = {own.data_ptr() for _, own in places}
    for name, own in state.items() if strict else ():
        if layout.find(name) is None and own.numel() and own.data_ptr() not in written:
            raise LayoutMismatch(
                f"{name}: the trainer publishes no such tensor, so the module's would stay as it is",
                f"{_OTHER_MODEL}; strict=False lets the module have more",
            )
    return plan, places


_OTHER_MODEL = "module= must be the model that the trainer publishes, with the same names"


def _remedy(array: Array, tensor: Any) -> str:
    if array.shape != tensor.shape:
        return _OTHER_MODEL
    names = {known: name for name, known in DTYPES.items()}
    own, theirs = names[array.dtype], names[tensor.dtype]
    return f'publish with WeightManager(dtype="{own}"), or make the module {theirs}'


def check_module_places(module: Any, places: list[tuple[str, Any]]) -> None:
    """LayoutMismatch where the module's memory is not any more what plan_of_module() found."""
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    for name, known in places:
        own = state.get(name)
        if own is None or own.data_ptr() != known.data_ptr() or own.dtype is not known.dtype:
            raise LayoutMismatch(
                f"{name}: the module keeps it elsewhere than when the receiver was made (.to(), .half(), .data =); "
                "make another Receiver"
            )
