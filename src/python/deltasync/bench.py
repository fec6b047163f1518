"""``python -m deltasync.bench``: what Python adds to an offload, a tensor and a byte, against the C++ writer.

Both sides write the same tensors to the same agent in turns: *python* is ``WeightManager.offload``, *native* the same
slices described beforehand and handed to the C++ writer in one call. Medians over the rounds; the difference is what
Python costs. Wants torch. ``python -m deltasync.bench control`` is another one (``deltasync bench control``), and
``… export`` that of a trainer's ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from . import WeightManager
from ._arrays import describe
from ._native import Batch, Version


def native_batch(manager: WeightManager, tensors: dict[str, Any]) -> Batch:
    batch = Batch()
    for index, name in enumerate(manager.layout.names()):
        array = describe(tensors[name], name)
        rows, cols = array.rows_cols
        batch.add(index, 0, 0, rows, cols, array.address, array.row_stride)
    return batch


def rounds(tensors: dict[str, Any], count: int, source: str) -> dict[str, float]:
    """Seconds of an offload (begin to commit, guard left out), by either way."""
    took: dict[str, list[float]] = {"python": [], "native": []}
    name = f"bench-{os.getpid()}"
    with WeightManager(tensors, name=name) as manager:
        batch = native_batch(manager, tensors)
        writer = manager._writer
        for i in range(2 * (count + 2)):
            way = "python" if i % 2 == 0 else "native"
            version = Version(manager.epoch, i + 1, "")
            began = time.perf_counter()
            if way == "python":
                given: Any = tensors if source == "mapping" else ((key, value) for key, value in tensors.items())
                guard = manager.offload(given, version).guard_s
            else:
                writer.begin(version, 60)
                writer.write_batch(batch)
                guard = writer.commit(60).guard_s
            elapsed = time.perf_counter() - began - guard
            if i >= 4:  # the first versions touch pages and describe tensors
                took[way].append(elapsed)
            manager.wait_ready(version)
    return {way: statistics.median(times) for way, times in took.items()}


def measure(case: str, tensors: int, elements: int, count: int) -> dict[str, Any]:
    import torch

    weights = {
        f"model.layers.{i // 100}.experts.{i % 100}.weight": torch.randn(elements).to(torch.bfloat16)
        for i in range(tensors)
    }
    result: dict[str, Any] = {"case": case, "tensors": tensors, "bytes": tensors * elements * 2}
    for source in ("mapping", "generator"):
        median = rounds(weights, count, source)
        result[source] = {
            "python_s": median["python"],
            "native_s": median["native"],
            "added_us_per_tensor": (median["python"] - median["native"]) / tensors * 1e6,
            "ratio": median["python"] / median["native"],
        }
    return result


def main() -> int:
    if sys.argv[1:2] in (["control"], ["control-clients"]):
        from ._bench_control import main as main_of_control

        return main_of_control(sys.argv[1:])
    if sys.argv[1:2] == ["export"]:
        from ._bench_export import main as main_of_export

        return main_of_export(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m deltasync.bench", description=__doc__)
    parser.add_argument("--tensors", type=int, default=90_000, help="small tensors of the case `tensors`")
    parser.add_argument("--mib", type=int, default=1024, help="of the case `bytes`, in tensors of 16 MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    cases = [("tensors", args.tensors, 64), ("bytes", max(1, args.mib // 16), 8 << 20)]
    for case, tensors, elements in cases:
        result = measure(case, tensors, elements, args.rounds)
        if args.json:
            print(json.dumps(result), flush=True)
            continue
        for source in ("mapping", "generator"):
            way = result[source]
            print(
                f"{case}: {tensors} tensors of {elements * 2} bytes from a {source}: "
                f"{way['python_s'] * 1e3:.1f} ms, C++ writer {way['native_s'] * 1e3:.1f} ms, "
                f"{way['added_us_per_tensor']:.3f} µs a tensor added, ratio {way['ratio']:.3f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
