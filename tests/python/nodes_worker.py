"""One rank of test_nodes.py, started by torchrun: four ranks on what they take for two or three nodes.

    nodes_worker.py REPORT SEGMENT

The first rank of each node has a receiver of its agent, which pulls from all nodes; what it has is compared bit for bit
with the full state dict. REPORT.RANK gets a JSON object: what each check found, a line of text where it failed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deltasync
import torch
import torch.distributed as dist
from deltasync import _nodes, errors
from same_tensors import require_same
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_ranks import run_checks

REPORT, SEGMENT = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ["RANK"])
LONG_S = 300.0
SOON_S = LONG_S / 2


class Broken(RuntimeError):
    """What the tests throw."""


def full_state(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All ranks call it."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in state.items()
    }


class Fleet:
    """The managers of all ranks, and a receiver of each node's part."""

    def __init__(self, nodes: list[str], model: Any, **options: Any) -> None:
        """`nodes`: of each rank."""
        _nodes.this_node = lambda: f"{nodes[RANK]} boot"
        options = {"advertise": "127.0.0.1", "timeout": LONG_S, **options}
        if "agent" not in options:
            options["name"] = f"{SEGMENT}-{nodes[RANK]}"
        self.first = nodes.index(nodes[RANK]) == RANK
        self.manager = deltasync.WeightManager(model, process_group=True, **options)
        self.receiver: deltasync.Receiver | None = None

    def compare(self, state: dict[str, Any]) -> str:
        """The newest version against `state`, by a receiver of the agent of each node that holds a part; all ranks call
        it. How it came to all of them."""
        full = full_state(state)
        mode = None
        if self.first and self.manager.endpoint in self.manager.endpoints:
            if self.receiver is None:
                self.receiver = deltasync.Receiver(self.manager.endpoint)
            mode = self.receiver.update(self.manager.version).mode
            require_same(dict(self.receiver.tensors()), full)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mode)
        modes = {said for said in told if said is not None}
        return modes.pop() if len(modes) == 1 else str(modes)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.manager.close()


class Model(torch.nn.Module):
    """Rows that four ranks cannot share evenly, and some that are of less than four."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(97, 24)
        self.up = torch.nn.Linear(24, 33)
        self.row = torch.nn.Parameter(torch.randn(1, 5))
        self.stacked = torch.nn.Parameter(torch.randn(3, 4, 6))
        self.register_buffer("mean", torch.tensor([2.5, 1.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.up(self.embed(tokens)).square().sum() + self.row.sum() + self.stacked.square().sum()


def sharded_model(mesh: Any) -> Model:
    torch.manual_seed(7)
    model = Model()

    def placement(parameter: torch.nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 3 else None

    fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    return model


def change(state: dict[str, Any]) -> None:
    for tensor in state.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local += 1


def steps(nodes: list[str], replicas: int, parts: int, all_write: bool = False) -> None:
    """Real steps of a model of FSDP2, or HSDP, of which `parts` nodes have something."""
    shape, names = ((4,), ("shard",)) if replicas == 1 else ((replicas, 4 // replicas), ("replicate", "shard"))
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = sharded_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Fleet(nodes, model, replicas=all_write) as fleet:
        assert len(fleet.manager.endpoints) == len(set(nodes))
        for mode in ("full", "delta", "delta"):
            model(torch.arange(6) + RANK).backward()
            optimizer.step()
            optimizer.zero_grad()
            fleet.manager.offload()
            assert len(fleet.manager.endpoints) == parts, fleet.manager.endpoints
            assert fleet.compare(model.state_dict()) == mode
        fleet.manager.wait_ready()
        told: list[Any] = [None] * 4
        dist.all_gather_object(told, (fleet.manager.epoch, fleet.manager.layout.digest))
        assert len(set(told)) == 1, told


def tensor_parallel(all_write: bool) -> None:
    """Columns and rows, over nodes and under FSDP2."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    state: dict[str, Any] = {"plain": torch.randn(5), "scalar": torch.tensor(1.25), "empty": torch.zeros(0, 3)}
    for shape in ((7,), (5, 4), (3, 5, 2), (300, 500)):
        for first in (Replicate(), *(Shard(dim) for dim in range(len(shape)))):
            for second in (Replicate(), *(Shard(dim) for dim in range(len(shape)))):
                placed = f"{shape} {first} {second}"
                state[placed] = distribute_tensor(torch.randn(shape), mesh, [first, second])
    for nodes in (["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", "b", "c", "c"]):
        with Fleet(nodes, state, replicas=all_write) as fleet:
            for _ in range(2):
                change(state)
                fleet.manager.offload(lambda: iter(state.items()))
                fleet.compare(state)


