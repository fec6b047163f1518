#!/usr/bin/env python3
"""Rules of the tree that no compiler checks. Prints every breach and exits with 1 if there is one.

Usage: check_tree.py [ROOT]
"""

import pathlib
import re
import subprocess
import sys

from awaits import check_awaits

# What may stand at the top level. A new entry is a decision, so it is made here too.
TOP_LEVEL = {
    ".ci", ".clang-format", ".clang-tidy", ".gitignore", "CMakeLists.txt", "CMakePresets.json", "LICENSE", "README.md",
    "agent", "docs", "include", "pyproject.toml", "receiver", "src", "tests", "tools",
}

# What every room of the agent may include.
AGENT = {"deltasync/", "base/", "format/", "delta/", "shm/", "net/", "agent/background.hpp", "agent/metrics.hpp",
         "agent/options.hpp", "agent/room.hpp"}

# Layers: a file below the first path may include project headers below the listed paths only; the first path that fits
# counts. (architecture.md "Layers".) Tests and tools may include anything.
LAYERS = {
    "include/": {"deltasync/"},
    "src/base/": {"deltasync/", "base/"},
    "src/format/": {"deltasync/", "base/", "format/"},
    "src/placement/": {"deltasync/", "base/", "format/", "placement/"},
    "src/delta/": {"deltasync/", "base/", "format/", "delta/"},
    "src/gpu/": {"deltasync/", "base/", "format/", "placement/", "delta/", "gpu/"},
    "src/shm/": {"deltasync/", "base/", "format/", "shm/"},
    "src/net/": {"deltasync/", "base/", "format/", "net/"},
    "src/bucket/": {"deltasync/", "base/", "format/", "delta/", "shm/", "net/", "bucket/"},
    "src/commit/": {"deltasync/", "commit/"},
    "src/capacity/": {"deltasync/", "capacity/"},
    "src/export/": {"deltasync/", "export/"},
    "src/writer/": {"deltasync/", "base/", "format/", "delta/", "gpu/", "shm/", "net/", "writer/"},
    "agent/versions/": AGENT | {"agent/versions/"},
    "agent/derive/": AGENT | {"agent/versions/", "agent/derive/"},
    "agent/plans/": AGENT | {"agent/versions/", "agent/derive/", "agent/plans/"},
    "agent/trainer/": AGENT | {"agent/versions/", "agent/plans/", "agent/trainer/"},
    "agent/serve/": AGENT | {"agent/core.hpp", "agent/plans/packed_frame_cache.hpp", "agent/serve/"},
    "agent/http/": AGENT | {"agent/core.hpp", "agent/serve/pull_server.hpp", "agent/trainer/trainer_server.hpp",
                            "agent/http/"},
    "agent/": AGENT | {"agent/"},
    "receiver/targets/segment/": {"deltasync/", "base/", "format/", "delta/", "shm/", "receiver/targets/", "writer/"},
    "receiver/targets/": {"deltasync/", "base/", "format/", "placement/", "delta/", "gpu/", "receiver/targets/"},
    "receiver/local/": {"deltasync/", "base/", "format/", "shm/", "net/", "receiver/"},
    "receiver/": {"deltasync/", "base/", "format/", "placement/", "delta/", "gpu/", "net/", "bucket/", "receiver/"},
    "src/python/": {"deltasync/", "base/", "net/", "bucket/", "commit/", "export/", "receiver/control/", "python/"},
}
PROJECT_ROOTS = ("deltasync/", "base/", "format/", "placement/", "delta/", "gpu/", "shm/", "net/", "bucket/", "commit/", "capacity/", "export/", "writer/",
                 "agent/", "receiver/", "python/", "tools/", "tests/")

# Absolute paths that only exist on somebody's machine.
MACHINE_PATH = re.compile(r"(?<![\w.$}/])/(?:work|root|home|Users)/[\w.-]+")
# Types that users of the library have to know: classes, structs, enums and aliases of include/, nested ones too.
# Six are those of export plans, which are data that users read: a piece, a copy and its steps, what is quantised, a
# plan; a page is opaque.
# Six are those of the control service: an engine's hooks with two of their words, options, the server, the spans of an answer.
PUBLIC_TYPES_MAX = 57
# A .cpp or .hpp beyond this holds more than one idea.
LINES_MAX = 700

TEXT_SUFFIXES = {".cpp", ".hpp", ".md", ".py", ".sh", ".cmake", ".txt", ".json", ".yaml", ""}


def tracked(root):
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, check=True,
                         capture_output=True).stdout.decode()
    return sorted({name for name in out.split("\0") if name and (root / name).is_file()})


def check_includes(name, text):
    layer = next((prefix for prefix in LAYERS if name.startswith(prefix)), None)
    if layer is None:
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not match:
            continue
        included = match.group(1)
        if included.startswith(PROJECT_ROOTS):
            if not included.startswith(tuple(LAYERS[layer])):
                yield f"{name}:{number}: {layer} must not include {included}"
        elif "/" not in included:
            yield f"{name}:{number}: include \"{included}\" by its path from the layer's root"


