"""Tensors of any library as an address, a shape and strides, without a copy and without importing that library.

torch tensors are asked directly (any dtype, any device); numpy arrays too, ``ml_dtypes`` included; all else by DLPack,
through numpy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import InvalidArgument, Unsupported

#: The dtypes that a layout may have (layout_format.md): safetensors' name of each by the name that torch, numpy
#: and ml_dtypes have for it.
DTYPES: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
    "float4_e2m1fn_x2": "F4",
}
#: The other way round: torch's name of each of safetensors' dtypes.
NAMES: dict[str, str] = {known: name for name, known in DTYPES.items()}
#: What models compute with; weights in one of these may be cast to another.
COMPUTED = frozenset({"F64", "F32", "F16", "BF16"})
#: What only means something together with scales, or other data.
QUANTISED = frozenset(name for name in DTYPES.values() if name.startswith(("F8", "F4"))) | {"I8", "U8", "I32"}
#: Shorter names that people use.
SHORT: dict[str, str] = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "double": "float64",
    "fp64": "float64",
    "f64": "float64",
}
_SPELLED = {name: name for name in DTYPES.values()}


def dtype_name(dtype: Any, what: str = "dtype") -> str:
    """safetensors' name of a dtype of torch, numpy or ml_dtypes, or of such a name. Unsupported names `what`."""
    if isinstance(dtype, str):
        found = DTYPES.get(SHORT.get(dtype.lower(), dtype).removeprefix("torch.")) or _SPELLED.get(dtype.upper())
        if found is None:
            raise InvalidArgument(
                f"{what}: '{dtype}' is no dtype of safetensors files",
                "such are bfloat16 (bf16), float16 (fp16), float32 (fp32), …",
            )
        return found
    try:
        text = str(dtype) if is_torch_dtype(dtype) else str(np.dtype(dtype))
    except TypeError:
        raise InvalidArgument(f"{what}: {dtype!r} is no dtype; give one of torch or numpy, or its name") from None
    found = DTYPES.get(text.removeprefix("torch."))
    if found is None:
        raise Unsupported(f"{what}: {dtype} is no dtype that safetensors files have; cast it first")
    return found


def torch_dtype(name: str) -> Any:
    """torch's dtype of one of safetensors' names; imports torch. Unsupported: that release of torch has none."""
    import torch

    found = getattr(torch, NAMES[name], None)
    if found is None:
        raise Unsupported(f"{name}: torch {torch.__version__} has no {NAMES[name]}", "a later release of torch has it")
    return found


