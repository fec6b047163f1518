"""Weights on a real CUDA device, on both sides. DELTASYNC_TEST_DEVICE=cpu runs what the host can do as well."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import deltasync
import pytest
from deltasync import _native

torch = pytest.importorskip("torch")

DEVICE = os.environ.get("DELTASYNC_TEST_DEVICE", "cuda")

if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
if DEVICE == "cuda" and not _native.with_cuda:
    pytest.skip("deltasync was built without CUDA", allow_module_level=True)

cuda_only = pytest.mark.skipif(DEVICE != "cuda", reason="streams and graphs of a CUDA device")


def network(dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """With rows that end within a word, a tensor of one element, and one tensor under two names."""
    torch.manual_seed(seed)
    made = torch.nn.Sequential(
        torch.nn.Embedding(1003, 256), torch.nn.Linear(256, 513), torch.nn.GELU(), torch.nn.Linear(513, 256)
    )
    made.append(torch.nn.Linear(256, 1003, bias=False))
    made.register_buffer("scale", torch.ones(()))
    made[4].weight = made[0].weight
    return made.to(DEVICE, dtype)


def differences(served: torch.nn.Module, trained: torch.nn.Module) -> list[str]:
    """Names of what is not bit for bit the same."""
    wanted = trained.state_dict()
    return [
        name
        for name, tensor in served.state_dict().items()
        if not torch.equal(tensor.reshape(-1).view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8))
    ]


def step(trained: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(0, 1003, (64,), device=DEVICE)
    loss = torch.nn.functional.cross_entropy(trained(tokens).float(), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_real_steps_arrive_bit_for_bit(dtype: torch.dtype, shadow: bool, segment_name: str) -> None:
    trained, served = network(dtype, 1), network(dtype, 2)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-2, momentum=0.9)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(
            manager.endpoint, module=served, shadow=shadow, attest_commits=True, local="never"
        ) as receiver:
            modes = [receiver.update().mode]
            assert differences(served, trained) == []
            before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
            for number in range(2, 6):
                step(trained, optimizer)
                manager.offload()
                modes.append(receiver.update(number).mode)
                assert differences(served, trained) == []
                assert receiver.attest() == []
                before = before if number == 5 else {n: t.clone() for n, t in served.state_dict().items()}
            assert modes[0] == "full" and set(modes[1:]) == {"delta"}
            receiver.rollback()
            assert all(torch.equal(tensor, before[name]) for name, tensor in served.state_dict().items())


def test_fp8_and_views(segment_name: str) -> None:
    """Quantized weights, and a fused tensor of which the trainer's are rows."""
    torch.manual_seed(3)

    def tensors(fill: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            "fp8": fill(257, 384).to(torch.float8_e4m3fn),
            "scales": fill(257, 3),
            "fused.a": fill(64, 129).to(torch.bfloat16),
            "transposed": fill(300, 70).to(torch.bfloat16).t(),
        }

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    sent = tensors(random)
    with deltasync.WeightManager(sent, name=segment_name) as manager:
        manager.offload(sent)
        with deltasync.Receiver(manager.endpoint, local="never") as receiver:
            for number in (1, 2):
                if number == 2:
                    sent["fp8"].view(torch.uint8)[5, 7] ^= 1
                    sent["transposed"][3, 4] += 1
                    manager.offload(sent)
                receiver.update(number)
                for name, tensor in receiver.tensors():
                    assert torch.equal(
                        tensor.contiguous().view(torch.uint8), sent[name].cpu().contiguous().view(torch.uint8)
                    ), name


def test_a_flipped_bit_is_named_and_repaired(segment_name: str) -> None:
    trained, served = network(torch.bfloat16, 1), network(torch.bfloat16, 2)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:
            receiver.update()
            served[1].weight.data.view(-1).view(torch.int16)[7] ^= 1
            assert [name for _, name, _ in receiver.attest()] == ["1.weight"]
            assert receiver.repair().tiles == 1
            assert receiver.attest() == [] and differences(served, trained) == []


def test_sleep_and_wake(segment_name: str) -> None:
    trained, served = network(torch.bfloat16, 1), network(torch.bfloat16, 2)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, shadow=True) as receiver:
            receiver.update()
            receiver.release()
            for parameter in served.parameters():
                parameter.data.zero_()
            receiver.restore()
            assert differences(served, trained) == [] and receiver.attest() == []


