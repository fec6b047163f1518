"""One rank of test_fsdp.py, started by torchrun: fills versions of FSDP2 models together with the other.

    fsdp_worker.py REPORT SEGMENT

Rank 0 pulls each version and compares it bit for bit with the full state dict. REPORT gets a JSON object: what each
check found, a line of text where it failed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deltasync
import torch
import torch.distributed as dist
from deltasync import errors
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_ranks import run_checks

REPORT, SEGMENT = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ["RANK"])
LONG_S = 300.0


class Model(torch.nn.Module):
    """Rows that two ranks cannot share evenly, one row, one element, three dimensions, columns, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(97, 24)
        self.up = torch.nn.Linear(24, 33)
        self.norm = torch.nn.BatchNorm1d(33)
        self.down = torch.nn.Linear(33, 8, bias=False)
        self.one = torch.nn.Parameter(torch.ones(1))
        self.row = torch.nn.Parameter(torch.randn(1, 5))
        self.stacked = torch.nn.Parameter(torch.randn(3, 4, 6))
        self.register_buffer("scalar", torch.tensor(2.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.norm(torch.relu(self.up(self.embed(tokens)))))
        return hidden.sum() * self.one.sum() + self.row.sum() + (self.stacked * self.scalar).square().sum()


def sharded_model() -> Model:
    torch.manual_seed(7)
    model = Model()
    mesh = dist.init_device_mesh("cpu", (2,))

    def placement(parameter: torch.nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 3 else None

    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    assert isinstance(model.up.weight, DTensor)
    return model


def full_state(state: dict[str, Any], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """All ranks call it."""
    full = {}
    for name, tensor in state.items():
        tensor = tensor.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        full[name] = whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole.clone()
    return full


class Pair:
    """The manager of both ranks, and rank 0's receiver."""

    def __init__(self, tag: str, model: Any, dtype: torch.dtype | None = None, timeout: float = LONG_S) -> None:
        self.dtype = dtype
        self.manager = deltasync.WeightManager(
            model, dtype=dtype, process_group=True, name=f"{SEGMENT}-{tag}", timeout=timeout
        )
        self.receiver: deltasync.Receiver | None = None

    def compare(self, state: dict[str, Any]) -> str:
        """The newest version against `state`; all ranks call it. How it came."""
        full = full_state(state, self.dtype)
        mode = ""
        if RANK == 0:
            if self.receiver is None:
                self.receiver = deltasync.Receiver(self.manager.endpoint)
            mode = self.receiver.update(self.manager.version).mode
            received = dict(self.receiver.tensors())
            assert set(received) == set(full)
            for name, tensor in full.items():
                got = received[name]
                assert got.dtype == tensor.dtype and got.shape == tensor.shape, name
                assert torch.equal(got.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
        dist.barrier()
        return mode

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.manager.close()


def steps(dtype: torch.dtype | None) -> None:
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    modes = []
    with Pair(f"steps-{dtype is None}", model, dtype) as pair:
        for step in range(1, 5):
            torch.manual_seed(100 * step + RANK)
            model(torch.randint(0, 97, (6,))).backward()
            optimizer.step()
            optimizer.zero_grad()
            # Each rank has batch norm statistics of its own; rank 0's are the ones that count.
            report = pair.manager.offload(version=step)
            assert report.version.number == step
            modes.append(pair.compare(model.state_dict()))
    if RANK == 0:
        assert modes == ["full", "delta", "delta", "delta"], modes


def placements() -> None:
    """Uneven shards on each dimension, replicas, plain tensors; a function that makes generators."""
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    state: dict[str, Any] = {"plain": torch.randn(5), "scalar": torch.tensor(1.25), "counter": torch.tensor([4])}
    for shape in ((7,), (1,), (5, 4), (3, 5, 2), (2, 3, 3, 2), (0, 3)):
        for placed in (Replicate(), *(Shard(dim) for dim in range(len(shape)))):
            state[f"{shape}.{placed}"] = distribute_tensor(torch.randn(shape), mesh, [placed])
    alive = 0

    def exported() -> Iterator[tuple[str, Any]]:
        nonlocal alive
        for name, tensor in state.items():
            alive += 1
            yield name, tensor + 0
            alive -= 1

    with Pair("placements", state, torch.bfloat16) as pair:
        pair.manager.offload(exported)
        pair.compare(state)
        for name, tensor in state.items():
            if name != "counter":
                tensor += 0.25
        pair.manager.offload(exported())
        pair.compare(state)
        pair.manager.offload(state)
        pair.compare(state)
    assert alive == 0


def generators() -> None:
    """Each tensor is made in the memory of the one before, so nobody may keep them to read them twice."""
    wanted = {f"w{i}": torch.full((8,), float(i)) for i in range(4)}

    def exported() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(8)
        for name, tensor in wanted.items():
            yield name, buffer.copy_(tensor)

    class Mapped(Mapping[str, torch.Tensor]):
        buffer = torch.empty(8)

        def __getitem__(self, name: str) -> torch.Tensor:
            return self.buffer.copy_(wanted[name])

        def __iter__(self) -> Iterator[str]:
            return iter(wanted)

        def __len__(self) -> int:
            return len(wanted)

    for tag, given in (("generators", exported), ("mappings", Mapped())):
        with Pair(tag, wanted) as pair:
            expect(errors.InvalidArgument, lambda: pair.manager.offload(exported()))
            assert pair.manager.version is None
            pair.manager.offload(given)
            pair.compare(wanted)
            pair.manager.offload(exported())  # the parts are known
            pair.compare(wanted)


def alone() -> None:
    """Without a process group each rank is a trainer of its own, which lacks the others' parts."""
    mesh = dist.init_device_mesh("cpu", (2,))
    for state in (sharded_model(), {"w": distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])}):
        with deltasync.WeightManager(state, name=f"{SEGMENT}-alone-{RANK}", timeout=LONG_S) as manager:
            try:
                manager.offload(state)
            except errors.InvalidArgument as error:
                assert "other ranks have parts of it" in str(error) and "process_group=True" in str(error), error
            else:
                raise AssertionError("a part was taken for the whole")


#: A rank whose fellow does not come: its deadline passes, or it sees rank 0 fill a later version.
LEFT_ALONE = (errors.DeadlinePassed, errors.VersionConflict)


class Broken(RuntimeError):
    """What the tests throw."""


def expect(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> float:
    began = time.monotonic()
    try:
        call()
    except kind:
        return time.monotonic() - began
    raise AssertionError(f"{kind} was not raised")


def breaking(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from list(state.items())[:3]
    raise Broken("the converter broke")


def meeting(state: dict[str, Any], broken: bool) -> Iterator[tuple[str, Any]]:
    """Both ranks have begun the version when one of them breaks."""
    yield from list(state.items())[:3]
    dist.barrier()
    if broken:
        raise Broken("the converter broke")
    yield from list(state.items())[3:]


def failures(broken_rank: int) -> None:
    """An exception on one rank is one on the other, by its deadline, and the next offload is whole."""
    state = sharded_model().state_dict()

    def change() -> None:
        for tensor in state.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local += 1

    with Pair(f"failures-{broken_rank}", state) as pair:
        manager = pair.manager
        # Before the plans are agreed on.
        if RANK == broken_rank:
            expect(Broken, lambda: manager.offload(lambda: breaking(state)))
        else:
            expect(LEFT_ALONE, lambda: manager.offload(state, timeout=1.0))
        change()
        manager.offload(state)
        pair.compare(state)
        # In the midst of a version: at once.
        change()
        kind = Broken if RANK == broken_rank else errors.Aborted
        waited = expect(kind, lambda: manager.offload(meeting(state, RANK == broken_rank)))
        assert waited < LONG_S / 2, waited
        manager.offload(lambda: meeting(state, False))
        pair.compare(state)
        # Before it begins: the other one waits until its deadline, and this one meets it in the version after it.
        change()
        if RANK == broken_rank:
            expect(ZeroDivisionError, lambda: manager.offload(lambda: 1 // 0))
        else:
            expect(LEFT_ALONE, lambda: manager.offload(state, timeout=1.0))
        change()
        manager.offload(state)
        pair.compare(state)
        # Other parts than before.
        whole = full_state(state, None)
        expect((errors.Aborted, errors.CoverageError, *LEFT_ALONE), lambda: manager.offload(whole, timeout=1.0))
        manager.offload(whole)
        pair.compare(state)


def beginnings() -> None:
    """What goes wrong while a manager is made is known to all."""
    if RANK == 0:
        os.environ["DELTASYNC_BIN"] = "/nowhere"
    waited = expect(errors.NotFound, lambda: Pair("beginnings", {"w": torch.zeros(2)}))
    assert waited < LONG_S / 2, waited
    os.environ.pop("DELTASYNC_BIN", None)
    state = {"w": torch.zeros(2 + RANK)}
    expect(errors.LayoutMismatch, lambda: Pair("layouts", state))
    # What only one of them cannot describe; what the ranks do then pairs with nothing of it.
    wrong: Any = {"w": 5 if RANK else torch.zeros(2)}
    expect(errors.InvalidArgument, lambda: Pair("described", wrong, timeout=LONG_S if RANK else 20.0))
    dist.barrier()


def transformers_model() -> None:
    """Experts are stacked in the module, sharded by whole experts or across them, and single in the checkpoint."""
    import hf_models
    import safetensors.torch
    from deltasync import hf

    mesh = dist.init_device_mesh("cpu", (2,))
    for config, dim in (("qwen3_moe", 0), ("qwen3_moe", 1), ("deepseek_v3", 2), ("mixtral", 0), ("joined", 0)):
        whole, model = (hf_models.tiny(config, torch.float32) for _ in range(2))

        def placement(parameter: torch.nn.Parameter, dim: int = dim) -> Shard | None:
            return Shard(dim) if parameter.ndim == 3 else None

        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
        fully_shard(model, mesh=mesh)
        with Pair(f"{config}-{dim}", model) as pair:
            for step in range(2):
                with torch.no_grad():
                    for ours, theirs in zip(whole.parameters(), model.parameters(), strict=True):
                        ours += step
                        theirs += step
                pair.manager.offload()
                directory = REPORT.with_name("saved")
                whole.save_pretrained(directory)  # rank 0 does
                dist.barrier()
                pair.compare(safetensors.torch.load_file(directory / "model.safetensors"))
        assert hf.form_of(model)[0].views_only == (config != "joined")


def fsdp1(original: bool) -> None:
    """Its flat parameters are refused, by name and with what to do, and that is right."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(5)
    inner = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    expected = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    wrapped = FullyShardedDataParallel(inner, use_orig_params=original, device_id=torch.device("cpu"))
    given = list(wrapped.named_parameters())

    def refused(names: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except errors.Unsupported as error:
            assert names in str(error) and "fully_shard" in str(error) and "FULL_STATE_DICT" in str(error), error
        else:
            raise AssertionError(f"{names} was taken")

    refused("FlatParameter", lambda: Pair("fsdp1", wrapped))
    refused("FlatParameter", lambda: Pair("fsdp1", torch.nn.Sequential(wrapped)))
    refused(given[0][0], lambda: Pair("fsdp1", given))
    with Pair(f"fsdp1-{original}", expected) as pair:
        refused("FSDP1", lambda: pair.manager.offload(wrapped))
        refused("FSDP1", lambda: pair.manager.offload([(name, given[0][1]) for name in expected]))
        pair.manager.offload(lambda: wrapped.state_dict())
        pair.compare(expected)


CHECKS: dict[str, Callable[[], None]] = {
    "steps": lambda: steps(None),
    "steps in bf16": lambda: steps(torch.bfloat16),
    "placements": placements,
    "generators": generators,
    "alone": alone,
    "transformers": transformers_model,
    "rank 0 fails": lambda: failures(0),
    "rank 1 fails": lambda: failures(1),
    "beginnings": beginnings,
    "fsdp1": lambda: fsdp1(False),
    "fsdp1, original": lambda: fsdp1(True),
}


run_checks(REPORT, RANK, CHECKS)
