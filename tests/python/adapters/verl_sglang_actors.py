"""The actor of a verl job's SGLang server: verl's own, whose ranks are one real SGLang model in this process, on the
CPU. No scheduler runs steps."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import verl_actors  # has the tests' paths

# isort: split
import sglang_model  # noqa: F401 (defines what transformers imports by way of torchvision)

# isort: split
import torch
from sglang.srt.entrypoints import http_server
from sglang_rank_process import Rank
from verl.workers.rollout.sglang_rollout import async_sglang_server


class Tokenizer:
    """What a server asks of the tokenizer's process, which hands it to the scheduler's."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.calls: list[str] = []

    async def update_weights_from_disk(self, request: Any, _: Any) -> tuple[bool, str, int]:
        assert self.calls[0] == "pause_generation abort"
        self.calls.append(f"{request.load_format} {request.weight_version}")
        answer = self.rank.manager.update_weights_from_disk(request)
        return answer.success, answer.message, answer.num_paused_requests

    async def release_memory_occupation(self, request: Any, _: Any) -> None:
        self.calls.append(f"release {request.tags}")
        self.rank.manager.release_memory_occupation(request)

    async def resume_memory_occupation(self, request: Any, _: Any) -> None:
        self.calls.append(f"resume {request.tags}")
        self.rank.manager.resume_memory_occupation(request)

    async def flush_cache(self, timeout_s: float = 0.0) -> Any:
        self.calls.append("flush_cache")
        return types.SimpleNamespace(success=self.rank.flush(), message="")

    async def pause_generation(self, request: Any) -> None:
        self.calls.append(f"pause_generation {request.mode}")

    async def continue_generation(self, _: Any) -> None:
        self.calls.append("continue_generation")


class Saver:
    """As SGLang's memory saver: what is released comes back from a backup on the host, or with other bytes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.backs_up = False
        self.kept: list[torch.Tensor] = []

    def pause(self, tag: str) -> None:
        if tag == "weights":
            with torch.no_grad():
                self.kept = [parameter.clone() for parameter in self.model.parameters() if self.backs_up]
                for parameter in self.model.parameters():
                    parameter.fill_(1.0)

    def resume(self, tag: str) -> None:
        if tag == "weights" and self.kept:
            with torch.no_grad():
                for parameter, kept in zip(self.model.parameters(), self.kept, strict=True):
                    parameter.copy_(kept)


@contextlib.asynccontextmanager
async def nothing(_: Any) -> Any:
    yield


class Server(async_sglang_server.SGLangHttpServer):  # type: ignore[misc]
    """verl's, with its routes over HTTP; ``_launch_subprocesses`` makes the rank instead of processes."""

    async def launch(self, port: int) -> None:
        self.rank = Rank(verl_actors.MODEL, 1, 0, port, False, False)
        self.rank.manager.memory_saver_adapter = Saver(self.rank.models["target"])
        self.rank.manager.scheduler.disaggregation_mode = None
        self.tokenizer = Tokenizer(self.rank)
        http_server.Engine._launch_subprocesses = lambda **_: (self.tokenizer, None, None)
        # verl 0.9.1 asks for its fields, and it has not been a dataclass since SGLang 0.5.20.
        async_sglang_server.dataclasses = types.SimpleNamespace(fields=lambda _: [])
        http_server.app.router.lifespan_context = nothing  # it makes what generates
        await self.launch_server()

    async def called(self) -> list[str]:
        called, self.tokenizer.calls = self.tokenizer.calls, []
        return called

    async def steps(self) -> int | None:
        return self.global_steps  # type: ignore[no-any-return]

    async def back_up(self) -> None:
        from sglang.srt.runtime_context import get_context

        get_context().override("test", enable_weights_cpu_backup=True)
        self.rank.manager.memory_saver_adapter.backs_up = True

    async def do(self, what: str, *args: Any) -> Any:
        return getattr(self.rank, what)(*args)
