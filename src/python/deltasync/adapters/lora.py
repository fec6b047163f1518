"""LoRA adapters: only the adapter's tensors are published, and a receiver's ``directory`` is one that peft loads.

manager = lora.manager(model)
...
manager.offload(lora.tensors(model))           # after each optimizer step

receiver = deltasync.Receiver(endpoint, directory="adapter")
receiver.update()                              # adapter/current has adapter_model.safetensors, adapter_config.json

slot = lora.AdapterSlot(VllmServer(url), "policy", endpoint, directory="/dev/shm/policy")
slot.update()                                  # requests of model "policy" get the newest adapter from here on
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .._deadlines import end_of, left
from .._modules import is_module, unwrapped
from .._native import Version
from ..errors import InternalError, InvalidArgument, IoError
from ..layouts import named_tensors
from ..rollout import Receiver
from ..trainer import WeightManager
from .servers import AdapterServer

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

#: How all names begin in a file; and what is behind ``lora_A`` and the like there: in a module the adapter's name
#: comes first.
_PREFIX = "base_model.model."
_IN_FILE: tuple[list[str], ...] = ([], ["weight"], ["bias"])


def tensors(model: Any, adapter: str = "default") -> dict[str, Any]:
    """The tensors of one LoRA adapter by the names that its file has: the model's own memory, no copies.

    ``model``: a module that has adapters of peft (wrapped by it, or by transformers' ``add_adapter``; compiled, or in
    DDP), of which peft says which tensors those are (``peft.get_peft_model_state_dict`` without the base model's
    embeddings). Or a state dict, or pairs of (name, tensor): what that function returned is taken whole; of a module's
    the names decide. They lose the adapter's name (``….lora_A.default.weight`` → ``….lora_A.weight``), whole modules
    that are trained beside it the detour (``lm_head.modules_to_save.default.weight`` → ``lm_head.weight``); all else is
    left out. InvalidArgument if nothing is left, or the module has no such adapter.
    """
    module = unwrapped(model)
    if _has_adapters(module):
        found = _tensors_of_peft(module, adapter)
    else:
        given = dict(named_tensors(model, "lora: model"))
        found = given if _of_file(given) else _of_module(given, adapter)
    if not found:
        raise InvalidArgument(f"lora: no tensor of an adapter '{adapter}' (no name has a lora_… in it)")
    return found


def manager(
    model: Any,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    adapter: str = "default",
    **options: Any,
) -> WeightManager:
    """A :class:`WeightManager` of one adapter's layout. ``model`` as for :func:`tensors`; ``config`` is what
    adapter_config.json says, or the path of such a file or of the adapter's directory; without it, what the module
    says. ``options`` are WeightManager's. What it offloads is what :func:`tensors` returns. InvalidArgument: as there;
    a config without ``peft_type``; one that trains what the names of a state dict do not tell (biases, tokens)."""
    module = unwrapped(model)
    if not is_module(model):
        model = dict(named_tensors(model, "lora: model"))  # pairs may come once only
    found = tensors(model, adapter)
    if config is not None:
        text = _config(config)
    elif _has_adapters(module):
        text = _config(module.peft_config[adapter].to_dict())
    else:
        raise InvalidArgument("lora: give the config; only a module that has adapters of peft brings its own")
    if not _has_adapters(module) and not _of_file(dict(named_tensors(model, "lora: model"))):
        _check_told_by_names(json.loads(text))
    files = {**options.pop("files", {}), CONFIG_FILE: text}
    return WeightManager(found, files=files, weights_file=WEIGHTS_FILE, **options)


class AdapterSlot:
    """Keeps one LoRA adapter of a running server at the trainer's versions. The base model stays as it is.

    It runs on the server's host: a receiver pulls what changed into model directories below ``directory``, and the
    server loads each version from there. ``server``: e.g. :class:`~deltasync.adapters.servers.VllmServer`, or
    :class:`~deltasync.adapters.servers.SglangServer` with ``pause_mode="abort"``; ``name``: as
    which requests name the adapter (their ``model``); ``endpoint``: the agent's; ``seen_as``: what the server, in a
    container of its own, calls ``directory``; ``timeout`` in seconds, of :meth:`update`; ``options`` are
    :class:`deltasync.Receiver`'s.

    The server must have room for all its adapters (vLLM: ``--max-cpu-loras``): one that it has dropped it loads again
    from where a waiting request was told, which may be a version before.
    """

    def __init__(
        self,
        server: AdapterServer,
        name: str,
        endpoint: str | list[str],
        *,
        directory: str | os.PathLike[str],
        seen_as: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        if not name:
            raise InvalidArgument("AdapterSlot: name: requests name the adapter by it; it may not be empty")
        self.server, self.name, self.timeout = server, name, timeout
        self._directory = Path(directory).absolute()
        self._seen_as = Path(seen_as if seen_as is not None else self._directory)
        self.receiver = Receiver(endpoint, directory=self._directory, timeout=timeout, **options)
        self._paused = False  # by update(), as far as is known

    def update(self, version: int | str | None = None, *, timeout: float | None = None) -> Version:
        """Brings the server to a version (its number or label; the newest by default), and returns which it has now.

        The server generates while the version is pulled and verified, and is paused while it loads. It is resumed in
        any case. What is raised leaves it with the adapter that it had; the next call tries again, also after a
        restart of the server. DeadlinePassed; NotFound: the server cannot load adapters, or does not see the directory;
        InternalError: its reason."""
        end = end_of("update", timeout, self.timeout)
        self.receiver.update(version, timeout=left(end))
        here = self._directory / "current"
        if not (here / CONFIG_FILE).exists():
            raise IoError(
                f"{self._directory}: somebody removed files of {self.receiver.version}", "make the slot again"
            )
        path = str(self._seen_as / here.resolve().relative_to(self._directory.resolve()))
        if self.server.loaded_adapter(self.name, left(end)) != path:
            self._load(path, end)
        elif self._paused:
            self._resume(end)
        assert self.receiver.version is not None
        return self.receiver.version

    def _load(self, path: str, end: float) -> None:
        self._paused = True  # even if the answer of pause() is lost
        try:
            self.server.pause(left(end))
            self.server.load_adapter(self.name, path, left(end))
            has = self.server.loaded_adapter(self.name, left(end))
        finally:
            self._resume(end)
        if has != path:
            raise InternalError(f"{self.name}: the server took {path}, but says that it has {has or 'no such adapter'}")

    def _resume(self, end: float) -> None:
        self.server.resume(max(1.0, left(end)))
        self._paused = False

    def close(self) -> None:
        """Leaves the agent. The server keeps the adapter."""
        self.receiver.close()

    def __enter__(self) -> AdapterSlot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_adapters(module: Any) -> bool:
    return is_module(module) and hasattr(module, "peft_config")


def _tensors_of_peft(module: Any, adapter: str) -> dict[str, Any]:
    import peft

    if adapter not in module.peft_config:
        raise InvalidArgument(f"lora: the module has no adapter '{adapter}', but {', '.join(module.peft_config)}")
    found = peft.get_peft_model_state_dict(module, adapter_name=adapter, save_embedding_layers=False)
    prefix = "" if isinstance(module, peft.PeftModel) else _PREFIX  # files have it in any case
    return {prefix + name: tensor for name, tensor in found.items()}


def _check_told_by_names(config: Mapping[str, Any]) -> None:
    """Tensors of the base model that are trained along are called as ever."""
    for option in ("bias", "trainable_token_indices"):
        value = config.get(option)
        if value and value != "none":
            raise InvalidArgument(
                f"lora: the config has {option}={value!r}, and names do not tell which tensors that is; give the "
                "module, or what peft.get_peft_model_state_dict returns"
            )


def _of_file(names: Iterable[str]) -> bool:
    """Whether names are those of a file that peft makes: none of them has the adapter's name in it."""
    names = list(names)
    rests = [_behind_lora(name.split(".")) for name in names]
    own = [rest for rest in rests if rest is not None]
    return bool(own) and all(rest in _IN_FILE for rest in own) and all(name.startswith(_PREFIX) for name in names)


def _behind_lora(parts: list[str]) -> list[str] | None:
    for i, part in enumerate(parts):
        if part.startswith("lora_"):
            return parts[i + 1 :]
    return None


def _of_module(given: Mapping[str, Any], adapter: str) -> dict[str, Any]:
    names = {name: _file_name(name, adapter) for name in given}
    return {own: given[name] for name, own in names.items() if own is not None}


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
        elif rest not in _IN_FILE:
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
