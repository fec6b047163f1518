"""The tensors of an export plan, put together: for all ranks, or for those that write them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from . import _checks
from ._carriers import Elements, ToAll, ToHome
from ._deadlines import seconds
from ._gather_plan import Bucket, Form, Whole, for_all, for_homes, wholes_of
from ._gathering import BUCKETS_ALIVE, Gathering
from ._group import Group
from ._megatron_pieces import RankPieces
from ._native import Layout
from .errors import InvalidArgument

BUCKET_BYTES = 512 << 20


class Plan(Protocol):
    """What is asked of a :class:`deltasync.megatron.ExportPlan`."""

    layout: Layout
    digest: str
    _made: Any
    _forms: dict[int, Form]
    _pieces: RankPieces
    _group: Group

    def _constant(self, index: int) -> Any: ...


class NamedParams:
    """Of :func:`export_hf_named_params`: an iterator of (name, tensor)."""

    def __init__(self, names: list[str], gathering: Gathering) -> None:
        self._names, self._gathering = names, gathering
        self._tensors = gathering.tensors()

    @property
    def gather_s(self) -> float:
        """Seconds that this rank has waited for others' elements."""
        return self._gathering.gather_s

    @property
    def convert_s(self) -> float:
        """Seconds that it has packed elements and put tensors together."""
        return self._gathering.convert_s

    @property
    def temporary_bytes_max(self) -> int:
        """Bytes of all buckets and tensors that were alive here at a time, at most. What the caller keeps beside the
        newest tensor is not in it."""
        return self._gathering.temporary_bytes_max

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self

    def __next__(self) -> tuple[str, Any]:
        index, tensor = next(self._tensors)
        return self._names[index], tensor

    def close(self) -> None:
        """Takes no more. Before the end that is an error (Aborted) on the other ranks."""
        self._gathering.stop()
        self._tensors.close()

    def fail(self, error: BaseException) -> None:
        """Takes no more. Before the end the other ranks get this error."""
        self._gathering.fail(error)
        self._tensors.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the process group may be gone
            self.close()


def export_hf_named_params(plan: Plan, *, bucket_bytes: int = BUCKET_BYTES, timeout: float = 600.0) -> NamedParams:
    """(HF name, whole tensor) of everything that the plan exports, in the layout's order, on all ranks. They all call
    it, and take all tensors.

    Tensors travel in buckets: the next one while the tensors of this one are taken. The two need ``bucket_bytes`` each
    at most; a tensor that needs more travels alone. A tensor is on the device that the process group sends from.
    ``timeout``: for each wait for other ranks. What fails on one rank, or a rank that takes no more, is an error on all
    of them; when a wait ends without them (DeadlinePassed), the plan is of no more use.
    """
    timeout = seconds("megatron.export_hf_named_params", timeout)
    group = plan._group
    said = group.gather(lambda: [plan.digest, bucket_size(bucket_bytes)], timeout)  # what it raises is raised by all
    require_same(said)
    plan._pieces.bring_up_to_date()
    layout = plan.layout
    wholes = wholes_of(layout, plan._made.copies, plan._made.constants, plan._forms)
    gathering = _gathering(plan, wholes, bucket_bytes, to_all=True, left=lambda: timeout)
    return NamedParams(layout.names(), gathering)


def bucket_size(nbytes: Any) -> int:
    return _checks.whole("bucket_bytes", nbytes, 1, 1 << 48)


def require_same(said: list[Any]) -> None:
    for rank, other in enumerate(said):
        if other != said[0]:
            raise InvalidArgument(f"megatron: rank {rank} has another plan, export= or bucket_bytes= than rank 0")


def for_writing(plan: Plan, wholes: list[Whole], bucket_bytes: int, left: Callable[[], float]) -> Gathering:
    """Of these tensors, each on the rank where it is at home."""
    return _gathering(plan, wholes, bucket_bytes, to_all=False, left=left)


def _gathering(
    plan: Plan, wholes: list[Whole], bucket_bytes: int, *, to_all: bool, left: Callable[[], float]
) -> Gathering:
    group = plan._group
    if group.size == 1:
        to_all = False
    device: list[Any] = [group.device if group.size > 1 else "cpu"]

    def elements() -> Elements:
        views = plan._pieces.views()
        if group.size == 1 and views:
            device[0] = views[0].device
        return Elements(views, plan._constant)

    def carrier(bucket: Bucket) -> ToAll | ToHome:
        return (ToAll if to_all else ToHome)(group, bucket.wholes, device[0])

    buckets = for_all(wholes, bucket_bytes) if to_all else for_homes(wholes, bucket_bytes, group.rank)
    return Gathering(group, buckets, carrier, elements, BUCKETS_ALIVE * bucket_bytes, left)
