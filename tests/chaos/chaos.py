"""A chaos run: trainer ranks, agent, relay and receivers of every kind as real processes, which are killed, stopped,
damaged, flooded and starved at random, while every version that anybody commits is compared with what it must be.

    tools/chaos.sh [--minutes N] [--kills N] [--seed S] [--report FILE]

Ends with 0 if nothing was torn, lost, silent or went back, and no process ended by itself. The same seed chooses the
same faults in the same order (the machine's timing is its own)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chaos_model import VARIANTS, Wrong, wrong_in
from faults import SlowLink, fill_up, flip_bit, flood
from processes import Process
from record import Follower, Record

RANKS = 2
STEP_PAUSE_S = 0.05
STEP_LIMIT_S = 10.0
SILENT_S = 20.0  # a follower that is behind says something at least this often
END_LIMIT_S = 60.0  # after the last fault everybody comes to the newest version within
CLOCK_SHIM = "tests/support/libdeltasync_clock_shim.so"  # of the build
PROGRAMS = ("deltasync", "deltasync-agent", "chaos_trainer", "chaos_reader")
CLOCK_OFF_S = [-3600, -60, 3600, 10 * 365 * 86400]
SHM_BYTES = 96 << 20
OUT_BYTES = 64 << 20


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Run:
    def __init__(self, build: Path, directory: Path, args: argparse.Namespace) -> None:
        self.random = random.Random(args.seed)
        self.args = args
        self.bin, self.directory, self.clock_shim = build / "bin", directory, build / CLOCK_SHIM
        for program in (*(self.bin / name for name in PROGRAMS), self.clock_shim):
            if not program.exists():
                raise SystemExit(f"{program} is not there: build it, as tools/chaos.sh does")
        self.record = Record()
        self.port, self.node_port = free_port(), free_port()
        self.variant = 0
        self.epoch = 0
        self.new_epoch = True
        self.answers: list[asyncio.Queue[str]] = [asyncio.Queue() for _ in range(RANKS)]
        self.tasks: set[asyncio.Task[None]] = set()
        self.mounts: list[Path] = []
        self.slow = SlowLink(self.port, 400_000)
        self.processes: dict[str, Process] = {}
        self.quiet = False
        self.heap: dict[str, int] = {}  # of the readers: bytes allocated and not freed

    # ---- the cast ----

    def agent(self, name: str, port: int) -> list[str]:
        return [
            str(self.bin / "deltasync-agent"), "--name", name, "--shm-dir", str(self.directory / f"shm-{name}"),
            "--socket", str(self.directory / f"{name}.sock"), "--listen", f"127.0.0.1:{port}", "--http", "off",
            "--threads", "1", "--overlap-threads", "1", "--pack-threads", "1", "--net-threads", "1",
            "--scrub-minutes", "0.1", "--scrub-cpu-percent", "20", "--log-level", "info",
        ]  # fmt: skip

    def pull(self, out: str, port: int) -> list[str]:
        return [
            str(self.bin / "deltasync"), "pull", "--from", f"127.0.0.1:{port}",
            "--out", str(self.directory / out / "model"), "--follow", "--json", "--streams", "2",
        ]  # fmt: skip

    def add(self, name: str, command: list[str], heard: str | None = None) -> None:
        def hear(line: str) -> None:
            if heard == "json":
                self.hear_pull(name, line)
            elif heard == "reader":
                self.hear_reader(name, line)

        self.processes[name] = Process(name, lambda: command, hear, self.directory / f"{name}.log")
        if heard is not None:
            self.record.followers[name] = Follower(name)

    def cast(self, ranks: int = RANKS) -> None:
        self.add("trainer's agent", self.agent("trainer", self.port))
        self.add("node's agent", self.agent("node", self.node_port))
        relay = [
            str(self.bin / "deltasync"), "relay", "--from", f"127.0.0.1:{self.port}", "--agent",
            str(self.directory / "node.sock"), "--guard-s", "5", "--threads", "1", "--json",
        ]  # fmt: skip
        self.add("relay", relay)
        self.add("directory", self.pull("out-direct", self.port), "json")
        self.add("directory of the node", self.pull("out-node", self.node_port), "json")
        reader = str(self.bin / "chaos_reader")
        self.add("host memory", [reader, f"127.0.0.1:{self.port}", "host"], "reader")
        self.add("placed, of the node", [reader, f"127.0.0.1:{self.node_port}", "placed"], "reader")
        self.add("shadow", [reader, f"127.0.0.1:{self.port}", "shadow"], "reader")
        self.add("slow link", [reader, f"127.0.0.1:{self.slow.port}", "host"])
        for rank in range(ranks):
            self.processes[f"rank {rank}"] = Process(
                f"rank {rank}", lambda rank=rank: self.rank(rank, ranks), self.answers[rank].put_nowait,
                self.directory / f"rank {rank}.log",
            )  # fmt: skip

    def rank(self, index: int, ranks: int) -> list[str]:
        return [
            str(self.bin / "chaos_trainer"), str(self.directory / "trainer.sock"), str(index), str(ranks),
            str(self.variant),
        ]  # fmt: skip

    def hear_pull(self, name: str, line: str) -> None:
        with contextlib.suppress(ValueError, KeyError):
            said = json.loads(line)
            if said["event"] == "pulled" and said["mode"] != "up_to_date":
                self.record.committed(name, (int(said["id"].split(":")[0], 16), said["number"]))

    def hear_reader(self, name: str, line: str) -> None:
        words = line.split()
        if words[:1] != ["commit"]:
            return
        version = (int(words[1]), int(words[2]))
        found = [Wrong(int(t), int(e), int(i, 16), int(s, 16)) for t, e, i, s in (w.split(":") for w in words[7:])]
        self.heap[name] = int(words[6])
        self.record.committed(name, version)
        self.record.compared(name, version, int(words[4]), found)

    # ---- the trainer ----

    async def answer(self, rank: int, until: float) -> str | None:
        """None if the rank died or says nothing."""
        process = self.processes[f"rank {rank}"]
        child = process.child
        while time.monotonic() < until:
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self.answers[rank].get(), 0.05)
            if process.child is not child or not process.runs:
                return None
        return None

    async def ask(self, rank: int, line: str, until: float) -> str | None:
        await self.processes[f"rank {rank}"].started.wait()
        while not self.answers[rank].empty():
            self.answers[rank].get_nowait()
        self.processes[f"rank {rank}"].say(line)
        return await self.answer(rank, until)

    async def train(self) -> None:
        step = 0
        while True:
            until = time.monotonic() + STEP_LIMIT_S
            if self.new_epoch or not self.epoch:
                said = await self.ask(0, f"epoch {self.epoch}", until)
                if said is None or not said.startswith("epoch "):
                    continue
                self.epoch, self.new_epoch = int(said.split()[1]), False
                self.record.counts["epochs"] += 1
            step += 1
            version = (self.epoch, step * VARIANTS + self.variant)
            order = f"offload {version[0]} {version[1]}"
            said_all = await asyncio.gather(*(self.ask(rank, order, until) for rank in range(RANKS)))
            wanted = f"{version[0]} {version[1]}"
            good = [s for s in said_all if s is not None and s.startswith(f"offloaded {wanted} ")]
            if len(good) == RANKS:
                self.record.offloaded(version, max(float(s.split()[-1]) for s in good))
            else:
                self.record.counts["offloads that failed"] += 1
            await asyncio.sleep(STEP_PAUSE_S)

    # ---- the checker of directories ----

    def check_directory(self, name: str, out: Path, seen: str | None) -> str | None:
        """The version that was compared now, if it is another one than `seen`."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            target = os.readlink(out / "current")
            if target == seen:
                return seen
            directory = out / target
            with (directory / "model.safetensors").open("rb") as file:
                if os.readlink(out / "current") != target:
                    return seen  # moved on between the two calls: look again
                epoch, number = re.match(r"([0-9a-f]+)-(\d+)", Path(target).name).groups()  # type: ignore[union-attr]
                version = (int(epoch, 16), int(number))
                self.record.compared(name, version, *wrong_in(file, version[1]))
                return target
        return seen

    async def check_directories(self) -> None:
        seen: dict[str, str | None] = {}
        places = {"directory": "out-direct", "directory of the node": "out-node"}
        while True:
            for name, out in places.items():
                try:
                    seen[name] = await asyncio.to_thread(
                        self.check_directory, name, self.directory / out / "model", seen.get(name)
                    )
                except Exception as e:  # whatever is no readable version is a torn one
                    self.record.fault("torn", f"{name}: {type(e).__name__}: {e}")
            await asyncio.sleep(0.05)

    # ---- faults ----

    def behind(self, name: str) -> list[str]:
        """The followers that need this process."""
        of_node = ["directory of the node", "placed, of the node"]
        if name in self.record.followers:
            return [name]
        if name in ("node's agent", "relay"):
            return of_node
        return [] if name == "slow link" else list(self.record.followers)

    def spawn(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[arg-type]
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def wrong_clock(self, name: str) -> None:
        """Killed, and back with another wall clock, as after a step of the host's."""
        self.record.counts["clock steps"] += 1
        off = self.random.choice([0, *CLOCK_OFF_S])
        shim = {"LD_PRELOAD": str(self.clock_shim), "DELTASYNC_TEST_CLOCK_S": str(off)} if off else {}
        self.processes[name].environment = shim
        self.kill(name)

    def kill(self, name: str) -> None:
        if self.processes[name].signal(signal.SIGKILL):
            self.record.killed(name, self.behind(name))
            if name.startswith("rank") and self.random.random() < 0.5:
                self.new_epoch = True

    def change_layout(self) -> None:
        self.record.counts["layout changes"] += 1
        self.variant = self.random.randrange(VARIANTS)
        self.new_epoch = True
        for rank in range(RANKS):
            self.kill(f"rank {rank}")

    def one_fault(self) -> None:
        what = self.random.random()
        name = self.random.choice(list(self.processes))
        if what < 0.72:
            self.kill(name)
        elif what < 0.86:
            self.record.counts["stops"] += 1
            self.spawn(self.processes[name].stop_for(self.random.expovariate(2)))
        elif what < 0.92:
            agent = self.random.choice(["trainer", "node"])
            if flip := flip_bit(self.directory / f"shm-{agent}", agent, self.random):
                self.record.counts["bits flipped"] += 1
                self.record.flips.append(flip)
        elif what < 0.95:
            self.record.counts["floods"] += 1
            port = self.random.choice([self.port, self.node_port])
            self.spawn(flood(port, self.random, self.random.randrange(20, 400), self.random.uniform(0.2, 2)))
        elif what < 0.96:
            self.change_layout()
        elif what < 0.98:
            self.wrong_clock(name)
        elif self.mounts:
            self.spawn(fill_up(self.random.choice(self.mounts), self.random.uniform(0.2, 2), self.record))

    async def faults(self) -> None:
        ends_at = time.monotonic() + 60 * self.args.minutes
        told = time.monotonic()
        while time.monotonic() < ends_at and not (self.args.kills and self.record.counts["kills"] >= self.args.kills):
            await asyncio.sleep(self.random.expovariate(self.args.rate))
            self.one_fault()
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(self.line(), flush=True)

    async def watch_silence(self) -> None:
        """A follower that is behind for long says so."""
        told: dict[str, float] = {}
        while True:
            await asyncio.sleep(1)
            now = time.monotonic()
            for name, follower in self.record.followers.items():
                process = self.processes[name]
                step = follower.held[1] // VARIANTS if follower.held else 0
                since = max(follower.committed_at, process.last_said, process.stopped_until, told.get(name, 0))
                if step < self.record.newest_step and now - since > SILENT_S and process.runs:
                    told[name] = now
                    behind = self.record.newest_step - step
                    self.record.fault(
                        "silent", f"{name} is {behind} steps behind and has said nothing for {SILENT_S} s"
                    )

    def line(self) -> str:
        c = self.record.counts
        keys = ["kills", "stops", "bits flipped", "offloaded", "commits", "compared", "torn", "going back", "silent"]
        return ", ".join(f"{c[key]} {key}" for key in keys)

    # ---- all of it ----

    def mount(self) -> None:
        """Small filesystems of its own, where that is possible, so that they can be filled up."""
        for name, size in {"shm-trainer": SHM_BYTES, "shm-node": SHM_BYTES, "out-direct": OUT_BYTES}.items():
            path = self.directory / name
            path.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
            if os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0:
                self.mounts.append(path)
        (self.directory / "out-node").mkdir()
        if not self.mounts:
            print("no filesystem is filled up in this run: mounting one needs root", flush=True)

    async def settle(self) -> None:
        """No more faults: everybody comes to the newest version, or was lost."""
        for process in self.processes.values():
            process.signal(signal.SIGCONT)
        await self.settle_at(self.record.newest_step + 3)

    async def settle_at(self, goal: int) -> None:
        ends_at = time.monotonic() + END_LIMIT_S
        behind: list[str] = []
        while time.monotonic() < ends_at:
            behind = [n for n, f in self.record.followers.items() if not f.held or f.held[1] // VARIANTS < goal]
            if not behind:
                return
            await asyncio.sleep(0.1)
        for name in behind or ["the trainer"]:
            process = self.processes.get(name)
            tail = " | ".join(list(process.last_lines)[-3:]) if process else ""
            self.record.fault("lost", f"{name} did not come to step {goal} in {END_LIMIT_S} s: {tail}")

    async def run(self) -> dict[str, object]:
        began = time.monotonic()
        self.mount()
        try:
            await self.slow.start()
            self.cast()
            for process in self.processes.values():
                process.start()
            background = [
                asyncio.create_task(work) for work in (self.train(), self.check_directories(), self.watch_silence())
            ]
            await self.faults()
            await asyncio.gather(*self.tasks)
            await self.settle()
            for task in background:
                if task.done():
                    task.result()  # a bug of the run itself
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*(process.close() for process in self.processes.values()))
            self.slow.close()
            for path in self.mounts:
                subprocess.run(["umount", str(path)], check=False)
        for process in self.processes.values():
            for text in process.surprises:
                self.record.fault("ended by itself", text)
        return self.record.report(time.monotonic() - began, self.args.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kills", type=int, default=0, help="end after so many")
    parser.add_argument("--rate", type=float, default=3, help="faults a second")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--report", type=Path, help="where the report goes as JSON")
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--keep", action="store_true", help="leave the processes' logs")
    args = parser.parse_args()
    print(f"chaos: seed {args.seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="deltasync-chaos-"))
    try:
        run = Run(args.build.resolve(), directory, args)
        report = asyncio.run(run.run())
    finally:
        if args.keep:
            print(f"logs are in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    text = json.dumps(report, indent=2)
    print(text)
    if args.report:
        args.report.write_text(text + "\n")
    bad = sum(int(report.get(key, 0)) for key in ("torn", "going back", "lost", "silent", "ended by itself"))  # type: ignore[call-overload]
    print(f"{1 if bad == 0 else 0} passed, {1 if bad else 0} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
