"""What ranks tell each other through a process group, and what is left of it after a wait in vain."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from deltasync import errors  # noqa: E402
from deltasync._group import Group  # noqa: E402
from gloo_ranks import run_ranks  # noqa: E402


def test_what_takes_longer_to_make_than_ranks_wait_is_the_same_on_all(tmp_path: Path) -> None:
    def gather(rank: int) -> list[Any]:
        group = Group(True)

        def make() -> int:
            time.sleep(1.0 + rank / 10)
            return rank

        return [group.gather_any(make, 0.5) for _ in range(5)]

    assert run_ranks(2, gather, tmp_path) == [[[0, 1]] * 5] * 2


def test_after_a_wait_in_vain_every_call_is_refused_at_once(tmp_path: Path) -> None:
    def ask(rank: int) -> None:
        group = Group(True)
        if rank == 1:
            time.sleep(4)
            os._exit(0)
        said: list[str] = []

        def made() -> int:
            said.append("made")
            return 1

        for call in (group.gather, group.gather, group.gather_any, group.from_leader, group.all_or_none):
            with pytest.raises(errors.Error) as raised:
                call(made, 0.5)
            said.append(f"{type(raised.value).__name__}: {raised.value}")
        (tmp_path / "said").write_text(json.dumps(said))
        os._exit(0)  # the group is of no more use: not even for the barrier at the end

    with pytest.raises(AssertionError, match="it ended"):
        run_ranks(2, ask, tmp_path)
    made, first, *others = json.loads((tmp_path / "said").read_text())
    assert made == "made"
    assert first == "DeadlinePassed: process_group: rank 0 waited 0.5 s for all ranks (start the ranks again)"
    refused = "Aborted: process_group: ranks waited in vain for each other in an earlier call (start the ranks again)"
    assert others == [refused] * 4


def test_a_group_of_its_own_is_of_the_same_kind(tmp_path: Path) -> None:
    def ask(rank: int) -> Any:
        dist.Backend.register_backend("pretend", lambda *given: dist.ProcessGroupGloo(*given), devices=["cuda"])
        kinds = [dist.new_group(backend=kind) for kind in ("gloo", "cpu:gloo,cuda:pretend")]
        groups = [Group(True), *map(Group, kinds), Group(dist.new_group([rank], use_local_synchronization=True))]
        own = [group.own() for group in groups]
        assert [dist.get_backend(group._group) for group in own] == [dist.get_backend(group._group) for group in groups]
        return [one is of for one, of in zip(own, groups, strict=True)]

    assert run_ranks(2, ask, tmp_path) == [[False, False, False, True]] * 2


def test_tensors_are_sent_from_cuda_where_that_has_a_backend(tmp_path: Path) -> None:
    """And what ranks tell each other from the host, where that has one."""

    def ask(rank: int) -> Any:
        dist.Backend.register_backend("pretend", lambda *given: dist.ProcessGroupGloo(*given), devices=["cuda"])
        kinds = ["gloo", "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:pretend", "pretend"]
        groups = [Group(dist.new_group(backend=kind)) for kind in kinds]
        mixed = groups[2]
        work, failed = mixed.any_failed(rank == 1)
        mixed.wait(work, "a flag", 60.0)
        said = [mixed.gather(lambda: rank, 60.0), mixed.gather_any(lambda: rank, 60.0), int(failed)]
        return [group.device for group in groups], said

    devices = ["cpu", "cpu", "cuda", "cuda"]
    assert run_ranks(2, ask, tmp_path) == [(devices, [[0, 1], [0, 1], 1])] * 2
