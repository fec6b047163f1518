"""vLLM's weight transfer back end ``deltasync``. docs/guides/vllm.md is the page for its users."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .._deadlines import left
from ..adapters.servers import NOT_INITIALISED, VLLM_GRACE_S
from ..coverage import some
from ..errors import Aborted, InvalidArgument
from . import vllm_sleep
from .covered import lacks
from .group import NOTHING, Group, Lacks, Outcome, Verdict, WeightsUnknown, Work, doubts
from .session import CommitReport, EngineReceiver, Staging
from .vllm_loader import VllmLoader

_log = logging.getLogger("deltasync.engines")

#: Methods of speculation (vllm.config.SpeculativeConfig.method) that guess from the text, without a draft model.
WITHOUT_DRAFT = frozenset({"ngram", "ngram_gpu", "suffix"})


@dataclass
class DeltasyncInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """``init_info`` of POST /init_weight_transfer_engine."""

    #: HOST:PORT of the trainer's agent, or several, of which the first that answers is taken.
    agent: str | list[str]
    #: Of every update, and of the connection.
    deadline_ms: int = 300_000
    #: File with the token that agent and receiver share, on this worker's host.
    token_file: str | None = None
    #: The token itself, from callers inside the cluster whose hosts share no file. Over HTTP a file is better.
    token: str | None = field(default=None, repr=False)
    #: Files of TLS on this worker's host: ``{"ca": ..., "cert": ..., "key": ..., "name": ...}``; see deltasync.Tls.
    tls: dict[str, Any] | None = None
    #: The agent of a draft model that is published apart; without it the draft is in the same checkpoint.
    draft_agent: str | list[str] | None = None
    #: Of updates that do not say: see DeltasyncUpdateInfo.
    verify: bool = True
    #: Patterns of names that need not match: tensors of the trainer that the engine has no place for, and weights of
    #: the engine that no tensor fills. All else has to, or init and update fail.
    ignore: list[str] = field(default_factory=list)
    #: Connections for data, and threads, for each rank; 0: as many as cores, 16 at most.
    streams: int = 4
    threads: int = 0
    #: Whether the host keeps a copy of the weights, from which they come back after a sleep of level 2.
    shadow: bool = False


@dataclass
class DeltasyncUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``update_info`` of POST /update_weights."""

    #: Number or label; without it the newest, which all ranks have to agree on.
    version: int | str | None = None
    #: Whether all live memory is read back after the commit, and the update fails where it is not the version's.
    #: Without it what init says.
    verify: bool | None = None
    #: Of this update; without it that of init.
    deadline_ms: int | None = None


