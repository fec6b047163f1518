"""How much the links of a lab carry, and for how long they are busy."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

SAMPLE_S = 0.05


class Meter:
    """Reads the counters of the switch's ports, whose names are those of the links, from a thread of its own."""

    def __init__(self, switch_pid: int, rates: dict[str, float | None]) -> None:
        self.counters = Path(f"/proc/{switch_pid}/net/dev")
        self.rates = rates
        self.full_s = {link: [0.0, 0.0] for link in rates}
        self.began = self.last_at = time.monotonic()
        self.last = self.first = self.read()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="meter", daemon=True)
        self.thread.start()

    def read(self) -> dict[str, tuple[int, int]]:
        """By link, the bytes that the host sent and that it was sent."""
        found = {}
        for line in self.counters.read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            if name.strip() in self.rates:
                words = numbers.split()
                found[name.strip()] = (int(words[0]), int(words[8]))
        return found

    def _run(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        now, at = self.read(), time.monotonic()
        passed = at - self.last_at
        for link, rate in self.rates.items():
            for way in range(2):
                carried = 8 * (now[link][way] - self.last[link][way])
                if carried and carried >= (rate or 0) * passed / 2:
                    self.full_s[link][way] += passed
        self.last, self.last_at = now, at

    def report(self) -> dict[str, Any]:
        links, now = [], self.read()
        for link, rate in self.rates.items():
            entry: dict[str, Any] = {"link": link, "rate_bits_per_s": rate}
            for way, name in enumerate(("up", "down")):
                carried = now[link][way] - self.first[link][way]
                entry[f"{name}_bytes"] = carried
                entry[f"{name}_busy_s"] = round(8 * carried / rate, 3) if rate else None
                entry[f"{name}_full_s"] = round(self.full_s[link][way], 2)
            links.append(entry)
        return {"seconds": round(time.monotonic() - self.began, 2), "links": links}

    def close(self) -> None:
        self.ended.set()
        self.thread.join()


def table(report: dict[str, Any]) -> str:
    """busy: what the bytes take at the link's rate; full: sampled, at half of the rate at least."""
    columns = ["link", "Mbit/s", *(f"{way} {what}" for way in ("up", "down") for what in ("MB", "busy s", "full s"))]
    rows = [columns]
    for link in report["links"]:
        rate = link["rate_bits_per_s"]
        row = [link["link"], f"{rate / 1e6:g}" if rate else "-"]
        for way in ("up", "down"):
            busy = link[f"{way}_busy_s"]
            row += [f"{link[f'{way}_bytes'] / 1e6:.2f}", "-" if busy is None else f"{busy:.2f}"]
            row.append(f"{link[f'{way}_full_s']:.2f}")
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, f"{report['seconds']} s"])
