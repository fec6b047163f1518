"""Traced plans are sound for the library: every element once, no place twice."""

import random

import pytest

torch = pytest.importorskip("torch")

import deltasync  # noqa: E402
from deltasync.tracing import placement_plan, trace, whole_leaves  # noqa: E402
from test_tracing_loaders import HEAD, HIDDEN, Experts, Loader, Mlp, Qkv, Tied, Views, Vocabulary  # noqa: E402
from test_tracing_random import DTYPES, Model  # noqa: E402
from test_tracing_reload import TENSORS, computes  # noqa: E402
from test_tracing_reload import Model as Layers  # noqa: E402
from tracing_support import hf, parameter, specs_of  # noqa: E402


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
        [deltasync.TensorSpec(s.name, deltasync_dtype(s.dtype), list(s.shape)) for s in found.specs]
    )
    return deltasync.Placement.build(
        layout, placement_plan(found, ignore=[*found.unplaced, *found.unfilled], reloads=True)
    )


def deltasync_dtype(dtype):
    from deltasync.tracing.specs import DTYPES

    return next(name for name, known in DTYPES.items() if known == dtype)


def placed_bytes(found):
    of = {spec.name: spec.dtype.itemsize for spec in found.specs}
    return sum(s.rect.rows * s.rect.cols * of[s.tensor] for s in found.slices)


@pytest.mark.parametrize("case", CASES)
def test_hand_written_loaders(case):
    model, shapes = CASES[case]
    found = whole_leaves(trace(model, model.load_weights, specs_of(hf(shapes))))
    assert placement(found).placed_bytes == placed_bytes(found) > 0


@pytest.mark.parametrize("seed", range(20))
def test_random_chains(seed):
    rng = random.Random(1000 + seed)
    shapes = {
        f"t{i}": (rng.choice(DTYPES), tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(0, 4))))
        for i in range(8)
    }
    model = Model(rng, hf(shapes, seed))
    found = trace(model, model.load_weights, specs_of(hf(shapes, seed)))
    assert placement(found).placed_bytes == placed_bytes(found)
