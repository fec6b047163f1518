"""Whether what a plan exports is what the model directory has: before the first step all else is a wrong mapping."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from . import _checks, _native
from ._deadlines import seconds
from ._export_copies import Sources, bits, target_of
from ._export_guess import guess
from ._export_quantise import Scheme
from ._group import Group
from ._hf_files import HfFiles
from ._megatron_pieces import RankPieces
from ._native import Layout
from .errors import LayoutMismatch

#: Of a rank, that a proof tells the others.
_DIFFERENCES = 64
#: So many are named.
_UNPROVED = 8
#: Of a row of the page, that are explained; a guess may look at all other tensors.
_GUESSES = 2


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that would be exported otherwise than the directory has it.

    ``tensor``: its name in the checkpoint. ``row``: of the family's page, which made it.
    ``index``: of the first element that differs, in the tensor. ``exported``, ``expected``: its value here and there.
    ``elements``: how many differ, on all ranks. ``rank``: which has the first.
    ``guess``: what would explain it; empty if nothing does that was tried.
    """

    tensor: str
    row: str
    index: tuple[int, ...]
    exported: float
    expected: float
    elements: int
    rank: int
    guess: str

    def __str__(self) -> str:
        said = f"{self.tensor} (row {self.row}): element {list(self.index)} is {self.exported!r} on rank {self.rank}, "
        said += f"in the directory {self.expected!r}; {self.elements} differ"
        return f"{said}. Likely: {self.guess}" if self.guess else said


@dataclass(frozen=True, slots=True)
class ProofReport:
    """Of :func:`prove`, the same on all ranks. True if it is ``identical``.

    ``differs``: in the layout's order; 64 of each rank at most.
    ``elements``: that were compared on all ranks.
    ``dequantised``: of these, what is quantised when it is exported. Compared is what the trainer has, rounded to bf16,
    with the directory's codes times their scales: codes that are made of it may be others than these.
    ``unproved``: tensors, in the layout's order, whose elements are all alike, as of a LoRA's B at first: those of a
    wrong mapping would be as identical.
    """

    identical: bool
    differs: list[Difference]
    elements: int
    dequantised: int = 0
    unproved: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.identical

    def __str__(self) -> str:
        if self.identical:
            said = f"{self.elements} elements are those of the directory"
            said += f", {self.dequantised} of them dequantised" if self.dequantised else ""
            if self.unproved:
                said += f"; {len(self.unproved)} tensors prove nothing, since their elements are all alike: "
                said += ", ".join(self.unproved[:_UNPROVED])
            return said
        return f"{len(self.differs)} tensors are not those of the directory:\n" + "\n".join(map(str, self.differs))


class Plan(Protocol):
    """What is asked of a :class:`deltasync.megatron.ExportPlan`."""

    layout: Layout
    _group: Group
    _pieces: RankPieces
    _mine: list[Any]
    _quantised: dict[int, tuple[int, Scheme]]
    _head_dim: int

    def _schemes(self) -> dict[str, tuple[str, Scheme]]: ...


def prove(plan: Plan, hf_dir: str | os.PathLike[str], *, timeout: float = 600.0) -> ProofReport:
    """Whether what the ranks hold now, exported, is byte for byte what the directory has. Before the first step of a
    run that began from it, everything else is a wrong mapping. Of quantised tensors the directory's are dequantised
    for it, and nothing is quantised.

    Each rank compares what it would write itself. ``timeout``: in seconds, for all ranks. LayoutMismatch: ``hf_dir``
    has not the plan's tensors.
    """
    timeout = seconds("megatron.prove", timeout)
    end = time.monotonic() + timeout
    directory = plan._group.all_or_none(lambda: _checks.path("hf_dir", hf_dir), timeout)
    plan._pieces.bring_up_to_date()

    def compare() -> list[Any]:
        compared, dequantised, differences, alike = _compare(plan, _files_of(plan, directory))
        told = [asdict(difference) for difference in differences[:_DIFFERENCES]]
        return [compared, dequantised, told, [[*what, count] for what, count in alike.items()]]

    said = plan._group.gather_any(compare, max(end - time.monotonic(), 0.0))
    by_tensor: dict[str, Difference] = {}
    alike: Counter[tuple[int, int]] = Counter()
    for _, _, found, same in said:
        for tensor, value, count in same:
            alike[tensor, value] += count
        for one in found:
            difference = Difference(**{**one, "index": tuple(one["index"])})
            before = by_tensor.get(difference.tensor)
            by_tensor[difference.tensor] = difference if before is None else _joined(before, difference)
    order = {tensor.name: number for number, tensor in enumerate(plan.layout)}
    differs = sorted(by_tensor.values(), key=lambda difference: order[difference.tensor])
    compared, dequantised = (sum(one[i] for one in said) for i in range(2))
    elements = [math.prod(tensor.shape) for tensor in plan.layout]
    unproved = sorted(tensor for (tensor, _), count in alike.items() if count == elements[tensor] > 1)
    return ProofReport(not differs, differs, compared, dequantised, [plan.layout[tensor].name for tensor in unproved])


def _files_of(plan: Plan, directory: str) -> HfFiles:
    layout, sidecar = _native.read_hf_directory(directory, 1)
    for tensor in plan.layout:
        index = layout.find(tensor.name)
        if index is None or layout[index].spec != tensor.spec:
            raise LayoutMismatch(f"hf_dir='{directory}' does not have the plan's {tensor.name}")
    return HfFiles(directory, layout, sidecar, plan._schemes())


def _compare(plan: Plan, files: HfFiles) -> tuple[int, int, list[Difference], Counter[tuple[int, int]]]:
    """How many elements of this rank were compared, how many of them were dequantised, which tensors differ, and how
    many elements of a tensor come in copies of this value alone."""
    sources = Sources(plan._pieces.views())
    found: dict[int, Difference] = {}
    compared = dequantised = 0
    guessed: Counter[str] = Counter()
    alike: Counter[tuple[int, int]] = Counter()
    for copy in plan._mine:
        tensor = plan.layout[copy.tensor]
        theirs = target_of(copy, files.flat(tensor.name))
        made = sources.read(copy, theirs.dtype).cpu()
        compared += made.numel()
        dequantised += made.numel() if copy.tensor in plan._quantised else 0
        words = bits(made)
        if words.numel() and bool((words == (first := words.flatten()[0])).all()):
            alike[copy.tensor, int(first)] += words.numel()
        unequal = words != bits(theirs)
        count = int(unequal.sum())
        if not count:
            continue
        at = tuple(unequal.nonzero()[0].tolist())
        flat = copy.target_offset + sum(i * step for i, step in zip(at, copy.target_strides, strict=True))
        difference = Difference(
            tensor.name,
            copy.row,
            _index(flat, tensor.shape),
            made[at].item(),
            theirs[at].item(),
            count,
            plan._group.rank,
            guess(tensor.name, copy, made, files, plan._head_dim) if guessed[copy.row] < _GUESSES else "",
        )
        guessed[copy.row] += 1
        before = found.get(copy.tensor)
        found[copy.tensor] = difference if before is None else _joined(before, difference)
    return compared, dequantised, list(found.values()), alike


def _index(flat: int, shape: Iterable[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(list(shape)):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


def _joined(one: Difference, other: Difference) -> Difference:
    """Of the same tensor."""
    first, second = sorted((one, other), key=lambda difference: difference.index)
    said = asdict(first)
    return Difference(**{**said, "elements": one.elements + other.elements, "guess": first.guess or second.guess})
