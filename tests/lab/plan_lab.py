#!/usr/bin/env python3
"""What `deltasync plan` predicts, against fleets of a lab (tools/lab.py): real processes over links with rates.

    tests/lab/plan_lab.py [--bin DIR] [--bench FILE] [--only NAME ...] [--deltas N] [--json FILE]

    tests/lab/plan_lab.py --hops RATE [--bin DIR] [--deltas N]

The second one measures what relays in a row cost: a delta behind none, one and three, links of RATE (100mbit).

Each topology gives a full update (of engines that have nothing yet) and N deltas, of which the median counts. All hosts
of a lab share this machine's processor, and so they do in the prediction. FILE has what the benchmarks printed; without
--bench they are run before. As root, on a machine that does nothing else."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "lab")]
from lab import MTU, Lab, Process, missing, until  # noqa: E402
from topology import LabError, Topology  # noqa: E402

TOKEN = "--token-file ../token"
AGENT = f"deltasync-agent --name job --socket agent.sock --listen 0.0.0.0:7070 --ready-file ready {TOKEN}"
RELAY = f"deltasync relay --from {{}}:7070 --agent agent.sock --link-gbps 100 --json {TOKEN}"
DEADLINE_S = 300.0
SETTLED_S = 1.5  # between versions: longer than connections of data are taken for good unasked
#: Of `deltasync bench`, with the GiB of the model; the last one says what a version costs at least.
BENCHMARKS = {"e2e": 0.5, "full": 0.5, "relay": 0.5, "e2e ": 0.001}


@dataclass(frozen=True)
class Fleet:
    """`relays`: hosts of each level. Links as tc has them."""

    name: str
    trainers: int
    engines: int
    link: str
    mib: int
    relays: tuple[int, ...] = ()
    changed: float = 0.05
    engine_link: str | None = None
    delay_ms: float = 0

    def levels(self) -> list[list[str]]:
        """Names of hosts, from the trainers to the engines."""
        counts = {"trainer": self.trainers, **{f"relay{i}-": n for i, n in enumerate(self.relays)}}
        counts["engine"] = self.engines
        return [[f"{name}{i}" for i in range(count)] for name, count in counts.items()]

    def source(self, level: int, number: int) -> str:
        hosts = self.levels()[level - 1]
        return hosts[number % len(hosts)] if level > 1 else hosts[0]

    def plan(self, full: bool, cores: int, bits: float) -> str:
        """For `deltasync plan`."""
        processor = 'processor = "lab"'
        lines = [f"mtu = {MTU}", "[processors]", f"lab = {cores}", "[model]", f"parameters = {self.mib * 2**19}"]
        lines += [f"changed = {1 if full else self.changed}", f"bits_per_change = {bits}"]
        lines += ["[trainers]", f"count = {self.trainers}", f'link = "{self.link}"', processor]
        for number, count in enumerate(self.relays):
            lines += ["[[relays]]", f'name = "relays {number}"', f"count = {count}", f'link = "{self.link}"', processor]
        lines += ["[[engines]]", f"count = {self.engines}", f'link = "{self.engine_link or self.link}"', processor]
        lines.append(f"delay_ms = {self.delay_ms}")
        return "\n".join(lines) + "\n"


FLEETS = (
    Fleet("1 to 1, 100 Mbit/s", 1, 1, "100mbit", 64),
    Fleet("1 to 1, 1 Gbit/s", 1, 1, "1gbit", 256),
    Fleet("1 to 1, 4 Gbit/s", 1, 1, "4gbit", 512),
    Fleet("1 to 4, 1 Gbit/s", 1, 4, "1gbit", 128),
    Fleet("1 to 12, 1 Gbit/s", 1, 12, "1gbit", 64),
    Fleet("1 to 12, 4 Gbit/s", 1, 12, "4gbit", 96),
    Fleet("1 to 6, engines 200 Mbit/s", 1, 6, "1gbit", 64, engine_link="200mbit"),
    Fleet("1 to 4, 20% changed, 500 Mbit/s", 1, 4, "500mbit", 96, changed=0.2),
    Fleet("1 to 2, 20 ms away, 200 Mbit/s", 1, 2, "200mbit", 64, delay_ms=20),
    Fleet("2 to 4, 1 Gbit/s", 2, 4, "1gbit", 192),
    Fleet("3 to 6, 500 Mbit/s", 3, 6, "500mbit", 96),
    Fleet("4 to 12, 1 Gbit/s", 4, 12, "1gbit", 96),
    Fleet("4 to 1, 2 Gbit/s", 4, 1, "2gbit", 256),
    Fleet("1 relay, 2 engines, 1 Gbit/s", 1, 2, "1gbit", 128, relays=(1,)),
    Fleet("2 relays, 8 engines, 1 Gbit/s", 1, 8, "1gbit", 96, relays=(2,)),
    Fleet("2 and 4 relays, 8 engines, 2 Gbit/s", 1, 8, "2gbit", 96, relays=(2, 4)),
)


def lines_of(process: Process, event: str) -> Iterator[dict[str, Any]]:
    for line in process.log.read_text(errors="replace").splitlines():
        if line.startswith("{") and line.endswith("}"):
            said = json.loads(line)
            if said.get("event") == event:
                yield said


class Run:
    """A fleet in a lab."""

    def __init__(self, fleet: Fleet, lab: Lab, member: Path) -> None:
        self.fleet, self.lab = fleet, lab
        levels = fleet.levels()
        for host in (host for level in levels[:-1] for host in level):
            lab.run(host, "agent", AGENT)
            until((lab.directory / host / "ready").exists, f"{host}: agent", DEADLINE_S)
        for level, hosts in enumerate(levels[1:-1], 1):
            for number, host in enumerate(hosts):
                lab.run(host, "relay", RELAY.format(fleet.source(level, number)))
        endpoints = [f"{host}:7070" for host in levels[0]]
        epoch = secrets.randbits(31) << 32 | 1
        self.trainers = [
            lab.run(host, "train", [str(member), "trainer", str(fleet.mib), str(fleet.changed), str(epoch), str(node),
                                    *endpoints], stdin=subprocess.PIPE)
            for node, host in enumerate(levels[0])]  # fmt: skip
        self.engines = [
            lab.run(host, "engine", [str(member), "engine", f"{fleet.source(len(levels) - 1, number)}:7070"])
            for number, host in enumerate(levels[-1])]  # fmt: skip

    def said(self, process: Process, event: str, number: int) -> dict[str, Any] | None:
        """Of a version; None: not yet."""
        if not process.runs:
            raise LabError(f"{process.name} ended: {process.last_line()}")
        return next((line for line in lines_of(process, event) if line.get("number", number) == number), None)

    def until_all(self, processes: list[Process], event: str, number: int) -> list[dict[str, Any]]:
        what = f"{event} {number}"
        return [until(partial(self.said, p, event, number), f"{p.name}: {what}", DEADLINE_S) for p in processes]

    def begin(self) -> None:
        """Until trainers have attached, and all others wait for the first version."""
        for trainer in self.trainers:
            until(partial(self.said, trainer, "attached", 0), trainer.name, DEADLINE_S)
        time.sleep(SETTLED_S * (2 + len(self.fleet.relays)))

    def publish(self, number: int) -> dict[str, Any]:
        """The next version, in seconds from the offload until so many engines have it."""
        for trainer in self.trainers:
            trainer.say("")
        offloaded = self.until_all(self.trainers, "offloaded", number)
        pulled = self.until_all(self.engines, "pulled", number)
        began = min(line["began"] for line in offloaded)
        ends = sorted(line["at"] - began for line in pulled)
        time.sleep(SETTLED_S)
        return {"all_s": ends[-1], "half_s": ends[(len(ends) - 1) // 2], "mode": pulled[0]["mode"],
                "wire_bytes": pulled[0]["wire_bytes"],
                "offload_s": max(line["offload_s"] for line in offloaded),
                "diff_s": max(line["diff_s"] for line in offloaded),
                "transfer_s": max(line["transfer_s"] for line in pulled),
                "commit_s": max(line["commit_s"] for line in pulled)}  # fmt: skip


def measure(fleet: Fleet, binaries: Path, deltas: int) -> list[dict[str, Any]]:
    """By version: the first comes whole."""
    levels = fleet.levels()
    hosts: list[dict[str, Any]] = [{"names": names, "rate": fleet.link} for names in levels[:-1]]
    hosts.append({"names": levels[-1], "rate": fleet.engine_link or fleet.link})
    if fleet.delay_ms:
        hosts[-1]["delay_ms"] = fleet.delay_ms
    with Lab(Topology({"hosts": hosts}), binaries) as lab:
        run = Run(fleet, lab, binaries.resolve() / "fleet_member")
        run.begin()
        return [run.publish(number) for number in range(1, deltas + 2)]


def predict(fleet: Fleet, full: bool, bits: float, binaries: Path, bench: Path) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(fleet.plan(full, os.cpu_count() or 1, bits))
        file.flush()
        command = [str(binaries / "deltasync"), "plan", file.name, "--bench", str(bench), "--json"]
        return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def compare(fleet: Fleet, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A full update and the median of the deltas, each with what was predicted."""
    versions = measure(fleet, args.bin, args.deltas)
    deltas = sorted(versions[1:], key=lambda version: float(version["all_s"]))
    chosen = [versions[0], *deltas[len(deltas) // 2 :][:1]]
    bits = 8 * deltas[0]["wire_bytes"] / (fleet.mib * 2**19 * fleet.changed)
    rows = []
    for number, measured in enumerate(chosen):
        full = measured["mode"] == "full"
        assert full == (number == 0), measured
        predicted = predict(fleet, full, bits, args.bin, args.bench)
        error = predicted["all_s"] / measured["all_s"] - 1
        rows.append({"fleet": fleet.name, "mode": measured["mode"], "predicted_s": predicted["all_s"],
                     "measured_s": measured["all_s"], "error": error, "measured": measured,
                     "path": predicted["path"]})  # fmt: skip
    return rows


def hops(rate: str, binaries: Path, deltas: int) -> None:
    direct = 0.0
    print("| relays | delta committed | of direct |\n|---|---:|---:|", flush=True)
    for relays in ((), (1,), (1, 1, 1)):
        versions = measure(Fleet("hops", 1, 1, rate, 128, relays=relays), binaries, deltas)
        took = statistics.median(float(version["all_s"]) for version in versions[1:])
        direct = direct or took
        print(f"| {len(relays)} | {took:.3f} s | {took / direct:.2f} |", flush=True)


def run_benchmarks(binaries: Path, file: Path) -> None:
    threads = str(os.cpu_count() or 1)
    for case, gib in BENCHMARKS.items():
        words = f"{case} --model-gib {gib} --density 0.05 --threads {threads} --json".split()
        done = subprocess.run([binaries / "deltasync-bench", *words], check=True, stdout=subprocess.PIPE, text=True)
        with file.open("a") as out:
            out.write(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    parser.add_argument("--bench", type=Path, help="made if it is not there")
    parser.add_argument("--only", nargs="*", help="names of fleets")
    parser.add_argument("--deltas", type=int, default=5)
    parser.add_argument("--json", type=Path, help="gets all that was measured")
    parser.add_argument("--hops", metavar="RATE", help="what relays in a row cost, over links of this rate")
    args = parser.parse_args()
    if reason := missing():
        print(f"plan_lab: {reason}", file=sys.stderr)
        return 2
    if args.hops:
        hops(args.hops, args.bin, args.deltas)
        return 0
    args.bench = args.bench or Path(tempfile.mkdtemp(prefix="plan-")) / "bench.json"
    if not args.bench.exists():
        run_benchmarks(args.bin, args.bench)
    rows = []
    print("| fleet | update | predicted | measured | error |\n|---|---|---:|---:|---:|", flush=True)
    for fleet in FLEETS:
        if args.only and fleet.name not in args.only:
            continue
        for row in compare(fleet, args):
            rows.append(row)
            print(f"| {row['fleet']} | {row['mode']} | {row['predicted_s']:.3f} s | {row['measured_s']:.3f} s "
                  f"| {100 * row['error']:+.0f}% |", flush=True)  # fmt: skip
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    errors = [abs(row["error"]) for row in rows]
    print(f"median error {100 * statistics.median(errors):.1f}%, worst {100 * max(errors):.1f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
