"""Updates of a real SGLang replica by ``load_format: deltasync``: what is served equals what its own loader makes."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltasync
import pytest

pytestmark = pytest.mark.engines
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

import sglang_model  # noqa: E402, F401 (defines what transformers imports by way of torchvision)
import torch  # noqa: E402
from checkpoints import transformers_state_dict, without_expert  # noqa: E402
from engine_support import SCALE  # noqa: E402
from openssl_certificates import Certificates  # noqa: E402
from sglang_versions import weights  # noqa: E402
from vllm_replica import write_dist_info  # noqa: E402

HERE = Path(__file__).parent
#: Of a child's start, and of each of its answers.
DEADLINE_S = 180.0


class Replica:
    """The ranks of one server as processes. Calls go to all of them, and the answers come in their order."""

    def __init__(self, model: str, ranks: int, environment: dict[str, str], *options: str) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        command = [sys.executable, str(HERE / "sglang_rank_process.py"), model, str(ranks)]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(port), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | environment,
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            self.line(process)

    def line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        watch = threading.Timer(DEADLINE_S, process.kill)
        watch.start()
        try:
            text = process.stdout.readline()
        finally:
            watch.cancel()
        assert text, f"a rank ended: {process.wait(10)}"
        return text

    def ask(self, do: str, ranks: list[int] | None = None, **what: Any) -> list[dict[str, Any]]:
        chosen = [process for i, process in enumerate(self.processes) if ranks is None or i in ranks]
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            process.stdin.flush()
        return [json.loads(self.line(process)) for process in chosen]

    def update(self, number: int, **what: Any) -> list[dict[str, Any]]:
        answers = self.ask("update", version=str(number), **what)
        assert all(answer.get("success") for answer in answers), answers
        return answers

    def refused(self, number: int, **what: Any) -> list[str]:
        answers = self.ask("update", version=str(number), **what)
        assert [answer.get("success") for answer in answers] == [False] * len(answers), answers
        return [answer["message"] for answer in answers]

    def assert_serves(self, number: int, role: str = "target") -> None:
        for answer in self.ask("compare", number=number, role=role):
            assert answer == {"differing": []}

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


Start = Callable[..., tuple[deltasync.WeightManager, Replica]]


@pytest.fixture
def start(segment_name: str, tmp_path: Path) -> Iterator[Start]:
    """A trainer at version 1 and the ranks of a server that know of it, in an environment with deltasync installed."""
    made: list[Any] = []
    write_dist_info(tmp_path)

    def run(
        model: str = "qwen3",
        ranks: int = 1,
        *,
        options: tuple[str, ...] = (),
        environment: bool = True,
        timeout: float = 60,
        published: dict[str, Any] | None = None,
        tls: dict[str, Any] | None = None,
        more: dict[str, str] | None = None,
    ) -> tuple[deltasync.WeightManager, Replica]:
        first = weights(model, 1) if published is None else published
        manager = deltasync.WeightManager(first, name=segment_name, tls=tls)
        made.append(manager)
        manager.offload(first)
        path = os.pathsep.join([str(tmp_path), str(HERE), *sys.path])
        variables = {"DELTASYNC_TIMEOUT": str(timeout), "PYTHONPATH": path} | (more or {})
        if environment:
            variables["DELTASYNC_ENDPOINTS"] = manager.endpoint
        replica = Replica(model, ranks, variables, *options)
        made.append(replica)
        return manager, replica

    yield run
    for one in reversed(made):
        one.close()


def test_sglang_experts_as_transformers_has_them_in_memory_are_no_success(start: Start) -> None:
    """SGLang's loader skips these names without a word: the label moved on, and the experts stayed as they were."""
    manager, replica = start("qwen3_moe", published=transformers_state_dict("qwen3_moe"))
    replica.ask("remember")
    for _ in range(2):
        (message,) = replica.refused(1)
        assert "nothing was written" in message
        assert "4 weight(s) of the model would stay" in message and "mlp.experts.w13_weight ([8, 64, 64]" in message
        assert "4 tensor(s) of the trainer have no place" in message and "mlp.experts.gate_up_proj" in message
        assert "the trainer has all experts in one tensor" in message
    assert replica.ask("changed") == [{"target": []}]
    assert replica.ask("state")[0]["versions"] == []
    ignore = {"deltasync": {"ignore": ["*.mlp.experts.*"]}}
    (answer,) = replica.update(1, manifest=ignore)
    assert "placed 21 of 25" in answer["message"]
    changed = replica.ask("changed")[0]["target"]
    assert "model.embed_tokens.weight" in changed and not any("experts" in name for name in changed)


