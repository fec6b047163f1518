#!/usr/bin/env python3
"""A library that only tests link is dead: it is bound to something that ships, or removed. Reads the CMakeLists as text.

What ships: the executables outside of tests/, the Python module, and the installed library, which is made of layers.
Prints each library that none of them reaches, with what links it. Exits with 1 if there is one that DEAD does not have,
or if DEAD has one that is alive.

Usage: check_reach.py [ROOT]
"""

import collections
import pathlib
import re
import sys

COMMAND = re.compile(r"^\s*(\w+)\s*\(((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*)\)", re.MULTILINE)
KEYWORDS = {"PUBLIC", "PRIVATE", "INTERFACE"}
#: Commands that make a target → whether it ships, if it is made outside of tests/.
MAKES = {"deltasync_library": False, "add_library": False, "deltasync_executable": True, "add_executable": True,
         "nanobind_add_module": True, "deltasync_test": False, "deltasync_gpu_test": False}

#: Known to be dead → what is to become of it.
DEAD = {}


def commands(text):
    """(command, arguments) in order, without comments."""
    code = re.sub(r"#[^\n]*", "", text)
    for match in COMMAND.finditer(code):
        yield match[1].lower(), re.findall(r"[^\s\"]+", match[2])


class Tree:
    def __init__(self):
        self.links = collections.defaultdict(set)  # target → what it links
        self.made_in = {}  # target → its CMakeLists
        self.libraries, self.roots = set(), set()

    def read(self, name, text):
        tests = name.startswith("tests/")
        layers = set()
        for command, arguments in commands(text):
            target, rest = (arguments or [""])[0], arguments[1:]
            if command in ("set", "list") and "layers" in arguments[:2]:
                layers |= {f"deltasync_{layer}" for layer in rest}
            elif command == "install" and target == "TARGETS" and not tests:
                self.roots |= {word for word in rest if word.islower()}
            elif command in MAKES and not {"ALIAS", "IMPORTED"} & set(rest) and not target.startswith("$"):
                self.made_in[target] = name
                self.links[target] |= after(rest, "DEPENDS")
                if not tests:
                    (self.roots if MAKES[command] else self.libraries).add(target)
            elif command == "target_link_libraries":
                self.links[target] |= set(rest) - KEYWORDS
        if layers:  # the archive that is installed is made of their objects
            self.links["deltasync_archive"] |= layers

    def reached(self):
        found, left = set(), list(self.roots)
        while left:
            target = left.pop()
            if target not in found:
                found.add(target)
                left += self.links[target]
        return found

    def dead(self):
        reached = self.reached()
        for library in sorted(self.libraries - reached):
            users = sorted(user for user, links in self.links.items() if library in links)
            yield library, f"{self.made_in[library]}: nothing that ships links {library}, only {', '.join(users) or 'none'}"


def after(arguments, keyword):
    """The arguments from the keyword to the next one."""
    if keyword not in arguments:
        return set()
    rest = arguments[arguments.index(keyword) + 1:]
    return set(rest[:next((i for i, word in enumerate(rest) if word in ("SOURCES", "LABELS")), len(rest))])


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    tree = Tree()
    for path in sorted([*root.rglob("CMakeLists.txt"), *(root / "tools/cmake").glob("*.cmake")]):
        name = path.relative_to(root).as_posix()
        if not name.startswith((".", "build")):
            tree.read(name, path.read_text())
    breaches = [] if tree.roots and tree.libraries else [f"{root}: its CMakeLists make no program, or no library"]
    dead = dict(tree.dead())
    for library, words in dead.items():
        if library in DEAD:
            print(f"check_reach: {words}; {DEAD[library]}")
        else:
            breaches.append(f"{words}: bind it to something that ships, or remove it")
    for library in DEAD.keys() & tree.libraries - dead.keys():
        breaches.append(f"tools/lint/check_reach.py: {library} is alive: take it out of DEAD")
    for breach in breaches:
        print(breach, file=sys.stderr)
    print(f"check_reach: {len(tree.libraries)} libraries, {len(dead)} of them dead, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