@cuda_only
@pytest.mark.parametrize("own_stream", [False, True])
def test_the_engine_never_sees_half_a_commit(own_stream: bool, segment_name: str) -> None:
    """Each version is one number everywhere; whatever the engine has queued sees a single one."""
    trained = torch.nn.Linear(4096, 4096, bias=False, device=DEVICE)
    served = torch.nn.Linear(4096, 4096, bias=False, device=DEVICE)
    trained.weight.data.fill_(1.0)
    stream = torch.cuda.Stream()
    seen: list[torch.Tensor] = []
    streams = {0: stream} if own_stream else None
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, engine_streams=streams) as receiver:
            receiver.update()
            for number in range(2, 8):
                trained.weight.data.fill_(float(number))
                manager.offload()
                receiver.prepare(number)
                with torch.cuda.stream(stream):
                    seen.extend(torch.stack(torch.aminmax(served.weight)) for _ in range(40))
                receiver.commit()
                with torch.cuda.stream(stream):
                    seen.extend(torch.stack(torch.aminmax(served.weight)) for _ in range(5))
    torch.cuda.synchronize()
    pairs = torch.stack(seen).cpu()
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    expected = [float(value) for number in range(2, 8) for value in [number - 1] * 40 + [number] * 5]
    assert pairs[:, 0].tolist() == expected


@cuda_only
def test_a_captured_graph_computes_with_new_weights(segment_name: str) -> None:
    trained, served = network(torch.bfloat16, 1), network(torch.bfloat16, 2)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-2)
    tokens = torch.arange(64, device=DEVICE)
    stream = torch.cuda.Stream()
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, engine_streams={0: stream}) as receiver:
            receiver.update()
            with torch.no_grad(), torch.cuda.stream(stream):
                served(tokens)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    out = served(tokens)
            for number in (2, 3):
                step(trained, optimizer)
                manager.offload()
                receiver.update(number)
                with torch.cuda.stream(stream):
                    graph.replay()
                stream.synchronize()
                with torch.no_grad():
                    assert torch.equal(out, trained(tokens))


@cuda_only
def test_a_commit_waits_for_a_capture_and_leaves_it_whole(segment_name: str) -> None:
    trained, served = network(torch.bfloat16, 1), network(torch.bfloat16, 2)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-2)
    tokens = torch.arange(64, device=DEVICE)
    stream = torch.cuda.Stream()
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with deltasync.Receiver(manager.endpoint, module=served, engine_streams={0: stream}) as receiver:
            receiver.update()
            step(trained, optimizer)
            manager.offload()
            receiver.prepare(2)
            with torch.no_grad(), torch.cuda.stream(stream):
                served(tokens)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            refused: list[BaseException] = []
            committed = threading.Event()

            def commit() -> None:
                try:
                    receiver.commit(timeout=0.2)
                except deltasync.errors.DeadlinePassed as error:
                    refused.append(error)
                    receiver.update(2)
                committed.set()

            with torch.no_grad(), torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                thread = threading.Thread(target=commit)
                thread.start()
                while not refused and thread.is_alive():
                    time.sleep(0.01)
                out = served(tokens)
            assert "graph's capture" in str(refused[0])
            assert committed.wait(60)
            thread.join()
            assert differences(served, trained) == []
            graph.replay()
            torch.cuda.synchronize()
            with torch.no_grad():
                assert torch.equal(out, trained(tokens))


@cuda_only
def test_an_offload_waits_for_the_optimizers_kernels(segment_name: str) -> None:
    """They are queued on torch's current stream, which is not the default one here, and take long."""
    weights = torch.zeros(2048, 2048, device=DEVICE)
    with deltasync.WeightManager({"w": weights}, name=segment_name) as manager:
        with deltasync.Receiver(manager.endpoint) as receiver:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            for number in (1, 2, 3):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(200_000_000)
                    weights.fill_(float(number))
                    manager.offload({"w": weights})
                    weights.fill_(-1.0)  # its memory is the trainer's again
                receiver.update(number)
                ((_, got),) = list(receiver.tensors())
                assert torch.equal(got, torch.full((2048, 2048), float(number)))


@cuda_only
def test_no_memory_stays_behind(segment_name: str) -> None:
    trained, served = network(torch.bfloat16, 1), network(torch.bfloat16, 2)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        free = []
        for _ in range(4):
            with deltasync.Receiver(manager.endpoint, module=served, shadow=True) as receiver:
                receiver.update()
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
        assert min(free[1:]) >= free[0] - (1 << 20), free
