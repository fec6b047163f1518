"""vLLM's loader of one model, as :class:`deltasync.engines.loader.EngineLoader`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from . import vllm_sleep
from .loader import Weights


class VllmLoader:
    """Of the target model or of a draft."""

    def __init__(self, vllm_config: Any, model: nn.Module, model_config: Any, device: torch.device) -> None:
        self._vllm_config, self._model_config, self._device = vllm_config, model_config, device
        self._model: Any = model

    def load_traced(self, weights: Weights) -> Any:
        with set_current_vllm_config(self._vllm_config), disable_mtp_completeness_check():
            return self._model.load_weights(weights)

    def reload(self, weights: Weights) -> None:
        """By layerwise reload: parameters are built again beside the live ones, loaded, processed, and copied to where
        the live ones are. It is ended in any case, so that no parameter stays on the meta device."""
        with set_current_vllm_config(self._vllm_config), disable_mtp_completeness_check(), torch.no_grad():
            initialize_layerwise_reload(self._model)
            try:
                self._model.load_weights(weights)
            finally:
                finalize_layerwise_reload(self._model, self._model_config)

    def reload_modules(self) -> Collection[str]:
        """Quantised modules, and those that an attention layer derives its own tensors from (MLA's kv_b_proj), which
        layerwise reload makes again."""
        found: set[str] = set()
        for path, module in self._model.named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and not type(method).__name__.startswith("Unquantized"):
                found.update(name for name, _ in module.named_modules(prefix=path))
            if is_deferred_attention_layer(module):
                for child_path, child in module.named_modules(prefix=path):
                    if child is not module and any(True for _ in child.parameters(recurse=False)):
                        found.add(child_path)
        # A module may have several names, and a trace knows it by its first.
        first = {id(module): path for path, module in reversed(list(self._model.named_modules()))}
        modules = dict(self._model.named_modules(remove_duplicate=False))
        return sorted({first[id(modules[path])] for path in found})

    def refusal(self) -> str | None:
        config = self._vllm_config
        if vllm_sleep.level():
            return "the weights sleep: wake them first (POST /wake_up?tags=weights), then update, then wake kv_cache"
        if getattr(config, "lora_config", None) is not None:
            return "LoRA is enabled: it wraps the layers that would be written; start vLLM without --enable-lora"
        if config.parallel_config.enable_eplb:
            return "EPLB moves experts between ranks behind deltasync's back; start vLLM without --enable-eplb"
        if str(config.load_config.load_format) == "ipc_cache":
            return "--load-format ipc_cache: the weights are shared with other engines, which would be written too"
        return None

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
