"""What trainers' clients send to the servers that they were written for: the requests (method, path, query, body and
headers), what they read in the answers, and what they send again. Written to:

prime-rl  github.com/PrimeIntellect-ai/prime-rl 559b44772e47  src/prime_rl/utils/client.py
slime     github.com/THUDM/slime 624b824a898a  slime/backends/sglang_utils/{sglang_engine,external}.py,
          slime/ray/actor_group.py, slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py
AReaL     github.com/inclusionAI/AReaL 4aef98d8d818  areal/engine/{sglang,vllm}_remote.py, areal/infra/utils/http.py
trl       package 1.16.0  trl/generation/vllm_client.py, trl/experimental/async_grpo/{vllm_client,weight_transfer}.py

Those of AReaL and trl are driven themselves in tests/python/adapters/. Waits between tries are left out.
"""

from __future__ import annotations

import http.client
from pathlib import PurePosixPath
from typing import Any

from control_fleet import Client

_ANY = {"Accept": "*/*", "Accept_Encoding": "gzip, deflate"}
HTTPX = _ANY | {"Connection": "keep-alive", "User_Agent": "python-httpx/0.28.1"}
REQUESTS = _ANY | {"Connection": "keep-alive", "User_Agent": "python-requests/2.34.1"}
AIOHTTP = _ANY | {"Connection": "close", "User_Agent": "Python/3.11 aiohttp/3.14.0"}


class Refused(Exception):
    """What a client raises: an answer that it takes for a failure."""

    def __init__(self, status: int, answer: Any) -> None:
        super().__init__(f"{status}: {answer}")
        self.status, self.answer = status, answer


class Caller:
    """``answers``: (path, status) of all that were sent; 0: none in time, or none at all."""

    def __init__(self, endpoint: str, headers: dict[str, str], token: str = "", timeout: float = 60) -> None:
        self.client = Client(endpoint, token, timeout)
        self.headers = headers
        self.answers: list[tuple[str, int]] = []

    def send(self, method: str, target: str, body: Any = None) -> tuple[int, Any]:
        headers = self.headers | ({"Content_Type": "application/json"} if body is not None else {})
        path = target.partition("?")[0]
        try:
            status, answer, _ = self.client.send(method, target, body, **headers)
        except (OSError, http.client.HTTPException):
            self.answers.append((path, 0))
            raise
        self.answers.append((path, status))
        return status, answer

    def succeed(self, method: str, target: str, body: Any = None) -> Any:
        status, answer = self.send(method, target, body)
        if status != 200:
            raise Refused(status, answer)
        return answer

    def statuses(self, path: str) -> list[int]:
        return [status for asked, status in self.answers if asked == path]


class PrimeRl(Caller):
    """The admin clients of its inference pool. What fails with 5xx or at the transport goes again, ten times."""

    TRIES = 10

    def __init__(self, endpoint: str, token: str = "", timeout: float = 60) -> None:
        super().__init__(endpoint, HTTPX, token, timeout)

    def wait_for_ready(self, model: str) -> None:
        self.succeed("GET", "/health")
        models = self.succeed("GET", "/v1/models")["data"]
        if not any(one["id"] == model for one in models):
            raise ValueError(f"Model {model} was not found in the inference pool")

    def init_broadcaster(self) -> bool:
        """Whether there is a group of NCCL: 404 is none."""
        body = {"host": "localhost", "port": 29501, "rank_offset": 0, "inference_world_size": 1, "timeout": 1200}
        return self.send("POST", "/init_broadcaster", body | {"quantize_in_weight_transfer": False})[0] != 404

    def update_weights(self, weight_dir: str | None) -> None:
        self._post("/pause?mode=keep&clear_cache=false")
        try:
            self._post("/update_weights", {"weight_dir": weight_dir})
        finally:
            self._post("/resume")

    def load_lora_adapter(self, name: str, path: str) -> None:
        self._post("/load_lora_adapter", {"lora_name": name, "lora_path": path}, (404, 500))

    def _post(self, target: str, body: Any = None, again: tuple[int, ...] = tuple(range(500, 600))) -> None:
        for tries in range(1, self.TRIES + 1):
            try:
                status, answer = self.send("POST", target, body)
            except (OSError, http.client.HTTPException):
                if tries == self.TRIES:
                    raise
                continue
            if status < 400:
                return
            if status not in again or tries == self.TRIES:
                raise Refused(status, answer)


