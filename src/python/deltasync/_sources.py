"""What ``WeightManager.offload`` is given, and what is remembered of tensors that come again with every version."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ._arrays import is_torch_tensor
from ._native import Batch, Layout
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
        self.module = is_module(tensors)
        self.again = is_module(tensors) or isinstance(tensors, (Mapping, list, tuple))
        pairs = module_tensors(tensors) if is_module(tensors) else named_tensors(tensors)
        #: Of a mapping as it is: 90,000 pairs cost as much as all else that a version needs.
        self.mapping = tensors if isinstance(tensors, Mapping) else None
        self.items: Iterable[tuple[str, Any]] = list(pairs) if self.again and self.mapping is None else pairs
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


class PlainSources:
    """Whole tensors in contiguous host memory, collected with as little Python as will do for each."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.addresses: list[int] = []
        self.tensors: list[Any] = []

    def add(self, index: int, tensor: Any) -> None:
        self.indices.append(index)
        self.addresses.append(tensor.data_ptr())
        self.tensors.append(tensor)

    def clear(self) -> None:
        self.indices.clear()
        self.addresses.clear()
        self.tensors.clear()


class FixedSources:
    """Plain tensors that come again with every version, such as a module's parameters, described once."""

    def __init__(self, layout: Layout, source: Source, plain: PlainSources) -> None:
        self._names = [name for name, _ in source.items]
        self._tensors = list(plain.tensors)
        self._addresses = list(plain.addresses)
        self._sizes = [tensor.nbytes for tensor in self._tensors]
        self._torch = sys.modules["torch"].Tensor
        self.batch = Batch()
        self.batch.add_whole(layout, plain.indices, plain.addresses)

    def fits(self, source: Source) -> bool:
        """Whether these are the tensors, and where and as large as they were. An object that is the same has the shape
        and dtype that it had, but for what was assigned to ``tensor.data``; of that, what could not be read is noticed
        (elsewhere, of another size, with gaps), and a view of the very same bytes is not."""
        if not source.again:
            return False
        if source.mapping is not None:
            names, tensors = list(source.mapping), list(source.mapping.values())
        else:
            names, tensors = [name for name, _ in source.items], [tensor for _, tensor in source.items]
        return (
            names == self._names
            and all(map(operator.is_, tensors, self._tensors))
            and list(map(self._torch.data_ptr, tensors)) == self._addresses
            and [tensor.nbytes for tensor in tensors] == self._sizes
            and all(map(self._torch.is_contiguous, tensors))
        )
