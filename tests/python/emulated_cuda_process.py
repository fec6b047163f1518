"""A trainer and an engine whose tensors are a torch's on an emulated CUDA device, in a process without torch: a module
of that name answers for memory of the device what torch's tensors would. Run by test_cuda_emulated.py, with the native
module that has the emulated runtime (tests/gpu/emulator), and an agent's name."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import sys
import threading
import time
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_, NATIVE, NAME = sys.argv

spec = importlib.util.spec_from_file_location("deltasync._native", NATIVE)
assert spec is not None and spec.loader is not None
native: Any = importlib.util.module_from_spec(spec)
sys.modules["deltasync._native"] = native
spec.loader.exec_module(native)
cuda = ctypes.CDLL(NATIVE)


def call(name: str, *arguments: Any) -> None:
    error = getattr(cuda, name)(*arguments)
    assert error == 0, f"{name}: {error}"


def made(name: str, *arguments: Any) -> int:
    """By a call that returns it in its first argument."""
    out = ctypes.c_void_p()
    call(name, ctypes.byref(out), *arguments)
    return out.value or 0


STREAM = made("cudaStreamCreateWithFlags", ctypes.c_uint(1))
DEFAULT_STREAM = 0
TO_DEVICE, TO_HOST = 1, 2
#: Work of a trainer's in its stream, which takes its time.
WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(0.05))
#: And of an engine's, which takes until the gate is open.
GATE = threading.Event()
GATED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: GATE.wait() and None)


def copy(to: int, source: int, count: int, kind: int, stream: int = STREAM) -> None:
    call(
        "cudaMemcpyAsync",
        ctypes.c_void_p(to),
        ctypes.c_void_p(source),
        ctypes.c_size_t(count),
        kind,
        ctypes.c_void_p(stream),
    )


def synchronize(_: int = 0) -> None:
    for stream in (STREAM, DEFAULT_STREAM):
        call("cudaStreamSynchronize", ctypes.c_void_p(stream))


class Memory:
    """Of a device, and pinned memory as large to reach it by."""

    def __init__(self, count: int) -> None:
        self.bytes = count
        self.address = made("cudaMalloc", ctypes.c_size_t(count))
        self._pinned = made("cudaHostAlloc", ctypes.c_size_t(count), ctypes.c_uint(0))
        self._view = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(self._pinned))

    def put(self, content: np.ndarray[Any, Any]) -> None:
        """In the stream; nobody waits for it here."""
        call("cudaStreamSynchronize", ctypes.c_void_p(STREAM))
        self._view[:] = content
        call("cudaLaunchHostFunc", ctypes.c_void_p(STREAM), WORK, None)
        copy(self.address, self._pinned, self.bytes, TO_DEVICE)

    def put_late(self) -> None:
        """What the memory is made with, in the default stream, once the gate is open."""
        self._view[:] = 0xEE
        call("cudaLaunchHostFunc", ctypes.c_void_p(DEFAULT_STREAM), GATED, None)
        copy(self.address, self._pinned, self.bytes, TO_DEVICE, DEFAULT_STREAM)

    def get(self) -> np.ndarray[Any, Any]:
        copy(self._pinned, self.address, self.bytes, TO_HOST)
        call("cudaStreamSynchronize", ctypes.c_void_p(STREAM))
        return self._view.copy()


# ---- torch ----


class Dtype:
    def __init__(self, name: str, width: int) -> None:
        self.name, self.width = name, width

    def __repr__(self) -> str:
        return f"torch.{self.name}"


@dataclass
class Tensor:
    """Rows that may have gaps."""

    memory: Memory
    shape: tuple[int, ...]
    dtype: Dtype
    row_elements: int
    device: Any = field(default_factory=lambda: types.SimpleNamespace(type="cuda", index=0))
    layout: str = "strided"
    requires_grad: bool = False

    def data_ptr(self) -> int:
        return self.memory.address

    def element_size(self) -> int:
        return self.dtype.width

    def stride(self) -> tuple[int, ...]:
        return (self.row_elements, 1) if len(self.shape) == 2 else (1,)

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        rows = self.shape[0] if len(self.shape) == 2 else 1
        return types.SimpleNamespace(nbytes=lambda: rows * self.row_elements * self.dtype.width)

    def numel(self) -> int:
        return int(np.prod(self.shape))

    def is_contiguous(self) -> bool:
        return self.row_elements == self.shape[-1]

    def is_conj(self) -> bool:
        return False

    def is_neg(self) -> bool:
        return False

    def rows(self, content: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What of the memory is the tensor's."""
        width = self.dtype.width
        return content.reshape(-1, self.row_elements * width)[:, : self.shape[-1] * width].reshape(-1)


