"""FSDP2: two ranks under torchrun fill versions together (fsdp_worker.py), each with its own parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch_ranks import require_ok, what_ranks_found

pytest.importorskip("torch")

CHECKS = [
    *("steps", "steps in bf16", "placements", "generators", "alone", "transformers"),
    *("rank 0 fails", "rank 1 fails", "beginnings", "fsdp1", "fsdp1, original"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    report = tmp_path_factory.mktemp("fsdp") / "report"
    return what_ranks_found(Path(__file__).with_name("fsdp_worker.py"), 2, report, "pytest-fsdp")


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(found: list[dict[str, str]], check: str, shm_files: set[str]) -> None:
    require_ok(found, check)
