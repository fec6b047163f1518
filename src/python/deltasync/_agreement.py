"""What the ranks of a group on several nodes agree on in each call: all of them succeed, or all fail."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ._deadlines import left
from ._rank_store import RankGroup, RankStore
from .coverage import some
from .errors import DeadlinePassed, Error, VersionConflict, from_code

#: Of one value; TCPStore takes 8 MiB.
_VALUE_BYTES = 4 << 20
#: Between two looks at the store.
_PAUSE_MAX_S = 0.1
#: What a rank adds when it comes to a step: one more, and which.
_CAME = 1 << 32
_OK = b"ok"
_ERROR_CHARACTERS = 2000


def common_store() -> Any:
    """What all ranks of the job have in common."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store  # a connection of its own: a wait holds nobody up


#: By which ranks come together, and for what: the job's store, and how.
_together: dict[tuple[str, ...], tuple[Any, Agreement]] = {}


@contextlib.contextmanager
def all_together(ranks: Sequence[int], rank: int, what: str, timeout: float) -> Iterator[None]:
    """All of them (numbers in the job; this is ``ranks[rank]``) come to its end: before collectives, since one that is
    late for the others would meet them in a later one. DeadlinePassed names the ranks that did not come. What is raised
    in it on one rank is an error on all."""
    if len(ranks) == 1:
        yield
        return
    end = time.monotonic() + timeout
    agreement = _meeting(ranks, rank, what)
    agreement.begin(["together"])
    agreement.pass_over_missed()
    try:
        yield
        agreement.agree(what, end, merge=lambda _: b"")
    except BaseException as error:
        agreement.fail(error)
        if isinstance(error, DeadlinePassed):
            raise DeadlinePassed(error.message, "all ranks make each call; the next one is of all again") from error
        raise


def _meeting(ranks: Sequence[int], rank: int, what: str) -> Agreement:
    """One for all calls, which it counts."""
    from torch.distributed.distributed_c10d import _get_default_store

    key, store = (what, *map(str, ranks)), _get_default_store()
    if key not in _together or _together[key][0] is not store:  # of an earlier default group
        name = f"{what} {zlib.crc32(repr(list(ranks)).encode())}"
        _together[key] = store, Agreement(common_store(), rank, len(ranks), name, ranks)
    return _together[key][1]


