"""Reading and writing live memory through a traced plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .plan import PlacedSlice
from .result import LoaderTrace
from .specs import BITS, Spec

#: A tensor's bytes: a torch tensor of its dtype and shape, or any buffer of them in row-major order.
HfBytes = torch.Tensor | bytes | bytearray | memoryview


def prove(trace: LoaderTrace, read_hf: Callable[[str], HfBytes]) -> LoaderTrace:
    """Compares live memory, read through the plan, with the HF tensors that the engine was loaded from, bit by bit.

    Tensors that differ become "reload"; the reason names the first element. This is what finds layers that permute,
    scale or requantise their bytes after loading, whatever shape they keep. `read_hf` is called once for each placed
    tensor with elements; what it raises goes through. ValueError: it returns another dtype, shape or size.
    """
    reasons: dict[str, str] = {}
    for spec in trace.specs:
        slices = trace.placed.get(spec.name, ())
        if not slices:
            continue
        bits = hf_bits(spec, read_hf(spec.name))
        for placed in slices:
            reason = _difference(trace, placed, bits)
            if reason is not None:
                reasons[spec.name] = reason
                break
    return trace.demote(reasons)


def replay(trace: LoaderTrace, tensors: Mapping[str, HfBytes]) -> None:
    """Writes the placed parts of `tensors` to their places: the reference of what an update writes.

    Tensors that are not placed are left out. KeyError: a tensor that the specs do not have.
    """
    specs = {spec.name: spec for spec in trace.specs}
    for name, value in tensors.items():
        bits = hf_bits(specs[name], value)
        for placed in trace.placed.get(name, ()):
            live = live_bits(trace, placed, bits.element_size())
            live.copy_(_part(bits, placed).to(live.device))


def hf_bits(spec: Spec, value: HfBytes) -> torch.Tensor:
    """The 2-D view of an HF tensor as integers of its width."""
    width = spec.dtype.itemsize
    if isinstance(value, torch.Tensor):
        if value.dtype != spec.dtype or tuple(value.shape) != spec.shape:
            given = f"{value.dtype}{tuple(value.shape)}"
            raise ValueError(f"{spec.name}: {given} where {spec.dtype}{spec.shape} was traced")
        bits = value.detach().contiguous().view(BITS[width])
    else:
        view = memoryview(value).cast("B")
        elements = 1
        for size in spec.shape:
            elements *= size
        if len(view) != elements * width:
            raise ValueError(f"{spec.name}: {len(view)} bytes where {elements * width} were traced")
        if not elements:
            return torch.empty((0, 0), dtype=BITS[width])
        bits = torch.frombuffer(view if not view.readonly else bytearray(view), dtype=BITS[width])
    return bits.reshape(spec.rows_columns)


def live_bits(trace: LoaderTrace, placed: PlacedSlice, width: int) -> torch.Tensor:
    """The live memory of a slice as integers, rows × columns."""
    memory = trace.memories[placed.memory]
    assert not any(part % width for part in (placed.offset, placed.row_stride, placed.col_stride))
    view = torch.empty(0, dtype=BITS[width], device=memory.device)
    strides = (placed.row_stride // width, placed.col_stride // width)
    return view.set_(memory.storage, placed.offset // width, (placed.rect.rows, placed.rect.cols), strides)


def _part(bits: torch.Tensor, placed: PlacedSlice) -> torch.Tensor:
    row, col, rows, cols = placed.rect
    return bits[row : row + rows, col : col + cols]


def _difference(trace: LoaderTrace, placed: PlacedSlice, bits: torch.Tensor) -> str | None:
    live = live_bits(trace, placed, bits.element_size())
    unequal = live != _part(bits, placed).to(live.device)
    if not bool(unequal.any()):
        return None
    row, col = unequal.nonzero()[0].tolist()
    memory = trace.memories[placed.memory]
    place = placed.offset + row * placed.row_stride + col * placed.col_stride
    where = f"row {placed.rect.row + row}, column {placed.rect.col + col}"
    return f"live bytes are not the HF tensor's: {where} (byte {place} of {memory.name})"
