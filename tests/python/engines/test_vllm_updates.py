"""vLLM's real Worker, factory, plug-in loading, loaders, layerwise reload and HTTP routes, updated by deltasync."""

import deltasync
import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")

from checkpoints import shapes, transformers_state_dict, without_expert  # noqa: E402
from engine_support import SCALE, change, first_version  # noqa: E402
from openssl_certificates import Certificates  # noqa: E402
from vllm_replica import RankFailed, Replica, needs_vllm  # noqa: E402

DELTAS = 20


class Setup:
    def __init__(self, name, directory, model, ranks, stages=1, edit=lambda weights: weights, tls=None):
        needs_vllm()
        self.name, self.before = name, 0
        self.weights = edit(first_version(shapes(model)))
        self.manager = deltasync.WeightManager(self.weights, name=name, tls=tls)
        self.number = 0
        self.publish()
        self.replica = Replica(directory, model, ranks, stages)

    def publish(self):
        self.number += 1
        if self.number > 1:
            change(self.weights, self.number)
        self.manager.offload(self.weights, self.number - self.before)
        self.manager.wait_ready()

    def restart(self):
        """The trainer ends and comes back at the same address: another epoch, other weights, numbers from 1."""
        endpoint = self.manager.endpoint
        self.manager.close()
        self.manager = deltasync.WeightManager(self.weights, name=self.name, listen=endpoint)
        self.before = self.number

    def init(self, **more):
        info = {"agent": self.manager.endpoint, "deadline_ms": 60_000} | more
        self.replica.rpc("init_weight_transfer_engine", info)

    def update(self, number, **more):
        self.replica.rpc("start_weight_update")
        self.replica.rpc("update_weights", {"version": number} | more)
        self.replica.rpc("finish_weight_update")

    def each(self, last):
        """The number of each version up to `last`, when it is published and committed."""
        for number in range(1, last + 1):
            if number > 1:
                self.publish()
            self.update(number)
            yield number

    def reach(self, last, *, snapshot=False):
        """With `snapshot` the ranks keep every version for `compare`."""
        for number in self.each(last):
            if snapshot:
                self.replica.do("snapshot", number)

    def versions(self):
        return [state["version"] for state in self.replica.do("state")]

    def close(self):
        if hasattr(self, "replica"):
            self.replica.close()
        self.manager.close()


@pytest.fixture
def start(segment_name, tmp_path):
    made = []

    def make(model="qwen3", ranks=1, stages=1, **more):
        made.append(Setup(segment_name, tmp_path, model, ranks, stages, **more))
        return made[-1]

    yield make
    for setup in made:
        setup.close()


@pytest.mark.parametrize(
    ("model", "ranks"), [("qwen3", 1), ("qwen3_moe", 1), ("qwen3_tied", 1), ("qwen3", 2), ("qwen3_moe", 2)]
)
def test_every_version_is_what_vllms_own_loader_makes_of_it(start, model, ranks):
    setup = start(model, ranks)
    for facts in setup.replica.do("facts"):
        assert facts == {"imported_early": False, "engine": "DeltasyncWeightTransferEngine"}
    setup.init()
    addresses = [state["addresses"] for state in setup.replica.do("state")]
    setup.reach(DELTAS + 1, snapshot=True)
    for state, before in zip(setup.replica.do("state"), addresses, strict=True):
        assert (state["version"], state["state"], state["report"]) == (DELTAS + 1, "placed", "delta")
        assert state["reload"] == [] and state["placed"] == len(shapes(model))
        assert state["addresses"] == before and state["meta"] == []
    for found in setup.replica.do("compare", DELTAS + 1):
        assert found == {str(number): [] for number in range(1, DELTAS + 2)}


@pytest.mark.parametrize("model", ["qwen3_fp8", "qwen3_moe_fp8"])
def test_a_quantised_checkpoint_goes_through_layerwise_reload(start, model):
    """Weights in fp8 and their scales: every version is what vLLM makes of them, whatever its kernels want."""
    setup = start(model)
    setup.init()
    setup.reach(4, snapshot=True)
    (state,) = setup.replica.do("state")
    assert (state["version"], state["state"], state["meta"]) == (4, "placed", [])
    quantised = {name.removesuffix(SCALE) for name in shapes(model) if name.endswith(SCALE)}
    assert state["reload"] == sorted({*quantised, *(f"{name}{SCALE}" for name in quantised)})
    assert setup.replica.do("compare", 4) == [{str(number): [] for number in range(1, 5)}]


