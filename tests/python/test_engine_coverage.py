"""No engine's update succeeds while a weight of the model, or a tensor of the trainer, is left over."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import deltasync
import pytest
from deltasync import errors

torch = pytest.importorskip("torch")

from deltasync.engines.covered import lacks  # noqa: E402
from deltasync.engines.group import NOTHING, Group, Lacks, Outcome, Verdict  # noqa: E402
from deltasync.engines.loader import PlainLoader  # noqa: E402
from deltasync.engines.session import CONNECTING, PLACED, EngineReceiver  # noqa: E402
from engine_support import Engine, Loader, assert_bits, bits, change, first_version  # noqa: E402
from played_vllm import config, engine_class  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

WAIT = 30.0
Weights = dict[str, Any]


class Skipping(Engine):
    """Knows its names, and says nothing of others; of `parts` only."""

    def __init__(self, parts: Iterable[str] = ("",)) -> None:
        super().__init__(permutes=False)
        self.parts = tuple(parts)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        known = {*self.places, "mlp.down.weight", "embed.weight", "norm.weight"}
        super().load_weights((name, w) for name, w in weights if name in known and name.startswith(self.parts))


class Rig:
    def __init__(self, name: str) -> None:
        self.name, self.manager, self.receivers = name, None, []

    def publish(self, weights: Weights, number: int = 1) -> None:
        """By the trainer that there is, or by another one at its address."""
        if self.manager is None or number == 1:
            endpoint = {} if self.manager is None else {"listen": self.close_trainer()}
            self.manager = deltasync.WeightManager(weights, name=self.name, **endpoint)
        self.manager.offload(weights, number)
        self.manager.wait_ready()

    def close_trainer(self) -> str:
        endpoint: str = self.manager.endpoint
        self.manager.close()
        return endpoint

    def receiver(self, engine: Engine, **options: Any) -> EngineReceiver:
        found = EngineReceiver(engine, Loader(engine), self.manager.endpoint, timeout=WAIT, **options)
        self.receivers.append(found)
        return found

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        if self.manager is not None:
            self.manager.close()


@pytest.fixture
def rig(segment_name: str, shm_files: set[str]) -> Iterator[Rig]:
    made = Rig(segment_name)
    try:
        yield made
    finally:
        made.close()


def renamed(how: Callable[[str], str]) -> Weights:
    return {how(name): tensor for name, tensor in first_version().items()}


def update(receiver: EngineReceiver, number: int) -> Any:
    staging = receiver.prepare(number, timeout=WAIT)
    staging.wait(WAIT)
    report = receiver.commit(staging, verify=True)
    receiver.follow()
    return report


def test_names_that_the_loader_skips_end_the_binding(rig: Rig) -> None:
    """Up to now every such update succeeded, attested, and these weights never changed."""
    rig.publish(renamed(lambda name: name.replace("mlp.gate", "mlp.gates").replace("embed", "embedding")))
    engine = Skipping()
    before = bits(engine)
    receiver = rig.receiver(engine)
    for call in (receiver.attach, lambda: receiver.prepare(1)):
        with pytest.raises(errors.UnmatchedWeights) as refused:
            call()
        text = str(refused.value)
        assert "embed.weight ([100, 32], all of it)" in text
        assert "gate_up.weight ([96, 32], 1536 of its 3072 elements, from [0, 0] on)" in text
        assert "embedding.weight (the loader stores nothing of it), mlp.gates.weight" in text
        assert receiver.state == CONNECTING
    assert_bits(engine, before)


def test_a_trainer_that_comes_back_with_the_right_names(rig: Rig) -> None:
    rig.publish(renamed(lambda name: f"_fsdp_wrapped_module.{name}"))
    engine = Skipping()
    receiver = rig.receiver(engine)
    with pytest.raises(errors.UnmatchedWeights, match="prefix '_fsdp_wrapped_module.' of a wrapper"):
        receiver.attach()
    weights = first_version()
    rig.publish(weights)
    report = update(receiver, 1)
    assert receiver.state == PLACED and (report.mode, report.placed) == ("loaded", "placed 8 of 8")
    assert_bits(engine, engine.expected(weights))
    change(weights, 2)
    rig.publish(weights, 2)
    assert update(receiver, 2).placed == "placed 8 of 8"
    assert_bits(engine, engine.expected(weights))


def test_a_trainer_that_comes_back_with_other_tensors_is_bound_again(rig: Rig) -> None:
    weights = first_version()
    rig.publish(weights)
    engine = Skipping()
    receiver = rig.receiver(engine, ignore=["surplus"])
    update(receiver, 1)
    change(weights, 2)
    rig.publish(weights | {"surplus": torch.zeros(4)})
    before = bits(engine)
    with pytest.raises(errors.LayoutMismatch):
        update(receiver, 1)
    assert_bits(engine, before)
    assert receiver.doubt == ""
    report = update(receiver, 1)
    assert (report.mode, report.placed) == ("loaded", "placed 8 of 9")
    assert_bits(engine, engine.expected(weights))


def test_what_is_ignored_is_said_and_stays(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    weights = first_version() | {"rotary_emb.inv_freq": torch.zeros(4), "mtp.fc.weight": torch.zeros(4)}
    weights["norms.weight"] = weights.pop("norm.weight")
    rig.publish(weights)
    engine = Skipping()
    with torch.no_grad():
        engine.norm.weight.fill_(3)
    for ignore in ([], ["norm*.weight"], ["mtp.*", "norms.weight"], ["mtp.*", "norm.weight"]):
        with pytest.raises(errors.UnmatchedWeights):
            rig.receiver(engine, ignore=ignore).attach()
    caplog.clear()
    receiver = rig.receiver(engine, ignore=["mtp.*", "norm*.weight"], name="rank7")
    assert update(receiver, 1).placed == "placed 7 of 10"
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [
        "rank7: 3 tensor(s) of the trainer are ignored: rotary_emb.inv_freq, mtp.fc.weight, norms.weight",
        "rank7: 1 weight(s) of the model are ignored, and stay: norm.weight",
    ]
    assert (engine.norm.weight == 3).all()


def test_a_name_that_the_loader_refuses_is_told_before_anything_is_written(rig: Rig) -> None:
    """It would be refused amid the first load, which cannot be rolled back."""
    rig.publish(first_version() | {"surplus.weight": torch.zeros(4)})
    engine = Engine(permutes=False)
    load = engine.load_weights

    def strict(weights: Iterable[tuple[str, Any]]) -> None:
        for name, weight in weights:
            if name == "surplus.weight":
                raise KeyError(name)
            load([(name, weight)])

    engine.load_weights = strict  # type: ignore[method-assign]
    with pytest.raises(errors.UnmatchedWeights, match="surplus.weight .the loader refuses it: KeyError"):
        rig.receiver(engine).attach()
    receiver = rig.receiver(engine, ignore=["surplus.*"])
    assert update(receiver, 1).placed == "placed 8 of 9"


class Part(torch.nn.Module):  # type: ignore[misc]
    """A stage of a pipeline, or a draft: some leaves of an engine."""

    def __init__(self, engine: Engine, *leaves: str) -> None:
        super().__init__()
        self.engine = [engine]  # whose other leaves are not this module's
        for leaf in leaves:
            setattr(self, leaf, getattr(engine, leaf))

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        self.engine[0].load_weights(weights)


def stages(rig: Rig, **options: Any) -> list[EngineReceiver]:
    first, second = Skipping(["embed", "attn"]), Skipping(["mlp", "norm"])
    parts = [Part(first, "embed", "qkv"), Part(second, "gate_up", "down", "norm")]
    found = [EngineReceiver(p, Loader(p), rig.manager.endpoint, shared=True, timeout=WAIT, **options) for p in parts]  # type: ignore[arg-type]
    rig.receivers += found
    for receiver in found:
        receiver.attach()
    return found


def decide(receivers: list[EngineReceiver]) -> list[Verdict]:
    """The vote of a rank for each receiver."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in receivers[1:]]
    groups = [Group(store, rank, len(receivers)) for rank, store in enumerate([server, *others])]
    with concurrent.futures.ThreadPoolExecutor(len(receivers)) as pool:
        jobs = [
            pool.submit(group.vote, None, timeout=WAIT, lacks=lacks([receiver]))
            for group, receiver in zip(groups, receivers, strict=True)
        ]
        return [job.result(WAIT) for job in jobs]


