"""What a loader does to live memory beside copying HF tensors into it.

While a trace runs, live memory keeps its bytes: an operator that would write there is noted and left out. Where values
of live memory, or of HF tensors, go on into other memory is followed by storage, so that derived tensors are found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .recording import Recorder, RecordingTensor, TracedTensor, flat, returned, written

_aten = torch.ops.aten
#: Operators that look at the geometry of their argument only.
_GEOMETRY = {
    getattr(_aten, name)
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
} | {_aten.new_empty_strided, _aten.rand_like, _aten.randn_like}


class Taint:
    """Where content went that came from HF tensors: other storages, and what of live memory was written. Thread-safe.
    Keeps no storage's bytes alive."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        self._marks: dict[int, tuple[StorageWeakRef, frozenset[TracedTensor]]] = {}
        self._written: dict[int, set[TracedTensor]] = {}  # by memory; of the recorder's first _seen writes
        self._seen = 0

    def mark(self, tensor: torch.Tensor, sources: Iterable[TracedTensor], operator: str) -> None:
        """What `tensor` lies in has content of `sources` now."""
        added = frozenset(sources)
        if not added or isinstance(tensor, RecordingTensor) or tensor.layout != torch.strided:
            return
        # The weak reference keeps the storage's identity, which is the key, from being given to another one.
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        with self._lock:
            self._marks[reference.cdata] = (reference, added | self.sources(tensor))

    def sources(self, tensor: torch.Tensor) -> frozenset[TracedTensor]:
        """Those of a tensor outside of live memory."""
        if not self._marks or tensor.layout != torch.strided or isinstance(tensor, RecordingTensor):
            return frozenset()
        marked = self._marks.get(tensor.untyped_storage()._cdata)
        return marked[1] if marked else frozenset()

    def origin(self, tensors: list[torch.Tensor]) -> frozenset[TracedTensor]:
        """The HF tensors that the content of `tensors` comes from, by way of live or of other memory."""
        with self._lock:
            for write in self._recorder.writes[self._seen :]:
                if write.source is not None:
                    self._written.setdefault(write.memory, set()).add(write.source)
                self._seen += 1
            sources: frozenset[TracedTensor] = frozenset()
            for tensor in tensors:
                sources |= self.sources(tensor)
                memory = self._recorder.memory_of(tensor)
                if memory is not None:
                    sources |= self._written.get(memory, set())
            return sources


class LoadGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active around a loader's calls, in one thread."""

    def __init__(self, recorder: Recorder, taint: Taint) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.taint = taint

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
            sources = self.taint.origin(flat(args, kwargs))
            result = func(*args, **kwargs)
            for made in flat((result,), {}) if sources else ():
                self.taint.mark(made, sources, "")
            return result
        targets = written(func, args, kwargs)
        name = str(func._schema.name).removeprefix("aten::")
        others = [found for found in flat(args, kwargs) if not any(found is target for target in targets)]
        sources = self.taint.origin(others)
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


@contextmanager
def guarded(recorder: Recorder, taint: Taint) -> Iterator[None]:
    """Guards this thread, and what it gives to thread pools meanwhile, and what those tasks give to pools in turn.

    Dispatch modes are of one thread, and loaders copy in pools. Tasks of other threads stay as they are.
    """
    inside = threading.local()
    submit = ThreadPoolExecutor.submit

    def run(task: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        inside.yes = True
        try:
            with LoadGuard(recorder, taint), torch.no_grad():
                return task(*args, **kwargs)
        finally:
            inside.yes = False

    def submit_guarded(pool: ThreadPoolExecutor, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "yes", False):
            return submit(pool, run, task, args, kwargs)
        return submit(pool, task, *args, **kwargs)

    inside.yes = True
    ThreadPoolExecutor.submit = submit_guarded  # type: ignore[method-assign,assignment]
    try:
        with LoadGuard(recorder, taint):
            yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
