"""The control service, driven by the requests that clients of other servers send to an engine that generates."""

from __future__ import annotations

import gc
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import errors
from deltasync._control_weights import ReceiverWeights
from deltasync.prepared import Prepared

torch = pytest.importorskip("torch")
from control_fleet import TOKENS, Client, Engine, Fleet, model  # noqa: E402

TOKEN = "a token of the control service"


def test_fastdeploy_clients_pause_update_and_resume(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    client = fleet.client
    request = fleet.engine.submit("a")
    client.post("/v1/pause")
    assert request.ended == "abort"
    fleet.train(2.0)
    answer = client.post("/v1/update_weights", {"verify_checksum": True})
    assert answer["status"] == "success" and answer["result"] == [{"version": "2"}]
    waits = fleet.engine.submit("b")
    assert client.get("/v1/is_paused")["result"] == {"is_paused": True}
    client.post("/v1/resume")
    assert fleet.engine.finish(waits).tokens == [2.0] * TOKENS
    assert client.send("GET", "/v1/is_paused")[2]["X-Deltasync-Version"] == "2"


def test_a_forked_child_leaves_the_service_alone(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    child = os.fork()
    if child == 0:
        try:
            fleet.control.close()
        finally:
            os._exit(0 if fleet.control.endpoint == "" else 1)
    deadline, (ended, status) = time.monotonic() + 20, os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended and status == 0
    fleet.train(2.0)
    fleet.client.post("/v1/pause")
    assert fleet.client.post("/v1/update_weights", {})["result"] == [{"version": "2"}]


def test_what_a_forked_child_has_a_copy_of_ends(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    endpoint = fleet.control.endpoint
    host, _, port = endpoint.rpartition(":")
    question = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with (
        socket.create_connection((host, int(port)), 60) as asks,
        socket.create_connection((host, int(port)), 60) as rests,
    ):
        for connection in (asks, rests):
            connection.sendall(question + b"\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            asks.sendall(question + b"Connection: close\r\n\r\n")
            while asks.recv(4096):
                pass
            fleet.control.close()
            assert rests.recv(4096) == b""
            deltasync.RolloutControl(fleet.engine, fleet.receiver, listen=endpoint).close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_sleep_loses_nothing(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    fleet.client.post("/v1/sleep?tags=weight,kv_cache")
    assert fleet.engine.asleep == {"weights", "kv_cache"} and fleet.value() != fleet.value()
    waits = fleet.engine.submit("a")
    failed = fleet.client.post("/v1/update_weights", {}, 500)
    assert "asleep" in failed["error_message"]
    fleet.client.post("/v1/wakeup")
    assert fleet.engine.finish(waits).tokens == [1.0] * TOKENS
    assert fleet.receiver.attest() == []


def test_vllm_clients_update_between_start_and_finish(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    client = fleet.client
    request = fleet.engine.submit("a")
    client.post("/pause?mode=keep")
    client.post("/start_weight_update", {"is_checkpoint_format": True})
    fleet.train(2.0)
    assert client.post("/update_weights", {"update_info": {}}) == {"message": "Weights updated"}
    client.post("/finish_weight_update", {"weight_version": "step-2"})
    client.post("/resume")
    assert set(fleet.engine.finish(request).tokens) <= {1.0, 2.0} and request.ended == "length"
    assert client.get("/weight_info")["weight_version"] == "step-2"
    assert client.get("/server_info")["weight_transfer_config"] is not None


def test_verl_wakes_weights_before_the_cache(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(dialects=["sglang"])
    client = fleet.client
    client.post("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
    fleet.train(2.0)
    client.post("/resume_memory_occupation", {"tags": ["weights"]})
    assert client.post("/pull_weights", {"target_version": 2})["success"]
    client.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert fleet.engine.finish(fleet.engine.submit("a")).tokens == [2.0] * TOKENS
    client.get("/v1/is_paused", 404)


def test_what_a_hook_raises_is_the_answer_and_the_engine_serves_on(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(timeout=5)
    fleet.train(2.0)
    fleet.engine.broken["reset_caches"] = RuntimeError("no cache today")
    failed = fleet.client.post("/update_weights", {"weight_dir": None}, 500)
    assert failed["error"].startswith("reset_caches: RuntimeError: no cache today")
    assert fleet.engine.finish(fleet.engine.submit("a")).tokens == [2.0] * TOKENS
    missing = fleet.client.post("/update_weights", {"weight_dir": "/x/step_99"}, 504)
    assert "99" in missing["error"]  # it was waited for
    assert fleet.engine.finish(fleet.engine.submit("b")).ended == "length"


@pytest.mark.parametrize("hook", ["stop_admission", "abort", "wait_idle"])
def test_a_hook_that_nobody_awaits_has_done_nothing(fleets: Callable[..., Fleet], hook: str) -> None:
    fleet = fleets()
    does = getattr(fleet.engine, hook)

    async def later(*args: Any) -> Any:
        return does(*args)

    setattr(fleet.engine, hook, later)
    failed = fleet.client.post("/pause", None, 500)
    assert f"{hook}() returned an awaitable" in failed["error"]
    assert fleet.client.get("/is_paused") == {"is_paused": False}
    setattr(fleet.engine, hook, does)
    fleet.client.post("/pause")


def test_two_clients_at_once_wait_for_each_other(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(timeout=30)
    targets = ["/pause?mode=keep", "/resume", "/sleep", "/wake_up", "/update_weights", "/v1/pause", "/v1/wakeup"]
    stop = threading.Event()

    def ask(number: int) -> int:
        client = Client(fleet.control.endpoint)
        count = 0
        while not stop.is_set():
            body = {"weight_dir": None} if targets[number % len(targets)] == "/update_weights" else None
            status, answer, _ = client.send("POST", targets[number % len(targets)], body)
            assert status in (200, 409, 503), answer
            number += 3
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, number) for number in range(4)]
        for value in range(2, 12):
            fleet.engine.submit(str(value))
            fleet.train(float(value))
            time.sleep(0.1)
        stop.set()
        assert all(one.result() > 0 for one in asked)
    fleet.client.post("/wake_up")
    fleet.client.post("/update_weights", {"weight_dir": None})
    fleet.client.post("/resume")
    assert fleet.engine.finish(fleet.engine.submit("last")).tokens == [11.0] * TOKENS


def test_a_token_is_asked_for(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(token=TOKEN)
    assert fleet.client.get("/is_paused") == {"is_paused": False}
    for wrong in (Client(fleet.control.endpoint), Client(fleet.control.endpoint, TOKEN + "x")):
        assert "token" in wrong.post("/pause", None, 401)["error"]
        wrong.get("/health")
    assert fleet.client.get("/is_paused") == {"is_paused": False}


def test_what_cannot_be_asked(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    client = fleet.client
    assert "openapi.json" in client.get("/nothing", 404)["error"]
    client.get("/pause", 405)
    assert client.send("HEAD", "/clear_load_weight")[0] == 405 and not fleet.engine.asleep
    assert set(client.get("/openapi.json")["paths"]) >= {"/v1/pause", "/pause", "/pause_generation"}
    assert client.send("POST", "/v1/update_weights", [1])[0] == 400
    with pytest.raises(errors.Unauthenticated, match="give a token"):
        deltasync.RolloutControl(fleet.engine, fleet.receiver, listen="0.0.0.0:0")
    with pytest.raises(errors.InvalidArgument, match="there is v1, vllm and sglang"):
        deltasync.RolloutControl(fleet.engine, fleet.receiver, dialects=["trtllm"])
    with (
        deltasync.Receiver(fleet.manager.endpoint, module=model(0.0), background=True) as receiver,
        pytest.raises(errors.InvalidArgument, match="without background"),
    ):
        deltasync.RolloutControl(fleet.engine, receiver)
    with pytest.raises(errors.InvalidArgument, match="inherit from it"):
        deltasync.RolloutControl(object(), fleet.receiver)  # type: ignore[arg-type]


def test_weights_without_a_shadow_wake_as_the_newest(segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with (
        deltasync.WeightManager(trained, name=segment_name) as manager,
        deltasync.Receiver(manager.endpoint, module=served) as receiver,
    ):
        manager.offload()
        receiver.update()
        engine = Engine(served)
        with deltasync.RolloutControl(engine, receiver) as control:
            client = Client(control.endpoint)
            client.post("/v1/sleep")
            assert receiver.version is None
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.fill_(2.0)
            manager.offload()
            manager.wait_ready()
            client.post("/v1/wakeup")
            assert receiver.version is not None and receiver.version.number == 2
            assert engine.finish(engine.submit("a")).tokens == [2.0] * TOKENS
        engine.close()
        assert engine.torn == []


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize(
    ("sleep", "wake"),
    [("/sleep?level=2", "/wake_up"), ("/release_memory_occupation", "/resume_memory_occupation")],
)
def test_what_never_had_weights_wakes_before_the_trainer_has_some(
    sleep: str, wake: str, shadow: bool, segment_name: str
) -> None:
    trained, served = model(1.0), model(0.0)
    with (
        deltasync.WeightManager(trained, name=segment_name) as manager,
        deltasync.Receiver(manager.endpoint, module=served, shadow=shadow) as receiver,
    ):
        engine = Engine(served)
        with deltasync.RolloutControl(engine, receiver) as control:
            client = Client(control.endpoint)
            client.post(sleep, {})
            client.post(wake, {})
            assert not engine.asleep and not engine.admits
            manager.offload()
            client.post("/v1/update_weights", {"version": "1"})
            assert engine.admits and engine.finish(engine.submit("a")).tokens == [1.0] * TOKENS
        engine.close()


def test_a_pull_in_place_that_is_late_leaves_no_version(segment_name: str) -> None:
    trained, served = model(1.0), model(0.0)
    with (
        deltasync.WeightManager(trained, name=segment_name) as manager,
        deltasync.Receiver(manager.endpoint, module=served, full_update_policy="in_place") as receiver,
    ):
        manager.offload()
        receiver.update()
        pull, goes_on = receiver._pulls._pull, threading.Event()

        def late(prepared: Prepared) -> Any:  # as where the machine is busy: it may write when its time is over
            assert goes_on.wait(60)
            return pull(prepared)

        receiver._pulls._pull = late  # type: ignore[method-assign]
        weights = ReceiverWeights(receiver)
        with pytest.raises(errors.DeadlinePassed):
            weights.stage("", "", False, 0.1)
        assert weights.current() is None
        goes_on.set()
        end = time.monotonic() + 60
        while weights.current() is None and time.monotonic() < end:
            time.sleep(0.01)
        assert weights.current() == receiver.version is not None


def test_a_request_is_for_a_version(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    client, control = fleet.client, fleet.control
    first = control.admit({"x-deltasync-MIN-version": "1"})
    assert first.version.number == 1 and first.headers == {"X-Deltasync-Version": "1"}
    with pytest.raises(errors.VersionConflict, match="for version 2 or a later one, and 1 is live"):
        control.admit({"X-Deltasync-Min-Version": "2"})
    with pytest.raises(errors.InvalidArgument, match="no version's number"):
        control.admit({"X-Deltasync-Min-Version": "new"})
    assert client.send("GET", "/weight_info", X_Deltasync_Min_Version="2")[0] == 409
    fleet.train(2.0)
    client.post("/update_weights", {"weight_dir": None})
    assert client.send("GET", "/weight_info", X_Deltasync_Min_Version="2")[0] == 200
    second = control.admit({"X-Deltasync-Exact-Version": "2"})
    assert second.version.number == 2 and second.cache_salt != first.cache_salt
    assert client.get("/weight_info")["cache_salt"] == second.cache_salt
    client.post("/update_weight_version", {"new_version": "zwölf"})
    named = control.admit({"X-Deltasync-Exact-Version": "zwölf"})
    assert named.version.label == "zwölf" and named.headers == {}
    client.post("/v1/sleep?tags=weight")
    with pytest.raises(errors.VersionConflict, match="no version is live"):
        control.admit()
    fleet.control.close()
    with pytest.raises(errors.InvalidArgument, match="is closed"):
        control.admit()


def test_verify_checksum_repairs_live_memory(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    fleet.client.post("/v1/pause")
    with torch.no_grad():
        fleet.served.weight[3, 4] = 7.0
    fleet.client.post("/v1/update_weights", {})  # up to date
    assert fleet.served.weight[3, 4] == 7.0
    fleet.client.post("/v1/update_weights", {"verify_checksum": True})
    assert fleet.served.weight[3, 4] == 1.0
    fleet.client.post("/v1/resume")


def test_what_could_not_be_repaired_is_not_served_by_the_next_service(
    fleets: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleets()
    with torch.no_grad():
        fleet.served.weight.fill_(5.0)

    def damaged(*_: Any, **__: Any) -> None:
        raise errors.CorruptData("tile 0 is wrong again")

    with monkeypatch.context() as patch:
        patch.setattr(fleet.receiver, "repair", damaged)
        fleet.client.post("/v1/pause")
        fleet.client.post("/v1/update_weights", {"verify_checksum": True}, status=500)
    fleet.control.close()
    fleet.control = deltasync.RolloutControl(fleet.engine, fleet.receiver)
    client = Client(fleet.control.endpoint)
    assert client.get("/is_paused")["is_paused"] and not fleet.engine.admits
    client.post("/v1/update_weights")
    assert fleet.value() == 1.0 and fleet.receiver.attest() == []
    client.post("/v1/resume")
    assert fleet.engine.admits


def test_versions_are_asked_for_by_label(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    with torch.no_grad():
        for parameter in fleet.trained.parameters():
            parameter.fill_(2.0)
    fleet.manager.offload(label="step two")
    fleet.client.post("/v1/pause")
    answer = fleet.client.post("/v1/update_weights", {"version": "step two"})
    assert answer["result"] == [{"version": "step two"}] and fleet.value() == 2.0
    fleet.client.post("/v1/resume")


def test_the_placement_is_listed(fleets: Callable[..., Fleet]) -> None:
    names = fleets().client.get("/v1/placement")["result"]
    assert names == {"bias": ["bias"], "weight": ["weight"]}


def test_a_directory_is_taken(fleets: Callable[..., Fleet], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    fleet = fleets()
    client = fleet.client
    safetensors.save_file(model(5.0).state_dict(), tmp_path / "model.safetensors")
    body = {"model_path": str(tmp_path), "abort_all_requests": True}
    assert client.post("/update_weights_from_disk", body)["success"]
    assert fleet.engine.finish(fleet.engine.submit("a")).tokens == [5.0] * TOKENS
    assert client.get("/weight_info")["weight_version"] == str(tmp_path)
    assert client.send("GET", "/weight_info", X_Deltasync_Min_Version="1")[0] == 409
    salt = client.get("/weight_info")["cache_salt"]
    # What the directory has is no base: the trainer's version comes whole.
    client.post("/update_weights", {"weight_dir": None})
    assert fleet.engine.finish(fleet.engine.submit("b")).tokens == [1.0] * TOKENS
    client.post("/areal_update_weights", {"model_path": str(tmp_path)})
    assert client.get("/weight_info")["cache_salt"] == salt  # the same weights
    client.post("/sleep")
    client.post("/wake_up")
    assert fleet.engine.finish(fleet.engine.submit("c")).tokens == [5.0] * TOKENS


def test_pages_of_other_sites_may_not_ask(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    port = fleet.control.endpoint.rpartition(":")[2]
    for headers in (
        {"Host": f"site.example:{port}"},
        {"Origin": "http://site.example", "Content_Type": "text/plain"},
        {"Sec_Fetch_Site": "cross-site"},
    ):
        for method, target in (("POST", "/v1/pause"), ("GET", "/clear_load_weight"), ("GET", "/openapi.json")):
            status, answer, _ = fleet.client.send(method, target, **headers)
            assert status == 403 and "give a token" in answer["error"], headers
    assert fleet.client.get("/is_paused") == {"is_paused": False} and not fleet.engine.asleep
    assert fleet.client.send("GET", "/is_paused", Host=f"localhost:{port}", Origin=f"http://localhost:{port}")[0] == 200
    trusted = fleets(token=TOKEN)
    assert trusted.client.send("GET", "/is_paused", Host="engine0.cluster")[0] == 200


def test_a_wait_for_requests_hears_the_end(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    fleet.engine.hold(0)  # so that this request never ends
    fleet.engine.submit("a")
    entered = threading.Event()
    wait_idle = fleet.engine.wait_idle

    def waits(timeout: float) -> None:
        entered.set()
        wait_idle(timeout)

    fleet.engine.wait_idle = waits  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(fleet.client.send, "POST", "/pause?mode=wait")
        entered.wait()
        pool.submit(fleet.control.close).result(60)
        call.exception()
    assert fleet.engine.admits


def test_a_pull_hears_the_end(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    prepare = fleet.receiver.prepare
    closing = threading.Event()

    def late(*args: Any, **keywords: Any) -> Any:
        began.set()
        closing.wait()  # close() has cancelled all there was to be cancelled
        return prepare(*args, **keywords)

    began = threading.Event()
    cancel = fleet.receiver.cancel

    def cancels() -> None:
        cancel()
        if began.is_set():
            closing.set()

    fleet.receiver.prepare = late  # type: ignore[method-assign]
    fleet.receiver.cancel = cancels  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        pool.submit(fleet.client.send, "POST", "/update_weights", {"weight_dir": "/x/step_99"})
        began.wait()
        pool.submit(fleet.control.close).result(60)


def test_an_engine_that_knows_its_service_is_freed(fleets: Callable[..., Fleet], segment_name: str) -> None:
    fleet = fleets()
    engine = Engine(fleet.served)
    with deltasync.RolloutControl(engine, fleet.receiver) as control:
        engine.control = control  # type: ignore[attr-defined]
    assert control.endpoint == ""
    engine.close()
    gone = weakref.ref(engine)
    del engine, control
    gc.collect()
    assert gone() is None


def test_a_hook_may_not_close(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    resume = fleet.engine.resume_admission

    def closes() -> None:
        fleet.engine.resume_admission = resume  # type: ignore[method-assign]
        fleet.control.close()

    fleet.engine.resume_admission = closes  # type: ignore[method-assign]
    fleet.client.post("/pause")
    assert "called by a hook" in fleet.client.post("/resume", None, 500)["error"]
    fleet.client.post("/resume")
    assert fleet.engine.finish(fleet.engine.submit("a")).ended == "length"


#: Its hook drops the last reference to the service.
DROPS = """
import sys
sys.path[:0] = sys.argv[1:2]
from control_fleet import Client, Fleet
fleet = Fleet(sys.argv[2])
stop_admission = fleet.engine.stop_admission
client = Client(fleet.control.endpoint)
def drops():
    stop_admission()
    del fleet.control
fleet.engine.stop_admission = drops
try:
    client.send("POST", "/pause")
except OSError:
    pass
import time
for _ in range(600):
    try:
        client.send("GET", "/health")
    except OSError:
        print("gone")
        break
    time.sleep(0.1)
"""


def test_a_hook_that_drops_the_service_ends_it(segment_name: str) -> None:
    argv = [sys.executable, "-c", DROPS, str(Path(__file__).parent), segment_name]
    ended = subprocess.run(argv, timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "gone" in ended.stdout, ended.stderr


def test_an_end_amid_a_call(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    entered = threading.Event()

    def stuck(timeout: float) -> None:
        entered.set()
        time.sleep(0.5)

    fleet.engine.wait_idle = stuck  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(fleet.client.send, "POST", "/pause?mode=wait")
        entered.wait()
        fleet.control.close()
        fleet.control.close()
        try:
            assert call.result()[0] in (200, 500, 503)
        except (http.client.HTTPException, OSError):
            pass  # it is gone, and says so


#: Ends without closing anything, while a client asks.
ENDS = """
import sys, threading, http.client
sys.path[:0] = sys.argv[1:2]
from control_fleet import Fleet
fleet = Fleet(sys.argv[2])
def ask():
    while True:
        try:
            fleet.client.send("GET", "/v1/is_paused")
        except (OSError, http.client.HTTPException):
            pass
threading.Thread(target=ask, daemon=True).start()
fleet.client.post("/v1/pause")
"""


def test_a_process_ends_while_clients_ask(segment_name: str) -> None:
    argv = [sys.executable, "-c", ENDS, str(Path(__file__).parent), segment_name]
    ended = subprocess.run(argv, timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


#: Closes the service while schedulers take requests.
ADMITS = """
import sys
sys.path[:0] = sys.argv[1:2]
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from control_fleet import Fleet
from deltasync import RolloutControl
from deltasync.errors import InvalidArgument
fleet = Fleet(sys.argv[2])
def admits(control, together):
    together.wait()
    try:
        while True:
            control.admit()
    except InvalidArgument:
        pass
for _ in range(20):
    control, together = RolloutControl(fleet.engine, fleet.receiver), Barrier(7)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(admits, control, together) for _ in range(6)]
        together.wait()
        control.close()
        for one in asked:
            one.result()
fleet.close()
"""


def test_requests_are_taken_while_the_service_ends(segment_name: str) -> None:
    argv = [sys.executable, "-c", ADMITS, str(Path(__file__).parent), segment_name]
    ended = subprocess.run(argv, timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
