"""Training on the real Megatron: each version that receivers get is the checkpoint that Megatron itself saves."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines
torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="needs megatron-core (tools/test_engines.sh megatron)")

import deltasync  # noqa: E402
import tiny_megatron as tiny  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_megatron import Parallel  # noqa: E402
from tiny_training import Training  # noqa: E402

STEPS = 20
LONG_S = 300.0


def same_bits(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe", Parallel(tp=2, pp=2, ep=2, etp=1, dp=2)),
        ("llama_tied", Parallel(pp=2, vpp=2, dp=2)),
        ("deepseek", Parallel(tp=2, pp=2, ep=2, etp=1)),  # a predictor, and biases that are no parameters
        ("gpt_oss", Parallel(tp=2, ep=2, etp=1, dp=2)),  # gate and up alternate
    ],
    ids=str,
)
def test_each_version_is_what_megatron_saves(whole: Any, name: str, layout: Parallel, tmp_path: Path) -> None:
    model = whole(name, torch.bfloat16)
    saved = [tmp_path / f"saved-{step}" for step in range(STEPS + 1)]
    received = [tmp_path / f"received-{step}.safetensors" for step in range(STEPS + 1)]

    def train(rank: int) -> tuple[list[str], list[float]]:
        chunks = model.chunks(layout)
        training = Training(chunks)
        modes, losses = [], []
        segment = f"pytest-{os.getppid()}-{name}"
        with deltasync.WeightManager(training.chunks, hf=model.hf, name=segment, timeout=LONG_S) as manager:
            receiver = deltasync.Receiver(manager.endpoint, timeout=LONG_S) if rank == 0 else None
            for step in range(STEPS + 1):
                if step:
                    losses += training.step(step)
                manager.offload(training.chunks, version=step + 1)
                if receiver is not None:
                    modes.append(receiver.update(manager.version).mode)
                    save_file({name: tensor.clone() for name, tensor in receiver.tensors()}, received[step])
                    saved[step].mkdir()
                dist.barrier()
                training.gather()  # what saves a checkpoint does it, too
                tiny.save(chunks, str(saved[step]))
            if receiver is not None:
                receiver.close()
        return modes, losses

    ranks = run_ranks(layout.world, train, tmp_path)
    modes, _ = ranks[0]
    assert modes[1:] == [modes[1]] * STEPS and modes[1] != modes[0]
    of_last_stages = [losses for _, losses in ranks if losses]
    assert len(of_last_stages) == layout.world // layout.pp
    for losses in of_last_stages:
        assert losses[-1] < 0.75 * losses[0], losses

    def compare(rank: int) -> list[str]:
        (unsharded,) = model.chunks(Parallel())
        wrong, before = [], None
        for step, directory in enumerate(saved):
            tiny.load([unsharded], str(directory))
            expected, got = model.to_hf(unsharded), load_file(received[step])
            assert got.keys() == expected.keys()
            wrong += [f"step {step}: {name}" for name in expected if not same_bits(got[name], expected[name])]
            if before is not None:
                wrong += [f"step {step}: {name} is as before" for name in got if same_bits(got[name], before[name])]
            before = got
        return wrong

    assert run_ranks(1, compare, tmp_path) == [[]]


def test_what_the_next_forward_gathers_is_refused_without_its_wrapper(whole: Any, tmp_path: Path) -> None:
    """Nothing would gather it, and the step before would be published."""
    model, layout = whole("llama", torch.bfloat16), Parallel(dp=2)

    def run(rank: int) -> str:
        chunks = model.chunks(layout)
        training = Training(chunks)
        segment = f"pytest-{os.getppid()}-bare"
        with deltasync.WeightManager(chunks, hf=model.hf, name=segment, timeout=LONG_S) as manager:
            training.step(1)
            with pytest.raises(deltasync.errors.InvalidArgument) as refused:
                manager.offload()
        return str(refused.value)

    for said in run_ranks(layout.world, run, tmp_path):
        assert "inside a DistributedDataParallel with overlap_param_gather" in said


def test_readmes_integration_as_it_stands(whole: Any, tmp_path: Path) -> None:
    model = whole("qwen3_moe", torch.bfloat16)
    layout = Parallel(tp=2, ep=2, etp=1)
    readme = Path(__file__).resolve().parents[3] / "README.md"
    (code,) = re.findall(r"^```python\n([^`]*model_chunks.*?)^```$", readme.read_text(), re.DOTALL | re.MULTILINE)
    for said, here in (("Qwen3-30B-A3B", str(model.hf)), (":7070", ":0"), ("1001", "3")):
        assert said in code
        code = code.replace(said, here)

    def run(rank: int) -> Any:
        chunks = model.chunks(layout)
        training = Training(chunks)
        steps = iter(range(1, 3))
        names: dict[str, Any] = {"model_chunks": training.chunks, "train": lambda _: training.step(next(steps))}
        exec(compile(code, "README.md", "exec"), names)
        manager = names["manager"]
        got = {}
        if rank == 0:
            with deltasync.Receiver(manager.endpoint, timeout=LONG_S) as receiver:
                receiver.update(manager.version)
                got = {name: tensor.view(torch.int16).numpy().copy() for name, tensor in receiver.tensors()}
        dist.barrier()
        number = manager.version.number
        manager.close()
        return number, got

    number, got = run_ranks(layout.world, run, tmp_path)[0]
    assert number == 2
    assert got.keys() == model.tensors.keys()
    for name, began in model.tensors.items():
        assert (got[name] != began.view(torch.int16).numpy()).any(), name


def test_megatrons_own_bytes_are_no_version_of_the_model(whole: Any, tmp_path: Path) -> None:
    """A delta of Megatron's bytes, applied to HuggingFace's, was how weights became noise once."""
    model = whole("llama")

    class Policy(torch.nn.Module):
        """What a rollout has: HuggingFace's names and shapes."""

        def __init__(self) -> None:
            super().__init__()
            for name, tensor in model.tensors.items():
                *path, last = name.split(".")
                here: Any = self
                for part in path:
                    if not hasattr(here, part):
                        here.add_module(part, torch.nn.Module())
                    here = getattr(here, part)
                here.register_parameter(last, torch.nn.Parameter(tensor.clone()))

    def run(rank: int) -> list[str]:
        chunks = model.chunks(Parallel())
        own = {name: tensor for name, tensor in chunks[0].state_dict().items() if isinstance(tensor, torch.Tensor)}
        said = []

        def refused(call: Any) -> None:
            with pytest.raises(deltasync.errors.Error) as raised:
                call()
            said.append(str(raised.value))

        names = iter(f"pytest-{os.getppid()}-bytes-{i}" for i in range(9))
        manager_of = functools.partial(deltasync.WeightManager, timeout=LONG_S)
        refused(lambda: manager_of(chunks, name=next(names)))
        refused(lambda: manager_of(own, hf=model.hf, name=next(names)))
        with manager_of(chunks, hf=model.hf, name=next(names)) as manager:
            refused(lambda: manager.offload(own))
            manager.offload(chunks)
        with manager_of(model.hf, name=next(names)) as manager:
            refused(lambda: manager.offload(own))
            tensors = dict(model.tensors)
            tensors["model.layers.0.self_attn.q_proj.weight"] = own["decoder.layers.0.self_attention.linear_qkv.weight"]
            refused(lambda: manager.offload(tensors))
            assert manager.version is None
        policy = Policy()
        with manager_of(own, name=next(names)) as manager:
            manager.offload(own)

            def update() -> None:
                with deltasync.Receiver(manager.endpoint, module=policy, timeout=LONG_S) as receiver:
                    receiver.update()

            refused(update)
        assert all(torch.equal(tensor, model.tensors[name]) for name, tensor in policy.named_parameters())
        return said

    (said,) = run_ranks(1, run, tmp_path)
    own = "embedding.word_embeddings.weight"
    reasons = ("without hf=", own, "model_chunks", own, "q_proj.weight: its shape", own)
    for message, why in zip(said, reasons, strict=True):
        assert why in message, (why, message)


def test_what_is_offloaded_first_is_proved(whole: Any, tmp_path: Path) -> None:
    model = whole("llama")

    def publish(rank: int) -> str:
        chunks = model.chunks(Parallel(tp=2))
        with torch.no_grad():
            chunks[0].decoder.layers[1].self_attention.linear_proj.weight[3, 2] += 1
        segment = f"pytest-{os.getppid()}-proved"
        with deltasync.WeightManager(chunks, hf=model.hf, name=segment, timeout=LONG_S) as manager:
            with pytest.raises(deltasync.errors.LayoutMismatch) as raised:
                manager.offload()
            assert manager.version is None
        with deltasync.WeightManager(chunks, hf=model.hf, name=segment, prove="off", timeout=LONG_S) as manager:
            manager.offload()
        return str(raised.value)

    first, second = run_ranks(2, publish, tmp_path)
    assert first == second
    assert "model.layers.1.self_attn.o_proj.weight" in first
