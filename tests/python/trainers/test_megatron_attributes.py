"""A model whose modules have no ``sharded_state_dict()``: its layers' own, and the attributes of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("megatron.core", reason="needs megatron-core (tools/test_engines.sh megatron)")

import deltasync  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from plan_with_numpy import with_numpy  # noqa: E402
from tiny_megatron import Parallel  # noqa: E402


class Plain(torch.nn.Module):
    """As a trainer's own class: with the modules of one of Megatron's."""

    def __init__(self, model: Any, depth: int) -> None:
        """`depth`: that many levels of modules are plain."""
        super().__init__()
        for name, child in model.named_children():
            setattr(self, name, plain(child, depth - 1))
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer, name not in model._non_persistent_buffers_set)
        if hasattr(model, "layer_number"):
            self.layer_number = model.layer_number


def plain(module: Any, depth: int) -> Any:
    return Plain(module, depth) if depth > 0 else module


#: Plain are: the model; its layers, too; what they are made of, to the last.
MODEL, LAYERS, PARTS, ALL = 1, 4, 5, 6
CASES = [
    ("llama", Parallel(tp=2, pp=2), MODEL),
    ("llama", Parallel(tp=2, pp=2), LAYERS),
    ("llama", Parallel(), PARTS),
    ("llama", Parallel(tp=2, dp=2), ALL),
    ("llama_tied", Parallel(tp=4), MODEL),
    ("qwen3_moe", Parallel(tp=2, ep=2, etp=1), LAYERS),
]


@pytest.mark.parametrize(("name", "layout", "depth"), CASES, ids=lambda value: str(value))
def test_each_element_is_where_the_unsharded_model_has_it(
    whole: Any, name: str, layout: Parallel, depth: int, tmp_path: Path
) -> None:
    model = whole(name)

    def export(rank: int) -> Any:
        chunks = [Plain(chunk, depth) for chunk in model.chunks(layout)]
        plan = deltasync.megatron.plan(chunks, model.hf)
        assert deltasync.megatron.prove(plan, model.hf).identical
        return plan.to_json(), [view.numpy().copy() for view in plan._pieces.views()]

    ranks = run_ranks(layout.world, export, tmp_path)
    exported = with_numpy(json.loads(ranks[0][0]), [pieces for _, pieces in ranks])
    assert exported.keys() == model.tensors.keys()
    for tensor, expected in model.tensors.items():
        np.testing.assert_array_equal(exported[tensor], expected.numpy(), tensor)


def without_numbers(chunk: Any) -> Any:
    for layer in chunk.decoder.layers.children():
        del layer.layer_number
    return chunk


REFUSED = [
    # Gate and up are not known to a layer by itself.
    ("llama", Parallel(tp=2), PARTS, plain, r"decoder.layers.0.mlp.linear_fc1.weight: by its attributes"),
    ("qwen3_moe", Parallel(ep=2, dp=2), 8, plain, r"linear_fc1.weight: an expert's"),
    ("llama", Parallel(pp=2), LAYERS, lambda *of: without_numbers(plain(*of)), r"decoder.layers.0: it has no layer_n"),
]


@pytest.mark.parametrize(("name", "layout", "depth", "make", "why"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_attributes_do_not_tell_is_refused(
    whole: Any, name: str, layout: Parallel, depth: int, make: Any, why: str, tmp_path: Path
) -> None:
    model = whole(name)

    def plan(rank: int) -> None:
        with pytest.raises(deltasync.errors.Unsupported, match=why):
            deltasync.megatron.plan(make(model.chunks(layout)[0], depth), model.hf)

    run_ranks(layout.world, plan, tmp_path)
