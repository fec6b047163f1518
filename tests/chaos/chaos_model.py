"""The model of the chaos runs in Python: the same closed form as chaos_model.hpp, written a second time, so that what a
directory holds is compared with nothing that the project's code has made."""

from __future__ import annotations

import json
import struct
from functools import lru_cache
from typing import BinaryIO, NamedTuple

import numpy as np

VARIANTS = 8
SMALL_VARIANT = VARIANTS - 1
PERIOD = 100

U64 = np.uint64


class Spec(NamedTuple):
    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}[self.dtype]

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape))


class Wrong(NamedTuple):
    tensor: int
    element: int
    found: int
    expected: int


def specs(variant: int) -> list[Spec]:
    part = 16 if variant == SMALL_VARIANT else 1
    found = [Spec("model.embed_tokens.weight", "BF16", ((1024 + 96 * variant) // part, 256))]
    for layer in range(4):
        found.append(Spec(f"model.layers.{layer}.mlp.up_proj.weight", "BF16", (512 // part, 300)))
        found.append(Spec(f"model.layers.{layer}.input_layernorm.weight", "F32", (300,)))
    found.append(Spec("model.gate.weight", "F32", (704 // part, 128)))
    found.append(Spec("model.codes", "U8", (336 // part, 257)))
    found.append(Spec("lm_head.weight", "F8_E4M3", (256 // part, 256)))
    return found


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer over an array of u64."""
    x = x + U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


@lru_cache(maxsize=256)
def _names(tensor: int, elements: int) -> tuple[np.ndarray, np.ndarray]:
    names = (U64(tensor) << U64(40)) | np.arange(elements, dtype=U64)
    return names, mix(names) % U64(PERIOD)


def tensor_bits(tensor: int, elements: int, number: int) -> np.ndarray:
    """All elements of a tensor, as u64; their low bytes are the element."""
    names, phase = _names(tensor, elements)
    step, variant = divmod(number, VARIANTS)
    ages = (U64(step) + phase) // U64(PERIOD)
    first = int(ages.min()) if elements else 0
    salts = mix(np.array([(first + k) * VARIANTS + variant for k in range(2)], dtype=U64))
    return mix(names ^ salts[(ages - U64(first)).astype(np.intp)])


def wrong_in(file: BinaryIO, number: int, most: int = 8) -> tuple[int, list[Wrong]]:
    """Compares one model.safetensors with what the version must be: how many elements are wrong, and the first few.
    ValueError if it is no such file."""
    (header_bytes,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    begin = 8 + header_bytes
    count, found = 0, []
    wanted = specs(number % VARIANTS)
    if {spec.name for spec in wanted} != set(header):
        raise ValueError(f"other tensors: {sorted(header)[:4]} …")
    for index, spec in enumerate(wanted):
        entry = header[spec.name]
        if entry["dtype"] != spec.dtype or tuple(entry["shape"]) != spec.shape:
            raise ValueError(f"{spec.name} is {entry['dtype']} {entry['shape']}")
        first, end = entry["data_offsets"]
        if end - first != spec.elements * spec.width:
            raise ValueError(f"{spec.name} has {end - first} bytes")
        file.seek(begin + first)
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[spec.width]
        has = np.frombuffer(file.read(end - first), kind)
        must = tensor_bits(index, spec.elements, number).astype(kind)
        bad = np.nonzero(has != must)[0]
        count += len(bad)
        found += [Wrong(index, int(e), int(has[e]), int(must[e])) for e in bad[: most - len(found)]]
    return count, found