class Agreement:
    """Steps of calls that all ranks make in the same order, through the store of torch.distributed.

    Each step has one outcome: the first error, or success once all ranks have come. A collective would
    not do: one that a rank has left at its deadline leaves the ranks out of step.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, called: Sequence[int] = ()) -> None:
        """`store`: of torch.distributed, the same on all ranks (common_store()). `name`: of this agreement there.
        `called`: what messages call its ranks, if not 0, 1, ..."""
        self._store = RankStore(RankGroup(store, rank, size, name=name))
        self._store.begin()
        weakref.finalize(self, self._store.close)
        self._rank, self._size = rank, size
        self._called = list(called) or list(range(size))
        #: How many there have been, this one too.
        self.call = 0
        self._steps: list[str] = []  # of this call, those that are not decided
        self._put_here: list[str] = []  # keys of this call
        self._done: list[list[str]] = []  # keys of earlier calls

    def begin(self, steps: Sequence[str]) -> None:
        """A call of these steps. require_same() may follow; then agree() for each, or fail()."""
        self.call += 1
        self._steps = list(steps)
        if not steps:
            return
        self._done.append(self._put_here)
        self._put_here = []
        if self._rank == 0:
            self._put_here.append(self._key("about"))
            self._put_here += [self._key(step, what) for step in steps for what in ("count", "outcome")]

    def require_same(self, about: str) -> None:
        """VersionConflict if another rank's call is about another thing. A call that the others have given up because
        this rank did not come to it, and that was about another thing, is passed over."""
        while (others := self._decide(self._key("about"), about.encode())) != about.encode() and self._was_missed():
            self.begin(self._steps)
        if others != about.encode():
            raise VersionConflict(
                f"process_group: rank {self._rank} asks for {about}, another rank for {others.decode()}"
            )

    def pass_over_missed(self) -> None:
        """Calls that the others have given up because this rank did not come to them: it is in the next one then."""
        while self._was_missed():
            self.begin(self._steps)

    def go_on_to(self, call: int) -> None:
        """Where another agreement of the same calls is, which has passed some over."""
        while self.call < call:
            self.begin(self._steps)

    @property
    def next_step(self) -> str:
        return self._steps[0]

    def agree(
        self, what: str, end: float, mine: bytes = b"", merge: Callable[[list[bytes]], bytes] | None = None
    ) -> bytes:
        """The next step: what `merge` makes of what all ranks say, on all of them; the last to come calls it. Raises
        what it raises, or the first error of any rank. DeadlinePassed if not all have come by `end`; on all ranks."""
        step = self._steps[0]
        if merge is not None:
            self._put(self._key(step, str(self._rank)), mine)
        if self._store.add(self._key(step, "count"), _CAME + self._called[self._rank]) // _CAME == self._size:
            try:
                if merge is not None:
                    said = [self._get(self._key(step, str(rank))) for rank in range(self._size)]
                    self._put(self._key(step, "made"), merge(said))
            except BaseException as error:
                self._decide(self._key(step, "outcome"), _said(error, ""))
                raise
            outcome = self._decide(self._key(step, "outcome"), _OK)
        else:
            outcome = self._wait(step, what, end, merge is not None)
        if outcome != _OK:
            raise _raised(outcome)
        made = self._get(self._key(step, "made")) if merge is not None else b""
        self._steps.pop(0)
        if not self._steps:
            self._forget()
        return made

    def fail(self, error: BaseException) -> bool:
        """This rank does no further step of the call. True if that comes too late, since all steps are agreed on."""
        why = _said(error, f"rank {self._rank} failed: ")
        while self._steps:
            try:
                outcome = self._decide(self._key(self._steps[0], "outcome"), why)
            except Error:  # the store is gone, or stands still: `error` says what matters
                outcome = why
            if outcome != _OK:
                self._steps.clear()
                return False
            self._steps.pop(0)
        return True

    def _key(self, *words: str) -> str:
        return "/".join((str(self.call), *words))

    def _decide(self, key: str, value: bytes) -> bytes:
        """What counts: the first value."""
        return self._store.compare_set(key, "", value)

    def _wait(self, step: str, what: str, end: float, named: bool) -> bytes:
        key = self._key(step, "outcome")
        began = time.monotonic()
        while not self._store.check([key]):  # its wait() would hold up signals, and log that it ends
            if left(end) == 0:
                return self._decide(key, _said(self._late(step, what, named=named), ""))
            time.sleep(min((time.monotonic() - began) / 8 + 0.0005, _PAUSE_MAX_S, left(end)))
        return self._store.get(key)

    def _late(self, step: str, what: str, *, named: bool) -> DeadlinePassed:
        """`named`: each rank that came has said something."""
        come, sum_of_ranks = divmod(self._store.add(self._key(step, "count"), 0), _CAME)
        missing = f", without rank {sum(self._called) - sum_of_ranks}" if come == self._size - 1 else ""
        if named and not missing:
            away = [rank for rank in range(self._size) if not self._store.check([self._key(step, str(rank))])]
            missing = f", without ranks {some([str(self._called[rank]) for rank in away])}"
        return DeadlinePassed(
            f"process_group: {come} of {self._size} ranks came by the deadline{missing}: {what}",
            "all ranks make each call; one that may miss some says version=, by which it finds the others again",
        )

    def _was_missed(self) -> bool:
        key = self._key(self._steps[0], "outcome")
        if not self._store.check([key]):
            return False
        outcome = self._store.get(key)
        return outcome != _OK and json.loads(outcome)["code"] == DeadlinePassed.code

    def _put(self, key: str, value: bytes) -> None:
        parts = [value[at : at + _VALUE_BYTES] for at in range(0, len(value), _VALUE_BYTES)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/{number}", part)
            self._put_here.append(f"{key}/{number}")
        self._store.set(key, str(len(parts)))
        self._put_here.append(key)

    def _get(self, key: str) -> bytes:
        return b"".join(self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key))))

    def _forget(self) -> None:
        """Every rank has come to this call, and so has read what it wanted of those before."""
        for keys in self._done:
            for key in keys:
                self._store.delete(key)
        self._done.clear()


def _said(error: BaseException, before: str) -> bytes:
    known = isinstance(error, Error)
    text = error.message if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    told = {
        "code": error.code if isinstance(error, Error) else "aborted",
        "message": f"{before}{text}"[:_ERROR_CHARACTERS],
        "remedy": error.remedy if known and isinstance(error, Error) else None,
    }
    return json.dumps(told).encode()


def _raised(outcome: bytes) -> Error:
    told = json.loads(outcome)
    return from_code(told["code"], told["message"], told["remedy"])
