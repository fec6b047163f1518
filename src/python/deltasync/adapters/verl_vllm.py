"""verl's server adapter of vLLM, with updates that the workers of the server pull into their weights."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from verl.workers.rollout import vllm_rollout

from .._deadlines import left
from .servers import ANSWER_S, VLLM_GRACE_S, vllm_session
from .verl_in_place import WIRE_FORMAT, Update, refuse_changed


class ServerAdapter(vllm_rollout.ServerAdapter):  # type: ignore[misc]
    """A rollout worker's. The first of a replica talks to its server, which tells its workers."""

    _init: dict[str, Any] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        """What :func:`~deltasync.adapters.verl_in_place.refuse_changed` raises."""
        super().__init__(*args, **options)
        refuse_changed(self.config, self.model_config)

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **options: Any
    ) -> None:
        """Raises what the workers raise; all of them then have the version before, or the error says what they have."""
        if wire_format != WIRE_FORMAT:
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **options)
            return
        update = await anext(aiter(weights))
        if not self._ensure_server_handle():
            return
        await asyncio.to_thread(self._pull, update)
        await self.server_handle.clear_kv_cache.remote()
        if global_steps is not None:
            await self.server_handle.set_global_steps.remote(global_steps)

    def _pull(self, update: Update) -> None:
        end = time.monotonic() + update.timeout

        def call(method: str, **arguments: Any) -> None:
            answer = self.server_handle.collective_rpc.remote(method, kwargs=arguments)
            ray.get(answer, timeout=left(end) + VLLM_GRACE_S + ANSWER_S)

        # Its weights may be discarded before each update, and come back from a copy on the host.
        init = {"agent": update.agent, "token": update.token or None, "shadow": bool(self.config.free_cache_engine)}
        init |= update.options | {"deadline_ms": round(update.timeout * 1000)}
        if init != self._init:
            self._init = None
            call("init_weight_transfer_engine", init_info=init)
            self._init = init
        # A drafter of MTP has weights of the same checkpoint.
        mtp = self.config.mtp
        with_draft = mtp is not None and mtp.enable and mtp.enable_rollout and mtp.method == "mtp"
        for start in ("start_weight_update", *(["start_draft_weight_update"] if with_draft else [])):
            info = {"version": update.number, "deadline_ms": round(left(end) * 1000)}
            vllm_session(
                lambda start=start: call(start),  # type: ignore[misc]
                lambda info=info: call("update_weights", update_info=info),  # type: ignore[misc]
                lambda _label: call("finish_weight_update"),
                "",
            )
