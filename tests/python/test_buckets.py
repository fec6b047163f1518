"""A trainer hands its tensors to an engine of the same host through shared buckets."""

from __future__ import annotations

import dataclasses
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltasync
import numpy as np
import pytest
import torch
from control_fleet import Client, Engine
from deltasync import BucketSender, Receiver, buckets
from deltasync.errors import (
    Aborted,
    CoverageError,
    DeadlinePassed,
    InvalidArgument,
    LayoutMismatch,
    NotFound,
    UnmatchedWeights,
)

#: No wait of a test that passes comes near it.
LIMIT_S = 60.0
#: Smaller than the larger tensors.
BUCKET_BYTES = 1 << 20


class Model(torch.nn.Module):
    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(3000, 512, dtype=dtype)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 96, dtype=dtype) for _ in range(5))
        self.norm = torch.nn.LayerNorm(512, dtype=torch.float32)
        self.head = torch.nn.Linear(512, 3000, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("scalar", torch.tensor(float(seed)))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "engine.sock")


class Trainer:
    """Runs `play(sender)` on a thread; what it raises is `error`."""

    def __init__(self, path: str, model: Any, play: Callable[[BucketSender], None], **options: Any) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                with BucketSender(path, model, bucket_bytes=BUCKET_BYTES, timeout=LIMIT_S, **options) as sender:
                    play(sender)
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[2])
import deltasync
from test_buckets import BUCKET_BYTES, Model
with deltasync.BucketSender(sys.argv[1], Model(0), bucket_bytes=BUCKET_BYTES) as sender:
    for step in range(1, 4):
        model = Model(step)
        sender.send(((name, tensor.clone()) for name, tensor in model.state_dict().items() if name != "head.weight"),
                    step, label=f"step_{step}")
