"""Ray actors of a verl job with one trainer rank and one rollout: vLLM's real Worker and model behind verl's real
rollout worker and server adapter, on the CPU. No engine runs steps."""

from __future__ import annotations

import asyncio
import sys
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


class Trainer:
    """A master rank, as verl's workers make their engine."""

    def __init__(self, **options: Any) -> None:
        from verl.checkpoint_engine.base import CheckpointEngineRegistry
        from verl.utils.import_utils import import_external_libs

        import_external_libs(MODULE)
        self.engine = CheckpointEngineRegistry.new("deltasync", bucket_size=1 << 20, is_master=True, **options)

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)

    def update_weights(self, global_steps: int) -> Any:
        return asyncio.run(self.engine.send_weights(iter(checkpoint(global_steps).items()), global_steps=global_steps))

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


def rollout_worker(directory: str, environment: dict[str, str], free_cache_engine: bool) -> Any:
    """verl's own actor, of the replica whose server is the actor vllm_server_0_0."""
    from verl.checkpoint_engine import base
    from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

    engine = CheckpointEngineConfig(
        backend="deltasync", custom_backend_module=MODULE, engine_kwargs={"deltasync": {"in_place": True}}
    )
    config = RolloutConfig(
        name="vllm", tensor_model_parallel_size=1, checkpoint_engine=engine, free_cache_engine=free_cache_engine
    )
    remote = base._worker_cls.options(num_cpus=0, runtime_env={"env_vars": environment})
    return remote.remote(config, HFModelConfig(path=directory, load_tokenizer=False), replica_rank=0)
