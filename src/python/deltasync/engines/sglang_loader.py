"""SGLang's model of one runner, as deltasync's engine session needs it. Read from sglang 0.5.23."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from .loader import Weights


class SglangLoader:
    """An ``EngineLoader`` (loader.py) over a runner's ``WeightUpdater``. ``busy``: why the scheduler cannot take
    an update now, or None."""

    def __init__(self, updater: Any, busy: Callable[[], str | None]) -> None:
        self._updater = updater
        self._busy = busy

    def load_traced(self, weights: Weights) -> Any:
        return self._updater.get_model().load_weights(weights)

    def reload(self, weights: Weights) -> None:
        """As begin, load and end of a weight session do: what was packed in place is restored first, and every module
        processed afterwards."""
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        updater = self._updater
        updater.begin_weight_update()
        with set_default_torch_dtype(updater.model_config.dtype):
            updater.get_model().load_weights(weights)
        updater.end_weight_update(run_post_load=False)

    def reload_modules(self) -> Collection[str]:
        """MLA's absorbed projections are made from ``kv_b_proj`` by the model's own ``load_weights``."""
        modules = self._updater.get_model().named_modules()
        return [f"{name}.kv_b_proj" for name, module in modules if getattr(module, "w_kc", None) is not None]

    def refusal(self) -> str | None:
        from sglang.srt.model_executor.model_runner_components import weight_updater
        from sglang.srt.runtime_context import get_exec

        busy = self._busy()
        if busy is not None:
            return busy
        try:
            self._updater._assert_weight_cache_inactive("a deltasync update")
        except RuntimeError as error:
            return str(error)
        model = self._updater.get_model()
        reason = weight_updater._unsupported_derived_weight_cache_error(model)
        if reason is not None:
            return str(reason)
        if get_exec().moe.enable_eplb:
            return "EPLB moves experts between updates: start without --enable-eplb, or update by another load_format"
        for name, module in model.named_modules():
            if type(module).__name__.endswith("WithLoRA"):
                return f"{name} is wrapped for LoRA: start without --enable-lora, or update by another load_format"
        return None

    def synchronize(self) -> None:
        import torch

        if self._updater.device != "cpu":
            torch.get_device_module(self._updater.device).synchronize()