torch: Any = types.ModuleType("torch")
torch.dtype, torch.Tensor, torch.strided = Dtype, Tensor, "strided"
torch.nn = types.SimpleNamespace(Parameter=type("Parameter", (Tensor,), {}), Module=type("Module", (), {}))
torch.cuda = types.SimpleNamespace(
    current_stream=lambda device: types.SimpleNamespace(cuda_stream=STREAM, device=device),
    synchronize=synchronize,
)
sys.modules["torch"] = torch

# With that native module, and that torch.
import deltasync  # noqa: E402
from deltasync.errors import DeadlinePassed  # noqa: E402

BF16, FP32 = Dtype("bfloat16", 2), Dtype("float32", 4)
SHAPES: dict[str, tuple[tuple[int, ...], Dtype, int]] = {
    "dense": ((64, 96), BF16, 96),
    "gaps": ((40, 33), BF16, 48),
    "vector": ((33,), FP32, 33),
}
random = np.random.default_rng(5)


def bytes_of(name: str) -> int:
    shape, dtype, row = SHAPES[name]
    return math.prod(shape[:-1]) * row * dtype.width


def engine_plan(live: dict[str, Memory]) -> Any:
    """Every tensor transposed, as engines have some."""
    plan = native.PlacementPlan()
    for name, memory in live.items():
        shape, dtype, _ = SHAPES[name]
        rows, cols = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
        at = plan.add_memory(name, memory.address, memory.bytes, 0, None, False)
        plan.place(name, (0, 0, rows, cols), at, 0, dtype.width, rows * dtype.width)
    return plan


def in_engine(name: str, content: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shape, dtype, _ = SHAPES[name]
    rows, cols = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
    return np.ascontiguousarray(content.reshape(rows, cols, dtype.width).transpose(1, 0, 2)).reshape(-1)


def check_first_pull() -> None:
    """Of an engine that has just made its memory, and names no stream. Its tensors are more than are sent at a time."""
    tensors = {f"tensor.{i}": np.full(8, i, np.float32) for i in range(600)}
    live = Memory(len(tensors) * 32)
    live.put_late()
    plan = native.PlacementPlan()
    memory = plan.add_memory("all", live.address, live.bytes, 0, None, False)
    for number, name in enumerate(tensors):
        plan.place(name, (0, 0, 1, 8), memory, 32 * number, 32, 4)
    with deltasync.WeightManager(tensors, name=f"{NAME}-first") as manager:
        manager.offload(tensors)
        with deltasync.Receiver(manager.endpoint, plan=plan, local="never") as engine:
            prepared = engine.prepare(1)
            with contextlib.suppress(DeadlinePassed):  # it has to wait
                prepared.wait(1)
            GATE.set()
            assert prepared.commit().mode == "full"
            assert np.array_equal(live.get().view(np.float32).reshape(-1, 8)[:, 0], np.arange(len(tensors)))


def main() -> None:
    assert deltasync._native is native and native.with_cuda
    check_first_pull()
    contents = {name: random.integers(0, 256, bytes_of(name), dtype=np.uint8) for name in SHAPES}
    sent = {name: Tensor(Memory(bytes_of(name)), shape, dtype, row) for name, (shape, dtype, row) in SHAPES.items()}
    live = {name: Memory(tensor.rows(contents[name]).size) for name, tensor in sent.items()}
    for name, tensor in sent.items():
        tensor.memory.put(contents[name])
    with deltasync.WeightManager(sent, name=NAME) as manager:
        manager.offload(sent)
        with (
            deltasync.Receiver(manager.endpoint, local="never") as host,
            deltasync.Receiver(
                manager.endpoint, plan=engine_plan(live), local="never", attest_commits=True, engine_streams={0: STREAM}
            ) as engine,
        ):
            for number, mode in ((1, "full"), (2, "delta"), (3, "delta")):
                if number > 1:
                    for name, tensor in sent.items():
                        contents[name][:: 50 + number] ^= 1
                        tensor.memory.put(contents[name])  # still in the stream when the offload begins
                    manager.offload(sent)
                assert engine.update(number).mode == mode
                host.update(number)
                arrays = dict(host.arrays())
                for name, tensor in sent.items():
                    want = tensor.rows(contents[name])
                    assert np.array_equal(arrays[name].reshape(-1).view(np.uint8), want), (number, name)
                    assert np.array_equal(live[name].get(), in_engine(name, want)), (number, name)
                assert engine.attest() == []
    print("all versions arrived")


main()