def memory_shape(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """The shape that torch has for a tensor of this one: F4 counts single values in files, pairs in memory."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" and shape else tuple(shape)


def file_shape(shape: Sequence[int], dtype: str) -> list[int]:
    """The other way round."""
    sizes = [int(size) for size in shape]
    if dtype == "F4" and sizes:
        sizes[-1] *= 2
    return sizes


def is_torch_dtype(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.dtype)


def is_torch_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor's memory. ``owner`` keeps it alive."""

    address: int
    shape: tuple[int, ...]
    #: Of the 2-D view, in bytes from one row to the next; 0: rows are contiguous.
    row_stride: int
    dtype: str
    #: CUDA ordinal, or -1 for the host.
    device: int
    #: cudaStream_t on which the values become ready; 0 for the host.
    stream: int
    owner: Any
    #: In bytes from one column to the next; 0: they are contiguous. Then the row stride is given.
    col_stride: int = 0

    @property
    def rows_cols(self) -> tuple[int, int]:
        """The 2-D view's: columns are the last dimension, rows the product of the others."""
        return rows_cols(self.shape)


def rows_cols(shape: Sequence[int]) -> tuple[int, int]:
    """Of the 2-D view of this shape; (0, 0) if a dimension is."""
    if math.prod(shape) == 0:
        return 0, 0
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def row_stride(shape: Sequence[int], strides: Sequence[int], width: int) -> int | None:
    """Bytes from one row of the 2-D view to the next, 0 if there are no gaps; None if memory has no such view.

    ``strides`` in bytes, ``width`` of an element.
    """
    dims = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if not dims or math.prod(shape) == 0:
        return 0
    if shape[-1] != 1:
        if dims[-1][1] != width:
            return None
        dims.pop()
    if not dims:
        return 0
    step = dims[-1][1]
    if step < shape[-1] * width:  # broadcast, overlapping or reversed
        return None
    expected = step
    for size, stride in reversed(dims):
        if stride != expected:
            return None
        expected = stride * size
    return 0 if step == shape[-1] * width else step


FSDP1_REMEDY = (
    "train with FSDP2 (torch.distributed.fsdp.fully_shard), or offload(lambda: model.state_dict()) with "
    "StateDictType.FULL_STATE_DICT, which gathers the model on each rank"
)
ZERO3_REMEDY = (
    "make the manager of the model's directory, and give offload() a function whose generator yields each parameter "
    "inside deepspeed.zero.GatheredParameters"
)


def check_tensor(value: Any, name: str) -> None:
    """InvalidArgument unless it has a tensor's dtype and shape; Unsupported: what FSDP1 has flattened, or DeepSpeed's
    ZeRO-3 has divided. ``name`` is for the message."""
    if type(value).__name__ in ("UninitializedParameter", "UninitializedBuffer"):
        raise InvalidArgument(f"{name}: of a lazy module, it has no shape yet", "let the model compute once before")
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise InvalidArgument(
            f"{name}: a {type(value).__name__} is no tensor; give one of torch or numpy, or anything with DLPack"
        )
    if getattr(value, "_fsdp_flattened", False) or hasattr(value, "local_shards"):
        raise Unsupported(f"{name}: FSDP1 has a part of it, in no shape of its own", FSDP1_REMEDY)
    if tuple(getattr(value, "ds_shape", value.shape)) != tuple(value.shape):
        raise Unsupported(f"{name}: DeepSpeed's ZeRO-3 has divided it among the ranks", ZERO3_REMEDY)


def check_dense(value: Any, name: str) -> None:
    """InvalidArgument if it is a sparse tensor of torch, which has no rows in memory."""
    if is_torch_tensor(value) and value.layout is not sys.modules["torch"].strided:
        raise InvalidArgument(f"{name}: a {value.layout} tensor has no dense memory", "make it so: tensor.to_dense()")


def check_memory(value: Any, name: str) -> None:
    """InvalidArgument if torch's storage ends before the tensor does: a view of one that was given up is still there,
    and its address is that of others' memory, or of none."""
    last = value.storage_offset() + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    need = (last + 1) * value.element_size()
    if need > (have := value.untyped_storage().nbytes()) and value.numel():
        raise InvalidArgument(f"{name}: the source has no memory ({need} bytes of its storage, which has {have})")
    if value.data_ptr() == 0 and value.numel():
        raise InvalidArgument(
            f"{name}: the source has no memory: a {type(value).__name__} is made of other tensors",
            "give those, by names of their own, or one dense tensor (such as its dequantize())",
        )


def transposed(value: Any, name: str) -> Array | None:
    """As :func:`describe`, of a matrix in host memory whose columns lie apart; None of anything else."""
    if not is_torch_tensor(value) or value.device.type != "cpu" or value.layout is not sys.modules["torch"].strided:
        return None
    if value.ndim != 2 or min(value.shape) < 1 or value.is_conj() or value.is_neg():
        return None
    rows, cols = value.stride()
    if value.shape[1] == 1 or cols <= 1 or (value.shape[0] > 1 and rows < 1):
        return None  # contiguous, or broadcast
    check_memory(value, name)
    width = value.element_size()
    dtype = dtype_name(value.dtype, name)
    return Array(value.data_ptr(), tuple(value.shape), max(rows, 1) * width, dtype, -1, 0, value, cols * width)


def describe(value: Any, name: str) -> Array:
    """The memory of a tensor; ``name`` is for messages. A layout of memory that has no rows is copied first.

    Raises InvalidArgument (no tensor; or it has no memory here: meta, sparse, given up), Unsupported (dtype, device).
    """
    if is_torch_tensor(value):
        return _describe_torch(value, name)
    if not isinstance(value, np.ndarray):
        check_tensor(value, name)
        try:
            value = np.from_dlpack(value)
        except Exception as error:
            raise Unsupported(f"{name}: its memory cannot be shared by DLPack: {error}") from error
    return _describe_numpy(value, name)


def _describe_numpy(value: np.ndarray[Any, Any], name: str) -> Array:
    dtype = dtype_name(value.dtype, name)
    if not value.dtype.isnative:
        raise Unsupported(f"{name}: {value.dtype} is not of this machine's byte order")
    stride = row_stride(value.shape, value.strides, value.itemsize)
    if stride is None:
        value = np.ascontiguousarray(value)
        stride = 0
    return Array(value.__array_interface__["data"][0], value.shape, stride, dtype, -1, 0, value)


def _describe_torch(value: Any, name: str) -> Array:
    torch = sys.modules["torch"]
    dtype = dtype_name(value.dtype, name)
    kind = value.device.type
    check_dense(value, name)
    if kind == "meta":
        raise InvalidArgument(f"{name}: a tensor on {value.device} has no memory to copy")
    if kind not in ("cpu", "cuda"):
        raise Unsupported(f"{name}: memory on {value.device}; move the tensor to the host first")
    check_memory(value, name)
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    if value.is_contiguous():
        stride: int | None = 0
    else:
        width = value.element_size()
        stride = row_stride(value.shape, [step * width for step in value.stride()], width)
        if stride is None:
            value = value.contiguous()
    device, stream = -1, 0
    if kind == "cuda":
        device = value.device.index
        stream = torch.cuda.current_stream(device).cuda_stream
    return Array(value.data_ptr(), tuple(value.shape), stride or 0, dtype, device, stream, value)


OWN_TENSORS = "a manager publishes the tensors that it was made with: make another for other ones"


def shares_memory(array: Array, memory: Any) -> bool:
    """Whether the array is this memory, and no copy of it."""
    if array.owner is memory:
        return True
    return is_torch_tensor(memory) and array.owner.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def cast_to(tensor: Any, name: str, have: str, want: str) -> Any:
    """A tensor in the layout's dtype. InvalidArgument where that is no cast of numbers."""
    if have not in COMPUTED or want not in COMPUTED:
        raise InvalidArgument(f"{name}: its dtype is {have}, the layout's {want}", OWN_TENSORS)
    if is_torch_tensor(tensor):
        return tensor.detach().to(torch_dtype(want))
    try:
        return tensor.astype(NAMES[want])
    except TypeError as error:
        raise InvalidArgument(
            f"{name}: numpy cannot cast {have} to {want}: {error}", "import ml_dtypes, which gives numpy such dtypes"
        ) from error
