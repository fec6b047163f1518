"""A hand-written engine: fused parameters, a loader, and a layer whose bytes change places after loading."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

import torch
from torch import nn

HIDDEN, HEAD, HEADS, KV_HEADS, INNER, VOCABULARY = 32, 8, 4, 2, 48, 100

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCABULARY, HIDDEN),
    "attn.q.weight": (HEADS * HEAD, HIDDEN),
    "attn.k.weight": (KV_HEADS * HEAD, HIDDEN),
    "attn.v.weight": (KV_HEADS * HEAD, HIDDEN),
    "mlp.gate.weight": (INNER, HIDDEN),
    "mlp.up.weight": (INNER, HIDDEN),
    "mlp.down.weight": (HIDDEN, INNER),
    "norm.weight": (HIDDEN,),
}


class Leaf(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


class Engine(nn.Module):
    """One of `ranks` tensor-parallel ranks. ``mlp.down`` keeps its rows in reverse order once it is loaded."""

    def __init__(self, rank: int = 0, ranks: int = 1, *, permutes: bool = True) -> None:
        super().__init__()
        self.rank, self.ranks, self.permutes = rank, ranks, permutes
        heads, kv, inner = HEADS * HEAD // ranks, KV_HEADS * HEAD // ranks, INNER // ranks
        self.embed, self.norm = Leaf(VOCABULARY, HIDDEN), Leaf(HIDDEN)
        self.qkv, self.gate_up, self.down = Leaf(heads + 2 * kv, HIDDEN), Leaf(2 * inner, HIDDEN), Leaf(HIDDEN, inner)
        self.places = {
            "attn.q.weight": (self.qkv, 0, heads),
            "attn.k.weight": (self.qkv, heads, kv),
            "attn.v.weight": (self.qkv, heads + kv, kv),
            "mlp.gate.weight": (self.gate_up, 0, inner),
            "mlp.up.weight": (self.gate_up, inner, inner),
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.places:
                leaf, row, rows = self.places[name]
                leaf.weight.data.narrow(0, row, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
            elif name == "mlp.down.weight":
                columns = INNER // self.ranks
                self.down.weight.data.copy_(tensor.narrow(1, self.rank * columns, columns))
            else:
                self.get_submodule(name.removesuffix(".weight")).weight.data.copy_(tensor)

    def expected(self, version: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The bits of all parameters once `version` was loaded the engine's own way."""
        other = Engine(self.rank, self.ranks, permutes=self.permutes)
        Loader(other).reload(version.items())
        return bits(other)


class Loader:
    """The engine's way of loading; `fail` raises amid the next reload, `refuse` is a reason."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.fail, self.refuse = False, ""
        self.reloaded: list[list[str]] = []
        self.synchronized = 0

    def load_traced(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.engine.load_weights(weights)

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = list(weights)
        self.reloaded.append([name for name, _ in pairs])
        self.engine.load_weights(pairs[:1])
        if self.fail:
            self.fail = False
            raise RuntimeError("the loader was told to fail")
        self.engine.load_weights(pairs)
        if self.engine.permutes and any(name == "mlp.down.weight" for name, _ in pairs):
            self.engine.down.weight.data.copy_(self.engine.down.weight.data.flip(0).clone())

    def reload_modules(self) -> Collection[str]:
        return ()

    def refusal(self) -> str | None:
        return self.refuse or None

    def synchronize(self) -> None:
        self.synchronized += 1


def bits(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().contiguous().view(torch.int16).clone() for name, p in module.named_parameters()}


def assert_bits(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = bits(module)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


#: What the name of a tensor that scales another one ends with.
SCALE = "_scale_inv"


def dtype_of(name: str, names: Container[str]) -> torch.dtype:
    """In a checkpoint with these tensors."""
    if f"{name}{SCALE}" in names:
        return torch.float8_e4m3fn
    return torch.float32 if name.endswith((SCALE, "e_score_correction_bias")) else torch.bfloat16


def first_version(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    """Any bits: NaN, infinities and -0.0 among them."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in shapes.items():
        made[name] = any_bits(shape, dtype_of(name, shapes), generator)
    return made


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    raw = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32)
    if dtype.itemsize == 1:
        return raw.to(torch.int8).view(dtype)
    return raw.to(torch.int16).view(torch.bfloat16).to(dtype)


def change(version: dict[str, torch.Tensor], seed: int, density: float = 0.02) -> None:
    """A few elements of each tensor, in place, to any other bits."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in version.values():
        raw = tensor.view(torch.int16)
        mask = torch.rand(raw.shape, generator=generator) < density
        mask.view(-1)[seed % mask.numel()] = True
        new = torch.randint(-(2**15), 2**15, raw.shape, generator=generator, dtype=torch.int32)
        raw[mask] = new.to(torch.int16)[mask]
