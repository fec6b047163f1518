"""The trainer's side: ``WeightManager`` publishes a version of the weights after each optimizer step."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from . import _native
from ._arrays import Array, describe, is_torch_tensor
from ._native import Batch, Layout, OffloadReport, Sidecar, Version, Writer
from ._slices import is_dtensor, local_block, pieces
from .agent import AgentProcess
from .errors import InvalidArgument, NotFound
from .layouts import is_module, layout_of, module_tensors, named_tensors

_log = logging.getLogger("deltasync.trainer")

#: Of tensors that come from a generator, so many bytes at most are alive at a time, before they are written.
BUCKET_BYTES = 256 << 20
_BUCKET_TENSORS = 8192

_T = TypeVar("_T")


class WeightManager:
    """Publishes versions of a model's weights, and runs the agent that serves them.

    ``model`` says what is published: a torch module, a mapping or pairs of (name, tensor), a HF model directory, or a
    :class:`Layout` (see :func:`layout_of`). Names and shapes are the HuggingFace checkpoint's.

    ``dtype``: floating tensors are cast to it while they are offloaded (fp32 masters, bf16 rollouts).
    ``agent``: the Unix socket of an agent that runs already; without it one is started, watched and, at
    :meth:`close`, ended. ``name``, ``listen``, ``token_file``, ``shm_dir`` and ``agent_args`` are that agent's.
    ``process_group``: with torch.distributed, the processes of this node that fill each version together; rank 0 of it
    runs the agent. ``True`` takes the default group. Every method is then called by all of them.

    Not thread-safe: one thread calls it. After an error in :meth:`offload` the version before stays active, and the
    next offload may follow. A forked child makes a manager of its own.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: Any = None,
        files: Mapping[str, bytes] | None = None,
        tensor_parallel: int = 1,
        name: str = "deltasync",
        listen: str = "127.0.0.1:0",
        agent: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        shm_dir: str | os.PathLike[str] | None = None,
        agent_args: Iterable[str] = (),
        process_group: Any = None,
        threads: int = 0,
        timeout: float = 60.0,
    ) -> None:
        self.timeout = timeout
        self.layout: Layout
        self.sidecar: Sidecar
        self.layout, self.sidecar = layout_of(model, dtype=dtype, tensor_parallel=tensor_parallel, files=files)
        self._module = model if is_module(model) else None
        self._index = {tensor: i for i, tensor in enumerate(self.layout.names())}
        self._dtypes = [self.layout[i].dtype for i in range(len(self.layout))]
        self._shapes = [self.layout[i].shape for i in range(len(self.layout))]
        self._group = _Group(process_group)
        self._fixed: _FixedSources | None = None
        self._planned = False
        self._last: Version | None = None
        self.agent: AgentProcess | None = None

        def lead() -> tuple[str, str | None, int]:
            if agent is not None:
                return str(agent), None, _native.make_epoch()
            self.agent = AgentProcess(
                name, listen=listen, token_file=token_file, shm_dir=shm_dir, args=list(agent_args), timeout=timeout
            )
            return self.agent.socket, self.agent.endpoint, _native.make_epoch()

        try:
            self.socket, self._endpoint, self.epoch = self._group.from_leader(lead)
            self._writer: Writer = Writer.attach(
                self.layout,
                self.sidecar,
                self.socket,
                index=self._group.rank,
                writers=self._group.size,
                threads=threads,
                name=f"trainer-{os.getpid()}",
                timeout=timeout,
            )
        except BaseException:
            if self.agent is not None:
                self.agent.stop()
            raise

    @property
    def endpoint(self) -> str:
        """HOST:PORT for receivers. InvalidArgument if the agent was not started here."""
        if self._endpoint is None:
            raise InvalidArgument("this manager was given a running agent, and does not know where it listens")
        return self._endpoint

    @property
    def version(self) -> Version | None:
        """The last one that was offloaded here."""
        return self._last

    def offload(
        self,
        tensors: Any = None,
        version: int | Version | None = None,
        *,
        label: str = "",
        timeout: float | None = None,
    ) -> OffloadReport:
        """Publishes the tensors as the next version. Returns when their memory may change again.

        ``tensors``: a module, a mapping, or any iterable of (name, tensor) in any order, a generator included, of which
        at most ``BUCKET_BYTES`` are alive at a time; nothing: the module that the manager was made with. Tensors are of
        torch, numpy or anything with DLPack, on the host or on a CUDA device; of a DTensor each rank writes its part.
        Every tensor of the layout comes exactly once (tied ones under the layout's name; further names of the same are
        passed over if they are not in the layout and the same tensor was seen).
        ``version``: its number, which grows; by default one more than the last. ``label``: the user's name for it.

        Errors: CoverageError (a tensor is missing or came twice), NotFound (a name that is not in the layout),
        InvalidArgument (shape or dtype differ; the message names the tensor), VersionConflict, DeadlinePassed,
        Quarantined. After any of them, and after any exception of the iterable, the version before stays active.
        """
        if tensors is None:
            if self._module is None:
                raise InvalidArgument("offload: the manager was not made with a module, so say which tensors")
            tensors = self._module
        wanted = self._version(version, label)
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        source = _Source(tensors)
        if self._group.size > 1 and not self._planned:
            source = self._register_plan(source, end)
        self._writer.begin(wanted, _left(end))
        try:
            if not self._write_fixed(source, end):
                self._write_all(source, end)
            report = self._writer.commit(_left(end))
        except BaseException:
            self._writer.abort()
            self._fixed = None
            raise
        self._last = wanted
        return report

    def wait_ready(self, version: Version | None = None, *, timeout: float | None = None) -> None:
        """Waits until the agent serves it (its delta is encoded); by default the last one offloaded."""
        wanted = version or self._last
        if wanted is None:
            raise InvalidArgument("wait_ready: nothing has been offloaded")
        self._writer.wait_ready(wanted, self.timeout if timeout is None else timeout)

    def close(self) -> None:
        """Leaves the agent, and ends it if it was started here."""
        if hasattr(self, "_writer"):
            del self._writer
        self._fixed = None
        if self.agent is not None:
            self.agent.stop()

    def __enter__(self) -> WeightManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One version.

    def _version(self, version: int | Version | None, label: str) -> Version:
        if isinstance(version, Version):
            if label:
                raise InvalidArgument("offload: a Version has its own label")
            return version
        if version is None:
            version = self._last.number + 1 if self._last is not None else 1
        return Version(self.epoch, version, label)

    def _write_all(self, source: _Source, end: float) -> None:
        batch = Batch()
        alive: list[Any] = []
        held = 0
        ordered: list[tuple[int, Array]] | None = [] if source.again and self._group.size == 1 else None
        for name, tensor in source.items:
            index = self._index.get(name)
            if index is None:
                if source.is_alias(tensor):
                    continue
                raise NotFound(f"offload: the layout has no tensor '{name}'")
            arrays = self._add(batch, index, name, tensor)
            source.note(tensor)
            if ordered is not None:
                if len(arrays) == 1 and arrays[0].owner is tensor and arrays[0].shape == self._shapes[index]:
                    ordered.append((index, arrays[0]))
                else:
                    ordered = None
            for array in arrays:
                alive.append(array.owner)
                held += math.prod(array.shape) * self.layout[index].element_bytes
            if held >= BUCKET_BYTES or len(batch) >= _BUCKET_TENSORS:
                self._writer.write_batch(batch, not source.again, _left(end))
                if not source.again:
                    alive.clear()
                batch.clear()
                held = 0
        self._writer.write_batch(batch, not source.again, _left(end))
        self._fixed = _FixedSources.make(source, ordered) if ordered else None

    def _add(self, batch: Batch, index: int, name: str, tensor: Any) -> list[Array]:
        """Adds what this process writes of a tensor. The arrays are to be kept until it is written."""
        shape = self._shapes[index]
        if tuple(tensor.shape) != shape:
            raise InvalidArgument(f"{name}: its shape is {list(tensor.shape)}, the layout's {list(shape)}")
        offset, size = [0] * len(shape), list(shape)
        if is_dtensor(tensor):
            block = local_block(tensor, name)
            if block is None:
                return []
            tensor, offset, size = block
        elif self._group.rank != 0:
            return []  # every process has it; rank 0 writes it
        array = describe(tensor, name)
        if array.dtype != self._dtypes[index]:
            array = describe(_cast(tensor, name, array.dtype, self._dtypes[index]), name)
        step = array.row_stride or array.rows_cols[1] * self.layout[index].element_bytes
        for piece in pieces(shape, offset, size):
            batch.add(
                index,
                piece.row,
                piece.col,
                piece.rows,
                piece.cols,
                array.address + piece.local_row * step,
                array.row_stride,
                array.device,
                array.stream,
            )
        return [array]

    def _write_fixed(self, source: _Source, end: float) -> bool:
        """The same tensors as last time, at the same places or others: no look at each one's description."""
        if self._fixed is None or not self._fixed.fits(source):
            return False
        self._writer.write_batch(self._fixed.batch, False, _left(end))
        return True

    def _register_plan(self, source: _Source, end: float) -> _Source:
        """Tells the agent which parts this process writes, from the first version's tensors."""
        items = list(source.items)
        plan = Batch()
        for name, tensor in items:
            index = self._index.get(name)
            if index is not None:
                self._add_plan(plan, index, name, tensor)
        self._writer.register_plan(plan, _left(end))
        self._planned = True
        return _Source(items)

    def _add_plan(self, plan: Batch, index: int, name: str, tensor: Any) -> None:
        shape = self._shapes[index]
        offset, size = [0] * len(shape), list(shape)
        if is_dtensor(tensor):
            block = local_block(tensor, name)
            if block is None:
                return
            _, offset, size = block
        elif self._group.rank != 0:
            return
        for piece in pieces(shape, offset, size):
            plan.add(index, piece.row, piece.col, piece.rows, piece.cols, 0)