def test_ranks_have_every_tensor_together(rig: Rig) -> None:
    rig.publish(first_version())
    receivers = stages(rig)
    assert [len(receiver.untaken) for receiver in receivers] == [4, 4]
    assert [verdict.yes for verdict in decide(receivers)] == [True, True]
    assert not lacks(receivers).bits and lacks(receivers[:1]).bits == 0b11110000


def test_a_tensor_that_no_rank_takes_is_everybodys_no(rig: Rig) -> None:
    rig.publish(first_version() | {"experts.gate_up_proj": torch.zeros(4), "a.b": torch.zeros(4)})
    receivers = stages(rig)
    verdicts = decide(receivers)
    assert verdicts[0] == verdicts[1] and verdicts[0].outcome is Outcome.NO
    for text in (
        "no rank takes",
        "2 tensor(s)",
        "experts.gate_up_proj (the loader stores nothing of it), a.b",
        "ignore=[",
    ):
        assert text in verdicts[0].reason
    assert Group(None, 0, 1).vote(None, timeout=0, lacks=lacks(receivers)).reason == verdicts[0].reason
    assert all(verdict.yes for verdict in decide(stages(rig, ignore=["experts.*", "a.b"])))


def test_a_rank_whose_own_weights_stay_is_told_whatever_others_have(rig: Rig) -> None:
    weights = first_version()
    del weights["attn.k.weight"]
    rig.publish(weights)
    with pytest.raises(
        errors.UnmatchedWeights, match=r"qkv.weight \(\[64, 32\], 512 of its 2048 elements, from \[32, 0\]"
    ):
        stages(rig)


