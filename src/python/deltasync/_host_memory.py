"""Host memory that keeps one version, a half's bytes in the layout's order, and what may be read from it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import _native
from ._arrays import NAMES, memory_shape, torch_dtype
from ._native import Layout, Placement, PlacementPlan


class HostMemory:
    """Freed when nobody has an array or a tensor of it any more."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._map = mmap.mmap(-1, max(layout.half_bytes, mmap.PAGESIZE))
        self._map.madvise(mmap.MADV_HUGEPAGE)

    def target(self, part: PlacementPlan | None) -> _native.Target:
        """Writes here, with ``part`` only what that plan places. This object must outlive it."""
        whole = np.frombuffer(self._map, np.uint8)
        subscribed = Placement.build(self._layout, part) if part is not None else None
        return _native.host_target(self._layout, whole.ctypes.data, whole.size, subscribed)

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """(name, read-only array), with ml_dtypes' types or as raw integers where numpy has none (F4: pairs)."""
        for tensor, raw in self._tensors(writeable=False):
            shape = memory_shape(tensor.shape, tensor.dtype)
            yield tensor.name, raw.view(_numpy_dtype(tensor.dtype)).reshape(shape)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """(name, torch tensor); torch has no read-only ones."""
        import torch

        for tensor, raw in self._tensors(writeable=True):
            dtype = torch_dtype(tensor.dtype)
            shape = memory_shape(tensor.shape, tensor.dtype)
            if raw.size == 0:
                yield tensor.name, torch.empty(shape, dtype=dtype)
            else:
                yield tensor.name, torch.from_numpy(raw).reshape(*shape[:-1], -1).view(dtype).reshape(shape)

    def _tensors(self, writeable: bool) -> Iterator[tuple[Any, np.ndarray[Any, Any]]]:
        memory = np.frombuffer(self._map, np.uint8)
        memory.flags.writeable = writeable
        for tensor in self._layout:
            yield tensor, memory[tensor.offset : tensor.offset + tensor.nbytes]


def _numpy_dtype(name: str) -> Any:
    text = NAMES[name]
    try:
        return np.dtype(text)
    except TypeError:
        pass
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, text))
    except ImportError:
        return np.dtype(np.uint16 if name == "BF16" else np.uint8)
