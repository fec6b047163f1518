"""Traced plans are valid for the library: every element once, no place twice."""

import random

import pytest

torch = pytest.importorskip("torch")

import deltasync  # noqa: E402
from autoplacement_support import hf, parameter, specs_of  # noqa: E402
from deltasync import _arrays  # noqa: E402
from deltasync.autoplacement import placement_plan, trace_loader, whole_leaves  # noqa: E402
from deltasync.engines.placed import plan_of  # noqa: E402
from deltasync.layouts import spec_of  # noqa: E402
from test_autoplacement_loaders import HEAD, HIDDEN, Experts, Loader, Mlp, Qkv, Tied, Views, Vocabulary  # noqa: E402
from test_autoplacement_random import DTYPES, Model  # noqa: E402
from test_autoplacement_reload import TENSORS, computes  # noqa: E402
from test_autoplacement_reload import Model as Layers  # noqa: E402


class Bits(Loader):
    """Keeps fp8 as bytes."""

    def __init__(self):
        super().__init__()
        self.packed = parameter(4, 4, dtype=torch.uint8)

    def load(self, name, weight):
        self.packed.data.copy_(weight.view(torch.uint8))


CASES = {
    "bits": (Bits(), {"fp8": (torch.float8_e4m3fn, (4, 4))}),
    "qkv": (Qkv(3, 4), {"q.weight": (8 * HEAD, HIDDEN), "k.weight": (2 * HEAD, HIDDEN), "v.bias": (2 * HEAD,)}),
    "mlp": (Mlp(1, 2), {"gate": (8, HIDDEN), "up": (8, HIDDEN), "down": (HIDDEN, 8)}),
    "experts": (Experts([2, 0]), {f"e.{i}.{kind}": (6, HIDDEN) for i in range(4) for kind in ("gate", "up")}),
    "experts in one": (Experts([1]), {"experts.gate_up": (3, HIDDEN, 12)}),
    "vocabulary": (Vocabulary(2, 4), {"embed": (10, HIDDEN)}),
    "tied": (Tied(), {"embed": (5, HIDDEN), "head": (5, HIDDEN)}),
    "views": (Views(), {name: (6, 8) for name in "abcd"}),
    "reload": (Layers({"b.weight": computes}), TENSORS),
}


def placement(found):
    layout, _ = deltasync.layout_of(
        [spec_of(s.name, torch.empty(s.shape, dtype=s.dtype, device="meta")) for s in found.specs]
    )
    return deltasync.Placement.build(
        layout, placement_plan(found, ignore=[*found.unplaced, *found.unfilled], reloads=True)
    )


def placed_bytes(found):
    of = {spec.name: spec.dtype.itemsize for spec in found.specs}
    return sum(s.rect.rows * s.rect.cols * of[s.tensor] for s in found.slices)


@pytest.mark.parametrize("case", CASES)
def test_hand_written_loaders(case):
    model, shapes = CASES[case]
    found = whole_leaves(trace_loader(model, model.load_weights, specs_of(hf(shapes))))
    assert placement(found).placed_bytes == placed_bytes(found) > 0


@pytest.mark.parametrize("seed", range(20))
def test_random_chains(seed):
    rng = random.Random(1000 + seed)
    shapes = {
        f"t{i}": (rng.choice(DTYPES), tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(0, 4))))
        for i in range(8)
    }
    model = Model(rng, hf(shapes, seed))
    found = trace_loader(model, model.load_weights, specs_of(hf(shapes, seed)))
    assert placement(found).placed_bytes == placed_bytes(found)


class EveryDtype(Loader):
    """Keeps each tensor by halves, in one parameter where they are exchanged."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, parameter(*tensor.shape, dtype=tensor.dtype))

    def load(self, name, weight):
        kept = getattr(self, name).data
        kept[:2].copy_(weight[2:])
        kept[2:].copy_(weight[:2])


def bits(tensor):
    return bytes(tensor.detach().contiguous().view(torch.uint8).flatten().tolist())


def test_every_dtype_of_a_layout_is_traced_placed_and_handed_to_loaders(segment_name):
    tensors = hf({f"of_{name}": (getattr(torch, name), (4, 6)) for name in _arrays.DTYPES}, seed=5)
    model, expected = EveryDtype(tensors), EveryDtype(tensors)
    expected.load_weights(list(tensors.items()))
    with deltasync.WeightManager(tensors, name=segment_name) as manager:
        manager.offload(tensors)
        found = trace_loader(model, model.load_weights, [(t.name, t.dtype, t.shape) for t in manager.layout])
        assert found.placed.keys() == tensors.keys()
        with deltasync.Receiver(manager.endpoint, plan=placement_plan(found)) as receiver:
            receiver.update()
            assert receiver.attest() == []
        for name in tensors:
            assert bits(getattr(model, name)) == bits(getattr(expected, name)), name
        reloaded = found.demote(dict.fromkeys(tensors, "for the test"))
        plan, copies = plan_of(manager.layout, reloaded)
        with deltasync.Receiver(manager.endpoint, plan=plan) as receiver:
            receiver.update()
            loaded = dict(copies.tensors())
            assert {name: tensor.dtype for name, tensor in loaded.items()} == {n: t.dtype for n, t in tensors.items()}
            for name, tensor in tensors.items():
                assert loaded[name].shape == tensor.shape and bits(loaded[name]) == bits(tensor), name
