#!/usr/bin/env python3
"""Measures a machine, and makes the table of all machines.

    tools/bench_report.py measure NAME     runs the cases; writes docs/internals/machines/NAME.json
    tools/bench_report.py table [--check]  writes the table into docs/internals/benchmarks.md, or only compares

Measure on a quiet machine: it takes half an hour on two cores, and needs five times the model (2 GiB) of memory. Each case runs with
every instruction set that the processor has. Ratios compare the work with the machine's own limit, measured in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ROOT / "docs" / "internals" / "machines"
PAGE = ROOT / "docs" / "internals" / "benchmarks.md"
BEGIN, END = "<!-- machines:begin -->", "<!-- machines:end -->"


class Row(NamedTuple):
    """One figure: the case and its options, the field, and what is aimed at."""

    case: str
    density: float
    field: str
    label: str
    aim: str

    @property
    def key(self) -> str:
        return f"{self.case} {self.density:g}"


ROWS = (
    Row("copy", 0.01, "ratio_to_memcpy", "`copy`: faster than memcpy", "≥ 1"),
    Row("offload", 0.01, "ratio_to_memcpy", "`offload`, copies", "≤ 1.3"),
    Row("diff", 0.01, "ratio_to_limit", "`diff` 1%, of the limit", "≥ 0.85"),
    Row("diff", 0.05, "ratio_to_limit", "`diff` 5%, of the limit", "≥ 0.6"),
    Row("apply", 0.01, "ratio_to_memcpy", "`apply` 1%, copies", "≤ 0.9"),
    Row("apply", 0.05, "ratio_to_memcpy", "`apply` 5%, copies", "≤ 2"),
    Row("colocated", 0.01, "full_ratio_to_memcpy", "`colocated` full, copies", "≤ 1.2"),
    Row("colocated", 0.01, "delta_ratio_to_memcpy", "`colocated` 1%, copies", "≤ 0.6"),
    Row("full", 0.01, "ratio_to_limit", "`full`, of the limit", "≥ 0.9"),
    Row("e2e", 0.01, "ratio_to_memcpy", "`e2e`, copies", "≤ 4"),
    Row("tensors", 0.01, "ratio_to_limit", "`tensors`, of copying and comparing", ""),
)


def isas() -> list[str]:
    """The widest that is built for this processor, and those below it."""
    flags = set(re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[:1] or [""])
    have = set(" ".join(flags).split())
    known = []
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vbmi2"} <= have:
        known.append("avx512")
    if {"avx2", "bmi1", "bmi2"} <= have:
        known.append("avx2")
    return known or ["scalar"]


def about_machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text()

    def first(name: str) -> str:
        found = re.search(rf"^{name}\s*:\s*(.*)$", info, re.M)
        return found.group(1).strip() if found else ""

    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "processor": first("model name") or platform.machine(),
        "family_model_stepping": "/".join(first(name) for name in ("cpu family", "model", "stepping")),
        "microcode": first("microcode"),
        "cores": os.cpu_count(),
        "kernel": platform.release().partition("-")[0],
        "shmem_huge_pages": huge.read_text().strip() if huge.exists() else "",
        "load_before": os.getloadavg()[0],
    }


def run_case(bench: Path, row: Row, isa: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [str(bench), row.case, "--threads", str(arguments.threads), "--versions", str(arguments.rounds), "--json"]
    if row.case != "tensors":
        command += ["--model-gib", str(arguments.model_gib), "--density", str(row.density)]
    done = subprocess.run(
        command, env={**os.environ, "DELTASYNC_ISA": isa}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"bench_report: {' '.join(command)} failed with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(arguments: argparse.Namespace) -> None:
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": about_machine(),
        "commit": subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "model_gib": arguments.model_gib,
        "threads": arguments.threads,
        "isas": {},
    }
    for isa in isas():
        cases: dict[str, Any] = {}
        for row in ROWS:
            if row.key in cases:
                continue
            print(f"{isa}: {row.key}", file=sys.stderr)
            cases[row.key] = run_case(arguments.bench, row, isa, arguments)
        report["isas"][isa] = cases
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)


def make_table(machines: Path) -> str:
    """A column for each machine and instruction set, a row for each figure."""
    columns = []
    for path in sorted(machines.glob("*.json")):
        report = json.loads(path.read_text())
        for isa, cases in report["isas"].items():
            head = f"{report['machine']['processor']}, {isa}, {report['model_gib']:g} GiB, {report['date']}"
            columns.append((f"[{head}](machines/{path.name})", cases))
    if not columns:
        return "None was measured with all of it yet."
    lines = ["| figure | aim | " + " | ".join(head for head, _ in columns) + " |", "|---|---|" + "---:|" * len(columns)]
    for row in ROWS:
        cells = []
        for _, cases in columns:
            value = cases.get(row.key, {}).get(row.field)
            cells.append("" if value is None else f"{value:.2f}")
        lines.append(f"| {row.label} | {row.aim} | " + " | ".join(cells) + " |")
    forms = [cases.get("copy 0.01", {}).get("form", "") for _, cases in columns]
    lines.append("| form of the copy that was chosen | | " + " | ".join(forms) + " |")
    return "\n".join(lines)


def table(arguments: argparse.Namespace) -> None:
    page = arguments.page.read_text()
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"bench_report: {arguments.page} has no {BEGIN} … {END}")
    wanted = f"{before}{BEGIN}\n{make_table(arguments.out)}\n{END}{after}"
    if wanted == page:
        return
    if arguments.check:
        sys.exit(f"bench_report: {arguments.page} has another table than the machines' files: run tools/bench_report.py table")
    arguments.page.write_text(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MACHINES, help="where the machines' files are (default: %(default)s)")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure")
    one.add_argument("name")
    one.add_argument("--bench", type=Path, default=ROOT / "build" / "bin" / "deltasync-bench")
    one.add_argument("--model-gib", type=float, default=2.0)
    one.add_argument("--threads", type=int, default=2)
    one.add_argument("--rounds", type=int, default=7)
    one.set_defaults(run=measure)
    all_of_them = commands.add_parser("table")
    all_of_them.add_argument("--check", action="store_true")
    all_of_them.add_argument("--page", type=Path, default=PAGE)
    all_of_them.set_defaults(run=table)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
