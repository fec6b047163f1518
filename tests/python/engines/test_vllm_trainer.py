"""vLLM's WeightTransferTrainerFactory with the back end deltasync, against vLLM's own client, routes and workers."""

from functools import cached_property
from pathlib import Path

import deltasync
import pytest
from deltasync import errors
from torch_ranks import require_ok, what_ranks_found

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
pytest.importorskip("vllm.distributed", reason="vllm is not installed here: tools/test_engines.sh vllm")

from checkpoints import shapes  # noqa: E402
from deltasync.engines.vllm_trainer import (  # noqa: E402
    DeltasyncTrainerInitInfo,
    DeltasyncTrainerWeightTransferEngine,
)
from engine_support import change, first_version  # noqa: E402
from vllm.distributed.weight_transfer import (  # noqa: E402
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm_replica import Replica  # noqa: E402

ADAPTERS = Path(__file__).parents[1] / "adapters"


class Named(torch.nn.Module):
    """Parameters with these names."""

    def __init__(self, weights):
        super().__init__()
        for name, tensor in weights.items():
            at = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, torch.nn.Module())
                at = getattr(at, part)
            at.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))


class Gathered(WeightSource):
    """What only a source knows to put together."""

    def __init__(self, weights, owners=None):
        self.weights, self.owners = weights, owners

    @cached_property
    def metadata(self):
        return [ParamMeta(name, w.dtype, tuple(w.shape), owners=self.owners) for name, w in self.weights.items()]

    def iter_full(self):
        yield from self.weights.items()


class Routes:
    """vLLM's protocol over its real routes."""

    def __init__(self, http):
        self.http = http

    def _post(self, route, body=None):
        answer = self.http.post(route, json=body)
        assert answer.status_code == 200, answer.text

    def init_weight_transfer_engine(self, info):
        self._post("/init_weight_transfer_engine", {"init_info": info})

    def start_weight_update(self):
        self._post("/start_weight_update")

    def update_weights(self, info):
        self._post("/update_weights", {"update_info": info})

    def finish_weight_update(self, weight_version=None):
        self._post("/finish_weight_update", {"weight_version": weight_version} if weight_version else None)


@pytest.fixture
def init(segment_name, monkeypatch):
    made = []

    def make(client, source, rank=0, **more):
        info = DeltasyncTrainerInitInfo(rank=rank, manager={"name": segment_name}, timeout=60, **more)
        made.append(WeightTransferTrainerFactory.trainer_init(info, client=client, source=source))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["module", "gathered"])
def test_workers_have_every_version_that_was_sent(init, tmp_path, kind, ranks):
    weights = first_version(shapes("qwen3"))
    replica = Replica(tmp_path, "qwen3", ranks)
    try:
        http = replica.http()
        engine = init(Routes(http), ModuleSource(Named(weights)) if kind == "module" else Gathered(weights))
        assert isinstance(engine, DeltasyncTrainerWeightTransferEngine)
        for number in range(1, 5):
            if number > 1:
                change(weights, number)
            engine.send_weights()
            assert http.get("/weight_info").json() == {"weight_version": str(number)}
            replica.do("snapshot", number)
        for found in replica.do("compare", 4):
            assert found == {str(number): [] for number in range(1, 5)}
        assert [state["report"] for state in replica.do("state")] == ["delta"] * ranks
    finally:
        replica.close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.syspath_prepend(str(ADAPTERS))
    from rollout_servers import RolloutServer

    made = RolloutServer()
    made.paused = True
    yield made
    made.close()


def test_vllms_client_makes_the_calls_and_a_failed_update_ends_its_session(init, server):
    weights = first_version(shapes("qwen3"))
    engine = init(HTTPVLLMWeightSyncClient(server.url), Gathered(weights), worker={"verify": False})
    assert [path for path, _ in server.calls] == ["/init_weight_transfer_engine"]
    assert server.calls[0][1]["init_info"]["verify"] is False
    engine.send_weights()
    assert server.routes[1:] == ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    server.fail["/update_weights"] = (500, "no")
    change(weights, 2)
    with pytest.raises(Exception, match="500"):
        engine.send_weights()
    assert (server.routes[-1], server.label) == ("/finish_weight_update", "1")
    change(weights, 3)
    engine.send_weights()
    assert (server.label, engine.report.version.number) == ("3", 3)
    got = dict(server.receiver.tensors())
    assert all(torch.equal(got[name].view(torch.int16), w.view(torch.int16)) for name, w in weights.items())


def test_what_cannot_be_sent_is_refused_before_anything_is_started(init, server):
    client = HTTPVLLMWeightSyncClient(server.url)
    weights = first_version(shapes("qwen3"))
    with pytest.raises(errors.InvalidArgument, match="no source"):
        init(client, None)
    with pytest.raises(errors.Unsupported, match="rank 0 does not get model.embed_tokens.weight and 24 more"):
        init(client, Gathered(weights, owners=(1, 2)))
    with pytest.raises(errors.InvalidArgument, match="rank 1, but torch.distributed is not initialised"):
        init(client, ModuleSource(Named(weights)), rank=1)
    assert server.calls == []


def test_a_source_derived_from_a_modules_is_asked_for_what_it_sends(init, server):
    class Renamed(ModuleSource):
        @cached_property
        def metadata(self):
            return [ParamMeta(f"model.{meta.name}", meta.dtype, meta.shape) for meta in super().metadata]

        def iter_full(self):
            for name, tensor in super().iter_full():
                yield f"model.{name}", tensor

    engine = init(HTTPVLLMWeightSyncClient(server.url), Renamed(torch.nn.Linear(4, 3)))
    engine.send_weights()
    assert dict(server.receiver.tensors()).keys() == {"model.weight", "model.bias"}
    engine.shutdown()
    with pytest.raises(errors.InvalidArgument, match=r"shutdown\(\) was called"):
        engine.send_weights()


def test_an_init_that_fails_leaves_no_agent(init, server, segment_name):
    server.fail["/init_weight_transfer_engine"] = (500, "no")
    weights = first_version(shapes("qwen3"))
    with pytest.raises(Exception, match="500"):
        init(HTTPVLLMWeightSyncClient(server.url), Gathered(weights))
    with deltasync.WeightManager(weights, name=segment_name) as manager:  # the name is free
        manager.offload(weights)


@pytest.mark.parametrize("check", ["fsdp", "gathered", "ranks"])
def test_two_trainer_ranks(two_ranks, check):
    require_ok(two_ranks, check)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    report = tmp_path_factory.mktemp("vllm-trainer") / "report"
    return what_ranks_found(Path(__file__).with_name("vllm_trainer_worker.py"), 2, report, "pytest-vllm-trainer")
