#!/usr/bin/env python3
"""What `deltasync plan` predicts for fleets of many sizes: a table and a plot.

    tools/plan_report.py           writes the table into docs/operating/planning.md, and the plot that it shows
                                   (docs/images/plan.svg); prints all figures
    tools/plan_report.py --check   only compares

Rates are those that the planner has built in, so that every machine makes the same figures. Each is the sooner of two
ways: all engines pull from the trainers, or one level of relays stands between.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench_report import COLOURS, STYLE, put, text

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "operating" / "planning.md"
PICTURE = ROOT / "docs" / "images" / "plan.svg"


class Size(NamedTuple):
    name: str
    parameters: float
    trainers: int  # hosts
    hosts: int  # of an engine


SIZES = (Size("7B", 7e9, 1, 1), Size("70B", 70e9, 16, 1), Size("1T", 1e12, 256, 2))
CHANGED = (0.001, 0.01, 0.1)
SHOWN = 0.01  # of CHANGED, in the table
ENGINES = (10, 100, 1000)
LINKS = (25, 100, 400)  # Gbit/s
HOST = 'link = "{link}gbit"\ncores = 64\nmemory_gbps = 300\n'


class Fleet(NamedTuple):
    size: Size
    changed: float
    engines: int
    link: int


class Predicted(NamedTuple):
    seconds: float
    limit: str
    relays: int  # 0: none


FLEETS = [Fleet(*each) for each in itertools.product(SIZES, CHANGED, ENGINES, LINKS)]
Figures = dict[Fleet, Predicted]


def topology(fleet: Fleet) -> str:
    host = HOST.format(link=fleet.link)
    return (f"[model]\nparameters = {fleet.size.parameters:g}\nchanged = {fleet.changed:g}\n"
            f"[trainers]\ncount = {fleet.size.trainers}\n{host}"
            f"[[engines]]\ncount = {fleet.engines}\nhosts = {fleet.size.hosts}\n{host}")  # fmt: skip


def predict(cli: Path, fleet: Fleet, file: Path) -> Predicted:
    file.write_text(topology(fleet))
    said = json.loads(subprocess.run([cli, "plan", file, "--json"], check=True, stdout=subprocess.PIPE).stdout)
    relays = said.get("relay_level")
    if relays and relays["all_s"] < said["all_s"]:
        return Predicted(relays["all_s"], relays["bottleneck"], relays["relays"])
    return Predicted(said["all_s"], said["bottleneck"]["limit"], 0)


def figures(cli: Path) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        return {fleet: predict(cli, fleet, Path(directory) / "fleet.toml") for fleet in FLEETS}


def seconds_text(predicted: Predicted) -> str:
    """Two digits, and a star where relays make it sooner."""
    digits = max(0, 1 - math.floor(math.log10(predicted.seconds)))
    return f"{predicted.seconds:.{digits}f}" + "*" * (predicted.relays > 0)


def make_table(all_of_them: Figures, changed: float) -> str:
    lines = ["| parameters | " + " | ".join(f"{link} Gbit/s" for link in LINKS) + " |", "|---|" + "---:|" * len(LINKS)]
    for size in SIZES:
        line = f"| {size.name} |"
        for link in LINKS:
            cells = [seconds_text(all_of_them[Fleet(size, changed, engines, link)]) for engines in ENGINES]
            line += " " + " / ".join(cells) + " |"
        lines.append(line)
    return "\n".join(lines)


# ---- the plot: a panel for each size, a line for each link and part that changed

PANEL_WIDTH, PANEL_HEIGHT, LEFT, GAP, TOP = 200, 260, 56, 24, 64
WIDTH, HEIGHT = LEFT + 3 * PANEL_WIDTH + 2 * GAP + 150, TOP + PANEL_HEIGHT + 50
LOW, HIGH = 0.1, 1000.0
DASHES = ("2 3", "7 4", "none")


def make_picture(all_of_them: Figures) -> str:
    def up(seconds: float) -> float:
        return TOP + PANEL_HEIGHT * (1 - math.log(seconds / LOW) / math.log(HIGH / LOW))

    out = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    out += 'aria-label="predicted seconds by engines, links and part that changed">\n' + STYLE
    out += '<rect fill="#ffffff" width="100%" height="100%" rx="6"/>\n'
    out += text(8, 22, "Predicted seconds from the offload until all engines serve the version", "title")
    for i, size in enumerate(SIZES):
        x = LEFT + i * (PANEL_WIDTH + GAP)
        out += text(x, TOP - 10, f"{size.name}: {size.trainers} trainer host{'s' * (size.trainers > 1)}", "panel")
        for power in range(round(math.log10(LOW)), round(math.log10(HIGH)) + 1):
            y = up(10.0**power)
            style = "limit" if power == 0 else "grid"
            out += f'<line class="{style}" x1="{x}" x2="{x + PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>\n'
            if i == 0:
                out += text(x - 6, y + 4, f"{10.0**power:g} s", "dim", "end")
        along = [x + PANEL_WIDTH * (0.06 + 0.44 * k) for k in range(len(ENGINES))]
        for place, engines in zip(along, ENGINES):
            out += text(place, TOP + PANEL_HEIGHT + 16, f"{engines:,}", "dim", "middle")
        out += text(x + PANEL_WIDTH / 2, TOP + PANEL_HEIGHT + 34, "engines", "dim", "middle")
        for colour, link in zip(COLOURS, LINKS):
            for dash, changed in zip(DASHES, CHANGED):
                fleets = [Fleet(size, changed, engines, link) for engines in ENGINES]
                places = [(at, up(all_of_them[fleet].seconds)) for at, fleet in zip(along, fleets)]
                path = " L".join(f"{at:.1f} {y:.1f}" for at, y in places)
                out += f'<path class="data" stroke="{colour}" stroke-dasharray="{dash}" d="M{path}"/>\n'
    x = WIDTH - 140
    legend = [(f'stroke="{colour}"', f"{link} Gbit/s") for colour, link in zip(COLOURS, LINKS)]
    legend += [(f'stroke="#59636e" stroke-dasharray="{dash}"', f"{100 * changed:g}% changed")
               for dash, changed in zip(DASHES, CHANGED)]  # fmt: skip
    for k, (style, words) in enumerate(legend):
        y = TOP + 20 + 20 * k
        out += f'<line class="data" {style} x1="{x}" x2="{x + 30}" y1="{y - 4}" y2="{y - 4}"/>\n'
        out += text(x + 38, y, words)
    return out + text(x, TOP + 160, "broken black: 1 s") + "</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cli", type=Path, default=ROOT / "build" / "bin" / "deltasync")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--svg", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    all_of_them = figures(arguments.cli)
    page = put(arguments.page.read_text(), "plan", make_table(all_of_them, SHOWN), arguments.page)
    for path, content in ((arguments.page, page), (arguments.svg, make_picture(all_of_them))):
        if path.exists() and path.read_text() == content:
            continue
        if arguments.check:
            sys.exit(f"plan_report: {path} is not what deltasync plan predicts: run tools/plan_report.py")
        path.write_text(content)
    if arguments.check:
        return
    for fleet, predicted in all_of_them.items():
        relays = f", {predicted.relays} relays" if predicted.relays else ""
        print(f"{fleet.size.name:4} {100 * fleet.changed:4g}% {fleet.engines:5} engines {fleet.link:4} Gbit/s "
              f"{predicted.seconds:8.2f} s  {predicted.limit}{relays}")  # fmt: skip


if __name__ == "__main__":
    main()