class _Source:
    """What offload() was given: pairs of name and tensor."""

    def __init__(self, tensors: Any) -> None:
        #: Whether the same tensors may come again as they are; those of a generator must not be held.
        self.again = is_module(tensors) or isinstance(tensors, (Mapping, list, tuple))
        pairs = module_tensors(tensors) if is_module(tensors) else named_tensors(tensors)
        self.items: Iterable[tuple[str, Any]] = list(pairs) if self.again else pairs
        self._seen: set[int] = set()

    def note(self, tensor: Any) -> None:
        if self.again and is_torch_tensor(tensor) and not is_dtensor(tensor):
            self._seen.add(tensor.data_ptr())

    def is_alias(self, tensor: Any) -> bool:
        """Whether it is one that came under another name."""
        return is_torch_tensor(tensor) and tensor.data_ptr() in self._seen


class _FixedSources:
    """Tensors that come again with every version, such as a module's parameters, described once."""

    def __init__(self, names: list[str], tensors: list[Any], shapes: list[Any], batch: Batch) -> None:
        self._names = names
        self._tensors = tensors
        self._shapes = shapes
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self.batch = batch

    @staticmethod
    def make(source: _Source, ordered: list[tuple[int, Array]]) -> _FixedSources | None:
        items = list(source.items)
        if len(items) != len(ordered) or not all(is_torch_tensor(tensor) for _, tensor in items):
            return None
        if any(array.device >= 0 for _, array in ordered):
            return None  # their streams may change from call to call
        batch = Batch()
        for index, array in ordered:
            rows, cols = array.rows_cols
            batch.add(index, 0, 0, rows, cols, array.address, array.row_stride)
        return _FixedSources(
            [name for name, _ in items], [t for _, t in items], [t.shape for _, t in items], batch
        )

    def fits(self, source: _Source) -> bool:
        """Whether these are the tensors, and where they were: the same objects, shapes, dtypes and addresses."""
        if not source.again:
            return False
        items = list(source.items)
        if len(items) != len(self._tensors):
            return False
        for (name, tensor), known_name, known, shape, dtype in zip(
            items, self._names, self._tensors, self._shapes, self._dtypes, strict=True
        ):
            if tensor is not known or name != known_name or tensor.shape != shape or tensor.dtype is not dtype:
                return False
        return [tensor.data_ptr() for tensor in self._tensors] == self._addresses


