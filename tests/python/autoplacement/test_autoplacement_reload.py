"""What a loader does beyond views and copies: never placed, nothing else lost, no byte of the model changed."""

import concurrent.futures
import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from autoplacement_support import BF16, hf, memory_bytes, parameter, specs_of, traced  # noqa: E402
from deltasync import errors  # noqa: E402
from deltasync.autoplacement import Reload, TraceError, trace_loader, whole_leaves  # noqa: E402
from torch import nn  # noqa: E402

SHAPE = (4, 6)


class Layer(nn.Module):
    def __init__(self, dtype=BF16):
        super().__init__()
        self.weight = parameter(*SHAPE, dtype=dtype)
        self.scale = parameter(1)
        self.wide = parameter(4, 3, dtype=torch.float32)


class Model(nn.Module):
    """Layers a, b, c; `actions`: name → what to do with (layer, weight) instead of copying."""

    def __init__(self, actions=(), **dtypes):
        super().__init__()
        for name in "abc":
            setattr(self, name, Layer(dtypes.get(name, BF16)))
        self.actions = dict(actions)

    def load_weights(self, weights):
        for name, weight in weights:
            layer, kind = name.split(".")
            param = getattr(getattr(self, layer), kind)
            self.actions.get(name, lambda layer, target, weight: target.data.copy_(weight))(
                getattr(self, layer), param, weight
            )


TENSORS = {"a.weight": SHAPE, "b.weight": SHAPE, "b.scale": (1,), "c.weight": SHAPE}


def computes(layer, param, weight):
    param.data.copy_(-torch.exp(weight.float()))


def casts(layer, param, weight):
    param.data.copy_(weight)


def reads(layer, param, weight):
    param.data.fill_(weight.flatten()[0].item())


def branches(layer, param, weight):
    if (weight > 0).any():
        param.data.copy_(weight)


def swallows(layer, param, weight):
    try:
        param.data.copy_(weight)
        weight.sum().item()
    except Exception:
        pass


def shuffles(layer, param, weight):
    param.data.copy_(weight[torch.tensor([3, 2, 1, 0])])


def reshapes(layer, param, weight):
    param.data.copy_(weight.t().reshape(SHAPE))


def strides_a_copy(layer, param, weight):
    param.data.copy_(weight.t().contiguous().as_strided(SHAPE, (6, 1)))


def widens(layer, param, weight):
    layer.wide.data.copy_(weight.view(torch.float32))


def spreads(layer, param, weight):
    param.data.copy_(weight[0])


def assembles(layer, param, weight):
    staging = torch.empty(SHAPE, dtype=weight.dtype)
    staging[:2] = weight[:2]
    staging[2:] = weight[2:]
    param.data.copy_(staging)


def concatenates(layer, param, weight):
    param.data.copy_(torch.cat([weight[2:], weight[:2]]))


def scales_in_place(layer, param, weight):
    param.data.copy_(weight)
    param.data.mul_(2)


def changes_the_tensor(layer, param, weight):
    weight.mul_(2)
    param.data.copy_(weight)


def exchanges(layer, param, weight):
    param.data = weight.clone()


def keeps(layer, param, weight):
    layer.kept = weight


def keeps_a_result(layer, param, weight):
    layer.register_buffer("kept", weight * 2)


def derives(layer, param, weight):
    param.data.copy_(weight)
    layer.derived = param.data.float().t().contiguous()


def fills(layer, param, weight):
    param.data.copy_(weight)
    param.data[1:2].fill_(0)


def pickles(layer, param, weight):
    param.data.copy_(pickle.loads(pickle.dumps(weight)))


def asks_for_its_address(layer, param, weight):
    assert weight.data_ptr() % 2 == 0
    param.data.copy_(weight)


def converts(layer, param, weight):
    param.data.copy_(torch.from_numpy(weight.view(torch.int16).numpy()).view(BF16))


def keeps_apart(layer, param, weight):
    KEPT.append(weight)
    param.data.copy_(weight)


KEPT = []


def drops(layer, param, weight):
    part = weight.unsqueeze(0).contiguous()
    assert part.shape == (1, *SHAPE)


def adds(layer, param, weight):
    param.data.zero_()
    param.data.add_(weight)


