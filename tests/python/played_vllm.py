"""deltasync's weight transfer engine of one rank where vLLM is not installed: of what it imports nothing is called."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any, Generic, TypeVar
from unittest.mock import MagicMock

import pytest
from deltasync.engines import vllm_sleep

Init, Update = TypeVar("Init"), TypeVar("Update")


class Base(Generic[Init, Update]):
    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.vllm_config, self.parallel_config = vllm_config, vllm_config.parallel_config
        self.model = self._default_model = model


def engine_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeltasyncWeightTransferEngine, until the test ends."""
    base = SimpleNamespace(WeightTransferEngine=Base, WeightTransferInitInfo=object, WeightTransferUpdateInfo=object)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)  # type: ignore[arg-type]
    for name in (
        "config",
        "model_executor.layers.attention",
        "model_executor.layers.quantization.base_config",
        "model_executor.model_loader.mtp_validation",
        "model_executor.model_loader.reload",
    ):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", MagicMock())
    for name in ("vllm_loader", "vllm_engine"):
        monkeypatch.setitem(sys.modules, f"deltasync.engines.{name}", MagicMock())  # which leaves with the test
        del sys.modules[f"deltasync.engines.{name}"]
    monkeypatch.setattr(vllm_sleep, "watch", lambda engine: None)
    return importlib.import_module("deltasync.engines.vllm_engine").DeltasyncWeightTransferEngine


def config(ranks: int, method: str | None = None) -> Any:
    """vLLM's, as far as it is looked at; ``method``: of speculation."""
    speculative = None if method is None else SimpleNamespace(method=method)
    return SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks), speculative_config=speculative)
