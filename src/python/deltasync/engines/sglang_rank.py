"""What one rank of a SGLang replica does for an update, in step with the other ranks.

Two phases. Every rank stages and verifies the version for each of its models (target and drafts), then all vote
(group.py); if one cannot, nothing is written anywhere. Then every rank writes, and all vote again; if one failed, the
others roll theirs back. Only if all have written does SGLang record the version and flush its cache.

All of it runs on the scheduler's thread, between two steps; the pulling does not.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._deadlines import left
from ..agent import read_token
from ..errors import InvalidArgument
from ..tls import Tls
from .covered import lacks
from .group import REMEDY, Ending, Group, Outcome, Verdict, Work, doubts
from .session import CONNECTING, CommitReport, EngineReceiver, Staging
from .sglang_loader import SglangLoader

_log = logging.getLogger("deltasync.sglang")

#: Other ranks may need so much longer for their part of a phase than this one's deadline says.
_MARGIN_S = 10.0
#: That a starting server waits for an agent.
_START_S = 5.0


@dataclass(frozen=True)
class Settings:
    """From the environment (``DELTASYNC_ENDPOINTS``: HOST:PORT[,HOST:PORT...], ``DELTASYNC_TOKEN_FILE`` or
    ``DELTASYNC_TOKEN``, ``DELTASYNC_TLS_CA``, ``_CERT``, ``_KEY`` and ``_NAME``, ``DELTASYNC_TIMEOUT`` in seconds,
    ``DELTASYNC_VERIFY=0``, ``DELTASYNC_IGNORE``: patterns with commas between them, ``DELTASYNC_KEEP_DRAFT=1``,
    ``DELTASYNC_SHADOW=1``), or a request's ``{"manifest": {"deltasync": {"endpoints": [...], "token": "...", "tls":
    {"ca": ..., "cert": ..., "key": ..., "name": ...}, "timeout": 60, "verify": false, "ignore": [...], "keep_draft":
    true, "shadow": true}}}``."""

    endpoints: tuple[str, ...] = ()
    token: str = ""
    timeout: float = 60.0
    #: Whether all live memory is read back after each commit, and the update fails where it is not the version's.
    verify: bool = True
    #: Patterns of names that need not match: tensors of the trainer, or weights of the engine.
    ignore: tuple[str, ...] = ()
    #: Whether draft models keep the weights that they were started with.
    keep_draft: bool = False
    #: Files on this host.
    tls: Tls = Tls()
    #: Whether the host keeps a copy of the weights, from which they come back after a release without a backup.
    shadow: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """InvalidArgument names a variable that cannot be what it says; what :func:`read_token` raises."""
        token = environment.get("DELTASYNC_TOKEN", "")
        if environment.get("DELTASYNC_TOKEN_FILE"):
            token = read_token(environment["DELTASYNC_TOKEN_FILE"])
        return cls(
            tuple(part.strip() for part in environment.get("DELTASYNC_ENDPOINTS", "").split(",") if part.strip()),
            token,
            _seconds(environment, "DELTASYNC_TIMEOUT", 60.0),
            _flag(environment, "DELTASYNC_VERIFY", True),
            tuple(part.strip() for part in environment.get("DELTASYNC_IGNORE", "").split(",") if part.strip()),
            _flag(environment, "DELTASYNC_KEEP_DRAFT", False),
            Tls.of(
                {part: environment.get(f"DELTASYNC_TLS_{part.upper()}", "") for part in ("cert", "key", "ca", "name")}
            ),
            _flag(environment, "DELTASYNC_SHADOW", False),
        )

    def with_request(self, manifest: Mapping[str, Any] | None) -> Settings:
        """InvalidArgument: an option that does not exist, or a value that is none of its kind."""
        given = (manifest or {}).get("deltasync", {})
        if not isinstance(given, Mapping):
            raise InvalidArgument(f"manifest.deltasync: {given!r} is no object")
        given = dict(given)
        for option, value in given.items():
            good = _GOOD.get(option)
            if good is None:
                raise InvalidArgument(f"manifest.deltasync: there is no option '{option}', but {', '.join(_GOOD)}")
            if not good(value):
                raise InvalidArgument(f"manifest.deltasync: {option} cannot be {value!r}")
        for option in ("endpoints", "ignore"):
            if option in given:
                given[option] = tuple(given[option])
        if "tls" in given:
            given["tls"] = Tls.of(given["tls"], "manifest.deltasync.tls")
        return replace(self, **given)


_GOOD: dict[str, Callable[[Any], bool]] = {
    "endpoints": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "ignore": lambda value: isinstance(value, list) and all(isinstance(one, str) and one for one in value),
    "keep_draft": lambda value: isinstance(value, bool),
    "shadow": lambda value: isinstance(value, bool),
    "tls": lambda value: isinstance(value, Mapping),
    "token": lambda value: isinstance(value, str),
    "timeout": lambda value: isinstance(value, (int, float)) and type(value) is not bool and 0 < value < 1e6,
    "verify": lambda value: isinstance(value, bool),
}


def _flag(environment: Mapping[str, str], variable: str, default: bool) -> bool:
    said = environment.get(variable) or str(int(default))
    if said not in ("0", "1"):
        raise InvalidArgument(f"{variable}={said!r:.40} is neither 0 nor 1")
    return said == "1"


def _seconds(environment: Mapping[str, str], variable: str, default: float) -> float:
    said = environment.get(variable) or str(default)
    try:
        value = float(said)
    except ValueError:
        value = 0.0
    if not _GOOD["timeout"](value):
        raise InvalidArgument(f"{variable}={said!r:.40} is no number of seconds above 0", "such as 60")
    return value


@dataclass(frozen=True)
class Staged:
    """A rank's part of the first phase: what is ready, or why nothing is."""

    subject: str = ""
    error: str | None = None


