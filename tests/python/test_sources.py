"""What `WeightManager.offload` takes: every kind of source and of tensor, in any order, gives the same bytes."""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import deltasync
import numpy as np
import pytest
from deltasync import errors, trainer
from deltasync._native import PlainTensors

torch = pytest.importorskip("torch")

#: Those that numbers can be cast to.
DTYPES = [
    getattr(torch, name) for name in deltasync._arrays.DTYPES if hasattr(torch, name) and name != "float4_e2m1fn_x2"
]


class Subclass(torch.Tensor):
    pass


class MadeWhenAsked(Mapping[str, Any]):
    """A mapping all of whose tensors are made in the same memory, one after the other."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._buffer = torch.empty(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if type(tensor) is not torch.Tensor:
            return tensor
        made = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._buffer.fill_(0xFF)
        return made.copy_(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def every_kind() -> dict[str, Any]:
    """Tensors whose memory is like the checkpoint's, and such whose is not."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=generator).to(dtype)
        return torch.randint(0, 100, shape, generator=generator).to(dtype)

    tensors: dict[str, Any] = {f"dtype.{dtype}": random(3, 5, dtype=dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": random(),
        "vector": random(7),
        "cube": random(2, 3, 4),
        "empty": random(0, 4),
        "parameter": torch.nn.Parameter(random(4, 6)),
        "subclass": random(4, 6).as_subclass(Subclass),
        "part": random(9, 6)[2:7],
        "columns": random(6, 9)[:, 2:7],
        "transposed": random(6, 9).t(),
        "expanded": random(1, 5).expand(4, 5),
        "size_one": random(4, 1, 6).as_strided((4, 1, 6), (6, 99, 1)),
        "reversed": random(4, 6).flip(0).numpy()[::-1],
        "array": random(4, 6).numpy(),
    }
    return tensors


def shuffled(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensors[name] for name in sorted(tensors, key=lambda name: name[::-1])}


def as_torch(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(tensor)) if isinstance(tensor, np.ndarray) else tensor


def assert_received(receiver: deltasync.Receiver, tensors: dict[str, Any]) -> None:
    received = dict(receiver.tensors())
    assert set(received) == set(tensors)
    for name, tensor in tensors.items():
        wanted = as_torch(tensor).detach().contiguous()
        assert received[name].dtype == wanted.dtype, name
        assert received[name].shape == wanted.shape, name
        assert received[name].flatten().view(torch.uint8).equal(wanted.flatten().view(torch.uint8)), name


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no_exchange"])
@pytest.mark.parametrize(
    "given",
    [
        dict,
        lambda tensors: list(tensors.items()),
        lambda tensors: iter(tensors.items()),
        lambda tensors: ([name, tensor] for name, tensor in tensors.items()),
        lambda tensors: lambda: iter(tensors.items()),
        MadeWhenAsked,
    ],
    ids=["dict", "list", "iterator", "lists", "function", "mapping"],
)
def test_every_kind_from_every_source(
    given: Any, exchange: bool, segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(trainer, "PlainTensors", lambda layout, index, *_: PlainTensors(layout, index, (), None))
    tensors = every_kind()
    with deltasync.WeightManager(tensors, name=segment_name) as manager:
        with deltasync.Receiver(manager.endpoint) as receiver:
            for order in (tensors, shuffled(tensors), shuffled(tensors), tensors):
                receiver.update(manager.offload(given(order)).version)
                assert_received(receiver, tensors)
                with torch.no_grad():
                    for tensor in tensors.values():
                        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1 and tensor.stride()[0] != 0:
                            tensor[-1] = tensor[-1] == 0


def test_plain_tensors_are_not_described_one_by_one(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no C exchange API")
    tensors = {f"w{i}": torch.full((3,), float(i)) for i in range(20)}
    # Complex ones may be conjugates, which only a closer look tells.
    tensors |= {f"dtype.{dtype}": torch.ones(2, 3).to(dtype) for dtype in DTYPES if not dtype.is_complex}
    described: list[str] = []
    monkeypatch.setattr(
        trainer, "describe", lambda value, name: (described.append(name), deltasync._arrays.describe(value, name))[1]
    )
    with deltasync.WeightManager(tensors, name=segment_name) as manager:
        manager.offload(tensors)
        manager.offload(iter(tensors.items()))
        assert described == []
        manager.offload({**tensors, "w7": torch.ones(6)[::2]})
        assert described == ["w7"]


def test_further_names_of_a_tensor_are_passed_over(segment_name: str) -> None:
    published = {"a": torch.ones(4), "b": torch.zeros(3, 2).t()}
    with deltasync.WeightManager(published, name=segment_name) as manager:
        again = {"a.too": published["a"], "b.too": published["b"]}
        manager.offload({**published, **again})
        manager.offload(list({**published, **again}.items()))
        with pytest.raises(errors.NotFound, match=r"'c'"):
            manager.offload({**published, "c": torch.ones(4)})
        # What a generator shows may lie where the tensor before lay, so an address says nothing.
        with pytest.raises(errors.NotFound, match=r"'a.too'"):
            manager.offload(iter({**published, **again}.items()))


@pytest.mark.parametrize("view", [types.MappingProxyType, dict.items, collections.OrderedDict])
def test_further_names_in_views_of_a_dict(view: Any, segment_name: str) -> None:
    published = {"a": torch.ones(4)}
    with deltasync.WeightManager(published, name=segment_name) as manager:
        manager.offload(view({**published, "a.too": published["a"]}))


def test_a_dict_that_makes_its_tensors_when_asked(segment_name: str) -> None:
    buffer = torch.empty(4)

    class Made(dict[str, Any]):
        def items(self) -> Any:
            return ((name, buffer.fill_(value)) for name, value in super().items())

    with deltasync.WeightManager({"a": torch.empty(4), "b": torch.empty(4)}, name=segment_name) as manager:
        manager.offload(Made(a=1.0, b=2.0))
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update()
            assert [float(tensor[0]) for _, tensor in receiver.tensors()] == [1, 2]


def test_the_tensors_of_a_module_live_until_the_version_is_whole(segment_name: str) -> None:
    """Copies of a device may be under way until then."""
    made: list[weakref.ref[torch.Tensor]] = []

    class Gathering(torch.nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            tensor = torch.ones(3, 4)
            made.append(weakref.ref(tensor))
            return {"w": tensor}

    with deltasync.WeightManager(Gathering(), name=segment_name) as manager:
        writer = manager._writer

        class Watched:
            def __getattr__(self, name: str) -> Any:
                if name == "commit":
                    assert made[-1]() is not None
                return getattr(writer, name)

        manager._writer = Watched()  # type: ignore[assignment]
        manager.offload()
        manager._writer = writer
    assert made[-1]() is None


def given_up_views() -> Iterator[torch.Tensor]:
    """The address of most is their offset alone, where others may have memory."""
    for first in (12, 5000, 4_000_000):
        yield torch.empty(first + 100)[first : first + 4].view(2, 2)
    yield torch.empty(6000)[5000:5004].view(2, 2).t()
    yield torch.empty(6000, dtype=torch.complex64)[5000:5004].view(2, 2).conj().imag
    yield torch.empty(8, 1000)[6:8, 500:502]


def test_a_view_of_memory_that_was_given_up_is_refused(segment_name: str) -> None:
    with deltasync.WeightManager({"a": torch.ones(2, 2)}, name=segment_name) as manager:
        for view in given_up_views():
            view.untyped_storage().resize_(0)
            for given in ({"a": view}, iter([("a", view)])):
                with pytest.raises(errors.InvalidArgument, match="a: the source has no memory"):
                    manager.offload(given)
        view = torch.ones(64)[12:26:4].view(2, 2)
        view.untyped_storage().resize_(100)
        manager.offload({"a": view})
        view.untyped_storage().resize_(99)
        with pytest.raises(errors.InvalidArgument, match="a: the source has no memory .100 bytes .* has 99"):
            manager.offload({"a": view})


def test_a_tensor_whose_storage_was_shrunk_is_refused_before_it_is_read(segment_name: str) -> None:
    tensors = {"a": torch.ones(8 << 20), "b": torch.ones(2, 2), "c": torch.ones(9)[5:]}
    with deltasync.WeightManager(tensors, name=segment_name) as manager:
        manager.offload(tensors)
        for name, kept in (("a", 4096), ("b", 15), ("c", 35)):
            whole = tensors[name].untyped_storage().nbytes()
            tensors[name].untyped_storage().resize_(kept)
            for given in (tensors, iter(tensors.items())):
                message = f"{name}: the source has no memory .{whole} bytes .* has {kept}"
                with pytest.raises(errors.InvalidArgument, match=message):
                    manager.offload(given)
            tensors[name].untyped_storage().resize_(whole)
        manager.offload(tensors)


class OfOthers(torch.Tensor):
    """As torchao's quantised tensors are."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data: torch.Tensor) -> None:
        self.data_of = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.data_of if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


def test_a_tensor_that_is_made_of_others_is_refused_with_what_to_do(segment_name: str) -> None:
    with deltasync.WeightManager({"a": torch.ones(2, 2)}, name=segment_name) as manager:
        with pytest.raises(errors.InvalidArgument, match=r"a: .* a OfOthers is made of .*dequantize\(\)"):
            manager.offload({"a": OfOthers(torch.ones(2, 2))})


def test_a_lazy_modules_parameters_are_named(segment_name: str) -> None:
    lazy = torch.nn.LazyLinear(4)
    with pytest.raises(errors.InvalidArgument, match="weight: of a lazy module.*compute once"):
        deltasync.WeightManager(lazy, name=segment_name)
    lazy(torch.ones(3))
    with deltasync.WeightManager(lazy, name=segment_name) as manager:
        with pytest.raises(errors.InvalidArgument, match="weight: of a lazy module.*compute once"):
            manager.offload(torch.nn.LazyLinear(4))
        manager.offload()


def divided_by_zero3(tensor: torch.Tensor) -> torch.nn.Parameter:
    """What DeepSpeed leaves of a parameter between two uses."""
    parameter = torch.nn.Parameter(tensor)
    parameter.ds_shape = parameter.shape
    parameter.data = torch.empty(0)
    return parameter


def test_parameters_that_zero3_has_divided_are_refused_with_what_to_do(segment_name: str) -> None:
    module = torch.nn.Linear(4, 4)
    state = module.state_dict()
    module.weight = divided_by_zero3(module.weight.detach())
    with pytest.raises(errors.Unsupported, match="weight: DeepSpeed.*GatheredParameters"):
        deltasync.WeightManager(module, name=segment_name)
    with deltasync.WeightManager(state, name=segment_name) as manager:
        with pytest.raises(errors.Unsupported, match="weight: DeepSpeed.*GatheredParameters"):
            manager.offload(module)
        module.weight.data = state["weight"]  # gathered
        manager.offload(module)


def test_what_a_module_saves_beside_its_tensors_is_none_of_them(segment_name: str) -> None:
    class Scaled(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    trained, served = (torch.nn.Sequential(Scaled(3, 3)) for _ in range(2))
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        assert manager.layout.names() == ["0.weight", "0.bias"]
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, ignore=["0._extra_state"]) as receiver:
            receiver.update()
    assert torch.equal(trained[0].weight, served[0].weight)


def at_no_memory(address: int) -> np.ndarray[Any, Any]:
    given = {"data": (address, True), "shape": (4,), "typestr": "<f4", "version": 3}
    return np.asarray(type("Foreign", (), {"__array_interface__": given})())


def test_an_address_where_nothing_is_mapped_is_refused(segment_name: str) -> None:
    with deltasync.WeightManager({"a": torch.ones(4)}, name=segment_name) as manager:
        for given in ({"a": at_no_memory(64)}, iter([("a", at_no_memory(64))])):
            with pytest.raises(errors.InvalidArgument, match="a: the source has no memory"):
                manager.offload(given)


def test_an_offload_within_an_offload_is_refused_and_the_outer_goes_on(segment_name: str) -> None:
    published = {"a": torch.ones(4), "b": torch.ones(2)}
    with deltasync.WeightManager(published, name=segment_name) as manager:

        def pairs() -> Iterator[tuple[str, Any]]:
            yield "a", published["a"]
            for call in (lambda: manager.offload(published), manager.close):
                with pytest.raises(errors.InvalidArgument, match="under way"):
                    call()
            yield "b", published["b"]

        assert manager.offload(pairs()).version.number == 1


def test_signs_that_are_bits_of_the_view(segment_name: str) -> None:
    value = torch.complex(torch.ones(1), torch.ones(1))
    negative = value.conj().imag  # reads as -1; its memory says 1
    assert negative.is_neg()
    with deltasync.WeightManager({"a": torch.ones(1)}, name=segment_name) as manager:
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update(manager.offload({"a": negative}).version)
            assert [float(tensor) for _, tensor in receiver.tensors()] == [-1.0]


def test_a_tensor_that_comes_twice_is_named(segment_name: str) -> None:
    published = {"a": torch.ones(4), "b": torch.zeros(3)}
    pairs = [*published.items(), ("a", torch.zeros(4))]
    with deltasync.WeightManager(published, name=segment_name) as manager:
        for given in (pairs, iter(pairs)):
            with pytest.raises(errors.CoverageError, match="a"):
                manager.offload(given)
        manager.offload(published)


def test_names_that_are_none(segment_name: str) -> None:
    published = {"a": torch.ones(4)}
    with deltasync.WeightManager(published, name=segment_name) as manager:
        for name in ("\ud800", [], 1):
            with pytest.raises(errors.InvalidArgument, match="offload: tensors: name=.* is no "):
                manager.offload([(name, published["a"])])
        manager.offload(published)


def test_a_model_without_memory_says_what_is_published(segment_name: str) -> None:
    promised = {"a": torch.ones(4, device="meta")}
    with deltasync.WeightManager(promised, name=segment_name) as manager:
        with pytest.raises(errors.InvalidArgument, match="a: a tensor on meta has no memory to copy"):
            manager.offload(promised)
        assert manager.offload({"a": torch.ones(4)}).version.number == 1


def test_another_capsule_is_refused() -> None:
    layout, _ = deltasync.layout_of({"a": torch.ones(4)})
    with pytest.raises(ValueError, match="PyCapsule"):
        PlainTensors(layout, {"a": 0}, (), torch.ones(1).__dlpack__())


def test_matrices_whose_columns_lie_apart_are_written_as_they_lie(segment_name: str) -> None:
    """Without a copy before, if no value is made of another."""
    whole = torch.randn(200, 300, generator=torch.Generator().manual_seed(9))
    lies = {
        "transposed": whole.t(),
        "every third": whole[1::2, ::3],
        "of a column": whole.t()[:, 5:6],
        "of a row": whole.t()[7:8],
        "of a part": whole[:, 40:44].t(),
        "of bytes": torch.arange(12, dtype=torch.uint8).view(3, 4).t(),
    }
    made = {"broadcast": torch.arange(5.0).expand(4, 5), "of halves": torch.randn(6, 4, 5).transpose(0, 1)}
    for tensors, is_made in ((lies, False), (made, True)):
        with deltasync.WeightManager(tensors, name=segment_name) as manager:
            for _step in range(2):
                report = manager.offload(tensors)
                assert (report.temporary_bytes_max > 0) == (report.convert_s > 0) == is_made
                with deltasync.Receiver(manager.endpoint) as receiver:
                    receiver.update()
                    got = dict(receiver.tensors())
                    for name, tensor in tensors.items():
                        assert torch.equal(got[name], tensor), name
    with deltasync.WeightManager(lies, dtype={"transposed": "bfloat16"}, name=segment_name) as manager:
        report = manager.offload(lies)
        assert report.temporary_bytes_max == whole.nbytes // 2
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update()
            assert torch.equal(dict(receiver.tensors())["transposed"], whole.t().bfloat16())
