#!/usr/bin/env python3
"""Measures a machine, and makes the tables and the plot of all machines.

    tools/bench_report.py measure NAME     runs the cases; writes docs/internals/machines/NAME.json
    tools/bench_report.py table [--check]  writes the tables into docs/internals/benchmarks.md, and the plot that it shows
                                           (docs/images/machines.svg), or only compares

Measure on a quiet machine: it takes an hour on two cores, and needs five times the model (2 GiB) of memory. Each case
runs with every instruction set that the processor has; `diff`, `apply` and `offload` also over densities and threads. Ratios
compare the work with the machine's own limit, measured in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from collections.abc import Callable
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ROOT / "docs" / "internals" / "machines"
PAGE = ROOT / "docs" / "internals" / "benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "machines.svg"


def key_of(case: str, density: float, threads: int | None = None) -> str:
    """What a report calls a run; without `threads`, one with as many as the report says."""
    return f"{case} {density:g}" + (f", {threads} threads" if threads else "")


class Row(NamedTuple):
    """One figure: the case and its options, the field, and what is aimed at."""

    case: str
    density: float
    field: str
    label: str
    aim: str

    @property
    def key(self) -> str:
        return key_of(self.case, self.density)


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
    Row("full", 0.01, "ratio_to_digested_limit", "`full`, of the limit with digests", ""),
    Row("e2e", 0.01, "ratio_to_memcpy", "`e2e`, copies", "≤ 4"),
    Row("tensors", 0.01, "ratio_to_limit", "`tensors`, of copying and comparing", ""),
    Row("tensors", 0.01, "over_bytes_ms", "`tensors`, ms over the same bytes in one", "≤ 5"),
)

PEERS = key_of("baseline", 0.01)  # what others publish, beside one copy
SWEPT = 0.01  # the density of the sweep over threads
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)


class Swept(NamedTuple):
    """A case that the plot shows, as a share of its limit: 1 is as fast as that."""

    case: str
    title: str
    limit: str
    share: Callable[[dict[str, Any]], float]
    over_density: bool


PLOTTED = (
    Swept("diff", "diff: compare, encode, digest", "reading both halves", lambda run: run["ratio_to_limit"], True),
    Swept("apply", "apply: verify and commit", "touching each changed line twice",
          lambda run: 1 / run["ratio_to_limit"], True),
    Swept("offload", "offload: the trainer's wait", "one copy", lambda run: 1 / run["ratio_to_memcpy"], False),
)


def isas() -> list[str]:
    """The widest that is built for this processor, and those below it."""
    if platform.machine() == "aarch64":
        return ["neon"]
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


class Run(NamedTuple):
    case: str
    density: float
    threads: int


def wanted(threads: int, cores: int) -> dict[str, Run]:
    """All runs of one instruction set: those of the tables with `threads`, and the plot's."""
    runs = {row.key: Run(row.case, row.density, threads) for row in ROWS}
    runs[PEERS] = Run("baseline", 0.01, threads)
    counts = {2**k for k in range(cores.bit_length())} | {cores}
    for swept in PLOTTED:
        for density in DENSITIES if swept.over_density else ():
            runs.setdefault(key_of(swept.case, density), Run(swept.case, density, threads))
        for count in sorted(counts - {threads}):
            runs[key_of(swept.case, SWEPT, count)] = Run(swept.case, SWEPT, count)
    return runs


