"""Ray actors of a verl job with one trainer rank and one rollout: vLLM's real Worker and model behind verl's real
rollout worker and server adapter, on the CPU. No engine runs steps."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
PATHS = [str(TESTS / "adapters"), str(TESTS), str(TESTS / "engines")]
sys.path[:0] = PATHS
MODULE, MODEL = "deltasync.adapters.verl", "qwen3_moe"


def checkpoint(step: int) -> dict[str, Any]:
    from checkpoints import shapes
    from engine_support import change, first_version

    made = first_version(shapes(MODEL))
    for number in range(2, step + 1):
        change(made, number)
    return made


def sglang_checkpoint(step: int) -> dict[str, Any]:
    """What SGLang's rank compares with."""
    from sglang_versions import weights

    return weights(MODEL, step)  # type: ignore[no-any-return]


class Trainer:
    """A master rank, as verl's workers make their engine; ``made``: the weights of a step."""

    def __init__(self, made: Callable[[int], dict[str, Any]] = checkpoint, **options: Any) -> None:
        from verl.checkpoint_engine.base import CheckpointEngineRegistry
        from verl.utils.import_utils import import_external_libs

        import_external_libs(MODULE)
        self.engine = CheckpointEngineRegistry.new("deltasync", bucket_size=1 << 20, is_master=True, **options)
        self.made = made

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)

    def update_weights(self, global_steps: int) -> Any:
        return asyncio.run(self.engine.send_weights(iter(self.made(global_steps).items()), global_steps=global_steps))

    def close(self) -> None:
        self.engine.close()


class Server:
    """What verl's vLLM server does in an update, with one worker in this process."""

    def __init__(self, port: int) -> None:
        from vllm_rank import Rank

        self.rank = Rank(MODEL, 1, 0, port, 1)
        self.calls: list[str] = []

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> None:
        self.calls.append(method)
        getattr(self.rank.worker, method)(*args, **(kwargs or {}))

    async def clear_kv_cache(self) -> None:
        self.calls.append("clear_kv_cache")

    async def set_global_steps(self, global_steps: int) -> None:
        self.calls.append(f"set_global_steps {global_steps}")

    async def release_kv_cache(self, level: int) -> None:
        self.rank.worker.sleep(level=level)
        self.rank.worker.wake_up(tags=["weights"])

    async def called(self) -> list[str]:
        called, self.calls = self.calls, []
        return called

    async def do(self, what: str, *args: Any) -> Any:
        return getattr(self.rank, what)(*args)


class Replica:
    """What verl's manager asks of a rollout replica: `worker` is verl's own, `server` a Server. Its weights sleep as
    deep as verl's do."""

    def __init__(self, worker: Any, server: Any, sleep_level: int) -> None:
        self.workers = [worker]
        self.server, self.sleep_level = server, sleep_level

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def release_kv_cache(self) -> None:
        if self.sleep_level:
            await self.server.release_kv_cache.remote(self.sleep_level)

    async def resume_kv_cache(self) -> None: ...

    async def resume_generation(self) -> None: ...


class TrainerGroup:
    """Of one rank."""

    world_size = 1

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def execute_checkpoint_engine(self, method: list[str], **kwargs: list[Any]) -> list[Any]:
        given = {key: value[0] for key, value in kwargs.items()}
        return [self.trainer.execute_checkpoint_engine.remote(method[0], **given)]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        assert mode == "deltasync"
        return [self.trainer.update_weights.remote(global_steps)]


def checkpoint_engine() -> Any:
    from verl.workers.config import CheckpointEngineConfig

    return CheckpointEngineConfig(
        backend="deltasync", custom_backend_module=MODULE, engine_kwargs={"deltasync": {"in_place": True}}
    )


def begin_with_sglang() -> None:
    """What a process has to do before it imports transformers, and what verl 0.9.1 lacks for SGLang 0.5.20 and later,
    whose engines have two methods more."""
    import sglang_model  # noqa: F401
    from sglang.srt.entrypoints.EngineBase import EngineBase

    EngineBase.__abstractmethods__ = frozenset()


def rollout_worker(config: Any, model: Any, environment: dict[str, str]) -> Any:
    """verl's own actor, of replica 0, whose server is the actor ENGINE_server_0_0."""
    from verl.checkpoint_engine import base

    remote = base._worker_cls.options(num_cpus=0, runtime_env={"env_vars": environment})
    return remote.remote(config, model, replica_rank=0)
