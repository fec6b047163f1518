"""LoRA adapters: only the adapter's tensors are published, and a receiver's ``directory`` is one that peft loads.

manager = lora.manager(model, model.peft_config["default"].to_dict())
...
manager.offload(lora.tensors(model))           # after each optimizer step

receiver = deltasync.Receiver(endpoint, directory="adapter")
receiver.update()                              # adapter/current has adapter_model.safetensors, adapter_config.json
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from ..layouts import named_tensors
from ..trainer import WeightManager

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def tensors(model: Any, adapter: str = "default") -> dict[str, Any]:
    """The tensors of one adapter by the names that its file has: the model's own tensors, not copies.

    ``model``: a module that peft has wrapped, its state dict, pairs of (name, tensor), or what
    ``peft.get_peft_model_state_dict`` returns. Names as in a module lose the adapter's name
    (``….lora_A.default.weight`` → ``….lora_A.weight``), whole modules that are trained beside it the detour
    (``lm_head.modules_to_save.default.weight`` → ``lm_head.weight``); tensors of the base model and of other adapters
    are left out. InvalidArgument if nothing is left.
    """
    found: dict[str, Any] = {}
    for name, tensor in named_tensors(model):
        own = _file_name(name, adapter)
        if own is not None:
            found[own] = tensor
    if not found:
        raise InvalidArgument(f"lora: no tensor of an adapter '{adapter}' (no name has a lora_… in it)")
    return found


def manager(
    model: Any,
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    adapter: str = "default",
    **options: Any,
) -> WeightManager:
    """A :class:`WeightManager` of one adapter's layout. ``model`` as for :func:`tensors`; ``config`` is what
    adapter_config.json says, or the path of such a file or of the adapter's directory; ``options`` are
    WeightManager's. What it offloads is what :func:`tensors` returns. InvalidArgument: as there; a config without
    ``peft_type``."""
    files = {**options.pop("files", {}), CONFIG_FILE: _config(config)}
    return WeightManager(tensors(model, adapter), files=files, weights_file=WEIGHTS_FILE, **options)


def _file_name(name: str, adapter: str) -> str | None:
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part == "modules_to_save":
            return ".".join(parts[:i] + parts[i + 2 :]) if parts[i + 1 : i + 2] == [adapter] else None
        if not part.startswith("lora_"):
            continue
        rest = parts[i + 1 :]
        if rest[:1] == [adapter]:
            rest = rest[1:]
            if part == "lora_magnitude_vector":  # a module in memory, a tensor in the file
                rest = []
        elif rest not in ([], ["weight"], ["bias"]):
            return None  # another adapter's
        return ".".join(parts[: i + 1] + rest)
    return None


def _config(config: Mapping[str, Any] | str | os.PathLike[str]) -> bytes:
    if isinstance(config, Mapping):
        text = json.dumps(_plain(config), indent=2, sort_keys=True).encode()
    else:
        path = Path(config)
        text = (path / CONFIG_FILE if path.is_dir() else path).read_bytes()
    if not json.loads(text).get("peft_type"):
        raise InvalidArgument("lora: the config has no peft_type; give what adapter_config.json says")
    return text


def _plain(value: Any) -> Any:
    """peft's configs hold sets, enums and dtypes."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value))
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    return str(getattr(value, "value", value))
