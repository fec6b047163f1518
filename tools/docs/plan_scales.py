#!/usr/bin/env python3
"""The table and the picture of planning.md: what `deltasync plan` says of fleets that nobody here has.

    tools/docs/plan_scales.py --bench FILE [--bin DIR] [--svg FILE]"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORES, MEMORY_GBPS = 64, 300  # of each host
LINKS = ("25gbit", "100gbit", "400gbit", "wan")
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1000)
SEED_S = 1.3  # of a whole model of 1 T, 256 GPUs to 128, over RDMA, as others have measured it


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    trainers: int
    hosts: int  # of an engine


MODELS = (Model("8 B", 8e9, 1, 1), Model("70 B", 70e9, 8, 1), Model("405 B", 405e9, 32, 2), Model("1 T", 1e12, 256, 4))
ROWS = (8, 100, 1000)


class Planner:
    def __init__(self, binaries: Path, bench: Path) -> None:
        self.command = [str(binaries / "deltasync"), "plan", "--json", "--bench", str(bench)]

    def ask(self, topology: str) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(topology)
            file.flush()
            done = subprocess.run([*self.command, file.name], check=True, stdout=subprocess.PIPE, text=True)
        return dict(json.loads(done.stdout))

    def seconds(self, model: Model, engines: int, link: str, changed: float) -> tuple[float, str]:
        """The better one of no relays and a level of them, and what it hangs on; * for relays."""
        said = self.ask(topology(model, engines, link, changed))
        level = said.get("relay_level")
        if level and level["all_s"] < said["all_s"]:
            return level["all_s"], "*"
        return said["all_s"], ""


def topology(model: Model, engines: int, link: str, changed: float, **more: Any) -> str:
    host = f'cores = {CORES}\nmemory_gbps = {MEMORY_GBPS}\nlink = "{"100gbit" if link == "wan" else link}"\n'
    lines = f"mtu = 9000\n[model]\nparameters = {model.parameters}\nchanged = {changed}\n"
    lines += "".join(f"{key} = {value}\n" for key, value in more.items())
    lines += '[links]\nwan = "1gbit"\n' if link == "wan" else ""
    lines += f"[trainers]\ncount = {model.trainers}\n{host}"
    lines += f"[[engines]]\ncount = {engines}\nhosts = {model.hosts}\n{host}"
    return lines + ('through = "wan"\ndelay_ms = 20\n' if link == "wan" else "")


def short(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"


def table(planner: Planner) -> None:
    columns = [f"{what} {link}" for what in ("1%", "full") for link in LINKS]
    print("| model, trainer hosts | engines | " + " | ".join(columns) + " |")
    print("|---|---|" + "---:|" * 2 * len(LINKS))
    for model in MODELS:
        for engines in ROWS:
            cells = [planner.seconds(model, engines, link, changed) for changed in (0.01, 1) for link in LINKS]
            shown = " | ".join(short(seconds) + mark for seconds, mark in cells)
            print(f"| {model.name}, {model.trainers} | {engines} | {shown} |", flush=True)


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 130, 46, 44
STYLE = """<style>
  svg { --ink: #1f2328; --dim: #59636e; --line: #d1d9e0; --paper: #ffffff;
        --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #f0f6fc; --dim: #9198a1; --line: #3d444d; --paper: #0d1117;
          --c0: #4493f8; --c1: #f0883e; --c2: #3fb950; --c3: #ab7df8; } }
  text { font: 12px system-ui, sans-serif; fill: var(--ink); } .dim { fill: var(--dim); }
  .title { font-size: 14px; font-weight: 600; } .paper { fill: var(--paper); }
  .grid { stroke: var(--line); } .mark { stroke: var(--ink); stroke-dasharray: 2 4; }
  path { fill: none; stroke-width: 2; } .full { stroke-dasharray: 7 4; }
  .c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
</style>
"""


def picture(planner: Planner) -> str:
    """Seconds over engines, both logarithmic, hosts at 100 Gbit/s."""
    lines = [(model, changed, [planner.seconds(model, count, "100gbit", changed)[0] for count in COUNTS])
             for model in MODELS for changed in (0.01, 1)]  # fmt: skip
    low = 10 ** math.floor(math.log10(min(min(ys) for *_, ys in lines)))
    high = 10 ** math.ceil(math.log10(max(max(ys) for *_, ys in lines)))

    def x(count: float) -> float:
        return LEFT + math.log(count / COUNTS[0]) / math.log(COUNTS[-1] / COUNTS[0]) * (WIDTH - LEFT - RIGHT)

    def y(seconds: float) -> float:
        return HEIGHT - BOTTOM - math.log(seconds / low) / math.log(high / low) * (HEIGHT - TOP - BOTTOM)

    def text(at_x: float, at_y: float, words: str, style: str = "dim", anchor: str = "start") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" class="{style}" text-anchor="{anchor}">{words}</text>\n'

    def across(seconds: float, style: str) -> str:
        at = f"{y(seconds):.1f}"
        return f'<line class="{style}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>\n'

    out = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="planned">\n'
    out += STYLE + '<rect class="paper" width="100%" height="100%" rx="6"/>\n'
    out += text(8, 20, "Predicted seconds until all engines serve a version, hosts at 100 Gbit/s", "title")
    out += text(8, 36, "solid: 1% changed; dashed: whole models; dotted: 1.3 s, others, whole 1 T over RDMA")
    tick = low
    while tick <= high * 1.01:
        out += across(tick, "grid") + text(LEFT - 6, y(tick) + 4, f"{tick:g} s", "dim", "end")
        tick *= 10
    for count in COUNTS:
        out += text(x(count), HEIGHT - BOTTOM + 18, f"{count:,}", "dim", "middle")
    out += text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "engines", "dim", "middle")
    out += across(SEED_S, "mark")
    for model, changed, seconds in lines:
        colour = f"c{MODELS.index(model)}" + (" full" if changed == 1 else "")
        points = " L".join(f"{x(count):.1f} {y(value):.1f}" for count, value in zip(COUNTS, seconds, strict=True))
        out += f'<path class="{colour}" d="M{points}"/>\n'
        out += text(WIDTH - RIGHT + 6, y(seconds[-1]) + 4, model.name + (", whole" if changed == 1 else ", 1%"))
    return out + "</svg>\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    planner = Planner(args.bin, args.bench)
    table(planner)
    # The fleet of the measurement by others: 32 hosts of 8 GPUs to 16, 8 links of 400 Gbit/s each, fp8.
    twin = topology(Model("1 T", 1e12, 32, 2), 8, "3.2tbit", 1, bytes_per_parameter=1)
    said = planner.ask(twin)
    print(f"1 T in fp8, 32 hosts to 8 engines of 2, 3.2 Tbit/s: {said['all_s']:.2f} s; {said['bottleneck']['limit']}")
    if args.svg:
        args.svg.write_text(picture(planner))
    return 0


if __name__ == "__main__":
    sys.exit(main())
