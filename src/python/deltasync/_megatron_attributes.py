"""Where a parameter's elements lie by its attributes: of modules of Megatron's trainers that have no
``sharded_state_dict()``.

They do not tell what dimension 0 is made of, beyond equal parts; which experts are here; nor, of a parameter without
them, whether it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import Unsupported

_REMEDY = "give the module that holds it a sharded_state_dict()"


@dataclass(frozen=True, slots=True)
class Shard:
    """What is asked of Megatron's ShardedTensor."""

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    #: Of pipeline, tensor and data parallelism.
    replica_id: tuple[int, int, int]
    prepend_axis_num: int = 0

    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.global_offset), tuple(self.data.shape)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of its kind, and how many there are."""

    tensor: int
    tensors: int
    replica: int
    stages: int

    @staticmethod
    def here() -> Ranks:
        """Unsupported: there are several processes, and Megatron does not know which they are."""
        import torch.distributed as dist

        try:
            from megatron.core import parallel_state

            return Ranks(
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_data_parallel_rank(with_context_parallel=True),
                parallel_state.get_pipeline_model_parallel_world_size(),
            )
        except (ImportError, AssertionError) as error:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise Unsupported("model_chunks: megatron.core.parallel_state is not initialized", _REMEDY) from error
            return Ranks(0, 1, 0, 1)


def shards_of(
    module: Any, ask: Callable[[Any, str], Iterable[Any]], ranks: Ranks, prefix: str = ""
) -> Iterator[Shard | Any]:
    """Of a module, and all in it. `ask`: of one with a ``sharded_state_dict()``, by that; its names begin so."""
    if hasattr(module, "sharded_state_dict"):
        found = list(ask(module, prefix))
        if next(module.children(), None) is None:
            _check_that_both_agree(module, prefix, found, ranks)
        yield from found
        return
    for name, tensor in _own(module):
        yield from by_attributes(prefix + name, tensor, ranks)
    for name, child in module.named_children():
        yield from shards_of(child, ask, ranks, f"{prefix}{_number(child, name, prefix, ranks)}.")


def by_attributes(key: str, tensor: Any, ranks: Ranks) -> list[Shard]:
    if getattr(tensor, "allreduce", True) is False:
        raise Unsupported(f"{key}: an expert's, and its attributes do not say of which", _REMEDY)
    if ranks.tensors == 1 or not getattr(tensor, "tensor_model_parallel", False):
        return [Shard(key, tensor, tuple(tensor.shape), (0,) * tensor.ndim, (0, ranks.tensor, ranks.replica))]
    dim, stride, shape = tensor.partition_dim, tensor.partition_stride, list(tensor.shape)
    sizes = getattr(tensor, "partition_sizes", None) or [shape[dim] // stride] * stride
    shape[dim] *= ranks.tensors
    found, begin = [], 0
    for size, part in zip(sizes, tensor.split(list(sizes), dim), strict=True):
        offset = [0] * tensor.ndim
        offset[dim] = begin * ranks.tensors + ranks.tensor * size
        found.append(Shard(key, part, tuple(shape), tuple(offset), (0, 0, ranks.replica)))
        begin += size
    return found


def _own(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(recurse=False)
    for name, tensor in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, tensor


def _number(child: Any, name: str, prefix: str, ranks: Ranks) -> str:
    """A layer is known by its number in the model, which it has from 1 on."""
    if not name.isdecimal():
        return name
    if hasattr(child, "layer_number"):
        return str(child.layer_number - 1)
    if ranks.stages > 1:
        raise Unsupported(f"{prefix}{name}: it has no layer_number, so which one it is in the pipeline is not known")
    return name


def _check_that_both_agree(module: Any, prefix: str, found: list[Any], ranks: Ranks) -> None:
    """One layer knows nothing of what its rows are to the module around it, whose attributes may."""
    for name, tensor in _own(module):
        if not hasattr(tensor, "tensor_model_parallel"):
            continue
        said = sorted(shard.box() for shard in by_attributes(prefix + name, tensor, ranks))
        asked = sorted(
            (tuple(shard.global_offset), tuple(shard.data.shape)) for shard in found if shard.key == prefix + name
        )
        if asked and asked != said:
            raise Unsupported(
                f"{prefix}{name}: by its attributes this rank has {said} of it (offset, shape), by "
                f"sharded_state_dict() {asked}",
                _REMEDY,
            )