def test_scales_that_no_tensor_fills_end_the_init(start):
    setup = start("qwen3_fp8", edit=lambda weights: {n: w for n, w in weights.items() if not n.endswith(SCALE)})
    with pytest.raises(RankFailed, match="UnmatchedWeights.*qkv_proj.weight_scale_inv"):
        setup.init()


def test_weights_that_are_not_quantised_are_refused_by_an_engine_of_quantised_ones(start):
    setup = start("qwen3_fp8", edit=lambda weights: first_version(shapes("qwen3")))
    with pytest.raises(RankFailed, match="UnmatchedWeights.*qkv_proj.weight_scale_inv"):
        setup.init()


def test_ranks_with_certificates_pull_over_tls(start, tmp_path):
    certificates = Certificates(tmp_path)
    agent, rank = certificates.sign("agent", "IP:127.0.0.1"), certificates.sign("rank")
    setup = start(ranks=2, tls={"cert": agent[0], "key": agent[1], "ca": certificates.ca})
    with pytest.raises(RankFailed, match="--tls-ca"):
        setup.init(deadline_ms=20_000)
    setup.init(tls={"ca": str(certificates.ca), "cert": str(rank[0]), "key": str(rank[1])})
    setup.reach(3)
    assert setup.versions() == [3, 3]


def test_names_with_a_wrappers_prefix_end_the_init(start):
    """vLLM's loader would refuse them, amid the first load."""
    setup = start(edit=lambda weights: {f"_fsdp_wrapped_module.{name}": tensor for name, tensor in weights.items()})
    with pytest.raises(RankFailed) as failed:
        setup.init()
    text = str(failed.value)
    assert "UnmatchedWeights" in text and "the prefix '_fsdp_wrapped_module.' of a wrapper" in text
    assert "25 tensor(s) of the trainer have no place" in text and "19 weight(s) of the model would stay" in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_expert_that_no_tensor_fills_ends_the_init(start, ranks):
    setup = start("qwen3_moe", ranks, edit=lambda weights: without_expert(weights, 5))
    with pytest.raises(RankFailed, match=r"w13_weight.*from \[5, 0, 0\] on") as failed:
        setup.init()
    assert str(failed.value).count("UnmatchedWeights") == ranks
    setup.init(ignore=["*.w13_weight", "*.w2_weight"])
    setup.update(1)


def test_experts_as_transformers_has_them_in_memory_are_placed(start):
    """vLLM's loader knows both: each expert's part of the one tensor is found."""
    setup = start("qwen3_moe", edit=lambda weights: transformers_state_dict("qwen3_moe"))
    setup.init()
    setup.reach(3, snapshot=True)
    (state,) = setup.replica.do("state")
    assert (state["version"], state["placed"], state["reload"]) == (3, 25, [])


def test_a_tensor_that_no_stage_takes_fails_the_update(start):
    surplus = {"model.layers.0.surplus.weight": torch.zeros(4, dtype=torch.bfloat16)}
    setup = start("qwen3_tied", 2, 2, edit=lambda weights: weights | surplus)
    setup.init()
    setup.replica.do("snapshot", 0)
    setup.replica.rpc("start_weight_update")
    with pytest.raises(RankFailed, match=r"no rank takes.*1 tensor.*model.layers.0.surplus.weight") as failed:
        setup.replica.rpc("update_weights", {"version": 1})
    assert "[0]" in str(failed.value) and "[1]" in str(failed.value)
    assert setup.replica.do("unchanged", 0) == [[], []]
    setup.init(ignore=["*.surplus.*"])
    setup.update(1)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_who_guesses_from_the_text_has_no_draft_that_takes_what_is_left_over(start, method):
    surplus = {"model.layers.0.surplus.weight": torch.zeros(4, dtype=torch.bfloat16)}
    setup = start(edit=lambda weights: weights | surplus)
    setup.replica.do("speculate", method)
    with pytest.raises(RankFailed, match="UnmatchedWeights.*model.layers.0.surplus.weight"):
        setup.init()
    setup.init(ignore=["*.surplus.*"])
    setup.update(1)