def raises(layer, param, weight):
    raise KeyError(f"no such parameter {tuple(weight.shape)}")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (computes, "to(torch.float32) from torch.bfloat16"),
        (reads, "item"),
        (branches, "gt"),
        (swallows, "sum"),
        (shuffles, "index"),
        (reshapes, "_unsafe_view of a copy, which is no view of the HF tensor"),
        (strides_a_copy, "as_strided of a copy, which is no view of the HF tensor"),
        (widens, "view to torch.float32"),
        (spreads, "copy_ that spreads (6,) over (4, 6)"),
        (assembles, "copy_ into memory that is not the model's"),
        (concatenates, "cat"),
        (scales_in_place, "mul_ over it"),
        (changes_the_tensor, "mul_"),
        (exchanges, "it takes the place of b.weight"),
        (keeps, "it becomes b.kept"),
        (keeps_apart, "the loader keeps it"),
        (keeps_a_result, "mul"),
        (derives, "b.derived is derived from it"),
        (fills, "fill_ over it"),
        (pickles, "pickle"),
        (asks_for_its_address, "data_ptr"),
        (converts, "numpy"),
        (adds, "add_"),
        (raises, "KeyError: 'no such parameter (4, 6)'"),
    ],
)
def test_what_is_no_copy(action, reason):
    model = Model({"b.weight": action})
    tensors = hf(TENSORS)
    held = {name: id(value) for name, value in vars(model.b).items()}
    addresses = [p.data_ptr() for p in model.parameters()]
    found = traced(model, tensors)
    assert found.reload.keys() == {"b.weight"}
    assert found.reload["b.weight"] == Reload(reason, ("b",))
    assert found.placed.keys() == {"a.weight", "b.scale", "c.weight"}
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert {name: id(value) for name, value in vars(model.b).items() if name != "derived"} == held
    assert "kept" not in dict(model.b.named_buffers())
    assert found.is_current(model)  # with what the loader has added
    assert whole_leaves(found).placed.keys() == {"a.weight", "c.weight"}


class Scaling(Model):
    """Computes what it has loaded once more, when all of it is there."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.a.weight.data = self.a.weight.data * 2


def test_what_is_exchanged_at_the_end_is_not_the_last_tensors():
    model = Scaling()
    found = traced(model, hf(TENSORS))
    assert found.reload == {"a.weight": Reload("it takes the place of a.weight", ("a",))}
    assert found.placed.keys() == TENSORS.keys() - {"a.weight"}
    assert found.is_current(model)


class Renewing(Model):
    """Makes new parameters and attributes of what it has loaded."""

    def __init__(self):
        super().__init__()
        self.derived = self.a.weight.detach() * 2

    def load_weights(self, weights):
        super().load_weights(weights)
        self.a.weight = torch.nn.Parameter(self.a.weight.detach() * 2)
        self.derived = self.b.weight.detach() * 2


def test_what_the_loader_has_renewed_is_put_back():
    model = Renewing()
    before = model.a.weight, model.derived
    found = traced(model, hf(TENSORS))
    assert found.reload.keys() == {"a.weight", "b.weight"}
    assert model.a.weight is before[0] and model.derived is before[1]
    assert found.is_current(model)


def test_looked_at_and_left_alone():
    """As other ranks' experts are: nothing of it can have gone anywhere."""
    found = traced(Model({"b.weight": drops}), hf(TENSORS))
    assert found.unplaced == {"b.weight": "the loader stores nothing of it"}
    assert whole_leaves(found).placed.keys() == {"a.weight", "b.scale", "c.weight"}


def test_another_dtype():
    found = traced(Model(b=torch.float32), hf(TENSORS))
    assert found.reload["b.weight"] == Reload("copy_ of torch.bfloat16 to torch.float32", ("b",))
    assert found.placed.keys() == {"a.weight", "b.scale", "c.weight"}


def test_each_that_raises_is_found():
    tensors = hf({f"{layer}.{kind}": shape for layer in "abc" for kind, shape in (("weight", SHAPE), ("scale", (1,)))})
    found = traced(Model({f"{layer}.scale": reads for layer in "abc"} | {"c.weight": raises}), tensors)
    assert found.reload.keys() == {"a.scale", "b.scale", "c.scale", "c.weight"}
    assert [found.reload[f"{layer}.scale"].modules for layer in "abc"] == [("a",), ("b",), ("c",)]


class Gathering(Model):
    """Takes all tensors before it looks at one."""

    def load_weights(self, weights):
        super().load_weights(list(weights))


@pytest.mark.parametrize("action", [reads, raises, computes])
def test_a_loader_that_gathers_first(action):
    found = traced(Gathering({"b.weight": action}), hf(TENSORS))
    assert found.reload.keys() == {"b.weight"}
    assert found.placed.keys() == {"a.weight", "b.scale", "c.weight"}


class Pairing(Model):
    """Copies a.weight only once it has c.weight too; fails of what comes between."""

    def load_weights(self, weights):
        aside = {}
        for name, weight in weights:
            if name == "a.weight":
                aside[name] = weight
            elif name == "c.weight":
                super().load_weights([*aside.items(), (name, weight)])
            else:
                super().load_weights([(name, weight)])


