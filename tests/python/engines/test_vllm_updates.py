"""vLLM's real Worker, factory, plug-in loading, loaders, layerwise reload and HTTP routes, updated by deltasync."""

import deltasync
import pytest

pytestmark = pytest.mark.engines
pytest.importorskip("torch")

from checkpoints import shapes  # noqa: E402
from engine_support import change, first_version  # noqa: E402
from vllm_replica import RankFailed, Replica, needs_vllm  # noqa: E402

DELTAS = 20


class Setup:
    def __init__(self, name, folder, model, ranks):
        needs_vllm()
        self.weights = first_version(shapes(model))
        self.manager = deltasync.WeightManager(self.weights, name=name)
        self.number = 0
        self.publish()
        self.replica = Replica(folder, model, ranks)

    def publish(self):
        self.number += 1
        if self.number > 1:
            change(self.weights, self.number)
        self.manager.offload(self.weights, self.number)
        self.manager.wait_ready()

    def init(self, **more):
        info = {"agent": self.manager.endpoint, "deadline_ms": 60_000} | more
        self.replica.rpc("init_weight_transfer_engine", info)

    def update(self, number, **more):
        self.replica.rpc("start_weight_update")
        self.replica.rpc("update_weights", {"version": number, "verify": True} | more)
        self.replica.rpc("finish_weight_update")

    def versions(self):
        return [state["version"] for state in self.replica.do("state")]

    def close(self):
        if hasattr(self, "replica"):
            self.replica.close()
        self.manager.close()


@pytest.fixture
def start(segment_name, tmp_path):
    made = []

    def make(model="qwen3", ranks=1):
        made.append(Setup(segment_name, tmp_path, model, ranks))
        return made[-1]

    yield make
    for setup in made:
        setup.close()


@pytest.mark.parametrize(("model", "ranks"), [("qwen3", 1), ("qwen3_moe", 1), ("qwen3_tied", 1), ("qwen3", 2)])
def test_every_version_is_what_vllms_own_loader_makes_of_it(start, model, ranks):
    setup = start(model, ranks)
    for facts in setup.replica.do("facts"):
        assert facts == {"imported_early": False, "engine": "DeltasyncWeightTransferEngine"}
    setup.init()
    addresses = [state["addresses"] for state in setup.replica.do("state")]
    for number in range(1, DELTAS + 2):
        if number > 1:
            setup.publish()
        setup.update(number)
        setup.replica.do("snapshot", number)
    for state, before in zip(setup.replica.do("state"), addresses, strict=True):
        assert (state["version"], state["state"], state["report"]) == (DELTAS + 1, "placed", "delta")
        assert state["reload"] == [] and state["placed"] == len(shapes(model))
        assert state["addresses"] == before and state["meta"] == []
    for found in setup.replica.do("compare", DELTAS + 1):
        assert found == {str(number): [] for number in range(1, DELTAS + 2)}


def test_a_permuted_layer_goes_through_layerwise_reload(start):
    setup = start()
    setup.replica.do("permute", "model.layers.1.mlp.gate_up_proj")
    setup.init()
    setup.update(1)
    wanted = ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    assert setup.replica.do("state")[0]["reload"] == wanted
    setup.replica.do("snapshot", 1)
    for number in (2, 3):
        setup.publish()
        setup.update(number)
        setup.replica.do("snapshot", number)
    (found,) = setup.replica.do("compare", 3)
    # The plain loader does not permute: the permuted parameter differs from it, and no other does.
    assert set(found.values().__iter__().__next__()) == {"model.layers.1.mlp.gate_up_proj.weight"}
    assert all(value == ["model.layers.1.mlp.gate_up_proj.weight"] for value in found.values())


def test_the_http_routes_and_the_label(start):
    setup = start()
    http = setup.replica.http()

    def post(route, **body):
        return http.post(route, json=body)

    info = {"agent": setup.manager.endpoint, "deadline_ms": 60_000}
    assert post("/init_weight_transfer_engine", init_info=info).status_code == 200
    assert post("/start_weight_update").status_code == 200
    assert post("/update_weights", update_info={"version": 1}).status_code == 200
    assert post("/finish_weight_update", weight_version="1").status_code == 200
    assert http.get("/weight_info").json() == {"weight_version": "1"}
    setup.replica.do("snapshot", 1)
    # A version that never comes: the label, the weights and the session are as before.
    assert post("/start_weight_update").status_code == 200
    assert post("/update_weights", update_info={"version": 99, "deadline_ms": 300}).status_code == 500
    assert post("/finish_weight_update", weight_version="99").status_code == 500
    assert http.get("/weight_info").json() == {"weight_version": "1"}
    assert setup.replica.do("unchanged", 1) == [[]]
    assert post("/update_weights", update_info={"version": 1}).status_code == 500  # no session
    setup.publish()
    assert post("/start_weight_update").status_code == 200
    assert post("/update_weights", update_info={"version": 2}).status_code == 200
    assert post("/finish_weight_update", weight_version="2").status_code == 200
    assert http.get("/weight_info").json() == {"weight_version": "2"}
    assert setup.versions() == [2]


