"""What a user reads after a mistake: each message names the argument, and what helps. messages.txt keeps them all.

UPDATE_MESSAGES=1 python -m pytest tests/python/test_messages.py      writes it again; read the difference
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import errors
from deltasync.prepared import Prepared

torch = pytest.importorskip("torch")

KEPT = Path(__file__).with_name("messages.txt")


class Module(torch.nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(3)}


def manager(**options: Any) -> deltasync.WeightManager:
    return deltasync.WeightManager(weights(), **options)


class WithNote(torch.nn.Module):
    """Has something in its state that is no tensor, as quantised layers of some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


class Computes(torch.nn.Module):
    """Has its weight as the logarithm of it."""

    def __init__(self) -> None:
        super().__init__()
        self.log = torch.nn.Parameter(torch.zeros(3))

    def state_dict(self, **options: Any) -> Any:
        return {"w": self.log.exp()}


def halves() -> dict[str, torch.Tensor]:
    memory = torch.zeros(6 << 10)
    return {"w": memory[: 4 << 10], "v": memory[2 << 10 :]}


def mistakes(
    own: deltasync.WeightManager, trained: deltasync.WeightManager, directory: Path
) -> dict[str, Callable[[], Any]]:
    assert own.agent is not None
    empty, short, public = directory / "empty", directory / "short", directory / "public"
    for path, text, mode in ((empty, "", 0o600), (short, "hunter2", 0o600), (public, "0" * 64, 0o644)):
        path.write_text(text)
        path.chmod(mode)

    def module(**buffers: torch.Tensor) -> Any:
        return deltasync.Receiver(own.endpoint, module=Module(**buffers), timeout=30)

    return {
        "tensors=3": lambda: own.offload(3),
        "tensors=4.5": lambda: own.offload(4.5),
        "tensors='w'": lambda: own.offload("w"),
        "a list as tensor": lambda: own.offload({"w": [1, 2, 3]}),
        "names without tensors": lambda: own.offload(["w", "x"]),
        "an unknown tensor": lambda: own.offload({"other": torch.ones(3)}),
        "another shape": lambda: own.offload({"w": torch.ones(4)}),
        "an integer tensor": lambda: own.offload({"w": torch.ones(3, dtype=torch.int32)}),
        "version='3'": lambda: own.offload(weights(), version="3"),
        "version=1.5": lambda: own.offload(weights(), version=1.5),
        "version=True": lambda: own.offload(weights(), version=True),
        "version=0": lambda: own.offload(weights(), version=0),
        "version=-1": lambda: own.offload(weights(), version=-1),
        "version=2**64": lambda: own.offload(weights(), version=2**64),
        "label=7": lambda: own.offload(weights(), label=7),
        "label='1'": lambda: own.offload(weights(), version=20, label="1"),
        "a Version of such a label": lambda: own.offload(weights(), deltasync.Version(own.epoch, 20, "1")),
        "model=3": lambda: deltasync.WeightManager(3),
        "model='nowhere'": lambda: deltasync.WeightManager(directory / "nowhere"),
        "a list in the model": lambda: deltasync.WeightManager({"w": [1, 2, 3]}),
        "an empty model": lambda: deltasync.WeightManager({}),
        "a module without parameters": lambda: deltasync.WeightManager(torch.nn.ReLU()),
        "dtype='bloat16'": lambda: manager(dtype="bloat16"),
        "dtype=16": lambda: manager(dtype=16),
        "a pattern of no name": lambda: manager(dtype={"*.gate.bias": None, "*": "bf16"}),
        "a pattern behind one that has all": lambda: manager(dtype={"*": "bf16", "w": None}),
        "the name is taken": lambda: manager(name=own.agent.name),
        "the port is taken": lambda: manager(listen=own.endpoint),
        "beyond loopback without a token": lambda: manager(listen="0.0.0.0:7070"),
        "listen without a port": lambda: manager(listen="10.0.0.5"),
        "listen on a port that is none": lambda: manager(listen="127.0.0.1:70000"),
        "listen=7070": lambda: manager(listen=7070),
        "an agent's option that is none": lambda: manager(agent_args=["--inscure"]),
        "an agent's option with a wrong value": lambda: manager(agent_args=["--threads", "many"]),
        "a string of agent's options": lambda: manager(agent_args="--insecure"),
        "timeout='60'": lambda: manager(timeout="60"),
        "no token file": lambda: manager(token_file=directory / "token"),
        "an empty token file": lambda: manager(token_file=empty),
        "a token file that others may read": lambda: manager(token_file=public),
        "token_file=3": lambda: manager(token_file=3),
        "no token file for the receiver": lambda: deltasync.Receiver(own.endpoint, token_file=directory / "token"),
        "a short token for the receiver": lambda: deltasync.Receiver(own.endpoint, token_file=short),
        "a token that everybody may read": lambda: deltasync.Receiver(own.endpoint, token_file=public),
        "no agent for the receiver": lambda: deltasync.Receiver("127.0.0.1:1", timeout=3),
        "no agent at several endpoints": lambda: deltasync.Receiver(["127.0.0.1:1", "127.0.0.1:2"], timeout=3),
        "endpoints=7070": lambda: deltasync.Receiver(7070),  # type: ignore[arg-type]
        "no endpoint": lambda: deltasync.Receiver([]),
        "tls='x.pem'": lambda: manager(tls="x.pem"),
        "tls='x.pem' for the receiver": lambda: deltasync.Receiver(own.endpoint, tls="x.pem"),
        "tls={}": lambda: manager(tls={}),
        "an unknown option of TLS": lambda: manager(tls={"certificate": "x.pem"}),
        "a certificate without a key": lambda: manager(tls={"cert": "x.pem"}),
        "tls with ca only for the agent": lambda: manager(tls={"ca": "x.pem"}),
        "tls without ca for the receiver": lambda: deltasync.Receiver(own.endpoint, tls={"cert": "x", "key": "x"}),
        "tls with a number as path": lambda: manager(tls={"cert": 3, "key": "x.key"}),
        "allow=3": lambda: manager(tls={"cert": "x.pem", "key": "x.key", "allow": 3}),
        "no certificate file": lambda: manager(tls={"cert": directory / "a.pem", "key": directory / "a.key"}),
        "no CA file for the receiver": lambda: deltasync.Receiver(own.endpoint, tls={"ca": directory / "ca.pem"}),
        "no shm_dir": lambda: manager(shm_dir=directory / "shm"),
        "no agent": lambda: manager(agent=directory / "agent.sock", timeout=0.2),
        "a running agent, and options of one": lambda: manager(
            agent=own.socket,
            name="other",
            listen="0.0.0.0:7777",
            token_file=short,
            tls={"ca": "x.pem"},
            shm_dir=directory,
            agent_args=["--insecure"],
        ),
        "a running agent, and one option of one": lambda: manager(agent=own.socket, agent_args=["--insecure"]),
        "dtype= forgotten": lambda: module(w=torch.ones(3, dtype=torch.bfloat16)),
        "a module of another shape": lambda: module(w=torch.ones(4)),
        "a module of other names": lambda: module(v=torch.ones(3)),
        "a module with more": lambda: module(w=torch.ones(3), v=torch.ones(3)),
        "a module whose weight has gaps": lambda: module(w=torch.ones(6)[::2]),
        "a module with more than tensors": lambda: deltasync.Receiver(own.endpoint, module=WithNote()),
        "a module that computes a weight": lambda: deltasync.Receiver(own.endpoint, module=Computes()),
        "a module whose weights overlap": lambda: deltasync.Receiver(trained.endpoint, module=Module(**halves())),
        "files={'a': 'text'}": lambda: manager(files={"a": "text"}),
        "files=5": lambda: manager(files=5),
        "files=['x']": lambda: manager(files=["x"]),
        "files={5: b''}": lambda: manager(files={5: b""}),
        "a file outside of the directory": lambda: manager(files={"../x": b""}),
        "weights_file=7": lambda: manager(weights_file=7),
        "weights_file='../w'": lambda: manager(weights_file="../w"),
        "dtype= of a Layout": lambda: deltasync.WeightManager(own.layout, dtype="bf16"),
        "tensor_parallel= of a Layout": lambda: deltasync.WeightManager(own.layout, tensor_parallel=2),
        "tensor_parallel=-1": lambda: manager(tensor_parallel=-1),
        "a name that is no str": lambda: deltasync.WeightManager({5: torch.ones(3)}),
        "a name that is no Unicode": lambda: deltasync.WeightManager({"w\udc80": torch.ones(3)}),
        "the same names for offload": lambda: own.offload({5: torch.ones(3)}),
        "the same of Unicode": lambda: own.offload({"w\udc80": torch.ones(3)}),
        "label='\\udc80'": lambda: own.offload(weights(), label="\udc80"),
        "name=7": lambda: manager(name=7),
        "agent=5": lambda: manager(agent=5),
        "agent_args=5": lambda: manager(agent_args=5),
        "shm_dir=5": lambda: manager(shm_dir=5),
        "hf=5": lambda: manager(hf=5),
        "prove='maybe'": lambda: manager(prove="maybe"),
        "a page for a model that is none of Megatron's": lambda: manager(tables=["mine.toml"]),
        "threads=-1": lambda: manager(threads=-1),
        "timeout=-1": lambda: manager(timeout=-1),
        "a sparse tensor": lambda: deltasync.WeightManager({"w": torch.ones(3).to_sparse()}),
        "threads=-1 of a receiver": lambda: deltasync.Receiver(own.endpoint, threads=-1),
        "threads='2' of a receiver": lambda: deltasync.Receiver(own.endpoint, threads="2"),  # type: ignore[arg-type]
        "streams=-1": lambda: deltasync.Receiver(own.endpoint, streams=-1),
        "streams=0": lambda: deltasync.Receiver(own.endpoint, streams=0),
        "link_gbps='10'": lambda: deltasync.Receiver(own.endpoint, link_gbps="10"),  # type: ignore[arg-type]
        "token=b'...'": lambda: deltasync.Receiver(own.endpoint, token=b"0" * 32),  # type: ignore[arg-type]
        "name=7 of a receiver": lambda: deltasync.Receiver(own.endpoint, name=7),  # type: ignore[arg-type]
        "directory=5": lambda: deltasync.Receiver(own.endpoint, directory=5),  # type: ignore[arg-type]
        "plan=5": lambda: deltasync.Receiver(own.endpoint, plan=5),  # type: ignore[arg-type]
        "a function that makes no plan": lambda: deltasync.Receiver(own.endpoint, plan=len),  # type: ignore[arg-type]
        "ignore=5": lambda: deltasync.Receiver(own.endpoint, ignore=5),  # type: ignore[arg-type]
        "engine_streams=5": lambda: deltasync.Receiver(own.endpoint, engine_streams=5),  # type: ignore[arg-type]
        "engine_streams={0: 'x'}": lambda: deltasync.Receiver(own.endpoint, engine_streams={0: "x"}),
        "engine_streams={0: 2}": lambda: deltasync.Receiver(own.endpoint, engine_streams={0: 2}),
        "a background pull of what is held": lambda: waits_for_more(own.endpoint),
        "a state dict as module": lambda: deltasync.Receiver(own.endpoint, module=weights()),
    }