class DeltasyncWeightTransferEngine(WeightTransferEngine[DeltasyncInitInfo, DeltasyncUpdateInfo]):  # type: ignore[misc]
    """One rank's. Pulls and verifies on threads of its own from init on; an update writes what is staged.

    Two phases: every rank stages and verifies, then all commit; if one fails, those that have committed roll it back
    (group.py), every rank raises, and no session stays open.
    """

    init_info_cls = DeltasyncInitInfo
    update_info_cls = DeltasyncUpdateInfo
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._init_info: DeltasyncInitInfo | None = None
        self._target: EngineReceiver | None = None
        self._draft: EngineReceiver | None = None
        self._ranks: Group | None = None
        self._updated = False  # in this session
        self._left_to_draft: dict[str, str] = {}  # as was said last
        #: What the last update did on this rank.
        self.last_report: CommitReport | None = None
        vllm_sleep.watch(self)

    # What Worker calls.

    def init_transfer_engine(self, init_info: DeltasyncInitInfo) -> None:
        """Connects, traces the loader, and begins to pull. Again: leaves the agent before."""
        self.shutdown()
        self._init_info = init_info
        try:
            self._target = self._make(self._default_model, self._default_model_config, init_info.agent, "")
            self._target.attach(init_info.deadline_ms / 1e3)
        except BaseException:
            self.shutdown()
            raise

    def start_weight_update(self) -> None:
        """Refuses before anything is pulled for it; if one rank does, all do, so that no session is open."""
        error: Exception | None = None
        self._updated = False
        try:
            self._active().check()
        except Exception as caught:
            error = caught
        verdict = self._group().vote(_words(error), timeout=self._deadline_s(), subject="start", doubt=self._doubts())
        self._require(verdict, error, "start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's own would synchronise a device that may not be there; the commit does where there is one."""
        error: Exception | None = None
        info, staging, subject, receiver = DeltasyncUpdateInfo(), None, "", None
        end = time.monotonic() + self._deadline_s()
        try:
            info = self.parse_update_info(update_info)
            end = time.monotonic() + (self._deadline_s() if info.deadline_ms is None else info.deadline_ms / 1e3)
            receiver = self._active()
            staging = receiver.prepare(info.version, timeout=left(end))
            subject = f"version {staging.wait(left(end))}"
        except Exception as caught:
            error = caught
        try:
            self.last_report = self._commit(error, receiver, staging, subject, info, end)
            self._updated = True
        finally:
            if receiver is not None:
                receiver.follow()

    def receive_weights(self, update_info: DeltasyncUpdateInfo) -> None:
        """The same, for callers of it."""
        self.update_weights(asdict(update_info))

    def finish_weight_update(self) -> None:
        """The update has done all. vLLM sets the caller's label when every rank has returned from here: without an
        update there is none to set, and the session stays open for one."""
        if not self._updated:
            raise InvalidArgument(
                "nothing was updated in this session, and the label stays as it is: POST /update_weights first"
            )

    def shutdown(self) -> None:
        for receiver in (self._target, self._draft):
            if receiver is not None:
                receiver.close()
        self._target = self._draft = None

    # Sleep.

    def before_sleep(self, level: int) -> None:
        """All ranks or none: vLLM does not wake those that sleep where another one could not."""
        error: Exception | None = None
        try:
            for receiver in (self._target, self._draft):
                if receiver is not None and level >= 2:
                    receiver.lose()
                elif receiver is not None:
                    receiver.pause()
        except Exception as caught:
            error = caught
        verdict = self._group().vote(_words(error), timeout=self._deadline_s(), subject=f"sleep of level {level}")
        self._require(verdict, error, "the sleep")

    def after_wake(self, level: int) -> None:
        for receiver in (self._target, self._draft):
            if receiver is not None and level >= 2:
                receiver.regain(f"level-{level} sleep discarded the weights")
            elif receiver is not None:
                receiver.follow()

    # Inside.

    def _commit(
        self,
        error: Exception | None,
        receiver: EngineReceiver | None,
        staging: Staging | None,
        subject: str,
        info: DeltasyncUpdateInfo,
        end: float,
    ) -> CommitReport | None:
        failed: Exception | None = None
        report: CommitReport | None = None
        committed: list[EngineReceiver] = []

        def commit() -> str | None:
            nonlocal failed, report
            assert receiver is not None and staging is not None
            try:
                report = receiver.commit(staging, timeout=left(end), verify=self._verifies(info))
                committed.append(receiver)
            except Exception as caught:
                failed = caught
            return _words(failed)

        # Those that are ready sooner wait for the others, whose deadline is the same and may have begun later.
        ending = self._group().update(
            _words(error),
            Work(commit, [] if receiver is None else [receiver], committed),
            subject=subject,
            end=end,
            margin=VLLM_GRACE_S,
            doubt=self._doubts(),
            lacks=NOTHING if receiver is None else self._lacks(receiver),
        )
        if ending.unwritten is not None:
            self._require(ending.unwritten, error, subject)
        if ending.kept:
            if receiver is not None and report is not None:
                _log.info("%s: version %s is %s: %s", receiver.name, report.version.number, report.mode, report.placed)
            return report
        if not ending.as_before:
            raise WeightsUnknown(ending.text) from failed
        raise failed or Aborted(ending.text)

    def _active(self) -> EngineReceiver:
        """Of the model that this session is about."""
        info = self._init_info
        if info is None or self._target is None:
            raise InvalidArgument(f"{NOT_INITIALISED}: POST /init_weight_transfer_engine first")
        if self.model is self._default_model:
            return self._target
        if self._draft is None or self._draft.model is not self.model:
            if self._draft is not None:
                self._draft.close()
            self._draft = self._make(self.model, self.model_config, info.draft_agent or info.agent, "-draft")
        return self._draft

    def _make(self, model: nn.Module, model_config: Any, agent: str | list[str], suffix: str) -> EngineReceiver:
        info = self._init_info
        assert info is not None
        parallel = self.parallel_config
        is_draft = model is not self._default_model
        return EngineReceiver(
            model,
            VllmLoader(self.vllm_config, model, model_config, self.device),
            agent,
            beside=self._default_model if is_draft else None,
            ignore=info.ignore,
            shared=parallel.world_size > 1 or (info.draft_agent is None and (is_draft or self._has_draft())),
            name=f"vllm-dp{parallel.data_parallel_index}-rank{parallel.rank}{suffix}",
            timeout=info.deadline_ms / 1e3,
            token_file=info.token_file,
            token=info.token or "",
            tls=info.tls,
            streams=info.streams,
            threads=info.threads,
            shadow=info.shadow,
        )

    def _lacks(self, receiver: EngineReceiver) -> Lacks:
        """A draft of the same checkpoint takes what the target model leaves over. Before its first session nothing is
        known to be lacking; so it is said what would be if none came."""
        if self._init_info is not None and self._init_info.draft_agent is not None:
            return lacks([receiver])
        if self._has_draft() and (self._draft is None or self._draft.trace is None):
            self._say_left_to_draft(receiver)
            return NOTHING
        return lacks([one for one in (self._target, self._draft) if one is not None])

    def _say_left_to_draft(self, receiver: EngineReceiver) -> None:
        if receiver is not self._target or receiver.untaken == self._left_to_draft:
            return
        self._left_to_draft = dict(receiver.untaken)
        if self._left_to_draft:
            _log.warning(
                "%s: %d tensor(s) of the trainer stay out of updates until the draft is updated, too: %s",
                receiver.name,
                len(self._left_to_draft),
                some(self._left_to_draft),
            )

    def _has_draft(self) -> bool:
        speculation = getattr(self.vllm_config, "speculative_config", None)
        return speculation is not None and getattr(speculation, "method", None) not in WITHOUT_DRAFT

    def _doubts(self) -> str:
        return doubts([one for one in (self._target, self._draft) if one is not None])

    def _require(self, verdict: Verdict, error: Exception | None, subject: str) -> None:
        """Before anything is written. Raises on every rank if one of them has an error: that one its own, unless some
        rank's weights are of no version, which is said by all."""
        if verdict.outcome is Outcome.UNKNOWN:
            raise WeightsUnknown(
                f"this rank has changed nothing; whether the others went on with {subject} is unknown: {verdict.reason}"
            )
        if not verdict.yes:
            if verdict.doubt:
                raise WeightsUnknown(f"nothing was changed on any rank: {verdict.reason}; {verdict.doubt}") from error
            raise error or Aborted(f"nothing was changed on any rank: {verdict.reason}")

    def _group(self) -> Group:
        if self._ranks is None:
            parallel = self.parallel_config
            store = None
            if parallel.world_size > 1:
                from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

                store = PrefixStore(f"deltasync/dp{parallel.data_parallel_index}", _get_default_store())
            self._ranks = Group(store, parallel.rank % parallel.world_size, parallel.world_size)
        return self._ranks

    def _verifies(self, info: DeltasyncUpdateInfo) -> bool:
        if info.verify is not None:
            return info.verify
        return self._init_info is None or self._init_info.verify

    def _deadline_s(self) -> float:
        return self._init_info.deadline_ms / 1e3 if self._init_info is not None else 60.0


def _words(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
