"""The layout of a model from whatever describes it: a torch module, tensors, a HF directory, a layout."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from . import _checks, _native, hf
from ._arrays import check_dense, check_tensor, dtype_name, file_shape
from ._dtypes import cast_specs
from ._modules import check_not_flattened, checkpoint_name, checkpoint_names, is_module, is_other_state, unwrapped
from ._native import Layout, Sidecar, TensorSpec
from .errors import InvalidArgument


def module_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """Names and tensors of a torch module as its checkpoint has them: parameters and persistent buffers in the order of
    ``state_dict()``, the tensors themselves and not copies, without what torch.compile and DDP put into names. One that
    occurs under several names (tied weights) comes under the first only. A model of transformers: as
    :func:`deltasync.hf.tensors` has it. Unsupported: of FSDP1."""
    check_not_flattened(module)
    if hf.is_hf_module(module):
        yield from hf.tensors(module)
        return
    seen: set[int] = set()
    state = unwrapped(module).state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) in seen or is_other_state(name, tensor):
            continue
        seen.add(id(tensor))
        yield checkpoint_name(name), tensor


def module_stays(module: Any) -> bool:
    """Whether all that :func:`module_tensors` yields is memory of the module."""
    return not hf.is_hf_module(module) or hf.form_of(module)[0].views_only


def module_memory(module: Any, published: Iterable[str]) -> dict[str, Any]:
    """The module's tensors, in place, by the names that a trainer `published`: its own, tied ones under each of theirs,
    or, of a model of transformers, those of its checkpoint, whichever there are more of. What is no part of a parameter
    there (transformers computes it) is left out."""
    state = unwrapped(module).state_dict(keep_vars=True)
    own = {checkpoint_name(name): tensor for name, tensor in state.items()}
    if not hf.is_hf_module(module) or hf.has_adapters(module):
        return own
    form, parameters = hf.form_of(module)
    saved = {name: tensor for name, tensor in form.views(parameters).items() if hasattr(tensor, "data_ptr")}
    tied = {name: tensor for name, tensor in own.items() if name not in parameters}
    names = set(published)
    return own if len(names & own.keys()) > len(names & saved.keys()) else {**saved, **tied}


def _module_specs(module: Any) -> Iterable[tuple[str, Any]]:
    """As :func:`module_tensors`, of tensors that may have no memory."""
    check_not_flattened(module)
    return hf.form_of(module)[0].specs.items() if hf.is_hf_module(module) else module_tensors(module)


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
    """InvalidArgument unless it is a pair of name and tensor, and the name a text."""
    try:
        name, tensor = item
    except (TypeError, ValueError):
        raise InvalidArgument(f"{what}: {type(item).__name__} {item!r:.40} is no pair of (name, tensor)") from None
    return _checks.text(f"{what}: name", name), tensor


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """The spec of a tensor, whose ``shape`` is the whole one where it is sharded (DTensor)."""
    check_tensor(tensor, name)
    check_dense(tensor, name)
    dtype = dtype_name(tensor.dtype, name)
    return TensorSpec(name, dtype, file_shape(tensor.shape, dtype))


def _specs_of(source: Any) -> list[TensorSpec]:
    """Of a module, of given specs, or of pairs, whose tensors may be gone when the next comes."""
    if is_module(source):
        return [spec_of(name, tensor) for name, tensor in _module_specs(source)]
    given: list[TensorSpec] = []
    made: list[TensorSpec] = []
    for item in named_tensors(source, "model"):
        as_it_is: Any = item
        if isinstance(as_it_is, TensorSpec):
            given.append(as_it_is)
        else:
            made.append(spec_of(*as_pair(item, "model")))
    names = checkpoint_names(spec.name for spec in made)
    return given + [TensorSpec(name, spec.dtype, list(spec.shape)) for name, spec in zip(names, made, strict=True)]


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
    `dtype`: what tensors are cast to (an fp32 trainer for bf16 rollouts, say): a dtype, patterns of names with dtypes,
    or a function; see :class:`WeightManager`.
    `tensor_parallel`: cuts tensors so that as many ranks get whole tiles each.
    `files`: further files of the model's directory, such as config.json. `weights_file`: what the one with the tensors
    is called there.
    """
    parts = _checks.whole("tensor_parallel", tensor_parallel, 1)
    if isinstance(source, (str, os.PathLike)):
        if files or dtype is not None:
            raise InvalidArgument(f"{os.fspath(source)}: a directory brings its own files and dtypes")
        return _native.read_hf_directory(source, parts)
    if isinstance(source, Layout):
        if dtype is not None or parts != 1:
            what = "dtype=" if dtype is not None else "tensor_parallel="
            raise InvalidArgument(f"{what} beside a Layout, which says this itself", "give it where the layout is made")
        layout = source
    else:
        specs = _specs_of(source)
        specs = cast_specs(specs, dtype, lambda name, to: is_module(source) and hf.stays_float32(source, name, to))
        layout = Layout.build(_native.even_cuts(specs, parts))
    if not len(layout):
        raise InvalidArgument("model: it has no tensors", "give a module with parameters, or pairs of (name, tensor)")
    weights_file = _checks.text("weights_file", weights_file)
    return layout, Sidecar.make(layout, file=weights_file, others=_checked(files))


def _checked(files: Mapping[str, bytes] | None) -> dict[str, bytes]:
    if files is None:
        return {}
    _checks.of_type("files", files, Mapping, 'mapping of names to bytes, such as {"config.json": b"{}"}')
    return {
        _checks.text("files: name", name): _checks.of_type(f"files: {name}", contents, bytes, "bytes")
        for name, contents in files.items()
    }
