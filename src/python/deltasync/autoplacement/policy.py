"""The rule of whole leaf modules: a module is loaded by the engine with all of its tensors, or with none."""

from __future__ import annotations

from collections.abc import Collection

from .result import LoaderTrace


def whole_leaves(trace: LoaderTrace, reload_modules: Collection[str] = ()) -> LoaderTrace:
    """Makes "reload" what shares a module with a tensor that is, and so on through tensors in several modules.

    Engines that reload a module in part leave the rest of it undefined (vLLM's layerwise reload). `reload_modules`
    names modules that the caller wants loaded by the engine, for example those from which it derives other tensors.
    Where it is not known which modules a tensor reaches, nothing stays placed: the safe end.
    """
    tensors: dict[str, list[str]] = {}
    for name, modules in trace.modules.items():
        for module in modules:
            tensors.setdefault(module, []).append(name)
    reasons: dict[str, str] = {}
    todo: list[tuple[str, str]] = [(module, "the caller's choice") for module in reload_modules]
    for name, reload in trace.reload.items():
        if not reload.modules:
            why = f"it is not known which modules {name} reaches ({reload.reason})"
            return trace.demote(dict.fromkeys(trace.placed, why))
        todo.extend((module, name) for module in reload.modules)
    done: set[str] = set()
    while todo:
        module, cause = todo.pop()
        if module in done:
            continue
        done.add(module)
        for name in tensors.get(module, ()):
            reasons.setdefault(name, f"in one module with what is reloaded: {module} ({cause})")
            todo.extend((other, name) for other in trace.modules[name])
    return trace.demote(reasons)
