"""trl's protocol, driven as its AsyncGRPOTrainer drives it, against rollout servers over HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltasync import Tls, WeightManager, errors
from deltasync.adapters import servers
from deltasync.adapters.publisher import Publisher
from deltasync.adapters.servers import Http, SglangServer, StaleCache, VllmServer
from deltasync.adapters.trl import WeightTransfer
from openssl_certificates import Certificates
from rollout_servers import RolloutServer

torch = pytest.importorskip("torch")
from control_fleet import TOKENS, Fleet  # noqa: E402


@pytest.fixture
def server() -> Iterator[RolloutServer]:
    made = RolloutServer()
    yield made
    made.close()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(torch.bfloat16)


def stream(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()


def assert_serves(server: RolloutServer, module: torch.nn.Module) -> None:
    assert server.receiver is not None
    received = dict(server.receiver.tensors())
    assert received.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        assert torch.equal(received[name].view(torch.int16), parameter.detach().view(torch.int16)), name


def test_the_server_is_paused_for_the_commit_only(server: RolloutServer, segment_name: str) -> None:
    trained = model()
    transfer = WeightTransfer(VllmServer(server.url), timeout=60, name=segment_name)
    transfer.init_weight_transfer()
    for number in (1, 2, 3):
        server.calls.clear()
        transfer.pause()
        transfer.send_weights((assert_generates(server), (name, tensor))[1] for name, tensor in stream(trained))
        transfer.resume()
        assert_serves(server, trained)
        assert server.label == str(number)
        expected = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
        assert server.routes == (["/init_weight_transfer_engine"] if number == 1 else []) + expected
        with torch.no_grad():
            trained[0].weight[number] += 0.25
    assert dict(server.calls)["/pause"] == {"mode": "keep", "clear_cache": "true"}
    transfer.destroy()
    transfer.destroy()


def assert_generates(server: RolloutServer) -> None:
    assert not server.paused


def test_a_rank_that_fails_leaves_a_server_that_can_begin_again(server: RolloutServer, segment_name: str) -> None:
    trained = model()
    transfer = WeightTransfer(VllmServer(server.url), timeout=60, name=segment_name)
    transfer.init_weight_transfer()
    transfer.send_weights(stream(trained))
    transfer.resume()
    server.calls.clear()
    server.fail["/update_weights"] = (500, "rank 1: no space")
    with pytest.raises(errors.InternalError, match="rank 1: no space"):
        transfer.send_weights(stream(trained))
    # Its session is closed without a label.
    assert server.calls[-1] == ("/finish_weight_update", {})
    assert server.label == "1" and server.paused
    transfer.send_weights(stream(trained))
    transfer.resume()
    assert server.label == "3" and not server.paused
    transfer.destroy()


def broken() -> Iterator[tuple[str, torch.Tensor]]:
    yield "0.weight", torch.zeros(16, 8, dtype=torch.bfloat16)
    raise RuntimeError("gather broke")


def test_a_server_whose_weights_may_be_of_no_version_stays_paused(server: RolloutServer, segment_name: str) -> None:
    transfer = WeightTransfer(VllmServer(server.url), timeout=60, name=segment_name)
    for by_hand in (True, False):
        server.fail["/update_weights"] = (500, "WeightsUnknown: NOT ALL RANKS HAVE THE WEIGHTS OF BEFORE")
        with pytest.raises(errors.InternalError, match="NOT ALL RANKS"):
            transfer.send_weights(stream(model()))
        with pytest.raises(RuntimeError, match="gather broke"):
            transfer.send_weights(broken())
        assert server.paused and "/resume" not in server.routes
        if by_hand:
            transfer.resume()
            assert not server.paused
            server.calls.clear()
    transfer.destroy()
    assert server.paused and "/resume" not in server.routes


def test_an_update_is_never_on_a_server_that_generates(server: RolloutServer, segment_name: str) -> None:
    transfer = WeightTransfer(VllmServer(server.url), timeout=60, name=segment_name)
    transfer.send_weights(stream(model()))
    server.lose.add("/resume")
    with pytest.raises(errors.InternalError, match="is lost"):
        transfer.resume()
    assert not server.paused
    transfer.send_weights(stream(model()))  # whose /update_weights wants a pause
    transfer.resume()
    assert server.label == "2"
    transfer.destroy()


def test_a_server_that_was_started_again_is_told_again(server: RolloutServer, segment_name: str) -> None:
    transfer = WeightTransfer(VllmServer(server.url), timeout=60, name=segment_name)
    transfer.send_weights(stream(model()))
    transfer.resume()
    assert server.receiver is not None
    server.receiver.close()
    server.receiver = None
    transfer.send_weights(stream(model()))
    transfer.resume()
    assert_serves(server, model())
    assert server.label == "2"
    transfer.destroy()


def test_an_iterator_that_raises_touches_no_server(server: RolloutServer, segment_name: str) -> None:
    transfer = WeightTransfer([VllmServer(server.url)], model=model(), timeout=60, name=segment_name)
    with pytest.raises(RuntimeError, match="gather broke"):
        transfer.send_weights(broken())
    assert server.calls == []
    transfer.destroy()


def test_two_servers_and_one_that_fails_is_named(server: RolloutServer, segment_name: str) -> None:
    other = RolloutServer()
    try:
        trained = model()
        servers = [VllmServer(server.url), VllmServer(other.url)]
        transfer = WeightTransfer(servers, timeout=60, early_pause=True, name=segment_name)
        transfer.pause()
        assert server.paused and other.paused
        transfer.send_weights(stream(trained))
        transfer.resume()
        assert_serves(server, trained)
        assert_serves(other, trained)
        other.fail["/start_weight_update"] = (500, "not now")
        with pytest.raises(errors.InternalError, match=f"{other.url}.*not now"):
            transfer.send_weights(stream(trained))
        assert server.paused and other.paused
        transfer.send_weights(stream(trained))
        transfer.resume()
        assert (server.label, other.label) == ("3", "3")
        assert not server.paused and not other.paused
        transfer.destroy()
    finally:
        other.close()


def test_vllm_reads_the_token_from_a_file_of_its_own(server: RolloutServer, segment_name: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret of many bytes")
    (tmp_path / "token").chmod(0o600)
    transfer = WeightTransfer(
        VllmServer(server.url), timeout=60, name=segment_name, token_file=tmp_path / "token", model=model()
    )
    with pytest.raises(errors.InvalidArgument, match="VllmServer\\(token_file"):
        transfer.send_weights(stream(model()))
    transfer.server.token_file = str(tmp_path / "token")
    transfer.send_weights(stream(model()))
    transfer.resume()
    assert_serves(server, model())
    assert "secret" not in str(server.calls)
    transfer.destroy()


def test_vllms_word_is_waited_for_beyond_its_deadline(server: RolloutServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(path: str, given: dict[str, Any]) -> dict[str, Any]:
        if path == "/update_weights":
            time.sleep(given["update_info"]["deadline_ms"] / 1000 + 1)
        server.label = given.get("weight_version", server.label)
        return {"message": "ok"}

    monkeypatch.setattr(server, "handle", late)
    vllm = VllmServer(server.url)
    vllm.update(7, 0.5)
    assert server.label == "7"
    monkeypatch.setattr(servers, "VLLM_GRACE_S", 0.1)
    monkeypatch.setattr(servers, "ANSWER_S", 0.0)
    with pytest.raises(errors.DeadlinePassed, match="may have version 8 now.*do not resume"):
        vllm.update(8, 0.5)
    assert server.label == "7"


def test_sglang_takes_the_version_as_the_label(server: RolloutServer) -> None:
    sglang = SglangServer(server.url)
    sglang.connect({"endpoints": ["10.0.0.1:7070"]}, 30)
    sglang.pause(30)
    sglang.update(7, 30)
    sglang.resume(30)
    assert server.routes == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert dict(server.calls)["/update_weights_from_disk"] == {
        "model_path": "/models/served",
        "load_format": "deltasync",
        "weight_version": "7",
        "flush_cache": True,
        "manifest": {"deltasync": {"endpoints": ["10.0.0.1:7070"], "timeout": 30}},
    }
    server.fail["/update_weights_from_disk"] = (200, '{"success": true, "message": "updated, stale cache: 3 run"}')
    with pytest.raises(StaleCache, match="version 8"):
        sglang.update(8, 30)
    server.fail["/update_weights_from_disk"] = (400, '{"success": false, "message": "nothing was written"}')
    with pytest.raises(errors.InternalError, match="nothing was written") as caught:
        sglang.update(8, 30)
    assert not isinstance(caught.value, StaleCache)


def test_an_endpoint_may_be_given_as_it_is_and_one_is_asked_for(server: RolloutServer, segment_name: str) -> None:
    with WeightManager({"w": torch.ones(3)}, name=segment_name) as manager:
        VllmServer(server.url).connect({"endpoints": manager.endpoint}, 30)
        assert dict(server.calls)["/init_weight_transfer_engine"]["init_info"]["agent"] == [manager.endpoint]
    sglang = SglangServer(server.url)
    sglang.connect({"endpoints": "10.0.0.1:7070"}, 30)
    sglang.update(7, 30)
    given = dict(server.calls)["/update_weights_from_disk"]["manifest"]["deltasync"]
    assert given == {"endpoints": ["10.0.0.1:7070"], "timeout": 30}
    with pytest.raises(errors.InvalidArgument, match="endpoints=None is neither"):
        VllmServer(server.url).connect({"agent": "10.0.0.1:7070"}, 30)


def test_names_that_need_not_match_go_to_the_plug_ins(server: RolloutServer, segment_name: str) -> None:
    transfer = WeightTransfer(VllmServer(server.url, ignore=["mtp.*"]), timeout=60, name=segment_name)
    transfer.init_weight_transfer()
    transfer.send_weights(stream(model()))
    assert dict(server.calls)["/init_weight_transfer_engine"]["init_info"]["ignore"] == ["mtp.*"]
    transfer.destroy()
    sglang = SglangServer(server.url, ignore=("mtp.*",))
    sglang.connect({"endpoints": ["10.0.0.1:7070"]}, 30)
    sglang.update(7, 30)
    given = dict(server.calls)["/update_weights_from_disk"]["manifest"]["deltasync"]
    assert given == {"endpoints": ["10.0.0.1:7070"], "ignore": ["mtp.*"], "timeout": 30}


def test_weights_cross_in_tls_with_files_of_the_servers_host(
    server: RolloutServer, segment_name: str, tmp_path: Path
) -> None:
    certificates = Certificates(tmp_path)
    cert, key = certificates.sign("agent", "IP:127.0.0.1")
    own_cert, own_key = certificates.sign("rollout")
    of_server = {"ca": str(certificates.ca), "cert": str(own_cert), "key": str(own_key)}
    transfer = WeightTransfer(
        VllmServer(server.url, tls=of_server),
        timeout=60,
        name=segment_name,
        tls={"cert": cert, "key": key, "ca": certificates.ca, "allow": ["rollout"]},
    )
    transfer.init_weight_transfer()
    transfer.send_weights(stream(model()))
    transfer.resume()
    assert_serves(server, model())
    assert dict(server.calls)["/init_weight_transfer_engine"]["init_info"]["tls"] == of_server
    transfer.destroy()
    sglang = SglangServer(server.url, tls=Tls(ca=certificates.ca))
    sglang.connect({"endpoints": ["10.0.0.1:7070"]}, 30)
    sglang.update(7, 30)
    given = dict(server.calls)["/update_weights_from_disk"]["manifest"]["deltasync"]
    assert given == {"endpoints": ["10.0.0.1:7070"], "tls": {"ca": str(certificates.ca)}, "timeout": 30}
    with pytest.raises(errors.InvalidArgument, match="tls='ca.pem'"):
        VllmServer(server.url, tls="ca.pem")


def test_with_a_ca_no_token_is_made_beyond_loopback(segment_name: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    cert, key = certificates.sign("agent", "IP:127.0.0.1")
    publisher = Publisher(host="0.0.0.0", name=segment_name, tls={"cert": cert, "key": key, "ca": certificates.ca})
    assert publisher.token == ""
    publisher.close()


def test_deadlines_and_absent_servers_are_named() -> None:
    http = Http("http://127.0.0.1:9")
    with pytest.raises(errors.ConnectionFailed, match="127.0.0.1:9"):
        http.get("/health", timeout=5)
    with pytest.raises(errors.DeadlinePassed, match="not healthy after 0.1 s"):
        http.wait_healthy(0.1)
    with pytest.raises(errors.DeadlinePassed, match="/pause"):
        http.post("/pause", timeout=0)
    with pytest.raises(errors.InvalidArgument):
        Http("ftp://example")


def answering(*pieces: bytes, every: float = 0.0) -> str:
    """The URL of a server that answers each request with these, and hangs up."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            with listening.accept()[0] as one, contextlib.suppress(OSError):
                one.recv(65536)
                for piece in pieces:
                    one.sendall(piece)
                    time.sleep(every)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def page(status: str, body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body


@pytest.mark.parametrize("status", ["200 OK", "500 Oops"])
def test_an_answer_that_comes_slowly_has_a_deadline(status: str) -> None:
    began = time.monotonic()
    with pytest.raises(errors.DeadlinePassed, match="no answer after 1.0 s"):
        Http(answering(page(status, b"", 30), *[b" "] * 30, every=0.5)).post("/pause", timeout=1)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("status", ["200 OK", "500 Oops"])
def test_a_server_that_dies_amid_its_answer_is_a_lost_connection(status: str) -> None:
    with pytest.raises(errors.ConnectionFailed, match="IncompleteRead"):
        Http(answering(page(status, b"{}", 100))).post("/resume", timeout=30)


def test_a_page_that_says_nothing_of_the_update_is_no_success() -> None:
    url = answering(page("200 OK", b"<html>Please sign in</html>"))
    with pytest.raises(errors.InternalError, match="is this the rollout server's address"):
        VllmServer(url).update(7, 30)
    with pytest.raises(errors.InternalError, match="version 7: .*is this the rollout server's address"):
        SglangServer(url).update(7, 30)
    with pytest.raises(errors.InternalError, match="version 7: nothing was written"):
        SglangServer(answering(page("200 OK", b'{"success": false, "message": "nothing was written"}'))).update(7, 30)


def test_the_agent_ends_whatever_the_server_raises(server: RolloutServer, segment_name: str) -> None:
    class Own(VllmServer):
        def resume(self, timeout: float) -> None:
            raise RuntimeError("a session that is closed")

    transfer = WeightTransfer(Own(server.url), early_pause=True, timeout=60, name=segment_name)
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.destroy()
    assert transfer.publisher is None


@pytest.mark.parametrize("make", [VllmServer, SglangServer])
def test_the_control_service_is_such_a_server(fleets: Callable[..., Fleet], make: type) -> None:
    fleet = fleets(model="/models/served")
    server = make(f"http://{fleet.control.endpoint}")
    server.connect({"endpoints": [fleet.manager.endpoint]}, 60)
    for version in (2, 3):
        request = fleet.engine.submit(f"before {version}")
        fleet.train(float(version))
        server.pause(60)
        server.update(version, 60)
        server.resume(60)
        assert fleet.engine.finish(request).ended == "length"
        assert fleet.engine.finish(fleet.engine.submit("a")).tokens == [float(version)] * TOKENS
        assert fleet.client.get("/weight_info")["weight_version"] == str(version)


@pytest.mark.engines
def test_trls_clients_find_the_control_service(fleets: Callable[..., Fleet]) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed, without which trl's clients are not made")
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient
    from trl.generation.vllm_client import VLLMClient

    config = {"model_config": {"max_model_len": 4096, "logprobs_mode": "processed_logprobs", "dtype": "torch.bfloat16"}}
    fleet = fleets(model="tiny", engine_info={"vllm_config": config})
    PartialState(cpu=True)  # which trl's log wants
    client = AsyncClient(f"http://{fleet.control.endpoint}", 60)
    client.wait_for_server_ready()
    assert client.get_max_model_len() == 4096 and client.get_dtype() == "torch.bfloat16"
    assert client.get_world_size() == 1 and client.get_server_info()["lora_config"] is None
    with pytest.raises(Exception, match="501.*do not come by NCCL"):
        client.init_weight_transfer_engine({"master_address": "10.0.0.2", "master_port": 1})
    with pytest.raises(Exception, match="501.*adapter"):
        client.load_lora_adapter("policy", "/shared/policy")
    request = fleet.engine.submit("a")
    fleet.train(2.0)
    client.pause()
    client.start_weight_update()
    client.update_weights({})
    client.finish_weight_update()
    client.resume()
    assert fleet.engine.finish(request).ended == "length"
    assert fleet.engine.finish(fleet.engine.submit("b")).tokens == [2.0] * TOKENS

    # GRPO's sends again what a server fails at.
    synchronous = VLLMClient(base_url=f"http://{fleet.control.endpoint}", connection_timeout=60)
    assert synchronous.model == "tiny" and synchronous.get_world_size() == 1
    assert synchronous.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(RuntimeError, match="has no weight-transfer engine"):
        synchronous.init_communicator("cuda")
    with pytest.raises(Exception, match="409.*no update_weights has succeeded"), synchronous.weight_update():
        pass
    fleet.train(3.0)
    fleet.engine.broken["hold"] = RuntimeError("not now")
    with synchronous.weight_update():
        synchronous._post(f"{synchronous.base_url}/update_weights", json={"update_info": {}})
    assert "hold" not in fleet.engine.broken
    synchronous.reset_prefix_cache()
    assert fleet.engine.finish(fleet.engine.submit("c")).tokens == [3.0] * TOKENS


@pytest.mark.engines
def test_the_real_trainer_drives_it(server: RolloutServer, segment_name: str) -> None:
    """trl's own start of training and its synchronisation after each step, with a real transformers model."""
    pytest.importorskip("trl", reason="trl is not installed")
    from collections import defaultdict

    from accelerate import Accelerator
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl.experimental.async_grpo import async_grpo_trainer as module

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    trained = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2))
    trained = trained.to(torch.bfloat16)
    trainer = module.AsyncGRPOTrainer.__new__(module.AsyncGRPOTrainer)
    trainer.model, trainer.accelerator = trained, Accelerator(cpu=True)
    trainer.weight_transfer = WeightTransfer(VllmServer(server.url), timeout=60, name=segment_name)
    trainer.rollout_worker, trainer.model_version, trainer._lora_sync = None, 0, False
    trainer._metrics = {"train": defaultdict(list)}
    module._TrainBeginCallback(trainer).on_train_begin(None, None, None)
    step = module.StepIntervalCallback(trainer._sync_weight, 1)
    for number in (1, 2, 3):
        assert trainer.model_version == number
        assert server.label == str(number)
        assert not server.paused
        assert_serves(server, trained)
        with torch.no_grad():
            trained.model.layers[1].mlp.up_proj.weight[number] += 0.5
        state = type("State", (), {"global_step": number})
        step.on_step_end(None, state, None)
    trainer.weight_transfer.destroy()
