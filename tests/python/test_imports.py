"""No module of the package needs another one that needs it, be it for its types alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import deltasync

ROOT = Path(deltasync.__file__).parent
NATIVE = "deltasync._native"


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ("deltasync", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> Iterator[str]:
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        inside = {".".join([*base, alias.name]) for alias in node.names}
        # From a package: the module that is asked for, else what the package itself has.
        yield from inside & known or {".".join(base)} & known


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Names of which each imports the next and the last the first; empty: there are none."""
    over: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name in over:
            return []
        for other in sorted(graph[name]):
            if found := visit(other, [*way, name]):
                return found
        over.add(name)
        return []

    for name in sorted(graph):
        if found := visit(name, []):
            return found
    return []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    known = modules()
    names = {*known, NATIVE}
    graph = {name: set(imports(name, path, names)) for name, path in known.items()} | {NATIVE: set()}
    assert "deltasync.prepared" in graph["deltasync.rollout"]  # it sees relative imports
    assert circle(graph) == []


def test_a_circle_is_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_what_needs_ray_says_so_and_nothing_else_asks_for_it() -> None:
    program = "import sys; sys.modules['ray'] = None; import deltasync; import deltasync.ray"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: deltasync.ray needs Ray: pip install ray"
