"""HF tensors as a checkpoint names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .._arrays import dtype_name, memory_shape, torch_dtype
from .plan import view_2d

#: Integers of a width in bytes: bits are moved and compared as these, whatever they mean.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: (name, dtype, shape): of torch as a tensor has them, or by name (safetensors' or torch's) as a layout has them. They
#: differ for F4, of which a layout counts single values and torch counts pairs.
SpecLike = tuple[str, "torch.dtype | str", Sequence[int]]


class Spec(NamedTuple):
    """One HF tensor: contiguous, in row-major order, as torch has it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def rows_columns(self) -> tuple[int, int]:
        return view_2d(self.shape)


def read_specs(specs: Iterable[SpecLike]) -> list[Spec]:
    """Checks names and dtypes. InvalidArgument and Unsupported (a dtype that no layout has, or this torch has not) and
    ValueError name the tensor."""
    read: list[Spec] = []
    names: set[str] = set()
    for name, dtype, shape in specs:
        known = dtype_name(dtype, name)
        if name in names:
            raise ValueError(f"{name}: named twice")
        if any(size < 0 for size in shape):
            raise ValueError(f"{name}: shape {tuple(shape)}")
        names.add(name)
        sizes = memory_shape(shape, known) if isinstance(dtype, str) else shape
        read.append(Spec(name, torch_dtype(known), tuple(int(size) for size in sizes)))
    return read
