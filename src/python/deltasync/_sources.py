"""What ``WeightManager.offload`` is given, and what is remembered of tensors that come again with every version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ._arrays import Array, is_torch_tensor
from ._native import Batch
from ._slices import is_dtensor
from .layouts import is_module, module_tensors, named_tensors


class Source:
    """Pairs of name and tensor: of a module, a mapping, an iterable, or of a function that returns one of these."""

    def __init__(self, tensors: Any) -> None:
        self._made_by: Callable[[], Any] | None = None
        if callable(tensors) and not is_module(tensors):
            self._made_by = tensors
            tensors = tensors()
        #: Whether the same tensors may come again as they are; those of a generator must not be held.
        self.again = is_module(tensors) or isinstance(tensors, (Mapping, list, tuple))
        pairs = module_tensors(tensors) if is_module(tensors) else named_tensors(tensors)
        self.items: Iterable[tuple[str, Any]] = list(pairs) if self.again else pairs
        self._seen: set[int] = set()

    def rehearsed(self, look: Callable[[str, Any], None]) -> Source:
        """Shows `look` every pair; returns a source that has them again. The tensors of a generator are all alive at
        once for that; those of a function that makes generators are not."""
        if self._made_by is not None:
            for name, tensor in self.items:
                look(name, tensor)
            return Source(self._made_by)
        self.items = list(self.items)
        for name, tensor in self.items:
            look(name, tensor)
        return self

    def note(self, tensor: Any) -> None:
        if self.again and is_torch_tensor(tensor):
            self._seen.add(_address(tensor))

    def is_alias(self, tensor: Any) -> bool:
        """Whether it is one that came under another name. Of a DTensor with nothing in it here, other ranks can say."""
        return is_torch_tensor(tensor) and _address(tensor) in (self._seen | {0} if is_dtensor(tensor) else self._seen)


def _address(tensor: Any) -> int:
    """0 if it has no memory here."""
    return int((tensor._local_tensor if is_dtensor(tensor) else tensor).data_ptr())


class FixedSources:
    """Tensors that come again with every version, such as a module's parameters, described once."""

    def __init__(self, names: list[str], tensors: list[Any], shapes: list[Any], batch: Batch) -> None:
        self._names = names
        self._tensors = tensors
        self._shapes = shapes
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self.batch = batch

    @staticmethod
    def make(source: Source, ordered: list[tuple[int, Array]]) -> FixedSources | None:
        items = list(source.items)
        if len(items) != len(ordered) or not all(is_torch_tensor(tensor) for _, tensor in items):
            return None
        if any(array.device >= 0 for _, array in ordered):
            return None  # their streams may change from call to call
        batch = Batch()
        for index, array in ordered:
            rows, cols = array.rows_cols
            batch.add(index, 0, 0, rows, cols, array.address, array.row_stride)
        return FixedSources([name for name, _ in items], [t for _, t in items], [t.shape for _, t in items], batch)

    def fits(self, source: Source) -> bool:
        """Whether these are the tensors, and where they were: the same objects, shapes, dtypes and addresses."""
        if not source.again:
            return False
        items = list(source.items)
        if len(items) != len(self._tensors):
            return False
        for (name, tensor), known_name, known, shape, dtype in zip(
            items, self._names, self._tensors, self._shapes, self._dtypes, strict=True
        ):
            if tensor is not known or name != known_name or tensor.shape != shape or tensor.dtype is not dtype:
                return False
        return [tensor.data_ptr() for tensor in self._tensors] == self._addresses
