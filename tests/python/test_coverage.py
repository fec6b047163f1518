"""Names that do not match on the two sides: what is said, what may be ignored, and what the cause may be."""

from __future__ import annotations

import logging
from typing import Any

import deltasync
import pytest
from deltasync import errors
from deltasync.coverage import Ignore, log_ignored, require_coverage, some
from deltasync.likely_causes import likely_causes

LAYER = "model.layers.0"


def test_nothing_left_over_is_no_error() -> None:
    require_coverage("engine", {}, {})


def test_both_sides_are_named_with_a_count() -> None:
    untaken = {f"t.{i}": "skipped" for i in range(20)} | {"u": "refused"}
    with pytest.raises(errors.UnmatchedWeights) as refused:
        require_coverage("rank 3", untaken, {"w.a": "[4]", "w.b": "[8]"})
    text = str(refused.value)
    assert text.startswith("rank 3: 2 weight(s) of the model would stay as they are: w.a ([4]), w.b ([8]). ")
    assert "21 tensor(s) of the trainer have no place: t.0 (skipped), t.1, t.2" in text and "t.7 and 13 more" in text
    assert 'ignore=["PATTERN", ...]' in text
    assert isinstance(refused.value, errors.LayoutMismatch)


def test_what_is_said_of_a_name_is_said_again_when_it_changes() -> None:
    assert some({"a": "x", "b": "x", "c": "y", "d": ""}) == "a (x), b, c (y), d"
    assert some([]) == ""


def test_patterns() -> None:
    ignore = Ignore(["*.rotary_emb.inv_freq", "mtp.*", "layers.[01].w"])
    assert [name in ignore for name in ("a.rotary_emb.inv_freq", "mtp.fc", "layers.1.w")] == [True] * 3
    assert [name in ignore for name in ("a.rotary_emb.inv_freqs", "model.mtp.fc", "layers.2.w", "MTP.fc")] == [
        False
    ] * 4
    assert ignore.split({"mtp.fc": "x", "w": "y"}) == ({"w": "y"}, ["mtp.fc"])
    for wrong in ("mtp.*", [""], [3]):
        with pytest.raises(errors.InvalidArgument, match="ignore"):
            Ignore(wrong)  # type: ignore[arg-type]


def test_what_is_ignored_is_logged_once_with_count_and_names(caplog: pytest.LogCaptureFixture) -> None:
    log_ignored(logging.getLogger("deltasync.x"), "rank", [f"t{i}" for i in range(10)], ["w"])
    assert [record.getMessage() for record in caplog.records] == [
        "rank: 10 tensor(s) of the trainer are ignored: t0, t1, t2, t3, t4, t5, t6, t7 and 2 more",
        "rank: 1 weight(s) of the model are ignored, and stay: w",
    ]


@pytest.mark.parametrize(
    ("untaken", "unfilled", "weights", "cause"),
    [
        ([f"{LAYER}.mlp.experts.gate_up_proj"], [f"{LAYER}.mlp.experts.w13_weight"], [], "all experts in one tensor"),
        ([f"{LAYER}.mlp.experts.3.up_proj.weight"], [f"{LAYER}.mlp.experts.w13"], [], "one tensor for each expert"),
        (["_orig_mod.norm.weight"], ["norm.weight"], [], "prefix '_orig_mod.' of a wrapper"),
        (["module.norm.weight"], ["norm.weight"], [], "prefix 'module.' of a wrapper"),
        (
            [f"language_model.{LAYER}.norm.weight", "language_model.model.norm.weight"],
            [f"{LAYER}.norm.weight", "model.norm.weight"],
            [],
            "begin with 'language_model.' where the model's begin with nothing",
        ),
        (["norm.weight"], ["model.norm.weight"], [], "begin with nothing where the model's begin with 'model.'"),
        (["lm_head.weight"], [], ["model.embed_tokens.weight"], "ties lm_head to the embedding"),
        ([], ["lm_head.weight"], [], "set tie_word_embeddings"),
        ([], [f"{LAYER}.q_proj.weight_scale"], [], "the model's weights are quantised"),
        ([f"{LAYER}.q_proj.weight_scale_inv"], [], [f"{LAYER}.q_proj.weight"], "the trainer's weights are quantised"),
        (["mtp.fc.weight"], [], [], "a draft (MTP, EAGLE)"),
        (["model.layers.2.norm.weight"], [], [f"{LAYER}.a", "model.layers.1.a"], "a draft (MTP, EAGLE)"),
        (["model.layers.2.a", "model.layers.3.a"], [], [f"{LAYER}.a", "model.layers.1.a"], "no layer(s) 2 to 3"),
        ([], ["model.layers.1.a"], [f"{LAYER}.a", "model.layers.1.a"], "no tensor is of layer(s) 1:"),
    ],
)
def test_likely_causes(untaken: list[str], unfilled: list[str], weights: list[str], cause: str) -> None:
    first, *_ = likely_causes(untaken, unfilled, weights)
    assert cause in first


