"""The read-back proof: live bytes that are not the HF tensor's, for whatever reason."""

import pytest

torch = pytest.importorskip("torch")

from autoplacement_support import BF16, hf, parameter, specs_of, traced  # noqa: E402
from deltasync.autoplacement import prove, replay, trace_loader  # noqa: E402
from torch import nn  # noqa: E402

TENSORS = {"a": (6, 8), "b": (6, 8), "c": (torch.float8_e4m3fn, (6, 8)), "d": (torch.float32, (3,))}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stacked = parameter(2, 8, 6)
        self.c = parameter(6, 8, dtype=torch.float8_e4m3fn)
        self.d = parameter(3, dtype=torch.float32)

    def load_weights(self, weights):
        for name, weight in weights:
            if name in "ab":
                self.stacked.data["ab".index(name)].copy_(weight.t())
            else:
                getattr(self, name).data.copy_(weight)


@pytest.fixture
def loaded():
    """A model with its weights, the weights and a trace."""
    model, tensors = Model(), hf(TENSORS)
    model.load_weights(tensors.items())
    return model, tensors, traced(model, tensors)


def test_equal_bytes_pass_whatever_they_mean(loaded):
    model, tensors, found = loaded
    for special in (float("nan"), -0.0, float("inf")):
        tensors["d"][0] = special
        tensors["d"].view(torch.int32)[1] = 0x7FC00001  # a NaN with a payload
        model.load_weights(tensors.items())
        assert not prove(found, tensors.__getitem__).reload


def test_bytes_permuted_in_place(loaded):
    model, tensors, found = loaded
    expert = model.stacked.data[1]
    expert.copy_(expert.reshape(4, 2, 6).transpose(0, 1).reshape(8, 6).clone())
    assert found.is_current(model)
    proved = prove(found, tensors.__getitem__)
    assert proved.reload.keys() == {"b"}
    assert proved.reload["b"].reason == "live bytes are not the HF tensor's: row 0, column 1 (byte 108 of stacked)"
    assert proved.reload["b"].modules == ("",)
    assert proved.placed.keys() == {"a", "c", "d"}
    assert [slice_.tensor for slice_ in proved.slices] == ["a", "c", "d"]


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_a_single_bit(loaded, name):
    model, tensors, found = loaded
    changed = {**tensors, name: tensors[name].clone()}
    changed[name].view(torch.uint8).flatten()[-1] ^= 1
    proved = prove(found, changed.__getitem__)
    assert proved.reload.keys() == {name}
    last = {"a": "row 5, column 7", "b": "row 5, column 7", "c": "row 5, column 7", "d": "row 0, column 2"}[name]
    assert last in proved.reload[name].reason


def test_buffers_of_bytes(loaded):
    model, tensors, found = loaded
    raw = {name: bytes(t.view(torch.uint8).flatten().tolist()) for name, t in tensors.items()}
    assert not prove(found, raw.__getitem__).reload
    assert not prove(found, lambda name: memoryview(bytearray(raw[name]))).reload
    for p in model.parameters():
        p.data.view(torch.uint8).zero_()
    replay(found, raw)
    assert not prove(found, tensors.__getitem__).reload


def test_tensors_that_are_not_the_traced_ones(loaded):
    _, tensors, found = loaded
    with pytest.raises(ValueError, match="a: torch.float16"):
        prove(found, lambda name: tensors[name].half())
    with pytest.raises(ValueError, match=r"a: torch.bfloat16\(8, 6\) where"):
        prove(found, lambda name: tensors[name].t())
    with pytest.raises(ValueError, match="a: 3 bytes where 96 were traced"):
        prove(found, lambda name: b"abc")
    with pytest.raises(KeyError):
        prove(found, {}.__getitem__)
    with pytest.raises(KeyError):
        replay(found, {"z": b""})


def test_an_address_between_elements():
    model = nn.Module()
    raw = bytearray(17)
    model.even = nn.Parameter(torch.frombuffer(raw, dtype=torch.uint8), requires_grad=False)
    model.odd = nn.Parameter(torch.frombuffer(raw, dtype=BF16, offset=1), requires_grad=False)
    reason = "copy_ to an address that is no multiple of 2"
    found = trace_loader(
        model, lambda weights: [model.odd.data.copy_(weight) for _, weight in weights], [("x", BF16, (8,))]
    )
    odd = model.odd.data_ptr() % 2 == 1
    assert (found.reload["x"].reason == reason) if odd else found.placed


def test_what_is_not_placed_is_not_read(loaded):
    model, tensors, _ = loaded
    found = trace_loader(model, model.load_weights, [*specs_of(tensors), ("dd", BF16, (2,))])
    assert "dd" in found.reload

    def read(name):
        assert name != "dd"
        return tensors[name]

    assert prove(found, read).reload.keys() == {"dd"}
