"""FSDP2: two ranks under torchrun fill versions together (fsdp_worker.py), each with its own parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

WORKER = Path(__file__).with_name("fsdp_worker.py")
LIMIT_S = 900  # some 15 s on an idle machine of two cores
CHECKS = ["steps", "steps in bf16", "placements", "transformers", "rank 0 fails", "rank 1 fails", "beginnings"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank's checks found; one torchrun for all of them."""
    report = tmp_path_factory.mktemp("fsdp") / "report"
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(WORKER), str(report), f"pytest-fsdp-{os.getpid()}"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, said = run.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # the ranks, too
        _, said = run.communicate()
        pytest.fail(f"not done within {LIMIT_S} s: {said[-3000:]}")
    ranks = []
    for rank in range(2):
        file = report.with_suffix(f".{rank}")
        assert file.exists(), said[-3000:]
        ranks.append(json.loads(file.read_text()))
    return ranks


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(found: list[dict[str, str]], check: str, shm_files: set[str]) -> None:
    for rank, checks in enumerate(found):
        assert checks.get(check, "another one failed before") == "ok", f"rank {rank}: {checks.get(check)}"
