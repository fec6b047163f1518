"""A loader is run twice: as it is on one copy of a model, and through the tracer and a replay on another."""

import copy

import pytest

torch = pytest.importorskip("torch")

from deltasync.autoplacement import LoaderTrace, prove, replay, trace_loader  # noqa: E402
from deltasync.autoplacement.memory import live_tensors  # noqa: E402
from deltasync.autoplacement.specs import BITS  # noqa: E402
from torch import nn  # noqa: E402

BF16 = torch.bfloat16


def parameter(*shape, dtype=BF16):
    """A parameter with bytes that no HF tensor has by chance."""
    return nn.Parameter(random_bits(shape, dtype, torch.Generator().manual_seed(77)), requires_grad=False)


def random_bits(shape, dtype, generator):
    """Every bit pattern may come: NaN with payloads, -0.0, subnormals."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    width = dtype.itemsize
    raw = torch.randint(0, 256, (*shape, width), generator=generator).to(torch.uint8)
    return raw.view(BITS[width]).reshape(shape).view(dtype)


def hf(specs, seed=1):
    """HF tensors by name, of {name: shape} in bf16 or {name: (dtype, shape)}."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in specs.items():
        dtype, shape = spec if spec and isinstance(spec[0], torch.dtype) else (BF16, spec)
        tensors[name] = random_bits(tuple(shape), dtype, generator)
    return tensors


def specs_of(tensors):
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def memory_bytes(model):
    """The bytes of every storage that the model holds, by the name of its first tensor."""
    found = {}
    for live in live_tensors(model):
        storage = live.tensor.untyped_storage()
        found.setdefault(storage.data_ptr(), (live.name, bytes(storage.tolist())))
    return dict(found.values())


def traced(model, tensors) -> LoaderTrace:
    """The trace of model.load_weights, which must not have changed a byte."""
    before = memory_bytes(model)
    found = trace_loader(model, model.load_weights, specs_of(tensors))
    assert before.items() <= memory_bytes(model).items()
    names = set(tensors)
    assert names == found.placed.keys() | found.reload.keys() | found.unplaced.keys()
    assert len(found.placed) + len(found.reload) + len(found.unplaced) == len(names)
    return found


def check(model, tensors) -> LoaderTrace:
    """All of what the loader stores is placed, and a replay gives the loader's memory bit for bit."""
    loaded = copy.deepcopy(model)
    loaded.load_weights(list(tensors.items()))
    found = traced(model, tensors)
    assert not found.reload
    # What the loader itself writes beside HF tensors was there before; here it is what differs at first.
    replay(found, tensors)
    assert memory_bytes(model) == memory_bytes(loaded)
    proved = prove(found, tensors.__getitem__)
    assert proved.placed == found.placed
    check_cover(found)
    return found


def check_cover(found):
    """Every element is in a placed slice or in an ignored rectangle, in one of both."""
    for spec in found.specs:
        rows, columns = spec.rows_columns
        count = torch.zeros(rows, columns, dtype=torch.int32)
        whole = False
        for slice_ in found.ignored:
            if slice_.tensor == spec.name and slice_.rect is None:
                whole = True
            elif slice_.tensor == spec.name:
                row, col, height, width = slice_.rect
                assert not count[row : row + height, col : col + width].any()
                count[row : row + height, col : col + width] = 1
        for slice_ in found.placed.get(spec.name, ()):
            row, col, height, width = slice_.rect
            assert not (count[row : row + height, col : col + width] == 1).any()
            count[row : row + height, col : col + width] = 2
        assert whole == (spec.name not in found.placed)
        assert whole or (count != 0).all()
