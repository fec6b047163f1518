"""The layout of a model from whatever describes it: a torch module, tensors, a HF directory, a layout."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from . import _native
from ._arrays import FLOATS, check_tensor, dtype_name
from ._native import Layout, Sidecar, TensorSpec
from .errors import InvalidArgument


def is_module(value: Any) -> bool:
    """Whether it is a torch module (or walks like one); imports no torch."""
    return hasattr(value, "named_parameters") and hasattr(value, "state_dict")


def module_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """Names and tensors of a torch module as its checkpoint has them: parameters and persistent buffers in the order of
    ``state_dict()``, the tensors themselves and not copies. One that occurs under several names (tied weights) comes
    under the first only, as in files that ``save_pretrained`` writes."""
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield name, tensor


def named_tensors(source: Any, what: str) -> Iterable[tuple[str, Any]]:
    """(name, tensor) pairs of a module, a mapping, or such pairs as they are. InvalidArgument names ``what`` if it is
    none of these."""
    if is_module(source):
        return module_tensors(source)
    if isinstance(source, Mapping):
        return source.items()
    if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
        kind = f"{type(source).__name__} {source!r:.40}"
        raise InvalidArgument(f"{what}: {kind} is neither a module, nor a mapping, nor pairs of (name, tensor)")
    pairs: Iterable[tuple[str, Any]] = source
    return pairs


def as_pair(item: Any, what: str) -> tuple[str, Any]:
    """InvalidArgument unless it is a pair of name and tensor."""
    try:
        name, tensor = item
    except (TypeError, ValueError):
        raise InvalidArgument(f"{what}: {type(item).__name__} {item!r:.40} is no pair of (name, tensor)") from None
    return name, tensor


def spec_of(name: str, tensor: Any, dtype: str | None = None) -> TensorSpec:
    """The spec of a tensor, whose ``shape`` is the whole one where it is sharded (DTensor).

    `dtype` (as safetensors spells it): of all floating tensors, which are cast to it."""
    check_tensor(tensor, name)
    own = dtype_name(tensor.dtype, name)
    return TensorSpec(name, dtype if dtype and own in FLOATS else own, [int(size) for size in tensor.shape])


def layout_of(
    source: Any,
    *,
    dtype: Any = None,
    tensor_parallel: int = 1,
    files: Mapping[str, bytes] | None = None,
    weights_file: str = "model.safetensors",
) -> tuple[Layout, Sidecar]:
    """Layout and sidecar of what `source` says.

    `source`: a Layout; a HF model directory (its files' split, config and tokenizer travel as sidecar); a torch module;
    a mapping or pairs of (name, tensor); TensorSpecs. Of tensors only name, dtype and shape are looked at.
    `dtype`: of all floating tensors in the layout (an fp32 trainer for bf16 rollouts, say).
    `tensor_parallel`: cuts tensors so that as many ranks get whole tiles each.
    `files`: further files of the model's directory, such as config.json. `weights_file`: what the one with the tensors
    is called there.
    """
    if isinstance(source, (str, os.PathLike)):
        if files or dtype is not None:
            raise InvalidArgument(f"{os.fspath(source)}: a directory brings its own files and dtypes")
        return _native.read_hf_directory(source, tensor_parallel)
    if isinstance(source, Layout):
        layout = source
    else:
        wanted = dtype_name(dtype) if dtype is not None else None
        specs = [
            item if isinstance(item, TensorSpec) else spec_of(*as_pair(item, "model"), wanted)
            for item in named_tensors(source, "model")
        ]
        layout = Layout.build(_native.even_cuts(specs, tensor_parallel))
    return layout, Sidecar.make(layout, file=weights_file, others=dict(files or {}))