"""


def test_another_process_writes_every_version_into_the_module(path: str) -> None:
    live = Model(100)
    weight = live.embed.weight.data_ptr()
    here = str(Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", PROGRAM, path, here]) as trainer:
        with Receiver(f"bucket:{path}", module=live, timeout=LIMIT_S) as receiver:
            for step in range(1, 4):
                report = receiver.update(step)
                assert (report.version.number, report.version.label, report.mode) == (step, f"step_{step}", "full")
                assert same(live, Model(step))
            assert receiver.attest() == []
            assert receiver.rollback() is not None and same(live, Model(2))
        assert trainer.wait(LIMIT_S) == 0
    assert live.embed.weight.data_ptr() == weight


def test_two_ranks_send_a_plan_of_fused_and_sliced_memory(path: str) -> None:
    """Whatever a placement can say works here too: rows of one tensor of each of two, in one live memory."""
    tensors = {"q": torch.randn(64, 256), "k": torch.randn(64, 256), "unused": torch.randn(7)}
    fused = torch.zeros(64, 256)

    def plan(layout: deltasync.Layout) -> deltasync.PlacementPlan:
        made = deltasync.PlacementPlan()
        memory = made.add_memory("qk", fused.data_ptr(), fused.nbytes)
        for number, name in enumerate(("q", "k")):
            made.place(name, (32, 0, 32, 256), memory, number * 32 * 1024, 1024, 4)
            made.ignore(name, (0, 0, 32, 256))
        made.ignore("unused")
        return made

    epoch = deltasync.make_epoch()

    def play(sender: BucketSender) -> None:
        assert sender.send(tensors, 7) == deltasync.Version(epoch, 7)

    def rank(number: int, names: list[str]) -> Trainer:
        return Trainer(path, tensors, play, rank=number, ranks=2, tensors=names, epoch=epoch)

    with rank(0, ["q"]) as first, rank(1, ["unused", "k"]) as second:
        with Receiver(f"bucket:{path}", plan=plan, timeout=LIMIT_S) as receiver:
            receiver.update(7)
    assert first.error is None and second.error is None
    assert torch.equal(fused, torch.cat([tensors["q"][32:], tensors["k"][32:]]))


def test_tied_weights_that_two_ranks_hold_are_sent_by_one(path: str) -> None:
    trained, live, epoch = Model(1), Model(100), deltasync.make_epoch()
    layout, _ = deltasync.layouts.layout_of(trained)
    rest = [tensor.name for tensor in layout if tensor.name != "embed.weight"]

    def rank(number: int, names: list[str]) -> Trainer:
        state = trained.state_dict()  # head.weight, too
        return Trainer(
            path, trained, lambda sender: sender.send(state, 1), rank=number, ranks=2, tensors=names, epoch=epoch
        )

    with rank(0, ["embed.weight"]) as first, rank(1, rest) as second:
        with Receiver(f"bucket:{path}", module=live, timeout=LIMIT_S) as receiver:
            receiver.update(1)
    assert first.error is None and second.error is None and same(live, trained)


def test_weights_that_slept_without_a_shadow_wake_before_the_trainer_sends_the_next(path: str) -> None:
    live, awake = Model(100), threading.Event()

    def play(sender: BucketSender) -> None:
        sender.send(Model(1), 1)
        assert awake.wait(LIMIT_S)
        sender.send(Model(2), 2)

    with Trainer(path, Model(1), play) as trainer, Receiver(f"bucket:{path}", module=live, timeout=LIMIT_S) as receiver:
        receiver.update(1)
        engine = Engine(live)
        with deltasync.RolloutControl(engine, receiver) as control:
            client = Client(control.endpoint, timeout=LIMIT_S)
            client.post("/sleep?level=2")
            client.post("/wake_up")
            assert not engine.asleep and not engine.admits
            awake.set()
            client.post("/v1/update_weights", {"version": "2"})
            assert engine.admits and same(live, Model(2))
        engine.close()
    assert trainer.error is None


@pytest.mark.parametrize("policy", ["follow", "wait", "fail"])
def test_a_trainer_that_starts_again_is_later_than_what_the_engine_has(path: str, tmp_path: Path, policy: str) -> None:
    """Whatever brought that: an agent's trainer, of which it knows nothing, or the one before. The engine starts again
    each time, too."""
    tensors = {"a": torch.zeros(4)}

    def of_an_agent(sender: BucketSender) -> None:
        sender.send(tensors, deltasync.Version(7 << 32, 9))

    def own(sender: BucketSender) -> None:
        assert sender.send(tensors) == deltasync.Version(sender.epoch, 1)
        assert sender.send(tensors) == deltasync.Version(sender.epoch, 2)

    taken: list[tuple[int, int]] = []
    for play in (of_an_agent, own, own):
        with (
            Trainer(path, tensors, play) as trainer,
            Receiver(f"bucket:{path}", directory=tmp_path, on_older_epoch=policy, timeout=LIMIT_S) as receiver,
        ):
            for _ in range(2 if play is own else 1):
                version = receiver.follow().commit().version
                taken.append((version.epoch >> 32, version.number))
        assert trainer.error is None
    assert taken == [(7, 9), (8, 1), (8, 2), (9, 1), (9, 2)]


def test_rank_0_has_the_epoch_for_all(path: str) -> None:
    tensors = {"a": torch.zeros(4), "b": torch.ones(4)}
    epochs: queue.Queue[int] = queue.Queue()

    def first(sender: BucketSender) -> None:
        epochs.put(sender.epoch)
        sender.send(tensors)

    def second(sender: BucketSender) -> None:
        sender.send(tensors)

    with Trainer(path, tensors, first, ranks=2, tensors=["a"]) as one:
        with Receiver(f"bucket:{path}", background=True, timeout=LIMIT_S) as receiver:
            epoch = epochs.get(timeout=LIMIT_S)
            with Trainer(path, tensors, second, rank=1, ranks=2, tensors=["b"], epoch=epoch) as other:
                assert receiver.commit().version == deltasync.Version(epoch, 1)
    assert one.error is None and other.error is None


def test_ranks_count_the_calls_that_fail_before_they_offer_anything(path: str) -> None:
    tensors = {"a": torch.zeros(4), "b": torch.ones(4)}
    given_up = threading.Event()

    def late(sender: BucketSender) -> None:
        with pytest.raises(DeadlinePassed):
            sender.send(tensors, timeout=0.1)
        given_up.set()
        sender.send(tensors)

    def wrong(sender: BucketSender) -> None:
        with pytest.raises(InvalidArgument, match="neither a module"):
            sender.send(5)
        assert given_up.wait(LIMIT_S)
        sender.send(tensors)

    epoch = deltasync.make_epoch()

    def rank(number: int, play: Callable[[BucketSender], None]) -> Trainer:
        return Trainer(path, tensors, play, rank=number, ranks=2, tensors=["ab"[number]], epoch=epoch)

    with rank(0, late) as first, rank(1, wrong) as second:
        with Receiver(f"bucket:{path}", timeout=LIMIT_S) as receiver:
            receiver.update(2)
    assert first.error is None and second.error is None


def test_a_failed_version_does_not_end_the_background(path: str) -> None:
    tensors = {"a": torch.zeros(4)}

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(4)
        raise RuntimeError("the trainer's own")

    def play(sender: BucketSender) -> None:
        for number in (1, 4):
            sender.send(tensors, number)
            with pytest.raises(RuntimeError):
                sender.send(broken(), number + 1)
        sender.send(tensors, 7)

    with Trainer(path, tensors, play) as trainer:
        with Receiver(f"bucket:{path}", background=True, timeout=LIMIT_S) as receiver:
            assert [receiver.commit().version.number for _ in range(3)] == [1, 4, 7]
    assert trainer.error is None


def test_a_generator_may_make_the_next_tensor_in_the_memory_of_the_one_before(path: str) -> None:
    memory = torch.empty(300_000)

    def tensors(step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(8):
            yield f"w{number}", memory.fill_(100 * step + number).reshape(300, 1000)

    def play(sender: BucketSender) -> None:
        for step in (1, 2):
            sender.send(tensors(step))

    layout, _ = deltasync.layout_of([(f"w{number}", np.empty((300, 1000), np.float32)) for number in range(8)])
    with Trainer(path, layout, play) as trainer, Receiver(f"bucket:{path}", timeout=LIMIT_S) as receiver:
        for step in (1, 2):
            receiver.update(step)
            for number, (_, array) in enumerate(receiver.arrays()):
                assert (array == 100 * step + number).all()
    assert trainer.error is None


def test_tensors_are_cast_made_dense_and_copied_from_devices(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's tensors take another way into the bucket; on this host it is shown with the host's."""
    from_device: list[str] = []
    describe = buckets.describe

    def as_if_on_a_device(value: Any, name: str) -> Any:
        array = describe(value, name)
        if name in ("large", "small", "none"):
            from_device.append(name)
            return dataclasses.replace(array, device=0)
        return array

    monkeypatch.setattr(buckets, "describe", as_if_on_a_device)
    tensors = {
        "cast": torch.randn(10, 20),
        "transposed": torch.randn(30, 40).to(torch.bfloat16).t(),
        "rows": torch.randn(64, 64).to(torch.bfloat16)[:, :32],
        "large": torch.randn(2000, 800).to(torch.bfloat16),
        "small": torch.randn(3).to(torch.bfloat16),
        "none": torch.empty(0, 4).to(torch.bfloat16),
    }
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    with Trainer(path, wanted, lambda sender: sender.send(tensors) and None) as trainer:
        with Receiver(f"bucket:{path}", timeout=LIMIT_S) as receiver:
            receiver.update(1)
            got = {name: tensor.clone() for name, tensor in receiver.tensors()}
    assert trainer.error is None
    assert from_device == ["large", "small", "none"]
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda good: {name: t for name, t in good.items() if name != "b"}, CoverageError, "not come: b"),
        (lambda good: good | {"c": good["a"].clone()}, NotFound, "no tensor 'c'"),
        (lambda good: good | {"b": torch.zeros(3, 3)}, InvalidArgument, r"b: its shape is \[3, 3\]"),
        (lambda good: good | {"b": torch.zeros(4, 4, dtype=torch.int32)}, InvalidArgument, "b: its dtype is I32"),
        (lambda good: [*good.items(), ("a", good["a"])], deltasync.errors.AlreadyExists, "a is sent twice"),
    ],
)
def test_what_does_not_match_is_named_on_both_sides_and_the_next_version_works(
    path: str, wrong: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    good = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}

    def play(sender: BucketSender) -> None:
        sender.send(good, 1)
        with pytest.raises(error, match=words):
            sender.send(wrong(good), 2)
        sender.send({name: tensor + 1 for name, tensor in good.items()}, 3)

    with Trainer(path, good, play) as trainer, Receiver(f"bucket:{path}", timeout=LIMIT_S) as receiver:
        receiver.update(1)
        with pytest.raises(Aborted, match=words):
            receiver.update(2)
        assert receiver.version is not None and receiver.version.number == 1
        assert all(np.array_equal(array, good[name].numpy()) for name, array in receiver.arrays())
        receiver.update(3)
        assert all(np.array_equal(array, good[name].numpy() + 1) for name, array in receiver.arrays())
    assert trainer.error is None


