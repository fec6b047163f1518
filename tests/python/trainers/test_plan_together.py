"""Ranks that come late to plan(), or not: the others hear which, and the next call is of all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch.distributed as dist  # noqa: E402
from deltasync import megatron  # noqa: E402
from fake_trainer import Fake  # noqa: E402
from gathered_support import LONG_S, error_of, plan_of  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402

RANKS = 4


def test_ranks_that_are_late_are_named_and_the_next_plan_is_of_all(fake: Fake, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        said: tuple[str, str] | None = None
        if rank < 2:
            said = error_of(lambda: plan_of(fake, rank, RANKS, timeout=0.5))[:2]
            (tmp_path / f"gave_up.{rank}").touch()
        while len(list(tmp_path.glob("gave_up.*"))) < 2:
            time.sleep(0.01)
        digests = [plan_of(fake, rank, RANKS, timeout=LONG_S)[0].digest for _ in range(2)]
        here = torch.tensor([rank])  # what the trainer itself sends is in step, too
        dist.all_reduce(here)
        return said, digests, here.item()

    ranks = run_ranks(RANKS, work, tmp_path)
    for rank, (said, digests, total) in enumerate(ranks):
        assert digests == ranks[0][1]
        assert total == 6
        if rank < 2:
            assert said is not None
            assert said[0] == "DeadlinePassed"
            assert "of 4 ranks came by the deadline, without ranks" in said[1]
            assert "2, 3: to plan" in said[1]


def test_what_only_one_rank_is_given_wrong_is_heard_by_all(fake: Fake, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        def digest(tables: list[Any]) -> str:
            options = {"tables": tables, "process_group": True, "timeout": LONG_S}
            return megatron.plan(fake.model(rank, 2), fake.directory, **options).digest

        return error_of(lambda: digest(["nowhere.toml"] if rank else [fake.page]))[:2], digest([fake.page])

    ranks = run_ranks(2, work, tmp_path)
    assert ranks[0][1] == ranks[1][1]
    assert [said[0] for said, _ in ranks] == ["NotFound"] * 2
    assert "rank 1 failed: families: nowhere.toml" in ranks[0][0][1]