def test_stages_of_a_pipeline_have_their_part_of_every_version(start):
    setup = start("qwen3_tied", 2, 2)
    setup.init()
    setup.reach(5, snapshot=True)
    placed = [state["placed"] for state in setup.replica.do("state")]
    # Layers are on one rank each; the embedding is the last one's too, as its head.
    assert sum(placed) == len(shapes("qwen3_tied")) + 1 and min(placed) > 10
    assert setup.versions() == [5, 5]
    assert setup.replica.do("compare", 5) == [{str(number): [] for number in range(1, 6)}] * 2


def test_the_number_of_another_epoch_is_the_trainers_of_now(start):
    setup = start()
    setup.init()
    setup.reach(2)
    setup.publish()
    assert setup.replica.do("wait_staged") == [3]  # which is never committed
    setup.restart()
    for _ in range(3):
        setup.publish()
    setup.update(3)
    (state,) = setup.replica.do("state")
    assert (state["version"], state["report"]) == (3, "full")
    setup.replica.do("snapshot", setup.number)
    setup.publish()
    setup.update(4)
    assert setup.replica.do("state")[0]["report"] == "delta"
    setup.replica.do("snapshot", setup.number)
    assert setup.replica.do("compare", setup.number) == [{"6": [], "7": []}]


def test_what_latent_attention_derives_is_derived_again(start):
    setup = start("deepseek_v3")
    setup.init()
    for number in setup.each(4):
        setup.replica.do("snapshot", number)
        (state,) = setup.replica.do("state")
        assert (state["version"], state["meta"]) == (number, [])
        assert state["reload"] == [f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(2)]
        assert setup.replica.do("underived") == [[]]
    (found,) = setup.replica.do("compare", 4)
    # The plain loader derives nothing: there, what was derived stays as the last update left it.
    derived = {f"model.layers.{layer}.self_attn.mla_attn.{own}" for layer in range(2) for own in ("W_UK_T", "W_UV")}
    assert {number: set(names) - derived for number, names in found.items()} == {str(i): set() for i in range(1, 5)}


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


def test_no_label_moves_without_an_update_or_before_live_memory_is_attested(start):
    setup = start()
    http = setup.replica.http()
    setup.init()
    assert http.post("/start_weight_update").status_code == 200
    assert http.post("/finish_weight_update", json={"weight_version": "99"}).status_code == 500
    assert http.get("/weight_info").json() == {"weight_version": "default"}
    with pytest.raises(RankFailed, match="nothing was updated in this session"):
        setup.replica.rpc("finish_weight_update")
    # That session goes on.
    for number in (1, 2):
        if number > 1:
            setup.publish()
            assert http.post("/start_weight_update").status_code == 200
        assert http.post("/update_weights", json={"update_info": {"version": number}}).status_code == 200
        assert http.post("/finish_weight_update", json={"weight_version": str(number)}).status_code == 200
    setup.publish()
    setup.replica.do("damage_next")
    with pytest.raises(RankFailed) as failed:
        setup.update(3)
    assert "WeightsUnknown: NOT ALL RANKS" in str(failed.value) and "loads all weights again" in str(failed.value)
    assert "model.norm.weight: tile" in str(failed.value) and "of version 3 differs" in str(failed.value)
    assert http.post("/finish_weight_update", json={"weight_version": "3"}).status_code == 500
    assert http.get("/weight_info").json() == {"weight_version": "2"}
    assert setup.versions() == [None]
    setup.update(3)
    assert setup.replica.do("state")[0]["report"] == "loaded"
    setup.publish()
    setup.update(4)
    # Switched off, by an update or by init, nothing is read back.
    setup.replica.do("damage_next")
    setup.publish()
    setup.update(5, verify=False)
    setup.init(verify=False)
    setup.update(5)
    setup.publish()
    setup.replica.do("damage_next")
    setup.update(6)
    with pytest.raises(RankFailed, match="norm.weight"):
        setup.publish()
        setup.update(7, verify=True)


@pytest.mark.parametrize("phase", ["stage", "commit"])
def test_a_rank_that_fails_changes_no_rank(start, phase):
    setup = start("qwen3", 2)
    setup.init()
    setup.reach(2)
    setup.replica.do("snapshot", "before")
    setup.publish()
    setup.replica.ranks[1].do("fail_next", phase)
    setup.replica.rpc("start_weight_update")
    with pytest.raises(RankFailed) as failed:
        setup.replica.rpc("update_weights", {"version": 3})
    said = {
        "stage": "nothing was changed on any rank",
        "commit": "all was rolled back, the weights of all ranks are as before",
    }
    assert f"[0] Aborted: {said[phase]}: rank 1: RuntimeError" in str(failed.value)
    assert "[1] RuntimeError" in str(failed.value) and "told to fail" in str(failed.value)
    assert setup.replica.do("unchanged", "before") == [[], []]
    for state in setup.replica.do("state"):
        assert (state["version"], state["active"]) == (2, False)
    setup.update(3)
    assert setup.versions() == [3, 3]