def mistakes_of(receiver: deltasync.Receiver, epoch: int) -> dict[str, Callable[[], Any]]:
    """Each leaves it without a version."""
    other = deltasync.Version(epoch - 1, 7)
    return {
        "update(timeout='1')": lambda: receiver.update(timeout="1"),  # type: ignore[arg-type]
        "prepare(timeout=nan)": lambda: receiver.prepare(timeout=float("nan")),
        "lag(timeout=None)": lambda: receiver.lag(timeout=None),  # type: ignore[arg-type]
        "update(timeout=-1)": lambda: receiver.update(timeout=-1),
        "update('\\udc80')": lambda: receiver.update("\udc80"),
        "load_into(5)": lambda: receiver.load_into(5),
        "repair('x')": lambda: receiver.repair("x"),
        "repair(['x'])": lambda: receiver.repair(["x"]),  # type: ignore[list-item]
        "repair([-1])": lambda: receiver.repair([-1]),
        "rebind(part=5)": lambda: receiver.rebind(part=5),  # type: ignore[arg-type]
        "update('step 9')": lambda: receiver.update("step 9", timeout=2),
        "update(9)": lambda: receiver.update(9, timeout=2),
        "prepare(9) that is not there yet": lambda: receiver.prepare(9).wait(0.1),
        "update(2) that only deltas lead to": lambda: receiver.update(2, timeout=30),
        "a version of another trainer": lambda: receiver.update(other, timeout=30),
    }


