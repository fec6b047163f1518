"""Whole tensors out of what the ranks have of them, a bucket at a time, while the next one travels."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

from . import _native
from ._carriers import Elements, ToAll, ToHome
from ._gather_plan import Bucket, Whole
from ._group import Group
from .errors import Aborted, InternalError

#: So many buckets fit in the bytes that buckets take together.
BUCKETS_ALIVE = 2
#: Of a tensor that the timeline shows by itself.
_STAGE_BYTES = 1 << 20


class _Running:
    """A bucket that is on its way."""

    def __init__(self, bucket: Bucket, carrier: ToAll | ToHome) -> None:
        self.bucket, self.carrier = bucket, carrier
        self.works: list[Any] = []
        self.stage: Any = None


class Gathering:
    """One export. All ranks of the group make it alike, and take all tensors, each in its own time.

    Before the elements of a bucket are sent the ranks say whether they are still in it: an error on one is one on all.
    Buckets begin in order, as soon as those that are alive leave room. One that needs more begins when none is.
    """

    def __init__(
        self,
        group: Group,
        buckets: Iterable[Bucket],
        carrier: Callable[[Bucket], ToAll | ToHome],
        elements: Callable[[], Elements],
        room: int,
        left: Callable[[], float],
    ) -> None:
        """`room`: bytes that buckets take together. `left`: how long a wait may take from now."""
        self._owner_pid = os.getpid()
        self._group, self._carrier = group, carrier
        self._waiting = deque(buckets)
        self._make_elements = elements
        self._elements: Elements | None = None
        self._room, self._left = room, left
        #: For the timeline.
        self.version: Any = None
        self._running: deque[_Running] = deque()
        #: Bytes that what was begun may need, and that there are.
        self._reserved, self._temporary = 0, 0
        self._begun = 0
        self._over = False
        #: Of this rank: seconds that it waited for others' elements, and that it packed and made tensors; bytes.
        self.gather_s, self.convert_s, self.temporary_bytes_max = 0.0, 0.0, 0
        if group.size > 1:
            group.stop = self.stop

    def tensors(self) -> Generator[tuple[int, Any], None, None]:
        """Index in the layout, and the tensor. The one before is taken for gone when the next but one is asked for."""
        try:
            yield from self._all()
        except GeneratorExit:
            self.stop()
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def stop(self) -> None:
        """As fail(), if there are more tensors."""
        self.fail(Aborted("it took no more tensors", "each rank takes all of them"))

    def fail(self, error: BaseException) -> None:
        """This rank takes part no more: nor do the others, which get this error. Nothing, if they know. Waits for
        nobody."""
        if os.getpid() != self._owner_pid:
            return  # a forked child has the connections of its parent, which goes on
        if not self._over and self._group.size > 1:
            self._end()
            self._running.clear()
            if self._group.out_of_step:
                return
            with contextlib.suppress(RuntimeError):  # the process group may be gone
                self._group.any_failed(True)
                self._group.errors(error)

    def _all(self) -> Generator[tuple[int, Any], None, None]:
        self._elements = self._make_elements()
        kept = lent = 0  # bytes that the caller may still have: of the bucket before, of the tensor before
        while self._waiting or self._running:
            if not self._running:
                self._begin(self._waiting.popleft())
            self._begin_what_fits()
            here = self._running.popleft()
            self._receive(here)
            mine = [whole for whole in here.bucket.wholes if here.carrier.is_here(whole)]
            before, own = kept + lent, here.carrier.kept_bytes
            for number, whole in enumerate(mine):
                made, needed = self._made(here.carrier, whole)
                last = number == len(mine) - 1
                if last:
                    self._drop_staged(here)
                if done := last and not self._running and not self._waiting:
                    self._finish()  # before the last is given: who has all may not ask for more
                yield from made
                if done:
                    return
                if self._over:
                    raise Aborted("another call of the plan has ended this export", "take all tensors before it")
                made.clear()
                self._use(-kept - lent)
                self._reserved -= before
                kept, lent, before = 0, needed, 0
                self._begin_what_fits()
            if mine:
                kept = own
                self._reserved += kept + lent
            else:
                self._drop_staged(here)
            self._reserved -= here.bucket.cost
        self._finish()

    def _finish(self) -> None:
        self._elements = None
        self._agree()
        self._end()

    def _end(self) -> None:
        self._over = True
        self._group.stop = None

    def _begin_what_fits(self) -> None:
        while self._waiting and self._reserved + self._waiting[0].cost <= self._room:
            self._begin(self._waiting.popleft())

    def _begin(self, bucket: Bucket) -> None:
        assert self._elements is not None
        running = _Running(bucket, self._carrier(bucket))
        carrier = running.carrier
        self._reserved += bucket.cost
        self._use(carrier.kept_bytes + carrier.staged_bytes)
        began = time.monotonic()
        stage = self._stage("pack")
        carrier.pack(self._elements)
        self._note_extra(self._elements)
        self._elements.end()
        stage.end(carrier.kept_bytes + carrier.staged_bytes)
        packed = time.monotonic()
        self._agree()
        running.stage = self._stage("gather", self._begun % BUCKETS_ALIVE)
        running.works = carrier.send()
        self._begun += 1
        self._running.append(running)
        self.convert_s += packed - began
        self.gather_s += time.monotonic() - packed

    def _receive(self, here: _Running) -> None:
        began = time.monotonic()
        for work in here.works:
            self._group.wait(work, "the elements of other ranks", self._left())
        here.works.clear()
        here.stage.end(here.carrier.kept_bytes + here.carrier.staged_bytes)
        self.gather_s += time.monotonic() - began

    def _made(self, carrier: ToAll | ToHome, whole: Whole) -> tuple[list[tuple[int, Any]], int]:
        """The tensors that a whole one is or becomes, and bytes that they take beyond the bucket's."""
        assert self._elements is not None
        began = time.monotonic()
        stage = self._stage("convert") if whole.nbytes >= _STAGE_BYTES else None
        needed = whole.made_bytes + carrier.making_bytes(whole)
        self._use(needed)
        tensor = carrier.whole(whole, self._elements)
        self._note_extra(self._elements)
        self._elements.end()
        made = [(whole.index, tensor)]
        if whole.form is not None:
            made = list(zip(whole.form.outputs, whole.form.make(tensor), strict=True))
        if stage is not None:
            stage.end(whole.nbytes)
        self.convert_s += time.monotonic() - began
        return made, needed

    def _drop_staged(self, here: _Running) -> None:
        self._use(-here.carrier.staged_bytes)
        here.carrier.drop_staged()

    def _use(self, nbytes: int) -> None:
        self._temporary += nbytes
        self.temporary_bytes_max = max(self.temporary_bytes_max, self._temporary)

    def _note_extra(self, elements: Elements) -> None:
        self.temporary_bytes_max = max(self.temporary_bytes_max, self._temporary + elements.extra_bytes)
        elements.extra_bytes = 0

    def _stage(self, name: str, line: int | None = None) -> Any:
        return _native.Stage("export" if line is None else f"gather {line}", name, self.version)

    def _agree(self) -> None:
        """Whether all ranks go on; else what went wrong on one of them."""
        if self._group.size == 1:
            return
        work, failed = self._group.any_failed(False)
        self._group.wait(work, "the other ranks' next bucket", self._left())
        if int(failed):
            work, errors = self._group.errors(None)
            self._group.wait(work, "what went wrong", self._left())
            self._end()
            raise self._group.first_error(errors) or InternalError("a rank failed without an error")
