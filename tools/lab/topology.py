"""What a lab is made of, from a TOML file, and what happens to it, from a script of faults.

    [models]                      # optional: models/step_0 … are made; from each to the next this part changes
    mib = 64
    versions = 4
    changed = 0.01

    [[hosts]]
    names = ["rollout1", "rollout2"]
    rate = "1gbit"                # of each one's link, as tc has it; without: no limit
    delay_ms = 5                  # optional: of each frame, in both directions
    run.pull = "deltasync pull …" # processes rollout1.pull and rollout2.pull, started in the order of the file

    [check]                       # optional: what is to be the same at the end
    published = "models/step_3"
    received = "out/current"      # of each host
    hosts = ["rollout1", "rollout2"]"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tomllib  # of Python 3.11

NAME = re.compile(r"[a-z][a-z0-9-]{0,14}")  # it is an interface's name as well
RESERVED = ("lo", "switch", "eth0", "models", "names", "token")
#: By action, how many names it may have.
ACTIONS = {"kill": 1, "start": 1, "stop": 1, "cont": 1, "reboot": 1, "cut": 2, "restore": 2}


class LabError(Exception):
    """What the caller has to change; the text says what."""


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    rate: str | None
    delay_ms: float
    commands: dict[str, str]


class Models(NamedTuple):
    mib: int
    versions: int
    changed: float


class Check(NamedTuple):
    published: str
    received: str
    hosts: list[str]


class Fault(NamedTuple):
    at_s: float
    action: str
    names: list[str]


def _take(where: str, table: dict[str, Any], needed: dict[str, Any], optional: dict[str, Any]) -> list[Any]:
    """The values of keys, in order, each of the type that the key is to have."""
    kinds = {**needed, **optional}
    for key in table:
        if key not in kinds:
            raise LabError(f"{where}: no key '{key}'; there are {', '.join(kinds)}")
    for key, kind in kinds.items():
        if key in needed and key not in table:
            raise LabError(f"{where}: '{key}' is missing")
        if key in table and (not isinstance(table[key], kind) or isinstance(table[key], bool)):
            raise LabError(f"{where}: '{key}' is {table[key]!r}")
    return [table.get(key) for key in kinds]


class Topology:
    def __init__(self, data: dict[str, Any]) -> None:
        hosts, models, check = _take("topology", data, {"hosts": list}, {"models": dict, "check": dict})
        self.hosts: dict[str, Host] = {}
        for table in hosts:
            self._add(table)
        numbers = {"mib": int, "versions": int, "changed": (int, float)}
        self.models = Models(*_take("models", models, numbers, {})) if models else None
        kinds = {"published": str, "received": str, "hosts": list}
        self.check = Check(*_take("check", check, kinds, {})) if check else None
        for name in self.check.hosts if self.check else []:
            if name not in self.hosts:
                raise LabError(f"check: no host '{name}'; there are {', '.join(self.hosts)}")

    @staticmethod
    def load(path: Path) -> Topology:
        try:
            return Topology(tomllib.loads(path.read_text()))
        except (LabError, tomllib.TOMLDecodeError) as error:
            raise LabError(f"{path}: {error}") from None

    def _add(self, table: dict[str, Any]) -> None:
        optional = {"rate": str, "delay_ms": (int, float), "run": dict}
        names, rate, delay_ms, commands = _take("hosts", table, {"names": list}, optional)
        for name in names:
            if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
                raise LabError(f"hosts: {name!r} is no name: 15 of a-z, 0-9 and '-', and none of {', '.join(RESERVED)}")
            if name in self.hosts:
                raise LabError(f"hosts: two are called '{name}'")
            number = len(self.hosts) + 1
            address = f"10.77.{number // 250}.{number % 250 + 1}"
            self.hosts[name] = Host(name, address, rate, delay_ms or 0, commands or {})


def read_faults(path: Path, topology: Topology) -> list[Fault]:
    known = set(topology.hosts) | {f"{host.name}.{name}" for host in topology.hosts.values() for name in host.commands}
    faults = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if words := line.split("#")[0].split():
            try:
                faults.append(_fault(words, set(topology.hosts), known))
            except (LabError, ValueError) as error:
                raise LabError(f"{path}:{number}: {error}") from None
    return sorted(faults, key=lambda fault: fault.at_s)


def _fault(words: list[str], hosts: set[str], known: set[str]) -> Fault:
    at_s, action, names = float(words[0]), words[1] if words[1:] else "", words[2:]
    if action not in ACTIONS:
        raise LabError(f"no action '{action}'; there are {', '.join(ACTIONS)}")
    if not 1 <= len(names) <= ACTIONS[action]:
        raise LabError(f"{action} has {len(names)} names")
    allowed = hosts if action in ("reboot", "cut", "restore") else known
    for name in names:
        if name not in allowed:
            raise LabError(f"{action}: no '{name}'; there are {', '.join(sorted(allowed))}")
    return Fault(at_s, action, names)