def check_public_header(name, text):
    if not name.startswith("include/"):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(boost|asio|cuda)\b.*::|#\s*include\s+<(boost|cuda)", line):
            yield f"{name}:{number}: the public API names no Boost or CUDA type"


def public_types(text):
    """The types that a header declares to its users, in order."""
    code = re.sub(r"//[^\n]*", "", text)
    defined = set(re.findall(r"\b(?:class|struct|enum class)\s+(?:\[\[nodiscard\]\]\s+)?(\w+)[^;{(]*\{", code))
    private_indent = None  # of the class whose private part this is
    for line in code.splitlines():
        indent = len(line) - len(line.lstrip())
        if re.match(r"\s*private:", line):
            private_indent = indent - 1
        elif private_indent is not None and line.strip() and indent <= private_indent:
            private_indent = None
        if private_indent is not None:
            continue
        match = re.match(r"\s*(?:class|struct|enum class)\s+(?:\[\[nodiscard\]\]\s+)?(\w+)(?!\w|<|::)(.*)", line)
        if match and not (match[2].startswith(";") and match[1] in defined):
            yield match[1]
        elif match := re.match(r"\s*using\s+(\w+)\s*=", line):
            yield match[1]


def check_public_types(root, names):
    types = [(name, kind) for name in names if name.startswith("include/")
             for kind in public_types((root / name).read_text())]
    if len(types) > PUBLIC_TYPES_MAX:
        yield f"include/: {len(types)} public types, {PUBLIC_TYPES_MAX} at most: " + ", ".join(
            kind for _, kind in types)


def check_links(root, name, text):
    if not name.endswith(".md"):
        return
    directory = (root / name).parent
    for number, line in enumerate(text.splitlines(), 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if re.match(r"[a-z]+:", target) or target.startswith("#"):
                continue
            if not (directory / target.split("#")[0]).exists():
                yield f"{name}:{number}: link to {target}, which is not there"


def check_doc_names(root, name, text):
    """A page that any text names is there: by its path, or in code by its name alone, so that pages may move."""
    if pathlib.PurePosixPath(name).suffix not in TEXT_SUFFIXES:
        return
    pages = {page.name for page in [root / "README.md", *(root / "docs").rglob("*.md")]}
    for number, line in enumerate(text.splitlines(), 1):
        for page in re.findall(r"\bdocs/[\w./-]+\.md\b", line):
            if not (root / page).exists():
                yield f"{name}:{number}: {page} is not there"
        if name.endswith(".md"):
            continue  # its links are checked
        for page in re.findall(r"(?<![\w./{}-])\w[\w-]*\.md\b", line):
            if page not in pages:
                yield f"{name}:{number}: docs/ has no page {page}"


def check_page_names(names):
    """The name of a page alone says which is meant."""
    pages = {}
    for name in names:
        path = pathlib.PurePosixPath(name)
        if path.parts[0] == "docs" and path.suffix == ".md" and path.name != "index.md":
            if path.name in pages:
                yield f"{name}: {pages[path.name]} has the same name"
            pages[path.name] = name


def check_text(name, text):
    suffix = pathlib.PurePosixPath(name).suffix
    if suffix not in TEXT_SUFFIXES:
        return
    if "\r" in text:
        yield f"{name}: carriage returns"
    if text and not text.endswith("\n"):
        yield f"{name}: no newline at the end"
    for number, line in enumerate(text.splitlines(), 1):
        if line != line.rstrip() and suffix != ".md":
            yield f"{name}:{number}: trailing blanks"
        if MACHINE_PATH.search(line):
            yield f"{name}:{number}: a path of one machine: {line.strip()}"
    if suffix == ".hpp" and "#pragma once" not in text:
        yield f"{name}: no #pragma once"
    if suffix in (".cpp", ".hpp") and len(text.splitlines()) > LINES_MAX:
        yield f"{name}: {len(text.splitlines())} lines; a file is one idea of at most {LINES_MAX}"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    breaches = []
    names = tracked(root)
    if not names:
        breaches.append(f"{root}: no file is tracked")
    for name in names:
        top = name.split("/")[0]
        if top not in TOP_LEVEL:
            breaches.append(f"{name}: not among the agreed top-level entries")
        data = (root / name).read_bytes()
        if b"\0" in data:
            continue  # binary: corpora, goldens
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if name.startswith("tests/") and "/corpus/" in name:
            continue
        for check in (check_includes, check_public_header, check_text, check_awaits):
            breaches += check(name, text)
        breaches += check_links(root, name, text)
        breaches += check_doc_names(root, name, text)
    breaches += check_page_names(names)
    breaches += check_public_types(root, names)
    breaches = list(dict.fromkeys(breaches))
    for breach in breaches:
        print(breach, file=sys.stderr)
    print(f"check_tree: {len(names)} files, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