def test_what_was_put_aside_is_sent_again():
    found = traced(Pairing({"b.weight": reads}), hf(TENSORS))
    assert found.reload.keys() == {"b.weight"}
    assert found.placed.keys() == {"a.weight", "b.scale", "c.weight"}
    found = traced(Pairing({"c.weight": reads}), hf(TENSORS))
    assert found.placed.keys() == {"b.weight", "b.scale", "a.weight"}


def test_what_was_put_aside_and_lost_is_not_taken_for_unused():
    found = traced(Pairing(), hf({"a.weight": SHAPE, "c.bias": (6,)}))
    assert found.reload.keys() == {"a.weight", "c.bias"}
    assert found.reload["a.weight"].reason == "the loader had put it aside when it failed"


class Impatient(Model):
    """Takes two tensors at a time, and none after c.weight."""

    def load_weights(self, weights):
        for _, (name, weight) in zip(range(2), weights, strict=False):
            super().load_weights([(name, weight)])


def test_a_loader_that_takes_some():
    found = traced(Impatient(), hf(TENSORS))
    assert found.placed.keys() == TENSORS.keys()


def test_a_loader_that_takes_none():
    model = Model()
    found = trace_loader(model, lambda weights: None, specs_of(hf(TENSORS)))
    assert found.unplaced == dict.fromkeys(TENSORS, "the loader stores nothing of it")
    with pytest.raises(TraceError, match="before it takes a tensor: RuntimeError\\('asleep'\\)"):
        trace_loader(model, lambda weights: (_ for _ in ()).throw(RuntimeError("asleep")), specs_of(hf(TENSORS)))


class Threaded(Model):
    def load_weights(self, weights):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(super(Threaded, self).load_weights, [pair]) for pair in weights]
            for job in jobs:
                job.result()


def test_threads_of_a_loader():
    found = traced(Threaded({"b.weight": computes}), hf(TENSORS))
    assert found.reload.keys() == {"b.weight"}
    assert found.placed.keys() == {"a.weight", "b.scale", "c.weight"}
    found = traced(Threaded({"b.weight": reads}), hf(TENSORS))
    assert found.reload["b.weight"].reason == "item"
    assert found.placed.keys() == {"a.weight", "b.scale", "c.weight"}


def test_threads_of_a_loader_are_guarded():
    """Padding, and a pool that a task uses."""

    def pads(layer, param, weight):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(param.data.zero_).result()
        param.data.copy_(weight)
        layer.wide.data.fill_(0)

    submit = concurrent.futures.ThreadPoolExecutor.submit
    found = traced(Threaded({"b.weight": pads}), hf(TENSORS))
    assert found.placed.keys() == TENSORS.keys()
    assert concurrent.futures.ThreadPoolExecutor.submit is submit
    found = traced(Threaded({"b.weight": derives, "a.weight": scales_in_place}), hf(TENSORS))
    assert found.reload.keys() == {"a.weight", "b.weight"}


