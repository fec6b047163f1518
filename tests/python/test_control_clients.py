"""The control service, asked as the clients of prime-rl, slime, AReaL and trl ask the servers that they were written
for; and what they see when something breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from control_clients import Areal, PrimeRl, Refused, Slime, TrlAsync, step  # noqa: E402
from control_fleet import TOKENS, Fleet, model  # noqa: E402

Fleets = Callable[..., Fleet]


def assert_serves(fleet: Fleet, value: float) -> None:
    assert fleet.engine.finish(fleet.engine.submit("new")).tokens == [value] * TOKENS


def write(directory: Path, value: float) -> str:
    safetensors = pytest.importorskip("safetensors.torch")
    directory.mkdir(parents=True)
    safetensors.save_file(model(value).state_dict(), directory / "model.safetensors")
    return str(directory)


def test_prime_rl_begins_at_step_0(fleets: Fleets) -> None:
    fleet = fleets(model="tiny", token="secret-of-the-pool")
    prime_rl = PrimeRl(fleet.control.endpoint, "secret-of-the-pool")
    prime_rl.wait_for_ready("tiny")
    with pytest.raises(ValueError, match="not found"):
        prime_rl.wait_for_ready("another")
    assert not prime_rl.init_broadcaster()
    for number in range(3):
        fleet.train(10.0 + number, label=f"step_{number}")
        running = [fleet.engine.submit(str(name)) for name in range(8)]
        prime_rl.update_weights(step(number))
        for request in running:
            tokens = fleet.engine.finish(request).tokens
            assert tokens == sorted(tokens) and request.ended == "length"
        assert_serves(fleet, 10.0 + number)
        assert fleet.client.get("/weight_info")["weight_version"] == f"step_{number}"
    # A run that goes on from a checkpoint names that; one with NIXL names nothing.
    prime_rl.update_weights("/shared/checkpoints/step_2/weight/")
    fleet.train(20.0)
    prime_rl.update_weights(None)
    assert_serves(fleet, 20.0)
    assert {status for _, status in prime_rl.answers} == {200, 404}


def test_prime_rl_writes_files(fleets: Fleets, tmp_path: Path) -> None:
    fleet = fleets()
    prime_rl = PrimeRl(fleet.control.endpoint)
    prime_rl.update_weights(write(tmp_path / "broadcasts" / "step_1", 5.0))
    assert_serves(fleet, 5.0)
    prime_rl.update_weights(write(tmp_path / "checkpoints" / "step_2" / "weight", 6.0))
    assert_serves(fleet, 6.0)
    empty = tmp_path / "broadcasts" / "latest"
    empty.mkdir()
    with pytest.raises(Refused, match="has no safetensors files, and is no …/step_N"):
        prime_rl.update_weights(str(empty))
    assert prime_rl.statuses("/update_weights") == [200, 200, 400]  # once
    assert_serves(fleet, 6.0)


@pytest.mark.parametrize("dialects", [["vllm"], ["sglang"]])
def test_adapters_are_refused_at_once(fleets: Fleets, dialects: list[str]) -> None:
    fleet = fleets(dialects=dialects)
    prime_rl = PrimeRl(fleet.control.endpoint)
    with pytest.raises(Refused, match=r"deltasync\.adapters\.lora"):
        prime_rl.load_lora_adapter("policy", "/shared/step_1")
    assert prime_rl.answers == [("/load_lora_adapter", 501)]


def test_slime_updates_an_engine_started_elsewhere(fleets: Fleets) -> None:
    fleet = fleets(dialects=["sglang"], world_size=4, pp_size=2)
    slime = Slime(fleet.control.endpoint)
    assert slime.init() == {"num_gpus": 4, "parallel": (2, 2, 1, 1), "worker_type": "regular"}
    slime.health_generate()
    slime.pull_weights(0)  # a base is there
    for version in (2, 3):
        request = fleet.engine.submit(f"before {version}")
        fleet.train(float(version))
        slime.update_weights(version)
        assert request.ended in ("abort", "length")
        assert_serves(fleet, float(version))
    slime.offload()
    assert fleet.engine.asleep == {"weights", "kv_cache"}
    waits = fleet.engine.submit("waits")
    slime.onload(["weights"])
    fleet.train(4.0)
    slime.pull_weights(4)
    slime.onload(["kv_cache"])
    assert fleet.engine.finish(waits).tokens == [4.0] * TOKENS
    slime.abort()
    slime.onload()
    assert_serves(fleet, 4.0)


def test_slime_is_told_of_the_engine_what_its_program_says(fleets: Fleets) -> None:
    fleet = fleets(dialects=["sglang"], engine_info={"dp_size": 2})
    with pytest.raises(AssertionError, match="dp_size"):
        Slime(fleet.control.endpoint).init()


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_areal_reads_directories(fleets: Fleets, tmp_path: Path, dialect: str) -> None:
    fleet = fleets(dialects=[dialect])
    areal = Areal(fleet.control.endpoint, dialect)
    assert areal.check_health()
    request = fleet.engine.submit("a")
    areal.pause_generation()
    assert request.ended == "abort"
    areal.update_weights_from_disk(write(tmp_path / "weight_update_v1", 7.0))
    waits = fleet.engine.submit("b")
    areal.continue_generation()
    assert fleet.engine.finish(waits).tokens == [7.0] * TOKENS
    areal.offload()
    areal.onload(["weights"])
    areal.onload(["kv_cache"])
    assert_serves(fleet, 7.0)
    with pytest.raises(Refused):
        areal.update_weights_from_disk(str(tmp_path / "weight_update_v2"))
    assert_serves(fleet, 7.0)
    assert {status for _, status in areal.answers} == {200, 400}


def test_trl_finds_what_it_looks_for(fleets: Fleets) -> None:
    config = {"model_config": {"max_model_len": 4096, "logprobs_mode": "processed_logprobs"}}
    fleet = fleets(model="tiny", engine_info={"vllm_config": config})
    trl = TrlAsync(fleet.control.endpoint)
    assert trl.get_max_model_len() == 4096
    info = trl.get_server_info()
    assert info["model_config"] == config["model_config"] | {"model": "tiny"}
    assert info["lora_config"] is None and info["parallel_config"]["data_parallel_size"] == 1
    # Its own engine for weights is NCCL, whose other side would wait for workers: it hears that none come.
    assert info["weight_transfer_config"] is None
    with pytest.raises(Refused, match="do not come by NCCL"):
        trl.init_weight_transfer()
    fleet.train(2.0)
    trl.synchronise({"version": 2})
    assert_serves(fleet, 2.0)


# What clients see when something breaks.


def test_a_hook_that_raises_once_is_asked_again_by_prime_rl(fleets: Fleets) -> None:
    fleet = fleets()
    prime_rl = PrimeRl(fleet.control.endpoint)
    for number, hook in enumerate(("hold", "reset_caches", "release_hold", "resume_admission")):
        fleet.train(2.0 + number, label=f"step_{number}")
        fleet.engine.broken[hook] = RuntimeError("not now")
        prime_rl.update_weights(step(number))
        assert_serves(fleet, 2.0 + number)
        assert (hook in fleet.engine.broken) == (hook == "reset_caches")  # its caches are salted
        fleet.engine.broken.clear()
    assert sorted(status for _, status in prime_rl.answers if status != 200) == [500] * 3


def test_a_hook_that_raises_leaves_slimes_engine_serving(fleets: Fleets) -> None:
    fleet = fleets()
    slime = Slime(fleet.control.endpoint)
    fleet.train(2.0)
    fleet.engine.broken["abort"] = RuntimeError("not now")
    with pytest.raises(Refused, match="abort: RuntimeError: not now") as failed:
        slime.update_weights(2)
    assert failed.value.status == 400 and set(failed.value.answer) == {"error"}
    assert_serves(fleet, 2.0)  # pulled before
    reset_caches = fleet.engine.reset_caches

    def fails_first(timeout: float) -> None:
        if slime.answers[-1] == ("/pause_generation", 200):
            raise RuntimeError("requests run")
        reset_caches(timeout)

    fleet.engine.reset_caches = fails_first  # type: ignore[method-assign]
    fleet.train(3.0)
    slime.update_weights(3)
    assert slime.statuses("/flush_cache") == [400, 200]
    assert_serves(fleet, 3.0)


def test_a_hook_slower_than_its_client_ends_alone(fleets: Fleets) -> None:
    fleet = fleets()
    go_on = threading.Event()
    fleet.engine.slow["hold"] = go_on
    hasty = PrimeRl(fleet.control.endpoint, timeout=0.3)
    fleet.train(2.0, label="step_1")
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(hasty.update_weights, step(1))
        while hasty.statuses("/pause") != [0, 0]:
            assert not update.done()
        assert fleet.client.get("/is_paused") == {"is_paused": True}
        hasty.client.timeout = 60
        go_on.set()
        update.result(60)  # the try after those that it gave up
    assert hasty.statuses("/pause")[-1] == 200 and hasty.statuses("/update_weights") == [200]
    assert_serves(fleet, 2.0)


def test_a_second_client_pauses_meanwhile(fleets: Fleets) -> None:
    fleet = fleets()
    go_on = threading.Event()
    fleet.train(2.0, label="step_1")
    request = fleet.engine.submit("a")
    fleet.client.post("/pause?mode=keep&clear_cache=false")
    commit = fleet.receiver.commit

    def slow(**keywords: Any) -> Any:
        assert go_on.wait(60)
        return commit(**keywords)

    fleet.receiver.commit = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        update = pool.submit(fleet.client.send, "POST", "/update_weights", {"weight_dir": step(1)})
        second = Slime(fleet.control.endpoint)
        pause = pool.submit(second.request, "pause_generation")
        assert fleet.client.get("/is_paused") == {"is_paused": True}  # this is not kept waiting
        go_on.set()
        assert update.result(60)[0] == 200
        assert pause.result(60)["status"] == "ok"
    assert fleet.engine.finish(request).ended == "abort"
    waits = fleet.engine.submit("b")
    fleet.client.post("/resume")  # either's ends the pause of both
    second.request("continue_generation")
    assert fleet.engine.finish(waits).tokens == [2.0] * TOKENS


def test_the_agent_goes_away_amid_an_update(fleets: Fleets) -> None:
    fleet = fleets(timeout=2)
    prime_rl = PrimeRl(fleet.control.endpoint)
    prime_rl.TRIES = 2
    prepare = fleet.receiver.prepare

    def dies(*args: Any, **keywords: Any) -> Any:
        prepared = prepare(*args, **keywords)
        fleet.manager.close()
        return prepared

    fleet.receiver.prepare = dies  # type: ignore[method-assign]
    with pytest.raises(Refused) as failed:
        prime_rl.update_weights(step(7))  # which it waits for
    assert failed.value.status in (500, 504) and "stage:" in failed.value.answer["error"]
    assert prime_rl.statuses("/resume") == [200]
    assert_serves(fleet, 1.0)
    slime = Slime(fleet.control.endpoint)
    with pytest.raises(Refused) as failed:
        slime.update_weights(2)
    assert failed.value.status == 400 and failed.value.answer["success"] is False
    assert slime.statuses("/pause_generation") == []
    assert_serves(fleet, 1.0)


def test_an_update_that_fails_leaves_trls_server_with_the_old_weights(fleets: Fleets) -> None:
    fleet = fleets(timeout=1)
    trl = TrlAsync(fleet.control.endpoint)
    with pytest.raises(Refused, match="version number 9") as failed:
        trl.synchronise({"version": 9})
    assert failed.value.status == 504
    assert trl.answers[-1] == ("/finish_weight_update", 409)  # no 5xx, which GRPO's client sends again and again
    assert fleet.client.get("/is_paused") == {"is_paused": True}
    fleet.train(2.0)
    trl.synchronise({"version": 2})
    assert_serves(fleet, 2.0)


def test_what_no_try_repairs_is_not_asked_again(fleets: Fleets, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    fleet = fleets()
    prime_rl = PrimeRl(fleet.control.endpoint)
    other = tmp_path / "step_1"
    other.mkdir()
    safetensors.save_file({"weight": torch.zeros(2, 2)}, other / "model.safetensors")
    with pytest.raises(Refused) as failed:
        prime_rl.update_weights(str(other))
    assert failed.value.status == 409 and "LayoutMismatch" in failed.value.answer["error"]
    fleet.engine.can_hold = False
    fleet.engine.broken["hold"] = NotImplementedError("hold")
    assert fleet.client.send("POST", "/pause?mode=keep")[0] == 501
    assert_serves(fleet, 1.0)
