"""verl's server adapter of SGLang, with updates that the ranks of the server pull into their weights."""

from __future__ import annotations

import asyncio
from typing import Any

import sglang
from verl.workers.rollout.sglang_rollout import sglang_rollout

from ..engines import sglang_plugin
from ..errors import Unsupported
from .servers import SglangServer, StaleCache
from .verl_in_place import REMEDY, WIRE_FORMAT, Update, refuse_changed


class ServerAdapter(sglang_rollout.ServerAdapter):  # type: ignore[misc]
    """A rollout worker's. The first of a server talks to it, and it tells its ranks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """What :func:`~deltasync.adapters.verl_in_place.refuse_changed` raises; Unsupported: a SGLang that the plug-in
        is not for, such as the one that verl's extra ``sglang`` names."""
        super().__init__(*args, **options)
        lacks = sglang_plugin.missing()
        if lacks:
            raise Unsupported(f"in_place: SGLang {sglang.__version__} has no {lacks}, where deltasync comes in", REMEDY)
        refuse_changed(self.config, self.model_config)

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **options: Any
    ) -> None:
        """Raises what the server says; all ranks then have the version before, or the error says what they have."""
        if wire_format != WIRE_FORMAT:
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **options)
            return
        update = await anext(aiter(weights))
        await self._init_server_adapter()
        if self._engine is None:  # another worker talks to the server
            return
        try:
            await asyncio.to_thread(self._pull, update)
        except StaleCache:
            if not await self._engine.flush_cache():  # verl's tries go on for a while
                raise
        if global_steps is not None:
            await self.server_actor.set_global_steps.remote(global_steps)

    def _pull(self, update: Update) -> None:
        at = self._engine.server_args
        server = SglangServer(f"http://{at.host}:{at.port}", model_path=self.model_config.local_path)
        server.tell({"endpoints": update.agent, "token": update.token} | update.options)
        server.update(update.number, update.timeout)
