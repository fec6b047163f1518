"""A plan carried out as its JSON says it."""

from __future__ import annotations

from typing import Any

import numpy as np


def with_numpy(plan: dict[str, Any], pieces: list[list[Any]]) -> dict[str, Any]:
    """All tensors but the constants, of the pieces that each rank has; each element at most once."""
    width = {"F32": np.float32}
    out = [np.full(int(np.prod(t["shape"])), np.nan, width[t["dtype"]]) for t in plan["tensors"]]
    for copy in plan["copies"]:

        def side(memory: Any, which: str, copy: dict[str, Any] = copy) -> Any:
            steps = [stride * memory.itemsize for stride in copy[f"{which}_strides"]]
            return np.lib.stride_tricks.as_strided(memory[copy[f"{which}_offset"] :], copy["counts"], steps)

        target = side(out[copy["tensor"]], "target")
        assert np.isnan(target).all(), "written twice"
        target[...] = side(pieces[copy["rank"]][copy["piece"]].reshape(-1), "source") + copy["add"]
    made = zip(plan["tensors"], out, strict=True)
    return {t["name"]: m.reshape(t["shape"]) for i, (t, m) in enumerate(made) if i not in plan["constants"]}
