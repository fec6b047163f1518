"""Drives a loader with recording tensors."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .coverage import gaps, is_weight
from .guard import Taint, guarded
from .memory import LiveMemories, Modules, TraceError, live_tensors, model_signature
from .model_state import ModelState
from .overlap import settle
from .plan import PlacedSlice, merge_slices, placed_rects
from .recording import Recorder, RecordingTensor, TracedTensor, UnsupportedError, Write
from .result import LoaderTrace, Reload
from .specs import Spec, SpecLike, read_specs

#: Takes (HF name, tensor) pairs, all or some, any number of times. What it returns is not looked at.
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


def trace_loader(
    modules: Modules, load_weights: LoadWeights, specs: Iterable[SpecLike], *, device: torch.device | str = "cpu"
) -> LoaderTrace:
    """Where `load_weights` puts each of the tensors in `specs`, found without moving a byte.

    `modules`: the model that is loaded, or several by name (their parameters' names are prefixed by it). Its memory
    keeps its bytes, its attributes are put back where the loader changed them. `device`: where the tensors claim to be;
    loaders get theirs from the host.

    The loader is called with as many tensors as it takes at a time. Where it raises, the tensor at hand becomes
    "reload" and the loader is called again with the rest; if it cannot be told which that was, one by one.

    TraceError: the model has no memory, or the loader fails before it takes a tensor. For a spec that no layout has,
    what :func:`read_specs` raises. Not thread-safe: nothing else may use or load the model meanwhile.
    """
    read = read_specs(specs)
    run = _Run(modules, load_weights, read, torch.device(device), careful=False)
    run.load()
    if run.state.restore():
        # Some tensor was put in a parameter's place rather than copied there: looked for after each tensor.
        run = _Run(modules, load_weights, read, torch.device(device), careful=True)
        run.load()
        run.state.restore()
    return run.result()


class _Feed:
    """The iterable that a loader gets."""

    def __init__(self, run: _Run, queue: deque[TracedTensor]) -> None:
        self.run = run
        self.queue = queue
        self.sent: list[TracedTensor] = []

    def __iter__(self) -> Iterator[tuple[str, RecordingTensor]]:
        return self

    def __next__(self) -> tuple[str, RecordingTensor]:
        self.run.settle_last(self.sent)
        if not self.queue:
            raise StopIteration
        source = self.queue.popleft()
        self.sent.append(source)
        return source.spec.name, source.hand_out(self.run.recorder)


class _Run:
    """One pass over all tensors. `careful`: looks for exchanged parameters after each of them."""

    def __init__(
        self, modules: Modules, load_weights: LoadWeights, specs: list[Spec], device: torch.device, *, careful: bool
    ) -> None:
        self.modules = modules
        self.load_weights = load_weights
        self.careful = careful
        self.tensors = list(live_tensors(modules))
        self.live = LiveMemories(self.tensors)
        self.recorder = Recorder(self.live, device)
        self.taint = Taint(self.recorder)
        self.recorder.taint = self.taint.mark
        self.state = ModelState(modules, self.tensors, self.taint)
        self.sources = [TracedTensor(spec, index) for index, spec in enumerate(specs)]

    def load(self) -> None:
        queue = deque(self.sources)
        alone: list[TracedTensor] = []  # to be sent one by one
        with torch.no_grad():
            while queue:
                before = len(queue)
                alone.extend(self._call(queue))
                if len(queue) == before:
                    break  # the loader does not want the rest
            for source in alone:
                self._call(deque([source]))
        self.recorder.replaced |= self.state.fail_derived()
        if any(source.alive() for source in self.sources):
            gc.collect()  # frames of errors
        for source in self.sources:
            if source.alive():
                source.fail("the loader keeps it")
                source.unseen = True

    def settle_last(self, sent: list[TracedTensor]) -> None:
        if self.careful and sent:
            for live, sources in self.state.restore():
                for source in sources or (sent[-1],):
                    source.fail(f"it takes the place of {live.name}")
                    source.modules.add(live.module)
                self.recorder.replaced.add(live.name)

    def _call(self, queue: deque[TracedTensor]) -> list[TracedTensor]:
        """Lets the loader take what it wants. Returns tensors of which one, but not which one, made it fail."""
        feed = _Feed(self, queue)
        try:
            with guarded(self.recorder, self.taint):
                self.load_weights(feed)
        except Exception as error:
            if not feed.sent:
                raise TraceError(f"the loader fails before it takes a tensor: {error!r}") from error
            return self._blame(feed, error)
        finally:
            self.settle_last(feed.sent)
        return []

    def _blame(self, feed: _Feed, error: Exception) -> list[TracedTensor]:
        named = _sources_named(error)
        kept = [source for source in feed.sent if source.alive()]
        for source in kept:
            source.kept = True
        if named:
            # Its reason is noted. What the loader had put aside is sent again, if that cannot go on for ever.
            again = [source for source in kept if not source.stored and source not in named]
            if len(again) == len(feed.sent):
                return again
            feed.queue.extendleft(reversed(again))
            return []
        if len(kept) > 1:
            return kept
        guilty = kept[0] if kept else feed.sent[-1]
        guilty.fail(f"{type(error).__name__}: {error}")
        guilty.unseen = True
        guilty.modules |= self._modules_of(error)
        return []

    def _modules_of(self, error: Exception) -> set[str]:
        """Owners of what the innermost frame with live tensors had at hand when the error was raised."""
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        return self.recorder.modules_in(frames[-1] if frames else None)

    def result(self) -> LoaderTrace:
        copies, replaced = settle(self.recorder.writes)
        by_source: dict[int, list[Write]] = {}
        for write in copies:
            assert write.source is not None
            by_source.setdefault(write.source.index, []).append(write)
        placed: dict[str, tuple[PlacedSlice, ...]] = {}
        reload: dict[str, Reload] = {}
        unplaced: dict[str, str] = {}
        owners: dict[str, frozenset[str]] = {}
        memories: dict[int, int] = {}
        unseen: set[str] = set()
        for source in self.sources:
            name = source.spec.name
            writes = by_source.get(source.index, [])
            if source.kept and not source.stored:
                source.fail("the loader had put it aside when it failed")
                source.unseen = True
            if source.failures and (source.modules or source.unseen):
                reason = source.failures[0]
                reload[name] = Reload(reason, tuple(sorted(source.modules | self._siblings(source))))
                if source.unseen:
                    unseen.update(reload[name].modules)
            elif source.failures:
                unplaced[name] = f"the loader stores nothing of it ({source.failures[0]})"
            elif name in replaced:
                unplaced[name] = f"{replaced[name]} is loaded over it"
            elif not writes:
                unplaced[name] = "the loader stores nothing of it"
            else:
                placed[name] = tuple(merge_slices(_slices(source.spec, writes, memories)))
                owners[name] = frozenset(source.modules)
        used = tuple(self.live.memories[index] for index in memories)
        return LoaderTrace(
            specs=tuple(s.spec for s in self.sources),
            memories=used,
            placed=placed,
            reload=reload,
            unplaced=unplaced,
            modules=owners,
            weights=tuple(live.name for live in self.tensors if is_weight(live)),
            gaps=gaps(self.tensors, self.live, self.recorder.writes, self.recorder.replaced, unseen),
            _signature=model_signature(self.modules),
        )

    def _siblings(self, source: TracedTensor) -> set[str]:
        """Modules of the tensors of the same HF module: a scale goes where its weight goes."""
        if self._by_prefix is None:
            self._by_prefix = {}
            for other in self.sources:
                prefix = other.spec.name.rpartition(".")[0]
                self._by_prefix.setdefault(prefix, set()).update(other.modules)
        return self._by_prefix[source.spec.name.rpartition(".")[0]]

    _by_prefix: dict[str, set[str]] | None = None


def _sources_named(error: BaseException | None) -> set[TracedTensor]:
    """The tensors of the recorder's own error, if that is what the loader failed of."""
    while error is not None:
        if isinstance(error, UnsupportedError):
            return set(error.sources)
        error = error.__cause__ or error.__context__
    return set()


def _slices(spec: Spec, writes: list[Write], memories: dict[int, int]) -> list[PlacedSlice]:
    """`memories` numbers the memories in the order of their first use."""
    columns = spec.rows_columns[1]
    slices: list[PlacedSlice] = []
    for write in writes:
        assert write.region is not None
        start, shape, strides = write.region
        memory = memories.setdefault(write.memory, len(memories))
        for rect, offset, row_stride, col_stride in placed_rects(start, shape, strides, write.strides, columns):
            slices.append(PlacedSlice(spec.name, rect, memory, write.offset + offset, row_stride, col_stride))
    return slices
