"""What a loader leaves as it is, is found: weights that no tensor fills, and tensors that it skips without a word."""

import random

import pytest

torch = pytest.importorskip("torch")

from autoplacement_support import hf, parameter, specs_of, traced  # noqa: E402
from deltasync.autoplacement import placement_plan, trace_loader  # noqa: E402
from deltasync.autoplacement.coverage import Gap  # noqa: E402
from deltasync.errors import UnmatchedWeights  # noqa: E402
from test_autoplacement_loaders import HIDDEN, Experts, Loader, Tied, Views, Vocabulary  # noqa: E402
from test_autoplacement_reload import TENSORS, Model, concatenates, exchanges, keeps, raises, reads  # noqa: E402

EXPERTS, INNER = 4, 6


class Skipping(Loader):
    """As loaders of mixtures of experts are: one name for each expert, and what is not known is skipped."""

    def __init__(self, *, clears=False):
        super().__init__()
        self.experts = Experts(range(EXPERTS))
        self.norm = parameter(HIDDEN)
        self.clears = clears

    def load(self, name, weight):
        if self.clears:
            self.experts.w13.data.zero_()
            self.clears = False
        if name.startswith("experts.") and name.split(".")[1].isdigit():
            self.experts.load(name.replace("experts", "e", 1), weight)
        elif name == "norm":
            self.norm.data.copy_(weight)


def expert_shapes(experts=range(EXPERTS)):
    shapes = {"norm": (HIDDEN,)}
    for expert in experts:
        at = f"experts.{expert}"
        shapes |= {f"{at}.gate": (INNER, HIDDEN), f"{at}.up": (INNER, HIDDEN), f"{at}.down": (HIDDEN, INNER)}
    return shapes


FUSED = {
    "norm": (HIDDEN,),
    "experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
    "experts.down_proj": (EXPERTS, HIDDEN, INNER),
}


def test_all_is_covered():
    found = traced(Skipping(), hf(expert_shapes()))
    assert found.unfilled == {} and found.unplaced == {}
    assert found.weights == ("norm", "experts.w13", "experts.w2")
    assert placement_plan(found).slice_count == 1 + 3 * EXPERTS


def test_names_that_the_loader_skips_are_told_on_both_sides():
    found = traced(Skipping(), hf(FUSED))
    assert found.unplaced.keys() == {"experts.gate_up_proj", "experts.down_proj"}
    assert found.unfilled == {"experts.w13": "[4, 12, 12], all of it", "experts.w2": "[4, 12, 6], all of it"}
    with pytest.raises(UnmatchedWeights) as refused:
        placement_plan(found)
    for name in ("experts.w13", "experts.w2", "experts.gate_up_proj", "experts.down_proj", "all experts in one tensor"):
        assert name in str(refused.value)
    with pytest.raises(UnmatchedWeights, match="experts.w2 .*2 tensor"):
        placement_plan(found, ignore=["experts.w13"])
    assert placement_plan(found, ignore=["experts.w*", "*_proj"]).slice_count == 1


@pytest.mark.parametrize("clears", [False, True])
def test_an_expert_that_no_tensor_fills(clears):
    """Nor is it filled by what the loader wrote before it had loaded anything."""
    found = traced(Skipping(clears=clears), hf(expert_shapes([0, 1, 3])))
    assert found.gaps == {
        "experts.w13": Gap(2 * INNER * HIDDEN, 8 * INNER * HIDDEN, (4, 12, 12), (2, 0, 0), False),
        "experts.w2": Gap(INNER * HIDDEN, 4 * INNER * HIDDEN, (4, 12, 6), (2, 0, 0), False),
    }
    assert found.unfilled["experts.w2"] == "[4, 12, 6], 72 of its 288 elements, from [2, 0, 0] on"


def test_a_part_of_an_expert_that_no_tensor_fills():
    shapes = expert_shapes()
    del shapes["experts.1.up"]
    found = traced(Skipping(), hf(shapes))
    assert found.gaps == {"experts.w13": Gap(INNER * HIDDEN, 8 * INNER * HIDDEN, (4, 12, 12), (1, INNER, 0), False)}


def test_padding_that_the_loader_fills_is_the_engines():
    """The last rank has padding only."""
    for rank in range(4):
        assert traced(Vocabulary(rank, 4), hf({"embed": (10, HIDDEN)})).gaps == {}
    # Without the tensor nothing is loaded, so nothing is padding.
    assert traced(Vocabulary(3, 4), {}).gaps.keys() == {"weight"}


