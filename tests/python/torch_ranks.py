"""Runs a worker of several ranks under torchrun, once for all tests of a module."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 900  # some 30 s on an idle machine of two cores


def what_ranks_found(worker: Path, ranks: int, report: Path, segment: str) -> list[dict[str, str]]:
    """By rank, what each of its checks found. The worker is given REPORT SEGMENT, and leaves REPORT.RANK."""
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(str(worker), str(report), f"{segment}-{os.getpid()}"),
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
    found = []
    for rank in range(ranks):
        file = report.with_suffix(f".{rank}")
        assert file.exists(), said[-3000:]
        found.append(json.loads(file.read_text()))
    return found


def require_ok(found: list[dict[str, str]], check: str) -> None:
    for rank, checks in enumerate(found):
        assert checks.get(check, "another one failed before") == "ok", f"rank {rank}: {checks.get(check)}"
