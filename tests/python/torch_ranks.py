"""Workers of several ranks under torchrun, once for all tests of a module: how a test runs one, and what one runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT_S = 900  # some 30 s on an idle machine of two cores


def what_ranks_found(worker: Path, ranks: int, report: Path, segment: str) -> list[dict[str, str]]:
    """By rank, what each of its checks found. The worker is given REPORT SEGMENT, and leaves REPORT.RANK."""
    paths = filter(None, [os.environ.get("PYTHONPATH")])
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(str(worker), str(report), f"{segment}-{os.getpid()}"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *paths])},
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


def run_checks(report: Path, rank: int, checks: Mapping[str, Callable[[], None]]) -> None:
    """In the worker: all checks up to the first that fails; then the ranks do not agree any more."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check()
            found[name] = "ok"
        except BaseException:
            found[name] = traceback.format_exc()
            print(f"rank {rank}: {name}\n{found[name]}", file=sys.stderr, flush=True)
            break
    report.with_suffix(f".{rank}").write_text(json.dumps(found))
    if any(result != "ok" for result in found.values()):
        os._exit(1)
    dist.destroy_process_group()