def test_memory_that_is_not_there_is_refused(path: str) -> None:
    tensors = {"a": torch.zeros(3, 400)}
    views = [torch.empty(9000)[first : first + 1200].view(3, 400) for first in (0, 5000)]
    views += [torch.empty(2400)[1200:].view(400, 3).t(), torch.empty(2400, dtype=torch.float64)[1200:].view(3, 400)]
    foreign = {"data": (64, True), "shape": (3, 400), "typestr": "<f4", "version": 3}
    at_64 = np.asarray(type("Foreign", (), {"__array_interface__": foreign})())

    def play(sender: BucketSender) -> None:
        for number, wrong in enumerate((*views, at_64), 1):
            with pytest.raises(InvalidArgument, match="a: the source has no memory"):
                sender.send({"a": wrong}, number)
        sender.send(tensors, 9)

    for view in views:
        view.untyped_storage().resize_(0)
    with Trainer(path, tensors, play) as trainer, Receiver(f"bucket:{path}", timeout=LIMIT_S) as receiver:
        for number in range(1, len(views) + 2):
            with pytest.raises(Aborted, match="no memory"):
                receiver.update(number)
        receiver.update(9)
    assert trainer.error is None


def test_an_exception_of_the_iterable_gives_the_version_up_and_ends_the_generator(path: str) -> None:
    ended = threading.Event()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield "a", torch.zeros(4)
            yield "a wrong name", torch.zeros(4)
        finally:
            ended.set()

    def play(sender: BucketSender) -> None:
        with pytest.raises(NotFound):
            sender.send(broken())

    with Trainer(path, {"a": torch.zeros(4)}, play) as trainer:
        with Receiver(f"bucket:{path}", timeout=LIMIT_S) as receiver, pytest.raises(Aborted, match="a wrong name"):
            receiver.update(1)
    assert trainer.error is None
    assert ended.is_set()


