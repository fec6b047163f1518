"""Loaders as engines have them, on small modules of our own."""

import copy

import pytest

torch = pytest.importorskip("torch")

from autoplacement_support import BF16, check, hf, parameter, traced  # noqa: E402
from deltasync.autoplacement import PlacedSlice, Rect, replay  # noqa: E402
from deltasync.autoplacement.plan import IgnoredSlice  # noqa: E402
from torch import nn  # noqa: E402

HEAD, HIDDEN = 4, 12


class Loader(nn.Module):
    """A model whose loader is a method for each kind of name."""

    def load_weights(self, weights):
        for name, weight in weights:
            self.load(name, weight)


class Qkv(Loader):
    """Fused q, k, v with fewer key heads than query heads; with more ranks than key heads, neighbours share one."""

    def __init__(self, rank, ranks, heads=8, key_heads=2):
        super().__init__()
        self.q_rows = heads // ranks * HEAD
        self.kv_rows = max(1, key_heads // ranks) * HEAD
        self.q_from = rank * self.q_rows
        self.kv_from = rank * self.kv_rows if ranks <= key_heads else rank // (ranks // key_heads) * HEAD
        self.weight = parameter(self.q_rows + 2 * self.kv_rows, HIDDEN)
        self.bias = parameter(self.q_rows + 2 * self.kv_rows)

    def load(self, name, weight):
        shard, kind = name.split(".")
        rows = self.q_rows if shard == "q" else self.kv_rows
        to = {"q": 0, "k": self.q_rows, "v": self.q_rows + self.kv_rows}[shard]
        part = weight.narrow(0, self.q_from if shard == "q" else self.kv_from, rows)
        target = getattr(self, kind).data.narrow(0, to, rows)
        assert target.shape == part.shape
        target.copy_(part)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fused_qkv(ranks):
    shapes = {"q": 8 * HEAD, "k": 2 * HEAD, "v": 2 * HEAD}
    weights = {f"{name}.weight": (rows, HIDDEN) for name, rows in shapes.items()}
    tensors = hf(weights | {f"{name}.bias": (rows,) for name, rows in shapes.items()})
    for rank in range(ranks):
        found = check(Qkv(rank, ranks), tensors)
        assert all(len(slices) == 1 for slices in found.placed.values())
        if ranks == 4:
            (key,) = found.placed["k.weight"]
            assert key == PlacedSlice("k.weight", Rect(rank // 2 * HEAD, 0, HEAD, HIDDEN), 0, 8 * HIDDEN * 2, 24, 2)
            rest = [s for s in found.ignored if s.tensor == "k.weight"]
            assert rest == [IgnoredSlice("k.weight", Rect((1 - rank // 2) * HEAD, 0, HEAD, HIDDEN))]


class Mlp(Loader):
    """gate_up by rows, down by columns."""

    def __init__(self, rank, ranks, inner=8):
        super().__init__()
        self.rank, self.part = rank, inner // ranks
        self.gate_up = parameter(2 * self.part, HIDDEN)
        self.down = parameter(HIDDEN, self.part)

    def load(self, name, weight):
        if name == "down":
            self.down.data.copy_(weight.chunk(weight.shape[1] // self.part, dim=1)[self.rank])
        else:
            to = self.part * (name == "up")
            self.gate_up[to : to + self.part] = weight[self.rank * self.part : (self.rank + 1) * self.part]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gate_up_and_down(ranks):
    tensors = hf({"gate": (8, HIDDEN), "up": (8, HIDDEN), "down": (HIDDEN, 8)})
    for rank in range(ranks):
        found = check(Mlp(rank, ranks), tensors)
        assert len(found.slices) == 3


class Experts(Loader):
    """Stacked experts; of some only, as with expert parallelism. `fused`: HF has them in one tensor, in × out."""

    def __init__(self, experts, inner=6):
        super().__init__()
        self.local = {expert: at for at, expert in enumerate(experts)}
        self.inner = inner
        self.w13 = parameter(len(experts), 2 * inner, HIDDEN)
        self.w2 = parameter(len(experts), HIDDEN, inner)

    def load(self, name, weight):
        if name == "experts.gate_up":  # experts × hidden × (gate, up)
            for expert, at in self.local.items():
                self.w13.data[at].copy_(weight[expert].t())
            return
        _, expert, kind = name.split(".")
        at = self.local.get(int(expert))
        if at is None:
            return
        if kind == "down":
            self.w2.data[at].copy_(weight)
        else:
            self.w13.data[at][self.inner * (kind == "up") :][: self.inner].copy_(weight)


@pytest.mark.parametrize("local", [[0, 1, 2, 3], [2, 3], [3, 0]])
def test_stacked_experts(local):
    shapes = {}
    for expert in range(4):
        shapes |= {f"e.{expert}.gate": (6, HIDDEN), f"e.{expert}.up": (6, HIDDEN), f"e.{expert}.down": (HIDDEN, 6)}
    found = check(Experts(local), hf(shapes))
    assert {name.split(".")[1] for name in found.placed} == {str(expert) for expert in local}
    assert len(found.slices) == 3 * len(local)
    assert len(found.unplaced) == 3 * (4 - len(local))


def test_experts_in_one_tensor():
    found = check(Experts([0, 2]), hf({"experts.gate_up": (3, HIDDEN, 12)}))
    assert [s.rect for s in found.slices] == [Rect(0, 0, HIDDEN, 12), Rect(2 * HIDDEN, 0, HIDDEN, 12)]
    assert [s.rect for s in found.ignored] == [Rect(HIDDEN, 0, HIDDEN, 12)]


class Vocabulary(Loader):
    def __init__(self, rank, ranks, rows=10, padded=16):
        super().__init__()
        self.part = padded // ranks
        self.first = rank * self.part
        self.rows = max(0, min(rows - self.first, self.part))
        self.weight = parameter(self.part, HIDDEN)
        self.weight.data[self.rows :] = 0

    def load(self, name, weight):
        weight = weight.narrow(0, min(self.first, weight.shape[0]), self.rows)
        self.weight.data[: weight.shape[0]].copy_(weight)
        self.weight.data[weight.shape[0] :].fill_(0)


def test_vocabulary_padding():
    tensors = hf({"embed": (10, HIDDEN)})
    rows = []
    for rank in range(4):
        found = check(Vocabulary(rank, 4), tensors)
        rows.append([(s.rect.row, s.rect.rows) for s in found.slices])
        assert ("embed" in found.unplaced) == (rank == 3)
    assert rows == [[(0, 4)], [(4, 4)], [(8, 2)], []]


class Tied(Loader):
    def __init__(self):
        super().__init__()
        self.embed = nn.Module()
        self.head = nn.Module()
        self.embed.weight = parameter(5, HIDDEN)
        self.head.weight = self.embed.weight
        self.copy = parameter(5, HIDDEN)

    def load(self, name, weight):
        (self.embed if name == "embed" else self.head).weight.data.copy_(weight)
        if name == "embed":
            self.copy.data.copy_(weight)


def test_one_tensor_in_two_places():
    found = check(Tied(), hf({"embed": (5, HIDDEN)}))
    assert sorted(s.memory for s in found.slices) == [0, 1]
    assert found.modules["embed"] == {"embed", "head", ""}


def test_two_tensors_in_one_place_the_last_counts():
    found = check(Tied(), hf({"head.first": (5, HIDDEN), "head": (5, HIDDEN)}))
    assert found.placed.keys() == {"head"}
    assert found.unplaced == {"head.first": "head is loaded over it"}
    found = check(Tied(), hf({"embed": (5, HIDDEN), "head": (5, HIDDEN)}))  # embed keeps its second place
    assert [s.memory for s in found.placed["embed"]] != [s.memory for s in found.placed["head"]]


class Spelling(Loader):
    """One thing in many words."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(6, 8)

    def load(self, name, weight):
        target = self.weight.data
        match name:
            case "index":
                target[...] = weight[:, None, :].squeeze(1)
            case "to":
                target.copy_(weight.to(BF16).to("cpu", non_blocking=True).contiguous().detach().data.clone())
            case "views":
                target.view(2, 3, 8).copy_(weight.reshape(2, 3, 8))
            case "flat":
                target.flatten().copy_(torch.flatten(weight))
            case "split":
                for row, part in zip(target.split(2), weight.split([2, 2, 2]), strict=True):
                    row.copy_(part)
            case "unbind":
                for row, part in zip(target, torch.unbind(weight), strict=True):
                    row[:] = part
            case "transposed":
                target.t().copy_(weight.transpose(0, 1).contiguous())
            case "permuted":
                target.view(2, 3, 8).permute(2, 0, 1).copy_(weight.view(2, 3, 8).permute(2, 0, 1))
            case "bits":
                target.view(torch.int16).copy_(weight.view(torch.int16))
            case "foreach":
                torch._foreach_copy_([target[:3], target[3:]], [weight[:3], weight[3:]])
            case "leading":
                target[None].copy_(weight)
            case "parameter":
                self.weight.copy_(nn.Parameter(weight, requires_grad=False))
            case "hooks":
                assert weight.shape == (6, 8) and weight.numel() == 48 and weight.dim() == 2 and weight.is_contiguous()
                assert weight.dtype == BF16 and weight.device.type == "cpu" and not weight.is_meta and len(weight) == 6
                assert "RecordingTensor" in f"{weight}" or type(weight) is torch.Tensor
                target.narrow(0, 0, 6).unsqueeze(0)[0].copy_(torch.narrow(weight, 0, 0, 6), non_blocking=True)


SPELLINGS = "index to views flat split unbind transposed permuted bits foreach leading parameter hooks"


@pytest.mark.parametrize("name", SPELLINGS.split())
def test_spelling(name):
    found = check(Spelling(), hf({name: (6, 8)}))
    assert len(found.slices) == 1


class Views(Loader):
    """Parameters that are views of one storage, one with a pitch, one transposed, one with every other column."""

    def __init__(self):
        super().__init__()
        self.register_buffer("flat", parameter(400).data)
        self.a = nn.Parameter(self.flat[:48].view(6, 8), requires_grad=False)
        self.b = nn.Parameter(self.flat[48:148].view(10, 10)[:6, :8], requires_grad=False)
        self.c = nn.Parameter(self.flat[148:196].view(8, 6).t(), requires_grad=False)
        self.d = nn.Parameter(self.flat[200:296].view(6, 16)[:, ::2], requires_grad=False)

    def load(self, name, weight):
        getattr(self, name).data.copy_(weight)


def test_parameters_that_are_views():
    model = Views()
    tensors = hf({name: (6, 8) for name in "abcd"})
    loaded = copy.deepcopy(model)
    with torch.no_grad():
        loaded.load_weights(tensors.items())
    found = traced(model, tensors)
    assert [memory.bytes for memory in found.memories] == [800]
    assert found.memories[0].name == "a"
    strides = {s.tensor: (s.offset, s.row_stride, s.col_stride) for s in found.slices}
    assert strides == {"a": (0, 16, 2), "b": (96, 20, 2), "c": (296, 2, 12), "d": (400, 32, 4)}
    replay(found, tensors)
    for name in "abcd":
        assert torch.equal(getattr(model, name).view(torch.int16), tensors[name].view(torch.int16))


class Odd(Loader):
    def __init__(self):
        super().__init__()
        self.scale = parameter(dtype=torch.float32)
        self.empty = parameter(0, 4)
        self.fp8 = parameter(4, 4, dtype=torch.float8_e4m3fn)
        self.flags = nn.Parameter(torch.zeros(3, dtype=torch.bool), requires_grad=False)
        self.wide = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

    def load(self, name, weight):
        getattr(self, name).data.copy_(weight.reshape(getattr(self, name).shape))


def test_scalars_empty_tensors_and_other_types():
    tensors = hf(
        {
            "scale": (torch.float32, ()),
            "empty": (BF16, (0, 4)),
            "fp8": (torch.float8_e4m3fn, (4, 4)),
            "flags": (torch.bool, (3,)),
            "wide": (torch.int64, (1, 3)),
        }
    )
    found = check(Odd(), tensors)
    assert found.unplaced.keys() == {"empty"}
    assert found.placed["scale"][0].rect == Rect(0, 0, 1, 1)
    assert [memory.dtype for memory in found.memories] == [torch.float32, torch.float8_e4m3fn, torch.bool, torch.int64]


def test_ignored_tensors_are_named_whole():
    found = check(Spelling(), hf({"other": (2, 2), "index": (6, 8)}))
    assert found.ignored == [IgnoredSlice("other", None)]
    assert found.unplaced == {"other": "the loader stores nothing of it"}
