"""A trainer and a receiver in one process, over a real agent: every bit arrives, in every kind of target."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import deltasync
import numpy as np
import pytest
from deltasync import errors

torch = pytest.importorskip("torch")


def small_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(97, 24), torch.nn.Linear(24, 33), torch.nn.BatchNorm1d(33))
    return model.to(torch.bfloat16)


def step(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mask = torch.rand(parameter.shape, generator=generator) < 0.05
            parameter[mask] += 0.125


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [tensor.detach().flatten().view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and torch.equal(*bits)


def assert_same(module: torch.nn.Module, received: dict[str, torch.Tensor]) -> None:
    state = module.state_dict()
    assert set(received) == set(state)
    for name, tensor in state.items():
        assert same_bits(tensor, received[name]), name


def test_what_is_no_version_is_refused_and_leaves_nothing_behind(agent: deltasync.AgentProcess) -> None:
    weights = {"w": np.arange(64, dtype=np.float32)}
    with deltasync.WeightManager(weights, agent=agent.socket) as manager:
        manager.offload(weights)
        with deltasync.Receiver(agent.endpoint, background=True) as receiver:
            for wrong in (2.5, -1, 0, 2**70, True, [1]):
                with pytest.raises(errors.InvalidArgument, match="version=.* is no version's number"):
                    receiver.update(wrong, timeout=1)  # type: ignore[arg-type]
                with pytest.raises(errors.InvalidArgument, match="prepare: version="):
                    receiver.prepare(wrong)  # type: ignore[arg-type]
            receiver.update(np.int64(1))
            assert receiver.version is not None and receiver.version.number == 1


def test_module_to_memory_over_several_versions(segment_name: str, shm_files: set[str]) -> None:
    model = small_model()
    with deltasync.WeightManager(model, name=segment_name) as manager:
        manager.offload(label="first")
        with deltasync.Receiver(manager.endpoint) as receiver:
            report = receiver.update()
            assert report.mode == "full"
            assert report.version.label == "first"
            for number in range(2, 6):
                step(model, number)
                offloaded = manager.offload()
                assert offloaded.version.number == number
                report = receiver.update(number)
                assert (report.mode, report.version.number) == ("delta", number)
                assert 0 < report.changed < receiver.layout.elements / 5
                assert_same(model, dict(receiver.tensors()))
            assert receiver.update().mode == "up_to_date"
            assert receiver.attest() == []


def test_directly_into_a_module(segment_name: str) -> None:
    trained, served = small_model(1), small_model(2)
    addresses = [parameter.data_ptr() for parameter in served.parameters()]
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:
            receiver.update()
            assert_same(trained, served.state_dict())
            step(trained, 3)
            manager.offload()
            assert receiver.update(2).mode == "delta"
            assert_same(trained, served.state_dict())
            assert [parameter.data_ptr() for parameter in served.parameters()] == addresses
            with torch.no_grad():
                served[1].weight.view(torch.int16)[3, 4] ^= 1
            assert [tensor for _, tensor, _ in receiver.attest()] == ["1.weight"]


def test_rollback_restores_the_version_before(segment_name: str) -> None:
    model = small_model()
    with deltasync.WeightManager(model, name=segment_name) as manager, manager_receiver(manager) as receiver:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        receiver.update()
        step(model, 1)
        manager.offload()
        receiver.update(2)
        assert receiver.rollback().number == 1
        for name, tensor in receiver.tensors():
            assert same_bits(tensor, before[name]), name
        with pytest.raises(errors.InvalidArgument):
            receiver.rollback()


def manager_receiver(manager: deltasync.WeightManager) -> deltasync.Receiver:
    manager.offload()
    return deltasync.Receiver(manager.endpoint)


def test_prepare_returns_at_once_and_can_be_polled(segment_name: str) -> None:
    model = small_model()
    with deltasync.WeightManager(model, name=segment_name) as manager, manager_receiver(manager) as receiver:
        receiver.update()
        prepared = receiver.prepare(2)
        assert not prepared.done
        assert receiver.version.number == 1
        step(model, 2)
        manager.offload()
        assert prepared.wait(30).version.number == 2
        assert prepared.done
        assert receiver.version.number == 1
        assert receiver.commit().version.number == 2
        assert receiver.version.number == 2


def test_background_pull_has_the_version_staged(segment_name: str) -> None:
    model = small_model()
    with deltasync.WeightManager(model, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, background=True) as receiver:
            assert receiver.commit().version.number == 1
            step(model, 5)
            manager.offload()
            assert receiver.commit().version.number == 2
            assert_same(model, dict(receiver.tensors()))
            assert receiver.attest() == []
            step(model, 6)
            manager.offload()
            assert receiver.commit().version.number == 3


class FailsFirst:
    """A native receiver whose pulls raise these first."""

    def __init__(self, native: Any, failures: list[Exception]) -> None:
        self._native, self._failures = native, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def pull(self, *asked: Any) -> Any:
        if self._failures:
            raise self._failures.pop(0)
        return self._native.pull(*asked)


def test_background_pull_goes_on_after_whatever_failed(segment_name: str, caplog: pytest.LogCaptureFixture) -> None:
    """By itself if that may pass; else the next commit() says it, and begins again."""
    may_pass: tuple[type[errors.Error], ...] = (errors.Aborted, errors.CoverageError, errors.IoError)
    may_pass = (*may_pass, errors.Unauthenticated, errors.VersionGone, errors.ConnectionFailed)
    final: tuple[type[Exception], ...] = (errors.VersionConflict, errors.LayoutMismatch, MemoryError)
    final = (*final, errors.InternalError, errors.Unsupported)
    with deltasync.WeightManager(small_model(), name=segment_name) as manager:
        manager.offload()
        for number, code in enumerate((*may_pass, *final), 1):
            with deltasync.Receiver(manager.endpoint, timeout=30) as receiver:
                pulls = receiver._pulls
                pulls._bound.native = FailsFirst(pulls._bound.native, [code(f"failure {number}")])
                pulls.background = True
                pulls.begin_next()
                if code in final:
                    with pytest.raises(code, match=f"failure {number}"):
                        receiver.commit()
                assert receiver.commit().version.number == 1
            assert (f"failure {number}" in caplog.text) == (code in may_pass)


def test_background_pull_goes_on_after_an_update_that_failed(segment_name: str) -> None:
    with deltasync.WeightManager(small_model(), name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, background=True, timeout=30) as receiver:
            receiver.commit()
            with pytest.raises(errors.DeadlinePassed):
                receiver.update(9, timeout=0.2)
            manager.offload()
            assert receiver.commit().version.number == 2


def test_generator_of_numpy_and_torch_with_every_dtype(segment_name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 256, 96, dtype=np.uint8)
    tensors = {
        "bf16": torch.from_numpy(bits.copy()).view(torch.bfloat16).reshape(6, 8),
        "fp8": torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn).reshape(4, 24),
        "fp32.numpy": bits.copy().view(np.float32).reshape(3, 8),
        "bf16.ml_dtypes": bits.copy().view(ml_dtypes.bfloat16),
        "i64": bits.copy().view(np.int64).reshape(2, 6),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
        "columns": torch.arange(40, dtype=torch.float32).reshape(5, 8)[:, 2:6],
    }
    with deltasync.WeightManager(tensors, name=segment_name) as manager:
        manager.offload((name, tensors[name]) for name in reversed(tensors))
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update()
            received = dict(receiver.arrays())
            as_torch = dict(receiver.tensors())
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            assert same_bits(as_torch[name], tensor.contiguous()), name
        assert received[name].shape == tuple(tensor.shape)
        if isinstance(tensor, np.ndarray):
            assert received[name].tobytes() == tensor.tobytes(), name


def test_cast_to_the_rollouts_dtype(segment_name: str) -> None:
    master = {"w": torch.randn(7, 9), "steps": torch.tensor([3])}
    with deltasync.WeightManager(master, dtype=torch.bfloat16, name=segment_name) as manager:
        manager.offload(master)
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update()
            received = dict(receiver.tensors())
            assert same_bits(received["w"], master["w"].to(torch.bfloat16))
            assert received["steps"].dtype == torch.int64


def test_tied_weights_travel_once(segment_name: str) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, 8)
            self.head = torch.nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

    model, served = Tied(), Tied()
    with deltasync.WeightManager(model, name=segment_name) as manager:
        assert manager.layout.names() == ["embed.weight"]
        manager.offload()
        manager.offload(model.state_dict())
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:
            receiver.update(2)
        assert same_bits(served.head.weight, model.embed.weight)


def test_hf_directory(segment_name: str, tmp_path: Path) -> None:
    model = small_model()
    files = {"config.json": b"{}"}
    with deltasync.WeightManager(model, files=files, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, directory=tmp_path / "out") as receiver:
            receiver.update()
        current = tmp_path / "out" / "current"
        assert (current / "config.json").read_bytes() == b"{}"
        load_file = pytest.importorskip("safetensors.torch").load_file
        assert_same(model, load_file(current / "model.safetensors"))


def test_what_is_wrong_is_named_and_the_version_stays(segment_name: str) -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(2, 3)}
    with deltasync.WeightManager(tensors, name=segment_name) as manager:
        manager.offload(tensors)
        with pytest.raises(errors.CoverageError, match="b"):
            manager.offload({"a": tensors["a"]})
        with pytest.raises(errors.NotFound, match="'c'"):
            manager.offload({**tensors, "c": torch.zeros(1)})
        with pytest.raises(errors.InvalidArgument, match=r"b: its shape is \[3, 2\]"):
            manager.offload({"a": tensors["a"], "b": torch.ones(3, 2)})
        with pytest.raises(errors.InvalidArgument, match="b: its dtype is I32"):
            manager.offload({"a": tensors["a"], "b": torch.ones(2, 3, dtype=torch.int32)})
        with pytest.raises(errors.InvalidArgument, match="meta"):
            manager.offload({"a": tensors["a"], "b": torch.ones(2, 3, device="meta")})
        with pytest.raises(RuntimeError, match="converter"):
            manager.offload(failing(tensors))
        with pytest.raises(errors.VersionConflict):
            manager.offload(tensors, 1)
        with deltasync.Receiver(manager.endpoint) as receiver:
            assert receiver.update().version.number == 1
            with pytest.raises(TimeoutError):
                receiver.update(7, timeout=0.2)
            manager.offload(tensors)
            manager.wait_ready()
            assert receiver.update().version.number == 2


def failing(tensors: dict[str, torch.Tensor]):
    yield "a", tensors["a"]
    raise RuntimeError("converter broke")


def test_offload_sees_parameters_that_moved_or_changed_shape(segment_name: str) -> None:
    """The description that is kept from the version before must not outlive the memory that it describes."""
    model = torch.nn.Linear(6, 5, bias=False)
    with deltasync.WeightManager(model, name=segment_name) as manager, manager_receiver(manager) as receiver:
        for fill in (1.0, 2.0, 3.0):
            model.weight.data = torch.full((5, 6), fill)
            receiver.update(manager.offload().version)
            assert_same(model, dict(receiver.tensors()))
        model.weight.data = torch.zeros(6, 5)
        with pytest.raises(errors.InvalidArgument, match="weight"):
            manager.offload()


def test_generator_may_use_one_buffer_for_all_its_tensors(segment_name: str) -> None:
    buffer = torch.empty(8)

    def exported():
        for i in range(5):
            yield f"w{i}", buffer.fill_(i)

    with deltasync.WeightManager({f"w{i}": torch.empty(8) for i in range(5)}, name=segment_name) as manager:
        manager.offload(exported())
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update()
            assert [float(tensor[0]) for _, tensor in receiver.tensors()] == [0, 1, 2, 3, 4]


def test_module_whose_memory_moved_is_not_written(segment_name: str) -> None:
    trained, served = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:
            receiver.update()
            served.weight.data = served.weight.data.clone()
            step(trained, 1)
            manager.offload()
            with pytest.raises(errors.LayoutMismatch, match="weight: the module keeps it elsewhere"):
                receiver.update(2)
            assert receiver.version.number == 1


def test_module_with_a_tensor_that_nobody_publishes_is_refused(segment_name: str) -> None:
    trained = torch.nn.Linear(4, 4, bias=False)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with pytest.raises(
            errors.LayoutMismatch, match=r"1 weight\(s\) of the model would stay as they are: bias \(\[4\]\)"
        ):
            deltasync.Receiver(manager.endpoint, module=torch.nn.Linear(4, 4))
        with deltasync.Receiver(manager.endpoint, module=torch.nn.Linear(4, 4), strict=False) as receiver:
            receiver.update()


@pytest.mark.parametrize("background", [False, True])
def test_a_refused_commit_is_not_the_end(segment_name: str, background: bool) -> None:
    """Live memory that somebody else wrote to is found; the next update brings all of it."""
    trained, served = small_model(1), small_model(1)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(
            manager.endpoint, module=served, attest_commits=True, background=background
        ) as receiver:
            receiver.commit() if background else receiver.update()
            with torch.no_grad():
                served[0].weight.view(torch.int16)[90, 3] ^= 1
            with torch.no_grad():
                trained[1].weight[0, 0] += 1
            manager.offload()
            # In the background the scrub may find it first, and the pull then brings all of it.
            with contextlib.suppress(errors.CorruptData) if background else pytest.raises(errors.CorruptData):
                receiver.commit() if background else receiver.update(2)
            for number in (3, 4):
                step(trained, number)
                manager.offload()
                manager.wait_ready()
                if receiver.version is None or receiver.version.number < number:
                    try:
                        receiver.commit() if background else receiver.update()
                    except errors.CorruptData:
                        continue
            assert receiver.version is not None
            assert receiver.version.number == 4
            assert_same(trained, served.state_dict())


def test_cancelled_is_not_committed_and_newest_is_asked_again(segment_name: str) -> None:
    model = small_model()
    with deltasync.WeightManager(model, name=segment_name) as manager, manager_receiver(manager) as receiver:
        prepared = receiver.prepare()
        prepared.wait(30)
        prepared.cancel()
        with pytest.raises(errors.Cancelled):
            prepared.commit()
        receiver.prepare().wait(30)
        step(model, 2)
        manager.offload()
        manager.wait_ready()
        assert receiver.update().version.number == 2


def test_attest_that_fails_leaves_the_background_pull(segment_name: str) -> None:
    model = small_model()
    with deltasync.WeightManager(model, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, background=True) as receiver:
            receiver.commit()
            with pytest.raises(errors.DeadlinePassed):
                receiver.attest(timeout=0)
            step(model, 2)
            manager.offload()
            assert receiver.commit(timeout=30).version.number == 2