def test_a_head_on_both_sides_is_not_tied_on_one() -> None:
    causes = likely_causes(["lm_head.weight", "norm.weight"], ["model.lm_head.weight", "model.norm.weight"], [])
    assert len(causes) == 1 and "begin with" in causes[0]


def test_names_without_a_likely_cause() -> None:
    assert likely_causes(["a.b"], ["c.d"], ["c.d", "e.f"]) == []


def layout_of(**shapes: tuple[int, ...]) -> Any:
    specs = [deltasync.TensorSpec(name.replace("__", "."), "F32", list(shape)) for name, shape in shapes.items()]
    return deltasync.layout_of(specs)[0]


def test_a_module_names_both_sides_and_may_ignore_either() -> None:
    torch = pytest.importorskip("torch")
    from deltasync.places import plan_of_module

    module = torch.nn.Linear(4, 4)
    layout = layout_of(weight=(4, 4), _orig_mod__bias=(4,), extra=(2,))
    with pytest.raises(errors.UnmatchedWeights) as refused:
        plan_of_module(layout, module)
    text = str(refused.value)
    assert "bias ([4])" in text and "_orig_mod.bias, extra" not in text
    assert (
        "2 tensor(s) of the trainer have no place: _orig_mod.bias (the module has no such parameter or buffer)" in text
    )
    assert "extra" in text and "torch.compile" in text
    with pytest.raises(errors.UnmatchedWeights, match="extra"):
        plan_of_module(layout, module, strict=False, ignore=["_orig_mod.*"])
    with pytest.raises(errors.UnmatchedWeights, match="1 weight.*: bias"):
        plan_of_module(layout, module, ignore=["_orig_mod.*", "extra"])
    plan, places = plan_of_module(layout, module, ignore=["_orig_mod.*", "extra", "bias"])
    assert [name for name, _ in places] == ["weight"]
    assert deltasync.Placement.build(layout, plan).placed_bytes == 64


def test_a_receiver_of_a_module_leaves_out_what_is_ignored(segment_name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    trained, served = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    weights = {"weight": trained.weight.detach(), "head.bias": trained.bias.detach()}
    before = served.bias.detach().clone()
    with deltasync.WeightManager(weights, name=segment_name) as manager:
        manager.offload(weights, 1)
        with pytest.raises(errors.UnmatchedWeights, match="head.bias"):
            deltasync.Receiver(manager.endpoint, module=served)
        with deltasync.Receiver(manager.endpoint, module=served, ignore=["*bias"]) as receiver:
            receiver.update()
        assert torch.equal(served.weight, trained.weight) and torch.equal(served.bias, before)
    said = [record.getMessage() for record in caplog.records]
    assert "module: 1 tensor(s) of the trainer are ignored: head.bias" in said
    assert "module: 1 weight(s) of the model are ignored, and stay: bias" in said
