"""Why the weights of a model are of no version: known for as long as the model is, by each of its receivers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

#: Models (of several the first) → why.
_doubts: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class ModelDoubt:
    """An attribute of objects that have a ``model``; empty: its weights are of a version, or never were written. The
    next receiver of the same model has it, too."""

    def __get__(self, holder: Any, _: Any = None) -> str:
        return _doubts.get(_key(holder.model), "")

    def __set__(self, holder: Any, why: str) -> None:
        if why:
            _doubts[_key(holder.model)] = why
        else:
            _doubts.pop(_key(holder.model), None)


def _key(model: Any) -> Any:
    return next(iter(model.values())) if isinstance(model, Mapping) else model