class Slime(Caller):
    """A SGLangEngine of an engine that was started elsewhere (--rollout-external-engine-addrs)."""

    LOCAL, SHARED = "/local/checkpoint", "/shared/weights"

    def __init__(self, endpoint: str, timeout: float = 60) -> None:
        super().__init__(endpoint, REQUESTS, "", timeout)

    def init(self) -> dict[str, Any]:
        """Discovers the engine, and holds what it was told against its own arguments (which are the defaults)."""
        info = self.succeed("GET", "/server_info")
        for name, expected in {"dp_size": 1, "enable_memory_saver": False}.items():
            assert info.get(name) == expected, (name, info.get(name))
        pp_size = int(info.get("pp_size") or 1)
        tp_size = int(info.get("tp_size") or 1)
        mode = info.get("disaggregation_mode")
        return {
            "num_gpus": int(info.get("num_gpus") or tp_size * pp_size),
            "parallel": (tp_size, pp_size, int(info.get("ep_size") or 1), int(info.get("moe_dp_size") or 1)),
            "worker_type": mode if mode in ("prefill", "decode") else "regular",
        }

    def health_generate(self) -> None:
        self.succeed("GET", "/health_generate")

    def request(self, endpoint: str, payload: dict[str, Any] | None = None) -> Any:
        return self.succeed("POST", f"/{endpoint}", payload or {})

    def pull_weights(self, version: int) -> None:
        body = {"local_checkpoint_dir": self.LOCAL, "source_dir": self.SHARED, "target_version": version}
        self.request("pull_weights", body)

    def flush_cache(self) -> None:
        """For a minute; the engine refuses while requests run."""
        for _ in range(60):
            if self.send("GET", "/flush_cache")[0] == 200:
                return
        raise TimeoutError("Timeout while flushing cache.")

    def update_weights(self, version: int) -> None:
        """A failure leaves it where it is: the trainer ends."""
        self.pull_weights(version)
        self.request("pause_generation")
        self.flush_cache()
        self.request("update_weights_from_disk", {"model_path": self.LOCAL, "weight_version": str(version)})
        live = self.succeed("GET", "/get_weight_version")["weight_version"]
        if str(live) != str(version):
            raise RuntimeError(f"Weight version mismatch after disk reload! Expected: {version}; {live}")
        self.request("continue_generation")

    def offload(self) -> None:
        self.flush_cache()
        self.request("release_memory_occupation")

    def onload(self, tags: list[str] | None = None) -> None:
        self.request("resume_memory_occupation", {"tags": tags})

    def abort(self) -> None:
        """Of a rollout that has enough; without /v1/loads it does not wait for the end."""
        self.request("abort_request", {"abort_all": True})


class Areal(Caller):
    """A RemoteSGLangEngine or RemotevLLMEngine in disk mode. All that fails goes again, three times."""

    TRIES = 3

    def __init__(self, endpoint: str, dialect: str, timeout: float = 60) -> None:
        super().__init__(endpoint, AIOHTTP, "", timeout)
        self.dialect = dialect

    def check_health(self) -> bool:
        return self.send("GET", "/health", {})[0] == 200  # with a body

    def pause_generation(self) -> None:
        self._all("/pause_generation" if self.dialect == "sglang" else "/areal_pause_generation", {})

    def continue_generation(self) -> None:
        self._all("/continue_generation" if self.dialect == "sglang" else "/areal_continue_generation", {})

    def update_weights_from_disk(self, path: str) -> None:
        if self.dialect == "sglang":
            self._all("/update_weights_from_disk", {"model_path": path, "abort_all_requests": True})
        else:
            self._all("/areal_update_weights", {"model_path": path})

    def offload(self) -> None:
        self._all("/release_memory_occupation" if self.dialect == "sglang" else "/sleep", {})

    def onload(self, tags: list[str]) -> None:
        if self.dialect == "sglang":
            self._all("/resume_memory_occupation", {"tags": tags})
        else:
            self._all("/wake_up?" + "&".join(f"tags={tag}" for tag in tags), {})

    def _all(self, target: str, body: Any) -> None:
        for tries in range(1, self.TRIES + 1):
            status, answer = self.send("POST", target, body)
            if status < 400:
                return
            if tries == self.TRIES:
                raise Refused(status, answer)


class TrlAsync(Caller):
    """AsyncGRPOTrainer's VLLMClient, with the order of its WeightTransferClient. Nothing goes again."""

    def __init__(self, endpoint: str, timeout: float = 60) -> None:
        super().__init__(endpoint, REQUESTS, "", timeout)

    def get_max_model_len(self) -> int:
        return int(self.succeed("GET", "/v1/models")["data"][0]["max_model_len"])

    def get_server_info(self) -> dict[str, Any]:
        return dict(self.succeed("GET", "/server_info?config_format=json")["vllm_config"])

    def init_weight_transfer(self) -> None:
        self.succeed("GET", "/health")
        world_size = self.succeed("GET", "/get_world_size")["world_size"] + 1
        init_info = {"master_address": "10.0.0.2", "master_port": 51216, "rank_offset": 1, "world_size": world_size}
        self.succeed("POST", "/init_weight_transfer_engine", {"init_info": init_info | {"packed": True}})

    def synchronise(self, update_info: dict[str, Any]) -> None:
        """After a failure the trainer raises, and the server "stays paused"."""
        self.succeed("POST", "/pause?mode=keep")
        self.succeed("POST", "/start_weight_update", {"is_checkpoint_format": True})
        try:
            self.succeed("POST", "/update_weights", {"update_info": update_info})
        except Refused:
            self.send("POST", "/finish_weight_update")
            raise
        self.succeed("POST", "/finish_weight_update")
        self.succeed("POST", "/resume")


def step(number: int, root: str = "/shared/broadcasts") -> str:
    """Where prime-rl's trainer says that a version is."""
    return str(PurePosixPath(root) / f"step_{number}")
