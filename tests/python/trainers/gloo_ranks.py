"""Processes of a torch.distributed group over gloo, forked from this one, which has imported what they need."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

#: For a group to do all its work; some seconds on an idle machine.
DEADLINE_S = 900.0


def run_ranks(size: int, work: Callable[[int], Any], directory: Path) -> list[Any]:
    """What `work(rank)` returns on each rank, by rank. AssertionError with the traceback of the first that failed."""
    directory.mkdir(parents=True, exist_ok=True)
    store = directory / f"store-{time.monotonic_ns()}"
    children = [_start(rank, size, work, store, _result(directory, rank)) for rank in range(size)]
    end = time.monotonic() + DEADLINE_S
    running = dict(enumerate(children))
    failed = False
    try:
        while running and not failed and time.monotonic() < end:
            for rank, child in list(running.items()):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    del running[rank]
                    failed = failed or status != 0
            time.sleep(0.01)
    finally:
        for child in running.values():
            os.kill(child, signal.SIGUSR1)  # where does it stand?
        if running:
            time.sleep(1)
        for child in running.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for child in children:  # what a rank has started: Megatron saves in processes of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
    results = []
    for rank in range(size):
        path = _result(directory, rank)
        done, result = pickle.loads(path.read_bytes()) if path.exists() else (False, _ending(path))
        path.unlink(missing_ok=True)
        results.append((done, result))
    errors = [f"rank {rank}: {result}" for rank, (done, result) in enumerate(results) if not done]
    assert not errors, "\n".join(sorted(errors, key=len, reverse=True))
    return [result for _, result in results]


def _result(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.pickle"


def _ending(result: Path) -> str:
    """Of a rank without a result; with the stacks of its threads, if it ran on until run_ranks() ended it."""
    path = result.with_suffix(".stacks")
    stacks = path.read_text() if path.exists() else ""
    return f"it was ended while it was at\n{stacks}" if stacks else "it ended"


def _start(rank: int, size: int, work: Callable[[int], Any], store: Path, result: Path) -> int:
    result.unlink(missing_ok=True)
    child = os.fork()
    if child:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(child, child)  # here and there, since either may come first
        return child
    os.setpgid(0, 0)
    gc.freeze()  # else it destroys what tests before left: torch's TCPStore ends with the threads that it has not here
    stacks = result.with_suffix(".stacks").open("w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    said: tuple[bool, Any] = (False, "nothing")
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=DEADLINE_S / 2),
        )
        said = True, work(rank)
        dist.barrier()
    except BaseException:
        said = False, traceback.format_exc()
    try:
        result.write_bytes(pickle.dumps(said))
    finally:
        os._exit(0 if said[0] else 1)