def waits_for_more(endpoint: str) -> None:
    with deltasync.Receiver(endpoint, background=True) as receiver:
        receiver.update()
        receiver.commit(timeout=0.1)


def said(mistake: Callable[[], Any], directory: Path, *managers: deltasync.WeightManager) -> str:
    """Class and message, without what is another one in each run."""
    with pytest.raises(errors.Error) as caught:
        mistake()
    text = f"{type(caught.value).__name__}: {caught.value}".replace(str(directory), "DIRECTORY")
    for made in managers:
        assert made.agent is not None
        for one, name in (
            (made.agent.name, "NAME"),
            (made.endpoint, "127.0.0.1:PORT"),
            (f"pid {made.agent.pid}", "pid PID"),
            (f"{made.epoch:016x}", "EPOCH"),
            (f"{made.epoch - 1:016x}", "EPOCH-1"),
        ):
            text = text.replace(one, name)
    return re.sub(r"deltasync-\d+-[0-9a-f]{8}", "FREE_NAME", text)


@pytest.fixture
def own(segment_name: str) -> Iterator[deltasync.WeightManager]:
    with manager(name=segment_name) as made:
        made.offload(weights())
        yield made


@pytest.fixture
def trained() -> Iterator[deltasync.WeightManager]:
    """With several versions in the agent's ring."""
    weight = torch.zeros(4 << 10)
    tensors = {"w": weight, "v": weight.clone()}
    with deltasync.WeightManager(tensors) as made:
        for step in range(1, 5):
            weight[step] = 1
            made.offload(tensors, label=f"step {step}")
            made.wait_ready()
        yield made


