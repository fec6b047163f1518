"""HF tensors as a checkpoint names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .plan import view_2d

#: safetensors spelling → torch dtype: the element types that a layout may have (docs/layout_format.md).
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
_KNOWN = frozenset(DTYPES.values())
#: Integers of a width in bytes: bits are moved and compared as these, whatever they mean.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: (name, torch dtype or safetensors string, shape)
SpecLike = tuple[str, "torch.dtype | str", Sequence[int]]


class Spec(NamedTuple):
    """One HF tensor: contiguous, in row-major order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def rows_columns(self) -> tuple[int, int]:
        return view_2d(self.shape)


def read_specs(specs: Iterable[SpecLike]) -> list[Spec]:
    """Checks names and dtypes. ValueError names the tensor."""
    read: list[Spec] = []
    names: set[str] = set()
    for name, dtype, shape in specs:
        known = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if known not in _KNOWN:
            raise ValueError(f"{name}: no layout has elements of {dtype}")
        if name in names:
            raise ValueError(f"{name}: named twice")
        if any(size < 0 for size in shape):
            raise ValueError(f"{name}: shape {tuple(shape)}")
        names.add(name)
        read.append(Spec(name, known, tuple(int(size) for size in shape)))
    return read
