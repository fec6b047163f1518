#!/usr/bin/env python3
"""tidy_files.py COMPILE_COMMANDS product|tests: lists the project's own sources, slowest kinds first so that two cores
end together."""

import json
import pathlib
import sys

root = pathlib.Path(__file__).resolve().parents[2]
files = set()
for entry in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    path = pathlib.Path(entry["file"]).resolve()
    if not path.is_relative_to(root) or path.name == "asio_impl.cpp":  # that one is Asio's own code
        continue
    if path.is_relative_to(root / "tests") == (sys.argv[2] == "tests"):
        files.add(path)
if not files:
    sys.exit("tidy_files: no source of this tree in " + sys.argv[1])
order = ("agent/", "src/net/", "tools/", "receiver/", "src/", "tests/")


def rank(path):
    name = path.relative_to(root).as_posix()
    return next((i for i, prefix in enumerate(order) if name.startswith(prefix)), len(order)), name


for path in sorted(files, key=rank):
    print(path)
