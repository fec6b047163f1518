"""Docstrings as Markdown, for the reference that mkdocstrings makes of the Python package.

They are written for `help()`: ``code`` in double backquotes, :class:`Names`, and arguments in indented lists.
"""

import re

import griffe

RULES = [
    (re.compile(r":(?:meth|func):`~?(?:[\w.]+\.)?(\w+)`"), r"`\1()`"),
    (re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`"), r"`\1`"),
    (re.compile(r"``(.+?)``", re.S), r"`\1`"),
    (re.compile(r"::$", re.M), ":"),
    (re.compile(r"^ {2}(`\w+`) +", re.M), r"- \1: "),  # items of lists of arguments
    (re.compile(r"^(`\w+`(?:(?:,| and) `\w+`)*):", re.M), r"- \1:"),
    (re.compile(r"(?<!\n)\n(- )(?=`)"), r"\n\n\1"),
]


def as_markdown(text: str) -> str:
    for pattern, to in RULES:
        text = pattern.sub(to, text)
    return text


class Markdown(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
