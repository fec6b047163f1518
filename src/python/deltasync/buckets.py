"""A trainer beside its engine: tensors go through two shared buckets, without an agent and its double buffer."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Any

from . import _checks, _native
from ._arrays import OWN_TENSORS, cast_to, check_tensor, describe, is_torch_tensor, memory_shape
from ._deadlines import end_of, left, seconds
from ._modules import checkpoint_name
from ._native import Version, make_epoch
from ._slices import is_dtensor
from ._sources import TensorSource
from ._versions import version_label, version_number
from .errors import CoverageError, InvalidArgument, NotFound
from .layouts import as_pair, layout_of

_LOWEST_ADDRESS = 4096  # nothing is mapped below


class BucketSender:
    """Hands each version's tensors to an engine on this host, whose ``Receiver("bucket:PATH")`` listens there.

    ``path``: of the engine's Unix socket, which is waited for. ``model``: what is sent, as :func:`layout_of` takes it;
    tensors of a float dtype other than its are cast. ``dtype``: as of :class:`WeightManager`.
    Of two buckets of ``bucket_bytes`` one is filled while the engine copies the other; a tensor that is larger goes in
    several.
    ``rank``, ``ranks``: of the processes that send to this engine, each with its ``tensors`` (names; by default all).
    Together they send every tensor once. They share one ``epoch``: rank 0's :attr:`epoch`, which it gives the others.
    ``name``: for the engine's log. ``timeout``: in seconds, of the start, and of each call without one of its own.

    One thread at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Any,
        *,
        dtype: Any = None,
        rank: int = 0,
        ranks: int = 1,
        tensors: Iterable[str] | None = None,
        epoch: int | None = None,
        bucket_bytes: int = 256 << 20,
        name: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.timeout = seconds("BucketSender", timeout)
        self.layout, sidecar = layout_of(model, dtype=dtype)
        if epoch is None and rank != 0:
            raise InvalidArgument("BucketSender: several ranks without epoch=", "give them that of rank 0's sender")
        self._epoch = None if epoch is None else _checks.whole("epoch", epoch, 1, 2**64 - 1)
        self._index = {tensor.name: index for index, tensor in enumerate(self.layout)}
        self._mine = set(range(len(self.layout))) if tensors is None else {self._index_of(name) for name in tensors}
        if not self._mine:
            raise CoverageError("BucketSender: tensors= names none, so this rank has nothing to send")
        self._number = 0
        self._native: _native.BucketSender | None = _native.BucketSender.open(
            self.layout,
            sidecar,
            _checks.path("path", path).removeprefix("bucket:"),
            _checks.whole("rank", rank),
            _checks.whole("ranks", ranks, 1),
            sorted(self._mine),
            _checks.whole("bucket_bytes", bucket_bytes, 1, 2**40),
            _checks.text("name", name or f"trainer {os.getpid()}"),
            self.timeout,
        )

    @property
    def epoch(self) -> int:
        """Of its versions. Unless it was given it comes after that of the engine's version, which is asked for once:
        at the first :meth:`send`, or here, until ``timeout``. The engine answers when it wants a version."""
        return self._epoch_until(end_of("epoch", None, self.timeout))

    def send(
        self, tensors: Any, version: int | Version | None = None, *, label: str = "", timeout: float | None = None
    ) -> Version:
        """Returns when the engine has everything, verified; it commits it by itself.

        ``tensors``: a module, a mapping, or an iterable of (name, tensor), a generator included (such as
        :func:`deltasync.megatron.export_hf_named_params`), each taken before the next is asked for. Further names of
        one tensor (tied weights) that the layout does not have are passed over.
        ``version``: its number, by default one more than the last. ``label``: the user's name for it.

        Errors: NotFound (a name that is not in the layout), CoverageError (what is missing is named), InvalidArgument
        (shape or dtype), ConnectionFailed (the engine is gone), DeadlinePassed, what the engine says. After any of
        them, and any exception of the iterable, the engine has the version before, or with
        ``full_update_policy="in_place"`` none; the next ``send`` connects again. Only where the last answer was lost
        (ConnectionFailed or DeadlinePassed after the last tensor) it may have this one: its own ``version`` tells.
        """
        native = self._opened("send")
        self._number = self._number_of(version)  # first: calls that fail count, so that ranks mean one version again
        if isinstance(version, Version) and label:
            raise InvalidArgument("send: label= with a Version, which has its own; give one of them")
        end = end_of("send", timeout, self.timeout)
        source = TensorSource(tensors)
        if isinstance(version, Version):
            wanted = version
            version_label("send", version.number, version.label)
        else:
            wanted = Version(self._epoch_until(end), self._number, version_label("send", self._number, label))
        native.begin(wanted, left(end))
        try:
            for item in source.items:
                self._put(native, source, *as_pair(item, "send: tensors"), end)
            native.finish(left(end))
        except BaseException as error:
            native.abort(f"{type(error).__name__}: {error}")
            close = getattr(source.items, "close", None)
            if close is not None:  # a generator that ranks share tells the others
                close()
            raise
        return wanted

    def close(self) -> None:
        """Frees the buckets. The engine keeps what it has."""
        self._native = None

    def __enter__(self) -> BucketSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _number_of(self, version: int | Version | None) -> int:
        if isinstance(version, Version):
            return version.number
        return self._number + 1 if version is None else version_number("send", version)

    def _epoch_until(self, end: float) -> int:
        if self._epoch is None:
            self._epoch = make_epoch(self._opened("epoch").epoch_held(left(end)))
        return self._epoch

    def _opened(self, call: str) -> _native.BucketSender:
        if self._native is None:
            raise InvalidArgument(f"{call}: this sender is closed")
        return self._native

    def _index_of(self, name: str) -> int:
        index = self._index.get(name)
        if index is None:
            index = self._index.get(checkpoint_name(_checks.text("tensors: name", name)))
        if index is None:
            raise NotFound(f"the layout has no tensor '{name}'", OWN_TENSORS)
        return index

    def _put(self, native: _native.BucketSender, source: TensorSource, name: str, tensor: Any, end: float) -> None:
        try:
            index = self._index_of(name)
        except NotFound:
            if source.is_alias(tensor):
                return
            raise
        if index not in self._mine:
            source.note(tensor)
            return
        own = self.layout[index]
        check_tensor(tensor, name)
        if is_dtensor(tensor):
            raise InvalidArgument(f"{name}: a DTensor is a part of a tensor", "send tensor.full_tensor()")
        if tuple(tensor.shape) != tuple(memory_shape(own.shape, own.dtype)):
            raise InvalidArgument(
                f"{name}: its shape is {list(tensor.shape)}, the layout's {list(own.shape)}", OWN_TENSORS
            )
        array = describe(tensor, name)
        if array.dtype != own.dtype:
            array = describe(cast_to(tensor, name, array.dtype, own.dtype), name)
        if array.row_stride:
            array = describe(_dense(array.owner), name)
        if array.address < _LOWEST_ADDRESS and own.nbytes:
            raise InvalidArgument(f"{name}: the source has no memory (address {array.address})")
        if array.device < 0:
            native.put(index, array.address, left(end))
        else:
            _copy_from_device(native, index, array.owner, end)
        source.note(tensor)


def _dense(owner: Any) -> Any:
    return owner.contiguous() if is_torch_tensor(owner) else owner.copy()


def _copy_from_device(native: _native.BucketSender, index: int, tensor: Any, end: float) -> None:
    """Straight into the bucket. A copy to memory that is not pinned has ended when it returns."""
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    while True:
        address, nbytes, first, whole = native.room(index, left(end))
        if nbytes:
            room = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
            room.copy_(flat[first : first + nbytes])
        if whole:
            return