def expect(kind: type[BaseException], call: Callable[[], Any], text: str = "") -> None:
    began = time.monotonic()
    try:
        call()
    except kind as error:
        assert text in str(error), str(error)
        assert time.monotonic() - began < SOON_S
        return
    raise AssertionError(f"{kind} was not raised")


def failures(broken_rank: int) -> None:
    """An exception on one rank is one on all, at once; the next offload is whole, and the nodes number it alike."""
    mesh = dist.init_device_mesh("cpu", (4,))
    state = sharded_model(mesh).state_dict()
    nodes = ["a", "a", "b", "b"]
    breaks = broken_rank == RANK
    kind = Broken if breaks else errors.Aborted
    text = "broke" if breaks else ""

    def breaking(after: int, times: int = 1) -> Callable[[], Iterator[tuple[str, Any]]]:
        """A function whose generators end with an error, from the given time on; with the tensors alive before."""
        made = 0

        def make() -> Iterator[tuple[str, Any]]:
            nonlocal made
            made += 1
            yield from list(state.items())[:after]
            if breaks and made >= times:
                raise Broken("the converter broke")
            yield from list(state.items())[after:]

        return make

    with Fleet(nodes, state) as fleet:
        manager = fleet.manager
        # While they say which parts they write; then with the parts agreed on, for the first version and a later one.
        expect(kind, lambda: manager.offload(breaking(2)), text)
        expect(kind, lambda: manager.offload(breaking(2, times=2)), text)
        manager.offload(state)
        assert manager.version is not None and manager.version.number == 3
        fleet.compare(state)
        for _ in range(2):
            change(state)
            expect(kind, lambda: manager.offload(breaking(2)), text)
            change(state)
            manager.offload(state)
            fleet.compare(state)
        assert manager.version.number == 7
        # The node of the other ranks has sealed what was never a version of the job.
        change(state)
        expect(kind, lambda: manager.offload(breaking(2)), text)
        assert manager.version.number == 7
        across = manager._across
        assert across is not None and across._writer is not None
        assert (across._writer.newest_number == 8) == (nodes[RANK] != nodes[broken_rank])
        # Who does not come is waited for until the deadline.
        if breaks:
            time.sleep(1.5)
            expect(errors.DeadlinePassed, lambda: manager.offload(state), "ranks came by the deadline")
            expect(errors.InvalidArgument, lambda: manager.offload(7))
        else:
            expect(errors.DeadlinePassed, lambda: manager.offload(state, timeout=1.0), "ranks came by the deadline")
            expect(errors.InvalidArgument, lambda: manager.offload(state), "is a number")
        # One that does not come at all finds the others again by the version.
        for number in (11, 12):
            if not breaks:
                missed = partial(manager.offload, state, version=number, timeout=1.0)
                expect(errors.DeadlinePassed, missed, "ranks came by the deadline")
            dist.barrier()
        manager.offload(state, version=13)
        fleet.compare(state)
        expect(errors.VersionConflict, lambda: manager.offload(state, version=20 + RANK // 2))
        expect(errors.VersionConflict, lambda: manager.offload(state, version=30, label=f"of {RANK // 2}"), "'of 1'")


def holes() -> None:
    """What nobody writes is found before the first version, and on every rank; so is what a node writes twice."""
    mesh = dist.init_device_mesh("cpu", (4,))
    state = sharded_model(mesh).state_dict()
    nodes = ["a", "a", "b", "b"]
    without = {name: tensor for name, tensor in state.items() if RANK != 3 or name != "embed.weight"}
    with Fleet(nodes, state) as fleet:
        text = (
            "no node holds embed.weight rows 75..97 (a holds embed.weight rows 0..50; b holds embed.weight rows 50..75"
        )
        expect(errors.CoverageError, lambda: fleet.manager.offload(without), text)
        assert fleet.manager.version is None
        twice = dict(state)
        if RANK == 1:
            twice["row"] = torch.zeros(1, 5)
            fleet.manager._group.rank = 0  # writes what has no parts, as rank 0 does
        expect(errors.CoverageError, lambda: fleet.manager.offload(twice), "written twice: ")
        fleet.manager._group.rank = RANK
        fleet.manager.offload(state)
        fleet.compare(state)
        # Other parts than before.
        whole = {name: tensor.clone() for name, tensor in full_state(state).items()}
        before = fleet.manager.epoch
        expect(errors.OutOfRange if RANK == 0 else errors.Error, lambda: fleet.manager.offload(whole))
        fleet.manager.offload(whole)
        assert fleet.manager.endpoints == [fleet.manager.endpoints[0]]
        assert fleet.manager.epoch > before
        if fleet.receiver is not None:
            receiver = fleet.receiver
            expect(errors.LayoutMismatch, receiver.update)
        fleet.receiver = None
        fleet.compare(whole)
        fleet.manager.offload(whole)


def again() -> None:
    """Another job with the same agents: the same parts, so that segments go on, and a later epoch."""
    mesh = dist.init_device_mesh("cpu", (4,))
    state = sharded_model(mesh).state_dict()
    nodes = ["a", "a", "b", "b"]
    node = nodes[RANK]
    agents: list[Any] = [None] * 4
    own = deltasync.AgentProcess(f"{SEGMENT}-again-{node}") if RANK in (0, 2) else None
    dist.all_gather_object(agents, own and (own.socket, own.endpoint))
    socket, endpoint = agents[nodes.index(node)]
    expect(errors.InvalidArgument, lambda: Fleet(nodes, state, agent=socket, advertise=None), "advertise=HOST:PORT")
    expect(
        errors.InvalidArgument, lambda: Fleet(nodes, state, agent=socket, advertise="127.0.0.1"), "the port is needed"
    )
    receiver, last = None, 0
    for mode in ("full", "delta"):
        change(state)
        with Fleet(nodes, state, agent=socket, advertise=endpoint) as fleet:
            fleet.receiver = receiver
            fleet.manager.offload(state)
            assert fleet.compare(state) == mode
            assert fleet.manager.epoch > last
            receiver, fleet.receiver, last = fleet.receiver, None, fleet.manager.epoch
        dist.barrier()
    if receiver is not None:
        receiver.close()
    if own is not None:
        own.stop()


def killed() -> None:
    """A node's agent dies and is started again: the same version is there, and later ones follow."""
    mesh = dist.init_device_mesh("cpu", (4,))
    state = sharded_model(mesh).state_dict()
    with Fleet(["a", "a", "b", "b"], state) as fleet:
        fleet.manager.offload(state)
        fleet.compare(state)
        fleet.manager.wait_ready()
        for number in (2, 3):
            if RANK == 2:
                assert fleet.manager.agent is not None
                os.kill(fleet.manager.agent.pid, 9)
            dist.barrier()
            change(state)
            fleet.manager.offload(state)
            fleet.compare(state)
            assert fleet.manager.version is not None and fleet.manager.version.number == number


def beginnings() -> None:
    """What goes wrong while a manager is made is known to all."""
    nodes = ["a", "a", "b", "b"]
    state = {"w": torch.zeros(2)}
    if RANK == 2:
        os.environ["DELTASYNC_BIN"] = "/nowhere"
    expect(errors.NotFound, lambda: Fleet(nodes, state))
    os.environ.pop("DELTASYNC_BIN", None)
    expect(errors.InvalidArgument, lambda: Fleet(nodes, state, advertise=None), 'listen="0.0.0.0:7070"')


def transformers_model() -> None:
    """Experts are stacked in the module, sharded across them or by whole ones, and single in the checkpoint."""
    import hf_models
    import safetensors.torch

    mesh = dist.init_device_mesh("cpu", (4,))
    for dim in (0, 1):
        whole, model = (hf_models.tiny("qwen3_moe", torch.float32) for _ in range(2))

        def placement(parameter: torch.nn.Parameter, dim: int = dim) -> Shard | None:
            return Shard(dim) if parameter.ndim == 3 else None

        fully_shard(model, mesh=mesh, shard_placement_fn=placement)
        directory = REPORT.with_name(f"saved-{dim}")
        whole.save_pretrained(directory)  # rank 0 does
        dist.barrier()
        with Fleet(["a", "a", "b", "b"], model, dtype="float32") as fleet:
            fleet.manager.offload()
            fleet.compare(safetensors.torch.load_file(directory / "model.safetensors"))


CHECKS: dict[str, Callable[[], None]] = {
    "fsdp": lambda: steps(["a", "a", "b", "b"], replicas=1, parts=2),
    "fsdp, a rank a node": lambda: steps(["a", "b", "c", "d"], replicas=1, parts=4),
    "hsdp, a replica a node": lambda: steps(["a", "a", "b", "b"], replicas=2, parts=1),
    "hsdp, all replicas": lambda: steps(["a", "a", "b", "b"], replicas=2, parts=2, all_write=True),
    "hsdp, replicas over nodes": lambda: steps(["a", "b", "a", "b"], replicas=2, parts=2),
    "tensor parallel": lambda: tensor_parallel(False),
    "tensor parallel, all replicas": lambda: tensor_parallel(True),
    "transformers": transformers_model,
    "rank 0 fails": lambda: failures(0),
    "rank 3 fails": lambda: failures(3),
    "holes": holes,
    "again": again,
    "killed": killed,
    "beginnings": beginnings,
}


if __name__ == "__main__":
    run_checks(REPORT, RANK, CHECKS)