def test_a_rank_that_does_not_know_the_outcome_says_so_and_loads_all_again(start):
    setup = start("qwen3", 2)
    setup.init()
    setup.reach(2)
    setup.publish()
    setup.replica.ranks[0].do("lose_store", "written")
    setup.replica.rpc("start_weight_update")
    with pytest.raises(RankFailed) as failed:
        setup.replica.rpc("update_weights", {"version": 3})
    said = str(failed.value)
    assert "[0] WeightsUnknown: THE OUTCOME IS UNKNOWN: rank 0: the store" in said and "[1]" not in said
    assert "vllm-dp0-rank0 are of no version: whether the other ranks keep version" in said
    assert "do not resume before an update has succeeded" in said and "as before" not in said
    assert setup.versions() == [None, 3]
    # The rank that knows has a session open: one more finish closes it, and moves no label, as rank 0 refuses.
    with pytest.raises(RankFailed, match=r"\[0\] RuntimeError: finish_weight_update called without"):
        setup.replica.rpc("finish_weight_update")
    setup.publish()
    setup.update(4)
    setup.replica.do("snapshot", 4)
    assert [state["report"] for state in setup.replica.do("state")] == ["loaded", "delta"]
    assert setup.replica.do("compare", 4) == [{"4": []}] * 2


def test_a_first_load_that_breaks_on_one_rank_is_said_by_both(start):
    setup = start("qwen3", 2)
    setup.init()
    setup.replica.ranks[1].do("fail_next_load")
    setup.replica.rpc("start_weight_update")
    with pytest.raises(RankFailed) as failed:
        setup.replica.rpc("update_weights", {"version": 1})
    for said in str(failed.value).split(" | "):
        assert "WeightsUnknown: NOT ALL RANKS HAVE THE WEIGHTS OF BEFORE" in said
        assert "rank 0: the weights of vllm-dp0-rank0 are of no version: its first load was rolled back" in said
        assert "rank 1: OSError: the loader broke" in said and "the end of version 1" in said
        assert "as before" not in said and "nothing was changed" not in said
    setup.update(1)
    setup.publish()
    setup.update(2)
    setup.replica.do("snapshot", 2)
    assert setup.replica.do("compare", 2) == [{"2": []}] * 2


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


@pytest.mark.parametrize(("level", "shadow"), [(1, False), (2, False), (2, True)])
def test_sleep(start, level, shadow):
    setup = start()
    setup.init(shadow=shadow)
    setup.reach(2)
    setup.publish()
    setup.replica.rpc("sleep", level)
    with pytest.raises(RankFailed, match="the weights sleep: wake them first"):
        setup.update(3)
    setup.replica.rpc("wake_up", ["kv_cache"])
    with pytest.raises(RankFailed, match="the weights sleep"):
        setup.update(3)
    setup.replica.rpc("wake_up", ["weights"])
    assert setup.versions() == [2 if level == 1 or shadow else None]
    setup.update(3)
    assert setup.replica.do("state")[0]["report"] == ("delta" if level == 1 or shadow else "loaded")
    setup.replica.do("snapshot", 3)
    assert setup.replica.do("compare", 3) == [{"3": []}]


def test_a_draft_is_a_second_target(start):
    setup = start()
    setup.replica.do("add_draft")
    setup.init()
    for number in setup.each(3):
        setup.replica.rpc("start_draft_weight_update")
        setup.replica.rpc("update_weights", {"version": number})
        setup.replica.rpc("finish_weight_update")
        (draft,) = setup.replica.do("draft_matches", number)
        # What it shares with the target is the target's to write.
        assert draft == {"equal": True, "placed": ["model.norm.weight"], "version": number}
        setup.replica.do("snapshot", number)
    assert setup.versions() == [3]
    assert setup.replica.do("compare", 3) == [{str(number): [] for number in (1, 2, 3)}]
