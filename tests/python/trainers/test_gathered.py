"""Tensors put together of what ranks have: of a trainer that is cut as Megatron's are (fake_trainer.py), over gloo."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import deltasync  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deltasync import _carriers, _gather_plan, _gathering, _nodes, errors, megatron  # noqa: E402
from fake_trainer import Fake, Model, change, same_bits  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

LONG_S = 120.0
SOON_S = 20.0


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def plan_of(fake: Fake, rank: int, size: int, **options: Any) -> tuple[Any, Model]:
    model = fake.model(rank, size)
    options = {"mode": "gathered", "process_group": size > 1, **options}
    return megatron.plan(model, fake.directory, tables=[fake.page], **options), model


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 40_000, 1 << 30])
def test_each_rank_gets_each_tensor(fake: Fake, tmp_path: Path, size: int, bucket: int) -> None:
    expected = fake.expected()

    def export(rank: int) -> tuple[list[str], list[str], list[str]]:
        plan, _ = plan_of(fake, rank, size)
        got = megatron.export_hf_named_params(plan, bucket_bytes=bucket, timeout=LONG_S)
        wrong, names = [], []
        for name, tensor in got:
            names.append(name)
            if not same_bits(tensor, expected[name]):
                wrong.append(name)
        return names, wrong, plan.layout.names()

    for names, wrong, wanted in run_ranks(size, export, tmp_path):
        assert names == wanted
        assert sorted(names) == sorted(expected)
        assert not wrong


def resident_bytes(which: str) -> int:
    """Of this process: VmRSS, or VmHWM, the most that it was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which + ":"))


@pytest.mark.parametrize("bucket", [4 << 20, 12 << 20])
def test_two_buckets_are_alive_at_most(tmp_path: Path, bucket: int) -> None:
    fake = Fake(tmp_path, layers=20, width=512, apart=0)

    def export(rank: int) -> tuple[int, int, int]:
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system
        plan, _ = plan_of(fake, rank, 2)
        for _ in megatron.export_hf_named_params(plan, bucket_bytes=bucket, timeout=LONG_S):
            pass  # warm
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again from what there is
        before = resident_bytes("VmRSS")
        got = megatron.export_hf_named_params(plan, bucket_bytes=bucket, timeout=LONG_S)
        count = sum(1 for _ in got)
        return got.temporary_bytes_max, resident_bytes("VmHWM") - before, count

    total = sum(tensor.nbytes for tensor in fake.expected().values())
    assert total > 12 * (4 << 20)
    for counted, real, count in run_ranks(2, export, tmp_path):
        assert count == len(fake.expected())
        assert bucket / 2 < counted <= 2 * bucket
        assert real <= counted + (3 << 20)


