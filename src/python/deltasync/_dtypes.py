"""What ``dtype=`` casts: which tensors of a model are weights that are computed with, and in which dtype they travel.

Data that is quantised already, and its scales, are what they are: cast, they would be other numbers.
"""

from __future__ import annotations

import collections
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ._arrays import COMPUTED, QUANTISED, dtype_name
from ._native import TensorSpec
from .errors import InvalidArgument

#: The names of what quantised data is multiplied by, or shifted.
_SCALE = re.compile(r"scale|zero|absmax|amax|quant", re.IGNORECASE)

#: (name, safetensors' dtype) of a tensor: the dtype in which it travels, None for its own.
Choice = Callable[[str, str], Any]


def cast_specs(specs: Iterable[TensorSpec], dtype: Any, stay: Callable[[str, str], bool]) -> list[TensorSpec]:
    """The specs with the dtypes in which they travel.

    ``dtype``: None (each its own); a dtype, for the tensors of the model's compute dtype, which is the one of F64, F32,
    F16 and BF16 that has most of its elements; a mapping of patterns (``*.bias``, as fnmatch has them; the first that
    matches counts) to dtypes or None, for all tensors of these four; or a function of name and dtype that returns one
    of these, for all tensors. Patterns and the plain dtype leave quantised data and its scales as they are; the plain
    one also leaves what ``stay(name, dtype)`` says. InvalidArgument: none of these, or a cast from or to another dtype
    than these four.
    """
    specs = list(specs)
    if dtype is None:
        return specs
    choose = _choice(specs, dtype, stay)
    return [_cast(spec, choose(spec.name, spec.dtype)) for spec in specs]


def _choice(specs: list[TensorSpec], dtype: Any, stay: Callable[[str, str], bool]) -> Choice:
    if callable(dtype) and not isinstance(dtype, type):
        return dtype  # type: ignore[no-any-return]
    scales = _scales(specs)
    if isinstance(dtype, Mapping):
        rules = [(str(pattern), None if wanted is None else _target(wanted)) for pattern, wanted in dtype.items()]
        _require_each([pattern for pattern, _ in rules], [spec.name for spec in specs])

        def by_pattern(name: str, own: str) -> str | None:
            if own not in COMPUTED or name in scales:
                return None
            return next((wanted for pattern, wanted in rules if fnmatch.fnmatchcase(name, pattern)), None)

        return by_pattern
    wanted = _target(dtype)
    computed = _compute_dtype(spec for spec in specs if spec.name not in scales)
    return lambda name, own: wanted if own == computed and name not in scales and not stay(name, wanted) else None


def _require_each(patterns: list[str], names: list[str]) -> None:
    """InvalidArgument names a pattern that decides nothing: what it was meant for would be cast as the others are."""
    left = names
    for pattern in patterns:
        rest = [name for name in left if not fnmatch.fnmatchcase(name, pattern)]
        if len(rest) < len(left):
            left = rest
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            if pattern == "*":  # what is left, which may be nothing
                continue
            raise InvalidArgument(f"dtype: patterns before '{pattern}' match all that it does", "put it before them")
        raise InvalidArgument(
            f"dtype: no tensor has a name as '{pattern}'", f"names are such as {', '.join(names[:3])}; `*` is any text"
        )


def _target(dtype: Any, what: str = "dtype") -> str:
    wanted = dtype_name(dtype, what)
    if wanted not in COMPUTED:
        raise InvalidArgument(
            f"{what}: a cast to {wanted} would be a quantisation", "quantise in what you give to offload(), with scales"
        )
    return wanted


def _scales(specs: list[TensorSpec]) -> set[str]:
    """Names of the floating tensors that stand in one module with quantised data, and are called as scales are."""
    modules = {spec.name.rpartition(".")[0] for spec in specs if spec.dtype in QUANTISED}
    found: set[str] = set()
    for spec in specs:
        module, _, last = spec.name.rpartition(".")
        if module in modules and spec.dtype in COMPUTED and _SCALE.search(last):
            found.add(spec.name)
    return found


def _compute_dtype(specs: Iterable[TensorSpec]) -> str | None:
    elements: collections.Counter[str] = collections.Counter()
    for spec in specs:
        if spec.dtype in COMPUTED:
            elements[spec.dtype] += math.prod(spec.shape)
    return max(elements, key=lambda dtype: elements[dtype], default=None)


def _cast(spec: TensorSpec, wanted: Any) -> TensorSpec:
    if wanted is None or dtype_name(wanted, spec.name) == spec.dtype:
        return spec
    if spec.dtype not in COMPUTED:
        raise InvalidArgument(f"{spec.name}: dtype= would cast {spec.dtype}, which is no number by itself")
    return TensorSpec(spec.name, _target(wanted, spec.name), list(spec.shape), spec.row_cuts, spec.col_cuts)