class _Group:
    """The processes that fill a version together: of torch.distributed, or this one alone."""

    def __init__(self, group: Any) -> None:
        self._group = None if group is None or group is True or group is False else group
        self.rank, self.size = 0, 1
        if group is None or group is False:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            raise InvalidArgument("process_group: torch.distributed is not initialized")
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        if self.rank < 0:
            raise InvalidArgument("process_group: this process is not in the group")

    def from_leader(self, make: Callable[[], _T]) -> _T:
        """What rank 0 makes, on all; an exception of rank 0's is raised everywhere."""
        if self.size == 1:
            return make()
        import torch.distributed as dist

        made: list[Any] = [None, None]
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                made[0] = make()
            except BaseException as error:
                failure = error
                made[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(made, group=self._group, group_src=0)
        if failure is not None:
            raise failure
        if made[1] is not None:
            raise InvalidArgument(f"rank 0 could not start: {made[1]}")
        result: _T = made[0]
        return result


def _cast(tensor: Any, name: str, have: str, want: str) -> Any:
    """A floating tensor in the layout's floating dtype. InvalidArgument for anything else."""
    from ._arrays import DTYPES, FLOATS

    if have not in FLOATS or want not in FLOATS:
        raise InvalidArgument(f"{name}: its dtype is {have}, the layout's {want}")
    wanted = next(text for text, known in DTYPES.items() if known == want)
    if is_torch_tensor(tensor):
        import torch

        return tensor.detach().to(getattr(torch, wanted))
    try:
        return tensor.astype(wanted)
    except TypeError as error:
        raise InvalidArgument(f"{name}: numpy cannot cast {have} to {want}: {error}") from error


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())