def test_what_a_draft_shares_is_the_other_models(rig: Rig) -> None:
    rig.publish(first_version())
    engine = Skipping()
    draft = Part(Skipping(["norm"]), "norm")
    draft.embed = engine.embed
    beside = EngineReceiver(draft, Loader(draft), rig.manager.endpoint, beside=engine, shared=True, timeout=WAIT)  # type: ignore[arg-type]
    rig.receivers.append(beside)
    beside.attach()
    target = rig.receiver(engine)
    target.attach()
    assert set(beside.untaken) == first_version().keys() - {"norm.weight"} and target.untaken == {}
    assert not lacks([target, beside]).bits


def test_what_is_left_to_a_draft_is_named_until_that_is_updated(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.publish(first_version() | {"mtp.fc.weight": torch.zeros(4)})
    target = rig.receiver(Skipping(), shared=True)
    target.attach()
    engine = engine_class(monkeypatch)(None, config(1, "mtp"), None, None)
    engine._target, engine._init_info = target, SimpleNamespace(draft_agent=None)
    with caplog.at_level(logging.WARNING, "deltasync.engines"):
        assert [engine._lacks(target) for _ in range(2)] == [NOTHING] * 2
    assert caplog.text.count("1 tensor(s) of the trainer stay out of updates") == 1 == caplog.text.count("mtp.fc")
    draft = Part(Skipping(["norm"]), "norm")
    engine._draft = EngineReceiver(draft, Loader(draft), rig.manager.endpoint, shared=True, timeout=WAIT)  # type: ignore[arg-type]
    rig.receivers.append(engine._draft)
    engine._draft.attach()
    left = engine._lacks(target)
    assert "no rank takes all of it: 1 tensor(s)" in left.words(left.bits) and "mtp.fc.weight" in left.words(left.bits)


class Doubled(Part):
    """Has a tensor where the target has it, and once more."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "embed")
        self.own = type(engine.embed)(*engine.embed.weight.shape)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, weight in weights:
            if name == "embed.weight":
                self.embed.weight.data.copy_(weight)
                self.own.weight.data.copy_(weight)


def test_what_a_draft_has_beside_what_it_shares_is_written(rig: Rig) -> None:
    weights = first_version()
    rig.publish(weights)
    engine = Skipping()
    draft = Doubled(engine)
    target = rig.receiver(engine)
    loader = PlainLoader(draft.load_weights)
    beside = EngineReceiver(draft, loader, rig.manager.endpoint, beside=engine, shared=True, timeout=WAIT)
    rig.receivers.append(beside)
    for number in (1, 2, 3):
        if number > 1:
            change(weights, number)
            rig.publish(weights, number)
        update(target, number)
        assert update(beside, number).placed == "placed 1 of 8"
        assert torch.equal(draft.own.weight.view(torch.int16), weights["embed.weight"].view(torch.int16))
        assert_bits(engine, engine.expected(weights))


class Fp8LinearMethod:
    """As engines mark their quantised layers."""

    def __init__(self, comes_quantised: bool) -> None:
        self.quant_config = SimpleNamespace(is_checkpoint_fp8_serialized=comes_quantised)


class Fp8OnlineLinearMethod:
    pass


class UnquantizedLinearMethod:
    pass


class Quantised(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, method: Any, parent: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        (self if parent else self.layer).quant_method = method
        self.layer.weight = torch.nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.layer.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, weight in weights:
            getattr(self.layer, name).data.copy_(weight)


@pytest.mark.parametrize("parent", [False, True])
@pytest.mark.parametrize(
    ("method", "dtype", "scale"),
    [
        (Fp8LinearMethod(False), torch.bfloat16, True),  # quantised as it is loaded: the engine makes the scale
        (Fp8OnlineLinearMethod(), torch.bfloat16, True),
        (Fp8LinearMethod(False), torch.float8_e4m3fn, False),  # comes quantised, and its scale does not come
        (Fp8LinearMethod(True), torch.bfloat16, False),  # would be cast to what no scale belongs to
        (UnquantizedLinearMethod(), torch.bfloat16, False),
        (None, torch.bfloat16, False),
    ],
)
def test_scales_come_from_the_trainer_or_are_made_by_the_engine(
    rig: Rig, method: Any, dtype: Any, scale: bool, parent: bool
) -> None:
    weights = {"weight": torch.ones(4, 4).to(dtype)}
    rig.publish(weights)
    model = Quantised(method, parent)

    def receiver() -> EngineReceiver:
        found = EngineReceiver(model, PlainLoader(model.load_weights), rig.manager.endpoint, timeout=WAIT)
        rig.receivers.append(found)
        return found

    if scale:
        receiver().attach()
    else:
        with pytest.raises(errors.UnmatchedWeights, match="layer.scale"):
            receiver().attach()
    rig.publish(weights | {"scale": torch.ones(1)})
    receiver().attach()


def test_what_is_made_of_one_module_is_not_taken_for_another_or_for_a_part(rig: Rig) -> None:
    ones = torch.ones(4, 4)
    rig.publish({"made.weight": ones.bfloat16(), "as_it_is.weight": ones.to(torch.float8_e4m3fn)})
    model = torch.nn.Module()
    model.made, model.as_it_is = (Quantised(Fp8LinearMethod(False), True) for _ in range(2))

    def load(weights: Iterable[tuple[str, Any]]) -> None:
        for name, weight in weights:
            module, _, kind = name.partition(".")
            model.get_submodule(module).load_weights([(kind, weight)])

    receiver = EngineReceiver(model, PlainLoader(load), rig.manager.endpoint, timeout=WAIT)
    rig.receivers.append(receiver)
    with pytest.raises(errors.UnmatchedWeights, match="1 weight.*: as_it_is.layer.scale"):
        receiver.attach()
    model.made.layer.weight = torch.nn.Parameter(torch.zeros(5, 4).to(torch.float8_e4m3fn), requires_grad=False)
    model.made.load_weights = lambda weights: model.made.layer.weight.data[:4].copy_(next(iter(weights))[1])
    with pytest.raises(errors.UnmatchedWeights, match=r"made.layer.weight \(\[5, 4\], 4 of its 20"):
        receiver.attach()


def test_what_some_rank_has_is_lacking_nowhere() -> None:
    assert Group(None, 0, 1).vote(None, timeout=0, lacks=Lacks(5, lambda bits: f"lacks {bits:b}")).reason == "lacks 101"
    assert Group(None, 0, 1).vote(None, timeout=0, lacks=Lacks()).yes
    said = Group(None, 0, 1).vote("disk full", timeout=0, lacks=Lacks(5))
    assert said == Verdict(Outcome.NO, "disk full")
