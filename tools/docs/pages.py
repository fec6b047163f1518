"""The fenced blocks of the pages in docs/, and what the comments before them say about running them.

A page is read as a few scripts. Blocks with the same language and title (```` ```python title="a.py" ````) are parts
of one script, in the order of the page. Comments say what a reader does not need to see:

    <!-- not run: REASON -->         the next block is shown only
    <!-- until: COMMAND -->          the next block's script goes on until it is stopped; it has done its work when this
                                     shell command succeeds
    <!-- hidden python trainer.py    code of that script that stands at this place
    ... -->
"""

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)(`{3,})([\w+-]*)(.*)$")
COMMENT = re.compile(r"^ *<!-- (not run|until): (.*?) *-->$")
HIDDEN = re.compile(r"^ *<!-- hidden (\w+)(?: (\S+))?$")
TITLE = re.compile(r'title="([^"]+)"')


class BadPage(Exception):
    """A page that cannot be read as scripts; the text names page and line."""


@dataclasses.dataclass
class Block:
    page: str
    line: int
    language: str
    title: str
    code: str
    not_run: str = ""
    until: str = ""

    @property
    def where(self):
        return f"{self.page}:{self.line}"


def pages(root=ROOT):
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def words(text):
    """What a reader reads: words of prose, tables and code; no comments, and no rules of tables."""
    return sum(re.search(r"\w", word) is not None for word in re.sub(r"<!--.*?-->", " ", text, flags=re.S).split())


def blocks_of(page, text):
    """The blocks of a page in order, hidden ones too."""
    lines = text.splitlines()
    said = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        began = number + 1
        if comment := COMMENT.match(line):
            said[comment[1]] = comment[2]
        elif hidden := HIDDEN.match(line):
            code, number = _until(lines, number + 1, lambda one: one.strip() == "-->", f"{page}:{began}: hidden")
            yield Block(page, began, hidden[1], hidden[2] or "", "\n".join(code) + "\n")
        elif fence := FENCE.match(line):
            indent, ticks = fence[1], fence[2]
            code, number = _until(lines, number + 1, lambda one: one.strip() == ticks, f"{page}:{began}: block")
            title = TITLE.search(fence[4])
            yield Block(page, began, fence[3], title[1] if title else "",
                        "".join(one.removeprefix(indent) + "\n" for one in code),
                        said.pop("not run", ""), said.pop("until", ""))
        elif line.strip() and said:
            raise BadPage(f"{page}:{began}: {sorted(said)} stands before no block")
        number += 1
    if said:
        raise BadPage(f"{page}: {sorted(said)} stands before no block")


def _until(lines, number, is_end, what):
    taken = []
    while number < len(lines):
        if is_end(lines[number]):
            return taken, number
        taken.append(lines[number])
        number += 1
    raise BadPage(f"{what} has no end")
