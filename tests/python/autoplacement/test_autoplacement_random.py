"""Random chains of views on both sides of a copy: a replay writes what the loader writes, bit for bit."""

import random

import pytest

torch = pytest.importorskip("torch")

from autoplacement_support import hf, memory_bytes, parameter, specs_of  # noqa: E402
from deltasync.autoplacement import prove, replay, trace_loader  # noqa: E402
from torch import nn  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64]


def step(rng, shape):
    """A view operation as a function, for a tensor of this shape."""
    dims = len(shape)
    kind = rng.choice("narrow index step transpose permute unsqueeze unflatten flatten chunk clone".split())
    dim = rng.randrange(dims) if dims else 0
    if kind == "unsqueeze" or not dims:
        return lambda t: t.unsqueeze(dim)
    if kind == "narrow":
        first = rng.randrange(shape[dim])
        length = rng.randint(1, shape[dim] - first)
        return lambda t: t.narrow(dim, first, length)
    if kind == "index" and dims > 1:
        at = rng.randrange(shape[0])
        return lambda t: t[at]
    if kind == "step":
        first = rng.randrange(shape[-1])
        return lambda t: t[..., first::2]
    if kind == "transpose":
        other = rng.randrange(dims)
        return lambda t: t.transpose(dim, other)
    if kind == "permute":
        order = rng.sample(range(dims), dims)
        return lambda t: t.permute(order)
    if kind == "unflatten" and shape[dim] % 2 == 0 and shape[dim]:
        return lambda t: t.unflatten(dim, (2, -1))
    if kind == "flatten" and dims > 1:
        return lambda t: t.flatten(0, 1)
    if kind == "chunk":
        return lambda t: t.chunk(2, dim)[-1]
    return lambda t: t.contiguous()


def chain(rng, start):
    """Up to six operations that work on a tensor like `start`, and the shape that they lead to."""
    steps, current = [], start
    for _ in range(rng.randint(0, 6)):
        taken = step(rng, tuple(current.shape))
        try:
            following = taken(current)
        except RuntimeError:
            continue
        steps.append(taken)
        current = following
    return steps, tuple(current.shape)


def apply(steps, tensor):
    for taken in steps:
        tensor = taken(tensor)
    return tensor


class Model(nn.Module):
    """Loader of tensors whose chains lead to shapes; a place for each, itself at the end of a chain of views."""

    def __init__(self, rng, tensors):
        super().__init__()
        self.sources, self.targets = {}, {}
        for name, tensor in tensors.items():
            self.sources[name], shape = chain(rng, tensor)
            order = rng.sample(range(len(shape)), len(shape))
            room = [shape[dim] + rng.randint(0, 2) for dim in order]
            param = parameter(*room, dtype=tensor.dtype)
            self.register_parameter(name, param)
            back = [order.index(dim) for dim in range(len(shape))]
            first = [rng.randint(0, room[order.index(dim)] - size) for dim, size in enumerate(shape)]
            self.targets[name] = (back, first, shape)

    def place(self, name):
        back, first, shape = self.targets[name]
        view = getattr(self, name).data.permute(back)
        for dim, (start, size) in enumerate(zip(first, shape, strict=True)):
            view = view.narrow(dim, start, size)
        return view

    def load_weights(self, weights):
        for name, weight in weights:
            self.place(name).copy_(apply(self.sources[name], weight))


@pytest.mark.parametrize("seed", range(60))
def test_random_chains(seed):
    rng = random.Random(seed)
    shapes = {}
    for number in range(8):
        shape = tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(0, 4)))
        shapes[f"t{number}"] = (rng.choice(DTYPES), shape)
    tensors = hf(shapes, seed)
    model = Model(rng, tensors)
    before = memory_bytes(model)
    found = trace_loader(model, model.load_weights, specs_of(tensors))
    assert memory_bytes(model) == before
    # A copy in between may be reshaped in ways that are no view of the tensor; nothing else is left to the loader.
    assert all("no view of the HF tensor" in reload.reason for reload in found.reload.values())
    assert len(found.placed) + len(found.reload) == len(tensors)
    replay(found, tensors)
    replayed = memory_bytes(model)
    for name, raw in before.items():
        assert name in found.placed or replayed[name] == raw
    model.load_weights(tensors.items())
    loaded = memory_bytes(model)
    for name in found.placed:
        assert replayed[name] == loaded[name], name
    assert not set(found.placed) & prove(found, tensors.__getitem__).reload.keys()
