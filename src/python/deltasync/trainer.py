"""The trainer's side: ``WeightManager`` publishes a version of the weights after each optimizer step."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

from . import _checks
from ._arrays import OWN_TENSORS, cast_to, check_tensor, describe, memory_shape, shares_memory, transposed
from ._checkpoints import check_checkpoint
from ._deadlines import end_of, left, seconds
from ._export_boxes import ExportedBox
from ._gathered import BUCKET_BYTES as GATHERED_BYTES
from ._gathering import Gathering
from ._group import Group
from ._made import Made
from ._megatron_manager import export_of
from ._modules import checkpoint_name, checkpoint_names, is_module
from ._native import Batch, Layout, PlainTensors, Sidecar, Version, Writer
from ._nodes import Nodes, NodesWriter, advertised
from ._reports import OffloadReport
from ._slices import LocalRect, ShardedView, is_dtensor, local_block, local_rects
from ._sources import TensorSource
from ._versions import version_label, version_number
from .agent import LISTEN, AgentProcess, check_none_given
from .errors import InvalidArgument, NotFound
from .hf import ignores_checkpoint_tensor
from .layouts import as_pair, layout_of
from .tls import TlsLike

#: So many bytes at most, of tensors that are cast or copied first, are alive at a time.
BUCKET_BYTES = 256 << 20
_ALONE = "give process_group=True on all ranks, which then call every method together"


class WeightManager:
    """Publishes versions of a model's weights, and runs the agent that serves them.

    ``model`` says what is published: a torch module, a mapping or pairs of (name, tensor), a HF model directory, or a
    :class:`Layout` (see :func:`layout_of`). Names and shapes are the HuggingFace checkpoint's: of a model of
    transformers those that ``save_pretrained`` writes (:func:`deltasync.hf.tensors`), of others their own, without what
    torch.compile and DDP put into names. A model on the meta device says it as well: what is offloaded needs memory.

    ``dtype``: in what the weights travel, if not in their own dtype (fp32 masters, bf16 rollouts). A dtype casts the
    tensors of the model's compute dtype, whichever of F64, F32, F16 and BF16 has most of its elements. What is in
    another one stays (an fp32 router's bias in a bf16 model), as do what the model's class keeps in fp32, quantised
    data and its scales. Patterns say it for each name (``{"*.gate.bias": None, "*": "bfloat16"}``; the first that
    matches counts), a function of name and dtype decides for all tensors. Each version's report says what was cast.
    ``hf``: a model directory whose tensors must be those that are published, by names, shapes and dtypes; checked
    before anything is started. LayoutMismatch names what differs on both sides.
    A model of Megatron (a GPTModel, or the list of its chunks) is published as ``hf`` has it, see
    :func:`deltasync.megatron.plan`, which takes ``tables`` and ``ignored``; its ``process_group`` is by default all
    processes. ``prove="first"``: the first offload is compared with the directory, and is an error if it is another
    (LayoutMismatch); "off" for a run that does not begin with what the directory has. ``export``, ``bucket_bytes``: its
    ``mode``, and what :func:`deltasync.megatron.export_hf_named_params` says of buckets.
    ``files`` (name: bytes, such as config.json) and ``weights_file`` say what a receiver's directory has.
    ``tensor_parallel``: of the engines: tensors are cut so that each of so many ranks gets whole tiles.
    ``agent``: the Unix socket of an agent that runs already; without it one is started, watched and, at
    :meth:`close`, ended. ``name``, ``listen``, ``token_file``, ``tls``, ``shm_dir`` and ``agent_args`` are that agent's
    (see :class:`AgentProcess`), so beside ``agent`` they are refused.
    ``process_group``: with torch.distributed, the processes that fill each version together. ``True`` takes the default
    group. Every method is then called by all of them, each time; see :meth:`offload`. The first rank of each node runs
    the agent of its node. ``advertise``: HOST or HOST:PORT where receivers reach the agent of this rank's node, if not
    where it listens. Without it, and if there are several nodes, this host's address on the way to ``MASTER_ADDR``.
    ``replicas``: a node also writes what it has of DTensors that another node writes, bit for bit the same; receivers
    then do without a node whose agent is away. Else a replica's first rank writes.
    ``threads``: that copy into shared memory, the caller among them; 0: 4, or as many as there are cores.
    ``timeout``: in seconds, of the start, and of each call without a ``timeout`` of its own.

    Errors: those of :class:`AgentProcess`; LayoutMismatch (``hf``, or a trainer with other tensors is attached),
    InvalidArgument and Unsupported (a tensor that cannot be published, which is named), NoSpace (shared memory),
    ConnectionFailed (no agent at ``agent``), PermissionDenied (one of another user), DeadlinePassed.

    Not thread-safe: one thread calls it. After an error in :meth:`offload` the version before stays active, and the
    next offload may follow. A forked child makes a manager of its own.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: Any = None,
        hf: str | os.PathLike[str] | None = None,
        tables: Iterable[str | os.PathLike[str]] = (),
        ignored: Iterable[str] = (),
        prove: str = "first",
        export: str = "auto",
        bucket_bytes: int = GATHERED_BYTES,
        files: Mapping[str, bytes] | None = None,
        weights_file: str = "model.safetensors",
        tensor_parallel: int = 1,
        name: str | None = None,
        listen: str = LISTEN,
        agent: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls: TlsLike = None,
        shm_dir: str | os.PathLike[str] | None = None,
        agent_args: Iterable[str] = (),
        process_group: Any = None,
        advertise: str | None = None,
        replicas: bool = False,
        threads: int = 0,
        timeout: float = 60.0,
    ) -> None:
        self.timeout = seconds("WeightManager", timeout)
        threads = _checks.whole("threads", threads)
        own: dict[str, Any] = {"name": name, "listen": listen, "token_file": token_file, "tls": tls, "shm_dir": shm_dir}
        if agent is not None:
            check_none_given(own, agent_args)
        #: Over several nodes with cuts where their parts end, from the first version on.
        self.layout: Layout
        self.sidecar: Sidecar
        self._export = export_of(
            model,
            hf,
            tables=tables,
            ignored=ignored,
            prove=prove,
            process_group=process_group,
            export=export,
            bucket_bytes=bucket_bytes,
            timeout=timeout,
        )
        if self._export is not None:
            if dtype is not None or files or tensor_parallel != 1:
                raise InvalidArgument("WeightManager: hf= says dtypes and files of a model of Megatron")
            self.layout, self.sidecar = self._export.plan.layout, self._export.plan.sidecar
            self._group = self._export.plan._group
        else:

            def described() -> tuple[Layout, Sidecar]:
                made = layout_of(
                    model, dtype=dtype, tensor_parallel=tensor_parallel, files=files, weights_file=weights_file
                )
                if hf is not None:
                    check_checkpoint(
                        made[0], _checks.path("hf", hf), lambda name: ignores_checkpoint_tensor(model, name)
                    )
                return made

            self._group = Group(process_group)
            self.layout, self.sidecar = self._group.all_or_none(described, timeout)
        self._module = model if is_module(model) else None
        self._index = {tensor: i for i, tensor in enumerate(self.layout.names())}
        self._dtypes = [self.layout[i].dtype for i in range(len(self.layout))]
        self._shapes = [memory_shape(tensor.shape, tensor.dtype) for tensor in self.layout]
        self._bytes = [self.layout[i].nbytes for i in range(len(self.layout))]
        self._offloading = False
        #: Of the version that is written, the tensors that ranks put together.
        self._gathering: Gathering | None = None
        #: Of the version that is written, what was cast: by name, from and to which dtype.
        self._cast: dict[str, tuple[str, str]] = {}
        #: Of the version that is written, what tensors were made here on their way.
        self._made = Made()
        #: Sources of copies that may be under way on a device: until the commit, or the begin after a failure.
        self._written: list[Batch] = []
        self._plain: PlainTensors | None = None
        self._plain_has_torch = False
        self._planned = False
        self._parts: list[tuple[int, int, int, int, int]] | None = None  # that all ranks' plans were accepted with
        self._last: Version | None = None
        self._asked = 0
        self.agent: AgentProcess | None = None
        self._nodes = Nodes(self._group, timeout)
        #: If replicas are written: the ranks of which one does it.
        self._near = self._nodes.global_ranks() if replicas and self._nodes.count > 1 else None
        self._writer: Writer | NodesWriter
        #: The writer, if the group spans several nodes.
        self._across: NodesWriter | None = None
        self.epoch = 0

        def start() -> tuple[str, str | None]:
            if agent is not None:
                return _checks.path("agent", agent), advertised(advertise, None, self._nodes.count)
            advertised(advertise, listen, self._nodes.count)  # before anything is started
            self.agent = AgentProcess(**own, args=agent_args, timeout=timeout)
            weakref.finalize(self, self.agent.stop)
            return self.agent.socket, advertised(advertise, self.agent.endpoint, self._nodes.count)

        def attach(layout: Layout, sidecar: Sidecar, timeout: float) -> Writer:
            return Writer.attach(
                layout,
                sidecar,
                self.socket,
                index=self._nodes.rank,
                writers=self._nodes.size,
                threads=threads,
                name=f"trainer-{os.getpid()}",
                timeout=timeout,
            )

        try:
            agents = self._nodes.from_firsts(start, timeout)
            self.socket: str = agents[self._nodes.mine][0]
            endpoints = [endpoint for _, endpoint in agents]
            self._endpoint: str | None = endpoints[self._nodes.mine]
            if self._nodes.count > 1:
                self._across = self._nodes.writer(
                    (self.layout, self.sidecar), list(map(str, endpoints)), attach, timeout
                )
                self._writer = self._across
            else:
                writer = self._group.all_or_none(lambda: attach(self.layout, self.sidecar, timeout), timeout)
                self._writer, self.epoch = writer, self._group.from_leader(writer.fresh_epoch, timeout)
        except BaseException:
            if self.agent is not None:
                self.agent.stop()
            raise

    @property
    def endpoint(self) -> str:
        """HOST:PORT for receivers, of this node's agent. One endpoint is enough for a receiver, best that of rank 0,
        which every node's agent knows. InvalidArgument if the agent was not started here."""
        if self._endpoint is None:
            raise InvalidArgument(
                "this manager was given a running agent, and does not know where it listens", "give advertise=HOST:PORT"
            )
        return self._endpoint

    @property
    def endpoints(self) -> list[str]:
        """Of the agents of all nodes; from the first version on, of those that hold a part. InvalidArgument."""
        return self._across.endpoints if self._across else [self.endpoint]

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

        ``tensors``: a module, a dict or list, or any other mapping or iterable of (name, tensor), a generator included,
        whose tensors are written one by one, so that the next may take the memory of the one before; a function that
        returns one of these; nothing: the module that the manager was made with. Tensors are of torch, numpy or
        anything with DLPack, on the host or on a CUDA device.
        Every tensor of the layout comes exactly once (tied ones under the layout's name; further names of the same are
        passed over if they are not in the layout and the same tensor was seen, in a module, dict or list).
        ``version``: its number, which grows; by default one more than the last. ``label``: the user's name for it, not
        the number of another.

        With a process group each rank writes its part of a DTensor, and rank 0 what has no parts. The ranks say which
        parts those are once, when the first version is offloaded, and again after an error, so give a function that
        makes the generator: one that gives its tensors once is refused then. An error on one rank is one on all, at
        once or at the deadline; the default number then counts calls, those that failed too.

        Errors: CoverageError (a tensor is missing or came twice), NotFound (a name that is not in the layout),
        InvalidArgument (shape or dtype differ; the message names the tensor), VersionConflict, DeadlinePassed (the
        message says what it waited for), Aborted (another rank failed), Quarantined, ConnectionFailed (the agent is
        away), NoSpace. After any of them, and after any exception of the iterable, the version before stays active.
        """
        if not hasattr(self, "_writer"):
            raise InvalidArgument("offload: this manager is closed")
        if self._offloading:
            raise InvalidArgument("offload: one is under way; its tensors, or a handler of a signal, ask for another")
        before, wanted = self._newest(), Version(0, 0)  # first: a writer that is in another call says so
        if self._across:
            self._across.begin_call(not self._planned)
        if self._export:
            self._export.begin_call()
        self._cast, self._made = {}, Made()
        source: TensorSource | None = None
        self._offloading = True  # last: a signal's exception before would leave it so
        try:
            wanted = self._version(version, label)
            about = f"version {version or wanted.number} {label!r}"
            end = end_of("offload", timeout, self.timeout)
            if self._export:
                self._export.come_together(tensors, about, end)
                self._gathering = self._export.gathering(end)
                tensors = self._export.plan.tensors()
            else:
                tensors = self._tensors_of(tensors)
            if self._across:
                self._across.require_same(about)
            source = TensorSource(tensors)
            if self._group.size > 1 and not self._planned:
                source, parts = self._rehearsed(source)
                self._register_plan(parts, end)
                wanted = wanted if isinstance(version, Version) else Version(self.epoch, wanted.number, label)
            self._writer.begin(wanted, left(end))
            self._written.clear()
            self._write_all(source, end)
            if self._gathering:
                self._write_gathered(self._gathering, wanted, end)
            report = OffloadReport.of(self._writer.commit(left(end)), self._cast, self._made, self._gathering)
            self._written.clear()
        except BaseException as error:
            self._tell_others(error)
            self._writer.abort()  # which may wait for a device
            # Else the parts may be what was wrong.
            self._planned = before != self._newest() == (wanted.epoch, wanted.number)
            if self._planned:
                self._last = wanted  # interrupted behind the commit
            if source is not None and self._group.size > 1:
                source.leave(error)
            raise
        finally:
            self._offloading = False
            self._gathering = None
        self._last = wanted
        return report

    def _newest(self) -> tuple[int, int]:
        return self._writer.newest_epoch, self._writer.newest_number

    def _tell_others(self, error: BaseException) -> None:
        """Ranks that wait for this one in this call."""
        if self._across:
            self._across.fail(error)
        if self._export:
            self._export.fail(error)
        if self._gathering:
            self._gathering.fail(error)

    def wait_ready(self, version: Version | None = None, *, timeout: float | None = None) -> None:
        """Waits until the agent serves ``version`` (its delta is encoded); by default the last one offloaded.
        DeadlinePassed, ConnectionFailed."""
        wanted = version or self._last
        if not hasattr(self, "_writer"):
            raise InvalidArgument("wait_ready: this manager is closed")
        if wanted is None:
            raise InvalidArgument("wait_ready: nothing has been offloaded")
        self._writer.wait_ready(wanted, left(end_of("wait_ready", timeout, self.timeout)))

    def close(self) -> None:
        """Leaves the agent, and ends it if it was started here; so does a manager that is dropped."""
        if self._offloading:
            raise InvalidArgument("close: an offload is under way")
        if hasattr(self, "_writer"):
            self._writer.abort()  # which may wait for a device; without the GIL, other than a destructor
            del self._writer
            self._across = None
        if self.agent is not None:
            self.agent.stop()

    def __enter__(self) -> WeightManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One version.

    def _tensors_of(self, tensors: Any) -> Any:
        if tensors is None and self._module is None:
            raise InvalidArgument("offload: the manager was not made with a module, so say which tensors")
        if isinstance(tensors, int):
            raise InvalidArgument(f"offload: tensors={tensors} is a number; a version's is given as version={tensors}")
        return self._module if tensors is None else tensors

    def _version(self, version: int | Version | None, label: str) -> Version:
        if isinstance(version, Version):
            self._asked = version.number
            if label:
                raise InvalidArgument("offload: label= with a Version, which has its own; give one of them")
            version_label("offload", version.number, version.label)
            return version
        if version is None:
            # In a group, ranks that failed at different times must not meet in one fill with tensors of two calls.
            last = self._writer.newest_number if self._writer.newest_epoch == self.epoch else 0
            version = (self._asked if self._group.size > 1 else last) + 1
        self._asked = number = version_number("offload", version)
        return Version(self.epoch, number, version_label("offload", number, label))  # last: calls that fail count

    def _write_all(self, source: TensorSource, end: float) -> None:
        batch = Batch()
        wait = not source.stay  # else the sources of copies that are under way on a device stay as they are
        for item in self._odd(source, batch):
            name, tensor = as_pair(item, "offload: tensors")
            index = self._index_of(name)
            if index is None:
                if source.is_alias(tensor):
                    continue
                raise NotFound(f"offload: the layout has no tensor '{name}'", OWN_TENSORS)
            if self._add(batch, index, name, tensor):
                wait = True
            source.note(tensor)
            # A generator may make its next tensor in the memory of this one.
            if not source.stay or self._made.alive >= BUCKET_BYTES:
                self._writer.write_batch(batch, wait, left(end))
                batch.clear()
                self._made.drop()
                wait = not source.stay
        if not wait:
            self._written.append(batch)
        self._writer.write_batch(batch, wait, left(end))
        self._made.drop()

    def _write_gathered(self, gathering: Gathering, version: Version, end: float) -> None:
        """The tensors that are put together here, one by one; all ranks take part."""
        assert self._export is not None
        gathering.version = version
        tensors = gathering.tensors()  # an exception keeps it, so that the others hear of that, and not of its end
        for index, tensor in tensors:
            if tensor.numel():
                batch = Batch()
                self._add(batch, index, self.layout[index].name, self._export.box(index, tensor))
                self._writer.write_batch(batch, True, left(end))

    def _index_of(self, name: str) -> int | None:
        """Of the tensor that this name means: also with what torch.compile or DDP put into it, which is remembered."""
        index = self._index.get(name)
        if index is None and isinstance(name, str):
            for other in (checkpoint_name(name), *checkpoint_names([name])):
                if (index := self._index.get(other)) is not None:
                    self._index[name] = index
                    break
        return index

    def _odd(self, source: TensorSource, batch: Batch) -> Iterable[tuple[str, Any]]:
        """The pairs that are to be looked at; of the others, those that stay are added to the batch, the rest is
        written."""
        if self._group.size > 1:
            return source.items
        plain = self._plain_tensors()
        if not source.stay:
            return cast(Writer, self._writer).write_plain(plain, source.items)
        odd = plain.into(batch, source.items)
        source.also_seen = odd.saw
        return odd

    def _plain_tensors(self) -> PlainTensors:
        torch = sys.modules.get("torch")
        if self._plain is None or (torch is not None and not self._plain_has_torch):
            types = () if torch is None else (torch.Tensor, torch.nn.Parameter)
            exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if torch is not None else None
            self._plain = PlainTensors(self.layout, self._index, types, exchange)
            self._plain_has_torch = torch is not None
        return self._plain

    def _part(self, index: int, name: str, tensor: Any) -> tuple[Any, list[LocalRect]] | None:
        """What this process writes of a tensor: memory, and which rectangles that is; None if nothing."""
        shape = self._shapes[index]
        check_tensor(tensor, name)
        if tuple(tensor.shape) != shape:
            raise InvalidArgument(f"{name}: its shape is {list(tensor.shape)}, the layout's {list(shape)}", OWN_TENSORS)
        if isinstance(tensor, ExportedBox):
            return tensor, [tensor.rect]
        block: tuple[Any, list[int], list[int]] | None
        if is_dtensor(tensor) or isinstance(tensor, ShardedView):
            whole = is_dtensor(tensor)
            block = local_block(tensor, name, self._near) if whole else tensor.block(name, self._near)
            if self._group.size == 1 and 0 not in shape and (block is None or tuple(block[2]) != shape):
                raise InvalidArgument(f"{name}: other ranks have parts of it, or write it", _ALONE)
        elif self._group.rank != 0:
            return None  # every process has it; rank 0 writes it
        else:
            block = tensor, [0] * len(shape), list(shape)
        return None if block is None else (block[0], local_rects(shape, block[1], block[2]))

    def _add(self, batch: Batch, index: int, name: str, tensor: Any) -> bool:
        """Adds what this process writes of a tensor. Whether that is a copy made here. The batch keeps it alive."""
        part = self._part(index, name, tensor)
        if part is None:
            return False
        own, rects = part
        began = time.monotonic()
        memory = own.memory() if isinstance(own, ExportedBox) else own
        array = transposed(memory, name) or describe(memory, name)
        if array.dtype != self._dtypes[index]:
            self._cast[name] = (array.dtype, self._dtypes[index])
            made = cast_to(memory, name, array.dtype, self._dtypes[index])
            array = transposed(made, name) or describe(made, name)
        own_memory = own.piece if isinstance(own, ExportedBox) else memory
        is_copy = not shares_memory(array, own_memory)
        if is_copy:
            self._made.note(own_memory, memory, array.owner, time.monotonic() - began)
        step = array.row_stride or array.rows_cols[1] * self.layout[index].element_bytes
        for rect in rects:
            place = index, rect.row, rect.col
            if self._across:
                place = self._across.place(*place, rect.rows, rect.cols)
            batch.add(
                *place,
                rect.rows,
                rect.cols,
                array.address + rect.local_row * step,
                array.row_stride,
                array.device,
                array.stream,
                array.owner,
                array.col_stride,
            )
        return is_copy

    def _rehearsed(self, source: TensorSource) -> tuple[TensorSource, list[tuple[int, int, int, int, int]]]:
        """The source, which has its tensors again, and which parts this process writes."""
        parts: list[tuple[int, int, int, int, int]] = []

        def add(name: str, tensor: Any) -> None:
            index = self._index_of(name)
            part = self._part(index, name, tensor) if index is not None else None
            if index is not None and part is not None:
                parts.extend((index, rect.row, rect.col, rect.rows, rect.cols) for rect in part[1])

        source = source.rehearsed(add)
        for index, rect in self._export.gathered_here() if self._export else ():
            parts.append((index, rect.row, rect.col, rect.rows, rect.cols))
        return source, parts

    def _register_plan(self, parts: list[tuple[int, int, int, int, int]], end: float) -> None:
        """Tells the agent which parts this process writes, if they are not those that were agreed on."""
        if self._across:
            self._across.plan(parts, end)
            self.layout, self.epoch = self._across.layout, self._across.epoch
        elif parts != self._parts:
            self._parts = None
            plan = Batch()
            for part in parts:
                plan.add(*part, 0)
            cast(Writer, self._writer).register_plan(plan, left(end))
            self._parts = parts
        self._planned = True