@pytest.mark.parametrize("phase", ["stage", "commit"])
def test_a_rank_that_fails_changes_no_rank(start, phase):
    setup = start("qwen3", 2)
    setup.init()
    for number in (1, 2):
        if number > 1:
            setup.publish()
        setup.update(number)
    setup.replica.do("snapshot", "before")
    setup.publish()
    setup.replica.ranks[1].do("fail_next", phase)
    setup.replica.rpc("start_weight_update")
    with pytest.raises(RankFailed) as failed:
        setup.replica.rpc("update_weights", {"version": 3})
    assert "[0] Aborted: nothing was changed on any rank: rank 1: RuntimeError" in str(failed.value)
    assert "[1] RuntimeError" in str(failed.value) and "told to fail" in str(failed.value)
    assert setup.replica.do("unchanged", "before") == [[], []]
    for state in setup.replica.do("state"):
        assert (state["version"], state["active"]) == (2, False)
    setup.update(3)
    assert setup.versions() == [3, 3]


def test_an_unknown_key_and_a_wrong_order_are_errors(start):
    setup = start()
    with pytest.raises(RankFailed, match="not initialised"):
        setup.replica.rpc("start_weight_update")
    with pytest.raises(RankFailed, match="Invalid init_info"):
        setup.replica.rpc("init_weight_transfer_engine", {"agents": "x"})
    with pytest.raises(RankFailed, match=r"127\.0\.0\.1:9"):
        setup.init(agent="127.0.0.1:9", deadline_ms=300)
    setup.init()
    setup.replica.rpc("start_weight_update")
    with pytest.raises(RankFailed, match="Invalid update_info"):
        setup.replica.rpc("update_weights", {"versions": 1})
    setup.update(1)
    with pytest.raises(RankFailed, match="start_weight_update must be called"):
        setup.replica.rpc("update_weights", {"version": 1})


@pytest.mark.parametrize(("what", "reason"), [("lora", "LoRA"), ("eplb", "EPLB"), ("ipc_cache", "shared")])
def test_what_cannot_be_written_is_refused_with_the_reason(start, what, reason):
    setup = start()
    setup.replica.do("refuse", what)
    with pytest.raises(RankFailed, match=reason):
        setup.init()
    setup.replica.do("refuse", "nothing")
    setup.init()
    setup.update(1)
    setup.replica.do("refuse", what)
    with pytest.raises(RankFailed, match=reason):
        setup.replica.rpc("start_weight_update")
    assert not setup.replica.do("state")[0]["active"]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(start, level):
    setup = start()
    setup.init()
    for number in (1, 2):
        if number > 1:
            setup.publish()
        setup.update(number)
    setup.publish()
    setup.replica.rpc("sleep", level)
    with pytest.raises(RankFailed, match="the weights sleep: wake them first"):
        setup.update(3)
    setup.replica.rpc("wake_up", ["kv_cache"])
    with pytest.raises(RankFailed, match="the weights sleep"):
        setup.update(3)
    setup.replica.rpc("wake_up", ["weights"])
    setup.update(3)
    assert setup.replica.do("state")[0]["report"] == ("delta" if level == 1 else "loaded")
    setup.replica.do("snapshot", 3)
    assert setup.replica.do("compare", 3) == [{"3": []}]


def test_a_draft_is_a_second_target(start):
    setup = start()
    setup.replica.do("add_draft")
    setup.init()
    for number in (1, 2, 3):
        if number > 1:
            setup.publish()
        setup.update(number)
        setup.replica.rpc("start_draft_weight_update")
        setup.replica.rpc("update_weights", {"version": number, "verify": True})
        setup.replica.rpc("finish_weight_update")
        (draft,) = setup.replica.do("draft_matches", number)
        # What it shares with the target is the target's to write.
        assert draft == {"equal": True, "placed": ["model.norm.weight"], "version": number}
        setup.replica.do("snapshot", number)
    assert setup.versions() == [3]
    assert setup.replica.do("compare", 3) == [{str(number): [] for number in (1, 2, 3)}]
