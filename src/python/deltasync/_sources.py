"""What ``WeightManager.offload`` is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ._arrays import is_torch_tensor
from ._modules import is_module
from ._slices import is_dtensor
from .errors import InvalidArgument
from .layouts import as_pair, module_stays, named_tensors

_DICT_ITEMS: type = type(dict[str, Any]().items())


class TensorSource:
    """Pairs of name and tensor: of a module, a mapping, an iterable, or of a function that returns one of these."""

    def __init__(self, tensors: Any) -> None:
        self._made_by: Callable[[], Any] | None = None
        if callable(tensors) and not is_module(tensors):
            self._made_by = tensors
            tensors = tensors()
        elif not isinstance(tensors, Iterator):  # it has them again
            self._made_by = lambda: tensors
        pairs: Iterable[tuple[str, Any]] = named_tensors(tensors, "offload: tensors")
        if is_module(tensors) and module_stays(tensors):
            pairs = list(pairs)
        #: Whether all tensors are there and stay as they are until the version is written. Those of a generator do not;
        #: nor do those of a mapping whose items are not a dict's, which may make them when they are asked for.
        self.stay = isinstance(pairs, (_DICT_ITEMS, list, tuple))
        self.items = pairs if self.stay else iter(pairs)
        self._seen: set[int] = set()
        #: Whether a tensor that was not noted here begins at this address.
        self.also_seen: Callable[[int], bool] = lambda _: False

    def rehearsed(self, look: Callable[[str, Any], None]) -> TensorSource:
        """Shows `look` every pair; returns a source that has them again. InvalidArgument: of what gives them once only.
        Keeping them would not do: a generator may make its next tensor in the memory of this one, or undo at its end
        what it did to a model."""
        if not self.stay and self._made_by is None:
            raise InvalidArgument(
                "offload: ranks need the first version's tensors twice, and an iterator gives them once",
                "give a function that makes it: offload(lambda: export(model))",
            )
        for item in self.items:
            look(*as_pair(item, "offload: tensors"))
        return self if self.stay else TensorSource(self._made_by)

    def leave(self, error: BaseException) -> None:
        """Takes part in what ranks make together though not all is wanted: else the others would wait for this one."""
        fail = getattr(self.items, "fail", None)
        if fail is not None:
            fail(error)  # which tells them
        elif not self.stay:
            with contextlib.suppress(Exception):
                for _ in self.items:
                    pass

    def note(self, tensor: Any) -> None:
        if self.stay and is_torch_tensor(tensor):
            self._seen.add(_address(tensor))

    def is_alias(self, tensor: Any) -> bool:
        """Whether it is one that came under another name. Of a DTensor with nothing in it here, other ranks can say."""
        if not is_torch_tensor(tensor):
            return False
        address = _address(tensor)
        return address in self._seen or self.also_seen(address) or (address == 0 and is_dtensor(tensor))


def _address(tensor: Any) -> int:
    """0 if it has no memory here."""
    return int((tensor._local_tensor if is_dtensor(tensor) else tensor).data_ptr())
