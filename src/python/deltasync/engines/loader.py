"""What deltasync asks of an engine's loader."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

Weights = Iterable[tuple[str, Any]]


class EngineLoader(Protocol):
    """One model's, of one rank. Every call is made on the thread that runs the engine's steps."""

    def load_traced(self, weights: Weights) -> Any:
        """The model's own ``load_weights``, any part of the checkpoint, any number of times, completeness checks off.
        It is run with tensors that have no memory; see docs/guides/autoplacement.md."""

    def reload(self, weights: Weights) -> None:
        """Loads (HF name, host tensor) pairs as the engine does with a checkpoint, processing after loading included.
        Whole leaf modules come; modules of which nothing comes keep their bytes, and all keep their addresses."""

    def reload_modules(self) -> Collection[str]:
        """Names of modules that are always to be loaded so, such as those from which the engine derives others."""

    def refusal(self) -> str | None:
        """Why the model cannot be written now (and what to do about it), or None."""

    def synchronize(self) -> None:
        """Waits until all that was given to the model's device is done."""


class PlainLoader:
    """A model whose ``load_weights`` copies into its parameters, and nothing happens to them afterwards."""

    def __init__(self, load_weights: Callable[[Weights], Any], synchronize: Callable[[], None] | None = None) -> None:
        self._load_weights = load_weights
        self._synchronize = synchronize

    def load_traced(self, weights: Weights) -> Any:
        return self._load_weights(weights)

    def reload(self, weights: Weights) -> None:
        self._load_weights(weights)

    def reload_modules(self) -> Collection[str]:
        return ()

    def refusal(self) -> str | None:
        return None

    def synchronize(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