class Derived(Model):
    """c.weight is built from what b.weight has in live memory."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.c.weight.data.copy_(self.b.weight.data * 2)


def test_live_memory_derived_from_live_memory():
    model = Derived()
    found = traced(model, hf({"a.weight": SHAPE, "b.weight": SHAPE}))
    assert found.reload == {"b.weight": Reload("copy_ of what was derived from it", ("b", "c"))}


def test_parts_of_a_place_from_two_tensors():
    model = Model({"c.scale": lambda layer, param, weight: layer.weight.data[0, :1].copy_(weight)})
    found = traced(model, hf({"a.weight": SHAPE, "c.weight": SHAPE, "c.scale": (1,)}))
    assert found.placed.keys() == {"a.weight"}
    assert found.reload["c.weight"].reason == "parts of its place are also written from c.scale"


def test_parts_of_a_large_place_from_several_tensors():
    """The second small one overlaps the large one, not its neighbour."""
    rows = {"a.scale": 1, "b.scale": 2}
    model = Model(
        {
            name: lambda _, param, weight, row=row: model.c.weight.data[row, :1].copy_(weight)
            for name, row in rows.items()
        }
    )
    found = traced(model, hf({"a.weight": SHAPE, "a.scale": (1,), "b.scale": (1,), "c.weight": SHAPE}))
    assert found.placed.keys() == {"a.weight"}
    assert found.reload["b.scale"].reason == "parts of its place are also written from a.scale, c.weight"


def test_cleared_before_the_copy():
    model = Model({"b.weight": lambda layer, param, weight: param.data.zero_().copy_(weight)})
    assert traced(model, hf(TENSORS)).placed.keys() == TENSORS.keys()


def test_modules_are_those_at_hand():
    """Nothing else in the module tells."""
    found = traced(Model({"a.weight": reads, "c.weight": raises}), hf(TENSORS))
    assert found.reload["a.weight"].modules == ("a",)
    assert found.reload["c.weight"].modules == ("c",)


def test_modules_are_those_of_the_neighbours():
    """The loader has no parameter at hand when it fails."""

    def load(weights):
        for name, weight in weights:
            if name == "b.zero_point":
                raise ValueError("unknown")
            model.load_weights([(name, weight)])

    model = Model()
    found = trace_loader(model, load, specs_of(hf(TENSORS | {"b.zero_point": (1,)})))
    assert found.reload == {"b.zero_point": Reload("ValueError: unknown", ("b",))}
    assert whole_leaves(found).placed.keys() == {"a.weight", "c.weight"}


def test_whole_leaves_reach_through_tensors_in_several_modules():
    model = Model()
    model.b.weight = model.a.weight  # tied
    found = traced(model, hf({"a.weight": SHAPE, "a.scale": (1,), "b.scale": (1,), "c.weight": SHAPE}))
    assert not found.reload
    assert whole_leaves(found).placed == found.placed
    assert whole_leaves(found, ["b"]).placed.keys() == {"c.weight"}
    assert "a (a.weight)" in whole_leaves(found, ["b"]).reload["a.scale"].reason
    assert whole_leaves(found, ["c"]).placed.keys() == {"a.weight", "a.scale", "b.scale"}


def test_where_a_tensor_reaches_is_unknown():
    def unknown(weights):
        for name, weight in weights:
            if name == "x.y.z":
                raise ValueError("unknown")
            model.load_weights([(name, weight)])

    model = Model()
    found = trace_loader(model, unknown, specs_of(hf(TENSORS | {"x.y.z": (1,)})))
    assert found.reload["x.y.z"] == Reload("ValueError: unknown", ())
    assert found.placed.keys() == TENSORS.keys()
    safe = whole_leaves(found)
    assert not safe.placed
    assert safe.reload["a.weight"].reason == "it is not known which modules x.y.z reaches (ValueError: unknown)"


def test_the_signature_follows_the_memory():
    model = Model()
    found = traced(model, hf(TENSORS))
    assert found.is_current(model)
    assert found.signature() == traced(model, hf(TENSORS)).signature()
    assert found.signature() != traced(copy.deepcopy(model), hf(TENSORS)).signature()
    model.c._parameters["renamed"] = model.c._parameters.pop("wide")
    assert not found.is_current(model)
    model.c._parameters["wide"] = model.c._parameters.pop("renamed")
    assert found.is_current(model)
    model.c.wrapped = nn.Linear(2, 2)
    assert not found.is_current(model)
    del model.c.wrapped
    assert found.is_current(model)
    old = model.a.weight.data
    model.a.weight.data = old.clone()
    assert not found.is_current(model)
    model.a.weight.data = old
    assert found.is_current(model)
    model.a.weight.data = old.view(6, 4)
    assert not found.is_current(model)


def test_several_models_by_name():
    target, draft = Model(), Model()

    def load(weights):
        for name, weight in weights:
            (draft if name == "a.scale" else target).load_weights([(name, weight)])

    found = trace_loader({"target": target, "draft": draft}, load, specs_of(hf(TENSORS | {"a.scale": (1,)})))
    assert [memory.name for memory in found.memories][-1] == "draft.a.scale"
    assert found.modules["c.weight"] == {"target.c"}
    assert set(found.placed) == TENSORS.keys() | {"a.scale"}


def test_errors():
    model = Model()
    with pytest.raises(errors.InvalidArgument, match="a: 'F3' is no dtype of safetensors files"):
        trace_loader(model, model.load_weights, [("a", "F3", (2,))])
    with pytest.raises(errors.Unsupported, match="a: torch.complex128 is no dtype that safetensors files have"):
        trace_loader(model, model.load_weights, [("a", torch.complex128, (2,))])
    with pytest.raises(ValueError, match="a: named twice"):
        trace_loader(model, model.load_weights, [("a", "BF16", (2,)), ("a", "BF16", (2,))])
    with pytest.raises(TraceError, match="hold no memory"):
        trace_loader(nn.Module(), model.load_weights, [])
    with pytest.raises(TraceError, match="weight is on the meta device"):
        trace_loader(nn.Linear(2, 2, device="meta"), model.load_weights, [])
    held = Model({"b.weight": lambda layer, param, weight: setattr(layer, "all", [weight])})
    with pytest.raises(TraceError, match=r"keeps an HF tensor in b.all\[0\]"):
        trace_loader(held, held.load_weights, specs_of(hf(TENSORS)))


def test_interrupts_pass():
    model = Model({"b.weight": lambda layer, param, weight: (_ for _ in ()).throw(KeyboardInterrupt())})
    before = memory_bytes(model)
    with pytest.raises(KeyboardInterrupt):
        trace_loader(model, model.load_weights, specs_of(hf(TENSORS)))
    assert memory_bytes(model) == before
