"""Versions of tensors that ranks put together, as a manager offloads them."""

from __future__ import annotations

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
from deltasync import _carriers, _nodes, errors, megatron  # noqa: E402
from fake_trainer import Fake, Model, change  # noqa: E402
from gathered_support import LONG_S, SOON_S, error_of, manager_of, plan_of, received  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402


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
        assert kind == "DeadlinePassed"
        assert "1 of 2 ranks came by the deadline, without rank 1: to offload" in message
        assert took < SOON_S and not wrong


@pytest.mark.parametrize("export", ["auto", "direct"])
def test_a_rank_that_misses_an_offload_finds_the_others_by_its_number(tmp_path: Path, export: str) -> None:
    fake, segment = Fake(tmp_path, apart=0), f"pytest-{os.getpid()}-misses-{export}"

    def publish(rank: int) -> Any:
        model = fake.model(rank, 2)
        with manager_of(fake, model, segment, export=export) as manager:
            manager.offload(version=1)
            missed = error_of(lambda: manager.offload(version=2, timeout=1.0)) if rank == 0 else ()
            dist.barrier()
            manager.offload(version=3, timeout=SOON_S)
            other = error_of(lambda: manager.offload(version=4 + rank))
            kept = model.rows_1
            if rank == 1:
                model.rows_1 = torch.nn.Parameter(kept.detach().half())
            changed = error_of(lambda: manager.offload(version=6))
            model.rows_1 = kept
            manager.offload(version=7)
            dist.barrier()
        return missed, other, changed

    (missed, *first), (_, *second) = run_ranks(2, publish, tmp_path)
    assert missed[0] == "DeadlinePassed"
    for other, changed in (first, second):
        assert other[0] == "VersionConflict" and "version 4" in other[1] and other[2] < SOON_S
        assert changed[0] == "InvalidArgument" and "rows_1" in changed[1] and changed[2] < SOON_S
    assert "rank 1 failed: " in first[1][1]


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
