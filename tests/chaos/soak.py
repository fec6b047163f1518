"""A long run of a small model: memory, descriptors and shared memory of every process must stay what they were.

    python3 tests/chaos/soak.py [--versions 100000] [--report FILE]

Prints for each process how its memory grows, as a straight line through the second half of the run. That is what it has
allocated and not freed: what is resident grows in ever rarer steps, as the allocator's pools reach the largest use that
they will ever have. Of the trainer it is what is resident."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from chaos import Run, free_port
from chaos_model import SMALL_VARIANT, VARIANTS
from processes import Process

BURST = 200  # versions between two looks at the trainer
GROWTH_MAX = 1.0  # KiB of memory over 10,000 versions, of what a fit can tell

POINTS = 20  # of memory over time, in the report


class Sample(NamedTuple):
    versions: int
    rss_kib: int
    descriptors: int
    heap_kib: float | None  # allocated and not freed


def look(pid: int, versions: int, page: int | None, heap: float | None) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text()
    rss = int(status.split("RssAnon:")[1].split()[0])
    if page is not None:
        text = urllib.request.urlopen(f"http://127.0.0.1:{page}/metrics", timeout=30).read().decode()
        heap = float(text.split("\nprocess_heap_bytes ")[1].split()[0]) / 1024
    return Sample(versions, rss, len(list(Path(f"/proc/{pid}/fd").iterdir())), heap)


def size_of(path: Path) -> int:
    """0 for one that is gone: agents rename and remove files of the ring beside us."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def growth(samples: list[Sample]) -> tuple[float, float]:
    """KiB over 10,000 versions in the second half, and its standard error."""
    half = samples[len(samples) // 2 :]
    x = np.array([s.versions for s in half], float) / 10_000
    y = np.array([s.rss_kib if s.heap_kib is None else s.heap_kib for s in half], float)
    slope, cut = np.polyfit(x, y, 1)
    left = y - (slope * x + cut)
    error = float(np.sqrt(left.var() / max(len(x), 1)) / max(x.std(), 1e-9))
    return float(slope), error


class Soak:
    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args = args
        self.run = Run(args.build.resolve(), directory, args)
        self.run.variant = SMALL_VARIANT
        self.directory = directory
        self.samples: dict[str, list[Sample]] = {}
        self.shm: list[int] = []
        self.pages: dict[str, int] = {}

    def serve_pages(self) -> None:
        for name, process in self.run.processes.items():
            command = process.command()
            if not command[0].startswith(str(self.run.bin / "deltasync")):
                continue
            page = self.pages[name] = free_port()
            if "--http" in command:
                command[command.index("--http") + 1] = f"127.0.0.1:{page}"
            else:
                command += ["--http", f"127.0.0.1:{page}"]
            process.command = partial(list, command)

    async def train(self, trainer: Process) -> None:
        run = self.run
        answer = await run.ask(0, "epoch", time.monotonic() + 30)
        assert answer is not None
        epoch = int(answer.split()[1])
        for first in range(1, self.args.versions + 1, BURST):
            end = min(first + BURST, self.args.versions + 1)
            order = f"run {epoch} {first * VARIANTS + SMALL_VARIANT} {end * VARIANTS}"
            said = await run.ask(0, order, time.monotonic() + 120)
            if said is None or not said.startswith("offloaded"):
                raise RuntimeError(f"the trainer said {said}")
            run.record.newest_step = end - 1
            self.sample(end - 1)

    def sample(self, versions: int) -> None:
        for name, process in self.run.processes.items():
            if process.child is not None:
                heap = self.run.heap[name] / 1024 if name in self.run.heap else None
                self.samples.setdefault(name, []).append(look(process.child.pid, versions, self.pages.get(name), heap))
        self.shm.append(sum(map(size_of, self.directory.glob("shm-*/*"))))

    async def all(self) -> dict[str, object]:
        run = self.run
        for name in ("shm-trainer", "shm-node", "out-direct", "out-node"):
            (self.directory / name).mkdir()
        await run.slow.start()
        run.cast(ranks=1)
        del run.processes["slow link"]
        self.serve_pages()
        began = time.monotonic()
        try:
            for process in run.processes.values():
                process.start()
            await self.train(run.processes["rank 0"])
            await run.settle_at(self.args.versions)
        finally:
            await asyncio.gather(*(process.close() for process in run.processes.values()))
            run.slow.close()
        report: dict[str, object] = {"versions": self.args.versions, "seconds": round(time.monotonic() - began, 1)}
        for name, samples in self.samples.items():
            slope, error = growth(samples)
            report[name] = {
                "kib_per_10000": round(slope, 2),
                "standard_error": round(error, 2),
                "rss_kib": [s.rss_kib for s in samples[:: max(1, len(samples) // POINTS)]] + [samples[-1].rss_kib],
                "heap_kib": [round(s.heap_kib) for s in samples[:: max(1, len(samples) // POINTS)] if s.heap_kib],
                "descriptors": [samples[len(samples) // 2].descriptors, samples[-1].descriptors],
            }
        report["shm_bytes"] = [self.shm[len(self.shm) // 2], self.shm[-1]]
        report["faults"] = run.record.faults
        return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="deltasync-soak-"))
    try:
        report = asyncio.run(Soak(args, directory).all())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    text = "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in report.items()) + "\n}"
    print(text)
    if args.report:
        args.report.write_text(text + "\n")
    grown = [
        name
        for name, found in report.items()
        if isinstance(found, dict) and found["kib_per_10000"] - 3 * found["standard_error"] > GROWTH_MAX
    ]
    bad = len(grown) + len(report["faults"])  # type: ignore[arg-type]
    print(f"grown: {', '.join(grown) or 'nobody'}")
    print(f"{0 if bad else 1} passed, {1 if bad else 0} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
