"""How transformers writes a model: which view of which parameter each tensor of the checkpoint is.

transformers converts a model's tensors when it saves: stacked experts become one tensor each, fused projections
two, names change. Here the conversion runs once, on tensors without memory, and every view that it takes is followed.
What it gives is nearly always part of a parameter, so a version needs no copy, and ranks write parts of what they have.
The rest (tensors that are joined, or computed) is converted again for each version, group by group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._arrays import check_tensor
from ._slices import ShardedView, is_dtensor
from .errors import InternalError, Unsupported

_aten = torch.ops.aten
#: A parameter's shape, strides and dtype, and whether it is sharded: what a form was made for.
_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor that is part of a parameter."""

    source: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements behind the parameter's first


@dataclass(frozen=True, slots=True)
class _Run:
    """Views of one parameter that differ in their offsets only, which are `step` apart: stacked experts, say. They are
    made with one call, in a third of the time."""

    first: _View
    step: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors that are made of the same parameters."""

    sources: frozenset[str]
    names: tuple[str, ...]
    #: All that the conversion gives of the sources, in its order.
    given: tuple[str, ...]


class SavedForm:
    """The tensors that ``save_pretrained`` writes of a model; made for one set of parameters, used for each version."""

    def __init__(self, model: Any, state: Mapping[str, Any]) -> None:
        """``state``: what is saved, without further names of tied weights. Unsupported names what cannot be saved."""
        self._kinds = {name: _kind(tensor, name) for name, tensor in state.items()}
        metas = {name: _without_memory(kind) for name, kind in self._kinds.items()}
        with _Views(metas) as followed:
            saved = _converted(model, metas)
        sources = {name: followed.sources(tensor) for name, tensor in saved.items()}
        views = {
            name: view
            for name, tensor in saved.items()
            if followed.is_view(tensor) and (view := self._view_of(tensor, min(sources[name]), state)) is not None
        }
        groups = _groups(sources, views.keys())
        #: Name and a tensor without memory, as the checkpoint lists them.
        self.specs: dict[str, Any] = {}
        self._steps: list[tuple[str, _View] | _Group] = []
        for name, tensor in saved.items():
            if name in self.specs:
                continue  # it came with its group
            if name in views:
                self._steps.append((name, views[name]))
                self.specs[name] = tensor
            else:
                self._steps.append(groups[name])
                self.specs |= {member: saved[member] for member in groups[name].names}
        self._saved = saved
        self._runs = _runs(views, {name for name, (*_, sharded) in self._kinds.items() if sharded})

    @property
    def views_only(self) -> bool:
        """Whether all tensors are memory of the model, so that they stay while a version is written."""
        return not any(isinstance(step, _Group) for step in self._steps)

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether the parameters are those that it was made for, by name, shape, strides and dtype."""
        return state.keys() == self._kinds.keys() and all(
            _kind(tensor, name) == self._kinds[name] for name, tensor in state.items()
        )

    def tensors(self, model: Any, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The checkpoint's tensors of these parameters; what is more than views is made one group at a time."""
        views = self.views(state)
        for step in self._steps:
            if isinstance(step, _Group):
                yield from self._made(step, model, state)
            else:
                yield step[0], views[step[0]]

    def views(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors that are parts of these parameters. None is kept here: it would keep the memory that a parameter
        has left (`model.to("cpu")`, while an engine has the device)."""
        made: dict[str, Any] = {}
        for run in self._runs:
            own, size, stride = state[run.first.source], run.first.size, run.first.stride
            if len(run.names) == 1:
                made[run.names[0]] = self._view(run.first, own)
                continue
            first = own.storage_offset() + run.first.offset
            together = torch.as_strided(own.detach(), (len(run.names), *size), (run.step, *stride), first)
            made.update(zip(run.names, together.unbind(0), strict=True))
        return made

    def _view_of(self, tensor: Any, source: str, state: Mapping[str, Any]) -> _View | None:
        """None where ranks cannot write parts of it."""
        view = _View(source, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        if not self._is_whole(view) and is_dtensor(own := state[source]):
            return view if ShardedView.of(own, view.size, view.stride, view.offset) is not None else None
        return view

    def _is_whole(self, view: _View) -> bool:
        size, stride, *_ = self._kinds[view.source]
        return view.offset == 0 and view.size == size and view.stride == stride

    def _view(self, view: _View, own: Any) -> Any:
        if self._is_whole(view):
            return own
        if is_dtensor(own):
            return ShardedView.of(own, view.size, view.stride, view.offset)
        return torch.as_strided(own.detach(), view.size, view.stride, own.storage_offset() + view.offset)

    def _made(self, group: _Group, model: Any, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Converts the group's parameters alone. Names are those of the whole conversion: a rename may hang on
        parameters of other groups."""
        part = {name: _whole(state[name]) for name in self._kinds if name in group.sources}
        made = list(_converted(model, part).values())
        same = [(tensor.shape, tensor.dtype) for tensor in made]
        if same != [(self._saved[name].shape, self._saved[name].dtype) for name in group.given]:
            raise InternalError(f"hf: transformers converts {', '.join(part)} in another way when they are alone")
        for name, tensor in zip(group.given, made, strict=True):
            if name in group.names:
                yield name, tensor


def _runs(views: Mapping[str, _View], sharded: Collection[str]) -> list[_Run]:
    """`sharded`: parameters whose views are made one by one."""
    alike: dict[Any, list[tuple[int, str]]] = {}
    for name, view in views.items():
        alone = name if view.source in sharded else ""
        alike.setdefault((view.source, view.size, view.stride, alone), []).append((view.offset, name))
    runs: list[_Run] = []
    for (source, size, stride, _), found in alike.items():
        names: list[str] = []
        first = last = step = 0
        for offset, name in sorted(found):
            if len(names) > 1 and offset - last != step:
                runs.append(_Run(_View(source, size, stride, first), step, tuple(names)))
                names = []
            first, step = (first, offset - last) if names else (offset, 0)
            names.append(name)
            last = offset
        runs.append(_Run(_View(source, size, stride, first), step, tuple(names)))
    return runs


def _kind(tensor: Any, name: str) -> _Kind:
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported(f"{name}: a {type(tensor).__name__} in the model's state is no tensor")
    check_tensor(tensor, name)
    if is_dtensor(tensor):  # what is sharded is seen as a whole
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return whole.shape, whole.stride(), whole.dtype, True
    return tensor.shape, tensor.stride(), tensor.dtype, False


def _without_memory(kind: _Kind) -> Any:
    size, stride, dtype, _ = kind
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach()


def _converted(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.core_model_loading import revert_weight_conversion

    try:
        converted: dict[str, Any] = revert_weight_conversion(model, dict(state))
    except Exception as error:
        raise Unsupported(
            f"hf: transformers cannot convert the model back to its checkpoint: {error}",
            "give the tensors as a dict with the checkpoint's names",
        ) from error
    return converted


def _groups(sources: Mapping[str, frozenset[str]], views: Collection[str]) -> dict[str, _Group]:
    """The group of each name that is no view: those whose sources are connected are made together."""
    made = {name: own for name, own in sources.items() if name not in views}
    root: dict[str, str] = {}

    def find(source: str) -> str:
        while root.setdefault(source, source) != source:
            root[source] = source = root[root[source]]
        return source

    for own in made.values():
        first = find(min(own))
        for source in own:
            root[find(source)] = first
    together: dict[str, list[str]] = {}
    given: dict[str, list[str]] = {}
    for name, own in sources.items():
        first = find(min(own))
        given.setdefault(first, []).append(name)
        if name in made:
            together.setdefault(first, []).append(name)
    every: dict[str, set[str]] = {}
    for source in list(root):
        every.setdefault(find(source), set()).add(source)
    groups: dict[str, _Group] = {}
    for first, names in together.items():
        groups |= dict.fromkeys(names, _Group(frozenset(every[first]), tuple(names), tuple(given[first])))
    return groups


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which tensors share memory with the given ones, and of which ones the others are made.

    Copies for the sake of contiguous memory are not made: the writer takes rows from where they are."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origin = {tensor.untyped_storage()._cdata: frozenset([name]) for name, tensor in tensors.items()}
        self._given = set(self._origin)
        self._written: set[int] = set()
        self._alive: list[Any] = list(tensors.values())  # a storage's address is its name only while it lives

    def sources(self, tensor: Any) -> frozenset[str]:
        return self._origin.get(tensor.untyped_storage()._cdata, frozenset())

    def is_view(self, tensor: Any) -> bool:
        """Of one of the given tensors, into which nothing was written."""
        storage = tensor.untyped_storage()._cdata
        return storage in self._given and storage not in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _without_copy(func, args) if func in (_aten.clone.default, _aten._unsafe_view.default) else None
        if out is None:
            out = func(*args, **(kwargs or {}))
        inputs = _tensors_in((args, tuple((kwargs or {}).values())))
        origin = frozenset().union(*map(self.sources, inputs)) if inputs else frozenset()
        if func._schema.is_mutable:
            self._written.update(tensor.untyped_storage()._cdata for tensor in inputs)
        for tensor in _tensors_in(out):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._origin:
                self._origin[storage] = origin
                self._alive.append(tensor)
        return out


def _without_copy(func: Any, args: Any) -> Any:
    """The same without a copy, where that can be: `reshape` copies what has no view of the new shape."""
    if func is _aten.clone.default:
        return _aten.alias.default(args[0])
    tensor, size = args
    try:
        return _aten.view.default(tensor, size)
    except RuntimeError:
        return _aten.view.default(_aten.clone.default(tensor, memory_format=torch.contiguous_format), size)


def _tensors_in(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []
