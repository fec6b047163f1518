"""Where a torch module keeps what a trainer publishes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ._arrays import NAMES, Array, describe, is_torch_tensor, memory_shape
from ._modules import is_module
from ._native import Layout, PlacementPlan
from .coverage import LISTED, Ignore, log_ignored, require_coverage, some
from .errors import InvalidArgument, LayoutMismatch
from .layouts import module_memory

_log = logging.getLogger("deltasync.rollout")


def check_module(what: str, module: Any) -> None:
    """InvalidArgument, with the name of `what` it is for, unless it is a torch module."""
    if not is_module(module):
        raise InvalidArgument(
            f"{what}: {type(module).__name__} is no torch module",
            "give the module itself; without one, tensors() and arrays() have what is received",
        )


def plan_of_module(
    layout: Layout, module: Any, *, strict: bool = True, ignore: Iterable[str] = ()
) -> tuple[PlacementPlan, list[tuple[str, Any]]]:
    """Each tensor of the layout in the parameter or buffer of its name, or in its part of one; and these as (name,
    tensor that shares its memory), which keep the memory while the plan is used.

    UnmatchedWeights names what is left over, but for what `ignore` matches: tensors that the module does not have, and
    with `strict` parameters and buffers that the layout does not have (but for further names of the same memory).
    LayoutMismatch: another shape or dtype; InvalidArgument: memory without rows, or shared in part.

    Every byte is written once: a tensor that lies in another one's memory (tied weights, views with names of their own)
    gets what is published of that one, which the log says."""
    check_module("module", module)
    state = module_memory(module, layout.names())
    computed = _computed(state, module_memory(module, layout.names()))
    ignored = Ignore(ignore)
    found: list[_Found] = []
    untaken: dict[str, str] = {}
    left_out: list[str] = []
    for tensor in layout:
        own = state.get(tensor.name)
        if tensor.name in ignored:
            left_out.append(tensor.name)
        elif own is None:
            untaken[tensor.name] = "the module has no such parameter or buffer"
        elif tensor.name in computed:
            untaken[tensor.name] = "the module's state_dict() computes it, so it has no memory to be written"
        else:
            found.append(_find(tensor, own))
    written = reaches(each.own for each in found)
    unfilled, kept = ignored.split(
        {
            name: f"{list(own.shape)}" if is_torch_tensor(own) else f"no tensor but {type(own).__name__}"
            for name, own in state.items()
            if layout.find(name) is None and name not in computed and not is_covered(own, written)
        }
    )
    more = "; strict=False lets the module have more" if unfilled and not untaken else ""
    require_coverage("module", untaken, unfilled if strict else {}, state, f"{_OTHER_MODEL}; {LISTED}{more}")
    log_ignored(_log, "module", left_out, kept)
    plan = PlacementPlan()
    for name in left_out:
        plan.ignore(name)
    _place_all(plan, found)
    return plan, [(each.tensor.name, each.own.detach()) for each in found if each.tensor.nbytes]


@dataclass(frozen=True)
class _Found:
    """A tensor of the layout, and the module's of its name."""

    tensor: Any
    own: Any
    array: Array

    @property
    def rows(self) -> tuple[int, int, int, int]:
        """Its bytes: address, rows, bytes of a row, bytes from one row to the next. Dense ones are one row."""
        width = self.tensor.cols * self.tensor.element_bytes
        if self.array.row_stride in (0, width) or self.tensor.rows == 1:
            return self.array.address, 1, self.tensor.nbytes, 0
        return self.array.address, self.tensor.rows, width, self.array.row_stride


def _find(tensor: Any, own: Any) -> _Found:
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
    return _Found(tensor, own, array)


def _place_all(plan: PlacementPlan, found: list[_Found]) -> None:
    """Each storage is one memory. InvalidArgument: two tensors share bytes in part."""
    storages: dict[int, list[_Found]] = {}
    for each in found:
        if each.tensor.nbytes:
            storages.setdefault(each.own.untyped_storage().data_ptr(), []).append(each)
    shared: dict[str, str] = {}
    for base, held in storages.items():
        dtypes = {each.tensor.dtype for each in held}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        size = held[0].own.untyped_storage().nbytes()
        memory = plan.add_memory(held[0].tensor.name, base, size, held[0].array.device, dtype)
        for each, owner in _owners(held):
            tensor = each.tensor
            if owner is not None:
                plan.ignore(tensor.name)
                shared[tensor.name] = f"in {owner.tensor.name}"
                continue
            step = each.array.row_stride or tensor.cols * tensor.element_bytes
            rect = (0, 0, tensor.rows, tensor.cols)
            plan.place(tensor.name, rect, memory, each.array.address - base, step, tensor.element_bytes)
    if shared:
        _log.warning(
            "module: %d tensor(s) lie in memory of others, and have what is published of those: %s",
            len(shared),
            some(shared),
        )


def _owners(held: list[_Found]) -> Iterator[tuple[_Found, _Found | None]]:
    """Of tensors in one storage, each with the one that all of its bytes are written with, if it is not itself: tied
    weights, and views of a parameter that have names of their own."""
    same: dict[tuple[int, int, int, int], _Found] = {}
    dense: _Found | None = None  # of the dense ones so far the one that reaches furthest
    reach = 0
    for each in sorted(held, key=lambda each: (each.array.address, -each.tensor.nbytes)):
        address, rows, width, stride = each.rows
        end = address + (rows - 1) * stride + width
        owner = same.setdefault(each.rows, each)
        if owner is not each:
            yield each, owner
        elif dense is not None and end <= reach:
            yield each, dense
        elif dense is not None and rows == 1 and address < reach:
            raise InvalidArgument(
                f"module: {dense.tensor.name} and {each.tensor.name} share a part of their memory, which cannot be "
                "of both",
                "publish what they are parts of, under one name",
            )
        else:
            yield each, None
            if rows == 1:
                dense, reach = each, end


def _computed(state: dict[str, Any], again: dict[str, Any]) -> set[str]:
    """What state_dict() has made for each of two calls; both are alive."""
    return {
        name
        for name, own in state.items()
        if is_torch_tensor(own) and own.numel() and own.data_ptr() != again[name].data_ptr()
    }


def reaches(tensors: Iterable[Any]) -> dict[int, int]:
    """By address, how many bytes from there on are written."""
    written: dict[int, int] = {}
    for tensor in tensors:
        written[tensor.data_ptr()] = max(_reach(tensor), written.get(tensor.data_ptr(), 0))
    return written


def is_covered(own: Any, written: dict[int, int]) -> bool:
    """Whether no update has to write it: it has no byte, or is a further name of memory that one writes, or of the
    beginning of it."""
    return is_torch_tensor(own) and (not own.numel() or _reach(own) <= written.get(own.data_ptr(), 0))


def _reach(tensor: Any) -> int:
    """Bytes from its first element to its last one's end."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


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