def run_case(bench: Path, run: Run, isa: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [str(bench), run.case, "--threads", str(run.threads), "--versions", str(arguments.rounds), "--json"]
    if run.case != "tensors":
        command += ["--model-gib", str(arguments.model_gib), "--density", str(run.density)]
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
        for key, run in wanted(arguments.threads, os.cpu_count() or 1).items():
            began = time.monotonic()
            cases[key] = run_case(arguments.bench, run, isa, arguments)
            print(f"{isa}: {key}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        report["isas"][isa] = cases
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)


class Column(NamedTuple):
    """One machine with one instruction set."""

    name: str  # of both
    head: str  # of its column in a table
    threads: int  # of the runs that do not say their own
    cases: dict[str, Any]


def read_columns(machines: Path) -> list[Column]:
    columns = []
    for path in sorted(machines.glob("*.json")):
        report = json.loads(path.read_text())
        for isa, cases in report["isas"].items():
            name = f"{report['machine']['processor']}, {isa}"
            head = f"[{name}, {report['model_gib']:g} GiB, {report['date']}](machines/{path.name})"
            columns.append(Column(name, head, report["threads"], cases))
    return columns


def make_table(columns: list[Column]) -> str:
    """A column for each machine and instruction set, a row for each figure."""
    if not columns:
        return "None was measured with all of it yet."
    heads = " | ".join(column.head for column in columns)
    lines = [f"| figure | aim | {heads} |", "|---|---|" + "---:|" * len(columns)]
    for row in ROWS:
        cells = []
        for column in columns:
            value = column.cases.get(row.key, {}).get(row.field)
            cells.append("" if value is None else f"{value:.2f}")
        lines.append(f"| {row.label} | {row.aim} | " + " | ".join(cells) + " |")
    forms = [column.cases.get("copy 0.01", {}).get("form", "") for column in columns]
    lines.append("| form of the copy that was chosen | | " + " | ".join(forms) + " |")
    return "\n".join(lines)


def make_peers(columns: list[Column]) -> str:
    """What `baseline` measured of others' ways and ours: a row for each way. Nothing where no machine has it."""
    columns = [column for column in columns if PEERS in column.cases]
    if not columns:
        return ""
    of_each = [{row["format"]: row for row in column.cases[PEERS]["rows"]} for column in columns]
    heads = " | ".join(f"{column.head}: encode / decode, copies" for column in columns)
    lines = ["`bench baseline` by machine, in copies of the model; files in `/dev/shm`, by all threads:", ""]
    lines += [f"| format | system | bits per change | {heads} |", "|---|---|---:|" + "---:|" * len(columns)]
    for name, first in of_each[0].items():
        cells = []
        for rows in of_each:
            row = rows.get(name)
            cells.append(f"{row['encode_to_memcpy']:.2f} / {row['decode_to_memcpy']:.2f}" if row else "")
        lines.append(f"| {name} | {first['system']} | {first['bits_per_change']:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---- the plot: for each case a panel over densities and one over threads, a line for each machine and instruction set

PANEL_WIDTH, PANEL_HEIGHT, LEFT, GAP, TOP, ROW = 300, 150, 56, 74, 70, 226
WIDTH, HEIGHT = LEFT + 2 * PANEL_WIDTH + GAP + 24, TOP + 3 * ROW - 20
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a")
STYLE = """<style>
  text { font: 12px system-ui, sans-serif; fill: #1f2328; } .dim { fill: #59636e; }
  .title { font-size: 14px; font-weight: 600; } .panel { font-weight: 600; }
  .grid { stroke: #d1d9e0; } .limit { stroke: #1f2328; stroke-dasharray: 6 4; } .data { fill: none; stroke-width: 2; }
</style>
"""


def text(x: float, y: float, words: str, style: str = "dim", anchor: str = "start", more: str = "") -> str:
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}"{more}>{words}</text>\n'


class Panel(NamedTuple):
    """One diagram with its lower left corner at (x, y). Both axes' values go from 0 to 1."""

    x: float
    y: float
    top: float  # the share at its upper edge

    def at(self, along: float, share: float) -> tuple[float, float]:
        return self.x + along * PANEL_WIDTH, self.y - share / self.top * PANEL_HEIGHT

    def across(self, share: float, style: str) -> str:
        (x, y), (end, _) = self.at(0, share), self.at(1, share)
        return f'<line class="{style}" x1="{x:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>\n'

    def frame(self, title: str, limit: str, label: str, ticks: list[tuple[float, str]]) -> str:
        out = text(self.x, self.y - PANEL_HEIGHT - 8, title, "panel")
        step = 0.25 if self.top <= 1.5 else 0.5
        for share in [step * i for i in range(int(self.top / step) + 1)]:
            out += self.across(share, "grid") + text(self.x - 6, self.at(0, share)[1] + 4, f"{share:g}", "dim", "end")
        for along, words in ticks:
            out += text(self.at(along, 0)[0], self.y + 16, words, "dim", "middle")
        out += text(self.x + PANEL_WIDTH / 2, self.y + 34, label, "dim", "middle")
        x, y = self.x - 40, self.y - PANEL_HEIGHT / 2
        turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"'
        out += text(x, y, "share of the limit", "dim", "middle", turned)
        out += self.across(1, "limit")
        return out + text(self.x + PANEL_WIDTH, self.at(0, 1)[1] - 5, f"limit: {limit}", "dim", "end")

    def line(self, colour: str, points: list[tuple[float, float]]) -> str:
        places = [self.at(along, share) for along, share in sorted(points)]
        out = ""
        if len(places) > 1:
            path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            out = f'<path class="data" stroke="{colour}" d="M{path}"/>\n'
        return out + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>\n' for x, y in places)


def over_density(column: Column, swept: Swept) -> list[tuple[float, float]]:
    keys = [(density, key_of(swept.case, density)) for density in {*DENSITIES, *(row.density for row in ROWS)}]
    return [(density, swept.share(column.cases[key])) for density, key in keys if key in column.cases]


def over_threads(column: Column, swept: Swept) -> list[tuple[float, float]]:
    runs = [run for key, run in column.cases.items()
            if re.fullmatch(re.escape(key_of(swept.case, SWEPT)) + r"(, \d+ threads)?", key)]  # fmt: skip
    return [(run.get("threads", column.threads), swept.share(run)) for run in runs]


def make_picture(columns: list[Column]) -> str:
    most = max([2, *(threads for column in columns for swept in PLOTTED for threads, _ in over_threads(column, swept))])
    low, high = DENSITIES[0], DENSITIES[-1]
    of_density = [(math.log(d / low) / math.log(high / low), f"{100 * d:g}%") for d in DENSITIES]
    counts = sorted({2**k for k in range(most.bit_length())} | {most})
    of_threads = [(math.log(count) / math.log(most), str(count)) for count in counts]
    out = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    out += 'aria-label="share of the limit by density and by threads">\n' + STYLE
    out += '<rect fill="#ffffff" width="100%" height="100%" rx="6"/>\n'
    out += text(8, 22, "Share of the machine's own limit, measured in the same run (1: as fast as the limit)", "title")
    for i, swept in enumerate(PLOTTED):
        shown = [(over_density(column, swept) if swept.over_density else [], over_threads(column, swept))
                 for column in columns]  # fmt: skip
        top = 1.25 * max([1.0, *(share for pair in shown for points in pair for _, share in points)])
        top = math.ceil(4 * top) / 4
        y = TOP + i * ROW + PANEL_HEIGHT
        dense, threaded = Panel(LEFT, y, top), Panel(LEFT + PANEL_WIDTH + GAP, y, top)
        if swept.over_density:
            out += dense.frame(swept.title, swept.limit, "elements that a step changed", of_density)
        out += threaded.frame(f"{swept.title}, {100 * SWEPT:g}%", swept.limit, "threads", of_threads)
        for k, (by_density, by_threads) in enumerate(shown):
            colour = COLOURS[k % len(COLOURS)]
            out += dense.line(colour, [(math.log(d / low) / math.log(high / low), share) for d, share in by_density])
            out += threaded.line(colour, [(math.log(n) / math.log(most), share) for n, share in by_threads])
    # The last row's first place, which no diagram has, says who is who.
    for k, column in enumerate(columns):
        y = TOP + 2 * ROW + 10 + 18 * k
        out += f'<circle cx="{LEFT + 4}" cy="{y - 4}" r="4" fill="{COLOURS[k % len(COLOURS)]}"/>\n'
        out += text(LEFT + 14, y, column.name, "")
    return out + "</svg>\n"


def put(page: str, mark: str, content: str, path: Path) -> str:
    """The page with this between the marks."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        sys.exit(f"bench_report: {path} has no {begin} … {end}")
    return f"{before}{begin}\n{content}\n{end}{after}" if content else f"{before}{begin}\n{end}{after}"


def table(arguments: argparse.Namespace) -> None:
    columns = read_columns(arguments.out)
    page = put(arguments.page.read_text(), "machines", make_table(columns), arguments.page)
    page = put(page, "peers", make_peers(columns), arguments.page)
    for path, content in ((arguments.page, page), (arguments.svg, make_picture(columns))):
        if path.exists() and path.read_text() == content:
            continue
        if arguments.check:
            sys.exit(f"bench_report: {path} is not what the machines' files make: run tools/bench_report.py table")
        path.write_text(content)


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
    all_of_them.add_argument("--svg", type=Path, default=PICTURE)
    all_of_them.set_defaults(run=table)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
