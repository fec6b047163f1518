"""Models of transformers as their checkpoints have them: the names, shapes and bits that ``save_pretrained`` writes.

The names of a module's parameters are others since transformers 5 (experts are stacked, projections fused), and engines
load the checkpoint's. :class:`~deltasync.WeightManager` publishes a transformers module so by itself. Imports torch and
transformers only when it is given a module of theirs.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._modules import checkpoint_name, unwrapped
from .errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from ._saved_form import SavedForm

#: The forms of models that are alive.
_FORMS: weakref.WeakKeyDictionary[Any, SavedForm] = weakref.WeakKeyDictionary()


def is_hf_module(module: Any) -> bool:
    """Whether it is a model of transformers (5 or later), or is wrapped around one (compiled, in DDP)."""
    transformers = sys.modules.get("transformers")
    if transformers is None or int(transformers.__version__.split(".")[0]) < 5:
        return False
    return isinstance(unwrapped(module), transformers.PreTrainedModel)


def has_adapters(module: Any) -> bool:
    """Whether it has adapters of peft, of which alone ``save_pretrained`` would write something."""
    return bool(getattr(unwrapped(module), "_hf_peft_config_loaded", False))


def tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of a transformers model, in names, shapes, dtypes and bits as ``save_pretrained`` writes them.

    Nearly all are views of the model's memory. What the conversion computes is made group by group, so use one before
    you ask for the next. Of a DTensor (FSDP2) it is what :meth:`WeightManager.offload` takes on all ranks: a DTensor, a
    part of one that has each rank's share of it, or, where the conversion computes, the whole tensor, which is gathered
    on all ranks. Further names of tied weights are left out.

    InvalidArgument: no model of transformers 5, or one with adapters of peft. Unsupported: what it cannot save.
    """
    form, state = form_of(model)
    return form.tensors(unwrapped(model), state)


def form_of(model: Any) -> tuple[SavedForm, dict[str, Any]]:
    """How the model is saved, and its parameters and buffers for :meth:`SavedForm.tensors`."""
    if not is_hf_module(model):
        raise InvalidArgument(f"hf: a {type(model).__name__} is no model of transformers (5 or later)")
    from ._saved_form import SavedForm

    module = unwrapped(model)
    state = _saved_state(module)
    form = _FORMS.get(module)
    if form is None or not form.fits(state):
        form = _FORMS[module] = SavedForm(module, state)
    return form, state


def stays_float32(model: Any, name: str, dtype: str) -> bool:
    """Whether the model's class says that this tensor stays in float32 where the others are of ``dtype``."""
    module = unwrapped(model)
    kept = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ()) if dtype in ("F16", "BF16") else set()
    if dtype == "F16":
        kept |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return any(re.search(rf"(^|\.){part}($|\.)", name) for part in kept)


def ignores_checkpoint_tensor(model: Any, name: str) -> bool:
    """Whether the model's class says that it leaves this tensor of a checkpoint alone (layers that only predict)."""
    patterns = getattr(unwrapped(model), "_keys_to_ignore_on_load_unexpected", None) if is_hf_module(model) else None
    return any(re.search(pattern, name) for pattern in patterns or ())


def _saved_state(module: Any) -> dict[str, Any]:
    """What is saved, by the module's own names, tied weights once."""
    if has_adapters(module):
        raise InvalidArgument(
            "hf: of a model with adapters of peft only these are saved",
            "publish them with deltasync.adapters.lora, or merge them first",
        )
    quantizer = getattr(module, "hf_quantizer", None)
    state = quantizer.get_state_dict_and_metadata(module)[0] if quantizer is not None else None
    if state is None:
        state = module.state_dict(keep_vars=True)
    ignored = set(module._keys_to_ignore_on_save or ())
    named = {checkpoint_name(name): tensor for name, tensor in state.items()}
    left_out = _tied(module, named)
    return {name: tensor for name, tensor in named.items() if name not in ignored and name not in left_out}


def _tied(module: Any, state: dict[str, Any]) -> set[str]:
    """The further names of tensors that have several: those that the model's class says, so that one stays."""
    same: dict[int, list[str]] = {}
    for name, tensor in state.items():
        same.setdefault(id(tensor), []).append(name)
    twins = [names for names in same.values() if len(names) > 1]
    if not twins:
        return set()
    declared = [
        f"{path}.{key}" if path else key
        for path, part in module.named_modules()
        for key in getattr(part, "_tied_weights_keys", None) or ()
    ]
    left_out: set[str] = set()
    for names in twins:
        further = [name for name in sorted(names) if any(re.search(key, name) for key in declared)]
        further = further[: len(names) - 1]
        if len(further) < len(names) - 1:
            raise Unsupported(
                f"{', '.join(names)}: one tensor, of which the model's class does not say that it is tied",
                "save_pretrained refuses it, too; give the tensors as a dict with the names that you want",
            )
        left_out.update(further)
    return left_out