def test_a_module_of_another_model_is_refused_before_anything_is_written(path: str) -> None:
    other = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4, bias=False)})
    before = other["a"].weight.clone()
    tensors = {"b.weight": torch.randn(4, 4)}
    with Trainer(path, tensors, lambda sender: None) as trainer:
        with pytest.raises(UnmatchedWeights, match=r"b\.weight"):
            Receiver(f"bucket:{path}", module=other, timeout=LIMIT_S)
    assert trainer.error is None
    with Trainer(path, {"a.weight": torch.randn(5, 4)}, lambda sender: None):
        with pytest.raises(LayoutMismatch, match=r"a\.weight"):
            Receiver(f"bucket:{path}", module=other, timeout=LIMIT_S)
    assert torch.equal(other["a"].weight, before)


def test_arguments_that_cannot_be(path: str) -> None:
    tensors = {"a": torch.zeros(4)}
    with pytest.raises(InvalidArgument, match="several ranks without epoch="):
        BucketSender(path, tensors, rank=1, ranks=2)
    with pytest.raises(NotFound, match="no tensor 'b'"):
        BucketSender(path, tensors, tensors=["b"])
    with pytest.raises(CoverageError, match="names none"):
        BucketSender(path, tensors, tensors=[])
    with pytest.raises(deltasync.errors.DeadlinePassed, match="no engine answered"):
        BucketSender(path, tensors, timeout=0.05)
    with Trainer(path, tensors, lambda sender: None) as trainer:
        with Receiver(f"bucket:{path}", timeout=LIMIT_S):
            pass
    assert trainer.error is None
