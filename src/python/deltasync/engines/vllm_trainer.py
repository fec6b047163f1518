"""vLLM's trainer side: the back end ``deltasync`` of ``WeightTransferTrainerFactory``, which knows it once this is
imported. docs/guides/vllm.md is the page for its users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import distributed as dist
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from .._reports import OffloadReport
from ..adapters.servers import vllm_session
from ..agent import LISTEN
from ..errors import InvalidArgument, Unsupported
from ..tls import TlsLike
from ..trainer import WeightManager
from .vllm_plugin import BACKEND, register_trainer


@dataclass
class DeltasyncTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """``WeightTransferTrainerFactory.trainer_init(DeltasyncTrainerInitInfo(rank=rank), client=..., source=...)``

    ``rank``: of this trainer rank in ``process_group``: all trainer ranks, by default torch's default group, if there
    is one.
    ``listen``: HOST:PORT where the agent listens, port 0: a free one; beyond loopback it wants a token or TLS.
    ``advertise``: where vLLM's workers reach it, if not there.
    ``token_file``, ``tls``: files on the trainer's host, as of :class:`deltasync.WeightManager`.
    ``worker_token_file``, ``worker_tls``: what the workers are told, of files on their hosts; by default the same token
    file, and no TLS.
    ``manager``: further options of :class:`deltasync.WeightManager`: ``hf``, ``dtype``, ``shm_dir``, ...
    ``worker``: further ones of ``init_info`` of /init_weight_transfer_engine: ``verify``, ``ignore``, ``shadow``, ...
    ``timeout``: seconds for one version: for publishing it, and for the engine's update.
    """

    backend: ClassVar[str] = BACKEND

    listen: str = LISTEN
    advertise: str | None = None
    token_file: str | None = None
    tls: TlsLike = None
    worker_token_file: str | None = None
    worker_tls: Mapping[str, Any] | None = None
    manager: Mapping[str, Any] = field(default_factory=dict)
    worker: Mapping[str, Any] = field(default_factory=dict)
    process_group: Any = None
    timeout: float = 300.0


class DeltasyncTrainerWeightTransferEngine(TrainerWeightTransferEngine[DeltasyncTrainerInitInfo]):  # type: ignore[misc]
    """Publishes versions, of which vLLM's workers pull what changed.

    ``source``: of a ``ModuleSource`` every rank writes what it holds, and nothing is gathered; persistent buffers are
    published, too, as in a checkpoint. Any other one, a class derived from it among them, has to give rank 0 every
    tensor, by ``iter_full``.
    """

    init_info_cls = DeltasyncTrainerInitInfo

    @classmethod
    def trainer_init(
        cls,
        init_info: DeltasyncTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> DeltasyncTrainerWeightTransferEngine:
        """Called by every trainer rank. Starts the agent, and rank 0 tells vLLM of it.

        Errors: InvalidArgument (no source, or another rank than in the group), Unsupported (rank 0 does not get all
        tensors), and those of WeightManager; the client's."""
        if source is None:
            raise InvalidArgument(
                "trainer_init: no source", "give source=ModuleSource(model), whose tensors are sent each time"
            )
        made = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        made._open(init_info)
        return made

    def _open(self, info: DeltasyncTrainerInitInfo) -> None:
        self._timeout = info.timeout
        #: None: what the ranks hold is gathered by the source, and rank 0 writes it.
        self._manager: WeightManager | None = None
        #: Of the last version, on the ranks that write.
        self.report: OffloadReport | None = None
        self._is_open = True
        self._writes_own = type(self.source) is ModuleSource  # one derived from it may send something else
        group = _group_of(info) if self._writes_own else None
        if self._writes_own or self.is_sender:
            self._manager = WeightManager(
                self.source._module if self._writes_own else _described(self.source),
                listen=info.listen,
                advertise=info.advertise,
                token_file=info.token_file,
                tls=info.tls,
                process_group=group,
                timeout=info.timeout,
                **info.manager,
            )
        if self.is_sender:
            assert self._manager is not None
            try:
                self.client.init_weight_transfer_engine(_worker_info(info, self._manager.endpoints))
            except BaseException:
                self._manager.close()
                raise

    def send_weights(self) -> None:
        """Called by every trainer rank. Publishes the next version; then rank 0 has vLLM commit it, with its number as
        ``weight_version``. Pausing vLLM is the caller's. After an error the engine has the version before, or the
        client's answer says what it has; the next call sends all that changed since. InvalidArgument after
        shutdown()."""
        if not self._is_open:
            raise InvalidArgument("send_weights: shutdown() was called")
        if self._manager is None:
            for _ in self.source.iter_full():  # what rank 0 iterates needs us
                pass
            return
        self.report = self._manager.offload(None if self._writes_own else self.source.iter_full())
        if not self.is_sender:
            return
        self._manager.wait_ready()
        version = self.report.version.number
        info = {"version": version, "deadline_ms": round(self._timeout * 1000)}
        vllm_session(
            self.client.start_weight_update,
            lambda: self.client.update_weights(info),
            self.client.finish_weight_update,
            str(version),
        )

    def shutdown(self) -> None:
        """Ends the agent; the engine keeps what it has."""
        self._is_open = False
        if self._manager is not None:
            self._manager.close()
            self._manager = None


def _group_of(info: DeltasyncTrainerInitInfo) -> Any:
    """WeightManager's ``process_group``."""
    if not dist.is_available() or not dist.is_initialized():
        if info.rank != 0:
            raise InvalidArgument(f"trainer_init: rank {info.rank}, but torch.distributed is not initialised")
        return None
    rank = dist.get_rank(info.process_group)
    if rank != info.rank:
        raise InvalidArgument(
            f"trainer_init: rank {info.rank} is rank {rank} of the process group", "give the group of all trainer ranks"
        )
    return True if info.process_group is None else info.process_group


def _described(source: WeightSource) -> dict[str, torch.Tensor]:
    """Its tensors on the meta device."""
    elsewhere = [meta.name for meta in source.metadata if meta.owners is not None and 0 not in meta.owners]
    if elsewhere:
        raise Unsupported(
            f"rank 0 does not get {elsewhere[0]} and {len(elsewhere) - 1} more tensors from this source",
            "give a source that yields all tensors on rank 0, or publish with deltasync.WeightManager on every rank",
        )
    return {meta.name: torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in source.metadata}


def _worker_info(info: DeltasyncTrainerInitInfo, endpoints: list[str]) -> dict[str, Any]:
    given: dict[str, Any] = {"agent": endpoints, "deadline_ms": round(info.timeout * 1000)}
    token_file = info.worker_token_file or info.token_file
    if token_file is not None:
        given["token_file"] = str(token_file)
    if info.worker_tls is not None:
        given["tls"] = dict(info.worker_tls)
    return given | dict(info.worker)


register_trainer()
