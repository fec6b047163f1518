"""The processes that fill a version together: those of a torch.distributed group, or this one alone."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from .errors import Aborted, DeadlinePassed, Error, InvalidArgument, from_code

#: What one process tells the others, padded with blanks. Messages of errors are cut to fit.
_MESSAGE_BYTES = 4096
_ERROR_CHARACTERS = 600
#: A wait of torch may end so much before its time.
_EARLY_S = 0.01
_REMEDY = "start the ranks again"

_T = TypeVar("_T")


class Group:
    """Rank and size, and what has to be agreed when a manager is made. Versions are agreed on in shared memory
    (over several nodes: :class:`Agreement`).

    ``group``: None or False (one process), True (the default group), or a ProcessGroup. What its processes tell each
    other is plain JSON. InvalidArgument if torch.distributed is not initialized or this process is not in the group.
    A wait that ends in vain leaves the ranks out of step, so every call after it is refused (Aborted).
    """

    def __init__(self, group: Any) -> None:
        self._group = None if isinstance(group, bool) else group
        self.rank, self.size = 0, 1
        self.out_of_step = False
        #: Ends what is under way: the next call does, if nobody has.
        self.stop: Callable[[], None] | None = None
        if group is None or group is False:
            return
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument("process_group: torch.distributed is not initialized")
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        if self.rank < 0:
            raise InvalidArgument("process_group: this process is not in the group")

    def own(self) -> Group:
        """One of the same processes, that nothing else uses: else what the trainer sends while one rank is in an export
        would pair with what that sends. All call it. Some of all processes cannot make one: theirs stays."""
        import torch.distributed as dist

        if self.size == 1 or self.size < dist.get_world_size():
            return self
        return Group(dist.new_group(backend=dist.get_backend(self._group)))

    def begin_call(self) -> None:
        """Ends what is under way. Aborted if the ranks are out of step."""
        if self.stop is not None:
            self.stop()
        self._require_in_step()

    def global_rank(self, rank: int) -> int:
        """Of all processes, not only the group's."""
        import torch.distributed as dist

        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def from_leader(self, make: Callable[[], Any], timeout: float) -> Any:
        """What rank 0 makes (JSON), on all. Where it raises, all do: rank 0 its exception, the others one of the same
        code that says so. DeadlinePassed if rank 0 has said nothing after `timeout` seconds."""
        if self.size == 1:
            return make()
        self.begin_call()
        failure: BaseException | None = None
        told: dict[str, Any] = {}
        if self.rank == 0:
            try:
                told = {"made": make()}
            except BaseException as error:
                failure, told = error, _said(error)
        buffer = self._buffer(told)
        self.wait(self.broadcast(buffer, 0), "rank 0 to start", timeout)
        if failure is not None:
            raise failure
        told = _read(buffer)
        if "error" in told:
            raise from_code(told["code"], f"rank 0 failed: {told['error']}")
        return told["made"]

    def gather(self, make: Callable[[], Any], timeout: float) -> list[Any]:
        """What each rank makes (JSON), by rank. If one raises, each does: its own exception, or one with the code of
        the first that failed, which it names."""
        if self.size == 1:
            return [make()]
        self.begin_call()
        failure: BaseException | None = None
        told: dict[str, Any] = {}
        try:
            told = {"made": make()}
        except BaseException as error:
            failure, told = error, _said(error)
        work, buffers = self._all_gather(self._buffer(told))
        try:
            self.wait(work, "all ranks", timeout)
        except DeadlinePassed:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        said = list(map(_read, buffers))
        for rank, message in enumerate(said):
            if "error" in message:
                raise from_code(message["code"], f"rank {rank} failed: {message['error']}")
        return [message["made"] for message in said]

    def gather_any(self, make: Callable[[], Any], timeout: float) -> list[Any]:
        """As gather(), of any size."""
        if self.size == 1:
            return [make()]
        packed: list[bytes] = []

        def pack() -> int:
            packed.append(zlib.compress(json.dumps(make()).encode(), 1))
            return len(packed[0])

        sizes = self.gather(pack, timeout)
        import torch

        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: sizes[self.rank]] = torch.frombuffer(bytearray(packed[0]), dtype=torch.uint8)
        work, buffers = self._all_gather(mine.to(self._message_device))
        self.wait(work, "what all ranks have", timeout)
        return [
            json.loads(zlib.decompress(bytes(buffer[:size].cpu().numpy())))
            for buffer, size in zip(buffers, sizes, strict=True)
        ]

    def all_or_none(self, call: Callable[[], _T], timeout: float) -> _T:
        """Its result, if it succeeded on all ranks; else as gather()."""
        result: list[_T] = []

        def tell_nothing() -> None:
            result.append(call())

        self.gather(tell_nothing, timeout)
        return result[0]

    # Tensors, whose device is `device`, and what goes with them.

    def broadcast(self, tensor: Any, rank: int) -> Any:
        """The rank's, on all. What is to be waited for."""
        return self._begin("broadcast", tensor, group_src=rank)

    def exchange(self, into: Any, of: Any, sizes_into: list[int], sizes_of: list[int]) -> Any:
        """To each rank its part of `of`, and from each what is for this one, in order of ranks; sizes are of one
        dimension. What is to be waited for."""
        return self._begin("all_to_all_single", into, of, sizes_into, sizes_of)

    def any_failed(self, failed: bool) -> tuple[Any, Any]:
        """Whether this rank has: what is to be waited for, and a tensor that is not 0 then if any has."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(failed)], dtype=torch.int32, device=self._message_device)
        return self._begin("all_reduce", flag, dist.ReduceOp.MAX), flag

    def errors(self, error: BaseException | None) -> tuple[Any, list[Any]]:
        """This rank's, if it has one: what is to be waited for, and what first_error() takes then."""
        return self._all_gather(self._buffer({} if error is None else _said(error)))

    def first_error(self, buffers: list[Any]) -> Error | None:
        for rank, told in enumerate(map(_read, buffers)):
            if "error" in told:
                return from_code(told["code"], f"rank {rank} failed: {told['error']}")
        return None

    def _require_in_step(self) -> None:
        if self.out_of_step:
            raise Aborted("process_group: ranks waited in vain for each other in an earlier call", _REMEDY)

    def _all_gather(self, mine: Any) -> tuple[Any, list[Any]]:
        import torch

        buffers = [torch.empty_like(mine) for _ in range(self.size)]
        return self._begin("all_gather", buffers, mine), buffers

    def _begin(self, name: str, *arguments: Any, **options: Any) -> Any:
        """A collective of torch.distributed: what is to be waited for."""
        import torch.distributed as dist

        self._require_in_step()
        return getattr(dist, name)(*arguments, group=self._group, async_op=True, **options)

    def _buffer(self, message: dict[str, Any]) -> Any:
        import torch

        text = json.dumps(message).encode().ljust(_MESSAGE_BYTES)
        if len(text) > _MESSAGE_BYTES:
            raise InvalidArgument(f"process_group: {len(text)} bytes for the other ranks, {_MESSAGE_BYTES} is the most")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._message_device)

    @property
    def device(self) -> str:
        """Of tensors that the ranks send each other: CUDA, if that has a backend of its own (gloo is slow there)."""
        backends = self._backends()
        return "cuda" if backends.get("cuda") not in (None, backends.get("cpu")) else "cpu"

    @property
    def _message_device(self) -> str:
        """Of what they tell each other, which is to wait for no kernel."""
        return "cpu" if "cpu" in self._backends() else "cuda"

    def _backends(self) -> dict[str, str]:
        """By device."""
        import torch.distributed as dist

        return dict(one.split(":") for one in dist.get_backend_config(self._group).split(","))

    def wait(self, work: Any, what: str, timeout: float) -> None:
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=max(timeout, 0.001)))
        except BaseException as error:
            self.out_of_step = True
            if not isinstance(error, RuntimeError) or time.monotonic() - began < timeout - _EARLY_S:
                raise  # a rank has died, for example: torch says which connection broke
            message = f"process_group: rank {self.rank} waited {timeout:.1f} s for {what}"
            raise DeadlinePassed(message, _REMEDY) from error


def _said(error: BaseException) -> dict[str, Any]:
    code = error.code if isinstance(error, Error) else "aborted"
    return {"code": code, "error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}


def _read(buffer: Any) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(bytes(buffer.cpu().numpy()))
    return message