def test_messages_are_those_that_are_kept(
    shm_files: set[str], own: deltasync.WeightManager, trained: deltasync.WeightManager, tmp_path: Path
) -> None:
    with deltasync.Receiver(trained.endpoint) as receiver:
        made = {**mistakes(own, trained, tmp_path), **mistakes_of(receiver, trained.epoch)}
        found = {name: said(mistake, tmp_path, own, trained) for name, mistake in made.items()}
        assert receiver.update().version.number == 4
    text = "".join(f"{name}\n    {message}\n" for name, message in found.items())
    if os.environ.get("UPDATE_MESSAGES"):
        KEPT.write_text(text)
    assert text == KEPT.read_text()
    assert own.offload(weights()).version.number == 2  # none of them has done harm


def test_a_pull_says_why_it_failed_where_its_time_is_over(own: deltasync.WeightManager) -> None:
    with deltasync.Receiver(own.endpoint) as receiver:
        end = time.monotonic() + 0.1
        asked = Prepared(receiver, 9, end, newer=False)
        threading.Timer(0.3, asked._future.set_exception, [errors.DeadlinePassed("it waited for version 9")]).start()
        with pytest.raises(errors.DeadlinePassed, match="it waited for version 9"):
            asked.commit(timeout=0.1)


def test_two_managers_without_a_name_stand_side_by_side() -> None:
    with manager() as one, manager() as other:
        for each in (one, other):
            each.offload(weights())
            with deltasync.Receiver(each.endpoint) as receiver:
                assert receiver.update().version.number == 1


@pytest.mark.parametrize("dtype", ["bf16", "BF16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_by_each_of_its_names(dtype: Any) -> None:
    layout, _ = deltasync.layout_of(weights(), dtype=dtype)
    assert layout[0].dtype == "BF16"


def test_numbers_of_other_integer_types(own: deltasync.WeightManager) -> None:
    assert own.offload(weights(), version=torch.tensor(5)).version.number == 5
