"""verl's rollouts whose engines pull by themselves: what ``in_place`` of the checkpoint engine hands to verl's server
adapter, which is replaced by the one of :mod:`deltasync.adapters.verl_vllm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import Unsupported

WIRE_FORMAT = "deltasync"


@dataclass(frozen=True)
class Update:
    """One step's, for the server of a rollout worker."""

    #: ``init_info`` of vLLM's weight transfer, which is told again when it is another one.
    init: dict[str, Any]
    number: int
    #: In seconds, of all of it.
    timeout: float


class NoServerAdapter:
    """Of engines that do not pull by themselves in verl."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        raise Unsupported(
            f"in_place: rollout.name={config.name}: only vLLM's workers pull by themselves in verl",
            "leave engine_kwargs.deltasync.in_place out",
        )


def register() -> None:
    """In verl's table of rollouts, from which a worker makes its server adapter after its checkpoint engine."""
    from verl.workers.rollout import base

    adapters = dict.fromkeys(base._ROLLOUT_REGISTRY, "deltasync.adapters.verl_in_place.NoServerAdapter")
    base._ROLLOUT_REGISTRY.update(adapters | {("vllm", "async"): "deltasync.adapters.verl_vllm.ServerAdapter"})
