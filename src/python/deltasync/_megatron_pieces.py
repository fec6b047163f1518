"""What a rank of Megatron holds of the model: the pieces of its ``sharded_state_dict()``, as views of live memory."""

from __future__ import annotations

import bisect
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ._arrays import check_memory, dtype_name
from ._megatron_attributes import Ranks, shards_of
from ._megatron_fsdp import Rows, is_divided, local, shares, undivided
from ._modules import is_module
from ._slices import is_dtensor
from .errors import InvalidArgument, Unsupported

#: Adapters of all experts of a module, in one tensor whose first dimension is the expert.
_OF_EXPERTS = re.compile(r"(.*\.experts\.experts\.)(linear_fc[12]\.adapter\..*)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor, in which this rank has the first of all copies."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    #: Which parameter or buffer it is a view of: its chunk, its name there, and what messages call it.
    chunk: int
    name: str
    owner_name: str
    #: In elements: from the owner's first to the piece's, and of the piece.
    begin: int
    strides: tuple[int, ...]

    def described(self) -> dict[str, Any]:
        """For the planner (JSON)."""
        return {
            "key": self.key,
            "dtype": self.dtype,
            "global_shape": list(self.global_shape),
            "offset": list(self.offset),
            "shape": list(self.shape),
        }

    def view(self, owner: Any) -> Any:
        """Of the owner's memory as it is now: trainers move parameters, to the host and back for example."""
        owner = owner.detach()
        return owner.as_strided(self.shape, self.strides, owner.storage_offset() + self.begin)


@dataclass(frozen=True, slots=True)
class _Owner:
    """A parameter or buffer, and the addresses of its memory."""

    first: int
    end: int
    name: str
    tensor: Any


class RankPieces:
    """Of all chunks of the model on this rank (one, or one for each virtual pipeline stage).

    ``chunks``: what Megatron trains, in whichever wrappers (DistributedDataParallel, Float16Module). Unsupported: a
    parameter whose memory is not of its dtype (fp8 primary weights), or a piece that is no view of a parameter.
    """

    def __init__(
        self, chunks: Any, *, adapters: bool = False, rows: Mapping[tuple[int, str], Rows] | None = None
    ) -> None:
        """`adapters`: only what modules called `adapter` have, as Megatron-Bridge's LoRA has them. `rows`: that this
        rank has of Megatron-FSDP's parameters, by chunk and name."""
        self._chunks = as_chunks(chunks)
        self._rows = dict(rows or {})
        self.pieces = [piece for piece in _pieces(self._chunks, self._rows) if not adapters or ".adapter." in piece.key]
        owners = self._owners()
        self._forms = {key: _form(owner) for key, owner in owners.items()}
        self._spans = {key: _span(owner) for key, owner in owners.items()}

    def _owners(self) -> dict[tuple[int, str], Any]:
        """By chunk and name, as they are now: buffers, and parameters too, may be other objects than they were."""
        there = [dict(_named(_innermost(chunk))) for chunk in self._chunks]
        found = {}
        for piece in self.pieces:
            owner = there[piece.chunk].get(piece.name)
            if owner is None:
                raise InvalidArgument(f"{piece.owner_name}: the model has it no more", "make the plan again")
            if (piece.chunk, piece.name) in self._rows and not is_divided(owner):
                raise InvalidArgument(
                    f"{piece.owner_name}: Megatron-FSDP has put all of it together, for a forward or backward",
                    "offload after the optimizer's step",
                )
            found[piece.chunk, piece.name] = local(owner)
        return found

    def described(self) -> list[dict[str, Any]]:
        return [piece.described() for piece in self.pieces]

    def check(self) -> dict[tuple[int, str], Any]:
        """What the pieces are views of, by chunk and name. InvalidArgument: a parameter has another shape, stride or
        dtype than it had in the plan, or no memory, or its storage ends before it does."""
        owners = self._owners()
        for piece in self.pieces:
            owner = owners[piece.chunk, piece.name]
            was, now = self._forms[piece.chunk, piece.name], _form(owner)
            if was != now:
                raise InvalidArgument(
                    f"{piece.owner_name}: shape, strides and dtype were {was} in the plan, and are {now}",
                    "make the plan again",
                )
            nbytes = owner.untyped_storage().nbytes()
            if owner.numel() and not nbytes:
                raise InvalidArgument(
                    f"{piece.owner_name}: its memory was freed; the trainer has put its weights aside",
                    "offload when they are back",
                )
            if nbytes < (owner.storage_offset() + self._spans[piece.chunk, piece.name]) * owner.element_size():
                check_memory(owner, piece.owner_name)
        return owners

    def views(self) -> list[Any]:
        """The memory of all pieces as it is now, in their order. Raises what check() does."""
        owners = self.check()
        return [piece.view(owners[piece.chunk, piece.name]) for piece in self.pieces]

    def are_of(self, chunks: Any) -> bool:
        given = as_chunks(chunks)
        return len(given) == len(self._chunks) and all(map(operator.is_, given, self._chunks))

    def bring_up_to_date(self) -> None:
        """Where the distributed optimizer leaves the gathering of new parameters to the next forward, does it now. All
        ranks call it. Not Megatron-FSDP's: those of the optimizer are exported. InvalidArgument: the wrapper that does
        it was not given."""
        for chunk in self._chunks if not self._rows else []:
            wrappers = [module for module in _wrappers(chunk) if hasattr(module, "ddp_config")]
            if not wrappers and _gathers_in_forward(chunk):
                raise InvalidArgument(
                    "this model is inside a DistributedDataParallel with overlap_param_gather, which was not given: "
                    "until the next forward its parameters are those of the step before",
                    "give the chunks in their wrappers, as get_model() returns them",
                )
            for module in wrappers:
                if getattr(module.ddp_config, "overlap_param_gather", False) and hasattr(module, "start_param_sync"):
                    module.start_param_sync(force_sync=True)


def _gathers_in_forward(chunk: Any) -> bool:
    """By the hooks that Megatron's DistributedDataParallel leaves in the modules (0.16.1, 0.19.2)."""
    hooks = (hook for module in chunk.modules() for hook in module._forward_pre_hooks.values())
    return any("DistributedDataParallel._make_forward_pre_hook" in getattr(hook, "__qualname__", "") for hook in hooks)


def is_megatron(model: Any, *, plain: bool) -> bool:
    """Whether it is a model of Megatron, or a list of its chunks. `plain`: or one with modules of Megatron in it."""
    first = model[0] if isinstance(model, (list, tuple)) and model else model
    if not is_module(first):
        return False
    module = _innermost(first)
    return hasattr(module, "sharded_state_dict") or (plain and _is_of_megatron(module))


def _is_of_megatron(module: Any) -> bool:
    """Whether there is something in it that knows which part of the model it is."""
    return any(hasattr(inner, "sharded_state_dict") for inner in module.modules()) or any(
        hasattr(parameter, "tensor_model_parallel") for parameter in module.parameters()
    )


def rows_here(chunks: Any) -> list[list[Any]]:
    """What this rank has of Megatron-FSDP's parameters, for the others."""
    return shares(_innermost(chunk) for chunk in as_chunks(chunks))


def as_chunks(chunks: Any) -> list[Any]:
    """InvalidArgument if they are no modules of Megatron."""
    found = [chunks] if is_module(chunks) else list(chunks) if isinstance(chunks, Iterable) else []
    for chunk in found:
        if not is_module(chunk) or not _is_of_megatron(_innermost(chunk)):
            raise InvalidArgument(
                f"model_chunks: a {type(chunk).__name__} has no sharded_state_dict(), nor parameters that say which "
                "part they are",
                "give what Megatron trains: a GPTModel, or the list of its chunks",
            )
    if not found:
        raise InvalidArgument(f"model_chunks: {type(chunks).__name__} with no module of Megatron in it")
    return found


def _wrappers(module: Any) -> Iterator[Any]:
    """It, what it wraps, and so on."""
    while is_module(module):
        yield module
        module = getattr(module, "module", None)


def _innermost(module: Any) -> Any:
    return list(_wrappers(module))[-1]


def _form(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _span(tensor: Any) -> int:
    """In elements, from its first to behind its last; 0 if it has none."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 if tensor.numel() else 0


def _pieces(chunks: list[Any], rows: Mapping[tuple[int, str], Rows]) -> Iterator[Piece]:
    for number, chunk in enumerate(chunks):
        module = _innermost(chunk)
        where = f"chunk {number}: " if len(chunks) > 1 else ""
        for name, tensor in _named(module):
            _check_plain(tensor, where + name)
        with undivided(module):
            shards = list(_shards(module))  # first: a router makes its bias fp32 when it is asked
            owners = _owners(module)
            firsts = [owner.first for owner in owners]
            for shard in shards:
                if not shard.data.numel() or not _is_main(shard.replica_id, divided=shard.data.is_meta):
                    continue
                piece = _piece(shard, owners, firsts, number, where)
                here = rows.get((number, piece.name))
                for part in [piece] if here is None else _within(piece, _owner(owners, firsts, shard).tensor, here):
                    yield from _of_each_expert(part)


def _within(piece: Piece, owner: Any, rows: Rows) -> Iterator[Piece]:
    """What it has of these rows of its owner, of which this rank has no others."""
    width = math.prod(owner.shape[1:])
    first = piece.begin // width
    axis = next((axis for axis, step in enumerate(piece.strides) if step == width), None)
    count = 1 if axis is None else piece.shape[axis]
    begin, end = max(first, rows.begin), min(first + count, rows.end)
    if begin >= end:
        return
    offset, shape = list(piece.offset), list(piece.shape)
    if axis is not None:
        offset[axis] += begin - first
        shape[axis] = end - begin
    moved = piece.begin + (begin - first - rows.begin) * width
    yield replace(piece, offset=tuple(offset), shape=tuple(shape), begin=moved)


def _named(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _owners(module: Any) -> list[_Owner]:
    """By address."""
    found: dict[int, _Owner] = {}
    for name, tensor in _named(module):
        if tensor.numel():
            first = _address(tensor)
            found.setdefault(first, _Owner(first, first + _span(tensor) * tensor.element_size(), name, tensor))
    return sorted(found.values(), key=lambda owner: owner.first)


def _address(tensor: Any) -> int:
    """Of its first element; of one without memory, in a range that its storage has for itself."""
    if tensor.is_meta:
        return int((tensor.untyped_storage()._cdata << 64) + tensor.storage_offset() * tensor.element_size())
    return int(tensor.data_ptr())


def _check_plain(tensor: Any, name: str) -> None:
    import torch

    if is_divided(tensor):
        return
    if is_dtensor(tensor):
        raise Unsupported(
            f"{name}: a DTensor that is none of Megatron-FSDP's, so that sharded_state_dict() says nothing of it",
            "WeightManager(hf, process_group=True), and offload() pairs of the checkpoint's names and such DTensors",
        )
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unsupported(
            f"{name}: a {type(tensor).__name__}, whose memory is not what its dtype ({tensor.dtype}) says",
            "train with primary weights in bf16 or fp32 (fp8_param off)",
        )
    if tensor.is_meta:
        raise InvalidArgument(f"{name}: a tensor on the meta device has no memory")


def _shards(module: Any) -> Iterator[Any]:
    """The ShardedTensors of the module, factories built."""
    # Megatron writes into it. Layers and experts get keys of their own.
    metadata = {"singleton_local_shards": True, "non_homogeneous_layers": True}
    group = _replicas_group(module)
    if group is not None:
        metadata["dp_cp_group"] = group
    if hasattr(module, "sharded_state_dict"):
        yield from _leaves(module.sharded_state_dict(metadata=metadata))
        return

    def ask(inner: Any, prefix: str) -> Iterator[Any]:
        return _leaves(inner.sharded_state_dict(prefix=prefix, metadata=dict(metadata)))

    yield from shards_of(module, ask, Ranks.here())


def _replicas_group(module: Any) -> Any:
    """The processes that hold the same: of the module's own groups, or Megatron's global ones."""
    group = getattr(getattr(module, "pg_collection", None), "dp_cp", None)
    if group is not None:
        return group
    try:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    except (ImportError, AssertionError):
        return None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        if hasattr(value, "build"):
            yield from _leaves(value.build())
        elif hasattr(value, "global_offset") and hasattr(value, "local_shape"):
            yield value
        return
    for item in value:
        yield from _leaves(item)


def _of_each_expert(piece: Piece) -> Iterator[Piece]:
    """Adapters of all experts in the names of single ones, which are those of experts that are modules of their own."""
    found = _OF_EXPERTS.fullmatch(piece.key)
    if found is None or len(piece.shape) != 3:
        yield piece
        return
    for expert in range(piece.shape[0]):
        yield replace(
            piece,
            key=f"{found[1]}{piece.offset[0] + expert}.{found[2]}",
            global_shape=piece.global_shape[1:],
            offset=piece.offset[1:],
            shape=piece.shape[1:],
            begin=piece.begin + expert * piece.strides[0],
            strides=piece.strides[1:],
        )


def _is_main(replica: Any, *, divided: bool = False) -> bool:
    """`divided`: by data parallelism, whose ranks, the last number, have others each."""
    if isinstance(replica, int):
        return divided or replica == 0
    return not any(replica[:-1] if divided else replica)


def _owner(owners: list[_Owner], firsts: list[int], shard: Any) -> Any:
    """Whose memory it is; None if it is no parameter's or buffer's."""
    address = _address(shard.data)
    at = bisect.bisect_right(firsts, address) - 1
    return owners[at] if at >= 0 and address < owners[at].end else None


def _piece(shard: Any, owners: list[_Owner], firsts: list[int], chunk: int, where: str) -> Piece:
    data = shard.data
    owner = _owner(owners, firsts, shard)
    if owner is None or data.dtype != owner.tensor.dtype or data.device != owner.tensor.device:
        raise Unsupported(
            f"{where}{shard.key}: what sharded_state_dict() has of it is no view of a parameter or buffer, so it would "
            "be as old as the plan"
        )
    one = (1,) * shard.prepend_axis_num
    return Piece(
        shard.key,
        dtype_name(data.dtype, shard.key),
        tuple(shard.global_shape),
        tuple(shard.global_offset),
        one + tuple(data.shape),
        chunk,
        owner.name,
        where + owner.name,
        (_address(data) - owner.first) // data.element_size(),
        (0,) * len(one) + tuple(data.stride()),
    )
