"""A trainer that is cut over ranks as Megatron's are, without Megatron: with a family page and a HF directory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PAGE = """
name = "fake"
architectures = ["FakeForCausalLM"]
[[rows]]
mcore = "rows.{L}"
hf = "model.{L}.rows"
[[rows]]
mcore = "cols.{L}"
hf = "model.{L}.cols"
[[rows]]
mcore = "own.{L}"
hf = "model.{L}.own"
[[rows]]
mcore = "cast.{L}"
hf = "model.{L}.cast"
[[rows]]
mcore = "norm.{L}"
hf = "model.{L}.norm"
add = 1
[[rows]] # each element by itself: no rectangles
mcore = "apart.{L}"
view = "r (half:2 f) -> r (f half)"
hf = "model.{L}.apart"
[[constants]]
hf = "model.inv_freq"
"""


@dataclass
class Shard:
    """As Megatron's ShardedTensor."""

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int = 0
    prepend_axis_num: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


class Model(torch.nn.Module):
    """What one rank holds: rows or columns of some tensors, all of others."""

    def __init__(self, whole: dict[str, torch.Tensor], rank: int, size: int) -> None:
        super().__init__()
        self.shards: list[tuple[str, str, tuple[int, ...], tuple[int, ...], int]] = []
        for name, tensor in whole.items():
            kind, layer = name.split(".")
            offset, replica = [0] * tensor.ndim, 0
            if kind in ("rows", "cast", "cols", "apart"):
                dim = 1 if kind == "cols" else 0
                cuts = [tensor.shape[dim] * at // size for at in range(size + 1)]
                if kind == "apart" and size > 1:
                    cuts[1] = 1  # which is few enough elements to be written one by one
                first, end = cuts[rank : rank + 2]
                offset[dim] = first
                tensor, total = tensor.narrow(dim, first, end - first), tensor.shape
            else:
                total = tensor.shape
                if kind == "own" and int(layer) % size != rank:
                    continue
                replica = rank if kind == "norm" else 0
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor.clone().contiguous()))
            self.shards.append((name, name.replace(".", "_"), tuple(total), tuple(offset), replica))

    def sharded_state_dict(self, metadata: dict[str, Any]) -> list[Shard]:
        return [
            Shard(key, getattr(self, name), total, offset, replica) for key, name, total, offset, replica in self.shards
        ]


class Fake:
    """A whole model, of `layers` layers and some bytes, its directory and its page."""

    def __init__(self, directory: Path, layers: int = 4, width: int = 64, apart: int = 1) -> None:
        make = torch.Generator().manual_seed(layers * width)
        self.whole: dict[str, torch.Tensor] = {}

        def bits(*shape: int) -> torch.Tensor:
            """Of any bits: also numbers that are none."""
            count = math.prod(shape)
            return torch.randint(-(2**31), 2**31, (count,), generator=make).int().view(torch.float32).view(shape)

        for layer in range(layers):
            self.whole[f"rows.{layer}"] = bits(width + layer, width)
            self.whole[f"cols.{layer}"] = bits(width, width + 3)
            self.whole[f"own.{layer}"] = bits(width, 2, 3)
            self.whole[f"cast.{layer}"] = torch.randn(
                width + 1, width - 1, generator=make
            )  # odd, of half as many bytes
            self.whole[f"norm.{layer}"] = torch.randn(width, generator=make)
        self.whole[f"cast.{layers}"] = torch.randn(3, 1, generator=make)  # what follows it is not aligned by itself
        for layer in range(apart):
            self.whole[f"apart.{layer}"] = bits(600, 512)
        self.directory, self.page = directory / "hf", directory / "fake.toml"
        self.directory.mkdir()
        self.page.write_text(PAGE)
        self.inv_freq = torch.arange(5.0)
        save_file(self.expected(), self.directory / "model.safetensors")
        (self.directory / "config.json").write_text(json.dumps({"architectures": ["FakeForCausalLM"]}))

    def expected(self, *changes: float) -> dict[str, torch.Tensor]:
        """The HF tensors, after change() of each of these."""
        out = {"model.inv_freq": self.inv_freq}
        for name, tensor in self.whole.items():
            kind, layer = name.split(".")
            for more in changes if kind in ("cast", "norm") else ():
                tensor = tensor + more
            if kind == "cast":
                tensor = tensor.bfloat16()
            elif kind == "norm":
                tensor = tensor + 1
            elif kind == "apart":
                tensor = torch.stack(tensor.chunk(2, dim=1), dim=-1).flatten(1)
            out[f"model.{layer}.{kind}"] = tensor.contiguous()
        return out

    def model(self, rank: int, size: int) -> Model:
        return Model(self.whole, rank, size)


def change(model: Model, more: float) -> None:
    """An optimizer's step, of what has numbers in it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("cast", "norm")):
                parameter += more


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
