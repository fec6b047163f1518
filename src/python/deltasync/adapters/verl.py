"""verl over deltasync: a checkpoint engine that is registered as ``deltasync`` when this module is imported::

    actor_rollout_ref.rollout.checkpoint_engine.backend=deltasync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=deltasync.adapters.verl

Options go to ``checkpoint_engine.engine_kwargs.deltasync``; see :class:`DeltasyncCheckpointEngine`. Read from verl
0.9.1: per step ``prepare`` on all workers, ``build_topology``, ``init_process_group``, ``send_weights`` and
``receive_weights`` at the same time, ``finalize``.

Between hosts only what changed travels, and each worker keeps the whole model in host memory; verl then hands all of
its tensors to the inference engine, as with its other engines. ``in_place``: workers of vLLM or SGLang pull what
changed into their weights instead. The agent's address and token go with ``prepare``'s metadata.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from .._deadlines import left
from .._native import Version
from ..errors import InternalError, InvalidArgument
from ..rollout import Receiver
from ..tls import Tls, TlsLike
from . import verl_in_place
from .publisher import Publisher


@CheckpointEngineRegistry.register("deltasync")
class DeltasyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One worker's end: the trainer's first rank publishes, every rollout worker receives.

    ``model``: a HF model directory, for the layout; without it the first version's tensors say it (a host copy of all
    of them, once). ``dtype``: floating tensors are cast to it ("bfloat16"). ``host``: where the agent listens; by
    default this node's address in Ray. ``token_file``: by default a token is made. ``tls``: files (``cert``, ``key``,
    ``ca``, ...) that every worker's host has, each its own; ``receiver_tls``: other ones on rollout workers.
    ``device``: where rollout workers put a tensor before they hand it on; by default the host. ``timeout``: of one
    step's transfer, in seconds.
    ``in_place``: the engine's workers pull by themselves, and rollout workers hold no model. vLLM has to be started
    with deltasync as its weight transfer back end:
    ``rollout.engine_kwargs.vllm.weight_transfer_config.backend=deltasync``. SGLang finds its plug-in; a release that
    the plug-in is not for is refused.
    Further options are those of :class:`~deltasync.Receiver`; in place those of ``init_info`` (docs/guides/vllm.md) or
    of a request (docs/guides/sglang.md).
    ``bucket_size`` is not used: nothing is sent in buckets.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        model: str | None = None,
        dtype: str | None = None,
        host: str | None = None,
        token_file: str | None = None,
        tls: TlsLike = None,
        receiver_tls: TlsLike = None,
        device: str | None = None,
        in_place: bool = False,
        timeout: float = 600.0,
        **receiver: Any,
    ) -> None:
        self.is_master = is_master
        self.timeout = timeout
        self.device = device
        self.in_place = in_place
        if in_place:
            if device is not None:
                raise InvalidArgument("device= with in_place: no tensor is handed on")
            self.wire_format = verl_in_place.WIRE_FORMAT
            verl_in_place.register()
        self._publisher_options: dict[str, Any] = {
            "model": model,
            "dtype": dtype,
            "token_file": token_file,
            "tls": tls,
            "timeout": timeout,
        }
        self._host = host
        self._receiver_options = receiver | {"tls": tls if receiver_tls is None else receiver_tls}
        self._publisher: Publisher | None = None
        self._receiver: Receiver | None = None
        self._sender: dict[str, Any] | None = None

    def prepare(self) -> dict[str, Any]:
        """Of the first trainer rank: where its agent is, and the number of the version that comes. Of others: {}."""
        if not self.is_master:
            return {}
        if self._publisher is None:
            host = self._host or ray.util.get_node_ip_address().strip("[]")
            self._publisher = Publisher(host=host, name=f"verl-{os.getpid()}", **self._publisher_options)
        return {
            "endpoint": self._publisher.endpoint,
            "token": self._publisher.token,
            "number": self._publisher.next_number,
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        senders = [entry for entry in metadata[:actor_wg_world_size] if entry]
        if len(senders) != 1:
            raise InternalError(f"{len(senders)} of {actor_wg_world_size} trainer ranks are the master; one has to be")
        return {"sender": [None] * actor_wg_world_size}, {"sender": senders * rollout_world_size}

    def init_process_group(self, sender: dict[str, Any] | None) -> None:
        """``sender``: what the master's :meth:`prepare` returned; None on trainer ranks. A receiver is kept over steps,
        which is why later ones are deltas; one of another agent (a trainer that was started again) is replaced."""
        changed = _agent_of(sender) != _agent_of(self._sender)
        self._sender = sender
        if changed and self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publishes them as the next version, labelled with the step; other ranks only walk through the iterator, whose
        collectives need all. Returns metrics. It runs on the calling thread, as do the iterator's collectives."""
        if not self.is_master:
            for _ in weights:
                pass
            return {}
        if self._publisher is None:
            raise InvalidArgument("send_weights: prepare() comes first")
        end = time.monotonic() + self.timeout
        label = "" if global_steps is None else f"step-{global_steps}"
        report = self._publisher.offload(weights, label=label, timeout=left(end))
        await asyncio.to_thread(self._publisher.wait_ready, timeout=left(end))
        return {"deltasync/version": float(report.version.number)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Any, None]:
        """Waits for this step's version, and yields all tensors of it, verified. They are views of memory that the
        next step writes. Raises deltasync's errors; the version before is then the one that is kept.

        In place: yields what to tell the server, once."""
        sender = self._sender
        if sender is None:
            raise InvalidArgument("receive_weights: init_process_group() comes first")
        if self.in_place:
            options = {name: value for name, value in self._receiver_options.items() if name != "tls"}
            tls = Tls.of(self._receiver_options["tls"]).as_mapping()
            options |= {"tls": tls} if tls else {}
            yield verl_in_place.Update(sender["endpoint"], sender["token"], sender["number"], self.timeout, options)
            return
        version = await asyncio.to_thread(self._receive, sender["endpoint"], sender["token"], sender["number"])
        if global_steps is not None and version.label not in ("", f"step-{global_steps}"):
            raise InternalError(f"version {version.number} is {version.label}, not step {global_steps}")
        assert self._receiver is not None
        for name, tensor in self._receiver.tensors():
            yield name, tensor.to(self.device) if self.device else tensor

    def finalize(self) -> None:
        """Nothing: agent and receiver stay for the next step. :meth:`close` ends them."""

    def close(self) -> None:
        for end in (self._receiver, self._publisher):
            if end is not None:
                end.close()
        self._receiver = self._publisher = None

    def _receive(self, endpoint: str, token: str, number: int) -> Version:
        end = time.monotonic() + self.timeout
        if self._receiver is None:
            self._receiver = Receiver(endpoint, token=token, timeout=self.timeout, **self._receiver_options)
        return self._receiver.update(number, timeout=left(end)).version


def _agent_of(sender: dict[str, Any] | None) -> tuple[str, str] | None:
    """A trainer that was started again may have the port of the one before, but not its token."""
    return None if sender is None else (sender["endpoint"], sender["token"])
