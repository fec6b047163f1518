"""verl's real registry, configuration and manager, over real Ray actors (tools/test_engines.sh verl)."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed")

import ray  # noqa: E402
import torch  # noqa: E402
from deltasync import errors  # noqa: E402
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry  # noqa: E402
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig  # noqa: E402

pytestmark = pytest.mark.engines
MODULE = "deltasync.adapters.verl"


def variables(*more: str) -> dict[str, str]:
    paths = [path for path in sys.path if (Path(path) / "deltasync").is_dir()]
    return {"PYTHONPATH": os.pathsep.join([*more, *paths, str(Path(__file__).parent)])}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables()})
    yield
    ray.shutdown()


def weights(step: int) -> dict[str, torch.Tensor]:
    """Every step another row differs, by one bit."""
    torch.manual_seed(0)
    made = {f"layers.{i}.weight": torch.randn(64, 32).to(torch.bfloat16) for i in range(4)}
    for number in range(1, step + 1):
        made["layers.1.weight"].view(torch.int16)[number] ^= 1
    return made


class Worker:
    """A trainer rank or a rollout worker, as verl's workers make their engine."""

    def __init__(self, **options: Any) -> None:
        from verl.utils.import_utils import import_external_libs

        import_external_libs(MODULE)
        self.engine = CheckpointEngineRegistry.new("deltasync", bucket_size=1 << 20, **options)

    def execute_checkpoint_engine(self, method: str, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(**kwargs)

    def send(self, step: int) -> Any:
        return asyncio.run(self.engine.send_weights(iter(weights(step).items()), global_steps=step))

    def receive(self, step: int) -> str:
        async def take() -> dict[str, torch.Tensor]:
            return {name: tensor.clone() async for name, tensor in self.engine.receive_weights(global_steps=step)}

        received = asyncio.run(take())
        expected = weights(step)
        assert list(received) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(received[name].view(torch.int16), tensor.view(torch.int16)), name
        return self.engine._receiver.version.label

    def close(self) -> None:
        self.engine.close()


class WorkerGroup:
    """What the manager asks of a RayWorkerGroup: lists are dealt out to the workers."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.world_size = len(workers)

    def execute_checkpoint_engine(self, method: list[str], **kwargs: list[Any]) -> list[Any]:
        return [
            worker.execute_checkpoint_engine.remote(method[i], **{key: value[i] for key, value in kwargs.items()})
            for i, worker in enumerate(self.workers)
        ]


def test_steps_through_the_real_manager(cluster: None, shm_files: set[str]) -> None:
    remote = ray.remote(num_cpus=0)(Worker)
    trainers = WorkerGroup([remote.remote(is_master=rank == 0) for rank in range(2)])
    rollouts = WorkerGroup([remote.remote() for _ in range(2)])
    config = CheckpointEngineConfig(backend="deltasync", custom_backend_module=MODULE)
    manager = CheckpointEngineManager(config, trainers, [])
    assert manager.backend_cls.wire_format == "named_tensors"
    for step in (3, 4, 7):
        manager.build_process_group(rollouts)
        sent = [worker.send.remote(step) for worker in trainers.workers]
        received = [worker.receive.remote(step) for worker in rollouts.workers]
        assert ray.get(received, timeout=120) == [f"step-{step}"] * 2
        metrics = ray.get(sent, timeout=60)
        assert metrics[0].keys() == {"deltasync/version"} and metrics[1] == {}
        ray.get(trainers.execute_checkpoint_engine(["finalize"] * 2), timeout=60)
        ray.get(rollouts.execute_checkpoint_engine(["finalize"] * 2), timeout=60)
    ray.get([worker.close.remote() for worker in trainers.workers + rollouts.workers], timeout=60)


def test_later_steps_are_deltas_and_a_new_trainer_is_followed(shm_files: set[str]) -> None:
    trainer, rollout = Worker(is_master=True, host="127.0.0.1"), Worker(host=None)
    for step in (1, 2):
        assert one_step(trainer, rollout, step) == f"step-{step}"
    kept = rollout.engine._receiver
    assert one_step(trainer, rollout, 3) == "step-3"
    assert rollout.engine._receiver is kept
    trainer.close()
    trainer = Worker(is_master=True, host="127.0.0.1")
    assert one_step(trainer, rollout, 4) == "step-4"
    assert rollout.engine._receiver is not kept
    trainer.close()
    rollout.close()


def one_step(trainer: Worker, rollout: Worker, step: int) -> str:
    to_trainer, to_rollout = type(trainer.engine).build_topology(
        1, 1, [trainer.engine.prepare(), rollout.engine.prepare()]
    )
    trainer.engine.init_process_group(sender=to_trainer["sender"][0])
    rollout.engine.init_process_group(sender=to_rollout["sender"][0])
    trainer.send(step)
    return rollout.receive(step)


def test_what_is_out_of_order_is_named() -> None:
    worker = Worker()
    with pytest.raises(errors.InvalidArgument, match="init_process_group"):
        worker.receive(1)
    with pytest.raises(errors.InternalError, match="0 of 2"):
        type(worker.engine).build_topology(2, 1, [{}, {}, {}])
    assert worker.send(1) == {}


def test_a_trainer_of_the_same_port_and_another_token_is_another_one() -> None:
    class Kept:
        closed = False

        def close(self) -> None:
            self.closed = True

    engine = CheckpointEngineRegistry.new("deltasync", bucket_size=1 << 20)
    sender = {"endpoint": "10.0.0.1:7070", "token": "first", "number": 1}
    engine.init_process_group(sender)
    engine._receiver = kept = Kept()
    engine.init_process_group(sender | {"number": 2})
    assert engine._receiver is kept and not kept.closed
    engine.init_process_group(sender | {"token": "second"})
    assert engine._receiver is None and kept.closed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_in_place(cluster: None, tmp_path: Path, shm_files: set[str]) -> None:
    """vLLM's workers pull what changed, also where verl discards their weights before each update."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    import verl_actors
    from checkpoints import write_config
    from vllm_replica import write_dist_info

    write_config(verl_actors.MODEL, tmp_path)
    write_dist_info(tmp_path)  # vLLM finds the back end by its entry point
    environment = variables(str(tmp_path), *verl_actors.PATHS)
    remote = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
    server = ray.remote(verl_actors.Server).options(name="vllm_server_0_0", **remote).remote(free_port())
    trainer = ray.remote(verl_actors.Trainer).options(**remote).remote(in_place=True)
    ranks = {"WORLD_SIZE": "1", "RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    config = CheckpointEngineConfig(backend="deltasync", custom_backend_module=MODULE)
    model = HFModelConfig(path=str(tmp_path), load_tokenizer=False)
    step = 0
    for sleep_level in (0, 2):
        ports = {"MASTER_PORT": str(free_port()), "WG_BACKEND": "ray"}
        rollout = RolloutConfig(
            name="vllm",
            tensor_model_parallel_size=1,
            checkpoint_engine=verl_actors.checkpoint_engine(),
            free_cache_engine=sleep_level > 0,
        )
        worker = verl_actors.rollout_worker(rollout, model, environment | ranks | ports)
        replica = verl_actors.Replica(worker, server, sleep_level)
        manager = CheckpointEngineManager(config, verl_actors.TrainerGroup(trainer), [replica])
        began = ["init_weight_transfer_engine"]
        for mode in ("loaded", "delta", "delta"):
            step += 1
            assert manager.update_weights(global_steps=step) == {"deltasync/version": step}
            called = ray.get(server.called.remote())
            session = ["start_weight_update", "update_weights", "finish_weight_update"]
            assert called == [*began, *session, "clear_kv_cache", f"set_global_steps {step}"]
            began = []
            assert ray.get(server.do.remote("state"))["report"] == mode, (sleep_level, step)
            ray.get(server.do.remote("snapshot", step))
        ray.kill(worker)
    found = ray.get(server.do.remote("compare", step))
    assert found == {number: [] for number in range(1, step + 1)}
    ray.get(trainer.close.remote())
    ray.kill(server)


def test_in_place_is_refused_where_no_engine_pulls() -> None:
    from verl.workers.rollout.base import get_rollout_class

    with pytest.raises(errors.InvalidArgument, match="no tensor is handed on"):
        Worker(in_place=True, device="cpu")
    Worker(in_place=True)
    with pytest.raises(errors.Unsupported, match="rollout.name=trtllm: only vLLM's and SGLang's"):
        get_rollout_class("trtllm")(SimpleNamespace(name="trtllm"))


@pytest.mark.parametrize(
    ("rollout", "model", "what"),
    [({"quantization": "fp8"}, {}, "quantises"), ({}, {"lora_rank": 8}, "LoRA"), ({}, {"lora": {"rank": 8}}, "LoRA")],
)
def test_in_place_is_refused_where_verl_changes_the_weights(
    monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any], model: dict[str, Any], what: str
) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    from deltasync.adapters import verl_vllm

    def made(self: Any, config: Any, model_config: Any) -> None:
        self.config, self.model_config = config, model_config

    monkeypatch.setattr(verl_vllm.vllm_rollout.ServerAdapter, "__init__", made)
    config = SimpleNamespace(**({"quantization": None, "qat": None} | rollout))
    with pytest.raises(errors.Unsupported, match=what):
        verl_vllm.ServerAdapter(config, SimpleNamespace(**({"lora_rank": 0, "lora": {}} | model)))
