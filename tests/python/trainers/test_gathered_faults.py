"""Ranks that fail, stop or come late while they put tensors together: an error on one is one on all, in time."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch.distributed as dist  # noqa: E402
from deltasync import _carriers, errors, megatron  # noqa: E402
from fake_trainer import Fake  # noqa: E402
from gathered_support import LONG_S, SOON_S, error_of, plan_of  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402


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
    assert took < SOON_S
    assert after == "Aborted" and "waited in vain" in refused and at_once < 2


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


def test_buckets_that_differ_are_refused(fake: Fake, tmp_path: Path) -> None:
    def export(rank: int) -> str:
        plan, _ = plan_of(fake, rank, 2)
        return error_of(lambda: megatron.export_hf_named_params(plan, bucket_bytes=1000 + rank, timeout=LONG_S))[1]

    first, second = run_ranks(2, export, tmp_path)
    assert first == second
    assert "rank 1 has another plan, export= or bucket_bytes= than rank 0" in first
