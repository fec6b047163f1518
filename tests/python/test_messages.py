"""What a user reads after a mistake: each message names the argument, and what helps. messages.txt keeps them all.

UPDATE_MESSAGES=1 python -m pytest tests/python/test_messages.py      writes it anew; read the difference
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltasync
import pytest
from deltasync import errors

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


def mistakes(own: deltasync.WeightManager, folder: Path) -> dict[str, Callable[[], Any]]:
    assert own.agent is not None
    empty = folder / "empty"
    empty.touch(0o600)
    open_to_all = folder / "open"
    open_to_all.write_text("a secret of many bytes")
    open_to_all.chmod(0o644)

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
        "model=3": lambda: deltasync.WeightManager(3),
        "model='nowhere'": lambda: deltasync.WeightManager(folder / "nowhere"),
        "a list in the model": lambda: deltasync.WeightManager({"w": [1, 2, 3]}),
        "dtype='bloat16'": lambda: manager(dtype="bloat16"),
        "dtype=16": lambda: manager(dtype=16),
        "the name is taken": lambda: manager(name=own.agent.name),
        "the port is taken": lambda: manager(listen=own.endpoint),
        "beyond loopback without a token": lambda: manager(listen="0.0.0.0:0"),
        "listen without a port": lambda: manager(listen="10.0.0.5"),
        "listen on a port that is none": lambda: manager(listen="127.0.0.1:70000"),
        "no token file": lambda: manager(token_file=folder / "token"),
        "an empty token file": lambda: manager(token_file=empty),
        "a token file that others may read": lambda: manager(token_file=open_to_all),
        "a token file for the receiver that others may read": lambda: deltasync.Receiver(
            own.endpoint, token_file=open_to_all
        ),
        "no token file for the receiver": lambda: deltasync.Receiver(own.endpoint, token_file=folder / "token"),
        "no shm_dir": lambda: manager(shm_dir=folder / "shm"),
        "no agent": lambda: manager(agent=folder / "agent.sock", timeout=0.2),
        "dtype= forgotten": lambda: module(w=torch.ones(3, dtype=torch.bfloat16)),
        "a module of another shape": lambda: module(w=torch.ones(4)),
        "a module of other names": lambda: module(v=torch.ones(3)),
        "a module with more": lambda: module(w=torch.ones(3), v=torch.ones(3)),
    }


def said(mistake: Callable[[], Any], own: deltasync.WeightManager, folder: Path) -> str:
    """Class and message, without what is another one in each run."""
    assert own.agent is not None
    with pytest.raises(errors.Error) as caught:
        mistake()
    text = f"{type(caught.value).__name__}: {caught.value}".replace(str(folder), "FOLDER")
    for one, name in ((own.agent.name, "NAME"), (own.endpoint, "127.0.0.1:PORT"), (f"pid {own.agent.pid}", "pid PID")):
        text = text.replace(one, name)
    return re.sub(r"deltasync-\d+-[0-9a-f]{8}", "FREE_NAME", text)


@pytest.fixture
def own(segment_name: str) -> Iterator[deltasync.WeightManager]:
    with manager(name=segment_name) as made:
        made.offload(weights())
        yield made


def test_messages_are_those_that_are_kept(shm_files: set[str], own: deltasync.WeightManager, tmp_path: Path) -> None:
    found = {name: said(mistake, own, tmp_path) for name, mistake in mistakes(own, tmp_path).items()}
    text = "".join(f"{name}\n    {message}\n" for name, message in found.items())
    if os.environ.get("UPDATE_MESSAGES"):
        KEPT.write_text(text)
    assert text == KEPT.read_text()
    assert own.offload(weights()).version.number == 2  # none of them has done harm


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