def test_sglang_ranks_have_every_expert_together(start: Start) -> None:
    """With expert parallelism no rank has a place for all tensors: all ranks together have one, or it is no success."""
    published = weights("qwen3_moe", 1) | {"model.layers.0.mlp.experts.8.up_proj.weight": torch.zeros(4)}
    _, replica = start("qwen3_moe", 2, options=("ep",), published=published)
    for message in replica.refused(1):
        assert "no rank takes all of it: 1 tensor(s) of the trainer have no place" in message
        assert "layers.0.mlp.experts.8.up_proj.weight" in message
    for answer in replica.update(1, manifest={"deltasync": {"ignore": ["*.experts.8.*"]}}):
        assert "placed 45 of 70" in answer["message"]
    replica.assert_serves(1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sglang_an_expert_that_no_tensor_fills_is_no_success(start: Start, ranks: int) -> None:
    _, replica = start("qwen3_moe", ranks, published=without_expert(weights("qwen3_moe", 1), 5))
    for message in replica.refused(1):
        assert "nothing was written" in message and "from [5, 0, 0] on" in message
        assert "layers.1.mlp.experts.w2_weight" in message


def test_sglang_a_tensor_that_no_rank_takes_is_no_success(start: Start) -> None:
    published = weights("qwen3", 1) | {"mtp.fc.weight": torch.zeros(4)}
    _, replica = start(ranks=2, published=published)
    for message in replica.refused(1):
        assert "1 tensor(s) of the trainer have no place: mtp.fc.weight" in message
        assert "a draft (MTP, EAGLE)" in message
    ignore = {"deltasync": {"ignore": ["mtp.*"]}}
    for answer in replica.update(1, manifest=ignore):
        assert "placed 25 of 26" in answer["message"]
    replica.assert_serves(1)


@pytest.mark.parametrize("model", ["qwen3_fp8", "qwen3_moe_fp8"])
def test_sglang_a_quantised_checkpoint_is_what_its_own_loader_makes_of_it(start: Start, model: str) -> None:
    manager, replica = start(model)
    for number in range(1, 5):
        if number > 1:
            manager.offload(weights(model, number))
        replica.update(number)
        replica.assert_serves(number)


@pytest.mark.parametrize("quantised", [False, True])
def test_sglang_scales_that_no_tensor_fills_are_no_success(start: Start, quantised: bool) -> None:
    """With weights that are quantised, and with such as are not."""
    named = weights("qwen3_fp8" if quantised else "qwen3", 1)
    _, replica = start("qwen3_fp8", published={name: w for name, w in named.items() if not name.endswith(SCALE)})
    for message in replica.refused(1):
        assert "nothing was written" in message and "would stay as they are" in message
        assert "layers.0.self_attn.qkv_proj.weight_scale_inv" in message


@pytest.mark.parametrize(("model", "ranks"), [("qwen3", 1), ("qwen3", 2), ("qwen3_moe", 1), ("qwen3_moe", 2)])
def test_sglang_twenty_deltas_equal_its_own_loader(start: Start, model: str, ranks: int) -> None:
    manager, replica = start(model, ranks)
    replica.update(1)
    replica.assert_serves(1)
    assert [answer["target"]["mode"] for answer in replica.ask("targets")] == ["loaded"] * ranks
    for number in range(2, 22):
        manager.offload(weights(model, number))
        replica.update(number)
        if number in (2, 3, 11, 21):
            replica.assert_serves(number)
    for answer in replica.ask("targets"):
        assert answer["target"]["mode"] == "delta"
        assert answer["target"]["direct"] == len(weights(model, 1))
        assert answer["target"]["reloaded"] == 0
    for answer in replica.ask("state"):
        assert answer == {"flushes": 21, "versions": [str(i) for i in range(1, 22)], "path": "/models/served"}


def test_sglang_the_number_of_another_epoch_is_the_trainers_of_now(start: Start, segment_name: str) -> None:
    manager, replica = start()
    replica.update(1)
    manager.offload(weights("qwen3", 2))
    replica.update(2)
    manager.offload(weights("qwen3", 3))
    assert replica.ask("wait_staged") == [{"number": 3}]  # which is never committed
    endpoint = manager.endpoint
    manager.close()
    with deltasync.WeightManager(weights("qwen3", 1), name=segment_name, listen=endpoint) as again:
        for number in (4, 5, 6):
            again.offload(weights("qwen3", number))
        replica.update(3)
        replica.assert_serves(6)
        assert replica.ask("targets")[0]["target"]["mode"] == "full"
        again.offload(weights("qwen3", 7))
        replica.update(4)
        replica.assert_serves(7)
        assert replica.ask("targets")[0]["target"]["mode"] == "delta"


def test_sglang_what_latent_attention_fuses_and_derives_is_loaded_by_its_loader(start: Start) -> None:
    manager, replica = start("deepseek_v3")
    for number in range(1, 5):
        if number > 1:
            manager.offload(weights("deepseek_v3", number))
        replica.update(number)
        replica.assert_serves(number)
    (answer,) = replica.ask("targets")
    assert answer["target"]["mode"] == "delta"
    assert answer["target"]["reloaded"] == 3 * 2  # q_a_proj, kv_a_proj_with_mqa and kv_b_proj of two layers
    assert answer["target"]["direct"] == len(weights("deepseek_v3", 1)) - 3 * 2


def test_sglang_over_its_http_application_with_endpoints_in_the_request(start: Start) -> None:
    manager, replica = start(environment=False)
    body = {"model_path": "/models/served", "load_format": "deltasync", "weight_version": "1"}
    (answer,) = replica.ask("http", body=body)
    assert answer["status"] == 400 and "DELTASYNC_ENDPOINTS" in answer["message"]
    body["manifest"] = {"deltasync": {"endpoints": [manager.endpoint], "timeout": 60, "verify": True}}
    (answer,) = replica.ask("http", body=body)
    assert answer["status"] == 200 and "version 1" in answer["message"], answer
    manager.offload(weights("qwen3", 2))
    (answer,) = replica.ask("http", body=body | {"weight_version": "2"})
    assert answer["status"] == 200
    replica.assert_serves(2)


def test_sglang_with_certificates_pulls_over_tls(start: Start, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    agent, rank = certificates.sign("agent", "IP:127.0.0.1"), certificates.sign("rank")
    environment = {"CA": certificates.ca, "CERT": rank[0], "KEY": rank[1]}
    manager, replica = start(
        tls={"cert": agent[0], "key": agent[1], "ca": certificates.ca},
        more={f"DELTASYNC_TLS_{part}": str(file) for part, file in environment.items()},
    )
    replica.update(1)
    manager.offload(weights("qwen3", 2))
    replica.update(2)
    replica.assert_serves(2)


def test_sglang_a_refused_flush_is_an_updated_server_with_a_stale_cache(start: Start) -> None:
    _, replica = start()
    replica.ask("run_requests", count=3)
    (answer,) = replica.update(1)
    assert "updated, stale cache" in answer["message"]
    replica.assert_serves(1)
    assert replica.ask("state")[0]["versions"] == ["1"]


def test_sglang_a_version_that_does_not_come_writes_nothing(start: Start) -> None:
    manager, replica = start(timeout=2)
    replica.update(1, manifest={"deltasync": {"timeout": 60}})
    replica.ask("remember")
    (message,) = replica.refused(5, manifest={"deltasync": {"timeout": 1.5}})
    assert "nothing was written" in message and "5" in message
    assert replica.ask("changed") == [{"target": []}]
    assert replica.ask("state")[0] == {"flushes": 1, "versions": ["1"], "path": "/models/served"}
    manager.offload(weights("qwen3", 2))
    replica.update(2, manifest={"deltasync": {"timeout": 60}})
    replica.assert_serves(2)


def test_sglang_a_rank_that_cannot_stage_or_write_keeps_both_at_the_version_before(start: Start) -> None:
    manager, replica = start(ranks=2)
    replica.update(1)
    manager.offload(weights("qwen3", 2))
    replica.update(2)
    replica.ask("remember")
    manager.offload(weights("qwen3", 3))
    replica.ask("forbid", ranks=[1], reason="kept in a cache")
    for message in replica.refused(3):
        assert "nothing was written" in message and "rank 1: kept in a cache" in message
    assert replica.ask("changed") == [{"target": []}] * 2
    replica.ask("forbid", ranks=[1], reason=None)
    replica.ask("fail_next_commit", ranks=[1])
    for message in replica.refused(3):
        assert "rolled back" in message and "rank 1: the device is lost" in message
    assert replica.ask("changed") == [{"target": []}] * 2
    assert [answer["versions"] for answer in replica.ask("state")] == [["1", "2"]] * 2
    replica.update(3)
    replica.assert_serves(3)


def test_sglang_a_rank_that_does_not_know_the_outcome_says_so_and_loads_all_again(start: Start) -> None:
    manager, replica = start(ranks=2)
    replica.update(1)
    manager.offload(weights("qwen3", 2))
    replica.update(2)
    manager.offload(weights("qwen3", 3))
    replica.ask("lose_store", ranks=[0], at="written")
    unknown, kept = replica.ask("update", version="3")
    assert kept["success"] and not unknown["success"]
    said = unknown["message"]
    assert "THE OUTCOME IS UNKNOWN: rank 0: the store" in said
    assert "sglang-target-tp0 are of no version: whether the other ranks keep version 3" in said
    assert "do not resume before an update has succeeded" in said and "as before" not in said
    assert replica.ask("state", ranks=[0])[0]["versions"] == ["1", "2"]  # SGLang asks rank 0
    assert [answer["target"]["version"] for answer in replica.ask("targets")] == [None, 3]
    manager.offload(weights("qwen3", 4))
    replica.update(4)
    replica.assert_serves(4)
    assert [answer["target"]["mode"] for answer in replica.ask("targets")] == ["loaded", "delta"]
    # In the vote before: this rank writes nothing, and so no other keeps what it wrote.
    replica.ask("remember")
    manager.offload(weights("qwen3", 5))
    replica.ask("lose_store", ranks=[0], at="staged")
    said, other = replica.refused(5, manifest={"deltasync": {"timeout": 3}})
    assert "THE OUTCOME IS UNKNOWN" in said and "this rank has written nothing" in said
    assert "in vain for rank 0" in other
    assert replica.ask("changed") == [{"target": []}] * 2
    replica.update(5, manifest={"deltasync": {"timeout": 60}})
    replica.assert_serves(5)


def test_sglang_what_somebody_else_wrote_fails_the_update_and_is_loaded_again(start: Start) -> None:
    manager, replica = start()
    replica.update(1)
    manager.offload(weights("qwen3", 2))
    replica.update(2)
    replica.ask("damage_next")
    manager.offload(weights("qwen3", 3))
    (message,) = replica.refused(3)
    assert "NOT ALL RANKS HAVE THE WEIGHTS OF BEFORE" in message and "do not resume" in message
    assert "model.norm.weight: tile" in message and "of version 3 differs" in message
    assert replica.ask("state")[0]["versions"] == ["1", "2"]
    replica.update(3)
    replica.assert_serves(3)
    assert replica.ask("targets")[0]["target"]["mode"] == "loaded"
    replica.ask("damage_next")
    manager.offload(weights("qwen3", 4))
    replica.update(4, manifest={"deltasync": {"verify": False}})
    replica.assert_serves(4)  # nothing was read back


def test_sglang_a_first_load_that_breaks_on_one_rank_is_said_by_both(start: Start) -> None:
    manager, replica = start(ranks=2)
    replica.ask("fail_next_load", ranks=[1])
    for message in replica.refused(1):
        assert "NOT ALL RANKS HAVE THE WEIGHTS OF BEFORE" in message and "as before" not in message
        assert "rank 0: the weights of sglang-target-tp0 are of no version: its first load was rolled back" in message
        assert "rank 1: the loader broke" in message and "the end of version 1" in message
    assert [answer["versions"] for answer in replica.ask("state")] == [[], []]
    replica.update(1)
    replica.assert_serves(1)
    manager.offload(weights("qwen3", 2))
    replica.update(2)
    replica.assert_serves(2)


def test_sglang_the_draft_is_brought_to_the_same_version_or_neither_is(start: Start) -> None:
    manager, replica = start(options=("draft",))
    replica.update(1)
    manager.offload(weights("qwen3", 2))
    replica.update(2)
    replica.assert_serves(2)
    replica.assert_serves(2, "draft")
    replica.ask("remember")
    manager.offload(weights("qwen3", 3))
    replica.ask("fail_next_commit", role="draft")
    (message,) = replica.refused(3)
    assert "the device is lost" in message
    assert replica.ask("changed") == [{"target": [], "draft": []}]
    replica.update(3)
    replica.assert_serves(3)
    replica.assert_serves(3, "draft")


def test_sglang_what_cannot_be_written_is_refused_with_its_reason(start: Start) -> None:
    manager, replica = start()
    replica.update(1)
    manager.offload(weights("qwen3", 2))
    replica.ask("remember")
    replica.ask("cache_mode", mode="daemon")
    assert "weight cache is active" in replica.refused(2)[0]
    replica.ask("cache_mode", mode="off")
    replica.ask("tags", tags=["weights"])
    assert "the weights are released" in replica.refused(2)[0]
    replica.ask("tags", tags=[])
    (answer,) = replica.ask("runner_alone")
    assert not answer["success"] and "scheduler" in answer["message"]
    assert replica.ask("changed") == [{"target": []}]
    replica.ask("begin_session")
    assert "session is open" in replica.refused(2)[0]
    replica.ask("end_session")
    replica.update(2)
    assert replica.ask("targets")[0]["target"]["mode"] == "loaded"  # others may have written meanwhile
    replica.assert_serves(2)


def test_sglang_weights_that_were_lost_in_sleep_come_back_from_the_shadow(start: Start) -> None:
    manager, replica = start(more={"DELTASYNC_SHADOW": "1"})
    replica.update(1)
    manager.offload(weights("qwen3", 2))
    replica.update(2)
    replica.ask("wake")
    assert replica.ask("targets")[0]["target"]["version"] == 2
    replica.assert_serves(2)
    manager.offload(weights("qwen3", 3))
    replica.update(3)
    replica.assert_serves(3)
    assert replica.ask("targets")[0]["target"]["mode"] == "delta"


def test_sglang_weights_that_were_lost_in_sleep_are_loaded_again(start: Start) -> None:
    manager, replica = start()
    replica.update(1)
    manager.offload(weights("qwen3", 2))
    replica.update(2)
    replica.ask("wake")
    assert replica.ask("targets")[0]["target"]["version"] is None
    manager.offload(weights("qwen3", 3))
    replica.update(3)
    replica.assert_serves(3)
    assert replica.ask("targets")[0]["target"]["mode"] == "loaded"
    manager.offload(weights("qwen3", 4))
    replica.update(4)
    replica.assert_serves(4)
    assert replica.ask("targets")[0]["target"]["mode"] == "delta"
