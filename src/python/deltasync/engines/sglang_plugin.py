"""SGLang finds this plug-in by the entry point ``sglang.srt.plugins``; docs/guides/sglang.md is for its users.

``POST /update_weights_from_disk`` with ``"load_format": "deltasync"`` brings the server to the trainer's version
``weight_version``. All other calls go to SGLang as they are; those that write weights or release them are told to the
receivers.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from .sglang_rank import RankUpdates, Settings

_log = logging.getLogger("deltasync.sglang")

LOAD_FORMAT = "deltasync"
STALE_CACHE = "updated, stale cache"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def register() -> None:
    """Registers the hooks, once."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    known = {(target, hook) for target, hooks in HookRegistry._hooks.items() for _, hook, _ in hooks}
    for target, hook in _hooks().items():
        if (target, hook) not in known:
            HookRegistry.register(target, hook, HookType.AROUND)


def missing() -> str:
    """What the hooks need and this SGLang lacks, which is another release; empty: nothing."""
    for target in _hooks():
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError):
            return target
    return ""


def _hooks() -> dict[str, Callable[..., Any]]:
    """By what each is around."""
    return {
        f"{_RUNNER}.update_weights_from_disk": update_runner,
        f"{_MANAGER}.__post_init__": after_start,
        f"{_MANAGER}.update_weights_from_disk": update_rank,
        f"{_MANAGER}.update_weights_from_ipc": foreign_update,
        f"{_MANAGER}.begin_weight_update": foreign_update,
        f"{_MANAGER}.release_memory_occupation": release_memory,
        f"{_MANAGER}.resume_memory_occupation": resume_memory,
    }


#: One per scheduler of this process (there is one, outside of tests), by identity: managers have no hash.
_ranks: dict[int, RankUpdates] = {}
#: What the runners' hook answers while a committed update is being recorded.
_committed: str | None = None


def rank_of(manager: Any) -> RankUpdates:
    found = _ranks.get(id(manager))
    if found is None or found.manager is not manager:
        found = _ranks[id(manager)] = RankUpdates(manager, Settings.from_environment())
    return found


def after_start(original: Any, manager: Any) -> None:
    """A scheduler has its models: connect, if the environment says where to. A wrong setting there ends the start:
    later it would end a server that has requests."""
    original(manager)
    rank = rank_of(manager)
    try:
        rank.start_early()
    except Exception as error:  # the first update says it again
        _log.error("deltasync does not start: %s", error)


def update_rank(original: Any, manager: Any, recv_req: Any) -> Any:
    """SchedulerWeightUpdaterManager.update_weights_from_disk"""
    global _committed
    if recv_req.load_format != LOAD_FORMAT:
        return foreign_update(original, manager, recv_req)
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    success, message = rank_of(manager).update(recv_req.weight_version, recv_req.manifest)
    if not success:
        _log.error("%s", message)
        return UpdateWeightFromDiskReqOutput(success=False, message=message)
    _committed = message
    try:
        answer = original(manager, recv_req)  # records the version, flushes the cache
    finally:
        _committed = None
    if not answer.success:
        message = f"{message} {STALE_CACHE}: {answer.message}"
        _log.warning("%s", message)
        return UpdateWeightFromDiskReqOutput(success=True, message=message)
    return answer


def update_runner(original: Any, updater: Any, model_path: str, load_format: str, *args: Any, **kwargs: Any) -> Any:
    """WeightUpdater.update_weights_from_disk, once for each runner"""
    if load_format != LOAD_FORMAT:
        return original(updater, model_path, load_format, *args, **kwargs)
    if _committed is None:
        return False, "deltasync: an update comes through the scheduler, where all ranks and runners take part"
    return True, _committed


def foreign_update(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Any other way of writing weights."""
    try:
        return original(manager, *args, **kwargs)
    finally:
        known = _ranks.get(id(manager))
        if known is not None:
            known.void("the weights were updated by other means")


def release_memory(original: Any, manager: Any, recv_req: Any) -> Any:
    known = _ranks.get(id(manager))
    if known is None or not _has_weights(recv_req):
        return original(manager, recv_req)
    try:
        known.sleeps(_is_backed_up)
        return original(manager, recv_req)
    except BaseException:
        if "weights" not in manager.offload_tags:  # they stay, and nobody will resume them
            known.woke(_is_backed_up)
        raise


def resume_memory(original: Any, manager: Any, recv_req: Any) -> Any:
    answer = original(manager, recv_req)
    known = _ranks.get(id(manager))
    if known is not None and _has_weights(recv_req):
        known.woke(_is_backed_up)
    return answer


def _has_weights(recv_req: Any) -> bool:
    return not recv_req.tags or "weights" in recv_req.tags


def _is_backed_up(role: str) -> bool:
    from sglang.srt.runtime_context import get_exec

    features = get_exec().features
    if role == "target":
        return bool(features.enable_weights_cpu_backup)
    return bool(features.enable_draft_weights_cpu_backup or features.enable_weights_cpu_backup)