@dataclass
class Target:
    """One runner's model."""

    role: str
    updater: Any
    receiver: EngineReceiver
    staging: Staging | None = None
    report: CommitReport | None = None


class RankUpdates:
    """Of one scheduler process. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, manager: Any, settings: Settings) -> None:
        self.manager = manager
        self.settings = settings
        self.targets: list[Target] = []
        self._ranks: Group | None = None
        #: Every rank gets every request, in the same order: rounds of votes have this number in their names.
        self._requests = 0

    def start(self) -> None:
        """Begins to connect, if it is known where to."""
        if self.targets or not self.settings.endpoints:
            return
        runners = [
            (role, runner)
            for role, runner in self.manager._select_runners()
            if role == "target" or not self.settings.keep_draft
        ]
        models = {role: runner.weight_updater.get_model() for role, runner in runners}
        for role, runner in runners:
            name = f"sglang-{role}-tp{runner.weight_updater.tp_rank}"
            receiver = EngineReceiver(
                models[role],
                SglangLoader(runner.weight_updater, self._busy),
                list(self.settings.endpoints),
                beside=None if role == "target" else models["target"],  # of which a draft may have embedding and head
                name=name,
                timeout=self.settings.timeout,
                token=self.settings.token,
                tls=self.settings.tls,
                ignore=self.settings.ignore,
                shared=len(runners) > 1 or self._has_peers(),
                shadow=self.settings.shadow,
            )
            self.targets.append(Target(role, runner.weight_updater, receiver))

    def start_early(self) -> None:
        """When the scheduler has its models and no step runs yet: what is newest is pulled from now on, if an agent
        answers soon. Else the first update connects."""
        self.start()
        for target in self.targets:
            try:
                target.receiver.attach(_START_S)
            except Exception as error:
                _log.warning("%s: nothing is pulled before the first update: %s", target.receiver.name, error)

    def update(self, weight_version: str | None, manifest: Mapping[str, Any] | None) -> tuple[bool, str]:
        """Brings all models of all ranks to a version; says whether, and a message for the answer."""
        self._requests += 1
        for target in self.targets:
            target.report = target.staging = None
        asked = asked_version(weight_version)
        staged, request = Staged(), self.settings
        try:
            request = self.settings.with_request(manifest)
            self._configure(request)
        except Exception as error:
            staged = Staged(error=words(error))
        end = time.monotonic() + request.timeout
        if staged.error is None:
            staged = self._stage(asked, end)
        void = doubts([target.receiver for target in self.targets if not takes_nothing(target.receiver)])
        ending = self._together(staged, end, void, request.verify)
        self._follow()
        if ending.unwritten is not None:
            return False, f"deltasync: {self._unwritten(ending.unwritten)}"
        if not ending.kept:
            return False, f"deltasync: {ending.text}" + ("" if ending.as_before else f" ({REMEDY})")
        parts = [
            f"{target.role}: {target.report.mode}, {target.report.placed}"
            for target in self.targets
            if target.report is not None
        ]
        return True, f"deltasync: {staged.subject} on {self._group().ranks} rank(s) ({', '.join(parts)})."

    def void(self, reason: str) -> None:
        """The models were written, or may have been, by something else; that it is of a version is for that to say."""
        self._each(lambda target: target.receiver.void(reason, doubt=False))

    def sleeps(self, kept: Callable[[str], bool]) -> None:
        """Nothing touches the models' memory from here on; ``kept``: whether a role's content comes back by itself.
        Raises if something may still touch some of it: the memory has to stay."""
        for target in self.targets:
            if kept(target.role):
                target.receiver.pause()
            else:
                target.receiver.lose()

    def woke(self, kept: Callable[[str], bool]) -> None:
        """The models' memory is back; ``kept``: as for :meth:`sleeps`."""
        for target in self.targets:
            if kept(target.role):
                self._each(lambda target: target.receiver.follow(), [target])
            else:
                target.receiver.regain("its weights were released without a backup")

    def close(self) -> None:
        self._each(lambda target: target.receiver.close())
        self.targets = []

    def _busy(self) -> str | None:
        if "weights" in self.manager.offload_tags:
            return "the weights are released: resume_memory_occupation with the tag 'weights' comes first"
        if self.manager._session is not None:
            return "a weight-update session is open: end_weight_update comes first"
        return parallel_refusal()

    def _configure(self, settings: Settings) -> None:
        if not settings.endpoints:
            raise InvalidArgument(
                "no endpoints: set DELTASYNC_ENDPOINTS=HOST:PORT for the server, or give the request "
                '{"manifest": {"deltasync": {"endpoints": ["HOST:PORT"]}}}'
            )
        kept = replace(settings, timeout=self.settings.timeout, verify=self.settings.verify)
        moved, self.settings = kept != self.settings, kept
        if moved or any(target.receiver.state == CONNECTING and self._gave_up(target) for target in self.targets):
            self.close()
        self.start()

    @staticmethod
    def _gave_up(target: Target) -> bool:
        connected = target.receiver._connected
        return connected.done() and (connected.cancelled() or connected.exception() is not None)

    def _stage(self, asked: int | str | None, end: float) -> Staged:
        try:
            reason = self._busy()
            if reason is not None:
                return Staged(error=reason)
            for target in list(self.targets):
                try:
                    target.staging = target.receiver.prepare(asked, timeout=left(end))
                except Exception:
                    if target.role == "target" or not takes_nothing(target.receiver):
                        raise
                    _log.warning("%s takes none of the trainer's tensors, and keeps its own", target.receiver.name)
            found = [target.staging.wait(left(end)) for target in self.targets if target.staging is not None]
        except Exception as error:
            return Staged(error=words(error))
        if len({(version.epoch, version.number) for version in found}) != 1:
            return Staged(error=f"target and draft have different versions: {[version.number for version in found]}")
        return Staged(subject=f"version {found[0].number} of trainer {found[0].epoch:x}")

    def _unwritten(self, verdict: Verdict) -> str:
        if verdict.outcome is Outcome.UNKNOWN:
            why = f"{verdict.reason}; this rank has written nothing, others may have"
            return f"THE OUTCOME IS UNKNOWN: {why} ({REMEDY})"
        return f"nothing was written: {verdict.reason}" + (f"; {verdict.doubt} ({REMEDY})" if verdict.doubt else "")

    def _together(self, staged: Staged, end: float, void: str, verify: bool) -> Ending:
        taking = [target.receiver for target in self.targets if target.staging is not None]
        written: list[EngineReceiver] = []

        def commit() -> str | None:
            try:
                for target in self.targets:
                    if target.staging is not None:
                        timeout = max(1.0, left(end))
                        target.report = target.receiver.commit(target.staging, timeout=timeout, verify=verify)
                        written.append(target.receiver)
            except Exception as error:
                return words(error)
            return None

        try:
            group = self._group()
        except Exception as error:  # without this rank's vote nobody can have a "yes"
            why = words(error) if staged.error is None else f"{staged.error}; {words(error)}"
            return Ending(False, Verdict(Outcome.NO, why, void), False, "")
        return group.update(
            staged.error,
            Work(commit, taking, written),
            subject=staged.subject,
            end=end,
            margin=_MARGIN_S,
            at=str(self._requests),
            doubt=void,
            lacks=lacks(taking),
        )

    def _follow(self) -> None:
        self._each(lambda target: target.receiver.follow(), [target for target in self.targets if target.staging])

    def _each(self, call: Callable[[Target], None], targets: list[Target] | None = None) -> None:
        for target in self.targets if targets is None else targets:
            try:
                call(target)
            except Exception as error:
                _log.error("%s: %s", target.receiver.name, error)

    def _has_peers(self) -> bool:
        try:
            return self._group().ranks > 1
        except Exception:  # said by the first vote
            return True

    def _group(self) -> Group:
        if self._ranks is None:
            self._ranks = group_of(self.manager.tp_cpu_group)
        return self._ranks


def group_of(group: Any) -> Group:
    """Of the ranks of torch's group, over the store that torch.distributed was started with."""
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    if group is None or distributed.get_world_size(group) == 1:
        return Group(None, 0, 1)
    first = min(distributed.get_process_group_ranks(group))
    store = PrefixStore(f"deltasync/sglang/{first}", _get_default_store())
    return Group(store, distributed.get_rank(group), distributed.get_world_size(group))


def asked_version(weight_version: str | None) -> int | str | None:
    """A request's ``weight_version``: a number, else a label; without one the newest."""
    if weight_version is None or weight_version == "":
        return None
    return int(weight_version) if weight_version.isdecimal() else weight_version


def parallel_refusal() -> str | None:
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().pp_size > 1:
        return "pipeline parallelism: the ranks of several stages cannot commit together yet; use --pp-size 1"
    return None


def takes_nothing(receiver: EngineReceiver) -> bool:
    """Whether the model's loader stores none of the trainer's tensors."""
    return receiver.trace is not None and not receiver.trace.placed and not receiver.trace.reload


def words(error: BaseException) -> str:
    return str(error) or type(error).__name__
