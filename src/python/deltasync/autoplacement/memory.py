"""The live memory of a model: storages of its parameters, buffers and tensor attributes, and who owns which bytes."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

Modules = nn.Module | Mapping[str, nn.Module]


class TraceError(RuntimeError):
    """Tracing as a whole is impossible; the message says why."""


@dataclass(frozen=True)
class Memory:
    """A range of addresses that a model keeps weights in: a storage, or several that overlap.

    `storage` keeps the bytes alive for as long as the trace is.
    """

    name: str  #: of the first parameter in it
    base: int  #: address of its first byte
    bytes: int
    device: torch.device
    dtype: torch.dtype | None  #: if all tensors in it have the same
    storage: torch.UntypedStorage = field(repr=False, compare=False)


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that a module holds. `alias` has the geometry and memory that it had when it was looked at."""

    name: str
    module: str
    holder: nn.Module
    attribute: str
    tensor: torch.Tensor
    alias: torch.Tensor


def live_tensors(modules: Modules) -> Iterator[LiveTensor]:
    """Parameters, buffers and tensor attributes (also in lists, tuples and dicts, one level deep) of every module."""
    roots = {"": modules} if isinstance(modules, nn.Module) else dict(modules)
    for root, model in roots.items():
        for path, module in model.named_modules(prefix=root):
            for attribute, tensor in held_tensors(module):
                name = f"{path}.{attribute}" if path else attribute
                yield LiveTensor(name, path, module, attribute, tensor, tensor.detach())


def held_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(attribute, tensor) of what the module itself holds; "attribute[key]" inside of a container."""
    for registered in (module._parameters, module._buffers):
        for attribute, tensor in registered.items():
            if tensor is not None:
                yield attribute, tensor
    for attribute, value in vars(module).items():
        if attribute in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, torch.Tensor):
            yield attribute, value
        elif isinstance(value, list | tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if isinstance(item, torch.Tensor):
                    yield f"{attribute}[{key}]", item


def model_signature(modules: Modules) -> str:
    """32 hex digits over names, devices, addresses, shapes, strides and dtypes of all that the modules hold.

    A plan is void once it differs: parameters were re-allocated, re-shaped, wrapped (LoRA) or exchanged.
    """
    digest = hashlib.blake2b(digest_size=16)
    for live in live_tensors(modules):
        t = live.tensor
        geometry = (live.name, str(t.device), _address(t), tuple(t.shape), _strides(t), str(t.dtype))
        digest.update(repr(geometry).encode())
    return digest.hexdigest()


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # subclasses without memory, and what was made to share it
        return 0


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout == torch.strided else ()


def bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of a tensor's first byte and of the byte behind its last."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()


@dataclass
class _Extent:
    base: int
    end: int
    index: int
    owners: list[tuple[int, int, str]]  #: first address, end, module


class LiveMemories:
    """Finds the memory and the modules of an address. Immutable after construction.

    TraceError: a parameter is on the meta device (the engine is amid a reload) or the modules hold no memory at all.
    """

    def __init__(self, tensors: list[LiveTensor]) -> None:
        self.memories: list[Memory] = []
        self._extents: dict[torch.device, list[_Extent]] = {}
        self._bases: dict[torch.device, list[int]] = {}
        found: dict[torch.device, list[tuple[int, int, LiveTensor]]] = {}
        for live in tensors:
            t = live.tensor
            if isinstance(t, nn.Parameter) and t.device.type == "meta" and t.numel():
                raise TraceError(f"{live.name} is on the meta device: the engine is amid a reload or was not loaded")
            if t.device.type == "meta" or t.layout != torch.strided or not t.numel() or not _address(t):
                continue
            storage = t.untyped_storage()
            found.setdefault(t.device, []).append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), live))
        if not found:
            raise TraceError("the modules hold no memory")
        for device, ranges in found.items():
            self._add_device(device, ranges)

    def _add_device(self, device: torch.device, ranges: list[tuple[int, int, LiveTensor]]) -> None:
        extents: list[_Extent] = []
        members: list[list[LiveTensor]] = []
        for base, end, live in sorted(ranges, key=lambda entry: (entry[0], -entry[1])):
            if extents and base < extents[-1].end:
                if end > extents[-1].end:
                    raise TraceError(f"{live.name} and {members[-1][0].name} have storages that overlap in part")
            else:
                extents.append(_Extent(base, end, len(self.memories) + len(extents), []))
                members.append([])
            extents[-1].owners.append((*bounds(live.tensor), live.module))
            members[-1].append(live)
        for extent, lives in zip(extents, members, strict=True):
            # The storage that spans the extent came first; names go by the order of the modules.
            dtypes = {live.tensor.dtype for live in lives}
            first = min(lives, key=lambda live: not isinstance(live.tensor, nn.Parameter))
            dtype = dtypes.pop() if len(dtypes) == 1 else None
            storage = lives[0].alias.untyped_storage()
            size = extent.end - extent.base
            self.memories.append(Memory(first.name, extent.base, size, device, dtype, storage))
        self._extents[device] = extents
        self._bases[device] = [extent.base for extent in extents]

    def find(self, tensor: torch.Tensor) -> int | None:
        """Index of the memory that a strided tensor with a storage lies in."""
        return self.find_address(tensor.device, _address(tensor))

    def find_address(self, device: torch.device, address: int) -> int | None:
        bases = self._bases.get(device)
        if bases is None:
            return None
        at = bisect_right(bases, address) - 1
        extent = self._extents[device][at]
        return extent.index if at >= 0 and address < extent.end else None

    def owners_of(self, memory: int, tensor: torch.Tensor) -> set[str]:
        """Modules that hold a tensor with bytes where this one, in this memory, has its own."""
        extents = self._extents[self.memories[memory].device]
        owners = extents[memory - extents[0].index].owners
        if len(owners) == 1:
            return {owners[0][2]}
        first, end = bounds(tensor)
        return {module for low, high, module in owners if low < end and first < high}
