"""verl's rollouts whose engines pull by themselves: what ``in_place`` of the checkpoint engine hands to verl's server
adapters, which are replaced by those of :mod:`deltasync.adapters.verl_vllm` and ``verl_sglang``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import Unsupported

WIRE_FORMAT = "deltasync"
#: Of verl's table of rollouts.
ADAPTERS = {
    ("vllm", "async"): "deltasync.adapters.verl_vllm.ServerAdapter",
    ("sglang", "async"): "deltasync.adapters.verl_sglang.ServerAdapter",
}
REMEDY = "leave engine_kwargs.deltasync.in_place out"


@dataclass(frozen=True)
class Update:
    """One step's, for the server of a rollout worker."""

    #: HOST:PORT of the trainer's agent.
    agent: str
    token: str
    number: int
    #: In seconds, of all of it.
    timeout: float
    #: Further ones of the user, which the engine's plug-in knows.
    options: dict[str, Any]


class NoServerAdapter:
    """Of engines that do not pull by themselves in verl."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        raise Unsupported(
            f"in_place: rollout.name={config.name}: only vLLM's and SGLang's workers pull by themselves in verl", REMEDY
        )


def register() -> None:
    """In verl's table of rollouts, from which a worker makes its server adapter after its checkpoint engine."""
    from verl.workers.rollout import base

    none = dict.fromkeys(base._ROLLOUT_REGISTRY, "deltasync.adapters.verl_in_place.NoServerAdapter")
    base._ROLLOUT_REGISTRY.update(none | ADAPTERS)


def refuse_changed(config: Any, model_config: Any) -> None:
    """Of a rollout. Unsupported: verl changes what it hands on, so that the trainer's bytes are not the engine's."""
    lora = model_config.lora
    if config.quantization is not None or config.qat:
        what = "verl quantises weights on their way (rollout.quantization, rollout.qat)"
    elif (model_config.lora_rank > 0 or lora.get("rank", 0) > 0) and not lora.get("merge", False):
        what = "a LoRA adapter is handed on, not the weights"
    else:
        return
    raise Unsupported(f"in_place: {what}", REMEDY)