def test_a_tensor_of_more_than_a_bucket_travels_alone(fake: Fake, tmp_path: Path) -> None:
    large = fake.expected()["model.0.apart"].nbytes
    plan, _ = plan_of(fake, 0, 1)
    wholes = _gather_plan.wholes_of(plan.layout, plan._made.copies, plan._made.constants, {})
    buckets = _gather_plan.for_all(wholes, large // 8)
    alone = [bucket.wholes for bucket in buckets if bucket.cost > large // 8]
    assert [[whole.nbytes for whole in bucket] for bucket in alone] == [[large]]
    assert max(len(bucket.wholes) for bucket in buckets) > 3
    assert [whole.index for bucket in buckets for whole in bucket.wholes] == [whole.index for whole in wholes]

    def export(rank: int) -> int:
        plan, _ = plan_of(fake, rank, 2)
        got = megatron.export_hf_named_params(plan, bucket_bytes=large // 8, timeout=LONG_S)
        assert sum(1 for _ in got) == len(fake.expected())
        return got.temporary_bytes_max

    for counted in run_ranks(2, export, tmp_path):
        assert 2 * large <= counted <= 2 * large + large // 4


def error_of(work: Any) -> tuple[str, str, float]:
    began = time.monotonic()
    with pytest.raises(Exception) as raised:  # noqa: PT011
        work()
    return type(raised.value).__name__, str(raised.value), time.monotonic() - began


def test_an_error_on_one_rank_is_one_on_all(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = _carriers.Elements.put
    names: dict[str, Any] = {"freed": None, "first": 0, "middle": 9, "last": 13}

    def export(rank: int) -> Any:
        plan, model = plan_of(fake, rank, 3)
        said = {}
        for name, at in names.items():
            calls = itertools.count()

            def breaks(self: Any, copy: Any, target: Any, at: Any = at, calls: Any = calls) -> None:
                if rank == 1 and next(calls) == at:
                    raise errors.NoSpace("no room on the moon")
                put(self, copy, target)

            _carriers.Elements.put = breaks
            kept = model.rows_0.data
            if name == "freed" and rank == 1:
                model.rows_0.data = kept.clone()
                model.rows_0.data.untyped_storage().resize_(0)
            said[name] = error_of(
                lambda: list(megatron.export_hf_named_params(plan, bucket_bytes=40_000, timeout=LONG_S))
            )
            model.rows_0.data = kept
        _carriers.Elements.put = put  # and the ranks are still in step
        return said, len(list(megatron.export_hf_named_params(plan, timeout=LONG_S)))

    ranks = run_ranks(3, export, tmp_path)
    for rank, (said, count) in enumerate(ranks):
        assert count == len(fake.expected())
        for name, (kind, message, took) in said.items():
            assert kind == ("InvalidArgument" if name == "freed" else "NoSpace"), (rank, name, message)
            assert ("rows_0" if name == "freed" else "moon") in message
            assert ("rank 1 failed" in message) == (rank != 1), message
            assert took < SOON_S


def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all(fake: Fake, tmp_path: Path) -> None:
    def export(rank: int) -> Any:
        plan, _ = plan_of(fake, rank, 2)
        nbytes = 0 if rank == 1 else 40_000
        said = error_of(lambda: megatron.export_hf_named_params(plan, bucket_bytes=nbytes, timeout=LONG_S))
        return said, len(list(megatron.export_hf_named_params(plan, timeout=LONG_S)))

    for (kind, message, took), count in run_ranks(2, export, tmp_path):
        assert kind == "InvalidArgument" and "bucket_bytes" in message and took < SOON_S
        assert count == len(fake.expected())


@pytest.mark.parametrize("after", [0, 1, 5, 20])
def test_a_rank_that_stops_ends_the_others(fake: Fake, tmp_path: Path, after: int) -> None:
    def export(rank: int) -> Any:
        plan, _ = plan_of(fake, rank, 3)
        got = megatron.export_hf_named_params(plan, bucket_bytes=40_000, timeout=LONG_S)
        if rank == 2:
            assert len(list(itertools.islice(got, after))) == after
            del got
            said = "stopped"
        else:
            said = " ".join(map(str, error_of(lambda: list(got))[:2]))
        return said, len(list(megatron.export_hf_named_params(plan, timeout=LONG_S)))

    first, second, third = run_ranks(3, export, tmp_path)
    assert first == second
    assert first[0].startswith("Aborted rank 2 failed: Aborted: it took no more tensors")
    assert third == ("stopped", len(fake.expected()))
    assert first[1] == len(fake.expected())


def test_a_rank_that_has_all_tensors_need_not_ask_for_more(fake: Fake, tmp_path: Path) -> None:
    def export(rank: int) -> Any:
        plan, _ = plan_of(fake, rank, 2)
        got = megatron.export_hf_named_params(plan, bucket_bytes=40_000, timeout=LONG_S)
        count = len(list(got)) if rank == 1 else len([next(got) for _ in plan.layout.names()])
        dist.barrier()
        got.close()
        return count, len(plan.layout), len(list(megatron.export_hf_named_params(plan, timeout=LONG_S)))

    for counts in run_ranks(2, export, tmp_path):
        assert len(set(counts)) == 1


def test_a_rank_that_does_nothing_ends_the_others_at_the_deadline(fake: Fake, tmp_path: Path) -> None:
    def export(rank: int) -> Any:
        plan, _ = plan_of(fake, rank, 2)
        got = megatron.export_hf_named_params(plan, bucket_bytes=40_000, timeout=2.0)
        if rank == 1:
            next(got)
            said: Any = None
            time.sleep(6)
        else:
            said = error_of(lambda: list(got)), error_of(lambda: megatron.export_hf_named_params(plan))
        return said

    def alone(rank: int) -> None:
        (tmp_path / f"said-{rank}").write_text(json.dumps(export(rank)))
        os._exit(0)  # the group is of no more use: not even for the barrier at the end

    with pytest.raises(AssertionError, match="it ended"):
        run_ranks(2, alone, tmp_path)
    results = [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2)]
    (kind, message, took), (after, refused, at_once) = results[0]
    assert kind == "DeadlinePassed"
    assert "rank 0 waited 2.0 s for the other ranks' next bucket" in message
    assert took < 5
    assert after == "Aborted" and "waited in vain" in refused and at_once < 1


def test_what_the_trainer_sends_pairs_with_nothing_of_an_export(fake: Fake, tmp_path: Path) -> None:
    def export(rank: int) -> Any:
        plan, _ = plan_of(fake, rank, 2)
        got = megatron.export_hf_named_params(plan, bucket_bytes=40_000, timeout=3.0 if rank == 1 else LONG_S)
        if rank == 0:
            next(got)  # and nobody closes it, as where an exception keeps its frame
            said = None
        else:
            said = error_of(lambda: list(got))[0]
        loss = torch.tensor([float(rank)])
        dist.all_reduce(loss)
        return said, float(loss)

    assert run_ranks(2, export, tmp_path) == [(None, 1.0), ("DeadlinePassed", 1.0)]


def test_the_next_export_ends_the_one_that_nobody_closed(fake: Fake, tmp_path: Path) -> None:
    def export(rank: int) -> Any:
        plan, _ = plan_of(fake, rank, 2)
        got = megatron.export_hf_named_params(plan, bucket_bytes=40_000, timeout=LONG_S)
        next(got)
        said = error_of(lambda: list(got)) if rank == 1 else None
        count = len(list(megatron.export_hf_named_params(plan, bucket_bytes=40_000, timeout=LONG_S)))
        return said, count, error_of(lambda: next(got))[:2] if rank == 0 else None

    first, second = run_ranks(2, export, tmp_path)
    (kind, message, took), count, _ = second
    assert kind == "Aborted" and "rank 0 failed: Aborted: it took no more tensors" in message and took < SOON_S
    assert first[1] == count == len(fake.expected())
    assert first[2] == ("Aborted", "another call of the plan has ended this export (take all tensors before it)")


@pytest.mark.parametrize("size", [1, 2])
def test_a_proof_says_which_tensors_prove_nothing(fake: Fake, tmp_path: Path, size: int) -> None:
    fake.whole["norm.1"].fill_(0.5)
    fake.whole["rows.2"].zero_()
    half = fake.whole["rows.3"]
    half.zero_()[half.shape[0] // 2 :] = 1  # in each of two ranks all alike
    save_file(fake.expected(), fake.directory / "model.safetensors")

    def prove(rank: int) -> Any:
        proof = megatron.prove(plan_of(fake, rank, size)[0], fake.directory)
        return bool(proof), sorted(proof.unproved), str(proof)

    for identical, unproved, said in run_ranks(size, prove, tmp_path):
        assert identical and unproved == ["model.1.norm", "model.2.rows"]
        assert "2 tensors prove nothing" in said and "model.2.rows" in said


class Overlapping(torch.nn.Module):
    """As Megatron's DistributedDataParallel, where the next forward gathers the parameters."""

    def __init__(self, module: Model) -> None:
        super().__init__()
        self.module, self.ddp_config = module, SimpleNamespace(overlap_param_gather=True)
        self.group, self.gathered = dist.new_group(), 0

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        self.gathered += 1
        dist.all_reduce(torch.ones(1), group=self.group)


def test_no_rank_gathers_parameters_alone(fake: Fake, tmp_path: Path) -> None:
    segment = f"pytest-{os.getpid()}-alone"

    def publish(rank: int) -> Any:
        chunk = Overlapping(fake.model(rank, 2))
        with manager_of(fake, chunk, segment) as manager:
            manager.offload()
            wrong: Any = 5 if rank == 1 else ""
            before = chunk.gathered
            said = error_of(lambda: manager.offload(label=wrong))
            alone = chunk.gathered - before
            manager.offload()
            numbers = alone, manager.version.number
            proof = error_of(lambda: megatron.prove(manager._export.plan, wrong or fake.directory))
            dist.barrier()
        return said, numbers, proof

    for rank, (said, numbers, proof) in enumerate(run_ranks(2, publish, tmp_path)):
        for kind, message, took in (said, proof):
            assert kind == "InvalidArgument" and took < SOON_S
            assert ("rank 1 failed: " in message) == (rank == 0), message
        assert "label" in said[1] and "hf_dir" in proof[1]
        assert numbers == (0, 3)


@pytest.mark.parametrize("export", ["auto", "gathered"])
def test_a_rank_that_is_late_fails_all_and_the_next_offload_succeeds(fake: Fake, tmp_path: Path, export: str) -> None:
    segment = f"pytest-{os.getpid()}-late-{export}"

    def publish(rank: int) -> Any:
        model = fake.model(rank, 2)
        with manager_of(fake, model, segment, export=export) as manager:
            manager.offload()
            if rank == 1:
                time.sleep(3)
            said = error_of(lambda: manager.offload(timeout=1.0))
            change(model, 3.0)
            manager.offload()
            wrong = received(manager, fake.expected(3.0)) if rank == 0 else []
            dist.barrier()
        return said, wrong

    for (kind, message, took), wrong in run_ranks(2, publish, tmp_path):
        assert kind == "DeadlinePassed" and "1 of 2 ranks came by the deadline: to offload" in message
        assert took < SOON_S and not wrong


def test_an_offload_after_a_wait_in_vain_is_refused(fake: Fake, tmp_path: Path) -> None:
    segment = f"pytest-{os.getpid()}-in-vain"

    def publish(rank: int) -> None:
        with manager_of(fake, fake.model(rank, 2), segment, export="gathered", bucket_bytes=1 << 16) as manager:
            manager.offload()
            if rank == 1:
                _carriers.Elements.put = lambda *_: time.sleep(6) or os._exit(0)
            said = [error_of(lambda: manager.offload(timeout=2.0))[:2] for _ in range(2)]
        (tmp_path / "said").write_text(json.dumps(said))
        os._exit(0)

    with pytest.raises(AssertionError, match="it ended"):
        run_ranks(2, publish, tmp_path)
    first, second = json.loads((tmp_path / "said").read_text())
    assert first[0] == "DeadlinePassed"
    assert second[0] == "Aborted" and "waited in vain" in second[1]


def test_buckets_that_differ_are_refused(fake: Fake, tmp_path: Path) -> None:
    def export(rank: int) -> str:
        plan, _ = plan_of(fake, rank, 2)
        return error_of(lambda: megatron.export_hf_named_params(plan, bucket_bytes=1000 + rank, timeout=LONG_S))[1]

    first, second = run_ranks(2, export, tmp_path)
    assert first == second
    assert "rank 1 has another plan, export= or bucket_bytes= than rank 0" in first


def watched(fake: Fake, room: int, bucket: int) -> list[tuple[str, int]]:
    """What a gathering of one process does: begins a bucket, gives a tensor; with the bytes that it reserves then."""
    plan, _ = plan_of(fake, 0, 1)
    wholes = _gather_plan.wholes_of(plan.layout, plan._made.copies, (), {})
    seen: list[tuple[str, int]] = []

    class Watched(_gathering.Gathering):
        def _begin(self, bucket: Any) -> None:
            super()._begin(bucket)
            seen.append((f"begin {bucket.wholes[0].index}", self._reserved))

    class Alone(_carriers.ToAll):
        def send(self) -> list[Any]:
            return []

    def carrier(bucket: Any) -> Any:
        return Alone(plan._group, bucket.wholes, "cpu")

    def elements() -> Any:
        return _carriers.Elements(plan._pieces.views(), plan._constant)

    buckets = _gather_plan.for_all(wholes, bucket)
    gathering = Watched(plan._group, buckets, carrier, elements, room, lambda: LONG_S)
    for index, _ in gathering.tensors():
        seen.append((f"take {index}", gathering._reserved))
    assert gathering._temporary <= room
    return seen


def test_buckets_begin_in_order_as_soon_as_there_is_room(fake: Fake) -> None:
    large = fake.expected()["model.0.apart"].nbytes
    seen = watched(fake, 2 * 50_000, 50_000)
    begun = [int(what.split()[1]) for what, _ in seen if what.startswith("begin")]
    assert begun == sorted(begun)
    assert all(reserved <= 100_000 or reserved >= large for _, reserved in seen)
    # A bucket begins while tensors of the one before are still to be taken.
    order = [what for what, _ in seen]
    first = {f"begin {index}": f"take {index}" for index in begun}
    ahead = [what for what, following in itertools.pairwise(order) if what in first and following != first[what]]
    assert len(begun) > 4
    assert len(ahead) >= len(begun) - 3  # but for the first, the large one, and the one after it
    # The one that is larger than all room begins too, when nothing else is alive.
    at = next(number for number, (what, reserved) in enumerate(seen) if what.startswith("begin") and reserved > 100_000)
    assert seen[at][1] <= large + 50_000
    assert order[at + 1] == order[at].replace("begin", "take")


def test_a_form_is_made_of_the_whole_tensor(fake: Fake, tmp_path: Path) -> None:
    expected = fake.expected()
    form_of, scale = "model.1.rows", "model.1.norm"

    def export(rank: int) -> Any:
        plan, _ = plan_of(fake, rank, 2)
        index, other = (plan.layout.find(name) for name in (form_of, scale))
        plan._forms[index] = _gather_plan.Form("F32", (index, other), lambda whole: [whole.t(), whole[0]])
        made = dict(megatron.export_hf_named_params(plan, bucket_bytes=40_000, timeout=LONG_S))
        return same_bits(made[form_of], expected[form_of].t()), same_bits(made[scale], expected[form_of][0]), len(made)

    assert run_ranks(2, export, tmp_path) == [(True, True, len(expected))] * 2


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


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("export", ["auto", "gathered"])
@pytest.mark.parametrize("size", [1, 3])
def test_versions_that_are_gathered(fake: Fake, tmp_path: Path, export: str, size: int, nodes: int) -> None:
    if nodes > size:
        pytest.skip("no node without a rank")
    segment = f"pytest-{os.getpid()}-{export}-{size}-{nodes}"

    def publish(rank: int) -> Any:
        node = rank * nodes // size
        _nodes.this_node = lambda: f"node{node} boot"
        model = fake.model(rank, size)
        options = {"export": export, "bucket_bytes": 1 << 20, "advertise": "127.0.0.1"}
        wrong, reports = [], []
        with manager_of(fake, model, f"{segment}-{node}", **options) as manager:
            for step in range(3):
                change(model, float(step))
                report = manager.offload(version=step + 1)
                reports.append((report.gather_s, report.convert_s, report.temporary_bytes_max))
                if rank == 0:
                    wrong += received(manager, fake.expected(*map(float, range(step + 1))))
                if size > 1:
                    dist.barrier()
            gathered = {manager.layout[whole.index].name: whole.home for whole in manager._export.plan.gathered()}
        return wrong, reports, gathered

    ranks = run_ranks(size, publish, tmp_path)
    everything = {name for name in fake.expected() if name != "model.inv_freq"}
    for wrong, reports, gathered in ranks:
        assert not wrong
        assert set(gathered) == ({"model.0.apart"} if export == "auto" else everything)
        if export == "gathered":
            assert set(gathered.values()) == set(range(size))
            assert {gathered[f"model.{layer}.own"] == layer % size for layer in range(4)} == {True}
        for gather_s, convert_s, _ in reports:
            assert (gather_s > 0 or size == 1) and convert_s > 0
    assert max(report[2] for _, reports, _ in ranks for report in reports) >= fake.expected()["model.0.apart"].nbytes


def test_direct_mode_refuses_what_lies_apart_and_gathers_nothing(tmp_path: Path) -> None:
    (tmp_path / "apart").mkdir()
    fake, apart = Fake(tmp_path, apart=0), Fake(tmp_path / "apart")
    segment = f"pytest-{os.getpid()}-direct"

    def publish(rank: int) -> Any:
        with manager_of(apart, apart.model(rank, 2), segment, export="direct") as manager:
            said = error_of(manager.offload)
        with manager_of(fake, fake.model(rank, 2), segment, export="direct") as manager:
            report = manager.offload()
        return said, (report.gather_s, report.convert_s, report.temporary_bytes_max)

    for rank, ((kind, message, _), gathered) in enumerate(run_ranks(2, publish, tmp_path)):
        assert kind == "Unsupported"
        assert "model.0.apart" in message and 'export="auto"' in message
        # What it casts, and rank 0 adds to.
        made = [tensor for name, tensor in fake.model(rank, 2).named_parameters() if name.startswith("cast")]
        norms = [tensor for name, tensor in fake.whole.items() if name.startswith("norm")] if rank == 0 else []
        gather_s, convert_s, most = gathered
        assert gather_s == 0 and convert_s > 0
        assert most == sum(tensor.nbytes // 2 for tensor in made) + sum(tensor.nbytes for tensor in norms)


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_offload_that_fails_on_one_rank_fails_on_all_and_the_next_succeeds(
    fake: Fake, tmp_path: Path, nodes: int
) -> None:
    segment = f"pytest-{os.getpid()}-fails-{nodes}"

    def publish(rank: int) -> Any:
        _nodes.this_node = lambda: f"node{rank * nodes // 3} boot"
        model = fake.model(rank, 3)
        options = {"export": "gathered", "bucket_bytes": 1 << 16, "advertise": "127.0.0.1"}
        said = {}
        with manager_of(fake, model, f"{segment}-{rank * nodes // 3}", **options) as manager:
            manager.offload(version=1)
            put, add, tensors = _carriers.Elements.put, manager._add, manager._export.plan.tensors

            def breaks(*_: Any) -> Any:
                raise errors.NoSpace("no room on the moon")

            for number, what in enumerate(("packing", "writing", "before", "number"), 2):
                if rank == 1 and what == "packing":
                    _carriers.Elements.put = breaks
                if rank == 1 and what == "writing":
                    manager._add = breaks
                if rank == 1 and what == "before":
                    manager._export.plan.tensors = breaks
                version = 1 if rank == 1 and what == "number" else number
                said[what] = error_of(lambda version=version: manager.offload(version=version))
                _carriers.Elements.put, manager._add, manager._export.plan.tensors = put, add, tensors
            change(model, 3.0)
            manager.offload(version=9)
            wrong = received(manager, fake.expected(3.0)) if rank == 0 else []
            dist.barrier()
        return said, wrong

    for rank, (said, wrong) in enumerate(run_ranks(3, publish, tmp_path)):
        assert not wrong
        for what, (kind, message, took) in said.items():
            assert took < SOON_S, (rank, what, message)
            own = "VersionConflict" if what == "number" else "NoSpace"
            # The others hear it from this one, or that the fill has ended.
            assert kind in (own, "Aborted", "VersionConflict") if rank != 1 else kind == own, (rank, what, message)
            assert "took no more" not in message


def test_the_others_hear_of_an_error_before_a_rank_cleans_up(fake: Fake, tmp_path: Path) -> None:
    segment, heard = f"pytest-{os.getpid()}-hear", tmp_path / "heard"

    def publish(rank: int) -> Any:
        _nodes.this_node = lambda: f"node{rank} boot"
        with manager_of(fake, fake.model(rank, 2), f"{segment}-{rank}", advertise="127.0.0.1") as manager:
            manager.offload()
            abort, in_time = manager._writer.abort, []

            def slow_abort() -> None:
                end = time.monotonic() + SOON_S
                while not heard.exists() and time.monotonic() < end:
                    time.sleep(0.01)
                in_time.append(heard.exists())
                abort()

            if rank == 1:
                manager._group.out_of_step, manager._writer.abort = True, slow_abort
            said = error_of(manager.offload)
            heard.touch()
            manager._group.out_of_step, manager._writer.abort = False, abort
            manager.offload()
            dist.barrier()
        return said, in_time

    (first, _), (second, in_time) = run_ranks(2, publish, tmp_path)
    assert first[0] == second[0] == "Aborted" and "waited in vain" in first[1] and "waited in vain" in second[1]
    assert in_time == [True] and first[2] < SOON_S


def test_the_timeline_shows_the_stages(fake: Fake, tmp_path: Path) -> None:
    def publish(rank: int) -> Any:
        deltasync.start_timeline(f"trainer {rank}")
        segment = f"pytest-{os.getppid()}-timeline"
        with manager_of(fake, fake.model(rank, 2), segment, export="gathered", bucket_bytes=1 << 20) as manager:
            manager.offload(version=7)
        deltasync.write_timeline(tmp_path / f"trace-{rank}.json")
        return json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]

    for events in run_ranks(2, publish, tmp_path):
        spans = [event for event in events if event.get("ph") == "X"]
        of = {name: [span for span in spans if span["name"] == name] for name in ("offload", "pack", "gather")}
        (whole,) = of["offload"]
        assert len(of["pack"]) == len(of["gather"]) >= 2
        for span in of["pack"] + of["gather"]:
            assert whole["ts"] <= span["ts"] and span["ts"] + span["dur"] <= whole["ts"] + whole["dur"] + 1
            assert span["args"]["version"] == whole["args"]["version"]
        assert sum(span["args"]["bytes"] for span in of["gather"]) > 0


def test_another_frameworks_generator(fake: Fake, tmp_path: Path) -> None:
    """As Megatron-Bridge's and verl's: every rank gets each whole tensor."""
    segment = f"pytest-{os.getpid()}-generator"

    def publish(rank: int) -> list[str]:
        plan, model = plan_of(fake, rank, 2)
        with deltasync.WeightManager(fake.directory, process_group=True, name=segment, timeout=LONG_S) as manager:
            wrong = []
            for step in range(2):
                change(model, float(step))
                manager.offload(lambda: megatron.export_hf_named_params(plan, bucket_bytes=1 << 18))
                wrong += received(manager, fake.expected(*map(float, range(step + 1)))) if rank == 0 else []
                dist.barrier()
        return wrong

    assert run_ranks(2, publish, tmp_path) == [[], []]


@pytest.mark.parametrize("made", ["together", "by another framework"])
def test_a_rank_that_cannot_write_leaves_nobody_in_what_makes_the_next_tensor(
    fake: Fake, tmp_path: Path, made: str
) -> None:
    segment = f"pytest-{os.getpid()}-leaves-{len(made)}"

    def publish(rank: int) -> Any:
        plan, _ = plan_of(fake, rank, 2)

        def another() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in fake.expected().items():
                dist.all_reduce(torch.ones(1))
                yield name, tensor

        def together() -> Any:
            return megatron.export_hf_named_params(plan, bucket_bytes=40_000)

        tensors = together if made == "together" else another
        with deltasync.WeightManager(fake.directory, process_group=True, name=segment, timeout=LONG_S) as manager:
            manager.offload(tensors)
            add, calls = manager._add, itertools.count()

            def breaks(*given: Any) -> bool:
                if rank == 0 and next(calls) == 3:
                    raise errors.NoSpace("no room on the moon")
                return add(*given)

            manager._add = breaks
            began = time.monotonic()
            with pytest.raises(Exception) as kept:  # noqa: PT011
                manager.offload(tensors)
            took = time.monotonic() - began
            manager._add = add
            manager.offload(tensors)
            dist.barrier()
        return str(kept.value), took

    (own, _), (told, took) = run_ranks(2, publish, tmp_path)
    assert "moon" in own and took < SOON_S
    assert made != "together" or "rank 0 failed: NoSpace: no room on the moon" in told
