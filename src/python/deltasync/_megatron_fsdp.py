"""Megatron-FSDP's parameters: DTensors of which each rank has some rows, as many as its share of a bucket holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._slices import is_dtensor
from .errors import InvalidArgument, LayoutMismatch, Unsupported

#: How Megatron calls the dimension of its meshes whose ranks have other parts of a parameter's whole.
_TENSOR_PARALLEL = "tp"
#: What modules ask of their parameters when they say where these lie.
_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_sizes", "allreduce", "shared")


@dataclass(frozen=True, slots=True)
class Rows:
    """What this rank has, and no rank before it, of a parameter's dimension 0."""

    begin: int
    end: int


def is_divided(tensor: Any) -> bool:
    """Whether it is a parameter of Megatron-FSDP, which knows the one that it was made of."""
    return is_dtensor(tensor) and getattr(tensor, "orig_param", None) is not None


def local(tensor: Any) -> Any:
    """The memory that this rank has of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def shares(modules: Iterable[Any]) -> list[list[Any]]:
    """For the other ranks (JSON): of each such parameter its module's number, its name, the rows that are here, those
    that there are, and the ranks that have them, in their order."""
    return [
        [number, name, len(local(tensor)), [*tensor.orig_param.shape, 1][0], _ranks(tensor, name)]
        for number, module in enumerate(modules)
        for name, tensor in module.named_parameters()
        if is_divided(tensor)
    ]


def _ranks(tensor: Any, name: str) -> list[int]:
    """None where another rank has the same."""
    from torch.distributed.tensor import Replicate

    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    at = list(mesh.get_coordinate())
    cut = []
    for dim, placement in enumerate(tensor.placements):
        if dim < len(names) and names[dim] == _TENSOR_PARALLEL:
            continue
        if isinstance(placement, Replicate):
            if at[dim]:
                return []
        elif getattr(placement, "dim", None) == 0:
            cut.append(dim)
        else:
            raise Unsupported(f"{name}: placed as {tensor.placements}; of Megatron-FSDP only rows are taken")
    if len([dim for dim in cut if mesh.size(dim) > 1]) > 1:
        raise Unsupported(
            f"{name}: placed as {tensor.placements}, rows of rows", 'outer_dp_sharding_strategy="no_shard" has none'
        )
    for dim in cut:
        at[dim] = slice(None)
    ranks: list[int] = mesh.mesh[tuple(at)].flatten().tolist()
    return ranks


def rows_of(said: Sequence[Sequence[Any]], rank: int, numbers: Mapping[int, int]) -> dict[tuple[int, str], Rows]:
    """Of this rank's parameters, by module and name. `said`: what shares() is on each rank. `numbers`: where in it each
    process is, by its rank of all."""
    counts = [{(number, name): count for number, name, count, *_ in one} for one in said]
    found = {}
    for number, name, count, whole, ranks in said[rank]:
        if missing := [other for other in ranks if other not in numbers]:
            raise InvalidArgument(f"process_group: rank {missing[0]} has rows of {name}, and is not in it")
        each = [counts[numbers[other]].get((number, name), 0) for other in ranks]
        if ranks and sum(each) != whole:
            raise LayoutMismatch(f"{name}: ranks {ranks} have {each} rows, and it has {whole}")
        begin = sum(each[: [numbers[other] for other in ranks].index(rank)]) if ranks else 0
        found[number, name] = Rows(begin, begin + (count if ranks else 0))
    return found


@contextlib.contextmanager
def undivided(module: Any) -> Iterator[None]:
    """The module with whole parameters that have no memory: for what it says of their shapes."""
    import torch

    swapped = []
    whole: dict[int, Any] = {}
    for inner in module.modules():
        for name, tensor in inner._parameters.items():
            if tensor is not None and is_divided(tensor):
                swapped.append((inner, name, tensor))
                if id(tensor) not in whole:
                    empty = torch.empty(tensor.orig_param.shape, dtype=tensor.dtype, device="meta")
                    made = whole[id(tensor)] = torch.nn.Parameter(empty, requires_grad=False)
                    for said in _ATTRIBUTES:
                        if hasattr(tensor.orig_param, said):
                            setattr(made, said, getattr(tensor.orig_param, said))
    try:
        for inner, name, tensor in swapped:
            inner._parameters[name] = whole[id(tensor)]
        yield
    finally:
        for inner, name, tensor in swapped:
            inner._parameters[name] = tensor
