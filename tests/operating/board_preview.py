"""Draws docs/operating/grafana.json as an SVG, without Grafana: `board_preview.py OUT.svg`, with DELTASYNC_BIN and the
environment of tools/ci/check_operating.sh. Each panel's queries are asked of a Prometheus that has scraped a small
fleet for a minute, in which the follower stood still for a while.
"""

import html
import json
import math
import pathlib
import signal
import sys
import time
import unittest

from operating_support import PAGES, Fleet, Prometheus

CELL, ROW, SECONDS = 54, 22, 60  # pixels of a column and a row of the board's grid; time that is shown
COLOURS = ("#3274d9", "#e0752d", "#56a64b", "#a352cc", "#e02f44", "#8f8f8f")
UNITS = {"s": ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs")),
         "bytes": ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))}
UNITS["Bps"] = tuple((size, f"{unit}/s") for size, unit in UNITS["bytes"])


def shown(value, unit):
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    scale, name = next(((scale, name) for scale, name in UNITS.get(unit, ()) if abs(value) >= scale), (1, ""))
    return f"{value / scale:.3g} {name}".strip() if value else "0"


def text(x, y, words, size=11, colour="#333", anchor="start"):
    return (f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">'
            f"{html.escape(words)}</text>")


def legend(template, labels):
    for name, value in labels.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def series(prometheus, panel, names, end):
    """(legend, [(time, value)]) of each series."""
    for target in panel["targets"]:
        plain = target["expr"].replace("$__rate_interval", "10s").replace("$instance", ".*")
        found = prometheus.ask("query_range", query=plain, start=end - SECONDS, end=end, step=2)["result"]
        for item in found:
            points = [(when, float(value)) for when, value in item["values"]]
            labels = {**item["metric"], "instance": names.get(item["metric"].get("instance"), "")}
            yield legend(target["legendFormat"], labels), [p for p in points if math.isfinite(p[1])]


def draw_curves(curves, unit, left, top, width, height, end):
    most = max((value for _, points in curves for _, value in points), default=0) or 1
    yield text(left, top + 9, shown(most, unit), 9, "#888")
    for index, (name, points) in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{left + width * (1 - (end - when) / SECONDS):.1f},{top + height * (1 - value / most):.1f}"
                        for when, value in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}"/>'
        if index < 3:
            yield text(left, top + height + 13 + 11 * index, name[:int(width / 5)], 9, colour)
    if len(curves) > 3:
        yield text(left + width, top + height + 35, f"and {len(curves) - 3} more", 9, "#888", "end")


def draw(panel, prometheus, names, end):
    place = panel["gridPos"]
    x, y, width, height = place["x"] * CELL, place["y"] * ROW, place["w"] * CELL, place["h"] * ROW
    if panel["type"] == "row":
        yield text(x + 6, y + 16, panel["title"], 14, "#111")
        return
    yield f'<rect x="{x + 3}" y="{y + 3}" width="{width - 6}" height="{height - 6}" fill="#fff" stroke="#ddd"/>'
    yield text(x + 10, y + 19, panel["title"])
    unit = panel["fieldConfig"]["defaults"]["unit"]
    curves = list(series(prometheus, panel, names, end))
    if panel["type"] == "stat":
        yield text(x + width / 2, y + height - 18, shown(curves[0][1][-1][1], unit), 26, "#3274d9", "middle")
    else:
        yield from draw_curves(curves, unit, x + 10, y + 28, width - 20, height - 72, end)


class Draw(unittest.TestCase):
    """Not a test: what a test has, so that all processes end with it."""

    def runTest(self):
        fleet = Fleet(self, interval_ms=5000)
        prometheus = Prometheus(self, fleet, pods=["follower"])
        names = {address: name for name, (address, _) in fleet.pages().items()}
        time.sleep(30)
        fleet.follower.process.send_signal(signal.SIGSTOP)
        time.sleep(12)
        fleet.follower.process.send_signal(signal.SIGCONT)
        time.sleep(20)
        end = time.time()
        board = json.loads((PAGES / "grafana.json").read_text())
        lines = [line for panel in board["panels"] for line in draw(panel, prometheus, names, end)]
        height = ROW * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
        pathlib.Path(OUT).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {24 * CELL} {height}" font-family="sans-serif">\n'
            f'<rect width="100%" height="100%" fill="#f4f5f5"/>\n' + "\n".join(lines) + "\n</svg>\n")


if __name__ == "__main__":
    OUT = sys.argv.pop(1)
    sys.exit(not unittest.TextTestRunner().run(Draw()).wasSuccessful())
