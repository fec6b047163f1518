"""What the tests of gathered tensors share: plans and managers of a fake trainer, and what came of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import deltasync  # noqa: E402
from deltasync import megatron  # noqa: E402
from fake_trainer import Fake, Model, same_bits  # noqa: E402

LONG_S = 120.0
SOON_S = 20.0


def plan_of(fake: Fake, rank: int, size: int, **options: Any) -> tuple[Any, Model]:
    model = fake.model(rank, size)
    options = {"mode": "gathered", "process_group": size > 1, **options}
    return megatron.plan(model, fake.directory, tables=[fake.page], **options), model


def error_of(work: Any) -> tuple[str, str, float]:
    began = time.monotonic()
    with pytest.raises(Exception) as raised:  # noqa: PT011
        work()
    return type(raised.value).__name__, str(raised.value), time.monotonic() - began


@contextlib.contextmanager
def manager_of(fake: Fake, model: Model, name: str, **options: Any) -> Iterator[deltasync.WeightManager]:
    options = {"timeout": LONG_S, "prove": "first", **options}
    with deltasync.WeightManager(model, hf=fake.directory, tables=[fake.page], name=name, **options) as manager:
        yield manager


def received(manager: deltasync.WeightManager, expected: dict[str, torch.Tensor]) -> list[str]:
    """The tensors that are others."""
    with deltasync.Receiver(manager.endpoint, timeout=LONG_S) as receiver:
        receiver.update(manager.version)
        got = dict(receiver.tensors())
        assert got.keys() == expected.keys()
        return [name for name in expected if not same_bits(got[name].clone(), expected[name])]
