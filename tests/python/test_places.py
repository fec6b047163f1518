"""A module's memory that several of the trainer's tensors lie in: written once, and named where that cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable

import deltasync
import pytest
from deltasync import errors

torch = pytest.importorskip("torch")


class Tied(torch.nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        torch.nn.init.constant_(self.embed.weight, fill)


class Views(torch.nn.Module):
    """Its parts have names of their own: rows, columns, and the same once more."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.full((6, 4), fill))
        for name, part in {"a": self.qkv.data[:2], "b": self.qkv.data[2:], "c": self.qkv.data[:, 1:3]}.items():
            self.register_buffer(name, part)


class Columns(torch.nn.Module):
    """Parts of one memory, none of the other: side by side, and one of them under two names."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        memory = torch.full((6, 4), fill)
        self.left = torch.nn.Parameter(memory[:, :1])
        self.right = torch.nn.Parameter(memory[:, 1:])
        self.register_buffer("again", memory[:, 1:])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            Tied,
            "1 tensor(s) lie in memory of others, and have what is published of those: head.weight (in embed.weight)",
        ),
        (Views, "3 tensor(s) lie in memory of others, and have what is published of those: a (in qkv), c, b"),
        (Columns, "1 tensor(s) lie in memory of others, and have what is published of those: again (in right)"),
    ],
)
def test_shared_memory_is_written_once(
    kind: Callable[[float], torch.nn.Module], names: str, segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained, served = kind(1.0), kind(0.0)
    state = trained.state_dict()  # each name, whatever it shares
    with deltasync.WeightManager(state, name=segment_name) as manager:
        manager.offload(state)
        with caplog.at_level(logging.WARNING, "deltasync.rollout"):
            receiver = deltasync.Receiver(manager.endpoint, module=served, attest_commits=True)
        assert [record.getMessage() for record in caplog.records] == [f"module: {names}"]
        with receiver:
            for number in (1, 2):
                assert receiver.update(number).version.number == number
                for name, tensor in served.state_dict().items():
                    assert torch.equal(tensor, state[name]), name
                with torch.no_grad():
                    for parameter in trained.parameters():
                        parameter[::2, 0] += number
                        parameter[1] *= 3
                manager.offload(state)
            assert receiver.attest() == []


class Computes(torch.nn.Module):
    """Its state has more than its parameters."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((6, 4), fill))

    def state_dict(self, **options):  # type: ignore[no-untyped-def, override]
        state = super().state_dict(**options)
        return {**state, "half": state["w"].detach().half()}


def test_what_a_module_computes_is_no_memory(segment_name: str) -> None:
    trained, served = Computes(1.0), Computes(0.0)
    with deltasync.WeightManager(trained, name=segment_name) as manager:
        manager.offload()
        with pytest.raises(errors.UnmatchedWeights, match=r"half \(the module's state_dict\(\) computes it"):
            deltasync.Receiver(manager.endpoint, module=served)
        with deltasync.Receiver(manager.endpoint, module=served, ignore=["half"]) as receiver:
            receiver.update()
    assert torch.equal(served.state_dict()["half"], trained.state_dict()["half"])
    with deltasync.WeightManager({"w": torch.full((6, 4), 5.0)}, name=segment_name) as manager:
        manager.offload({"w": torch.full((6, 4), 5.0)})
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:  # it follows, and need not be covered
            receiver.update()
    assert bool((served.state_dict()["half"] == 5).all())


def test_a_weight_that_is_tied_no_more_is_refused(segment_name: str) -> None:
    state, served = Tied(1.0).state_dict(), Tied(0.0)
    with deltasync.WeightManager(state, name=segment_name) as manager:
        manager.offload(state)
        with deltasync.Receiver(manager.endpoint, module=served) as receiver:
            receiver.update()
            served.head.weight = torch.nn.Parameter(served.head.weight.detach().clone())
            with pytest.raises(errors.LayoutMismatch, match="head.weight: the module keeps it elsewhere"):
                receiver.update()


def test_a_weight_that_is_written_in_part_is_named(segment_name: str) -> None:
    class Fused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = torch.nn.Parameter(torch.zeros(4, 4))
            self.q = torch.nn.Parameter(self.fused.data[:2])
            self.first = torch.nn.Parameter(self.q.data[0])  # which is all in q

    with deltasync.WeightManager({"q": torch.ones(2, 4)}, name=segment_name) as manager:
        manager.offload({"q": torch.ones(2, 4)})
        with pytest.raises(errors.UnmatchedWeights, match="fused") as raised:
            deltasync.Receiver(manager.endpoint, module=Fused())
        assert "first" not in str(raised.value)
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update()
            with pytest.raises(errors.LayoutMismatch, match=r"lacks \[\], the version \['fused'\]"):
                receiver.load_into(Fused())


@pytest.mark.parametrize("shape", [(1, 4), (2, 4)])  # one that copy_ broadcasts, one that it refuses
def test_a_weight_of_another_shape_is_named_before_anything_is_written(
    shape: tuple[int, int], segment_name: str
) -> None:
    state = {"bias": torch.ones(3), "weight": torch.ones(shape)}
    with deltasync.WeightManager(state, name=segment_name) as manager:
        manager.offload(state)
        module = torch.nn.Linear(4, 3)
        torch.nn.init.zeros_(module.bias)
        with deltasync.Receiver(manager.endpoint) as receiver:
            receiver.update()
            with pytest.raises(errors.LayoutMismatch, match=rf"weight: .*\(3, 4\), the version \({shape[0]}, 4\)"):
                receiver.load_into(module)
        assert not module.bias.any()
