"""What a loader does to live memory beside copying HF tensors into it.

While a trace runs, live memory keeps its bytes: an operator that would write there is noted and left out. Where values
of live memory, or of HF tensors, go on into other memory is followed by storage, so that derived tensors are found.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .recording import Recorder, RecordingTensor, Source, flat, returned, written

_aten = torch.ops.aten
#: Operators that look at the geometry of their argument only.
_GEOMETRY = {
    getattr(_aten, name)
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
} | {_aten.new_empty_strided, _aten.rand_like, _aten.randn_like}


class Taint:
    """Storages outside of the model whose content came from HF tensors. Keeps no storage's bytes alive."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[StorageWeakRef, frozenset[Source]]] = {}

    def mark(self, tensor: torch.Tensor, sources: Iterable[Source], operator: str) -> None:
        added = frozenset(sources)
        if not added or isinstance(tensor, RecordingTensor) or tensor.layout != torch.strided:
            return
        # The weak reference keeps the storage's identity, which is the key, from being given to another one.
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._marks[reference.cdata] = (reference, added | self.sources(tensor))

    def sources(self, tensor: torch.Tensor) -> frozenset[Source]:
        if not self._marks or tensor.layout != torch.strided or isinstance(tensor, RecordingTensor):
            return frozenset()
        marked = self._marks.get(tensor.untyped_storage()._cdata)
        return marked[1] if marked else frozenset()


class LoadGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active around a loader's calls, in the calling thread. Threads that a loader starts are not guarded: what they
    copy from HF tensors is recorded, what else they write is written."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.taint = Taint()
        recorder.taint = self.taint.mark
        self._written: dict[int, set[Source]] = {}  # by memory; of the recorder's first _seen writes
        self._seen = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled: no wrapper around every operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if RecordingTensor in types:
            return self.recorder.dispatch(func, args, kwargs)
        if not func._schema.is_mutable:
            if func.is_view or func.overloadpacket in _GEOMETRY:
                return func(*args, **kwargs)
            sources = self._origin(flat(args, kwargs))
            result = func(*args, **kwargs)
            for made in flat((result,), {}) if sources else ():
                self.taint.mark(made, sources, "")
            return result
        targets = written(func, args, kwargs)
        name = str(func._schema.name).removeprefix("aten::")
        others = [found for found in flat(args, kwargs) if not any(found is target for target in targets)]
        sources = self._origin(others)
        if any(self.recorder.memory_of(target) is not None for target in targets):
            for source in sources:
                source.fail(f"{name} of what was derived from it")
            for target in targets:
                self.recorder.write_computed(target, sources, name)
            return returned(func, targets)
        result = func(*args, **kwargs)
        for target in targets:
            self.taint.mark(target, sources, name)
        return result

    def _origin(self, tensors: list[torch.Tensor]) -> frozenset[Source]:
        """The HF tensors that the content of `tensors` comes from, by way of live or of other memory."""
        for write in self.recorder.writes[self._seen :]:
            if write.source is not None:
                self._written.setdefault(write.memory, set()).add(write.source)
            self._seen += 1
        sources: frozenset[Source] = frozenset()
        for tensor in tensors:
            sources |= self.taint.sources(tensor)
            memory = self.recorder.memory_of(tensor)
            if memory is not None:
                sources |= self._written.get(memory, set())
        return sources
