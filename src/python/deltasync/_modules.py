"""Torch modules, and the names that wrappers of torch put before those of their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._arrays import FSDP1_REMEDY
from .errors import Unsupported

#: torch.compile's module, whose name stands in the names of what is in it.
_COMPILED = "_orig_mod"
#: The same of DistributedDataParallel and DataParallel.
_PARALLEL = "module."
#: What torch calls what a module saves beside its tensors (``get_extra_state``), which may be anything.
_EXTRA = "_extra_state"


def is_module(value: Any) -> bool:
    """Whether it is a torch module (or walks like one); imports no torch."""
    return hasattr(value, "named_parameters") and hasattr(value, "state_dict")


def unwrapped(model: Any) -> Any:
    """Without torch.compile's module and DDP's around it."""
    while is_module(model):
        inner = getattr(model, _COMPILED, None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if inner is None:
            break
        model = inner
    return model


def is_other_state(name: str, value: Any) -> bool:
    """Of an item of a module's ``state_dict()``: whether its module saves it beside its tensors, and it is none."""
    return name.rpartition(".")[2] == _EXTRA and not hasattr(value, "shape")


def check_not_flattened(module: Any) -> None:
    """Unsupported if FSDP1 has its parameters, or those of a part of it, in flat ones."""
    for name, part in module.named_modules() if hasattr(module, "named_modules") else ():
        kind = type(part)
        if kind.__name__ == "FullyShardedDataParallel" and kind.__module__.startswith("torch.distributed.fsdp"):
            raise Unsupported(f"{name or 'model'}: FSDP1 has its parameters as one FlatParameter", FSDP1_REMEDY)


def checkpoint_name(name: str) -> str:
    """Without what torch.compile put into it, wherever in the model."""
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def checkpoint_names(names: Iterable[str]) -> list[str]:
    """The same of all names of a model's state, and without what DDP put before each of them."""
    plain = [checkpoint_name(name) for name in names]
    if plain and all(name.startswith(_PARALLEL) for name in plain):
        plain = [name.removeprefix(_PARALLEL) for name in plain]
    return plain