class Short(Loader):
    """Rows beyond the tensor's are nobody's."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(6, HIDDEN)

    def load(self, name, weight):
        self.weight.data[: weight.shape[0]].copy_(weight)


def test_rows_that_nobody_writes_are_told():
    found = traced(Short(), hf({"w": (4, HIDDEN)}))
    assert found.unfilled == {"weight": "[6, 12], 24 of its 72 elements, from [4, 0] on"}
    assert traced(Short(), hf({"w": (6, HIDDEN)})).unfilled == {}


def test_tied_weights_are_filled_by_either_name_and_told_once():
    assert traced(Tied(), hf({"embed": (5, HIDDEN)})).unfilled == {}
    assert traced(Tied(), hf({"head": (5, HIDDEN)})).unfilled.keys() == {"copy"}
    assert traced(Tied(), {}).unfilled.keys() == {"embed.weight", "copy"}


def test_views_of_one_storage():
    """With a pitch, transposed, every other column: what lies between them is no weight's."""
    tensors = hf({name: (6, 8) for name in "abcd"})
    model = Views()
    del model._buffers["flat"]  # which is a weight otherwise, and has more elements than the views
    assert traced(model, tensors).unfilled == {}
    for name in "abcd":
        left = {other: tensor for other, tensor in tensors.items() if other != name}
        assert traced(model, left).gaps == {name: Gap(48, 48, (6, 8), (0, 0), False)}


class Buffers(Loader):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("rotary", torch.ones(4), persistent=False)
        self.register_buffer("mean", torch.ones(4))
        self.workspace = torch.ones(4)

    def load(self, name, weight):
        if name == "mean":
            self.mean[: weight.shape[0]].copy_(weight)


def test_buffers():
    """One of which nothing is loaded is the engine's own: a tensor that was meant for it would be left over."""
    found = traced(Buffers(), hf({"mean": (torch.float32, (4,))}))
    assert found.weights == ("scale", "mean") and found.gaps.keys() == {"scale"} and found.unfilled == {}
    found = traced(Buffers(), hf({"mean": (torch.float32, (3,))}))
    assert found.unfilled == {"mean": "[4], 1 of its 4 elements, from [3] on"}
    found = traced(Buffers(), hf({"running_mean": (torch.float32, (4,))}))
    assert found.unplaced.keys() == {"running_mean"}


@pytest.mark.parametrize(
    ("action", "filled"),
    [
        (concatenates, {"b.weight"}),
        (exchanges, {"b.weight"}),
        # What becomes of these no trace can follow: they are the module's, which the loader gets as a whole.
        (keeps, {"b.weight", "b.wide"}),
        (raises, {"b.weight", "b.wide"}),
        (reads, {"b.weight", "b.wide"}),
    ],
)
def test_what_goes_through_the_loader_fills_too(action, filled):
    tensors = hf(TENSORS)
    unloaded = traced(Model({"b.weight": lambda *_: None}), tensors)
    assert unloaded.unfilled.keys() == {"a.scale", "a.wide", "b.weight", "b.wide", "c.scale", "c.wide"}
    found = traced(Model({"b.weight": action}), tensors)
    assert found.reload.keys() == {"b.weight"} and found.unfilled.keys() == unloaded.unfilled.keys() - filled


def computes_and_drops(layer, param, weight):
    weight.float().mean()


def test_what_the_loader_computes_and_drops_has_no_place():
    found = traced(Model({"b.weight": computes_and_drops}), hf(TENSORS))
    assert found.unplaced == {"b.weight": "the loader stores nothing of it (to(torch.float32) from torch.bfloat16)"}
    assert "b.weight" in found.unfilled


def test_tensors_for_the_loader_are_the_callers_to_bring():
    found = traced(Model({"b.weight": concatenates}), hf(TENSORS))
    ignore = list(found.unfilled)
    with pytest.raises(UnmatchedWeights, match="b.weight .needs the engine's loader: cat"):
        placement_plan(found, ignore=ignore)
    assert placement_plan(found, ignore=ignore, reloads=True).slice_count == 3


class Scattered(Loader):
    """A parameter of any geometry, of which rectangles are loaded."""

    def __init__(self, rng):
        super().__init__()
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
        order = rng.sample(range(len(shape)), len(shape))
        padded = [size + rng.randint(0, 2) for size in shape]
        storage = parameter(*(padded[dim] for dim in order)).data
        view = storage.permute([order.index(dim) for dim in range(len(shape))])
        for dim, size in enumerate(shape):
            view = view.narrow(dim, rng.randint(0, padded[dim] - size), size)
        self.weight = torch.nn.Parameter(view, requires_grad=False)
        self.parts = {}
        for number in range(rng.randint(0, 6)):
            first = [rng.randrange(size) for size in shape]
            sizes = [rng.randint(1, size - at) for size, at in zip(shape, first, strict=True)]
            self.parts[f"p{number}"] = tuple(slice(at, at + n) for at, n in zip(first, sizes, strict=True))

    def load(self, name, weight):
        self.weight.data[self.parts[name]].copy_(weight)


@pytest.mark.parametrize("seed", range(60))
def test_gaps_are_those_of_a_mask(seed):
    model = Scattered(random.Random(seed))
    filled = torch.zeros(model.weight.shape, dtype=torch.bool)
    for part in model.parts.values():
        filled[part] = True
    shapes = {name: tuple(model.weight[part].shape) for name, part in model.parts.items()}
    found = trace_loader(model, model.load_weights, specs_of(hf(shapes)))
    missing = (~filled).nonzero()
    assert found.gaps.keys() == ({"weight"} if len(missing) else set())
    for gap in found.gaps.values():
        assert (gap.elements, gap.of, gap.shape) == (len(missing), filled.numel(), tuple(filled.shape))
        assert not filled[gap.first]
