"""verl's real manager, rollout worker, replica and SGLang server, over real Ray actors, with deltasync's updates in
place (tools/test_engines.sh verl_sglang)."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engines
for package in ("verl", "sglang"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

import verl_actors  # noqa: E402
import verl_sglang_actors as actors  # noqa: E402

# isort: split
import ray  # noqa: E402
from checkpoints import write_config  # noqa: E402
from deltasync import errors  # noqa: E402
from deltasync.adapters import verl_sglang  # noqa: E402
from verl.checkpoint_engine.base import CheckpointEngineManager  # noqa: E402
from verl.workers.config import HFModelConfig, RolloutConfig  # noqa: E402
from verl.workers.rollout.replica import RolloutMode  # noqa: E402
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica  # noqa: E402
from vllm_replica import write_dist_info  # noqa: E402


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """A trainer, a server and its rollout worker, under verl's manager."""

    def __init__(self, directory: Path, mode: RolloutMode) -> None:
        trainer = ray.remote(num_cpus=0)(verl_actors.Trainer)
        self.trainer = trainer.remote(verl_actors.sglang_checkpoint, in_place=True)
        config = RolloutConfig(
            name="sglang",
            tensor_model_parallel_size=1,
            engine_kwargs={"sglang": {"device": "cpu", "attention_backend": "torch_native"}},
            checkpoint_engine=verl_actors.checkpoint_engine(),
        )
        model = HFModelConfig(path=str(directory), load_tokenizer=False)
        server = ray.remote(num_cpus=0)(actors.Server).options(name="sglang_server_0_0")
        self.server = server.remote(config, model, mode, [], 0, 0, 1, "", 0)
        self.do("launch", free_port(), of=self.server)
        self.worker = verl_actors.rollout_worker(config, model, {})
        replica = SGLangReplica(0, config, model)
        replica.workers, replica.servers = [self.worker], [self.server]
        self.manager = CheckpointEngineManager(
            verl_actors.checkpoint_engine(), verl_actors.TrainerGroup(self.trainer), [replica]
        )

    def do(self, what: str, *args: Any, of: Any = None) -> Any:
        return ray.get(getattr(of or self.server, what).remote(*args), timeout=240)

    def rank(self, what: str, *args: Any) -> Any:
        return self.do("do", what, *args)

    def differing(self, step: int) -> list[str]:
        return self.rank("compare", step)["differing"]  # type: ignore[no-any-return]

    def close(self) -> None:
        self.rank("close")
        self.do("close", of=self.trainer)
        for actor in (self.worker, self.server, self.trainer):
            ray.kill(actor)


@pytest.fixture
def start(tmp_path: Path, shm_files: set[str]) -> Iterator[Any]:
    paths = [path for path in sys.path if (Path(path) / "deltasync").is_dir()]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *verl_actors.PATHS, *paths]),
        **{"WORLD_SIZE": "1", "RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": str(free_port()), "WG_BACKEND": "ray"},
    }
    write_config(verl_actors.MODEL, tmp_path)
    write_dist_info(tmp_path)  # SGLang finds the plug-in by its entry point
    runtime = {"env_vars": environment, "worker_process_setup_hook": "verl_actors.begin_with_sglang"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=runtime)
    jobs: list[Job] = []

    def run(mode: RolloutMode) -> Job:
        jobs.append(Job(tmp_path, mode))
        return jobs[-1]

    yield run
    for job in jobs:
        job.close()
    ray.shutdown()


def test_ranks_pull_what_changed_and_a_failed_update_fails_the_step(start: Any) -> None:
    job = start(RolloutMode.STANDALONE)
    manager = job.manager
    session = ["pause_generation abort", "release ['kv_cache']", "resume ['kv_cache']", "flush_cache"]
    for step, mode in enumerate(("loaded", "delta", "delta"), 1):
        assert manager.update_weights(global_steps=step) == {"deltasync/version": step}
        update = f"deltasync {step}"
        assert job.do("called") == [*session[:2], update, *session[2:], "continue_generation"]
        assert job.rank("targets")["target"]["mode"] == mode
        assert job.differing(step) == [] and job.do("steps") == step
    assert job.rank("state")["versions"] == ["1", "2", "3"]
    job.rank("fail_next_commit")
    with pytest.raises(errors.Error, match=r"HTTP 400: .*all was rolled back.*the device is lost"):
        manager.update_weights(global_steps=4)
    assert "continue_generation" not in job.do("called")
    assert job.differing(3) == [] and job.do("steps") == 3
    manager.update_weights(global_steps=5)
    assert job.differing(5) == [] and job.do("steps") == 5


def test_weights_that_verl_discarded(start: Any) -> None:
    """Its colocated servers release their weights, with a backup on the host or without."""
    job = start(RolloutMode.COLOCATED)
    manager = job.manager
    manager.update_weights(global_steps=1)
    # The first update in place, of all weights, comes in the background, if no release comes before.
    for step, modes in ((2, ["loaded"]), (3, ["full", "delta"]), (4, ["delta"])):
        manager.sleep_replicas()
        with pytest.raises(errors.Error, match="nothing was written: .*the weights are released: resume_memory"):
            manager.update_weights(global_steps=step)
        manager.wake_up_replicas()
        manager.update_weights(global_steps=step)
        assert job.rank("targets")["target"]["mode"] in modes
        assert job.differing(step) == []
        job.do("back_up")


REFUSED = [
    ({"quantization": "fp8"}, {}, "quantises"),
    ({}, {"lora_rank": 8}, "LoRA"),
    ({}, {"lora": {"rank": 8}}, "LoRA"),
]


@pytest.mark.parametrize(("rollout", "model", "what"), REFUSED)
def test_in_place_is_refused_where_verl_changes_the_weights(
    monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any], model: dict[str, Any], what: str
) -> None:
    with pytest.raises(errors.Unsupported, match=what):
        adapter(monkeypatch, rollout, model)


def test_in_place_is_refused_with_a_sglang_that_lacks_what_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter(monkeypatch, {}, {})
    manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    monkeypatch.delattr(f"{manager}.begin_weight_update")
    with pytest.raises(errors.Unsupported, match=r"SGLang 0\S* has no \S*Manager.begin_weight_update"):
        adapter(monkeypatch, {}, {})


def adapter(monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any], model: dict[str, Any]) -> Any:
    """A rollout worker's, which knows no server."""

    def made(self: Any, config: Any, model_config: Any) -> None:
        self.config, self.model_config = config, model_config

    monkeypatch.setattr(verl_sglang.sglang_rollout.ServerAdapter, "__init__", made)
    config = SimpleNamespace(**({"quantization": None, "qat": None} | rollout))
    return verl_sglang.ServerAdapter(config, SimpleNamespace(**({"lora_rank": 0, "lora": {}} | model)))
