"""A tensor without memory that stands for an HF tensor while a loader handles it.

Why below `__torch_function__`: loaders spell one thing in many ways (methods, functions, indexing, assignment). Beneath
autograd all of them are a handful of ATen operators, whose schemas say which return views and which write. A view is
run on a meta tensor that lies in the HF tensor as the region does, so that torch itself does the arithmetic.

What is no view makes the tensor *failed*, with the operator's name. The loader goes on with a tensor that stands for
nothing, which shows where the result goes; only what needs a value (`item`, `bool`) has to raise.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .memory import LiveMemories
from .specs import Spec

_aten = torch.ops.aten
#: The same elements in the same order, in memory of their own: what they are copied to is what they are.
_CLONES = {_aten.clone.default, _aten._to_copy.default, _aten._pin_memory.default, _aten.pin_memory.default}

#: What loaders call it.
_SPELLED = {"_local_scalar_dense": "item"}


class UnsupportedError(RuntimeError):
    """A loader wants of a recorded tensor what only its values can give. Names the tensors and the operator."""

    def __init__(self, message: str, sources: Iterable[TracedTensor]) -> None:
        super().__init__(message)
        self.sources = tuple(sources)


class _Token:
    """Alive while a loader keeps a tensor that came from one handing out of a source."""

    __slots__ = ("__weakref__",)


class TracedTensor:
    """An HF tensor and what became of it."""

    __slots__ = ("spec", "index", "failures", "stored", "modules", "kept", "unseen", "_token")

    def __init__(self, spec: Spec, index: int) -> None:
        self.spec = spec
        self.index = index
        self.failures: list[str] = []
        self.stored = False  #: copied at least once, if only an empty part
        self.modules: set[str] = set()  #: that it reaches, as far as known
        self.kept = False  #: a loader failed while it kept the tensor
        self.unseen = False  #: what the loader does with it is not known: it raised, or keeps the tensor
        self._token: weakref.ref[_Token] | None = None

    def fail(self, reason: str) -> None:
        if reason not in self.failures:
            self.failures.append(reason)

    def alive(self) -> bool:
        return self._token is not None and self._token() is not None

    def hand_out(self, recorder: Recorder) -> RecordingTensor:
        """The whole tensor, new: what was done to earlier ones does not change it."""
        token = _Token()
        self._token = weakref.ref(token)
        whole = recorder.whole(self.spec)
        return RecordingTensor(recorder, (self,), whole, whole, recorder.device, (token,))


@dataclass(slots=True)
class Write:
    """What a loader stored in live memory: a region of an HF tensor, or (`region` None) anything else."""

    order: int
    source: TracedTensor | None
    region: tuple[int, tuple[int, ...], tuple[int, ...]] | None  #: first element, shape, strides in the HF tensor
    memory: int
    offset: int  #: bytes from the memory's base
    strides: tuple[int, ...]  #: bytes
    shape: tuple[int, ...]
    itemsize: int
    operator: str


class RecordingTensor(torch.Tensor):
    """See the module. `region` is None once the elements are no longer those of one HF tensor.

    `claimed` is the geometry that the loader sees; it differs from the region's after `contiguous()` and the like.
    """

    recorder: Recorder
    sources: tuple[TracedTensor, ...]
    region: torch.Tensor | None
    claimed: torch.Tensor
    tokens: tuple[_Token, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        recorder: Recorder,
        sources: tuple[TracedTensor, ...],
        region: torch.Tensor | None,
        claimed: torch.Tensor,
        device: torch.device,
        tokens: tuple[_Token, ...],
    ) -> RecordingTensor:
        made: RecordingTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            claimed.shape,
            strides=claimed.stride(),
            storage_offset=claimed.storage_offset(),
            dtype=claimed.dtype,
            device=device,
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.recorder, made.sources, made.region, made.claimed, made.tokens = recorder, sources, region, claimed, tokens
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        names = ", ".join(source.spec.name for source in self.sources)
        return f"RecordingTensor({names}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def data_ptr(self) -> int:
        raise self.recorder.unsupported(self.sources, "data_ptr")

    def numpy(self, *, force: bool = False) -> Any:
        raise self.recorder.unsupported(self.sources, "numpy")

    def tolist(self) -> Any:
        raise self.recorder.unsupported(self.sources, "tolist")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.recorder.unsupported(self.sources, "pickle")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = next(found for found in flat(args, kwargs or {}) if isinstance(found, RecordingTensor))
        return first.recorder.dispatch(func, args, kwargs or {})


def flat(args: Iterable[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, which may be in lists."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to, by its schema."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found.extend(flat((value,), {}))
    return found


def returned(func: Any, results: list[torch.Tensor]) -> Any:
    """What an operator that writes to `results` returns."""
    count = len(func._schema.returns)
    return None if count == 0 else results[0] if count == 1 else tuple(results[:count])


class Recorder:
    """What all recording tensors of one trace write to. Thread-safe: some loaders copy from several threads."""

    def __init__(self, live: LiveMemories, device: torch.device) -> None:
        self.live = live
        self.device = device  #: that handed out tensors claim to be on
        self.writes: list[Write] = []
        #: Names of live tensors that were exchanged as a whole for what came from HF tensors.
        self.replaced: set[str] = set()
        #: Told of memory that is not the model's and now has what came from HF tensors.
        self.taint: Callable[[torch.Tensor, Iterable[TracedTensor], str], None] = lambda tensor, sources, operator: None
        self._lock = threading.Lock()
        self._wholes: dict[tuple[torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def whole(self, spec: Spec) -> torch.Tensor:
        """A contiguous meta tensor; experts share one, since nothing changes it."""
        key = (spec.dtype, spec.shape)
        if key not in self._wholes:
            self._wholes[key] = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        return self._wholes[key]

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operator of which at least one argument is a RecordingTensor."""
        if func is _aten.copy_.default:  # most of all calls
            return self._copy(args[0], args[1])
        if func is _aten._foreach_copy_.default:
            for target, value in zip(args[0], args[1], strict=True):
                self._copy(target, value)
            return None
        name = str(func._schema.name).removeprefix("aten::")
        tensors = [found for found in flat(args, kwargs) if isinstance(found, RecordingTensor)]
        if func._schema.is_mutable:
            return self._mutate(func, args, kwargs, name, tensors)
        alone = len(tensors) == 1 and isinstance(args[0], RecordingTensor)
        if alone and (func.is_view or func is _aten._unsafe_view.default):
            return self._view(func, args, kwargs, name)
        if alone and func in _CLONES and kwargs.get("dtype", args[0].dtype) in (None, args[0].dtype):
            return self._clone(args[0], kwargs)
        if kwargs.get("dtype") is not None and func is _aten._to_copy.default:
            name = f"to({kwargs['dtype']}) from {tensors[0].dtype}"
        return self._compute(func, args, kwargs, name, tensors)

    def unsupported(self, sources: Iterable[TracedTensor], operator: str) -> UnsupportedError:
        """Fails the sources; the error to raise. The modules are those whose memory the callers have at hand."""
        operator = _SPELLED.get(operator, operator)
        modules = self.modules_in(sys._getframe(1))
        blamed = tuple(sources)
        for source in blamed:
            source.fail(operator)
            source.unseen = True
            source.modules |= modules
        names = ", ".join(source.spec.name for source in blamed)
        return UnsupportedError(f"{names}: {operator} needs values, and tracing moves none", blamed)

    def modules_in(self, frame: FrameType | None) -> set[str]:
        """Owners of the live tensors among the variables of the innermost frame of the loader that has any."""
        while frame is not None and frame.f_globals.get("__name__") != f"{__package__}.tracer":
            owners: set[str] = set()
            for value in list(frame.f_locals.values()):
                if isinstance(value, torch.Tensor) and not isinstance(value, RecordingTensor):
                    memory = self.memory_of(value)
                    if memory is not None:
                        owners |= self.live.owners_of(memory, value)
            if owners:
                return owners
            frame = frame.f_back
        return set()

    def memory_of(self, tensor: torch.Tensor) -> int | None:
        """Index of the live memory that a tensor lies in."""
        if tensor.device.type == "meta" or tensor.layout != torch.strided or not tensor.numel():
            return None
        return self.live.find(tensor)

    def _wrap(self, like: RecordingTensor, region: torch.Tensor | None, claimed: torch.Tensor) -> RecordingTensor:
        return RecordingTensor(self, like.sources, region, claimed, like.device, like.tokens)

    def _view(self, func: Any, args: Any, kwargs: dict[str, Any], name: str) -> Any:
        viewed: RecordingTensor = args[0]
        claimed = func(viewed.claimed, *args[1:], **kwargs)
        region = viewed.region
        if region is viewed.claimed:
            region = claimed
        elif region is not None:
            try:
                region = None if func is _aten.as_strided.default else func(region, *args[1:], **kwargs)
            except RuntimeError:
                region = None
            if region is None:
                self._fail(viewed, f"{name} of a copy, which is no view of the HF tensor")
        first = claimed if isinstance(claimed, torch.Tensor) else claimed[0] if claimed else None
        if first is not None and (first.itemsize != viewed.itemsize or first.is_conj() or first.is_neg()):
            self._fail(viewed, f"{name} to {first.dtype}")
            region = None
        if isinstance(claimed, torch.Tensor):
            return self._wrap(viewed, region, claimed)
        regions = [None] * len(claimed) if region is None else region
        return [self._wrap(viewed, part, seen) for part, seen in zip(regions, claimed, strict=True)]

    def _clone(self, cloned: RecordingTensor, kwargs: dict[str, Any]) -> RecordingTensor:
        memory_format = kwargs.get("memory_format") or torch.preserve_format
        made = self._wrap(cloned, cloned.region, cloned.claimed.clone(memory_format=memory_format))
        device = kwargs.get("device")
        if device is None or device == made.device:
            return made
        return RecordingTensor(self, made.sources, made.region, made.claimed, torch.device(device), made.tokens)

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any], name: str, tensors: list[RecordingTensor]) -> Any:
        """A result that is no HF element: only its shape is known, and whose it is."""
        for found in tensors:
            self._fail(found, _SPELLED.get(name, name))
        sources = tuple(dict.fromkeys(source for found in tensors for source in found.sources))
        tokens = tuple(dict.fromkeys(token for found in tensors for token in found.tokens))
        device = torch.device(kwargs.get("device") or tensors[0].device)

        def to_meta(value: Any) -> Any:
            if isinstance(value, RecordingTensor):
                return value.claimed
            if isinstance(value, torch.Tensor):
                return value.detach().to("meta")
            return torch.device("meta") if isinstance(value, torch.device) else value

        def from_meta(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return RecordingTensor(self, sources, None, value, device, tokens)
            if isinstance(value, bool | int | float | complex):
                raise self.unsupported(sources, name)
            return value

        try:
            result = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        except Exception as error:
            raise self.unsupported(sources, name) from error
        return tree_map(from_meta, result)

    def _mutate(self, func: Any, args: Any, kwargs: dict[str, Any], name: str, tensors: list[RecordingTensor]) -> Any:
        targets = written(func, args, kwargs)
        for found in tensors:
            self._fail(found, name)
        for target in targets:
            for found in tensors:
                self.write_computed(target, found.sources, name)
        return returned(func, targets)

    def _copy(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if isinstance(target, RecordingTensor):
            for found in (target, value):
                if isinstance(found, RecordingTensor):
                    self._fail(found, "copy_ into an HF tensor")
            return target
        assert isinstance(value, RecordingTensor)
        region, reason = value.region, None
        if value.dtype != target.dtype:
            reason = f"copy_ of {value.dtype} to {target.dtype}"
        elif value.numel() != target.numel():
            reason = f"copy_ that spreads {tuple(value.shape)} over {tuple(target.shape)}"
        elif region is not None:
            region = region if region.shape == target.shape else region.expand(target.shape)
            if 0 in folded(region) or 0 in folded(target):
                reason = "copy_ of one element to many places or of many to one"
            elif target.numel() and target.data_ptr() % target.element_size():
                reason = f"copy_ to an address that is no multiple of {target.element_size()}"
        if reason is not None:
            self._fail(value, reason)
        if region is None or reason is not None:
            self.write_computed(target, value.sources, "copy_")
            return target
        (source,) = value.sources
        source.stored = True
        memory = self.memory_of(target)
        if memory is not None:
            place = (region.storage_offset(), tuple(region.shape), tuple(region.stride()))
            self._append(source, place, memory, target, "copy_")
        elif target.numel():
            self._fail(value, "copy_ into memory that is not the model's")
            self.taint(target, value.sources, "copy_")
        else:
            self._copy_nothing(source, target)
        return target

    def _copy_nothing(self, source: TracedTensor, target: torch.Tensor) -> None:
        """An empty part of a live tensor is written: it has nothing of the HF tensor, and the loader has been there."""
        if target.device.type == "meta":
            return
        storage = target.untyped_storage()
        memory = self.live.find_address(target.device, storage.data_ptr())
        if memory is not None:
            size = target.element_size()
            address = storage.data_ptr() + int(target.storage_offset()) * size
            self._append_at(source, None, memory, address, target, "copy_")

    def write_computed(self, target: torch.Tensor, sources: Iterable[TracedTensor], operator: str) -> None:
        """Live memory is written with what was computed of HF tensors, or (no sources) with anything else."""
        if isinstance(target, RecordingTensor):
            self._fail(target, operator)
            return
        memory = self.memory_of(target)
        if memory is None:
            self.taint(target, sources, operator)
            return
        for source in sources or (None,):
            self._append(source, None, memory, target, operator)

    def _append(
        self, source: TracedTensor | None, region: Any, memory: int, target: torch.Tensor, operator: str
    ) -> None:
        if source is not None:
            source.modules |= self.live.owners_of(memory, target)
        self._append_at(source, region, memory, target.data_ptr(), target, operator)

    def _append_at(
        self, source: TracedTensor | None, region: Any, memory: int, address: int, target: torch.Tensor, operator: str
    ) -> None:
        size = target.element_size()
        strides = tuple(stride * size for stride in target.stride())
        offset = address - self.live.memories[memory].base
        with self._lock:
            order = len(self.writes)
            shape = tuple(target.shape)
            self.writes.append(Write(order, source, region, memory, offset, strides, shape, size, operator))

    @staticmethod
    def _fail(tensor: RecordingTensor, reason: str) -> None:
        for source in tensor.sources:
            source.fail(reason)


def folded(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one step."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
