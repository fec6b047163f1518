"""What a chaos run has seen: versions that were offloaded and committed, damage that was done, how long kills cost."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from chaos_model import VARIANTS, Wrong, specs

ALIGNMENT = 64


@dataclass
class Flip:
    """A bit that the run flipped in a half: the versions that may carry it."""

    tensor: int
    element: int
    bit: int  # of the element
    versions: set[tuple[int, int]]


@dataclass
class Kill:
    name: str
    at: float
    waits_for: dict[str, int]  # follower → the step that it must reach


@dataclass
class Follower:
    name: str
    held: tuple[int, int] | None = None
    committed_at: float = field(default_factory=time.monotonic)
    commits: int = 0
    compared: int = 0


class Record:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.newest_step = 0
        self.newest: tuple[int, int] | None = None
        self.offload_s: list[float] = []
        self.followers: dict[str, Follower] = {}
        self.flips: list[Flip] = []
        self.kills: list[Kill] = []
        self.recoveries: list[tuple[float, str]] = []
        self.faults: list[str] = []  # what must never be

    def fault(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.faults.append(f"{kind}: {text}")
        print(f"!! {kind}: {text}", flush=True)

    def offloaded(self, version: tuple[int, int], seconds: float) -> None:
        self.counts["offloaded"] += 1
        self.newest, self.newest_step = version, max(self.newest_step, version[1] // VARIANTS)
        self.offload_s.append(seconds)

    def killed(self, name: str, followers: list[str]) -> None:
        """Every follower that depends on it must come to a version offloaded after this moment."""
        self.counts["kills"] += 1
        self.kills.append(Kill(name, time.monotonic(), {f: self.newest_step + 1 for f in followers}))

    def committed(self, name: str, version: tuple[int, int]) -> None:
        now = time.monotonic()
        follower = self.followers[name]
        step = version[1] // VARIANTS
        if follower.held is not None and step < follower.held[1] // VARIANTS:
            self.fault("going back", f"{name} went from step {follower.held[1] // VARIANTS} to {step}")
        follower.held, follower.committed_at = version, now
        follower.commits += 1
        self.counts["commits"] += 1
        for kill in self.kills:
            if kill.waits_for.get(name, step + 1) <= step:
                del kill.waits_for[name]
                if not kill.waits_for:
                    self.recoveries.append((now - kill.at, kill.name))
        self.kills = [kill for kill in self.kills if kill.waits_for]

    def compared(self, name: str, version: tuple[int, int], count: int, found: list[Wrong]) -> None:
        self.counts["compared"] += 1
        self.followers[name].compared += 1
        if count == 0:
            return
        allowed = {(flip.tensor, flip.element): flip.bit for flip in self.flips if version in flip.versions}
        torn = [w for w in found if w.found ^ w.expected != 1 << allowed.get((w.tensor, w.element), 64)]
        if torn or count > len(found):
            self.fault("torn", f"{name} {version[0]:x}:{version[1]}: {count} wrong elements, such as {torn[:3]}")
        else:
            self.counts["served as it was damaged"] += 1

    def report(self, seconds: float, seed: int) -> dict[str, Any]:
        times = sorted(seconds for seconds, _ in self.recoveries)

        def at(part: float) -> float | None:
            return round(times[min(len(times) - 1, int(part * len(times)))], 3) if times else None

        offloads = sorted(self.offload_s)
        return {
            "seed": seed,
            "seconds": round(seconds, 1),
            **{key: self.counts[key] for key in sorted(self.counts)},
            "torn": self.counts["torn"],
            "going back": self.counts["going back"],
            "lost": self.counts["lost"],
            "silent": self.counts["silent"],
            "ended by itself": self.counts["ended by itself"],
            "recoveries": len(times),
            "recovery_s": {"median": at(0.5), "p99": at(0.99), "max": round(times[-1], 3) if times else None},
            "slowest": [f"{name} {s:.2f} s" for s, name in sorted(self.recoveries, reverse=True)[:5]],
            "offload_s": {
                "median": offloads[len(offloads) // 2] if offloads else None,
                "max": offloads[-1] if offloads else None,
            },
            "followers": {f.name: {"commits": f.commits, "compared": f.compared} for f in self.followers.values()},
            "faults": self.faults[:50],
        }


def offset_of(variant: int, tensor: int, element: int) -> int:
    """Bytes from a half's begin to an element."""
    at = 0
    for index, spec in enumerate(specs(variant)):
        if index == tensor:
            return at + element * spec.width
        at = -(-(at + spec.elements * spec.width) // ALIGNMENT) * ALIGNMENT
    raise IndexError(tensor)
