"""Pages that say how a family of models' tensors in Megatron become those of a HuggingFace checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from . import _checks, _native
from ._native import Family
from .errors import InvalidArgument, NotFound

__all__ = ["Family", "load", "names"]


def names() -> list[str]:
    """Of the families whose pages come along."""
    return [family.name for family in _builtin()]


def load(path: str | os.PathLike[str]) -> Family:
    """A page of your own: whether it can be read, before its path is given as ``tables=``. NotFound; InvalidArgument,
    which names the line."""
    return Family.parse(*read_page(path))


def read_page(path: str | os.PathLike[str]) -> tuple[str, str]:
    """A page's text, and its file's name for messages. NotFound."""
    file = Path(_checks.path("families", path))
    try:
        return file.read_text(encoding="utf-8"), file.name
    except OSError as error:
        raise NotFound(f"families: {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"families: {file}: no UTF-8") from error


def _builtin() -> list[Family]:
    return [Family.parse(text, name) for name, text in _native.builtin_families()]
